"""Durations of the parts of a start, from the queue to the first step, and removal of its leftover
files. No torch.

The batch script passes on its own parts in KEMPNER_STARTUP ("submitted=5 queue=17.25 check=19.5":
the end of each, in unix seconds); rank 0 marks the ends of the later parts.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

from kempner.jobs.system import process

# In order; "first step" ends with the event of that name.
START_PARTS = (
    "queue", "code", "check", "preflight", "stage", "batch script", "srun", "container",
    "imports",
    "process group", "model", "checkpoint", "first step",
)  # fmt: skip
_ends: dict[str, float] = {}


def mark_start(part: str) -> None:
    """Mark the end of a part. Only the first call counts."""
    _ends.setdefault(part, time.time())


def start_seconds() -> dict[str, float]:
    """Return the seconds of each known part of this start."""
    words = (word.partition("=") for word in os.environ.get("KEMPNER_STARTUP", "").split())
    ends = {name.replace("-", " "): float(at) for name, _, at in words}
    began = process.start_time()
    inside = {"container": at} if (at := ends.pop("container", None)) else {}
    ends |= ({"srun": began} if began else {}) | inside | _ends
    return {
        name: round(max(0.0, ends[name] - ends[before]), 3)
        for before, name in itertools.pairwise(ends)
    }


def forget_rendezvous(run_dir: Path) -> None:
    """Remove published addresses, even of killed starts. Rank 0 calls this once all have met."""
    for note in run_dir.glob(".rendezvous-*"):
        note.unlink(missing_ok=True)
