"""Faults that another attempt does not heal, numbers that are none, and two jobs in one
directory."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import losses, status
from tests.trainer.fault.broken_run import STEPS, BrokenRun
from tests.waiting import until

Submit = Callable[..., BrokenRun]


@pytest.mark.soak
def test_crash_at_every_start(broken_run: Submit) -> None:
    run = broken_run(
        faults="kill at=kempner.checkpoint.checkpointer:Checkpointer.load:before rank=1"
    )
    assert run.wait() != 0
    assert run.decisions() == ["restart", "requeue", "end"]
    why = run.events("decision")[-1]["why"]
    assert "3 attempts in a row without progress (KEMPNER_MAX_CRASHES=3)" in why
    assert f"kempner: end: {why}" in run.log


@pytest.mark.soak
def test_bad_data_path_after_a_requeue(broken_run: Submit, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.symlink_to("nowhere")
    run = broken_run()  # boots the data
    data.unlink()
    data.symlink_to(run.cluster.data)
    run.wait()
    run.dir = tmp_path / "other"
    # By default the job would come back twice, after 1 and 5 minutes.
    run.submit(f"--data.dataset_path={data}", KEMPNER_MAX_CRASHES="1")
    run.wait_for_step(12)
    data.unlink()
    run.cluster.ask("scancel", "--batch", "--signal=TERM", run.job)
    assert run.wait() == 2
    assert run.decisions() == ["requeue", "end"]
    assert "no such directory; make the data by" in run.log


@pytest.mark.soak
def test_starts_without_progress(broken_run: Submit) -> None:
    """It crashes again and again before the next save is done: the step stays the same."""
    run = broken_run(
        "--checkpoint.interval=0",
        faults="kill at=kempner.train.step:reduce_step:before nth=5 rank=0",
    )
    assert run.wait() != 0
    assert run.decisions() == ["restart", "requeue", "end"]
    assert "3 attempts in a row without progress" in run.events("decision")[-1]["why"]


def test_nan_in_one_ranks_batch_and_a_batch_without_labels(
    broken_run: Submit, unbroken: dict[int, float]
) -> None:
    """Both steps are skipped on all ranks and recorded by their samples; the run continues."""
    run = broken_run(faults="nan rank=1 from=64 to=72\nignore from=96 to=104")
    assert run.wait() == 0
    assert status(run.dir)["state"] == "done"
    lines = [json.loads(text) for text in (run.dir / "metrics.jsonl").read_text().splitlines()]
    bad = {line["step"]: line["sample_numbers"] for line in lines if line.get("not_finite")}
    assert list(bad) == [9, 13] and all(len(numbers) == 8 for numbers in bad.values())
    found = losses(run.dir)
    assert found[9] is None and found[13] is None and found[STEPS] is not None
    assert [found[step] for step in range(1, 9)] == pytest.approx(
        [unbroken[step] for step in range(1, 9)], rel=1e-5
    )


@pytest.mark.soak
def test_two_jobs_in_one_directory(broken_run: Submit, tmp_path: Path) -> None:
    first = broken_run(options=["--nodes=1"], faults="slow ms=700")
    first.wait_for_step(3)
    second = broken_run(options=["--nodes=1"])  # of the same directory, on the other host
    assert second.wait() == 2
    assert f"is in use by job {first.job} on node" in second.log
    assert first.wait() == 0
    first.assert_complete(attempts=1)


@pytest.mark.soak
def test_a_job_whose_run_another_one_has_taken(broken_run: Submit) -> None:
    """Submitted by mistake while the first job was in the queue. The first one comes again, is
    refused, blames no host, and goes on once the other has gone."""
    run = broken_run(options=["--nodes=1"], tasks=2, faults="slow ms=300")
    first, cluster = run.job, run.cluster
    run.wait_for_step(12)
    cluster.ask("scontrol", "requeuehold", first)
    until(lambda: cluster.state(first) == "PENDING")
    second = run.submit(options=["--nodes=1"], faults="slow ms=3000")
    run.wait_for(r"step +1\d/")
    cluster.ask("scontrol", "release", first)
    run.job = first
    waits = rf"requeue: \S+ is in use by job {second} on node\d: the next start waits 1 min"
    until(lambda: cluster.hasten(first) or re.search(waits, run.log), lambda: run.log)
    cluster.ask("scancel", second)
    assert run.wait() == 0
    # On a busy machine Slurm kills the second job before it has saved its step.
    run.assert_complete(attempts=3, recomputed=9)
    mine = [event for event in run.events("decision") if event["job"] == first]
    assert not any(event["blamed"] or event["excluded"] for event in mine), mine


@pytest.mark.soak
def test_a_dead_jobs_lock_does_not_block(broken_run: Submit) -> None:
    run = broken_run(options=["--no-requeue"], KEMPNER_RESTARTS="0")
    run.wait_for_step(13)
    for pid in [pid for rank in (0, 1) for pid in run.pids(rank)]:
        os.kill(pid, signal.SIGKILL)
    assert run.wait() != 0
    assert (run.dir / "lock").exists()
    run.submit()
    assert run.wait() == 0
    run.assert_complete(attempts=2, recomputed=12)


@pytest.mark.soak
def test_a_straggler_is_named(broken_run: Submit) -> None:
    run = broken_run("--train.max_steps=60", faults="slow ms=400 rank=1")
    assert run.wait() == 0
    said = re.findall(r"straggler: rank 1 on node2 is .* times slower .* since step 1 ", run.log)
    assert len(said) == 2  # after 20 steps, and after 40, not again at 60
    assert run.log.count("ms a step): it waits for its data") == 2
