"""The run directory: where the logs are, which host is whose, what an error leaves behind."""

from __future__ import annotations

import errno
import gc
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kempner.jobs.ranks.hosts import all_hosts
from kempner.jobs.ranks.placement import World
from kempner.jobs.records import event_reader
from kempner.jobs.records.events import FaultEvent
from kempner.jobs.records.run_log import log_path
from kempner.jobs.records.run_records import count_attempts
from kempner.train.lookup import advise
from kempner.train.recording import run_directory
from kempner.train.recording.run_directory import Run
from kempner.train.sections import RunConfig, RunSection
from kempner.train.step import GC_STEPS, collect_garbage
from kempner.train.training import warn_of_different_gpus


def test_garbage_is_collected_at_the_same_steps_on_all_ranks() -> None:
    """Each rank would collect at another step, and every other rank would wait for it there."""
    collected: list[int] = []
    on = gc.isenabled()

    def watch(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collected.append(step)

    gc.callbacks.append(watch)
    try:
        for step in range(1, 2 * GC_STEPS + 1):
            collect_garbage(step)
            cycles: list[list[object]] = [[] for _ in range(1000)]  # more than its threshold
            for cycle in cycles:
                cycle.append(cycle)
    finally:
        gc.callbacks.remove(watch)
        if on:
            gc.enable()
    assert collected == [GC_STEPS, 2 * GC_STEPS]


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


@pytest.mark.parametrize("other", ["NVIDIA H200", "NVIDIA B200"])
def test_gpus_of_different_models_are_named_at_the_start(
    monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    store, said = dist.HashStore(), list[str]()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    for rank, name in ((1, other), (2, "NVIDIA H200"), (0, "NVIDIA H200")):
        run: Any = SimpleNamespace(world=world(rank, 3), announce=said.append)
        warn_of_different_gpus(run, name)
    text = "warning: the GPUs of this run differ: 2 x NVIDIA H200, 1 x NVIDIA B200; "
    assert [line.startswith(text) for line in said] == [True] * (other != "NVIDIA H200")


@pytest.mark.parametrize(
    ("error", "kind", "final", "lost"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "oom", True, False),
        (RuntimeError("Connection closed by peer [10.0.0.1]"), "crash", False, True),
        (OSError(errno.EIO, "Input/output error", "/data/remote/a.npy"), "crash", False, False),
    ],
)
def test_only_what_would_come_again_is_final(
    one_process: None, tmp_path: Path, error: Exception, kind: str, final: bool, lost: bool
) -> None:
    run = Run(RunConfig(run=RunSection(dir=str(tmp_path / "run"))), world(0, 1))
    assert run.crashed(error, advise) == 1
    (fault,) = event_reader.read_kind(tmp_path / "run/attempts.jsonl", FaultEvent)
    assert (fault.kind, fault.final, fault.lost_peer) == (kind, final, lost)
    status = tmp_path / "run/status.json"
    assert status.exists() == final
    if final:
        told = json.loads(status.read_text())
        assert told["state"] == "failed" and "try --train." in told["reason"]
    assert not (tmp_path / "run/lock").exists()


@pytest.mark.parametrize(
    ("steps", "ours", "final"),
    [(0, True, True), (1, True, True), (2, True, False), (0, False, False)],
)
def test_lack_of_memory_is_final_where_the_next_start_needs_as_much(
    one_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    steps: int, ours: bool, final: bool,
) -> None:  # fmt: skip
    """Not where steps have fit before, nor where others have the memory."""
    monkeypatch.setattr(run_directory, "memory_is_ours", lambda: ours)
    run = Run(RunConfig(run=RunSection(dir=str(tmp_path / "run"))), world(0, 1))
    run._began_at = 90  # a later start
    run.step = run._began_at + steps
    assert run.crashed(torch.OutOfMemoryError("CUDA out of memory")) == 1
    (fault,) = event_reader.read_kind(tmp_path / "run/attempts.jsonl", FaultEvent)
    assert (fault.kind, fault.final) == ("oom", final)
    assert (tmp_path / "run/status.json").exists() == final


@pytest.mark.parametrize(("free", "reserved", "ours"), [(1, 78, True), (1, 20, False)])
def test_whose_memory_it_is(
    monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, ours: bool
) -> None:
    """A job that was killed, or another user, may still have most of the 80 GiB."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved << 30)
    assert run_directory.memory_is_ours() is ours
