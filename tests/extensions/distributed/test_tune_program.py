"""tune.py through its front door, for some seconds on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kempner.config import toml
from kempner.extensions.tune.runs import Orders
from kempner.jobs.system.compiler import CACHE
from tests import zygote
from tests.conftest import ROOT, TINY, clean_env, status
from tests.waiting import LIMIT_S, until


def words(run: Path, *more: str) -> list[str]:
    given = [sys.executable, "scripts/tune.py", *TINY, f"--run.dir={run}", *more]
    return [*given, "--data.dataset_path=fake:"]


def test_a_tune_and_the_command_that_uses_it(tmp_path: Path) -> None:
    """Started again, it has its results; what it prints last is taken by the trainer."""
    run = tmp_path / "run"
    for again in (False, True):
        done = zygote.run(
            words(run, "--minutes=0.05"),
            cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "as configured" in done.stdout and "settings" in done.stdout
        assert ("runs of an earlier start count" in done.stdout) == again
        assert status(run)["state"] == "done"
    record = json.loads((run / "tune/record.json").read_text())
    assert record["machine"]["device"] == "CPU" and record["trials"][0]["tokens_per_s"] > 0
    assert (record["best"] == {}) == (toml.loads((run / "tuned.toml").read_text()) == {})
    assert not list(run.rglob("step_*")), "a measurement leaves no checkpoint"
    command = done.stdout.splitlines()[-1].split()
    assert "--run.dir" not in done.stdout.splitlines()[-1]
    checked = zygote.run(
        [sys.executable, *command[1:], "--check"],
        cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stderr


def test_a_signal_ends_it_with_the_best_so_far(tmp_path: Path) -> None:
    """Its state is that of a run which the batch script starts again."""
    run = tmp_path / "run"
    process = zygote.Popen(words(run), cwd=ROOT, env=clean_env(), stdout=subprocess.PIPE, text=True)
    journal = run / "tune/journal.jsonl"
    until(lambda: journal.exists() and '"result"' in journal.read_text(), alive=(process,))
    process.terminate()
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and status(run)["state"] == "interrupted", out
    assert "use it with:" in out and (run / "tuned.toml").exists()


def test_the_other_ranks_follow_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What their runs compile is kept for the next ones."""
    monkeypatch.setenv(CACHE, "of the user")
    monkeypatch.delenv(CACHE)
    leaves = threading.Event()
    first, second = Orders(tmp_path), Orders(tmp_path)
    codes: list[int] = []
    follower = threading.Thread(
        target=lambda: codes.append(second.follow(lambda: float(leaves.is_set())))
    )
    follower.start()
    order = {"words": ["--nope"], "run_dir": str(tmp_path / "x"), "number": 1, "seconds": 60.0}
    first.post(order)  # the trainer refuses it: a result as any other
    first.post({"code": 3})
    follower.join(60)
    assert codes == [3] and CACHE in os.environ
    leaves.set()
    assert Orders(tmp_path / "other").follow(lambda: 1.0) == 0
