"""Report of `rl.sh --bench`: how both sides spent their time. No torch.

    python -m kempner.jobs.report.loop_bench RUN

writes the same to bench.json in the run directory.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from kempner.jobs.records.run_history import is_number, load_history
from kempner.jobs.report.tables import align_table
from kempner.jobs.system.files import write_atomic
from kempner.jobs.system.front_door import run_module

WARMUP_STEPS = 2  # skipped steps: engines start, caches are cold
NEEDED = ("step_time", "samples", "wait")  # of each line


def main(run: Path) -> int:
    lines = [line for line in load_history(run).losses if "reward" in line][WARMUP_STEPS:]
    # Non-finite figures are null.
    lines = [line for line in lines if all(map(is_number, map(line.get, NEEDED)))]
    if len(lines) < 2:
        print(f"loop_bench: error: {run} has no {WARMUP_STEPS + 2} steps", file=sys.stderr)
        return 1
    seconds = sum(line["step_time"] for line in lines)
    samples, steps = (lines[-1][key] - lines[0][key] for key in ("samples", "step"))

    def mean(name: str) -> float:
        """Average over the steps that have the figure."""
        return float(
            statistics.mean([line[name] for line in lines if is_number(line.get(name))] or [0.0])
        )

    figures = {
        "steps": len(lines),
        "step_seconds": statistics.median(line["step_time"] for line in lines),
        # n lines have n step times, and the samples of n - 1 steps.
        "samples_per_s": samples / steps / max(seconds / len(lines), 1e-9),
        "trainer_waits": sum(line["wait"] * line["step_time"] for line in lines) / seconds,
        "engines_idle": mean("engine_idle"),
        "engines": mean("engines"),
        "engine_tokens_per_s": mean("engine_tokens_per_s"),
        "length": mean("length"),
        "staleness": mean("staleness"),
        "publish_seconds": mean("publish_seconds"),
        "update_seconds": mean("update_seconds"),
        "mismatch": mean("mismatch"),
        "drift": mean("drift"),
    }
    write_atomic(run / "bench.json", json.dumps(figures, indent=2) + "\n")
    rows = [[name.replace("_", " "), f"{value:.4g}"] for name, value in figures.items()]
    print(align_table(rows, gap=3))
    return 0


if __name__ == "__main__":
    run_module(lambda run: main(Path(run)), __doc__, 1)
