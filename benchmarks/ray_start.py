"""Time a Ray cluster: from the start of the script to "ready", its shutdown, and a whole job.

    .venv/bin/python -m benchmarks.ray_start --hosts 2 4 --times 3

Boots the test bed (root) and submits scripts/slurm/ray.sh with the command `true`. The first two
times are read from the batch log.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTBED = ROOT / "scripts/slurm/testbed.sh"
JOB = {"COMMAND": "true", "OBJECT_STORE_MEMORY": "78643200", "CPUS_PER_WORKER": "2"}


def ask(*command: object, **more: object) -> str:
    done = subprocess.run(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        **more,  # type: ignore[call-overload]
    )
    return str(done.stdout).strip()


def measure(hosts: int, env: dict[str, str], folder: Path) -> tuple[float, float, float]:
    """Seconds from the script's start to ready, of its shutdown, and of the whole job."""
    script = ROOT / "scripts/slurm/ray.sh"
    submitted = time.time()
    job = ask("sbatch", "--parsable", f"--nodes={hosts}", script, cwd=folder, env=env)
    ended = re.compile(r"JobState=(COMPLETED|FAILED|NODE_FAIL|CANCELLED)")
    while not ended.search(ask("scontrol", "show", "job", job, env=env)):
        time.sleep(0.1)
    whole = time.time() - submitted
    log = (folder / f"ray-{job}.out").read_text()
    ready = re.search(r"after ([\d.]+) s", log)
    shutdown = re.search(r"shutdown ([\d.]+) s", log)
    assert ready and shutdown and "exit code 0" in log, log
    return float(ready[1]), float(shutdown[1]), whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument(
        "--testbed", default=str(os.getpid() % 249 + 1), help="number of the test bed"
    )
    parser.add_argument("--dashboard", action="store_true", help="start the dashboard too")
    given = parser.parse_args()
    env = {**os.environ, **JOB, "KEMPNER_TESTBED": given.testbed, "KEMPNER_PYTHON": sys.executable}
    env |= {"KEMPNER_SITE": os.devnull, "KEMPNER_TESTBED_OWNER": str(os.getpid())}
    if not given.dashboard:
        env["DASHBOARD_PORT"] = "0"
    up = ask("bash", TESTBED, "up", max(given.hosts), 0, env=env)
    env["SLURM_CONF"] = up.split("SLURM_CONF=")[1]
    dashboard = "with" if given.dashboard else "without"
    print(f"{datetime.now():%Y-%m-%d}, {given.times} times each, {dashboard} dashboard; median")
    print("| hosts | script to ready | shutdown | whole job |", flush=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for hosts in given.hosts:
                found = [measure(hosts, env, Path(folder)) for _ in range(given.times)]
                cells = (f"{statistics.median(times):.1f} s" for times in zip(*found, strict=True))
                print(f"| {hosts} | {' | '.join(cells)} |", flush=True)
    finally:
        subprocess.run(["bash", TESTBED, "down"], env=env, check=True)


if __name__ == "__main__":
    main()
