"""What trackers cost the steps: nothing, whatever becomes of them.

    python -m benchmarks.trackers                        12 runs of 100 steps, some 9 minutes
    python -m benchmarks.trackers --rounds 1 --steps 24  only shows that it works

In each round the same run goes once without a tracker, once with TensorBoard's and W&B's (offline),
once with TensorBoard's killed in the middle, and once with W&B's beside a server that accepts
connections and never answers. The median step of each is compared with that of the plain run of its
round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TENSORBOARD = "--trackers.tensorboard"
CASES = {
    "no tracker": [],
    "both": [TENSORBOARD, "--trackers.wandb=offline"],
    "TensorBoard's killed": [TENSORBOARD],
    "W&B's server does not answer": ["--trackers.wandb=online"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--data", default="data/stdlib", help="token shards")
    options = parser.parse_args()
    found: dict[str, list[float]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as work, silent_server() as url:
        for number in range(options.rounds):
            cases = list(CASES)
            for case in cases[number % len(cases) :] + cases[: number % len(cases)]:
                run = Path(work, f"{number}-{case}")
                found[case].append(median_step(case, run, url, options))
    print("| | step, ms | relative to no tracker |\n|---|---|---|")
    for case, times in found.items():
        ratios = [mine / plain for mine, plain in zip(times, found["no tracker"], strict=True)]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"| {case} | {statistics.median(times) * 1e3:.1f} | {spread} |")


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    # The kernel accepts connections up to the backlog; nobody ever answers them.
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def median_step(case: str, run: Path, url: str, options: argparse.Namespace) -> float:
    """Seconds, over the second half of the run."""
    words = [
        ROOT / "configs/train/quickstart.toml", f"--run.dir={run}",
        f"--data.dataset_path={options.data}", f"--train.max_steps={options.steps}",
        "--checkpoint.interval=0", "--eval.interval=0", "--metrics.log_interval=1", *CASES[case],
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40}
    with open(f"{run}.log", "w") as log:
        command = [sys.executable, ROOT / "scripts/train.py", *words]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        if "killed" in case:
            while process.poll() is None and len(steps_of(run)) < options.steps // 2:
                time.sleep(0.1)
            os.kill(tracker_of(run), signal.SIGKILL)
        if process.wait():
            sys.exit(f"{case}: the trainer failed; see {run}.log\n{Path(f'{run}.log').read_text()}")
    return statistics.median(steps_of(run)[options.steps // 2 :])


def steps_of(run: Path) -> list[float]:
    """The time of each step."""
    with contextlib.suppress(FileNotFoundError):
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return [line["step_time"] for line in lines if "step_time" in line]
    return []


def tracker_of(run: Path) -> int:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode().split("\0")
            if "kempner.jobs.trackers" in words and str(run) in words:
                return int(path.parent.name)
    sys.exit("no tracker runs beside the training")


if __name__ == "__main__":
    main()
