"""ezpz's published experiment, re-enacted: 3,000 steps, a save every 100, four SIGKILLs.

    python -m benchmarks.kills [--steps 3000] [--kills 4]

Needs root: it boots a Slurm of two hosts (scripts/slurm/testbed.sh) and trains a small model, one
task on each, once without a fault and once with the kills, evenly spread. Each one strikes rank 1;
the clock runs from there until the next attempt has done its first step. ezpz (docs/guides/
checkpoint-restart.md, 2026-07) reports 8.9 to 11.1 s for a tiny model on GPUs, and 38 % more wall
time for the whole.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path

from benchmarks.soak import cluster_of, say, table
from kempner.jobs.system.reading import read_jsonl
from tests.cluster import ENDED, Cluster
from tests.trainer.fault.broken_run import BrokenRun

SAVE_EVERY = 100


def steps_done(run: BrokenRun) -> int:
    lines = read_jsonl(run.dir / "metrics.jsonl")
    return max((line["step"] for line in lines if "loss" in line), default=0)


def train(cluster: Cluster, folder: Path, steps: int, kills: int) -> tuple[float, list[float]]:
    """Train; returns the seconds from the first attempt's first step to the end of the run, and
    those from each kill to the next step."""
    run = BrokenRun(cluster, {}, folder)
    words = [f"--train.max_steps={steps}", f"--checkpoint.interval={SAVE_EVERY}"]
    run.submit(*words, FAULTS="")
    seconds: list[float] = []
    try:
        for number in range(1, kills + 1):
            while steps_done(run) < steps * number // (kills + 1):
                state = cluster.state(run.job)
                if state in ENDED:
                    raise SystemExit(f"job {run.job} has ended: {state}\n{run.log}")
                time.sleep(0.05)
            struck = time.time()
            os.kill(run.pids(1)[0], signal.SIGKILL)
            while len(run.events("first_step")) <= number:
                if (state := cluster.state(run.job)) in ENDED:
                    raise SystemExit(f"job {run.job} has ended: {state}\n{run.log}")
                time.sleep(0.05)
            seconds.append(run.events("first_step")[number]["time"] - struck)
        if run.wait(3600):
            raise SystemExit(f"job {run.job} has failed\n{run.log}")
        first, last = run.events("first_step")[0]["time"], run.events("end")[-1]["time"]
        return last - first, seconds
    finally:
        run.end()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kills",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--kills", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kempner-kills-") as name:
        folder = Path(name)
        with cluster_of(2, folder) as cluster:
            for part in ("sound", "killed"):
                (folder / part).mkdir()
            sound, _ = train(cluster, folder / "sound", args.steps, 0)
            say(f"without a fault: {sound:.1f} s")
            killed, seconds = train(cluster, folder / "killed", args.steps, args.kills)
    rows = [["", "kill to the next step (s)", "wall time"]]
    rows.append(["ezpz, as published", "8.9 to 11.1", "+38 %"])
    span = f"{min(seconds):.1f} to {max(seconds):.1f}"
    rows.append(["kempner", span, f"{killed / sound - 1:+.0%} ({sound:.0f} -> {killed:.0f} s)"])
    print(table(rows))


if __name__ == "__main__":
    main()
