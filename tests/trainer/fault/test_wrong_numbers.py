"""A host that computes wrong numbers, on Slurm: docs/guide/integrity.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster, boot
from tests.conftest import losses
from tests.trainer.fault.broken_run import BrokenRun, words

Submit = Callable[..., BrokenRun]
REPLAY = "--resilience.replay_every=5"
ONE_NODE = {"options": ["--nodes=1"], "script": "singlenode.sh", "tasks": 2}


@pytest.mark.parametrize(
    ("samples", "once", "recomputed", "then"),
    [
        # Of steps 21 and after; of step 25 alone.
        ("from=160 to=9999", False, 10, "the next one goes on from the last checkpoint"),
        pytest.param(
            "from=192 to=200",
            True,
            0,
            "it was computed again, and is right",
            marks=pytest.mark.soak,
        ),
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


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with boot(4, 1, tmp_path_factory) as cluster:
        yield cluster


@pytest.mark.soak
def test_a_spare_finds_it_between_two_replays(four: Cluster, tmp_path: Path) -> None:
    """It has computed step 11 again, and asks the run to compare its next step. The votes name the
    host, and the spare takes its place."""
    more = ("--train.global_batch=12", "--train.max_steps=20")
    four.ask(four.env["KEMPNER_PYTHON"], "scripts/train.py", *words(four, tmp_path / "one"), *more)
    run = BrokenRun(four, losses(tmp_path / "one"), tmp_path)
    go = f"path={tmp_path}/go once={tmp_path}/once s=300"
    run.submit(
        *more,
        "--resilience.replay_every=1000",
        "--resilience.hang_timeout=600",
        options=["--nodes=4"],
        faults="flip of=product from=120 to=9999 host=node2\n"
        f"wait at=kempner.train.step:reduce_step:before nth=15 rank=0 {go}",
        KEMPNER_SPARES="1",
        SBATCH_NO_KILL="set",
        KEMPNER_SPARE_COMMAND=f"{four.env['KEMPNER_PYTHON']} scripts/audit.py",
    )
    try:
        run.wait_for("REPLAY file: a comparison was requested")
        (tmp_path / "go").touch()
        assert run.wait() == 0, run.log
    finally:
        run.end()
    run.assert_complete(attempts=2, recomputed=10)
    (audited,) = (event for event in run.events("gpu") if event["kind"] == "numbers")
    assert (audited["host"], audited["answer"], audited["step"]) == ("node4", "warn", None)
    assert "by one of rank 1 on node2 and the spare node4: its own grad" in audited["reason"]
    (compared,) = (event for event in run.events("fault") if event["kind"] == "corruption")
    assert (compared["ranks"], compared["hosts"]) == ([1], ["node2"])
    assert run.events("decision")[0]["excluded"] == "node2"
    assert "node2 is replaced by the spare node node4" in run.log
    assert audited["reason"] in (run.dir / "logs/spare.log").read_text()
