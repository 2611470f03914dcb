"""Deviation of published figures from the planner's estimate, by kind of run. No torch."""

from __future__ import annotations

from typing import NamedTuple

from kempner.train.sections import RunConfig


class Spread(NamedTuple):
    """Least and greatest ratio of a step's published time to the estimate."""

    least: float
    most: float


# From the rows of benchmarks/published.toml, without a tenth at each end; a test compares them
# with the output of `python -m benchmarks.planner --published`. Few have experts or LoRA.
ESTIMATE_SPREAD = {
    "dense, one node": Spread(0.93, 1.32),
    "dense, several nodes": Spread(0.97, 1.12),
    "fp8": Spread(0.80, 1.13),
    "experts": Spread(0.89, 2.71),
    "LoRA": Spread(0.91, 1.05),
}


def kind_of_run(cfg: RunConfig, world_size: int, per_node: int) -> str:
    """Return the key of ESTIMATE_SPREAD for a run: the first of experts, LoRA, fp8."""
    if cfg.model.n_experts:
        return "experts"
    if cfg.lora.rank:
        return "LoRA"
    if cfg.train.fp8 != "none":
        return "fp8"
    return "dense, one node" if world_size <= per_node else "dense, several nodes"
