"""Start and rendezvous of a program's supervisors, as tasks of an srun step or as processes on this
machine. Rank 0's process also runs the coordinator. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time

from kempner.jobs.program.channel import Channel
from kempner.jobs.program.coordinator import RANKS_START_S, Coordinator
from kempner.jobs.program.options import Options
from kempner.jobs.program.supervisor import SIGNAL_REQUESTS, Signals, Supervisor
from kempner.jobs.ranks import peers, rendezvous
from kempner.jobs.ranks.placement import World, discover_world
from kempner.jobs.ranks.port_range import listen_in_range
from kempner.jobs.ranks.process_group import allow_open_files
from kempner.jobs.this_job import host_name, own_address

JOIN_TRIES = 20


def start_supervisor(options: Options) -> int:
    """Supervise one rank as a task of a srun step."""
    return _rank(options, discover_world(), None)


def supervise_here(options: Options, ranks: int) -> int:
    """Supervise all ranks on this machine, without Slurm; signals go to each rank's process."""
    os.environ.setdefault("KEMPNER_ATTEMPT_ID", f"{host_name()}.0.{os.getpid()}")
    os.environ.setdefault(peers.PEER_KEY_VARIABLE, peers.new_key())
    server = listen_in_range("127.0.0.1")
    if ranks == 1:
        return _rank(options, World(0, 0, 1, "single"), server)
    # Blocked across the forks: no signal is lost before a child has its handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNAL_REQUESTS)
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            world = World(rank, rank, ranks, "single", ranks)
            os._exit(_rank(options, world, server))
        pids.append(pid)
    # A SIGTERM to the process group reaches the children, too: they act on it, and this process
    # must wait for them.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The children have it; here it would keep the port open after their end.
    server.close()
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return max((128 - code if code < 0 else code for code in codes), default=0)


def _rank(options: Options, world: World, server: socket.socket | None) -> int:
    """Run one rank. `server`: the listening socket for ranks on one machine; ranks of a step meet
    in the run directory."""
    signals = Signals()
    supervisor = Supervisor(options, world, signals)
    here = server is not None
    if world.rank:
        address = ("127.0.0.1", server.getsockname()[1]) if server is not None else None
        code = supervisor.main(_join(options, world, address))
        if not here and world.local_rank == 0:
            rendezvous.forget_copy(options.run_dir)
        return code
    # One connection per rank, here and in the program's torch store, which inherits the limit.
    allow_open_files()
    entrance = peers.Entrance(server or listen_in_range(), peers.job_key())
    port, host = entrance.port, "127.0.0.1" if here else own_address()
    # In a thread: it waits for file systems, which must not delay rank 0's signals.
    coordinator = Coordinator(options, world.size, entrance, host)
    thread = threading.Thread(target=coordinator.run, name="coordinator")
    thread.start()
    # Published once it listens: the others connect as soon as they read the address.
    if not here and world.size > 1:
        rendezvous.publish_address(options.run_dir, port)
    code = supervisor.main(_join(options, world, ("127.0.0.1", port)))
    thread.join(10.0)
    rendezvous.forget_copy(options.run_dir)
    return code


def _join(options: Options, world: World, endpoint: tuple[str, int] | None) -> Channel:
    """Connect to rank 0. Raises OSError."""
    copy = rendezvous.copy_of(options.run_dir)
    for tries in range(JOIN_TRIES):
        address, port = endpoint or rendezvous.find_address(
            options.run_dir, world.local_rank, RANKS_START_S
        )
        try:
            channel = Channel.connect(address, port, RANKS_START_S)
        except OSError:
            if tries == JOIN_TRIES - 1:
                raise
            with contextlib.suppress(OSError):  # it may belong to another cluster
                copy.unlink(missing_ok=True)
            time.sleep(1.0)
        else:
            break
    return channel
