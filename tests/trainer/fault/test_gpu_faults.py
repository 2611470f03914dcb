"""GPUs that break, or slow down, while a run trains; the test makes them up."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.gpus import Shim, gpu
from tests.trainer.fault.broken_run import BrokenRun
from tests.trainer.fault.test_lost import LOST, strike
from tests.waiting import until

Submit = Callable[..., BrokenRun]
OFTEN = "--resilience.gpu_interval=0.5"
ONE_NODE = {"options": ["--nodes=1"], "script": "singlenode.sh"}


@pytest.fixture
def shim(tmp_path: Path) -> Shim:
    return Shim(tmp_path / "gpus")


def watched(run: BrokenRun, host: str) -> bool:
    """Whether the sampler of that host runs; a look at its process."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, said = ((path / name).read_bytes() for name in ("cmdline", "environ"))
        except OSError:
            continue
        here = f"SLURMD_NODENAME={host}".encode() in said.split(b"\0")
        if here and b"kempner.jobs.gpu.sampler" in command and str(run.dir).encode() in command:
            return True
    return False


def test_a_gpu_that_falls_off_the_bus(broken_run: Submit, shim: Shim) -> None:
    """The run ends at once, and goes on without the node at the first time."""
    run = broken_run(OFTEN, **ONE_NODE, **shim.env)
    run.wait_for_step(13)
    host = run.cluster.field(run.job, "NodeList")
    assert watched(run, host)
    shim.xid(79, 1)  # of another job's GPU: this one has the first
    shim.xid(31, 0)
    shim.xid(79, 0)
    assert run.wait() == 0
    run.assert_complete(attempts=2, recomputed=LOST)
    noted, cause = run.events("gpu")
    assert [noted["xid"], noted["answer"]] == [31, "note"]
    assert [cause["xid"], cause["answer"], cause["host"]] == [79, "end", host]
    why = "GPU 0: Xid 79: the GPU has fallen off the bus"
    (fault,) = [event for event in run.events("fault") if not event["lost_peer"]]
    assert fault["reason"] == f"{host}: {why}"
    decision = run.events("decision")[0]
    assert decision["blamed"] == decision["excluded"] == host
    assert decision["why"].endswith(f"; without {host}: has a broken {why}")
    assert run.cluster.field(run.job, "ExcNodeList") == host
    assert f"{host}: has a broken {why}, excluded from the next starts" in run.log
    assert not watched(run, host)


@pytest.mark.soak
def test_a_gpu_that_is_slowed_down_and_a_driver_that_hangs(broken_run: Submit, shim: Shim) -> None:
    """status.sh says so; the run goes on with both."""
    hot = gpu(0, clocks_event_reasons__hw_thermal_slowdown="Active", temperature__gpu="94")
    shim.say(hot, host="node2")
    shim.say(hangs=True, host="node1")
    run = broken_run(OFTEN, **shim.env)
    until(lambda: bool(run.events("gpu")))
    told = run.cluster.run(sys.executable, ROOT / "scripts/status.py", run.dir)
    what = "node2: GPU 0: slowed down: hw_thermal_slowdown"
    assert what in told.stdout and "running" in told.stdout, told.stdout + told.stderr
    assert run.wait() == 0
    run.assert_complete(attempts=1)
    (warning,) = run.events("gpu")
    assert [warning["answer"], warning["gpu"], warning["uuid"]] == ["warn", 0, "GPU-0"]
    assert run.events("decision")[0]["blamed"] == "" and f"WARNING: {what}" in run.log


@pytest.mark.soak
def test_memory_errors_before_a_crash(broken_run: Submit, shim: Shim) -> None:
    """The node is left out after one crash, not after two; a crash alone leaves it in."""
    run = broken_run(OFTEN, **ONE_NODE, **shim.env)
    run.wait_for_step(13)
    host = run.cluster.field(run.job, "NodeList")
    shim.say(gpu(0, ecc__errors__uncorrected__volatile__total="1"))
    until(lambda: bool(run.events("gpu")))
    strike(run, 0, number=signal.SIGKILL)
    assert run.wait() == 0
    run.assert_complete(attempts=2, recomputed=LOST)
    assert run.cluster.field(run.job, "ExcNodeList") == host
    assert run.events("decision")[0]["excluded"] == host
    lines = [json.loads(x) for x in (run.dir / f"gpu/{host}.jsonl").read_text().splitlines()]
    first, *_, last = (line["gpus"][0]["uncorrected"] for line in lines)
    assert (first, last) == (0, 1)  # of the first look, and with the event


@pytest.mark.soak
def test_a_broken_gpu_where_there_is_no_other_node(broken_run: Submit, shim: Shim) -> None:
    run = broken_run(OFTEN, **shim.env)
    run.wait_for_step(13)
    shim.xid(79, 0)  # both nodes read this log
    assert run.wait() == 0
    run.assert_complete(attempts=2, recomputed=LOST)
    assert "not excluded: the other nodes that could take this job, 1, are too few" in run.log
