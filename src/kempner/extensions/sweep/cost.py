"""Cost of a sweep. No torch."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from kempner.data.stages import samples_between
from kempner.extensions.planner.cost import step_seconds
from kempner.extensions.planner.gpus import GpuSpec
from kempner.extensions.sweep.points import SweepPoint
from kempner.jobs.records.run_history import load_history


class Hours(NamedTuple):
    """A range of GPU hours."""

    least: float
    most: float

    def __str__(self) -> str:
        least, most = f"{self.least:,.2f}", f"{self.most:,.2f}"
        return least if least == most else f"{least} to {most}"


def gpu_hours(point: SweepPoint, gpu: GpuSpec | None) -> tuple[Hours | None, str]:
    """Return the hours of the whole run (of a CPU run: process hours), and the source of the speed:
    resources.tokens_per_s, the run's own measurement, or the range of the planner's estimate for
    `gpu`; None without any of them."""
    train, world = point.cfg.train, point.resources.world_size
    tokens = samples_between(train.stages, 0, train.max_steps) * train.seq_len
    if rate := point.resources.tokens_per_s:
        return Hours(tokens / rate / 3600, tokens / rate / 3600), "given"
    lines = load_history(point.run_dir).losses
    if rates := [line["tokens_per_s"] for line in lines if line.get("tokens_per_s")]:
        # A run records the rate of all ranks; resources.tokens_per_s is per GPU. The median,
        # because the first steps of each start also compile.
        hours = tokens / statistics.median(rates) * world / 3600
        return Hours(hours, hours), "measured"
    if gpu is None:
        return None, "-"
    step = step_seconds(point.cfg, world, point.resources.per_node, gpu)
    scale = train.max_steps * world / 3600
    return Hours(step.fastest * scale, step.slowest * scale), f"estimate, {gpu.name}"
