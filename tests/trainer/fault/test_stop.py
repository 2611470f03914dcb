"""A run that is asked to leave, by whomever: it saves, leaves, comes back and loses no step.

Every day the real trainer does it once in each way; the batch script's part of the others is in
tests/jobs/slurm/test_requeue.py, with a fake trainer, and the trainer's part in
tests/trainer/distributed."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import SCRIPTS
from tests.conftest import status
from tests.trainer.fault.broken_run import STEPS, BrokenRun
from tests.waiting import until

Submit = Callable[..., BrokenRun]
HOLD_SAVE = "hold at=kempner.checkpoint.checkpointer:write_file:before s=2 rank=1"


def warn(run: BrokenRun) -> None:
    """What Slurm does at the time of --signal=B:SIGTERM@N: the batch shell alone hears of it."""
    run.cluster.ask("scancel", "--batch", "--signal=TERM", run.job)


@pytest.mark.soak
def test_warning_before_the_time_limit_twice(broken_run: Submit) -> None:
    run = broken_run()
    for time_, step in enumerate((5, 20), 1):
        run.wait_for_step(step)
        warn(run)
        until(lambda n=time_: run.decisions() == ["requeue"] * n)  # type: ignore[misc]
    assert run.wait() == 0
    run.assert_complete(attempts=3)
    assert run.decisions() == ["requeue", "requeue", "end"]
    assert all("saved" in event["why"] for event in run.events("decision")[:2])


@pytest.mark.soak
def test_warning_under_tensor_parallelism(broken_run: Submit) -> None:
    """Two hosts that share each product: both save, and come back with the same losses."""
    run = broken_run("--distributed.tp=2")
    run.wait_for_step(8)
    warn(run)
    assert run.wait() == 0
    run.assert_complete(attempts=2)
    assert run.decisions() == ["requeue", "end"]


@pytest.mark.soak
@pytest.mark.parametrize("form", ["B:SIGTERM@40", "TERM@40", "USR1@40", "B:USR1@40"])
def test_time_limit(broken_run: Submit, form: str) -> None:
    """The real one, with the warning in every form that users write."""
    run = broken_run(
        "--train.max_steps=500",
        options=["--time=1", f"--signal={form}"],
        faults="slow ms=300 rank=1",
    )
    run.wait_for("interrupted after step")
    until(lambda: run.decisions() == ["requeue"])
    (end,) = run.events("end")
    assert (end["state"], end["step"]) == ("interrupted", status(run.dir)["step"])


@pytest.mark.soak
def test_the_clock_alone(broken_run: Submit) -> None:
    """No warning comes that means anything: the trainer knows itself when the job ends."""
    options = ["--time=1", "--signal=B:URG@1"]
    run = broken_run("--train.max_steps=900", options=options, faults="slow ms=300 rank=1")
    run.wait_for("interrupted after step")
    log = (run.dir / "logs/attempt-0/rank-0.log").read_text()
    assert re.search(r"the job ends in \d+ s: ", log)
    until(lambda: run.decisions() == ["requeue"])
    assert "SIGTERM" not in run.log


@pytest.mark.soak
def test_preemption(broken_run: Submit) -> None:
    run = broken_run()
    run.wait_for_step(12)
    urgent = ["--partition=urgent", "--exclusive", "--nodes=1", "--output=/dev/null"]
    run.cluster.ask("sbatch", *urgent, "--wrap=sleep 1")
    assert run.wait() == 0
    run.assert_complete(attempts=2)


@pytest.mark.soak
def test_operators_requeue(broken_run: Submit) -> None:
    """TERM, and KillWait (5 s here) later SIGKILL: long enough for this model."""
    run = broken_run()
    run.wait_for_step(12)
    run.cluster.ask("scontrol", "requeue", run.job)
    assert run.wait() == 0
    run.assert_complete(attempts=2)


# --- SIGTERM at any time ------------------------------------------------------------------------


def term(run: BrokenRun, rank: int) -> None:
    for pid in run.pids(rank):
        os.kill(pid, signal.SIGTERM)


@pytest.mark.soak
def test_one_rank_alone(broken_run: Submit) -> None:
    run = broken_run()
    run.wait_for_step(7)
    term(run, 1)
    assert run.wait() == 0
    run.assert_complete(attempts=2)
    assert run.events("end")[0]["state"] == "interrupted"


@pytest.mark.soak
def test_in_the_middle_of_a_long_step(broken_run: Submit, tmp_path: Path) -> None:
    """Of four micro-batches of two seconds: the rest of the step may be all the time there is."""
    faults = f"slow_forward ms=2000 once={tmp_path}/once rank=0"
    run = broken_run("--train.micro_batch=1", "--train.max_steps=8", faults=faults)
    run.wait_for_step(3)
    time.sleep(3)  # step 4 is in its second micro-batch
    warn(run)
    assert run.wait() == 0
    first = run.events("end")[0]
    assert (first["state"], first["step"]) == ("interrupted", 3)
    assert [event["step"] for event in run.events("start")] == [0, 3]
    assert status(run.dir)["state"] == "done" and run.recomputed() == 0


@pytest.mark.soak
def test_ranks_at_different_steps_and_twice(broken_run: Submit) -> None:
    run = broken_run(tasks=2, faults="slow ms=200 rank=3")
    run.wait_for_step(7)
    for rank in (2, 0, 3, 1, 2, 0):
        term(run, rank)
        time.sleep(0.15)
    assert run.wait() == 0
    run.assert_complete(attempts=2)


@pytest.mark.soak
def test_during_an_async_save(broken_run: Submit, tmp_path: Path) -> None:
    """The save in flight is waited for, and the step of the request is saved too."""
    run = broken_run(faults=f"{HOLD_SAVE} once={tmp_path / 'once'}")
    run.wait_for_step(10)
    warn(run)
    assert run.wait() == 0
    run.assert_complete(attempts=2)


@pytest.mark.soak
def test_during_validation(broken_run: Submit, tmp_path: Path) -> None:
    run = broken_run(
        "--eval.interval=10",
        "--eval.samples=0",
        "--train.micro_batch=1",
        faults=f"slow_validation ms=400 once={tmp_path}/once",
    )
    until((tmp_path / "once").exists)
    time.sleep(1.0)
    assert "step 10  validation" not in run.log
    began = time.monotonic()
    warn(run)
    until(lambda: run.decisions() == ["requeue"])
    assert time.monotonic() - began < 15
    assert "step 10  validation" not in run.log  # a part of the tokens is no validation
    assert run.wait() == 0
    run.assert_complete(attempts=2)
    assert run.log.count("step 10  validation") == 1


@pytest.mark.soak
@pytest.mark.parametrize("when", ["check", "imports", "first step"])
def test_before_the_first_step(broken_run: Submit, when: str) -> None:
    run = broken_run()
    pattern = {"check": "", "imports": "network of node1", "first step": "world size 2 on"}[when]
    run.wait_for(pattern)
    if when == "imports":
        until(lambda: bool(run.pids(1)))
    if when == "check":
        until(lambda: run.cluster.state(run.job) == "RUNNING")
        time.sleep(0.5)
    warn(run)
    assert run.wait() == 0
    run.assert_complete(attempts=2)


@pytest.mark.soak
def test_during_the_final_save(broken_run: Submit, tmp_path: Path) -> None:
    """The run is complete when it is durable: then it needs no other attempt."""
    hold = f"hold at=kempner.checkpoint.checkpointer:write_file:before s=3 nth={STEPS // 10}"
    run = broken_run(faults=hold)
    run.wait_for_step(STEPS - 1)
    time.sleep(1.0)
    warn(run)
    assert run.wait() == 0
    run.assert_complete()


# --- For good -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["signal", pytest.param("file", marks=pytest.mark.soak)])
def test_the_users_wish_to_stop(broken_run: Submit, how: str) -> None:
    run = broken_run()
    run.wait_for_step(7)
    if how == "signal":
        run.cluster.ask("scancel", "--signal=INT", run.job)
    else:
        (run.dir / "STOP").touch()
    assert run.wait() == 0
    state = status(run.dir)
    assert state["state"] == "stopped" and 7 <= int(str(state["step"])) < STEPS
    assert (run.dir / "checkpoints/latest").resolve().name == f"step_{state['step']:08d}"
    assert run.decisions() == ["end"] and run.cluster.field(run.job, "Restarts") == "0"
    assert not (run.dir / "STOP").exists()


@pytest.mark.soak
@pytest.mark.parametrize("how", ["signal", "file"])
def test_save_and_go_on(broken_run: Submit, how: str) -> None:
    run = broken_run("--checkpoint.interval=0")
    run.wait_for_step(7)
    if how == "signal":
        run.cluster.ask("scancel", "--signal=USR2", run.job)
    else:
        (run.dir / "SAVE").touch()
    assert run.wait() == 0
    run.assert_complete(attempts=1)
    assert len(re.findall(r"checkpoint of step \d+ is durable", run.log)) == 2


@pytest.mark.parametrize(
    "when",
    [
        pytest.param("early", marks=pytest.mark.soak),
        pytest.param("late", marks=pytest.mark.soak),
        pytest.param("saving", marks=pytest.mark.soak),
    ],
)
def test_scancel_never_comes_back(broken_run: Submit, when: str) -> None:
    run = broken_run(faults=HOLD_SAVE)
    if when != "early":
        run.wait_for_step(7 if when == "late" else 10)
    else:
        until(lambda: run.cluster.state(run.job) == "RUNNING")
    run.cluster.ask("scancel", run.job)
    run.wait()
    assert run.cluster.state(run.job) == "CANCELLED"
    time.sleep(3)
    assert run.cluster.state(run.job) == "CANCELLED"
    assert "requeue" not in run.decisions()


# --- Jobs of other forms ------------------------------------------------------------------------


@pytest.mark.soak
def test_the_last_task_of_an_array(broken_run: Submit, tmp_path: Path) -> None:
    """It has the number of the whole array; it requeues itself alone."""
    script = tmp_path / "each.sh"
    script.write_text(
        "#!/bin/bash\n"
        f'exec bash {SCRIPTS}/singlenode.sh "$@" "--run.dir={tmp_path}/run$SLURM_ARRAY_TASK_ID"\n'
    )
    options = ["--array=1-2", "--requeue", "--nodes=1", f"--output={tmp_path}/job-%a.out"]
    run = broken_run(script=str(script), options=[*options, "--open-mode=append"])
    logs = [tmp_path / f"job-{task}.out" for task in (1, 2)]
    until(lambda: all(path.exists() and "step  7/" in path.read_text() for path in logs))
    run.cluster.ask("scancel", "--batch", "--signal=TERM", f"{run.job}_2")
    assert [run.cluster.wait(f"{run.job}_{task}") for task in (1, 2)] == [0, 0]
    assert [run.cluster.field(f"{run.job}_{task}", "Restarts") for task in (1, 2)] == ["0", "1"]
    for run.dir in (tmp_path / "run1", tmp_path / "run2"):
        run.assert_complete(attempts=int(run.dir.name[-1]))


@pytest.mark.soak
def test_one_run_on_1_2_4_and_8_tasks_in_turn(broken_run: Submit) -> None:
    slow = "slow ms=300 rank=0"  # they must not be through before the test has seen a step
    run = broken_run(tasks=1, script="singlenode.sh", faults=slow)
    for start, (step, nodes, tasks) in enumerate(((5, 2, 1), (12, 2, 2), (19, 2, 4)), 1):
        run.wait_for_step(step)
        run.cluster.ask("scancel", "--signal=USR1", run.job)
        until(lambda n=start: run.decisions().count("requeue") == n)  # type: ignore[misc]
        run.end()  # to continue in another shape
        run.submit(tasks=tasks, options=[f"--nodes={nodes}"], faults=slow)
    assert run.wait() == 0
    run.assert_complete(attempts=4)
    assert [event["world_size"] for event in run.events("start")] == [1, 2, 4, 8]
