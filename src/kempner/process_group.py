"""From SLURM, torchrun or nothing to a process group: who am I, where is rank 0, which device is
mine.

Ranks come from an srun step, from torchrun's variables, or the process is alone. The rendezvous
never guesses a port: rank 0 binds one and publishes `address port` in the run directory, which
every rank shares anyway for checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from kempner.config.option import ConfigError
from kempner.files import write_atomic

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

FIRST_BARRIER_S = 60.0

CAUSES = """  likely causes:
    - a task died or never started: look at the other ranks' logs and at `srun`'s messages above
    - a firewall or the wrong network between the hosts: GLOO_SOCKET_IFNAME={gloo},
      NCCL_SOCKET_IFNAME={nccl}
    - two tasks on one GPU: --ntasks-per-node must equal the GPUs per node
    - hosts that read different files: the run directory must be on a file system that all hosts
      share"""


@dataclass(frozen=True)
class World:
    """This process among those of the run; `source` is slurm, torchrun or single."""

    rank: int
    local_rank: int
    size: int
    source: str


def discover(env: Mapping[str, str] = os.environ) -> World:
    """Read the world from the environment; torchrun's variables win over SLURM's.

    SLURM's count only inside an srun step: SLURM_STEP_NUM_TASKS is set there alone, while a batch
    or salloc shell already has SLURM_NTASKS and SLURM_PROCID, and a plain `python` in it would wait
    for ranks that do not exist.
    """
    if all(name in env for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        names, source = ("RANK", "LOCAL_RANK", "WORLD_SIZE"), "torchrun"
    elif "SLURM_STEP_NUM_TASKS" in env:
        names, source = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"), "slurm"
    else:
        return World(0, 0, 1, "single")
    try:
        rank, local_rank, world_size = (int(env[name]) for name in names)
    except (KeyError, ValueError):
        found = ", ".join(f"{name}={env.get(name, '(unset)')}" for name in names)
        raise ConfigError(
            f"{source} environment: {found}: must be integers; start the ranks by srun or "
            "torchrun, which set them, or unset them all for one process"
        ) from None
    return World(rank, local_rank, world_size, source)


def job_name(env: Mapping[str, str] = os.environ) -> str | None:
    """The SLURM job of this process as users name it (`12` or `12_3` in an array), None outside
    SLURM."""
    if "SLURM_ARRAY_JOB_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env.get('SLURM_ARRAY_TASK_ID', '?')}"
    return env.get("SLURM_JOB_ID")


def pick_device(kind: str, local_rank: int) -> torch.device:
    """The device of this process: `kind` is auto, cuda or cpu. The index is the local rank, or 0
    when one GPU is seen.

    Raises ConfigError when there are fewer GPUs than tasks on this host.
    """
    import torch

    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    host = socket.gethostname()
    if count == 0:
        raise ConfigError(
            f"distributed.device = {kind!r}: no GPU is visible on {host}; request one "
            "(--gpus-per-node), or set distributed.device=cpu"
        )
    if count > 1 and local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} on {host} has no GPU: {count} are visible; "
            f"--ntasks-per-node must be {count}, the GPUs per node"
        )
    device = torch.device("cuda", local_rank if count > 1 else 0)
    torch.cuda.set_device(device)
    return device


def start(world: World, device: torch.device, run_dir: str | Path, start_timeout: float) -> None:
    """Make the default process group (gloo for CPU tensors, NCCL for CUDA) and prove it.

    Raises RuntimeError that names the ranks that are missing, and the likely causes. A network that
    swallows the first collective ends the process after 60 s with the same words.
    """
    import torch
    import torch.distributed as dist

    alone = world.size == 1
    store = dist.HashStore() if alone else _open_store(world, Path(run_dir), start_timeout)
    if not alone:
        _check_in(store, world, start_timeout)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=start_timeout),
        device_id=device if device.type == "cuda" else None,
    )
    if alone:
        return
    with _or_exit(FIRST_BARRIER_S + 5, f"the first all-reduce does not end\n{_causes()}"):
        try:
            gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=FIRST_BARRIER_S))
            dist.monitored_barrier(gloo, wait_all_ranks=True)
        except RuntimeError as error:
            raise RuntimeError(f"the first barrier failed: {error}\n{_causes()}") from None
        dist.all_reduce(torch.zeros(1, device=device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.destroy_process_group(gloo)


@contextlib.contextmanager
def _or_exit(seconds: float, message: str) -> Iterator[None]:
    """End the process with the message when the body takes longer: a hung collective cannot
    raise."""

    def give_up() -> None:
        print(f"error: {socket.gethostname()}: {message}", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _causes() -> str:
    return CAUSES.format(
        gloo=os.environ.get("GLOO_SOCKET_IFNAME", "(unset)"),
        nccl=os.environ.get("NCCL_SOCKET_IFNAME", "(unset)"),
    )


def _open_store(world: World, run_dir: Path, start_timeout: float) -> dist.Store:
    import torch.distributed as dist

    env, limit = os.environ, timedelta(seconds=start_timeout)
    if {"MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        # torchrun's agent serves the store itself and says so; else rank 0 does.
        serves = world.rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        port = int(env["MASTER_PORT"])
        shared = dist.TCPStore(env["MASTER_ADDR"], port, None, serves, limit)
        return dist.PrefixStore(f"kempner-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)
    # No other start, of this run or of another, has this name.
    start = (env.get(k, "0") for k in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID"))
    note = run_dir / f".rendezvous-{'.'.join(start)}"
    if world.rank:
        return dist.TCPStore(*_read_note(note, start_timeout), None, False, limit)
    store = dist.TCPStore("localhost", 0, None, True, limit, wait_for_workers=False)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_atomic(note, f"{_own_address()} {store.port}\n")
    return store


def _own_address() -> str:
    """The address of this host that the other hosts of the job reach: the one that routes to the
    host of srun."""
    peer = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    if peer:
        family = socket.AF_INET6 if ":" in peer else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # UDP: nothing is sent, the kernel only picks the route
            address = str(probe.getsockname()[0])
        if not address.startswith("127."):
            return address
    return socket.gethostname()


def _read_note(note: Path, start_timeout: float) -> tuple[str, int]:
    deadline = time.monotonic() + start_timeout
    while time.monotonic() < deadline:
        try:
            address, port = note.read_text().split()
            return address, int(port)
        except OSError:  # not there yet, or stale
            with contextlib.suppress(OSError):
                os.listdir(note.parent)  # NFS forgets its cached "no such file"
            time.sleep(0.05)
    raise RuntimeError(
        f"rank 0 has published no address in {note} within {start_timeout:.0f} s "
        f"(distributed.start_timeout)\n{_causes()}"
    )


def _check_in(store: dist.Store, world: World, start_timeout: float) -> None:
    """Every rank says that it is here; rank 0 names those that do not come."""
    store.set(f"here/{world.rank}", socket.gethostname())
    if world.rank:
        return
    deadline = time.monotonic() + start_timeout
    missing = list(range(world.size))
    while missing and time.monotonic() < deadline:
        missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
        time.sleep(0.02 if missing else 0)
    if missing:
        raise RuntimeError(
            f"ranks {missing} of {world.size} did not come within {start_timeout:.0f} s "
            f"(distributed.start_timeout)\n{_causes()}"
        )


def forget_rendezvous(run_dir: Path) -> None:
    """Remove the published addresses, also those that killed starts have left. Rank 0, once all
    have met."""
    for note in run_dir.glob(".rendezvous-*"):
        note.unlink(missing_ok=True)


def shorten_timeout(mesh: DeviceMesh, seconds: float) -> None:
    """From here on a collective of the training that takes longer is an error. The first step may
    compile for minutes, a later one that takes minutes hangs."""
    import torch.distributed as dist

    for group in (dist.group.WORLD, *mesh.get_all_groups()):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
