"""A host that computes wrong numbers, on Slurm: docs/guide/integrity.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer.fault.broken_run import BrokenRun

Submit = Callable[..., BrokenRun]
REPLAY = "--resilience.replay_every=5"
ONE_NODE = {"options": ["--nodes=1"], "script": "singlenode.sh", "tasks": 2}


@pytest.mark.parametrize(
    ("samples", "once", "recomputed", "then"),
    [
        # Of steps 21 and after; of step 25 alone.
        ("from=160 to=9999", False, 10, "the next one goes on from the last checkpoint"),
        ("from=192 to=200", True, 0, "it was computed again, and is right"),
    ],
)
def test_the_run_goes_on_elsewhere(
    broken_run: Submit, tmp_path: Path, samples: str, once: bool, recomputed: int, then: str
) -> None:
    """Without the host, at the first time, and with the losses of the unbroken run."""
    faults = f"flip of=product {samples} rank=1 start=0"
    faults += f" once={tmp_path / 'once'}" if once else ""
    run = broken_run(REPLAY, faults=faults, **ONE_NODE)
    assert run.wait() == 0
    run.assert_complete(attempts=2, recomputed=recomputed)
    (fault,) = (event for event in run.events("fault") if event["kind"] == "corruption")
    (host,) = fault["hosts"]
    assert fault["reason"].endswith(then)
    decision = run.events("decision")[0]
    assert decision["blamed"] == decision["excluded"] == host
    assert run.cluster.field(run.job, "ExcNodeList") == host
    assert f"; without {host}: has a broken device: wrong numbers in step " in decision["why"]
