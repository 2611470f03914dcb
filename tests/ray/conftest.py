"""A real Slurm of four hosts, for Ray jobs."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import ENDED, Cluster, boot
from tests.ray.ray_job import RayJob, Submit


@pytest.fixture(scope="session")
def four_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if importlib.util.find_spec("ray") is None:
        reason = f"Ray is not installed for {sys.executable}: pip install 'ray[default]'"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    with boot(4, 2, tmp_path_factory) as cluster:
        yield cluster


@pytest.fixture
def submit(four_hosts: Cluster, tmp_path: Path) -> Iterator[Submit]:
    """Submit a job: submit(nodes, command, VARIABLE=..., options="..."); an empty command is an
    interactive one."""
    jobs: list[RayJob] = []

    def start(nodes: int, command: str = "", folder: str = "work", **env: str) -> RayJob:
        jobs.append(RayJob(four_hosts, tmp_path / folder, nodes, command, **env))
        return jobs[-1]

    yield start
    for job in jobs:
        if four_hosts.state(job.job) not in ENDED:
            four_hosts.ask("scancel", job.job)
            four_hosts.wait(job.job, 60)
