"""Report for a run that needs more memory than its GPU has: a snapshot, and a remedy."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

from kempner.extensions.planner.gpus import GPUS, RESERVE_GIB
from kempner.extensions.planner.memory import GIB, estimate_memory, one_replica
from kempner.extensions.planner.search import Check, best_candidates, mesh_choices
from kempner.jobs.ranks.placement import World
from kempner.train.recording.profiling import memory_snapshot
from kempner.train.sections import RunConfig


def explain_memory(cfg: RunConfig, world: World, check: Check) -> str:
    """Write a snapshot of this rank's GPU memory; returns advice on how to need less."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = Path(cfg.run.dir, "profile", f"out-of-memory-rank-{world.rank}.pickle")
    snapshot_note = f"{path} shows what filled it; " if memory_snapshot(device, path) else ""
    return snapshot_note + memory_advice(cfg, world.size * world.replicas, world.per_node, check)


def memory_advice(cfg: RunConfig, world_size: int, per_node: int, check: Check) -> str:
    """Advise a run that is out of memory: the largest parts, and the fastest combination that needs
    a tenth less, with its present axes, or else with shards over all ranks."""
    needs = estimate_memory(cfg, world_size, per_node)
    # Only the order of the fitting combinations matters: the speeds of any GPU will do.
    gpu = GPUS["H100"]._replace(gib=0.9 * needs.peak / GIB + RESERVE_GIB)
    parts = sorted(needs.parts.items(), key=lambda part: -part[1])[:3]
    breakdown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
    _, ranks, _ = one_replica(cfg, world_size, per_node)
    axes = [f"distributed.{name}" for name in ("dp_shard", "tp", "cp", "pp")]
    full = [mesh for mesh in mesh_choices(ranks) if math.prod(mesh[axis] for axis in axes) == ranks]
    # Not all meshes, which take minutes for thousands of ranks: every failing rank asks.
    best = partial(best_candidates, cfg, world_size, per_node, gpu, check, 1)
    candidates = best(meshes=[{}]) or best(meshes=full)
    fix = (
        f"try {candidates[0].words} ({candidates[0].memory.peak / GIB:.1f} GiB)"
        if candidates
        else "use more GPUs"
    )
    return f"the planner estimates {needs.peak / GIB:.1f} GiB a GPU ({breakdown}); {fix}"
