"""The settings that a tune may try: the choices of each lever, the allowed combinations, and the
planner's estimates of them. No torch.

A candidate is its set of changes to the configuration, by section.key; {} is the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kempner.config.option import ConfigError
from kempner.config.values import to_text
from kempner.extensions.lowcomm.config import LowcommConfig
from kempner.extensions.planner.cost import step_seconds
from kempner.extensions.planner.gpus import GPUS, RESERVE_GIB, GpuSpec, gpu_of_device
from kempner.extensions.planner.memory import GIB, estimate_memory, loss_rows, one_replica
from kempner.extensions.planner.search import (
    LEVERS,
    MICRO_BATCHES,
    RECOMPUTE,
    UNUSED,
    Check,
    best_candidates,
    changed_by,
    lever_changes,
    mesh_choices,
    problems_of,
)
from kempner.parallel.layout import Axes, axis_sizes
from kempner.train.levers import FP8_LEVERS, SPEED_LEVERS, package_problems
from kempner.train.sections import RunConfig, micro_batch

Overrides = dict[str, Any]
MESHES = 8  # to try, if the world can be divided in more ways
PLANNED = 6  # number of the planner's best with which a tune begins
MAY_BE_ALLOWED = ("fp8",)  # changes a training's numbers beyond rounding, for --allow
LONG_TUNE_STEP_S = 1.0  # a tune cannot run many such steps, and measures shorter ones
DOUBT = 1.3  # factor by which the planner's memory may be wrong
COMPILED = ((False, "block"), (True, "block"), (True, "model"))
UNPLANNED = ("train.compile_scope", *SPEED_LEVERS)  # their memory is unknown to the planner


class RankDevice(NamedTuple):
    """A rank's device, as far as the choices depend on it."""

    name: str  # of the GPU, as the driver reports it; CPU
    gib: float  # memory for one rank
    compiles: bool = True
    fp8: bool = False
    mxfp8: bool = False

    @property
    def is_gpu(self) -> bool:
        return self.name != "CPU"

    @property
    def limit(self) -> float:
        """Bytes available to a rank's tensors; on a CPU, to its whole process."""
        return (self.gib - RESERVE_GIB if self.is_gpu else 0.9 * self.gib) * GIB

    @property
    def spec(self) -> GpuSpec | None:
        """The planner's figures of this GPU; None: unknown."""
        found = gpu_of_device(self.name)
        return found and found._replace(gib=self.gib)


@dataclass(frozen=True)
class LeverAxis:
    """The choices of one lever, which exclude each other."""

    choices: tuple[Overrides, ...]

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(key for choice in self.choices[:1] for key in choice)


def shorter_batch(cfg: RunConfig, ranks: int, per_node: int, machine: RankDevice) -> int | None:
    """Return the number of sequences of a shorter step, if the planner estimates a long step; None:
    measure the step itself. The shorter step has two passes of the largest micro-batch that may
    fit, so that gradients are summed as in the whole step. A pipeline needs all passes."""
    train, spec = cfg.train, machine.spec
    if not spec or not train.micro_batch or cfg.distributed.pp > 1 or cfg.of(LowcommConfig).on:
        return None
    if step_seconds(cfg, ranks, per_node, spec).step < LONG_TUNE_STEP_S:
        return None
    fits = 1
    for micro in MICRO_BATCHES:
        other = changed_by(cfg, {"train.micro_batch": micro})
        # Each size is twice the previous one, so no later one divides the batch either.
        if train.sequences % (ranks * micro):
            break
        if estimate_memory(other, ranks, per_node).peak < DOUBT * machine.limit:
            fits = micro
    unit = ranks * max(fits, train.micro_batch)
    passes = train.sequences // unit
    # Two or three passes have no shorter divisor with two.
    if train.sequences % unit or passes < 4:
        return None
    # The fewest passes, at least 2, that divide the whole step; for a prime number, all.
    fewest = next(n for n in range(2, passes + 1) if passes % n == 0)
    return unit * fewest if fewest < passes else None


class Space:
    """All candidates of a configuration in its world."""

    def __init__(
        self,
        cfg: RunConfig,
        world_size: int,
        per_node: int,
        machine: RankDevice,
        check: Check,
        allow: Collection[str] = (),
        short: bool = False,
    ) -> None:
        """`short`: the step is that of shorter_batch()."""
        self._short = short
        self.cfg, self.world_size, self.per_node = cfg, world_size, per_node
        self.machine, self._check = machine, check
        # Problems of the configuration itself do not rule out any change.
        self._problems = {*problems_of(cfg), *package_problems(cfg)}
        _, self._ranks, self._near = one_replica(cfg, world_size, per_node)
        self._allowed: dict[str, bool] = {}  # by candidate
        self._near_by: dict[str, list[Overrides]] = {}
        self.axes = self._axes(allow)

    def _axes(self, allow: Collection[str]) -> list[LeverAxis]:
        """List the axes, those that usually matter most first."""
        compiled = COMPILED if self.machine.compiles else COMPILED[:1]
        values: list[list[Overrides]] = [
            [{"train.micro_batch": micro} for micro in self._micro_batches()],
            [{"train.compile": on, "train.compile_scope": scope} for on, scope in compiled],
            self._meshes(),
            [{**UNUSED, **lever} for lever in LEVERS],
            [{"train.recompute": recompute} for recompute in RECOMPUTE],
            *([{key: value} for value in values] for key, values in self._speed_levers()),
            [{"train.loss_chunk": rows} for rows in self._chunks()],
        ]
        if self.cfg.model.n_experts:
            values.append([{"distributed.ep": ep} for ep in (1, 2, 4, 8)])
        if "fp8" in allow and self.machine.fp8:
            scales = [each for each in FP8_LEVERS if each != "mxfp8" or self.machine.mxfp8]
            values.append([{"train.fp8": scale} for scale in scales])
        return [LeverAxis(tuple(choices)) for choices in values if len(choices) > 1]

    def _speed_levers(self) -> list[tuple[str, tuple[Any, ...]]]:
        """List options and their values. A single rank sends no messages."""
        if not self.machine.is_gpu:
            return []
        alone = self._ranks == 1
        return [
            (key, values)
            for key, values in SPEED_LEVERS.items()
            if not (alone and key.startswith("distributed."))
        ]

    def _micro_batches(self) -> list[int | None]:
        """List the sizes, nearest to the configuration's first; None: a rank's whole share."""
        train = self.cfg.train
        own = train.micro_batch or max(1, train.sequences // self._ranks)
        near = sorted(MICRO_BATCHES, key=lambda micro: abs(math.log2(micro / own)))
        return [*near, None]

    def _meshes(self) -> list[Overrides]:
        """List the meshes that pass the checks, the fastest by the planner's estimate first."""
        allowed = [mesh for mesh in mesh_choices(self._ranks) if self.is_allowed(mesh)]
        if len(allowed) > MESHES:
            # Only the order of the meshes matters, so any GPU will do for an unknown device.
            spec = self.machine.spec or GPUS["H100"]
            allowed.sort(key=lambda mesh: self._seconds(mesh, spec))
        return allowed[:MESHES]

    def _chunks(self) -> list[int | None]:
        """List sizes of the loss's chunks: torch's own, and fractions of a pass."""
        axes = Axes(tp=self.cfg.distributed.tp)
        rows = loss_rows(self.cfg, axes, self.machine.is_gpu)
        rows = min(self.cfg.train.sequences * self.cfg.train.seq_len, rows)
        return [None, *(rows // part for part in (2, 8) if rows // part >= 128)]

    @property
    def tokens(self) -> int:
        """Tokens of a step, the same for all candidates."""
        return self.cfg.train.sequences * self.cfg.train.seq_len

    def config(self, overrides: Overrides) -> RunConfig:
        return changed_by(self.cfg, overrides)

    def canonical(self, overrides: Mapping[str, Any]) -> Overrides:
        """Return the same candidate with only its real changes, sorted."""
        changes = dict(overrides)
        # Without compilation the scope has no effect: give each candidate one name.
        if changes.get("train.compile") is False:
            changes["train.compile_scope"] = "block"
        changes = lever_changes(self.cfg, changes, self._ranks, self._near)
        # A size that equals the whole share is the configuration itself.
        if self.cfg.train.micro_batch is None and changes.get("train.micro_batch"):
            train = replace(self.cfg.train, micro_batch=None)
            try:
                axes = axis_sizes(self.config(changes).distributed, self._ranks, self._near)
                if (
                    micro_batch(train, axes.data_ranks, train.sequences)
                    == changes["train.micro_batch"]
                ):
                    del changes["train.micro_batch"]
            except ConfigError:
                pass  # is_allowed() reports it
        # Sorted, because a candidate is identified by its text.
        return dict(sorted(changes.items()))

    def is_allowed(self, overrides: Overrides) -> bool:
        """Return whether a run's checks accept the candidate, without a new problem."""
        name = describe_candidate(overrides)
        if name not in self._allowed:
            cfg = self.config(overrides)
            self._allowed[name] = not (
                {*problems_of(cfg), *package_problems(cfg)} - self._problems
                or self._check(cfg, self.world_size, self.per_node)
                or (self._short and self._is_too_short(cfg))
            )
        return self._allowed[name]

    def _is_too_short(self, cfg: RunConfig) -> bool:
        """Return whether a shorter step is unlike the whole one: both sum gradients of two passes,
        and a pipeline waits less in the whole one."""
        passes = cfg.train.sequences // ((cfg.train.micro_batch or 1) * self._ranks)
        return passes < 2 or cfg.distributed.pp > 1 or cfg.train.micro_batch is None

    def planned(self) -> list[Overrides]:
        """List the combinations that fit and are fastest by the planner's estimate."""
        spec = self.machine.spec
        if spec is None:
            return []
        found = best_candidates(
            self.cfg, self.world_size, self.per_node, spec, self._check, PLANNED
        )
        candidates = [self.canonical(each.overrides) for each in found]
        return [one for one in candidates if self.is_allowed(one)]

    def neighbours(self, overrides: Overrides) -> list[Overrides]:
        """List the candidates that differ in one lever; those that the planner considers
        slow come last."""
        name = describe_candidate(overrides)
        if name not in self._near_by:
            self._near_by[name] = self._find_neighbours(overrides)
        return self._near_by[name]

    def _find_neighbours(self, overrides: Overrides) -> list[Overrides]:
        found: dict[str, Overrides] = {}
        for axis in self.axes:
            rest = {key: value for key, value in overrides.items() if key not in axis.keys}
            for choice in axis.choices:
                other = self.canonical({**rest, **choice})
                if other != overrides and self.is_allowed(other):
                    found[describe_candidate(other)] = other
        near = list(found.values())
        if spec := self.machine.spec:
            here = self._seconds(overrides, spec)
            # Rounded to tenths: the sort is stable, so near-equals keep the order of the axes.
            near.sort(key=lambda other: round(self._seconds(other, spec) / here, 1))
        return near

    def memory(self, overrides: Overrides) -> float:
        """Return the planner's estimate of a rank's memory, in bytes."""
        cfg, gpu = self.config(overrides), self.machine.is_gpu
        return estimate_memory(cfg, self.world_size, self.per_node, gpu).peak

    def seconds(self, overrides: Overrides) -> float | None:
        """Return the planner's estimate of a step; None: unknown device."""
        spec = self.machine.spec
        return self._seconds(overrides, spec) if spec else None

    def _seconds(self, overrides: Overrides, spec: GpuSpec) -> float:
        cfg = self.config(overrides)
        return step_seconds(cfg, self.world_size, self.per_node, spec).step


def describe_candidate(overrides: Mapping[str, Any]) -> str:
    """Format a candidate as command-line words."""
    words = " ".join(f"--{key}={to_text(value)}" for key, value in overrides.items())
    return words or "as configured"


def unplanned(overrides: Mapping[str, Any]) -> str:
    """Name the part of a candidate that does not affect the planner's memory."""
    return describe_candidate({k: v for k, v in overrides.items() if k in UNPLANNED})
