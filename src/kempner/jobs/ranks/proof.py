"""Proof that the ranks of a group reach each other over the detected network: in bounded time, and
with the names of missing ranks."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kempner.config.option import ConfigError
from kempner.jobs import this_job

if TYPE_CHECKING:
    import torch.distributed as dist

    from kempner.jobs.ranks.placement import World


def prove(store: dist.Store, world: World, device: str, seconds: float) -> None:
    """Run one all-reduce in bounded time. Each rank that completes it notes that in the store, so
    that rank 0 can name the others."""
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

    # Later than the collective's own limit, whose error says more.
    with or_exit(seconds + 5, message):
        try:
            one = torch.ones(1, device=device)
            dist.all_reduce(one)
            # On a GPU all_reduce() returns at once; item() waits for the result.
            met = int(one.item())
        except RuntimeError as error:
            raise RuntimeError(
                f"the first all-reduce ({device}) failed: "
                f"{error}\n{rendezvous.meeting_failure_causes()}"
            ) from None
    assert met == world.size
    store.set(f"proved-{device}/{world.rank}", "")


def log_nccl(world: World) -> Path | None:
    """Make NCCL log its network on the first rank of each host. Returns the log file; None on other
    ranks, or if the user has set NCCL's log."""
    if world.local_rank or any(name in os.environ for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE")):
        return None
    from kempner.jobs.ranks import nccl_transport

    fd, name = tempfile.mkstemp(prefix="kempner-nccl-")
    # NCCL opens it by name.
    os.close(fd)
    os.environ.update(nccl_transport.LOG_SETTINGS, NCCL_DEBUG_FILE=name)
    return Path(name)


def check_network(log: str) -> None:
    """Print this host's network from NCCL's log. Raises ConfigError if NCCL does not use the fabric
    found here: the run would take ten times as long."""
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


@contextlib.contextmanager
def or_exit(seconds: float, message: Callable[[], str]) -> Iterator[None]:
    """Exit with the message if the body takes longer: a hung collective cannot raise."""

    from kempner.jobs.ranks import rendezvous

    def give_up() -> None:

        text = f"error: {socket.gethostname()}: {{}}\n{rendezvous.meeting_failure_causes()}"
        # message() asks the store, which may also hang.
        backstop = threading.Timer(10.0, os._exit, (1,))
        backstop.daemon = True
        backstop.start()
        print(text.format(message()), file=sys.stderr, flush=True)
        # Not sys.exit(), which ends only this thread: the main thread hangs in the collective.
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
