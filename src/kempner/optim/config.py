"""The [optimizer] and [schedule] sections, and the schedule itself: plain arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kempner.config.option import option


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = option(3e-4, "peak learning rate", minimum=0.0)
    betas: tuple[float, float] = option((0.9, 0.95), "decay rates of the first and second moments")
    eps: float = option(1e-8, "added to the denominator for numerical stability", minimum=0.0)
    weight_decay: float = option(
        0.1, "applied to matrices only, not to norms or embeddings", minimum=0.0
    )

    def problems(self) -> list[str]:
        if all(0.0 <= beta < 1.0 for beta in self.betas):
            return []
        return [f"optimizer.betas = {list(self.betas)}: each must be at least 0 and under 1"]


@dataclass(frozen=True)
class ScheduleConfig:
    name: str = option(
        "cosine",
        "shape after the warm-up; wsd: constant, then linear decay over decay_steps",
        choices=("cosine", "linear", "wsd", "constant"),
    )
    warmup_steps: int = option(0, "steps of linear warm-up", minimum=0)
    decay_steps: int | None = option(
        None, "wsd: steps of the final decay; unset: a tenth of train.max_steps", minimum=1
    )
    min_lr_ratio: float = option(
        0.1, "final learning rate as a fraction of the peak", minimum=0.0, maximum=1.0
    )


def learning_rate(cfg: ScheduleConfig, peak: float, step: int, max_steps: int) -> float:
    """The rate of update `step` (from 0). Never 0 by accident: the first update of a warm-up of n
    has peak/n.

    cosine: min + (peak - min) (1 + cos(pi x)) / 2, x the fraction of the steps after the warm-up
    (arXiv:1608.03983). wsd: warm-up, stable, decay (arXiv:2404.06395).
    """
    low = peak * cfg.min_lr_ratio
    if step < cfg.warmup_steps:
        return peak * (step + 1) / cfg.warmup_steps
    if cfg.name == "constant":
        return peak
    if cfg.name == "wsd":
        fall = cfg.decay_steps or max(1, max_steps // 10)
        x = (step + 1 - (max_steps - fall)) / fall
    else:
        x = (step - cfg.warmup_steps) / max(1, max_steps - cfg.warmup_steps)
    x = min(max(x, 0.0), 1.0)
    shape = (1 + math.cos(math.pi * x)) / 2 if cfg.name == "cosine" else 1 - x
    return low + (peak - low) * shape
