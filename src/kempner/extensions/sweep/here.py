"""Run points of a sweep on this machine, outside Slurm. No torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kempner.extensions.sweep.points import SweepPoint
from kempner.extensions.sweep.submit import write_points


def run_here(own: Path, points: Sequence[SweepPoint], more: Mapping[str, str]) -> int:
    """Run the points one after another, with the same script; returns the exit code, 130 after
    Ctrl-C, which also reaches the script: its run saves and stops."""
    configs = write_points(own, points)
    failures, interrupts = [], []
    # Python's own handler would end this process while the script is still saving.
    before = signal.signal(signal.SIGINT, lambda *_: interrupts.append(True))
    try:
        for number, point in enumerate(points, 1):
            print(f"{number} of {len(points)}: {point.name}", flush=True)
            # pack.sh divides a job's node among points; here they run one after another.
            script = replace(point.resources, pack=1).script
            env = {**os.environ, **more, "KEMPNER_NPROC": str(point.resources.world_size)}
            code = subprocess.run(["bash", script, configs[point.name]], env=env).returncode
            # No further point may begin after Ctrl-C.
            if interrupts or code == 130 or code < 0:
                return 130
            failures += [point.name] if code else []
    finally:
        signal.signal(signal.SIGINT, before)
    for name in failures:
        print(f"sweep: error: {name} has failed", file=sys.stderr)
    return 1 if failures else 0
