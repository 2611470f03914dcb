"""Real hangs of ranks in the middle of a step: who is named, and what ends the run. The judge is
in a hurry here: it waits 2 s where it otherwise waits for up to a minute (`hasty`)."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.distributed.test_start_hang import start
from tests.trainer.unit.test_nccl_ras import Server, status
from tests.waiting import LIMIT_S

STEP = "at=kempner.train.step:reduce_step:before nth=15"
SAID = "watchdog: no step for"


def hang(
    folder: Path,
    fault: str,
    culprit: int = 1,
    leader: int = 0,
    words: Sequence[str] = (),
    per_node: int = 2,
) -> tuple[dict[str, Any], str]:
    """The record of a hang, and the log of the rank that has recorded it."""
    run = folder / "run"
    faults = f"{fault} rank={culprit}\nhasty\nslow ms=20"
    words = ["--train.max_steps=100000", *words]
    ranks = [start(run, rank, faults, *words, per_node=per_node) for rank in (0, 1)]
    try:
        _, said = ranks[leader].communicate(timeout=LIMIT_S)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert ranks[leader].returncode == 70, said
    paths = (run / "attempts.jsonl", *run.glob("attempts/*.jsonl"))
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines()]
    # Another rank may record that it has lost the one that ended.
    (event,) = [event for event in map(json.loads, lines) if event.get("kind") == "hang"]
    assert event["reason"] in said
    return event, (run / f"logs/attempt-0/rank-{leader}.log").read_text()


def test_a_rank_that_keeps_the_gil(tmp_path: Path) -> None:
    """Its place in the code is known, from a signal that the rank beside it has sent."""
    event, log = hang(tmp_path, f"keep_gil {STEP}")
    words = "does not answer: its main thread runs and keeps the GIL in faulty_train.py:"
    assert event["ranks"] == [1] and len(event["hosts"]) == 1
    assert words in event["reason"] and "(answers and flight recorders agree)" in event["reason"]
    assert SAID in log and "Current thread" in log and "rank 1 does not answer" in log


@pytest.mark.soak
@pytest.mark.parametrize("culprit", [1, 0])
def test_a_rank_that_is_stopped(tmp_path: Path, culprit: int) -> None:
    """Rank 0 has the store: then rank 1 judges by what it sees of that process."""
    fault = f"kill {STEP} signal=SIGSTOP"
    event, log = hang(tmp_path, fault, culprit, 1 - culprit)
    assert event["ranks"] == [culprit] and len(event["hosts"]) == 1
    assert f"rank {culprit} " in event["reason"] and "is stopped (SIGSTOP)" in event["reason"]
    assert "answers and kernel" in event["reason"] and SAID in log


@pytest.mark.parametrize("culprit", [1, pytest.param(0, marks=pytest.mark.soak)])
@pytest.mark.parametrize("per_node", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_a_rank_that_is_stopped_in_a_save(tmp_path: Path, culprit: int, per_node: int) -> None:
    """A save may take half an hour, but not a rank that neither writes nor answers. With one rank
    per node, no neighbour sees its process."""
    words = ("--checkpoint.interval=10", "--resilience.hang_timeout=8")
    fault = "kill at=kempner.checkpoint.checkpointer:Checkpointer._stage:before nth=2"
    event, _ = hang(tmp_path, f"{fault} signal=SIGSTOP", culprit, 1 - culprit, words, per_node)
    assert event["ranks"] == [culprit] and len(event["hosts"]) == 1, event
    assert "after step 20" in event["reason"], event


@pytest.mark.soak
def test_a_rank_that_is_stopped_in_a_validation(tmp_path: Path) -> None:
    """It is judged as in a step, once a first batch has been validated: that may compile."""
    words = ("--eval.interval=10", "--eval.samples=12")
    fault = "kill at=kempner.train.evaluate:reduce_step:before nth=5 signal=SIGSTOP"
    event, log = hang(tmp_path, fault, words=words)
    assert event["ranks"] == [1] and "is stopped (SIGSTOP)" in event["reason"] and SAID in log


@pytest.mark.soak
def test_a_save_that_takes_long_says_where(tmp_path: Path) -> None:
    """A file system that hangs in a save has half an hour; the user hears of it before."""
    fault = "hold at=kempner.checkpoint.checkpointer:Checkpointer._write:before s=16 rank=1"
    faults = f"{fault} once={tmp_path}/once\nhasty\nslow ms=20"
    words = ("--train.max_steps=40", "--checkpoint.interval=20")
    ranks = [start(tmp_path / "run", rank, faults, *words) for rank in (0, 1)]
    said = [process.communicate(timeout=LIMIT_S) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    assert "in a save or a validation: rank 1 after step 40 in checkpointer.py:" in said[0][0], said
    assert ", writes in faulty_train.py:" in said[0][0], said


@pytest.mark.soak
def test_a_rank_in_a_call_of_a_file_system(tmp_path: Path) -> None:
    event, log = hang(tmp_path, f"open {STEP} path={tmp_path}/fifo")
    assert event["ranks"] == [1] and len(event["hosts"]) == 1
    assert "lags: after step 14 in faulty_train.py:" in event["reason"]
    assert "doing nothing (state S in " in event["reason"] and "collectives" in event["reason"]
    assert "(flight recorders and kernel agree)" in event["reason"] and SAID in log


@pytest.mark.soak
@pytest.mark.parametrize(
    ("fault", "made"), [("collective", "barrier"), ("shape", "all_reduce [0] Double")]
)
def test_a_rank_in_another_collective(tmp_path: Path, fault: str, made: str) -> None:
    """Of two, both are named; no host is to blame for a program."""
    event, _ = hang(tmp_path, f"{fault} {STEP}")
    assert event["ranks"] == [0, 1] and event["hosts"] == []
    assert f"has launched {made} as collective" in event["reason"]
    assert "(flight recorders and answers agree)" in event["reason"]


@pytest.mark.soak
def test_ras_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And counts beside another source."""
    with Server() as server:
        server.answers["STATUS"] = json.dumps(status(9, 9, missing=(1,)))
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        monkeypatch.setenv("NCCL_RAS_ADDR", server.address)
        event, _ = hang(tmp_path, f"keep_gil {STEP}")
        server.shutdown()
    assert "NCCL's RAS" in event["reason"] and "STATUS" in server.lines


@pytest.mark.soak
def test_a_slow_step_is_named_and_goes_on(tmp_path: Path) -> None:
    """A rank that works is not ended, as long as the limit allows."""
    faults = f"read {STEP} s=8 rank=1\nhasty\nslow ms=20"
    ranks = [start(tmp_path / "run", rank, faults, "--train.max_steps=40") for rank in (0, 1)]
    said = [process.communicate(timeout=LIMIT_S) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    assert "rank 1 on " in said[0][0] and " lags: after step 14 in faulty_train.py:" in said[0][0]
    assert "watchdog: the step has come, " in said[0][0]
