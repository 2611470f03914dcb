"""KEMPNER_STAGE on a real Slurm: each host has a disk of its own, which the others do not see."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.conftest import status

HOSTS = ("node1", "node2")


@pytest.fixture
def disk(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """An empty disk at the same place on each host."""
    path = tmp_path / "local disk"
    path.mkdir()
    for host in HOSTS:
        cluster.testbed("exec", host, "mount", "-t", "tmpfs", "-o", "size=64m", "none", path)
    yield path
    for host in HOSTS:
        cluster.testbed("exec", host, "umount", "-l", path)


def on_disk(cluster: Cluster, host: str, disk: Path) -> set[str]:
    lines = cluster.testbed("exec", host, "find", disk, "-mindepth", "1").splitlines()
    return {line.removeprefix(f"{disk}/") for line in lines}


def readable(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def reads(job: str, rank: int) -> tuple[int, set[str]]:
    """The process of a rank, and the shards that it has mapped."""
    for folder in Path("/proc").glob("[0-9]*"):
        environment = readable(folder / "environ").split("\0")
        if {f"SLURM_JOB_ID={job}", f"SLURM_PROCID={rank}"} <= {*environment}:
            shards = [s for s in readable(folder / "maps").splitlines() if s.endswith(".npy")]
            if shards:
                return int(folder.name), {line.split(maxsplit=5)[5] for line in shards}
    return 0, set()


def test_data_are_copied_once_read_by_every_attempt_and_removed_at_the_end(
    cluster: Cluster, tmp_path: Path, disk: Path
) -> None:
    """node2's disk is full: it reads the original. What a dead job has left on node1 is removed."""
    cluster.testbed("exec", "node1", "mkdir", "-p", disk / "kempner-999999/shards")
    cluster.testbed("exec", "node2", "fallocate", "-l", "64M", disk / "full")
    assert on_disk(cluster, "node2", disk) == {"full"} and os.listdir(disk) == []
    words = cluster.debug_run(tmp_path / "run", "--train.max_steps=100000")
    options = ["--ntasks-per-node=1", "--gpus-per-node=1"]
    env = {"KEMPNER_STAGE": str(disk)}
    job = cluster.sbatch("multinode.sh", *words, options=options, cwd=tmp_path, env=env)
    log = tmp_path / f"kempner-{job}.out"
    cluster.wait_for("3/100000", log)
    _, copies = reads(job, 0)
    pid, originals = reads(job, 1)
    assert copies and all(path.startswith(f"{disk}/kempner-{job}/") for path in copies)
    assert originals and all(path.startswith(f"{cluster.data}/") for path in originals)
    os.kill(pid, signal.SIGKILL)
    cluster.wait_for("requeue: ", log)
    assert {path.split("/")[0] for path in on_disk(cluster, "node1", disk)} == {f"kempner-{job}"}
    assert on_disk(cluster, "node2", disk) == {"full", f"kempner-{job}"}
    (tmp_path / "run/STOP").touch()  # the next attempt ends at once
    assert cluster.wait(job) == 0, log.read_text()
    assert status(tmp_path / "run")["state"] == "stopped"
    said = log.read_text()
    assert said.count(f"stage: node1: {cluster.data}: copied to {disk}/kempner-{job}/") == 1
    assert said.count("stage: node1: ") == 2 and "is kept" in said
    assert said.count("stage: WARNING: node2: ") == 2 and "it is read from" in said
    assert on_disk(cluster, "node1", disk) == set()
