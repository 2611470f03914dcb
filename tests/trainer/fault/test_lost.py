"""What is lost without a warning: ranks, hosts, the network, whoever hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer.fault.broken_run import BrokenRun
from tests.waiting import until

Submit = Callable[..., BrokenRun]
# Steps are saved every 10; those since then are done again, and what was in flight with them.
LOST = 12


def strike(run: BrokenRun, *ranks: int, number: signal.Signals = signal.SIGKILL) -> None:
    found = [pid for rank in ranks for pid in run.pids(rank)]
    assert found
    for pid in found:
        os.kill(pid, number)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_kill_of_one_rank(broken_run: Submit, rank: int) -> None:
    run = broken_run()
    run.wait_for_step(13)
    strike(run, rank)
    assert run.wait() == 0
    run.assert_complete(attempts=2, recomputed=LOST)
    assert run.decisions() == ["restart", "end"]


@pytest.mark.soak
def test_kill_in_the_step_after_a_save(broken_run: Submit, tmp_path: Path) -> None:
    """The numbers of a step are read a step late, those of a saved one before the save."""
    durable = tmp_path / "run" / "checkpoints" / "latest"
    faults = f"""
        wait at=kempner.train.step:reduce_step:before nth=11 rank=0 path={durable}
        kill at=kempner.train.step:guard_update:before nth=11 rank=0 once={tmp_path}/once
    """
    run = broken_run("--checkpoint.interval=10", faults=faults)
    assert run.wait() == 0
    run.assert_complete(attempts=2, recomputed=0)


@pytest.mark.soak
def test_kill_of_all_ranks_of_a_host(broken_run: Submit) -> None:
    run = broken_run(tasks=2)
    run.wait_for_step(13)
    strike(run, 2, 3)
    assert run.wait() == 0
    run.assert_complete(attempts=2, recomputed=LOST)


@pytest.mark.soak
@pytest.mark.parametrize("host", ["node2", "node1"], ids=["worker", "batch"])
def test_crash_of_a_host(broken_run: Submit, host: str) -> None:
    """Slurm notices, requeues, and waits for a host that is up."""
    run = broken_run()
    run.wait_for_step(13)
    assert run.cluster.field(run.job, "BatchHost") == "node1"
    try:
        run.cluster.testbed("crash", host)
        until(lambda: run.cluster.state(run.job) in ("PENDING", "COMPLETING"))
    finally:
        run.cluster.testbed("revive", host)
    assert run.wait() == 0
    run.assert_complete(attempts=2, recomputed=LOST)


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_rank(broken_run: Submit, rank: int) -> None:
    """It is named, and the run continues by itself."""
    run = broken_run("--resilience.hang_timeout=6")
    run.wait_for_step(13)
    strike(run, rank, number=signal.SIGSTOP)
    assert run.wait() == 0
    run.assert_complete(attempts=2, recomputed=LOST)
    (hang,) = [event for event in run.events("fault") if event["kind"] == "hang"]
    assert hang["ranks"] == [rank] and hang["hosts"] == [f"node{rank + 1}"]
    other = run.dir / f"logs/attempt-0/rank-{1 - rank}.log"
    text = other.read_text()
    assert f"rank {rank} does not answer" in text and "Current thread" in text


@pytest.mark.soak
def test_a_frozen_rank_long_before_the_limit(broken_run: Submit) -> None:
    """The rank beside it on its host sees that it is stopped, and the others hear nothing."""
    run = broken_run("--resilience.hang_timeout=1000", tasks=2)
    run.wait_for_step(13)
    strike(run, 2, number=signal.SIGSTOP)
    assert run.wait() == 0
    run.assert_complete(attempts=2, recomputed=LOST)
    (hang,) = [event for event in run.events("fault") if event["kind"] == "hang"]
    assert hang["ranks"] == [2] and hang["hosts"] == ["node2"]
    assert "is stopped (SIGSTOP) (answers and kernel" in hang["reason"]
    assert run.decisions() == ["restart", "end"]


@pytest.mark.soak
@pytest.mark.parametrize("again", [True, False], ids=["comes-back", "stays-away"])
def test_unplugged_network(broken_run: Submit, again: bool) -> None:
    run = broken_run("--resilience.hang_timeout=6")
    run.wait_for_step(13)
    try:
        run.cluster.testbed("cut", "node2")
        if again:
            until(lambda: run.decisions() == ["restart"])
            run.cluster.testbed("join", "node2")
        assert run.wait() == 0  # without it: the management network will do
    finally:
        run.cluster.testbed("join", "node2")
    run.assert_complete(attempts=2, recomputed=LOST)


@pytest.mark.soak
@pytest.mark.parametrize("exclude", ["", "0"])
def test_a_host_that_fails_twice_is_left_out(broken_run: Submit, exclude: str) -> None:
    """Of two hosts, the job needs one: after two crashes on one it continues on the other."""
    run = broken_run(options=["--nodes=1"], KEMPNER_EXCLUDE=exclude, script="singlenode.sh")
    first = ""
    for step in (13, 23):
        run.wait_for(rf"(?s)attempt {step // 23}, .*step +{step}/")
        host = run.cluster.field(run.job, "NodeList")
        first = first or host
        assert host == first  # Slurm takes the first node that is free
        strike(run, 0)
        until(lambda n=step: len(run.decisions()) == (n + 7) // 20)  # type: ignore[misc]
    assert run.wait() == 0
    run.assert_complete(attempts=3, recomputed=2 * LOST)
    assert [event["blamed"] for event in run.events("decision")[:2]] == [first, first]
    left_out = run.cluster.field(run.job, "ExcNodeList")
    assert left_out == ("(null)" if exclude else first)
    assert (run.cluster.field(run.job, "NodeList") == first) == bool(exclude)
    assert (f"{first}: failed twice in a row, excluded" in run.log) != bool(exclude)
