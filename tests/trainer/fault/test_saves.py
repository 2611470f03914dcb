"""Crashes inside a save, and checkpoints that are damaged: what is loaded is whole, and the newest
that is."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kempner.checkpoint import history
from kempner.checkpoint.format.reader import verify_checkpoint
from tests.cluster import Cluster
from tests.conftest import status
from tests.trainer.fault.broken_run import BrokenRun

Submit = Callable[..., BrokenRun]
SAVER, COMMIT = "kempner.checkpoint.checkpointer", "kempner.checkpoint.commit"

# Of the second save, that of step 20: where, on which rank, and the step to continue from.
POINTS = {
    "before-staging": (f"{SAVER}:Checkpointer._stage:before nth=2 rank=0", 10),
    "staged": (f"{SAVER}:Checkpointer._stage:after nth=2 rank=1", 10),
    "before-writing": (f"{SAVER}:write_file:before nth=2 rank=1", 10),
    "in-the-file": ("kempner.checkpoint.format.writer:_trailer:before nth=2 rank=0", 10),
    "written": (f"{SAVER}:write_file:after nth=2 rank=1", 10),
    "before-the-manifest": (f"{SAVER}:Checkpointer._commit:before nth=2 rank=0", 10),
    "manifest-there": (f"{COMMIT}:Path.rename:before nth=2 rank=0", 10),
    "renamed": (f"{COMMIT}:point_latest:before nth=2 rank=0", 10),
    "latest-moved": (f"{COMMIT}:point_latest:after nth=2 rank=0", 20),
    "pruned": (f"{COMMIT}:prune_checkpoints:after nth=2 rank=0", 20),
}
IN_CI = ("in-the-file",)


@pytest.mark.parametrize(
    "point", [p if p in IN_CI else pytest.param(p, marks=pytest.mark.soak) for p in POINTS]
)
def test_crash_in_a_save(broken_run: Submit, tmp_path: Path, point: str) -> None:
    where, step = POINTS[point]
    run = broken_run(faults=f"kill at={where} once={tmp_path / 'struck'}")
    assert run.wait() == 0
    assert (tmp_path / "struck").exists()
    run.assert_complete(attempts=2, recomputed=12)
    assert [event["step"] for event in run.events("start")] == [0, step]


@pytest.mark.soak
def test_a_save_that_is_slower_than_the_steps(broken_run: Submit, tmp_path: Path) -> None:
    """It ends steps later; what it holds is of the step at which it was begun."""
    step, reached = "kempner.train.step:reduce_step:before", tmp_path / "reached"
    durable = tmp_path / "run" / "checkpoints" / "step_00000020"
    faults = f"""
        hold at={step} nth=26 rank=1 s=0 once={reached}
        wait at={SAVER}:write_file:before rank=1 path={reached}
        wait at={step} nth=32 rank=1 path={durable}
        kill at={step} nth=39 rank=1
    """
    run = broken_run("--checkpoint.interval=20", faults=faults)
    assert run.wait() == 0
    assert run.log.index("step 24/") < run.log.index("checkpoint of step 20 is durable")
    run.assert_complete(attempts=2, recomputed=19)
    assert [event["step"] for event in run.events("start")] == [0, 20]


@pytest.fixture
def small_disk(cluster: Cluster) -> Iterator[Path]:
    """A disk that holds one checkpoint of the run, some 1.2 MB, and not two."""
    yield cluster.small_disk
    subprocess.run(["mount", "-o", "remount,rw", cluster.small_disk], check=True)
    shutil.rmtree(cluster.small_disk / "checkpoints", ignore_errors=True)


def test_full_disk(broken_run: Submit, small_disk: Path) -> None:
    """The run trains on; without its last checkpoint it has failed, and the first one is whole."""
    run = broken_run(f"--checkpoint.dir={small_disk / 'checkpoints'}")
    assert run.wait() == 1
    assert status(run.dir)["state"] == "failed"
    assert run.decisions() == ["end"]
    assert "the checkpoint of step 20 failed" in run.log and "No space left" in run.log
    (whole,) = history.complete_checkpoints(small_disk / "checkpoints")
    assert (
        history.latest_checkpoint(small_disk / "checkpoints") == whole
        and whole.name == "step_00000010"
    )
    assert verify_checkpoint(whole) == []


DAMAGES = {
    "truncated": lambda path: truncate(data_file(path)),
    "one-byte": lambda path: flip(data_file(path)),
    "no-manifest": lambda path: (path / "manifest.json").unlink(),
    "torn-manifest": lambda path: truncate(path / "manifest.json"),
    "latest-dangles": shutil.rmtree,
}


def data_file(path: Path) -> Path:
    return max(path.glob("*/*.distcp"), key=lambda file: file.stat().st_size)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.soak
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint(broken_run: Submit, damage: str) -> None:
    """It is set aside, and the next older one is used."""
    run = broken_run()
    run.wait_for_step(25)
    (run.dir / "STOP").touch()
    assert run.wait() == 0
    newest, older, *_ = history.complete_checkpoints(run.dir / "checkpoints")
    assert int(newest.name[5:]) > int(older.name[5:]) >= 20
    DAMAGES[damage](newest)
    run.submit()
    assert run.wait() == 0
    run.assert_complete(attempts=2, recomputed=20)
    assert [event["step"] for event in run.events("start")] == [0, int(older.name[5:])]
    aside = [path.name for path in (run.dir / "checkpoints").glob("*.corrupt")]
    assert aside == ([] if damage == "latest-dangles" else [f"{newest.name}.corrupt"])
    facts = json.loads((run.dir / "checkpoints/latest/manifest.json").read_text())
    assert facts["step"] == 40


def test_read_only_directory(broken_run: Submit, small_disk: Path) -> None:
    """It is refused before a task starts."""
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    run = broken_run(f"--checkpoint.dir={small_disk / 'checkpoints'}")
    assert run.wait() == 2
    assert "give another --checkpoint.dir" in run.log and "restart count" not in run.log
