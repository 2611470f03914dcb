"""Seconds from a crash until the run trains again: a restart in place beside a requeue, by turns.

    python -m benchmarks.restart --rounds 5

Needs root: it boots a Slurm of three hosts (scripts/slurm/testbed.sh) and trains a small model, one
task on each of two. Each round strikes once in each of three jobs: a rank is killed, and the run
restarts in place; the same, and the job is requeued (KEMPNER_RESTARTS=0); a host crashes, and its
spare takes over. The clock runs from the fault until the next attempt has done its first step.

A requeued job waits here until its old credential has expired, for some 5 s; on most clusters that
is Slurm's default, 2 minutes, and then comes the queue.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.soak import cluster_of, say, table
from tests.cluster import ENDED, Cluster
from tests.trainer.fault.broken_run import BrokenRun, until

SPARE = {"KEMPNER_SPARES": "1", "SBATCH_NO_KILL": "set"}
WAYS: dict[str, dict[str, str]] = {
    "a rank is killed, restart in place": {},
    "a rank is killed, requeue": {"KEMPNER_RESTARTS": "0"},
    "a host crashes, restart with a spare": SPARE,
}
PARTS = ("until the decision", "until the new process", "until its first step", "in all")


def measure(cluster: Cluster, folder: Path, env: dict[str, str]) -> list[float]:
    """Seconds of each of PARTS, of one fault."""
    run = BrokenRun(cluster, {}, folder)
    spare = env is SPARE
    run.submit(options=["--nodes=3"] if spare else [], **env)
    try:
        run.wait_for_step(13)
        time.sleep(0.5)  # not in a save
        struck = time.time()
        if spare:
            cluster.testbed("crash", "node2")
        else:
            os.kill(run.pids(1)[0], signal.SIGKILL)
        until(lambda: bool(run.decisions()), 60)
        decided = time.time()
        running = time.monotonic()
        while len(run.events("first_step")) < 2:
            state = cluster.state(run.job)
            if state in ENDED:
                raise SystemExit(f"job {run.job} has ended: {state}\n{run.log}")
            if state != "PENDING":
                running = time.monotonic()
            elif time.monotonic() > running + 2:  # sooner, Slurm takes the old end for the new one
                cluster.run("scontrol", "update", f"JobId={run.job}", "StartTime=now")
            time.sleep(0.1)
        began = run.events("start")[1]["process_began"]
        stepped = run.events("first_step")[1]["time"]
        return [decided - struck, began - decided, stepped - began, stepped - struck]
    finally:
        run.end()
        if spare:
            cluster.testbed("revive", "node2")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    if rounds < 1:
        parser.error(f"--rounds {rounds}: at least 1")
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    name = tempfile.mkdtemp(prefix="restart-")
    with cluster_of(3, Path(name)) as cluster:
        for number in range(rounds):
            for kind, (way, env) in enumerate(WAYS.items()):
                folder = Path(name, f"{number}-{kind}")
                folder.mkdir()
                found[way].append(measure(cluster, folder, env))
                say(f"{way}: {found[way][-1][-1]:.1f} s")
    shutil.rmtree(name)
    rows = [["seconds, median (least to most)", *PARTS]]
    for way, times in found.items():
        columns = zip(*times, strict=True)
        rows.append([
            way, *(f"{statistics.median(c):.1f} ({min(c):.1f} to {max(c):.1f})" for c in columns)
        ])  # fmt: skip
    say(f"\n{table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
