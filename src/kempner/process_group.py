"""From SLURM, torchrun or nothing to a process group: who am I, where is rank 0, which device is
mine.

Ranks come from an srun step, from torchrun's variables, or the process is alone. The rendezvous
never guesses a port: rank 0 binds one and publishes `address port` in the run directory, which
every rank shares anyway for checkpoints.

Nothing here costs a rank more as the world grows, but for rank 0, which counts the others.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from kempner import slurm
from kempner.config.option import ConfigError
from kempner.files import write_atomic

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

FIRST_COLLECTIVE_S = 60.0
LOCAL_COPY_S = 10.0  # local ranks wait so long for their first rank's copy of the address
SLOWEST_POLL_S = 1.0
NAMED_RANKS = 32  # of the missing ones, in a message
PCI_GPUS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
# From here on a collective may take longer than the watchdog ever waits: see set_timeout().
LAST_RESORT_S = 60.0

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
    per_node: int = 1  # ranks on each node


def discover(env: Mapping[str, str] = os.environ) -> World:
    """Read the ranks from the environment; torchrun's variables win over SLURM's.

    SLURM's count only inside an srun step: SLURM_STEP_NUM_TASKS is set there alone, while a batch
    or salloc shell already has SLURM_NTASKS and SLURM_PROCID, and a plain `python` in it would wait
    for ranks that do not exist.
    """
    if all(name in env for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        names, source = ("RANK", "LOCAL_RANK", "WORLD_SIZE"), "torchrun"
        per_node = env.get("LOCAL_WORLD_SIZE")
    elif "SLURM_STEP_NUM_TASKS" in env:
        names, source = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"), "slurm"
        per_node = str(slurm.tasks_per_node(env) or 1)
    else:
        return World(0, 0, 1, "single")
    try:
        rank, local_rank, size = (int(env[name]) for name in names)
        return World(rank, local_rank, size, source, int(per_node or 1))
    except (KeyError, ValueError):
        found = ", ".join(f"{name}={env.get(name, '(unset)')}" for name in names)
        raise ConfigError(
            f"{source} environment: {found}: must be integers; start the ranks by srun or "
            "torchrun, which set them, or unset them all for one process"
        ) from None


def pick_device(kind: str, local_rank: int) -> torch.device:
    """The device of this process: `kind` is auto, cuda or cpu. The index is the local rank, or 0
    when one GPU is seen.

    Raises ConfigError when there are fewer GPUs than tasks on this host, or when a GPU is in this
    host and in the job, but torch cannot use it: the run would train on the CPU for days.
    """
    import torch

    host = socket.gethostname()
    if kind == "auto" and not torch.cuda.is_available() and (gpu := _unusable_gpu()):
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        raise ConfigError(
            f"distributed.device = 'auto': {host} has {gpu} GPUs and the job was given some, but "
            f"torch {torch.__version__} (built with {build}) cannot use them; look at nvidia-smi "
            "there and install a torch that fits the driver, or set distributed.device=cpu"
        )
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
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


def _unusable_gpu() -> str | None:
    """The maker of the GPUs on this host's PCI bus, when SLURM has given some to the job. SLURM
    alone is not enough: a test cluster counts GPUs that do not exist."""
    given = os.environ.get("SLURM_STEP_GPUS") or os.environ.get("SLURM_GPUS_ON_NODE")
    if not given or given == "0":
        return None
    root = Path(os.environ.get("KEMPNER_SYS", "/sys"))  # a test puts a tree of its own here
    for device in root.glob("bus/pci/devices/*"):
        with contextlib.suppress(OSError):
            maker = PCI_GPUS.get((device / "vendor").read_text().strip())
            if maker and (device / "class").read_text().startswith("0x03"):  # a display controller
                return maker
    return None


def start(world: World, device: torch.device, run_dir: str | Path, start_timeout: float) -> None:
    """Make the default process group (gloo for CPU tensors, NCCL for CUDA) and prove it.

    Raises RuntimeError that names the ranks that are missing, and the likely causes. A network that
    swallows the first collective ends the process after 60 s with the same words, and an NCCL that
    never comes up does so after `start_timeout` seconds: its own start has no limit.
    """
    import torch.distributed as dist

    allow_open_files()
    # A full mesh of gloo connections, made at the start, is O(world) sockets and store requests for
    # every rank. With this, a pair of ranks connects when it first has something to say.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if world.size == 1:
        _init(dist.HashStore(), world, device, start_timeout)
        return
    store = _open_store(world, Path(run_dir), start_timeout)
    _check_in(store, world, start_timeout)
    # First over gloo alone, so that a network that does not work is found before NCCL hangs in it.
    _init(dist.PrefixStore("prove", store), world, None, FIRST_COLLECTIVE_S)
    _prove(store, world, "cpu", FIRST_COLLECTIVE_S)
    if device.type == "cuda":
        dist.destroy_process_group()
        with _or_exit(start_timeout, lambda: "NCCL does not connect the ranks"):
            _init(dist.PrefixStore("train", store), world, device, start_timeout)
        _prove(store, world, "cuda", start_timeout)
    set_timeout(start_timeout)
    if not world.local_rank:
        _copy_of(Path(run_dir)).unlink(missing_ok=True)


def _init(
    store: dist.Store, world: World, device: torch.device | None, start_timeout: float
) -> None:
    """`device`: of NCCL, which then connects at once; None or a CPU: gloo alone."""
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


def _prove(store: dist.Store, world: World, device: str, seconds: float) -> None:
    """One all-reduce, in bounded time. Each rank that comes out of it says so in the store, by
    which rank 0 names the others."""
    import torch
    import torch.distributed as dist

    def message() -> str:
        missing = _missing(store, f"proved-{device}", world.size) if world.rank == 0 else []
        who = f"; ranks still in it: {_named(missing)}" if missing else ""
        return f"the first all-reduce ({device}) has not ended after {seconds:.0f} s{who}"

    with _or_exit(seconds + 5, message):
        try:
            one = torch.ones(1, device=device)
            dist.all_reduce(one)
            met = int(one.item())  # waits for the device
        except RuntimeError as error:
            raise RuntimeError(
                f"the first all-reduce ({device}) failed: {error}\n{_causes()}"
            ) from None
    assert met == world.size
    store.set(f"proved-{device}/{world.rank}", "")


def allow_open_files() -> None:
    """Raise this process's limit of open files as far as it may: the usual 1024 are soon used by
    sockets to other ranks and mapped data shards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def _or_exit(seconds: float, message: Callable[[], str]) -> Iterator[None]:
    """End the process with the message when the body takes longer: a hung collective cannot
    raise."""

    def give_up() -> None:
        text = f"error: {socket.gethostname()}: {{}}\n{_causes()}"
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


def _causes() -> str:
    return CAUSES.format(
        gloo=os.environ.get("GLOO_SOCKET_IFNAME", "(unset)"),
        nccl=os.environ.get("NCCL_SOCKET_IFNAME", "(unset)"),
    )


# --- the rendezvous ---


def _open_store(world: World, run_dir: Path, start_timeout: float) -> dist.Store:
    import torch.distributed as dist

    env, limit = os.environ, timedelta(seconds=start_timeout)
    if {"MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        # torchrun's agent serves the store itself and says so; else rank 0 does.
        serves = world.rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        port = int(env["MASTER_PORT"])
        shared = dist.TCPStore(env["MASTER_ADDR"], port, None, serves, limit)
        return dist.PrefixStore(f"kempner-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)
    note = _note_in(run_dir)
    if world.rank:
        address, port = _read_note(note, _copy_of(run_dir), world.local_rank, start_timeout)
        return dist.TCPStore(address, port, None, False, limit)
    store = dist.TCPStore("localhost", 0, None, True, limit, wait_for_workers=False)
    run_dir.mkdir(parents=True, exist_ok=True)
    for place in (note, _copy_of(run_dir)):
        write_atomic(place, f"{slurm.own_address()} {store.port}\n")
    return store


def _note_in(run_dir: Path) -> Path:
    return run_dir / f".rendezvous-{slurm.start_name()}"


def _copy_of(run_dir: Path) -> Path:
    """Where the first rank of a host leaves the address for the others of its host. The run is in
    the name, too: jobs of two clusters may have one number."""
    run = f"{zlib.crc32(str(run_dir.absolute()).encode()):08x}"
    return Path(tempfile.gettempdir()) / f"kempner-{os.getuid()}-{run}{_note_in(run_dir).name}"


def _read_note(note: Path, copy: Path, local_rank: int, start_timeout: float) -> tuple[str, int]:
    """The address that rank 0 has published. Only the first rank of each host asks the shared file
    system, less and less often, and copies it for the others of its host: the metadata server sees
    one poller a host, while rank 0 is still importing torch."""
    began = time.monotonic()
    pause = 0.05
    while (waited := time.monotonic() - began) < start_timeout:
        # A container may give each task a /tmp of its own: then all ask the shared file system.
        for file in [copy] * (local_rank > 0) + [note] * (not local_rank or waited > LOCAL_COPY_S):
            with contextlib.suppress(OSError, ValueError):  # not there yet, or stale
                if file == copy and file.stat().st_uid != os.getuid():
                    continue
                address, port = file.read_text().split()
                if file == note:
                    with contextlib.suppress(OSError):
                        write_atomic(copy, f"{address} {port}\n")
                return address, int(port)
            if file == note:
                with contextlib.suppress(OSError):
                    os.listdir(note.parent)  # NFS forgets its cached "no such file"
        time.sleep(pause)
        pause = min(1.2 * pause, SLOWEST_POLL_S)
    raise RuntimeError(
        f"rank 0 has published no address in {note} within {start_timeout:.0f} s "
        f"(distributed.start_timeout)\n{_causes()}"
    )


def _check_in(store: dist.Store, world: World, start_timeout: float) -> None:
    """Every rank counts itself in; rank 0 waits for the count, and names those that do not come."""
    store.set(f"here/{world.rank}", socket.gethostname())
    store.add("here", 1)
    if world.rank:
        return
    deadline = time.monotonic() + start_timeout
    while store.add("here", 0) < world.size:
        if time.monotonic() > deadline:
            missing = _missing(store, "here", world.size)
            raise RuntimeError(
                f"ranks {_named(missing)} of {world.size} did not come within "
                f"{start_timeout:.0f} s (distributed.start_timeout)\n{_causes()}"
            )
        time.sleep(0.02)


def _missing(store: dist.Store, what: str, size: int) -> list[int]:
    return [rank for rank in range(size) if not store.check([f"{what}/{rank}"])]


def _named(ranks: list[int]) -> str:
    more = f" and {len(ranks) - NAMED_RANKS} more" if len(ranks) > NAMED_RANKS else ""
    return f"{ranks[:NAMED_RANKS]}{more}"


def forget_rendezvous(run_dir: Path) -> None:
    """Remove the published addresses, also those that killed starts have left. Rank 0, once all
    have met."""
    for note in run_dir.glob(".rendezvous-*"):
        note.unlink(missing_ok=True)


def set_timeout(seconds: float, groups: Iterable[dist.ProcessGroup] = ()) -> None:
    """Let the collectives of the default group and of `groups` take longer than `seconds`, the
    longest that the watchdog waits.

    Two judges of one hang would race: NCCL's own watchdog aborts the process without a record, on
    the rank that waited instead of the one that hangs. Ours decides; NCCL's is the last resort.
    """
    import torch.distributed as dist

    for group in (dist.group.WORLD, *groups):
        limit = timedelta(seconds=seconds + LAST_RESORT_S)
        dist.distributed_c10d._set_pg_timeout(limit, group)
