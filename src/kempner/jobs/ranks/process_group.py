"""The process group: ranks of a job meet, prove that they reach each other, and leave."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kempner.jobs.ranks import startup

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from kempner.jobs.ranks.placement import World

FIRST_COLLECTIVE_S = 60.0
# A collective must be allowed longer than the watchdog ever waits: see set_timeout().
LAST_RESORT_S = 60.0
# A rank that is killed during its orderly end must not hold up the first rank.
GROUP_LEAVE_S = 30.0


def start_process_group(
    world: World,
    device: torch.device,
    run_dir: str | Path,
    start_timeout: float,
    replicas: int = 1,
) -> World:
    """Make the default process group (gloo for CPU tensors, NCCL for CUDA) and prove it. With
    several replicas, the group and the returned world are those of this process's replica.

    Raises RuntimeError with the missing ranks and the likely causes. If the network swallows the
    first collective, the process exits after 60 s with the same message; if NCCL does not start, it
    exits after `start_timeout` seconds, as NCCL's own start has no limit.
    """
    import torch.distributed as dist

    startup.mark_start("imports")
    allow_open_files()
    # A full mesh of gloo connections at the start takes O(world) sockets and store requests on each
    # rank. With this, a pair of ranks connects on its first message.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if world.size == 1:
        _init(dist.HashStore(), world, device, start_timeout)
        return world
    from kempner.jobs.ranks import nccl_transport, proof, rendezvous

    store = rendezvous.open_store(world, Path(run_dir), start_timeout)
    rendezvous.await_ranks(store, world, start_timeout)
    world = replace(world, meeting=store)
    # First over gloo alone, so that a broken network is found before NCCL hangs in it.
    _init(dist.PrefixStore("prove", store), world, None, FIRST_COLLECTIVE_S)
    proof.prove(store, world, "cpu", FIRST_COLLECTIVE_S)
    if replicas > 1:
        world = world.split(replicas, store)
        store = dist.PrefixStore(f"replica/{world.replica}", store)
        # A process has one default group: replace that of all replicas by the replica's own.
        dist.destroy_process_group()
        if device.type != "cuda":
            _init(dist.PrefixStore("train", store), world, None, start_timeout)
    if device.type == "cuda":
        if replicas == 1:
            dist.destroy_process_group()
        # NCCL names a network even on one host, where it does not use it.
        log = proof.log_nccl(world) if world.size > world.per_node else None
        # ncclCommInitRank waits for a missing rank without a limit, and cannot be interrupted.
        with proof.or_exit(start_timeout, lambda: "NCCL does not connect the ranks"):
            _init(dist.PrefixStore("train", store), world, device, start_timeout)
        proof.prove(store, world, "cuda", start_timeout)
        if log is not None:
            proof.check_network(log.read_text(errors="replace"))
            log.unlink(missing_ok=True)
            for name in ("NCCL_DEBUG_FILE", *nccl_transport.LOG_SETTINGS):
                os.environ.pop(name, None)  # not for child processes: the file is gone
    set_timeout(start_timeout)
    if not world.local_rank:
        rendezvous.forget_copy(Path(run_dir))
    return world


def leave_process_group(world: World) -> None:
    """Meet all other ranks at an orderly end: srun treats a rank that leaves early as failed. The
    first rank leaves last: it serves the store, in which the barrier of a slower rank may still
    look up the others."""
    import torch.distributed as dist

    dist.barrier()
    if world.meeting is None:
        return
    everyone = world.size * (world.replicas if world.store is not None else 1)
    with contextlib.suppress(RuntimeError):  # the first rank has waited long enough
        if world.meeting.add("left", 1) == everyone:
            world.meeting.set("all have left", "")
        if world.store is not None and world.rank == 0:  # other replicas may still be in a save
            world.meeting.wait(["all have left"])
        elif world.rank == 0:
            world.meeting.wait(["all have left"], timedelta(seconds=GROUP_LEAVE_S))


def _init(
    store: dist.Store, world: World, device: torch.device | None, start_timeout: float
) -> None:
    """Make the group. `device`: for NCCL, which then connects at once; None or a CPU: only gloo."""
    import torch.distributed as dist

    gpu = device if device is not None and device.type == "cuda" else None
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=start_timeout),
        device_id=gpu,
    )
    if gpu:
        # NCCL has connected. While a device is bound, torch makes further groups by splitting this
        # one: torch 2.13 then dies of SIGSEGV in gloo's (pytorch#192106), and new_group() of some
        # ranks waits for all ranks in ncclCommSplit (pytorch#145376).
        dist.distributed_c10d._get_default_group().bound_device_id = None


def allow_open_files() -> None:
    """Raise this process's limit of open files to the hard limit: sockets to other ranks and mapped
    data shards soon use up the usual 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def set_timeout(seconds: float, groups: Iterable[dist.ProcessGroup] = ()) -> None:
    """Let the collectives of the default group and of `groups` take longer than `seconds`, the
    longest wait of our watchdog.

    Two watchdogs would race: NCCL's aborts the process without a record, on the waiting rank rather
    than the hung one. Ours decides; NCCL's is the last resort.
    """
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    # torch 2.15 has a public set_timeout(), and the old function prints a FutureWarning.
    set_limit = c10d.set_timeout if hasattr(c10d, "set_timeout") else c10d._set_pg_timeout
    for group in (dist.group.WORLD, *groups):
        set_limit(timedelta(seconds=seconds + LAST_RESORT_S), group)
