"""Trackers beside a real training: killed, or with a server that does not answer. The steps go on,
and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY, Train, losses, start_train, status
from tests.trackers import FAKE, rows, shown
from tests.waiting import LIMIT_S, until


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """start_train, for runs without end: none outlives the test."""
    with contextlib.ExitStack() as started:

        def start(*words: str, **env: str) -> subprocess.Popen[str]:
            process = start_train(*words, "--train.max_steps=100000", **env)
            started.callback(process.kill)
            return process

        yield start


def processes(run: Path) -> dict[str, int]:
    """The trackers of a run, by name."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if "kempner.jobs.trackers" in words and str(run) in words:
            found[words[words.index(str(run)) + 1]] = int(path.parent.name)
    return found


def test_trackers_that_fail_do_not_touch_the_training(
    data_dir: Path,
    train: Train,
    start: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
) -> None:
    """First attempt: TensorBoard's is killed, and W&B does not answer. Second: the trainer itself
    is killed. Third: both catch up, over the attempts and the steps that were done again."""
    pytest.importorskip("tensorboard")
    run, server = tmp_path / "run", tmp_path / "server"
    server.mkdir()
    (server / "silent").touch()
    env = {"FAKE_WANDB": str(server), "PYTHONPATH": f"{FAKE}{os.pathsep}{ROOT / 'src'}"}
    more = ("--trackers.tensorboard", "--trackers.wandb=online", "--schedule.name=constant")
    words = [*TINY, *more, f"--data.dataset_path={data_dir}", f"--run.dir={run}"]

    def has(step: int) -> bool:
        return (run / "metrics.jsonl").exists() and max(losses(run), default=0) >= step

    process = start(*words, **env)
    until(lambda: shown(run))
    os.kill(processes(run)["tensorboard"], signal.SIGKILL)
    until(lambda: "tensorboard" not in processes(run))
    step = max(losses(run))
    until(lambda: has(step + 20))
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out + err
    for name in ("tensorboard", "wandb"):
        assert f"WARNING: tracker {name} does not have the last points" in out
    assert status(run)["state"] == "interrupted" and "Traceback" not in out + err
    assert rows(server) == []
    until(lambda: not processes(run))
    assert list(losses(run)) == list(range(1, 1 + int(str(status(run)["step"]))))

    (server / "silent").unlink()
    saved = int(str(status(run)["step"]))
    process = start(*words, **env)
    until(lambda: has(saved + 5))
    process.kill()
    process.communicate()
    until(lambda: not processes(run))  # they end by themselves
    assert list(shown(run)) == list(losses(run))

    done = train(run, *more, f"--train.max_steps={saved + 3}", **env)
    assert "WARNING" not in done.stdout
    known = {s: loss for s, loss in losses(run).items() if s <= saved + 3}
    assert shown(run) == pytest.approx(known)
    assert shown(run, "train/samples") == {step: 8.0 * step for step in known}
    sent = rows(server)
    assert len(sent) == len({row["step"] for row in sent}) >= saved + 5
    assert {row["step"]: row["train/loss"] for row in sent if row["step"] <= saved} == {
        s: loss for s, loss in known.items() if s <= saved
    }
    name = (run / "id").read_text().strip()
    assert [path.name for path in server.glob("*.jsonl")] == [f"{name}.jsonl"]
    config = json.loads((server / f"{name}.json").read_text())["config"]
    assert config["train"]["max_steps"] == saved + 3
