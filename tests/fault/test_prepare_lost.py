"""A preparation on many nodes (scripts/slurm/prepare.sh) that loses a host, or all of its time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cluster import ROOT, Cluster
from tests.fault.broken_run import until


def prepare(cluster: Cluster, tmp_path: Path, size: int, *options: str) -> tuple[str, Path]:
    """A job that has encoded some units already; returns it and its output directory."""
    text = tmp_path / "text.jsonl"
    row = json.dumps({"text": "some text that is not long, 1234 " * 20})
    text.write_text("\n".join([row] * size))
    words = [text, "--shard-tokens=20000", "--train-bpe=500", "--workers=1"]
    job = cluster.sbatch(
        "prepare.sh", *words, "--out", tmp_path / "out", options=options, cwd=tmp_path
    )
    until(lambda: len(list(tmp_path.glob("out/units/*.npz"))) > 3, 60)
    program = [sys.executable, ROOT / "scripts/prepare_data.py"]
    cluster.ask(*program, *words, "--out", tmp_path / "alone")
    return job, tmp_path / "out"


def assert_whole(out: Path) -> None:
    found, alone = (
        {f.name: f.read_bytes() for f in d.iterdir()} for d in (out, out.parent / "alone")
    )
    assert found == alone


@pytest.mark.soak
def test_crash_of_a_host(cluster: Cluster, tmp_path: Path) -> None:
    job, out = prepare(cluster, tmp_path, 100_000)
    try:
        cluster.testbed("crash", "node2")
        until(lambda: cluster.state(job) in ("PENDING", "COMPLETING"), 120)
    finally:
        cluster.testbed("revive", "node2")
    assert cluster.wait(job, 300) == 0
    assert cluster.field(job, "Restarts") != "0"
    assert_whole(out)


@pytest.mark.soak
def test_the_time_limit(cluster: Cluster, tmp_path: Path) -> None:
    """Of a minute, without a warning."""
    job, out = prepare(cluster, tmp_path, 700_000, "--time=1", "--signal=USR2@1")
    assert cluster.wait(job, 600) == 0
    assert cluster.field(job, "Restarts") != "0"
    assert_whole(out)
