"""What a sweep will cost. No torch."""

from __future__ import annotations

import statistics

from kempner.data.stages import samples_between
from kempner.history.run_history import load_history
from kempner.planner.cost import Gpu, time
from kempner.sweep.points import Point


def gpu_hours(point: Point, gpu: Gpu | None) -> tuple[float | None, str]:
    """Of the whole run (of a CPU run: hours of its processes), and by what speed: the one that
    resources.tokens_per_s gives, the one that the run itself has measured, the planner's
    estimate for `gpu`; None without any of them."""
    train, world = point.cfg.train, point.resources.world_size
    tokens = samples_between(train.stages, 0, train.max_steps) * train.seq_len
    if rate := point.resources.tokens_per_s:
        return tokens / rate / 3600, "given"
    lines = load_history(point.run_dir).losses
    if rates := [line["tokens_per_s"] for line in lines if line.get("tokens_per_s")]:
        return tokens / statistics.median(rates) * world / 3600, "measured"
    if gpu is None:
        return None, "-"
    step = time(point.cfg, world, point.resources.per_node, gpu).step
    return step * train.max_steps * world / 3600, f"estimate, {gpu.name}"
