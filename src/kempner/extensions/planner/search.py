"""Search for combinations of levers that fit a GPU, ranked by estimated time. No torch.

This module does not know what may be combined: every candidate passes through the checks of a run's
configuration, and any that they refuse is dropped.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kempner.config.option import ConfigError
from kempner.config.values import to_text
from kempner.extensions.planner.cost import (
    HOST_BYTES,
    Time,
    host_offload_bytes,
    step_seconds,
)
from kempner.extensions.planner.gpus import GpuSpec
from kempner.extensions.planner.memory import GIB, Memory, estimate_memory, one_replica
from kempner.parallel.layout import axis_sizes
from kempner.train import checks as combinations
from kempner.train.sections import RunConfig

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
RECOMPUTE = ("none", "selective", "full")
WITHIN = (1, 2, 4, 8)  # ranks of a node that share a product or a sequence
METHODS = [{"distributed.cp_method": method} for method in ("ring", "ulysses")]
MESH = ("dp_shard", "dp_replicate", "nodes_per_fsdp_group", "tp", "cp", "pp")
UNUSED: dict[str, Any] = {  # where a search begins, for any configuration
    "distributed.sync_once": False,
    "distributed.reshard_after_forward": True,
    "train.offload_activations": 0,
}
LEVERS: tuple[dict[str, Any], ...] = (  # trade communication, or time, for memory
    {},
    {"distributed.sync_once": True},
    {"distributed.reshard_after_forward": False},
    {"train.offload_activations": 2, "train.recompute": "full"},
)


@dataclass(frozen=True)
class Candidate:
    overrides: dict[str, Any]  # by section.key; values equal to the configuration's are omitted
    memory: Memory
    time: Time

    @property
    def words(self) -> str:
        return " ".join(f"--{key}={to_text(value)}" for key, value in self.overrides.items())


Check = Callable[[RunConfig, int, int], list[str]]
"""Lists why a configuration does not fit these ranks and ranks per node: configure.check_world."""


def best_candidates(
    cfg: RunConfig,
    world_size: int,
    per_node: int,
    gpu: GpuSpec,
    check: Check,
    count: int = 3,
    host: float = HOST_BYTES,
    meshes: Sequence[Mapping[str, Any]] | None = None,
) -> list[Candidate]:
    """Return the combinations that fit and are fastest by the estimate; among equals, those
    with fewer changes. `host`: bytes per node available for offloading; `meshes`: to choose
    from; None: all."""
    candidates = []
    for combination in combinations_of(cfg, world_size, per_node, check, meshes):
        for overrides in combination:
            other = changed_by(cfg, overrides)
            memory = estimate_memory(other, world_size, per_node)
            if memory.peak > gpu.usable:
                break  # larger micro-batches need even more
            if host_offload_bytes(other, world_size, per_node) <= host:
                time = step_seconds(other, world_size, per_node, gpu)
                candidates.append(Candidate(overrides, memory, time))
    candidates.sort(
        key=lambda candidate: (
            # Rounded, so that among equals the candidate with fewer changes wins.
            rounded(candidate.time.step, 3),
            len(candidate.overrides),
            candidate.memory.peak,
        )
    )
    different: dict[tuple[float, int], Candidate] = {}  # equal numbers offer no choice
    for candidate in candidates:
        different.setdefault(
            (rounded(candidate.time.step, 2), round(candidate.memory.peak / GIB)), candidate
        )
    return list(different.values())[:count]


def rounded(step: float, digits: int) -> float:
    """Round seconds to so many decimals, or a short step to so many significant digits."""
    return round(step, digits) if step >= 0.1 else float(f"{step:.{digits}g}")


def why_none(cfg: RunConfig, world_size: int, per_node: int, check: Check) -> str:
    """Return what to do if best_candidates() finds nothing: memory is the reason if any combination
    passes the checks."""
    every = itertools.chain.from_iterable(combinations_of(cfg, world_size, per_node, check))
    if next(every, None) is not None:
        return "use more GPUs, or a smaller model"
    smallest = check(changed_by(cfg, {"train.micro_batch": 1}), world_size, per_node)
    return "; ".join(smallest or check(cfg, world_size, per_node)) or "no combination is allowed"


def lever_changes(
    cfg: RunConfig, levers: Mapping[str, Any], world_size: int, per_node: int
) -> dict[str, Any]:
    """Return the levers that differ from the configuration; axes of equal sizes count as equal,
    however they are written."""
    changes = {key: value for key, value in levers.items() if value != value_of(cfg, key)}
    axes = changes.keys() & {f"distributed.{name}" for name in MESH}
    with contextlib.suppress(ConfigError):
        there = axis_sizes(cfg.distributed, world_size, per_node)
        if axis_sizes(changed_by(cfg, levers).distributed, world_size, per_node) == there:
            changes = {key: value for key, value in changes.items() if key not in axes}
    return changes


def combinations_of(
    cfg: RunConfig,
    world_size: int,
    per_node: int,
    check: Check,
    meshes: Sequence[Mapping[str, Any]] | None = None,
) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield, for each combination of levers, its changes with each micro-batch size that the checks
    accept, smallest first. Ranks of a replica that the axes leave over are copies."""
    _, ranks, near = one_replica(cfg, world_size, per_node)
    # Problems of the configuration itself do not rule out any change.
    problems = problems_of(cfg)

    def accepted(
        levers: dict[str, Any], micro_batches: Sequence[int | None]
    ) -> Iterator[dict[str, Any]]:
        for micro in micro_batches:
            choice = {**UNUSED, "train.micro_batch": micro, **levers}
            overrides = lever_changes(cfg, choice, ranks, near)
            other = changed_by(cfg, overrides)
            if not (problems_of(other) - problems or check(other, world_size, per_node)):
                yield overrides

    own = cfg.train.micro_batch
    sizes = sorted({*MICRO_BATCHES, own}) if own else [*MICRO_BATCHES, None]  # None: the share
    experts = (1, 2, 4, 8) if cfg.model.n_experts else (1,)
    meshes = mesh_choices(ranks) if meshes is None else meshes
    for mesh, ep in itertools.product(meshes, experts):
        axes = {**mesh, "distributed.ep": ep}
        # Most meshes do not suit the model or the ranks, with any other levers.
        least = (accepted({**axes, "train.recompute": how}, (1,)) for how in RECOMPUTE)
        if next(itertools.chain.from_iterable(least), None) is not None:
            for recompute, lever in itertools.product(RECOMPUTE, LEVERS):
                # A lever that sets recompute itself is one candidate, not one per choice.
                if lever.get("train.recompute", recompute) == recompute:
                    levers = {"train.recompute": recompute, **axes, **lever}
                    yield accepted(levers, sizes)


def mesh_choices(world_size: int) -> list[dict[str, Any]]:
    """List the axis sizes that divide so many ranks, by section.key, with both ways to
    share a sequence."""
    small = [n for n in range(1, math.isqrt(world_size) + 1) if world_size % n == 0]
    shards = sorted({*small, *(world_size // n for n in small)})
    return [
        {"distributed.dp_shard": shard, "distributed.tp": tp, "distributed.cp": cp,
         "distributed.pp": pp, "distributed.dp_replicate": -1,
         "distributed.nodes_per_fsdp_group": None, **method}
        for shard, tp, cp, pp in itertools.product(shards, WITHIN, WITHIN, (1, 2, 4))
        if world_size % (shard * tp * cp * pp) == 0
        for method in ([{}] if cp == 1 else METHODS)
    ]  # fmt: skip


def problems_of(cfg: RunConfig) -> set[str]:
    sections = (getattr(cfg, section.name) for section in fields(cfg))
    own = [text for one in sections if hasattr(one, "problems") for text in one.problems()]
    return {*own, *combinations.combination_problems(cfg)}


def value_of(cfg: RunConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(cfg, section), name)


def changed_by(cfg: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    by_section: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        by_section.setdefault(section, {})[name] = value
    sections = {name: replace(getattr(cfg, name), **values) for name, values in by_section.items()}
    return replace(cfg, **sections)
