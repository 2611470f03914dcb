"""Ranks of a world as processes of a test, which say what they have found."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = ["torch", "torch.distributed", "kempner.parallel.build", "kempner.parallel.context"]
CONTEXT.set_forkserver_preload(PRELOAD)


def told_by_ranks(task: Callable[[int, str, Any], None], world: int, store: Path) -> list[Any]:
    """What each of `world` processes puts into the queue: task(rank, store, queue). `store` is
    where they meet."""
    said = CONTEXT.Queue()
    ranks = [CONTEXT.Process(target=task, args=(r, str(store), said)) for r in range(world)]
    for process in ranks:
        process.start()
    try:
        told = [said.get(timeout=90) for _ in ranks]
        for process in ranks:
            process.join(30)
    finally:
        for process in ranks:
            process.kill()
    return told
