"""scripts/report.py on run directories made by hand: what counts, what it shows and refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kempner import history

ROOT = Path(__file__).parent.parent.parent
BEGAN = 1_700_000_000.0


def report(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/report.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=env or None, timeout=60)


def step_line(step: int, attempt: int = 0, loss: float | None = 2.0, **more: object) -> str:
    line = {
        "step": step,
        "time": BEGAN + 100 * attempt + step,
        "attempt": attempt,
        "loss": loss,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "tokens": step * 1000,
        "samples": step * 10,
        "tokens_per_s": 5000.0,
        "step_time": 0.2,
        "data_time": 0.02,
        "compute_time": 0.16,
        "checkpoint_time": 0.01,
        "eval_time": 0.01,
        "mfu": None,
        "memory_gib": 0.5,
        "skipped": 0,
    }
    return json.dumps(line | more) + "\n"


def event(kind: str, attempt: int, step: int, at: float, **more: object) -> str:
    head = {"event": kind, "attempt": attempt, "time": BEGAN + at, "job": None, "step": step}
    return json.dumps(head | more) + "\n"


def start(attempt: int, step: int, at: float, **more: object) -> str:
    return event("start", attempt, step, at, nodes=["n1", "n2"], world_size=4, **more)


def write_run(path: Path, metrics: str, attempts: str = "", **status: object) -> Path:
    path.mkdir()
    (path / "metrics.jsonl").write_text(metrics)
    (path / "attempts.jsonl").write_text(attempts or start(0, 0, 0))
    known = {"state": "done", "step": 30, "max_steps": 30, "attempt": 0}
    (path / "status.json").write_text(json.dumps(known | status))
    return path


@pytest.fixture
def resumed(tmp_path: Path) -> Path:
    """Attempt 0 gets to step 40 and is killed, attempt 1 goes on from 20 and is done at 50."""
    lines = [step_line(step, loss=9.0 - step / 10) for step in (10, 20, 30, 40)]
    lines += ['{"step": 41, "lo\n']  # torn by the kill
    lines += [json.dumps({"step": 30, "time": BEGAN, "attempt": 1, "val_loss": 3.25}) + "\n"]
    lines += [step_line(step, 1, loss=4.0 - step / 100) for step in (30, 40, 50)]
    events = start(0, 0, 0) + start(1, 20, 100)
    events += event("end", 1, 50, 160, state="done", reason="the last step is done")
    return write_run(tmp_path / "resumed", "".join(lines), events, max_steps=50, attempt=1)


def rows(stdout: str) -> dict[str, str]:
    """The table of one run as a dict."""
    lines = stdout.split("\n\n")[0].splitlines()
    return dict(re.split("  +", line.strip(), maxsplit=1) for line in lines)


def test_a_later_attempt_supersedes(resumed: Path) -> None:
    run = history.load(resumed)
    assert [(line["step"], line["attempt"]) for line in run.losses] == [
        (10, 0), (20, 0), (30, 1), (40, 1), (50, 1),
    ]  # fmt: skip


def test_without_a_record_of_attempts_the_later_line_of_a_step_stands(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", step_line(10) + step_line(20) + step_line(20, loss=1.5))
    (path / "attempts.jsonl").unlink()
    assert [line["loss"] for line in history.load(path).losses] == [2.0, 1.5]
    assert report(path).returncode == 0


def test_an_attempt_that_went_back_itself(tmp_path: Path) -> None:
    """After too many steps that were not finite."""
    lines = "".join(
        step_line(step, loss=loss) for step, loss in ((10, 2.0), (20, None), (30, None))
    )
    path = write_run(tmp_path / "run", lines + step_line(20, loss=1.5))
    assert [line["loss"] for line in history.load(path).losses] == [2.0, 1.5]


def test_steps_that_a_resume_has_undone_do_not_count_before_they_are_done_again(
    tmp_path: Path,
) -> None:
    metrics = "".join(step_line(step) for step in (10, 20, 30, 40))
    path = write_run(tmp_path / "run", metrics, start(0, 0, 0) + start(1, 20, 100))
    run = history.load(path)
    assert [line["step"] for line in run.losses] == [10, 20]
    assert run.step == 20
    assert [line["step"] for line in run.lines] == [10, 20, 30, 40]  # what was lost is there


def test_the_table(resumed: Path) -> None:
    done = report(resumed)
    assert done.returncode == 0, done.stderr
    table = rows(done.stdout)
    assert table["state"] == "done"
    assert table["step"] == "50 of 50"
    assert table["loss, first"] == "8.0000 at step 10"
    assert table["loss, last"] == table["loss, best"] == "3.5000 at step 50"
    assert table["validation, best"] == "3.2500 at step 30"
    assert table["tokens/s, median"] == "5,000"
    assert table["checkpoint"] == "5.0%"
    assert table["compute"] == "80.0%"
    assert table["wall time"] == "2 min 40 s"
    assert table["between attempts"] == "1 min 0 s"  # from the last line, at 40 s, to the start
    lost, last = done.stdout.split("end\n")[1].splitlines()[:2]
    assert "0 to 40" in lost and "killed without a word" in lost
    assert "20 to 50" in last and "done: the last step is done" in last


def test_the_first_rank_that_crashed_has_the_cause(tmp_path: Path) -> None:
    events = start(0, 0, 0)
    events += event("end", 0, 12, 50, state="crashed", reason="rank 3: division by zero")
    events += event("end", 0, 12, 51, state="crashed", reason="rank 0: connection closed")
    events += event("end", 1, 0, 60, state="crashed", reason="rank 0: no such file")
    path = write_run(tmp_path / "run", step_line(10), events, state="running")
    done = report(path)
    assert rows(done.stdout)["state"] == "crashed"
    assert "division by zero" in done.stdout and "no such file" in done.stdout
    assert "connection closed" not in done.stdout


def test_a_run_that_still_goes(tmp_path: Path) -> None:
    line = step_line(10, time=time.time() - 7)
    done = report(write_run(tmp_path / "run", line, state="running", max_steps=9000))
    assert rows(done.stdout)["state"].startswith("running, last line 7.")
    assert rows(done.stdout)["step"] == "10 of 9,000"
    assert "0 to 10" in done.stdout and done.stdout.count("running") == 2


def test_losses_that_were_not_finite(tmp_path: Path) -> None:
    lines = step_line(10, loss=None, skipped=1) + step_line(20) + step_line(30, loss=None)
    lines += step_line(40, 1, loss=3.0, skipped=2)  # a new attempt counts from 0
    done = report(write_run(tmp_path / "run", lines, start(0, 0, 0) + start(1, 30, 100)))
    assert done.returncode == 0, done.stderr
    assert rows(done.stdout)["loss, first"] == "2.0000 at step 20"
    assert rows(done.stdout)["non-finite steps"] == "3"


def test_the_picture_of_one_run_lies_in_it(resumed: Path) -> None:
    done = report(resumed)
    assert f"picture: {resumed / 'report.png'}" in done.stdout
    assert (resumed / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_several_runs(resumed: Path, tmp_path: Path) -> None:
    many = "".join(step_line(step, loss=9 / step) for step in range(1, 400))
    other = write_run(tmp_path / "other", many)
    out = tmp_path / "both.svg"  # it keeps the words as comments
    assert report(resumed, other, "--out", out).returncode == 0
    words = out.read_text()
    for label in ("resumed", "other", "start of an attempt", "validation"):
        assert f"<!-- {label} -->" in words, label
    for unit in ("loss (nats per token)", "throughput (tokens/s)", "learning rate", "step"):
        assert f"<!-- {unit} -->" in words, unit


def test_without_matplotlib_the_table_and_how_to_get_it(resumed: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    missing.mkdir()
    text = "raise ModuleNotFoundError(\"No module named 'matplotlib'\", name='matplotlib')\n"
    (missing / "matplotlib.py").write_text(text)
    done = report(resumed, PYTHONPATH=f"{missing}:{ROOT / 'src'}")
    assert done.returncode == 0, done.stderr
    assert rows(done.stdout)["step"] == "50 of 50"
    assert "pip install -e '.[plot]'" in done.stdout
    assert not (resumed / "report.png").exists()


def test_bad_input_all_at_once(resumed: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    fresh = write_run(tmp_path / "fresh", "", state="running")
    done = report(tmp_path / "gone", resumed, tmp_path / "empty", fresh)
    assert done.returncode == 2 and done.stdout == ""
    gone, empty, early = done.stderr.splitlines()
    assert "gone: no such directory" in gone
    assert "empty: not a run" in empty
    assert "fresh: no step is recorded yet" in early


@pytest.mark.parametrize(
    ("out", "words"),
    [("curve.jpeg", "must end in .png"), ("nowhere/curve.png", "No such file or directory")],
)
def test_a_picture_that_cannot_be_written(
    resumed: Path, tmp_path: Path, out: str, words: str
) -> None:
    done = report(resumed, "--out", tmp_path / out)
    assert done.returncode == 2
    assert words in done.stderr and "Traceback" not in done.stderr


def test_the_history_needs_no_torch(resumed: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kempner import history;"
        f"history.load(Path({str(resumed)!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
