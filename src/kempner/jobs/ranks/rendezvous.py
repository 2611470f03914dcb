"""Rendezvous of the ranks: rank 0 publishes its address in the run directory, the others connect to
its store, and rank 0 counts them.

No port is ever guessed. The cost per rank does not grow with the world, except on rank 0.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import stat
import tempfile
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kempner.jobs import this_job
from kempner.jobs.ranks.port_range import store_server
from kempner.jobs.system.files import write_atomic

if TYPE_CHECKING:
    import torch.distributed as dist


LOCAL_COPY_S = 10.0  # wait of local ranks for their first rank's copy of the address
SLOWEST_POLL_S = 1.0
LITTER_S = 86400.0  # longer than any start
OURS = re.compile(r"kempner-(\d+-[0-9a-f]{8}\.rendezvous-|nccl-)")
NAMED_RANKS = 32  # missing ranks named in a message

CAUSES = """  likely causes:
    - a task died or never started: look at the other ranks' logs and at `srun`'s messages above
    - a firewall or the wrong network between the hosts: GLOO_SOCKET_IFNAME={gloo},
      NCCL_SOCKET_IFNAME={nccl}
    - two tasks on one GPU: --ntasks-per-node must equal the GPUs per node
    - hosts that read different files: the run directory must be on a file system that all hosts
      share"""


def meeting_failure_causes() -> str:
    return CAUSES.format(
        gloo=os.environ.get("GLOO_SOCKET_IFNAME", "(unset)"),
        nccl=os.environ.get("NCCL_SOCKET_IFNAME", "(unset)"),
    )


class Rank(Protocol):
    """The part of a placement.World that ranks need to meet."""

    @property
    def rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def size(self) -> int: ...


def open_store(world: Rank, run_dir: Path, start_timeout: float) -> dist.Store:
    import torch.distributed as dist

    env, limit = os.environ, timedelta(seconds=start_timeout)
    if {"MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        # torchrun's agent may serve the store and then says so; else rank 0 does.
        serves = world.rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        port = int(env["MASTER_PORT"])
        shared = dist.TCPStore(_numeric(env["MASTER_ADDR"]), port, None, serves, limit)
        # The agent's store outlives a restart: keys of the previous start must not be found.
        return dist.PrefixStore(f"kempner-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)
    if world.rank:
        address, port = find_address(run_dir, world.local_rank, start_timeout)
        return dist.TCPStore(_numeric(address), port, None, False, limit)
    port, server = store_server()
    store = dist.TCPStore(
        # The server listens on all addresses; only rank 0's own client uses the loopback.
        "127.0.0.1",
        port,
        None,
        True,
        limit,
        wait_for_workers=False,
        master_listen_fd=server,
    )
    publish_address(run_dir, store.port)
    return store


def publish_address(run_dir: Path, port: int) -> None:
    """Publish the address of rank 0's store."""
    run_dir.mkdir(parents=True, exist_ok=True)
    text = f"{this_job.own_address()} {port}\n"
    write_atomic(_note_in(run_dir), text)
    with contextlib.suppress(OSError):  # another user may own a file of that name
        write_atomic(copy_of(run_dir), text)


def find_address(run_dir: Path, local_rank: int, start_timeout: float) -> tuple[str, int]:
    """Return the address and port that rank 0 has published. Raises RuntimeError."""
    return _read_note(_note_in(run_dir), copy_of(run_dir), local_rank, start_timeout)


def _numeric(host: str) -> str:
    """Resolve a host name. TCPStore asks for an IPv6 address first, which is often not in
    /etc/hosts, and waits 5 s if the name server does not answer."""
    with contextlib.suppress(OSError):
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
        return addresses.pop() if len(addresses) == 1 else host
    return host


def _note_in(run_dir: Path) -> Path:
    return run_dir / f".rendezvous-{this_job.start_name()}"


def copy_of(run_dir: Path) -> Path:
    """Return the file in which the first rank of a host leaves the address for the host's other
    ranks. Its name includes the run: jobs of two clusters may have the same number."""
    run = f"{zlib.crc32(str(run_dir.absolute()).encode()):08x}"
    return Path(tempfile.gettempdir()) / f"kempner-{os.getuid()}-{run}{_note_in(run_dir).name}"


def forget_copy(run_dir: Path) -> None:
    """Remove the copy and the leftovers of killed starts beside it. The first rank of a host calls
    this once all ranks of the host have met."""
    run = copy_of(run_dir).name.partition(".rendezvous-")[0]
    for path in Path(tempfile.gettempdir()).glob("kempner-*"):
        with contextlib.suppress(OSError):
            # Not stat(): in a world-writable directory the name may be a link to anything.
            status = path.lstat()
            old = time.time() > status.st_mtime + LITTER_S
            if status.st_uid != os.getuid():
                continue
            if path.name.startswith(f"{run}.rendezvous-") or (old and OURS.match(path.name)):
                path.unlink()
            elif old and path.name.startswith("kempner-rank"):
                _remove_unless_held(path)


def _remove_unless_held(directory: Path) -> None:
    """Remove a rank's directory unless its process is alive and holds the lock on its file `held`.
    The lock also works from a container, whose processes have other ids."""
    with open(directory / "held") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)


def _read_note(note: Path, copy: Path, local_rank: int, start_timeout: float) -> tuple[str, int]:
    """Read the address that rank 0 has published. Only the first rank of each host polls the shared
    file system, less and less often, and copies the address for the host's other ranks: the
    metadata server sees one poller per host while rank 0 is still importing torch."""
    began = time.monotonic()
    pause = 0.05
    while (waited := time.monotonic() - began) < start_timeout:
        # A container may give each task its own /tmp: then all ask the shared file system.
        for file in [copy] * (local_rank > 0) + [note] * (not local_rank or waited > LOCAL_COPY_S):
            with contextlib.suppress(OSError, ValueError):  # not there yet, or stale
                address, port = _read_file(file, file == copy).split()
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
        f"(distributed.start_timeout)\n{meeting_failure_causes()}"
    )


def _read_file(path: Path, own: bool) -> str:
    """Read a regular file. Raises OSError, even for a FIFO, which might block, and with `own` for
    another user's file."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(path, opener=lambda name, _: os.open(name, flags)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or (own and status.st_uid != os.getuid()):
            raise OSError(errno.EPERM, "is not our file", str(path))
        return file.read()


def await_ranks(store: dist.Store, world: Rank, start_timeout: float) -> None:
    """Count this rank in; rank 0 waits for all ranks. Raises RuntimeError naming missing ranks."""
    # The key before the count: a counted rank is never named as missing.
    store.set(f"here/{world.rank}", socket.gethostname())
    store.add("here", 1)
    if world.rank:
        return
    deadline = time.monotonic() + start_timeout
    while store.add("here", 0) < world.size:
        if time.monotonic() > deadline:
            missing = missing_ranks(store, "here", world.size)
            raise RuntimeError(
                f"ranks {name_ranks(missing)} of {world.size} did not arrive within "
                f"{start_timeout:.0f} s (distributed.start_timeout)\n{meeting_failure_causes()}"
            )
        time.sleep(0.02)


def missing_ranks(store: dist.Store, what: str, size: int) -> list[int]:
    return [rank for rank in range(size) if not store.check([f"{what}/{rank}"])]


def name_ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - NAMED_RANKS} more" if len(ranks) > NAMED_RANKS else ""
    return f"{ranks[:NAMED_RANKS]}{more}"
