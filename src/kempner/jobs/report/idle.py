"""Share of a job's time with idle nodes: sites end jobs whose GPUs compute nothing. No torch."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from kempner.jobs.records.attempts import is_known

if TYPE_CHECKING:
    from kempner.jobs.records.run_history import History

IDLE_PARTS = ("saving", "stalled", "start-up", "shutdown")  # of TIME_PARTS


def idle_share(run: History) -> float | None:
    """Return the share of the allocated time without a step: starts and ends, saves, stalls and, in
    reinforcement learning, the trainer's waits for a batch. None before the first start. Time in
    the queue does not count."""
    parts = run.wall_time.parts
    allocated = run.wall_time.total - parts["not running"] - parts["ended"]
    if allocated <= 0:
        return None
    waits = [
        line["wait"] for line in run.lines if is_known(line, "wait") and 0 <= line["wait"] <= 1
    ]
    waited = statistics.fmean(waits) if waits else 0.0
    idle = sum(parts[part] for part in IDLE_PARTS)
    # A wait is a share of a step's time, and counts for all steps, including repeated ones.
    return (idle + waited * (parts["training"] + parts["lost"])) / allocated


def spare_share(run: History) -> float | None:
    """Return the share of the nodes' time that spares waited, in addition to idle_share(); None if
    there are no spares."""
    times = [(each.ended - each.opened, len(each.hosts), len(each.spares)) for each in run.attempts]
    waited = sum(seconds * spares for seconds, _, spares in times)
    total = sum(seconds * (hosts + spares) for seconds, hosts, spares in times)
    return waited / total if waited > 0 else None
