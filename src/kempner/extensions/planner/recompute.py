"""Choices of train.recompute = auto, and what it resolves to on a GPU. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kempner.extensions.planner.memory import estimate_memory
from kempner.train.sections import BUDGETS, RunConfig

# Fastest first. Compiled blocks keep only products anyway, as `selective` does.
EAGER_CHOICES = (("none", 1), ("selective", 1), ("full", 4), ("full", 2), ("full", 1))
COMPILED_CHOICES = (("none", 1), *((budget, 1) for budget in BUDGETS), ("full", 1))


def planned_choices(
    cfg: RunConfig, world_size: int, per_node: int, gpu: bool = True
) -> list[tuple[dict[str, Any], float]]:
    """Return values of [train], with the bytes that a rank needs for them, the fastest first."""
    found = []
    for recompute, every in COMPILED_CHOICES if cfg.train.compile else EAGER_CHOICES:
        values: dict[str, Any] = {"recompute": recompute, "recompute_every": every}
        # "Every fourth" of three blocks would be none.
        if every <= cfg.model.n_layers:
            chosen = replace(cfg, train=replace(cfg.train, **values))
            found.append((values, estimate_memory(chosen, world_size, per_node, gpu).peak))
    return found


def with_choice(cfg: RunConfig, world_size: int, per_node: int, usable: float) -> RunConfig:
    """Return the configuration with auto resolved by the planner, for a GPU with `usable` bytes."""
    if cfg.train.recompute != "auto":
        return cfg
    choices = planned_choices(cfg, world_size, per_node)
    fits = (values for values, needs in choices if needs <= usable)
    return replace(cfg, train=replace(cfg.train, **next(fits, choices[-1][0])))
