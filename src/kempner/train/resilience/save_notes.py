"""Notes of --check on a job: the needs of its saves, and packages its nodes may lack. No torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kempner.train.sections import RunConfig


def warn_of_job(
    cfg: RunConfig,
    world: tuple[int, int] | None,
    count_replicas: Callable[[RunConfig, int, int], int],
) -> None:
    """Warn of what the job's nodes may lack, judging by this host. `world`: ranks, and ranks per
    node; None: unknown."""
    if cfg.checkpoint.save and world is not None:
        print_notes(cfg, world[0], count_replicas(cfg, *world), world[1])
    if cfg.train.fp8 != "none" or cfg.train.attention != "auto":
        from kempner.train import levers

        levers.warn_of_packages(cfg)
    if cfg.train.compile:
        from kempner.jobs.system import compiler

        compiler.warn_of_nodes(cfg.distributed.device)
    if cfg.distributed.device != "cpu":
        from kempner.jobs.gpu import driver

        driver.compare_with_torch()


def print_notes(cfg: RunConfig, ranks: int, replicas: int, per_node: int) -> None:
    """Print how checkpoint.interval = auto chooses, and a warning if the saves need more memory
    than a node has, assuming that nodes are like this host."""
    from kempner.checkpoint import size
    from kempner.checkpoint.timer import describe_auto
    from kempner.jobs.ranks import host_memory
    from kempner.parallel.layout import axis_sizes

    if cfg.checkpoint.interval == "auto":
        print(f"note: {describe_auto(ranks)}", file=sys.stderr)
    inner = ranks // replicas
    axes = axis_sizes(cfg.distributed, inner, min(per_node, inner))
    whole = size.checkpoint_bytes(cfg.model, cfg.lora, cfg.optimizer, cfg.train.weights)
    needed = size.host_bytes_of_node(whole, axes, per_node)
    there = host_memory.USABLE * host_memory.job_memory()
    if needed > there:
        gib = 2.0**30
        print(
            f"warning: the saves of {per_node} rank{'s' * (per_node > 1)} hold "
            f"{needed / gib:,.0f} GiB of a node's memory, and a node like this "
            f"one has {there / gib:,.0f} GiB for them: each save goes in waves, and the steps "
            "wait for all of it; use more nodes, or larger ones",
            file=sys.stderr,
        )
