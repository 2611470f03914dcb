"""The trackers: what becomes of the lines of metrics.jsonl, whatever happens to the process that
passes them on. None of it needs the trainer."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kempner.jobs.trackers.config import TRACKER_NAMES, TrackersConfig
from kempner.jobs.trackers.points import MetricsReader
from tests.trackers import FAKE, rows, shown
from tests.waiting import LIMIT_S, until
from tests.wandb_server import wandb_server

ROOT = Path(__file__).parents[3]


def lines(*steps: int, loss: float = 1.0, attempt: int = 0) -> str:
    """Lines of metrics.jsonl: loss = `loss` + step."""
    return "".join(
        json.dumps({"step": step, "time": 1e9 + step, "attempt": attempt, "loss": loss + step})
        + "\n"
        for step in steps
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "7b"
    path.mkdir()
    (path / "id").write_text("0123abcd\n")
    (path / "config.toml").write_text('[train]\nseed = 3\n[trackers]\nwandb = "online"\n')
    (path / "metrics.jsonl").write_text(lines(*range(1, 6)))
    return path


def command(run: Path, *words: str, **env: str) -> dict[str, Any]:
    path = os.pathsep.join([str(FAKE), str(ROOT / "src")] if env else [str(ROOT / "src")])
    return {
        "args": [sys.executable, "-m", "kempner.jobs.trackers", str(run), *words],
        "env": {**os.environ, "PYTHONPATH": path, **env},
    }


def by_hand(run: Path, *words: str, code: int = 0, **env: str) -> str:
    done = subprocess.run(
        **command(run, *words, **env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    return done.stderr


def follow(run: Path, *words: str, **env: str) -> subprocess.Popen[bytes]:
    """As the trainer starts it."""
    return subprocess.Popen(
        **command(run, *words, "--follow", **env), stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )


def append(run: Path, text: str) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.write(text)


# --- Points -------------------------------------------------------------------------------------


def test_names_and_what_is_no_point(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    points = MetricsReader(path)
    assert list(points.more()) == []
    record = {"step": 1, "time": 5.0, "attempt": 2, "loss": None, "lr": 0.5, "mfu": None}
    texts = [
        json.dumps(record),
        '{"step": 1, "time": 6.0, "val_loss": 2, "val_tokens": 64}',
        '{"step": 1, "time": 7.0, "eval/arc/acc": 0.25, "eval/n": 3}',
        '{"step": 1, "time": 7.5, "val_sets": {"web": {"loss": 2.5}}}',
        '{"step": 2, "time": 8.0, "not_finite": true, "sample_numbers": [1, 2]}',
        '{"step": 2, "ti',  # torn by a crash, and ended by the next writer
        '{"step": 3, "time": 9.0, "loss": 1.5}',
    ]
    path.write_text("\n".join(texts))
    found = [(point.step, point.values) for point in points.more()]
    assert found == [
        (1, {"train/lr": 0.5}),
        (1, {"val/loss": 2.0, "val/tokens": 64.0}),
        (1, {"eval/arc/acc": 0.25, "eval/n": 3.0}),
        (1, {"val_sets/web/loss": 2.5}),
    ]
    append(tmp_path, "\n")  # now the last line is whole
    assert [point.values for point in points.more()] == [{"train/loss": 1.5}]


def test_a_step_that_is_done_again_undoes_what_came_after(tmp_path: Path) -> None:
    val = '{"step": 4, "time": 1.0, "val_loss": 1.0}\n'
    again = lines(2, 3, 4, loss=7) + val
    (tmp_path / "metrics.jsonl").write_text(lines(1, 2, 3, 4) + val + again)
    points = list(MetricsReader(tmp_path / "metrics.jsonl").more())
    assert [point.step for point in points if point.undoes] == [2]


def result(step: int) -> str:
    """A line that scripts/eval.py adds."""
    return json.dumps({"step": step, "time": 1e9, "eval/arc/acc": step / 100}) + "\n"


def test_an_evaluation_of_an_older_checkpoint_undoes_nothing(run: Path) -> None:
    """Nor does one that is there twice: the run has not gone back."""
    append(run, result(4) + result(2) + result(4))
    assert not any(point.undoes for point in MetricsReader(run / "metrics.jsonl").more())


# --- TensorBoard --------------------------------------------------------------------------------


def test_tensorboard_killed_in_the_middle(run: Path) -> None:
    """The second tracker writes what the first one has not, and nothing twice; of steps that the
    run has done again the last value counts."""
    pytest.importorskip("tensorboard")
    process = follow(run, "tensorboard")
    until(lambda: shown(run).get(5))
    process.send_signal(signal.SIGTERM)  # as Slurm sends it to all processes of a job
    append(run, lines(6, 7, 8))
    until(lambda: shown(run).get(8))
    process.kill()
    process.communicate()
    (file,) = run.glob("tensorboard/*")
    os.truncate(file, file.stat().st_size - 5)  # it died while it wrote the point of step 8
    append(run, lines(7, 8, 9, loss=100, attempt=1))
    by_hand(run, "tensorboard")
    expected = {step: step + (100.0 if step > 6 else 1.0) for step in range(1, 10)}
    assert shown(run) == expected
    append(run, lines(10, loss=100, attempt=1))
    by_hand(run, "tensorboard")
    assert shown(run) == {**expected, 10: 110.0}


def test_one_tracker_of_a_kind_at_a_time_and_it_ends_with_the_trainer(run: Path) -> None:
    pytest.importorskip("tensorboard")
    process = follow(run, "tensorboard")
    until(lambda: list(run.glob("tensorboard/*")))
    assert "another process keeps" in by_hand(run, "tensorboard", code=1)
    append(run, lines(6))
    _, said = process.communicate(timeout=LIMIT_S)  # its pipe ends, as when the trainer dies
    assert process.returncode == 0 and b"all points have been passed on" in said
    assert list(shown(run)) == [1, 2, 3, 4, 5, 6]


# --- W&B ----------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Path]:
    """The directory that tests/fake_wandb takes for its server."""
    path = tmp_path / "server"
    path.mkdir()
    yield path


def test_wandb_killed_in_the_middle(run: Path, server: Path) -> None:
    """What was not sent when the tracker died is sent by the next one, under the same id; what was
    sent is not sent again. The first value of a step stays."""
    process = follow(run, FAKE_WANDB=str(server))
    until(lambda: len(rows(server)) == 4)  # it sends two at a time: the fifth is not sent
    process.kill()
    process.communicate()
    append(run, lines(4, 5, 6, 7, loss=100, attempt=1))
    by_hand(run, FAKE_WANDB=str(server))
    expected = {1: 2.0, 2: 3.0, 3: 4.0, 4: 5.0, 5: 6.0, 6: 106.0, 7: 107.0}
    assert [(row["step"], row["train/loss"]) for row in rows(server)] == list(expected.items())
    assert [row["_step"] for row in rows(server)] == list(range(7))
    about = json.loads((server / "0123abcd.json").read_text())
    assert about["config"]["train"] == {"seed": 3} and about["name"] == "7b"
    by_hand(run, FAKE_WANDB=str(server))
    assert len(rows(server)) == 7


def test_wandb_has_the_evaluation_of_an_older_checkpoint(run: Path, server: Path) -> None:
    append(run, result(4) + result(2) + result(4))
    by_hand(run, "wandb", FAKE_WANDB=str(server))
    found = [(row["step"], row["eval/arc/acc"]) for row in rows(server) if "eval/arc/acc" in row]
    assert found == [(4, 0.04), (2, 0.02)]


def test_wandb_fails_until_it_does_not(run: Path, server: Path) -> None:
    (server / "broken").touch()
    assert "RuntimeError: no way to the server" in by_hand(run, FAKE_WANDB=str(server), code=1)
    (run / "status.json").write_text('{"state": "failed"}')
    often = "import sys; from kempner.jobs.trackers import follow, __main__ as it; "
    often += "follow.RETRY_S = 0.1; "
    options = command(run, "wandb", "--follow", FAKE_WANDB=str(server))
    options["args"][1:3] = ["-c", often + "sys.exit(it.main(sys.argv[1:]))"]
    process = subprocess.Popen(**options, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    for line in iter(process.stderr.readline, b""):
        if b"trying again" in line:
            break
    (server / "broken").unlink()
    until(lambda: rows(server))
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and [row["step"] for row in rows(server)] == [1, 2, 3, 4, 5]
    assert (server / "exit_code").read_text() == "1"  # as that of the run


def test_wandb_online(run: Path) -> None:
    """The real one, with a server of ours: killed, it goes on with the same run, and no row is lost
    or there twice."""
    pytest.importorskip("wandb")
    with wandb_server() as server:
        env = {
            "WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}",
            "WANDB_API_KEY": "0" * 40,
            "PYTHONPATH": str(ROOT / "src"),
        }
        by_hand(run, **env)
        assert len(server.history) == 5
        append(run, lines(6, 7))
        process = follow(run, **env)
        until(lambda: len(list(run.glob("wandb/run-*/run-*.wandb"))) == 2)
        process.kill()  # while it has rows that are not sent: it sends some every 15 s
        process.wait()
        append(run, lines(6, 7, 8, loss=100, attempt=1))
        by_hand(run, **env)
        assert [(row["step"], row["_step"]) for row in server.rows] == [
            (step, step - 1) for step in range(1, 9)
        ]
        assert server.name == "0123abcd" and server.config["train"]["value"] == {"seed": 3}


def test_wandb_offline(run: Path) -> None:
    """The real one. A tracker that was killed leaves a directory that was not closed: its rows are
    written again by the next one, and those of closed directories are not."""
    pytest.importorskip("wandb")
    (run / "config.toml").write_text('[train]\nseed = 3\n[trackers]\nwandb = "offline"\n')
    by_hand(run)
    append(run, lines(6))
    process = follow(run)
    until(lambda: len(list(run.glob("wandb/offline-run-*"))) == 2)
    process.kill()
    process.communicate()
    append(run, lines(7, 6, 8))
    by_hand(run)
    folders = sorted(run.glob("wandb/offline-run-*"))
    assert len(folders) == 2
    records = [record for folder in folders for record in stored(folder / "run-0123abcd.wandb")]
    found = [values(record) for record in records if record.HasField("history")]
    assert [(row["_step"], row["step"], row["train/loss"]) for row in found] == [
        (step - 1, step, 1.0 + step) for step in range(1, 9)
    ]
    config = {item.key for record in records for item in record.run.config.update}
    assert {"train", "trackers"} <= config


def stored(path: Path) -> list[Any]:
    """The records of a .wandb file: a log in LevelDB's format, blocks of 32 KiB, after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a record in one piece, or the last piece of one
            found.append(Record.FromString(whole))
            whole = b""
    return found


def values(record: Any) -> dict[str, Any]:
    return {
        item.key or "/".join(item.nested_key): json.loads(item.value_json)
        for item in record.history.item
    }


def test_the_commands_of_the_document(run: Path, server: Path) -> None:
    pytest.importorskip("tensorboard")
    text = (ROOT / "docs/guide/trackers.md").read_text()
    commands = re.findall(r"python -m kempner.jobs.trackers runs/debug([^#\n]*)", text)
    assert len(commands) == 3
    for words in commands:
        by_hand(run, *words.split(), FAKE_WANDB=str(server))
    assert list(shown(run)) == [row["step"] for row in rows(server)] == [1, 2, 3, 4, 5]


# --- Bad input ----------------------------------------------------------------------------------


def test_bad_input(run: Path, tmp_path: Path) -> None:
    assert "name the run.dir" in by_hand(tmp_path, code=2)
    assert "give tensorboard or wandb" in by_hand(run, "tensorbord", code=2)
    (run / "config.toml").write_text("")
    assert "has no tracker; name one" in by_hand(run, code=2)


def test_no_tracker_is_asked_for_in_vain() -> None:
    """An option that TRACKER_NAMES lacks would start nothing."""
    options = [field.name for field in dataclasses.fields(TrackersConfig)]
    assert [name for name in options if "_" not in name] == list(TRACKER_NAMES)


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert TrackersConfig().problems() == []
    (problem,) = TrackersConfig(wandb="offline").problems()
    assert "the package wandb is not installed; run .venv/bin/pip install" in problem
