"""Replicas that meet once a round, all in one srun step: two on a node, or each on two nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster, boot
from tests.conftest import losses, status
from tests.trainer.fault.broken_run import BrokenRun
from tests.waiting import until

H, STEPS = 5, 25
ROUNDS = (
    "configs/train/lowcomm/diloco.toml",
    *("--model.n_heads=4", "--model.n_kv_heads=2", f"--lowcomm.interval={H}"),
    f"--train.max_steps={STEPS}",
)
ON_A_NODE = (*ROUNDS, "--lowcomm.gpus_per_replica=2")
OVER_NODES = (*ROUNDS, "--lowcomm.gpus_per_replica=none", "--lowcomm.nodes_per_replica=2")
BOTH = (Path("."), Path("replicas/1"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with boot(4, 4, tmp_path_factory) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def unbroken_pair(four: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two replicas of two ranks, on one node."""
    run = BrokenRun(four, {}, tmp_path_factory.mktemp("unbroken"))
    run.submit(*ON_A_NODE, options=["--nodes=1"], tasks=4)
    assert run.wait() == 0, run.log
    assert list(losses(run.dir)) == list(range(1, STEPS + 1))
    return run.dir


@pytest.fixture
def pair(four: Cluster, unbroken_pair: Path, tmp_path: Path) -> Iterator[BrokenRun]:
    run = BrokenRun(four, losses(unbroken_pair), tmp_path)
    yield run
    run.end()


def assert_as_unbroken(pair: BrokenRun, unbroken: Path) -> None:
    pair.assert_complete(recomputed=0)
    for place in BOTH:
        assert status(pair.dir / place)["state"] == "done"
        assert losses(pair.dir / place) == losses(unbroken / place)
    first, second = (losses(unbroken / place) for place in BOTH)
    assert first != second  # of different samples


@pytest.mark.soak
def test_a_warning_in_the_middle_of_a_round(pair: BrokenRun, unbroken_pair: Path) -> None:
    """Both replicas save the end of the round, and go on from it."""
    pair.submit(*OVER_NODES, options=["--nodes=4"], faults="slow ms=200 rank=1")
    pair.wait_for_step(2 * H)
    pair.cluster.ask("scancel", "--batch", "--signal=TERM", pair.job)
    until(lambda: pair.decisions() == ["requeue"])
    first, second = (status(pair.dir / place)["step"] for place in BOTH)
    assert first == second and 2 * H < second < STEPS and second % H == 0
    assert pair.wait() == 0
    assert pair.decisions() == ["requeue", "end"]
    assert_as_unbroken(pair, unbroken_pair)


@pytest.mark.soak
def test_the_time_limit(pair: BrokenRun, unbroken_pair: Path) -> None:
    """The first attempt has no time for all steps, and enough for the end of a round."""
    options = ["--nodes=4", "--time=2", "--signal=B:SIGTERM@40"]
    pair.submit(*OVER_NODES, options=options, faults="slow ms=4500 rank=3")
    pair.wait_for("interrupted after step")
    until(lambda: pair.decisions()[:1] == ["requeue"])
    assert status(pair.dir)["step"] == status(pair.dir / "replicas/1")["step"]
    assert pair.wait() == 0
    assert_as_unbroken(pair, unbroken_pair)


@pytest.mark.soak
def test_a_kill_in_the_middle_of_a_round(pair: BrokenRun, unbroken_pair: Path) -> None:
    """Of a rank of the second replica: both go back to the last round that both have saved. The
    steps leave time for that: a replica that has saved nothing joins with another one's state."""
    place = f"kempner.train.step:collect_garbage:after nth={2 * H + 2}"
    faults = f"slow ms=500 rank=2\nkill at={place} rank=3 once={pair.folder}/once"
    pair.submit(*OVER_NODES, options=["--nodes=4"], faults=faults)
    assert pair.wait() == 0
    for place in BOTH:
        assert losses(pair.dir / place) == losses(unbroken_pair / place)
    assert pair.decisions() == ["restart", "end"]
