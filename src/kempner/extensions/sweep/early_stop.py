"""Stop a run of a sweep that is worse than the median of the others at the same step.

python -m kempner.extensions.sweep.early_stop RUN_DIR with KEMPNER_EARLY_STOP=AFTER:LEAST

The batch script starts it beside the run and ends it with the run, so it needs neither a person nor
any change to the steps. It reads the validations of RUN_DIR and its neighbours, and requests an
orderly stop as a user would, with the file STOP. No torch.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from kempner.config.option import option
from kempner.jobs.system.front_door import run_module
from kempner.jobs.system.reading import read_jsonl

VALIDATION_POLL_S = 2.0
# Each run of a sweep reads the files of all others, on one file system: the work grows with the
# square of their number.
READ_SHARE = 0.05  # of the time at most is spent reading the neighbours' files


@dataclass(frozen=True)
class EarlyStop:
    after: int = option(1, "no run is stopped before this step", minimum=1)
    least: int = option(3, "other runs that have a validation of the same step", minimum=1)


def stop_reason(run: Path, after: int, least: int) -> str:
    """Return why the run should stop, or "". Judges its newest validation, from step `after` on, at
    a step that `least` others have also validated, because the run may be ahead of them."""
    own = {step: loss for step, loss in read_validations(run).items() if step >= after}
    if not own:
        return ""
    paths = (path.parent for path in run.parent.glob("*/metrics.jsonl"))
    neighbours = [read_validations(path) for path in paths if path != run]
    shared = [step for step in own if sum(step in neighbour for neighbour in neighbours) >= least]
    if not shared:
        return ""
    step = max(shared)
    others = [neighbour[step] for neighbour in neighbours if step in neighbour]
    if own[step] <= (middle := statistics.median(others)):
        return ""
    return (
        f"validation loss {own[step]:.4f} at step {step} is over {middle:.4f}, the median of "
        f"{len(others)} other runs"
    )


def read_validations(run: Path) -> dict[int, float]:
    """Map steps to validation losses; a non-finite loss counts as infinite."""
    lines = read_jsonl(run / "metrics.jsonl")
    lines = [line for line in lines if "val_loss" in line and type(line.get("step")) is int]
    return {
        line["step"]: math.inf if line["val_loss"] is None else line["val_loss"] for line in lines
    }


def main(run: Path) -> int:
    after, least = map(int, os.environ["KEMPNER_EARLY_STOP"].split(":"))
    parent = os.getppid()
    # Ends with the batch script, even if that is killed.
    while os.getppid() == parent:
        start_time = time.monotonic()
        if why := stop_reason(run, after, least):
            print(f"kempner: early stop of {run.name}: {why}", flush=True)
            (run / "STOP").touch()
            return 0
        time.sleep(max(VALIDATION_POLL_S, (time.monotonic() - start_time) / READ_SHARE))
    return 0


if __name__ == "__main__":
    run_module(lambda run: main(Path(run)), __doc__, 1)
