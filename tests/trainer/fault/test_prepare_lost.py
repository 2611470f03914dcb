"""A preparation on many nodes (scripts/slurm/prepare.sh) that loses a host."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster import ROOT, Cluster
from tests.jobs.slurm.test_prepare import corpus, everything, wait_for_units
from tests.waiting import until

__all__ = ["corpus"]  # a fixture


@pytest.mark.soak
def test_crash_of_a_host(cluster: Cluster, tmp_path: Path, corpus: list[object]) -> None:
    """srun waits for its task until Slurm notices; the host that is left does all of the work."""
    out, alone = tmp_path / "out", tmp_path / "alone"
    job = cluster.sbatch("prepare.sh", *corpus, "--out", out, cwd=tmp_path)
    wait_for_units(out, 20)
    try:
        cluster.testbed("crash", "node2")
        until(lambda: cluster.state(job) in ("PENDING", "COMPLETING"))
    finally:
        cluster.testbed("revive", "node2")
    assert cluster.wait(job) == 0
    assert cluster.field(job, "Restarts") != "0"
    cluster.ask(sys.executable, ROOT / "scripts/prepare_data.py", *corpus, "--out", alone)
    assert everything(out) == everything(alone)
