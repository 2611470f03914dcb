"""The process group: how the ranks of a job meet, prove that they reach each other, and leave."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kempner.config.option import ConfigError
from kempner.jobs import this_job
from kempner.jobs.ranks import startup

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from kempner.jobs.ranks.placement import World

FIRST_COLLECTIVE_S = 60.0
# A collective must be allowed longer than the watchdog ever waits: see set_timeout().
LAST_RESORT_S = 60.0
GROUP_LEAVE_S = (
    30.0  # a rank that was killed in the middle of its orderly end must not hold up the first
)


def start_process_group(
    world: World,
    device: torch.device,
    run_dir: str | Path,
    start_timeout: float,
    replicas: int = 1,
) -> World:
    """Make the default process group (gloo for CPU tensors, NCCL for CUDA) and prove it. With
    several replicas it is that of this process's own one, whose world is returned.

    Raises RuntimeError that names the ranks that are missing, and the likely causes. A network that
    swallows the first collective ends the process after 60 s with the same words, and an NCCL that
    never comes up does so after `start_timeout` seconds: its own start has no limit.
    """
    import torch.distributed as dist

    startup.mark_start("imports")
    allow_open_files()
    # A full mesh of gloo connections, made at the start, is O(world) sockets and store requests for
    # every rank. With this, a pair of ranks connects when it first has something to say.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if world.size == 1:
        _init(dist.HashStore(), world, device, start_timeout)
        return world
    from kempner.jobs.ranks import nccl_transport, rendezvous

    store = rendezvous.open_store(world, Path(run_dir), start_timeout)
    rendezvous.await_ranks(store, world, start_timeout)
    world = replace(world, meeting=store)
    # First over gloo alone, so that a broken network is found before NCCL hangs in it.
    _init(dist.PrefixStore("prove", store), world, None, FIRST_COLLECTIVE_S)
    _prove(store, world, "cpu", FIRST_COLLECTIVE_S)
    if replicas > 1:
        world = world.split(replicas, store)
        store = dist.PrefixStore(f"replica/{world.replica}", store)
        dist.destroy_process_group()
        if device.type != "cuda":
            _init(dist.PrefixStore("train", store), world, None, start_timeout)
    if device.type == "cuda":
        if replicas == 1:
            dist.destroy_process_group()
        # NCCL names a network even inside one host, where it does not use it.
        log = _log_nccl(world) if world.size > world.per_node else None
        with _or_exit(start_timeout, lambda: "NCCL does not connect the ranks"):
            _init(dist.PrefixStore("train", store), world, device, start_timeout)
        _prove(store, world, "cuda", start_timeout)
        if log is not None:
            _check_transport(log.read_text(errors="replace"))
            log.unlink(missing_ok=True)
            for name in ("NCCL_DEBUG_FILE", *nccl_transport.LOG_SETTINGS):
                os.environ.pop(name, None)  # programs that this one starts have no such file
    set_timeout(start_timeout)
    if not world.local_rank:
        rendezvous.forget_copy(Path(run_dir))
    return world


def leave_process_group(world: World) -> None:
    """Meet all other ranks at an orderly end: srun takes a rank that leaves before the others for
    one that failed. The first rank goes last: it serves the store, in which the barrier of a slower
    rank may still look up the others."""
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
    """Make the group. `device`: of NCCL, which then connects at once; None or a CPU: gloo alone."""
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
        # It has connected now. While a device is bound torch makes every further group by a split
        # of this one: torch 2.13 then dies of SIGSEGV in gloo's (pytorch#192106), and new_group()
        # of some of the ranks waits for all of them in ncclCommSplit (pytorch#145376).
        dist.distributed_c10d._get_default_group().bound_device_id = None


def _prove(store: dist.Store, world: World, device: str, seconds: float) -> None:
    """Run one all-reduce, in bounded time. Each rank that completes it says so in the store, by
    which rank 0 names the others."""
    import torch
    import torch.distributed as dist

    from kempner.jobs.ranks import rendezvous

    def message() -> str:
        missing = (
            rendezvous.missing_ranks(store, f"proved-{device}", world.size)
            if world.rank == 0
            else []
        )
        who = f"; ranks still in it: {rendezvous.name_ranks(missing)}" if missing else ""
        return f"the first all-reduce ({device}) has not ended after {seconds:.0f} s{who}"

    with _or_exit(seconds + 5, message):
        try:
            one = torch.ones(1, device=device)
            dist.all_reduce(one)
            met = int(one.item())  # waits for the device
        except RuntimeError as error:
            raise RuntimeError(
                f"the first all-reduce ({device}) failed: "
                f"{error}\n{rendezvous.meeting_failure_causes()}"
            ) from None
    assert met == world.size
    store.set(f"proved-{device}/{world.rank}", "")


def _log_nccl(world: World) -> Path | None:
    """Make NCCL log, on the first rank of each host, which network it uses; returns the file. None
    on the other ranks, and if the user has settings of his own for its log."""
    if world.local_rank or any(name in os.environ for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE")):
        return None
    from kempner.jobs.ranks import nccl_transport

    fd, name = tempfile.mkstemp(prefix="kempner-nccl-")
    os.close(fd)
    os.environ.update(nccl_transport.LOG_SETTINGS, NCCL_DEBUG_FILE=name)
    return Path(name)


def _check_transport(log: str) -> None:
    """Print the network of this host from NCCL's log. Raises ConfigError if NCCL does not use the
    fabric that was found here: the run would take ten times as long."""
    from kempner.jobs.ranks import nccl_transport

    used, found = nccl_transport.transport_of(log), os.environ.get("KEMPNER_NETWORK", "")
    host, wanted = this_job.host_name(), nccl_transport.expected_transports(found)
    said = f"NCCL uses NET/{used}" if used else "NCCL did not say which network it uses"
    if wanted and not used:
        said += f": scripts/slurm/preflight.sh measures whether it is {found}"
        said += " (docs/start/debugging.md)"
    print(f"kempner: network of {host}: {said}", file=sys.stderr, flush=True)
    if used and wanted and used not in wanted and not nccl_transport.chosen_by_user():
        raise ConfigError(
            f"{host} has {found}, but NCCL uses NET/{used}, not NET/{wanted[0]}: run "
            f"scripts/slurm/preflight.sh, and see docs/start/debugging.md; set NCCL_NET={used} "
            "to train over it all the same"
        )


def allow_open_files() -> None:
    """Raise this process's limit of open files as far as it may: the usual 1024 are soon used by
    sockets to other ranks and mapped data shards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def _or_exit(seconds: float, message: Callable[[], str]) -> Iterator[None]:
    """End the process with the message if the body takes longer: a hung collective cannot raise."""

    from kempner.jobs.ranks import rendezvous

    def give_up() -> None:

        text = f"error: {socket.gethostname()}: {{}}\n{rendezvous.meeting_failure_causes()}"
        backstop = threading.Timer(10.0, os._exit, (1,))  # the store may hang, too
        backstop.daemon = True
        backstop.start()
        print(text.format(message()), file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def set_timeout(seconds: float, groups: Iterable[dist.ProcessGroup] = ()) -> None:
    """Let the collectives of the default group and of `groups` take longer than `seconds`, the
    longest that the watchdog waits.

    Two judges of one hang would race: NCCL's own watchdog aborts the process without a record, on
    the rank that waited instead of the one that hangs. Ours decides; NCCL's is the last resort.
    """
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    # torch 2.15 has a public set_timeout(), and prints a FutureWarning when the old one is called.
    set_limit = c10d.set_timeout if hasattr(c10d, "set_timeout") else c10d._set_pg_timeout
    for group in (dist.group.WORLD, *groups):
        set_limit(timedelta(seconds=seconds + LAST_RESORT_S), group)
