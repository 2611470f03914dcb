"""scripts/report.py on run directories made by hand: what counts, what it shows and refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kempner.jobs import slurm
from kempner.jobs.records import judge
from kempner.jobs.records.facts import run_facts
from kempner.jobs.records.nodes import nodes_of
from kempner.jobs.records.run_history import load_history, runs_in
from kempner.jobs.report import summary
from kempner.jobs.system.process import birth_ticks
from kempner.jobs.this_job import host_name
from tests.jobs.unit.test_state import STATUS
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parent.parent.parent.parent
BEGAN = 1_700_000_000.0


def report(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/report.py"), *map(str, args)]
    env = {**os.environ, "COLUMNS": "160", **env}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=LIMIT_S)


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
        "step_time": 1.0,
        "data_time": 0.1,
        "compute_time": 0.8,
        "checkpoint_time": 0.05,
        "eval_time": 0.05,
        "mfu": None,
        "memory_gib": 0.5,
        "skipped": 0,
    }
    return json.dumps(line | more) + "\n"


def event(name: str, attempt: int, step: int, at: float, **more: object) -> str:
    head = {"event": name, "attempt": attempt, "time": BEGAN + at, "job": None, "step": step}
    return json.dumps(head | more) + "\n"


def start(attempt: int, step: int, at: float, **more: object) -> str:
    return event("start", attempt, step, at, nodes=["n1", "n2"], world_size=4, **more)


def hold_lock(run: Path) -> None:
    """As a trainer does that lives as long as this process."""
    holder = {"host": host_name(), "pid": os.getpid(), "born": birth_ticks(os.getpid())}
    (run / "lock").write_text(json.dumps(holder))


def write_run(path: Path, metrics: str, attempts: str = "", **status: object) -> Path:
    path.mkdir()
    (path / "metrics.jsonl").write_text(metrics)
    (path / "attempts.jsonl").write_text(attempts or start(0, 0, 0))
    known = {"state": "done", "step": 30, "max_steps": 30, "attempt": 0}
    (path / "status.json").write_text(json.dumps(known | status))
    return path


@pytest.fixture
def resumed(tmp_path: Path) -> Path:
    """Attempt 0 gets to step 40 and is killed, attempt 1 resumes from 20 and is done at 50. The
    clock counts steps, but for 80 s between the two and 10 s at the end."""
    lines = [step_line(step, loss=9.0 - step / 10) for step in (10, 20, 30, 40)]
    lines += ['{"step": 41, "lo\n']  # torn by the kill
    lines += [json.dumps({"step": 30, "time": BEGAN, "attempt": 1, "val_loss": 3.25}) + "\n"]
    lines += [step_line(step, 1, loss=4.0 - step / 100) for step in (30, 40, 50)]
    more = {"attempt_id": "12.1", "job": "12", "restart": 1}
    events = start(0, 0, 0, attempt_id="12.0", job="12") + start(1, 20, 120, **more)
    events += event("first_step", 1, 21, 121, **more)
    events += event("end", 1, 50, 160, state="done", reason="the last step is done", **more)
    return write_run(tmp_path / "resumed", "".join(lines), events, max_steps=50, attempt=1)


def rows(stdout: str) -> dict[str, str]:
    """The table of one run as a dict."""
    lines = stdout.split("\n\n")[0].splitlines()
    return dict(re.split("  +", line.strip(), maxsplit=1) for line in lines)


def test_a_later_attempt_supersedes(resumed: Path) -> None:
    run = load_history(resumed)
    assert [(line["step"], line["attempt"]) for line in run.losses] == [
        (10, 0), (20, 0), (30, 1), (40, 1), (50, 1),
    ]  # fmt: skip


def test_without_a_record_of_attempts_the_later_line_of_a_step_stands(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", step_line(10) + step_line(20) + step_line(20, loss=1.5))
    (path / "attempts.jsonl").unlink()
    assert [line["loss"] for line in load_history(path).losses] == [2.0, 1.5]
    assert report(path).returncode == 0


def test_an_attempt_that_went_back_itself(tmp_path: Path) -> None:
    """After too many steps that were not finite."""
    lines = "".join(
        step_line(step, loss=loss) for step, loss in ((10, 2.0), (20, None), (30, None))
    )
    path = write_run(tmp_path / "run", lines + step_line(20, loss=1.5))
    assert [line["loss"] for line in load_history(path).losses] == [2.0, 1.5]


def test_steps_that_a_resume_has_undone_do_not_count_before_they_are_done_again(
    tmp_path: Path,
) -> None:
    metrics = "".join(step_line(step) for step in (10, 20, 30, 40))
    path = write_run(tmp_path / "run", metrics, start(0, 0, 0) + start(1, 20, 100))
    run = load_history(path)
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
    assert table["training"] == "43.1 s, 26.9%"  # 48 steps: the first ones belong to the start-up
    assert table["lost"] == "18.0 s, 11.2%"  # of 20 steps
    assert table["start-up"] == "1.9 s, 1.2%"
    assert table["not running"] == "1 min 20 s, 50.0%"
    assert table["shutdown"] == "10.0 s, 6.2%"
    assert table["effective training time ratio"] == "26.9%"
    assert table["idle in the allocation"] == "19.3%"
    assert table["steps recomputed"] == "20 or more"
    lost, last = (re.split("  +", row) for row in done.stdout.split("end\n")[1].splitlines()[:2])
    assert lost == [
        "0", "12.0", "4", "n1,n2", "0 to 40", "20 or more", "0.9 s", "40.0 s",
        "killed, no error recorded",
    ]  # fmt: skip
    assert last == [
        "1", "12.1", "4", "n1,n2", "20 to 50", "0", "1.0 s", "40.0 s",
        "done: the last step is done",
    ]  # fmt: skip


def test_the_idle_share(tmp_path: Path) -> None:
    """Without the queue; the waits of reinforcement learning count, and spare nodes have a share of
    their own."""
    waits = "".join(step_line(step, wait=0.5) for step in (10, 20, 30))
    events = start(0, 0, 0, spares=["n3"]) + event("end", 0, 30, 30, state="done", reason="")
    run = load_history(write_run(tmp_path / "run", waits, events))
    parts = run.wall_time.parts
    expected = (
        parts["saving"] + parts["start-up"] + parts["shutdown"] + parts["training"] / 2
    ) / 30
    facts = run_facts(run, BEGAN)
    assert facts["idle"] == pytest.approx(expected, abs=1e-4) and 0.4 < facts["idle"] < 0.7
    assert facts["idle_spares"] == pytest.approx(1 / 3, abs=1e-4)
    table = rows(summary.summary_table([run]))
    assert table["spare nodes"] == "33.3% of the nodes' time"
    assert f" {facts['idle']:.0%} " in " ".join(STATUS.status_row(run))


def test_a_run_of_one_attempt_has_a_short_report(tmp_path: Path) -> None:
    events = start(0, 0, 0) + event("end", 0, 30, 35, state="done", reason="")
    path = write_run(tmp_path / "run", "".join(map(step_line, (10, 20, 30))), events)
    done = report(path)
    assert len(done.stdout.splitlines()) == 28
    assert rows(done.stdout)["effective training time ratio"] == "74.6%"  # 29 steps at 0.9 s of 35
    assert "not running" not in done.stdout and "recomputed" not in done.stdout
    assert "timeline" not in done.stdout and not (path / "timeline.png").exists()


def decision(restart: int, step: int, at: float, **more: object) -> str:
    head = {"event": "decision", "attempt_id": f"12.{restart}", "job": "12", "restart": restart}
    return json.dumps(head | {"step": step, "time": BEGAN + at, "why": "so it is"} | more) + "\n"


def test_how_each_attempt_ended_and_what_was_decided(tmp_path: Path) -> None:
    events = start(0, 0, 0, attempt_id="12.0")
    events += event("end", 0, 12, 20, state="interrupted", reason="asked", attempt_id="12.0")
    events += decision(0, 12, 21, decision="requeue", excluded="")
    events += start(1, 12, 50, attempt_id="12.1")
    for lost_peer, reason in ((True, "connection closed"), (False, f"division {'by ' * 50}zero")):
        more = {"lost_peer": lost_peer, "reason": reason, "attempt_id": "12.1"}
        events += event("fault", 1, 15, 60, kind="crash", **more)
    events += decision(1, 12, 61, decision="requeue", excluded="n2")
    events += decision(2, 12, 70, decision="requeue")  # it never wrote a word
    more = {"kind": "hang", "reason": "no step for 120 s", "attempt_id": "12.3"}
    events += start(3, 12, 80, attempt_id="12.3") + event("fault", 3, 14, 200, **more)
    events += decision(3, 12, 201, decision="end", excluded="", why="3 attempts without progress")
    run = write_run(tmp_path / "run", step_line(10), events, state="running", attempt=3)
    done = report(run, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    table = done.stdout.split("end\n")[1].split("\n\n")[0]
    assert max(map(len, table.splitlines())) <= 80
    words = " ".join(table.split())
    for end in (
        "interrupted: asked; requeued",
        f"crashed: division {'by ' * 50}zero; requeued without n2",  # below its row, not cut
        "died before it began; requeued",
        "hung: no step for 120 s; not requeued: 3 attempts without progress",
    ):
        assert end in words
    assert rows(done.stdout)["state"] == "hung"
    assert rows(done.stdout)["steps recomputed"] == "5"  # 3 of the crash, 2 of the hang


def test_a_run_that_still_goes(tmp_path: Path) -> None:
    written = time.time() - 7
    line = step_line(10, time=written)
    run = write_run(tmp_path / "run", line, state="running", max_steps=9000)
    hold_lock(run)
    done = report(run)
    (age,) = re.fullmatch(r"running, last line ([\d.]+) s ago", rows(done.stdout)["state"]).groups()
    assert 7 <= float(age) <= time.time() - written
    assert rows(done.stdout)["step"] == "10 of 9,000"
    assert "0 to 10" in done.stdout and done.stdout.count("running") == 2


def test_losses_that_were_not_finite(tmp_path: Path) -> None:
    lines = step_line(10, loss=None, skipped=1) + step_line(20) + step_line(30, loss=None)
    lines += step_line(40, 1, loss=3.0, skipped=2)  # a new attempt counts from 0
    done = report(write_run(tmp_path / "run", lines, start(0, 0, 0) + start(1, 30, 100)))
    assert done.returncode == 0, done.stderr
    assert rows(done.stdout)["loss, first"] == "2.0000 at step 20"
    assert rows(done.stdout)["skipped steps"] == "3"


def test_the_picture_of_one_run_lies_in_it(resumed: Path) -> None:
    done = report(resumed)
    assert f"picture: {resumed / 'report.png'}" in done.stdout
    assert (resumed / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("program", ["report.py", "status.py"])
def test_whoever_reads_it_may_stop(resumed: Path, program: str) -> None:
    """Like `report.py RUN | head -n 1`."""
    command = f"'{sys.executable}' '{ROOT}/scripts/{program}' '{resumed}' | exec <&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""


def test_the_timeline_lies_beside_it(resumed: Path, tmp_path: Path) -> None:
    done = report(resumed)
    assert f"timeline: {resumed / 'timeline.png'}" in done.stdout
    assert (resumed / "timeline.png").read_bytes().startswith(b"\x89PNG")
    out = tmp_path / "curve.svg"
    assert f"timeline: {tmp_path / 'curve-timeline.svg'}" in report(resumed, "--out", out).stdout
    words = (tmp_path / "curve-timeline.svg").read_text()
    for label in (
        "training 26.9%", "lost 11.2%", "not running 50.0%", "done: 1", "killed: 1",
        "seconds since the first start",
        "0 killed, no error recorded", "1 done: the last step is done",
    ):  # fmt: skip
        assert label in words, label


def test_an_error_with_control_characters(tmp_path: Path) -> None:
    """Colors, and what no font has: neither the table nor the picture shows them."""
    error = "\x1b[31mno \x1b\x07room\x1b[0m"
    events = start(0, 0, 0) + event("fault", 0, 10, 20, reason=error) + start(1, 0, 40)
    lines = step_line(10) + step_line(20, 1)
    done = report(write_run(tmp_path / "run", lines, events, attempt=1))
    assert "crashed: no room" in done.stdout and "\x1b" not in done.stdout, done.stdout
    assert (tmp_path / "run/timeline.png").exists() and done.stderr == ""


def test_the_timeline_of_thirty_attempts(tmp_path: Path) -> None:
    """Some of them at the same time; the reasons are in the table alone."""
    events = ""
    for k in range(30):
        began = 100 * k if k < 15 else 1500 + k
        events += start(k, 20, began) + event("end", k, 20, began + 1, state="failed", reason="bad")
    path = write_run(tmp_path / "run", step_line(10), events)
    words_in = tmp_path / "curve.svg"
    done = report(path, "--out", words_in)
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "curve-timeline.svg").read_text()
    assert "<!-- 29 -->" in words and "see the table" in words and "bad" not in words
    assert done.stdout.count("failed: bad") == 30


def test_the_picture_of_several_runs(resumed: Path, tmp_path: Path) -> None:
    many = "".join(step_line(step, loss=9 / step) for step in range(1, 400))
    other = write_run(tmp_path / "other", many)
    out = tmp_path / "both.svg"  # it keeps the words as comments
    done = report(resumed, other, "--out", out)
    assert done.returncode == 0 and "timeline" not in done.stdout
    assert rows(done.stdout)["steps recomputed"].split() == ["20", "or", "more", "0"]
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
    assert ".venv/bin/pip install -c constraints.txt -e '.[plot]'" in done.stdout
    assert not (resumed / "report.png").exists()


def test_bad_input_all_at_once(resumed: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    fresh = write_run(tmp_path / "fresh", "", start(0, 0, time.time() - BEGAN), state="running")
    (fresh / "config.toml").touch()
    hold_lock(fresh)
    crash = event("fault", 0, 0, 1, kind="crash", reason="no such file")
    crashed = write_run(tmp_path / "crashed", "", crash, state="running")
    done = report(tmp_path / "gone", resumed, tmp_path / "empty", fresh, crashed)
    assert done.returncode == 2 and done.stdout == ""
    head, gone, empty, early, loop = done.stderr.splitlines()
    assert head == "report: error: 4 problems with the input"
    assert "gone: no such directory" in gone
    assert "empty is an empty directory, not a run" in empty
    assert "fresh: no step is recorded yet" in early and "the last attempt" not in early
    assert loop.endswith("the last attempt: crashed: no such file")


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
        "import sys; from pathlib import Path; from kempner.jobs.records import run_history;"
        f"run_history.load_history(Path({str(resumed)!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=LIMIT_S).returncode == 0


SOUND = [
    json.loads(step_line(10)) | {"reward": 0.5, "length": 9.0, "truncated": 0.1, "staleness": 1.0,
     "dropped_stale": 1, "failed_rewards": 1, "mismatch": 0.1, "drift": 0.1, "wait": 0.1,
     "engine_idle": 0.1, "engines": 2},
    {"step": 10, "time": BEGAN + 11, "attempt": 0, "val_loss": 2.0, "val_tokens": 9},
    {"step": 10, "time": BEGAN + 12, "attempt": 0, "round": 1, "round_loss": 2.0, "replicas": 2,
     "bytes_sent": 1, "bytes_data_parallel": 2, "outer_time": 0.1, "not_finite": [1]},
    {"step": 10, "time": BEGAN + 13, "eval/task/acc": 0.5},
]  # fmt: skip
DAMAGED = (None, "x", 10**400, float("inf"), ["x"], {})


def test_a_number_that_is_not_finite_or_damaged(tmp_path: Path) -> None:
    """The trainer writes null for a loss, a validation or a reward that is not finite; a disk may
    write anything. report.py and status.py go on without it."""
    found = [(line, key, value) for line in SOUND for key in line for value in DAMAGED]
    path = write_run(tmp_path / "run", "", "", state="running", max_steps=100)
    good = [line | {"step": 5} for line in SOUND]
    for line, key, value in found:
        for bad in (line | {key: value}, {k: v for k, v in line.items() if k != key}):
            lines = "".join(json.dumps(each) + "\n" for each in [*good, bad])
            (path / "metrics.jsonl").write_text(lines)
            run = load_history(path)
            try:
                summary.summary_table([run]), STATUS.status_row(run)
                json.dumps(run_facts(run, BEGAN), allow_nan=False)
            except Exception as error:
                raise AssertionError((key, value)) from error
    (path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in good))
    for key, value in [(k, v) for k in ("step", "max_steps", "attempt") for v in DAMAGED]:
        (path / "status.json").write_text(json.dumps({"state": "running", key: value}))
        json.dumps(run_facts(load_history(path), BEGAN), allow_nan=False)


def test_a_validation_that_is_not_finite(tmp_path: Path) -> None:
    """Nor a reward, nor a result: in the table and in the picture."""
    head = {"step": 20, "time": BEGAN + 20}
    lines = step_line(10, reward=0.5) + step_line(20, reward=None)
    lines += json.dumps({**head, "attempt": 0, "val_loss": None}) + "\n"
    lines += json.dumps({**head, "eval/a/acc": None, "eval/b/acc": 0.5}) + "\n"
    run = write_run(tmp_path / "run", lines)
    told = rows(report(run).stdout)
    assert (told["validation, last"], told["validation, best"]) == ("not finite at step 20", "-")
    assert (told["reward, last"], told["reward, best"]) == (
        "not finite at step 20", "0.5000 at step 10"
    )  # fmt: skip
    assert told["a/acc"] == "not finite at step 20" and (run / "report.png").exists()


EVENTS: list[dict[str, object]] = [
    {"event": "start", "step": 0, "nodes": ["n1"], "world_size": 2, "process_began": BEGAN,
     "batch_began": BEGAN, "lineage": ["a@5"], "spares": ["n9"], "versions": ["torch 2"],
     "changed": ["x"], "parts": {"queue": 1.0}},
    {"event": "first_step", "step": 1},
    {"event": "go_back", "step": 8, "to": 5, "skip": [3, 4], "reason": "so"},
    {"event": "gpu", "kind": "xid", "answer": "end", "reason": "so", "host": "n1", "gpu": 1,
     "uuid": "u", "pci": "p", "serial": "s", "xid": 79},
    {"event": "fault", "step": 10, "kind": "crash", "reason": "so", "ranks": [1], "hosts": ["n1"],
     "lost_peer": False, "final": False},
    {"event": "end", "step": 10, "state": "interrupted"},
    {"event": "decision", "step": 10, "decision": "requeue", "why": "so", "no_progress": 1,
     "blamed": "n1", "excluded": "n1"},
]  # fmt: skip
WRONG = (*DAMAGED, -1, True, "\ud800\0\n", float("nan"), 1e300, [1], {"a": "b"})


def test_events_with_damaged_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that says it began in the year 1e300 says nothing; nobody fails on any of them, the
    least of all what the batch script asks before it decides."""
    head = {"time": BEGAN + 9, "attempt": 0, "attempt_id": "7.0", "job": "7", "restart": 0}
    path = write_run(tmp_path / "run", step_line(10), "\n")
    (path / "status.json").unlink()
    # Where Slurm is installed and its controller is not there, each question is asked for seconds.
    monkeypatch.setattr(slurm, "other_nodes", lambda request, without: None)
    for key in {key for event in EVENTS for key in [*head, *event]}:
        for value in WRONG:
            known = [head | event for event in EVENTS]
            lines = [event | ({key: value} if key in event else {}) for event in known]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (path / "attempts.jsonl").write_text(text)
            (path / "chain.jsonl").write_text(json.dumps({"event": "submitted", "job": value}))
            try:
                run = load_history(path, {})
                json.dumps(run_facts(run, BEGAN), allow_nan=False)
                [STATUS.node_row(node) for node in nodes_of([run])], summary.attempt_table(run)
                judge.main(str(path), str(path / "srun.log"), "jobs=7", "attempt=7.0")
            except Exception as error:
                raise AssertionError((key, value)) from error
            assert capsys.readouterr().out.count("\n") == 1 + len(judge.DECISION_FIELDS), (
                key,
                value,
            )


def test_directories_that_this_user_may_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of somebody else, among the runs of a project."""
    write_run(tmp_path / "mine", step_line(10))
    write_run(tmp_path / "theirs", step_line(10)).chmod(0)
    # Relative paths: pytest's own directories, above this one, are for their owner alone.
    monkeypatch.chdir(tmp_path)
    was = os.geteuid()
    if was == 0:
        tmp_path.chmod(0o755)
        os.seteuid(65534)
    try:
        assert runs_in(Path()) == [Path("mine")] and runs_in(Path("theirs")) == []
    finally:
        os.seteuid(was)
        (tmp_path / "theirs").chmod(0o755)
