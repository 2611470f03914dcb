"""The share of a job's time for which its nodes have computed nothing: sites end jobs whose GPUs
idle. No torch."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from kempner.jobs.records.attempts import is_known

if TYPE_CHECKING:
    from kempner.jobs.records.run_history import History

IDLE_PARTS = ("saving", "stalled", "start-up", "shutdown")  # of TIME_PARTS


def idle_share(run: History) -> float | None:
    """Return the share of the allocations' time without a step: starts and ends, saves, stalls
    and, in reinforcement learning, the trainer's waits for a batch. None before the first start.
    Time in the queue is no allocation's."""
    parts = run.wall_time.parts
    allocated = run.wall_time.total - parts["not running"] - parts["ended"]
    if allocated <= 0:
        return None
    waits = [
        line["wait"] for line in run.lines if is_known(line, "wait") and 0 <= line["wait"] <= 1
    ]
    waited = statistics.fmean(waits) if waits else 0.0
    idle = sum(parts[part] for part in IDLE_PARTS)
    # A wait is a share of a step's time: it belongs to the steps, also to those done again.
    return (idle + waited * (parts["training"] + parts["lost"])) / allocated


def spare_share(run: History) -> float | None:
    """Return the share of the nodes' time that spare nodes have waited, beside idle_share(); None
    without any."""
    times = [(each.ended - each.opened, len(each.hosts), len(each.spares)) for each in run.attempts]
    waited = sum(seconds * spares for seconds, _, spares in times)
    total = sum(seconds * (hosts + spares) for seconds, hosts, spares in times)
    return waited / total if waited > 0 else None
