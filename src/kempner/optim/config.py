"""The [optimizer], [freeze] and [schedule] sections, and the schedule itself: plain arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from kempner.config.option import REQUIRED_OPTION, option
from kempner.config.values import did_you_mean


class StateNames(NamedTuple):
    """Names of the tensors that a rule keeps for each parameter, of the same shape. Used by the
    rule and the planner."""

    averages: tuple[str, ...]  # of gradients, which start as 0; optimizer.moments is their dtype
    copies: tuple[str, ...] = ()  # of the weights, which start as these; fp32


STATE = {
    "adamw": StateNames(("exp_avg", "exp_avg_sq")),
    "muon": StateNames(("momentum",)),  # for matrices; AdamW has the other parameters
    "lion": StateNames(("exp_avg",)),
    "schedule_free": StateNames(("exp_avg_sq",), ("z",)),
}


@dataclass(frozen=True)
class GroupConfig:
    names: tuple[str, ...] = option(
        REQUIRED_OPTION,
        "patterns of the names of its parameters, such as 'blocks.0.*'; * matches any text",
    )
    lr_scale: float = option(1.0, "factor of the scheduled learning rate", minimum=0.0)
    weight_decay: float | None = option(
        None, "replaces the decay that its parameters would have", minimum=0.0
    )


def first_match(groups: Sequence[GroupConfig], name: str) -> int | None:
    """Return the first group with a pattern that a parameter's name matches."""
    for number, group in enumerate(groups):
        if any(fnmatchcase(name, pattern) for pattern in group.names):
            return number
    return None


@dataclass(frozen=True)
class OptimizerConfig:
    name: str = option(
        "adamw",
        "rule that updates the weights; see docs/guide/optimizers.md",
        choices=tuple(STATE),
    )
    lr: float = option(3e-4, "peak learning rate", minimum=0.0)
    betas: tuple[float, float] = option((0.9, 0.95), "decay rates of the first and second moments")
    eps: float = option(1e-8, "added to the denominator for numerical stability", minimum=0.0)
    weight_decay: float = option(
        0.1, "applied to matrices only, not to norms or embeddings", minimum=0.0
    )
    groups: tuple[GroupConfig, ...] = option(
        (), "parameters with their own learning rate or decay; [[optimizer.groups]] in a file"
    )
    momentum: float = option(0.95, "muon: decay rate of the momentum", minimum=0.0, maximum=0.9999)
    nesterov: bool = option(True, "muon: look ahead by one gradient")
    muon_scale: str = option(
        "adamw",
        "muon: adamw: updates as large as AdamW's, 0.2 sqrt(max(rows, columns)); spectral: "
        "sqrt(rows / columns)",
        choices=("adamw", "spectral"),
    )
    moments: str = option(
        "fp32",
        "dtype of the averages of gradients; bf16: half the memory, rounded stochastically",
        choices=("fp32", "bf16"),
    )
    cpu_offload: bool = option(
        False, "keep the optimizer state in host memory; it is on the GPU only during updates"
    )

    def problems(self) -> list[str]:
        problems = []
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            problems.append(
                f"optimizer.betas = {list(self.betas)}: each must be at least 0 and under 1"
            )
        if self.name == "schedule_free" and self.betas[0] == 0.0:
            problems.append(
                f"optimizer.betas = {list(self.betas)}: schedule_free interpolates by the first, "
                "which must be greater than 0"
            )
        return problems

    def unused_groups(self, names: Sequence[str]) -> list[str]:
        """List the problems: groups that are the first match of no parameter. `names`: of those
        that are trained."""
        used_groups = {first_match(self.groups, name) for name in names}
        return [
            f"optimizer.groups[{i}].names = {list(group.names)}: no trained parameter matches this "
            f"group first; names are such as {', '.join(names[:3])}, and * matches any text"
            for i, group in enumerate(self.groups)
            if i not in used_groups
        ]


@dataclass(frozen=True)
class FreezeStage:
    patterns: tuple[str, ...] = option(
        REQUIRED_OPTION,
        "names of parameters or of modules around them, such as 'embed' or 'blocks.[0-3]'; * "
        "matches any text",
    )
    from_step: int = option(0, "number of steps that train them first", minimum=0)
    until_step: int | None = option(
        None, "number of steps after which they are trained again; unset: never", minimum=1
    )

    def covers(self, step: int) -> bool:
        """Return whether the stage's parameters are frozen in the update after `step` others."""
        return self.from_step <= step and (self.until_step is None or step < self.until_step)

    def matches(self, name: str) -> bool:
        """Return whether a pattern matches the parameter's name or that of a module it is in."""
        words = name.split(".")
        wholes = [".".join(words[:n]) for n in range(1, len(words) + 1)]
        return any(fnmatchcase(whole, pattern) for whole in wholes for pattern in self.patterns)


@dataclass(frozen=True)
class FreezeConfig:
    stages: tuple[FreezeStage, ...] = option(
        (), "parameters that are frozen during some steps; [[freeze.stages]] in a file"
    )

    def problems(self) -> list[str]:
        return [
            f"freeze.stages[{i}].until_step = {stage.until_step}: must exceed from_step = "
            f"{stage.from_step}"
            for i, stage in enumerate(self.stages)
            if stage.until_step is not None and stage.until_step <= stage.from_step
        ]

    def unused(self, names: Sequence[str]) -> list[str]:
        """List the problems: patterns that match no parameter of the model."""
        return [
            f"freeze.stages[{i}].patterns: {pattern} matches no parameter of this model"
            f"{did_you_mean(pattern, places)}; names are such as {', '.join(names[:3])}"
            for i, stage in enumerate(self.stages)
            for pattern in stage.patterns
            if not any(FreezeStage((pattern,)).matches(name) for name in names)
            for places in [[*names, *{name.rpartition(".")[0] for name in names}]]
        ]


@dataclass(frozen=True)
class ScheduleConfig:
    name: str = option(
        "cosine",
        "shape after the warm-up; wsd: constant, then decay over decay_steps; none: the peak at "
        "every step",
        choices=("cosine", "linear", "rex", "wsd", "constant", "none"),
    )
    warmup_steps: int = option(0, "steps of linear warm-up", minimum=0)
    decay_steps: int | None = option(
        None, "wsd: steps of the final decay; unset: a tenth of train.max_steps", minimum=1
    )
    decay_shape: str = option(
        "linear", "wsd: shape of the final decay", choices=("linear", "cosine", "1-sqrt")
    )
    min_lr_ratio: float = option(
        0.1, "final learning rate as a fraction of the peak", minimum=0.0, maximum=1.0
    )

    def decay(self, max_steps: int) -> int:
        """Return the steps over which wsd decays at the end."""
        return self.decay_steps or max(1, max_steps // 10)

    def problems(self) -> list[str]:
        if self.name != "none" or not self.warmup_steps:
            return []
        return [
            f"schedule.warmup_steps = {self.warmup_steps}: schedule.name = none has no warm-up; "
            "give --schedule.warmup_steps=0, or --schedule.name=constant"
        ]


CONSTANT = ("constant", "none")  # after the warm-up

# Position between the lowest rate (0) and the peak (1), over the fraction x of the decay.
SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,  # arXiv:1608.03983
    "rex": lambda x: (1 - x) / (1 - x / 2),  # arXiv:2107.04197
    "1-sqrt": lambda x: 1 - math.sqrt(x),  # arXiv:2405.18392
}


def learning_rate(cfg: ScheduleConfig, peak: float, step: int, max_steps: int) -> float:
    """Return the rate of update `step` (from 0). Never 0 by accident: the first update of a warm-up
    of n has peak/n.

    min + (peak - min) SHAPES[name](x), x the fraction of the steps after the warm-up. wsd: warm-up,
    stable, decay (arXiv:2404.06395).
    """
    low = peak * cfg.min_lr_ratio
    if step < cfg.warmup_steps:
        return peak * (step + 1) / cfg.warmup_steps
    if cfg.name in CONSTANT:
        return peak
    if cfg.name == "wsd":
        fall, shape = cfg.decay(max_steps), cfg.decay_shape
        x = (step + 1 - (max_steps - fall)) / fall
    else:
        shape = cfg.name
        x = (step - cfg.warmup_steps) / max(1, max_steps - cfg.warmup_steps)
    return low + (peak - low) * SHAPES[shape](min(max(x, 0.0), 1.0))
