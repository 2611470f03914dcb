"""Runs on a real Slurm that faults are put into, and the unbroken run that they must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.conftest import losses
from tests.trainer.fault.broken_run import STEPS, BrokenRun, words


@pytest.fixture(scope="session")
def unbroken(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Loss by step of the run without a fault, in one process."""
    run_dir = tmp_path_factory.mktemp("unbroken") / "run"
    python = cluster.env["KEMPNER_PYTHON"]
    cluster.ask(python, "scripts/train.py", *words(cluster, run_dir))
    found = losses(run_dir)
    assert list(found) == list(range(1, STEPS + 1))
    return found


@pytest.fixture
def broken_run(
    cluster: Cluster, unbroken: dict[int, float], tmp_path: Path
) -> Iterator[Callable[..., BrokenRun]]:
    """Submit a run: broken_run(*overrides, options=[...], faults=...)."""
    runs: list[BrokenRun] = []

    def submit(*overrides: str, **more: object) -> BrokenRun:
        run = BrokenRun(cluster, unbroken, tmp_path)
        runs.append(run)
        run.submit(*overrides, **more)  # type: ignore[arg-type]
        return run

    yield submit
    for run in runs:
        run.end()
