"""Where the logs of the ranks are, and whose host is whose."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kempner.hosts import all_hosts
from kempner.process_group import World
from kempner.run_log import log_path
from kempner.run_records import count_attempts


def world(rank: int, size: int) -> World:
    return World(rank, rank % 8, size, "slurm", 8)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(64, "logs/attempt-2/rank-9.log"), (65, "logs/attempt-2/n-17/rank-9.log")],
)
def test_the_logs_of_a_large_world_are_in_a_directory_for_each_host(
    monkeypatch: pytest.MonkeyPatch, size: int, expected: str
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n-17")
    assert log_path(Path("run"), 2, world(9, size)) == Path("run") / expected


def test_the_attempts_so_far(tmp_path: Path) -> None:
    assert count_attempts(tmp_path) == 0
    for name in ("attempt-0", "attempt-11", "attempt-x", "srun-1.log", "latest"):
        (tmp_path / "logs" / name).mkdir(parents=True)
    assert count_attempts(tmp_path) == 12


def test_rank_0_knows_the_host_of_each_rank_by_slurms_name(
    one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the host's own, which may have a domain: ExcNodeList takes node names alone."""
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-a100-01")
    assert all_hosts(world(0, 1)) == ["gpu-a100-01"]
    assert os.uname().nodename != "gpu-a100-01"
