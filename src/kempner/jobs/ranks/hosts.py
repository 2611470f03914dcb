"""Hosts of the ranks."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import torch.distributed as dist

from kempner.jobs.ranks.placement import World
from kempner.jobs.this_job import host_name


def all_hosts(world: World) -> list[str]:
    """Return the host of each rank on rank 0; on other ranks only the host of rank 0.

    Each rank puts one small key into the rendezvous store; a gather would send the whole list to
    all ranks.
    """
    store = dist.distributed_c10d._get_default_store()
    store.set(f"host/{world.rank}", host_name())
    # multi_get() waits until all these keys exist: only rank 0 waits for all ranks.
    ranks = range(1 if world.rank else world.size)
    return [name.decode() for name in store.multi_get([f"host/{rank}" for rank in ranks])]


def different_devices(world: World, name: str) -> str:
    """Return how many ranks have which device if they differ, "" if not or on other ranks than 0.
    `name`: this rank's. All ranks must call it."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"device/{world.rank}", name)
    if world.rank:
        return ""
    names = store.multi_get([f"device/{rank}" for rank in range(world.size)])
    counts = Counter(name.decode() for name in names)
    return ", ".join(f"{n} x {name}" for name, n in counts.items()) if len(counts) > 1 else ""


def ask_hosts(ranks: list[int], seconds: float) -> list[str]:
    """Return the hosts of these ranks during a hang. Raises RuntimeError without a timely answer.

    Uses a separate connection, because the default one may be busy in the call that hangs. Rank 0,
    which serves the store, must be alive.
    """
    store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=seconds))
    return [name.decode() for name in store.multi_get([f"host/{rank}" for rank in ranks])]
