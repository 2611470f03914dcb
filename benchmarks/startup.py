"""What a start costs, and what the kit keeps for the next one.

    python -m benchmarks.startup            kernels: cold, restarted, and on a host new to the run
    python -m benchmarks.startup --files    files of Python's environment that one rank opens
    python -m benchmarks.startup --containers    from sbatch to the first step

The first starts scripts/train.py with train.compile on this machine, three times in one run
directory, and prints the parts of each start; a "new host" is this one under another name. The
second needs strace. The third needs root and Slurm: it boots a host with a made-up GPU and
submits a run with one rank three times each way, by turns; "pyxis" is the tests' stand-in for it,
whose image takes --unpack seconds to unpack.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kempner.jobs.records import event_reader
from kempner.jobs.records.events import FirstStep, StartEvent

ROOT = Path(__file__).parents[1]
MODEL = ["--model.dim=64", "--model.n_layers=2", "--model.ffn_dim=96", "--train.seq_len=32"]
STARTS = {"cold": "a", "restarted": "a", "on a new host": "b"}


def kernels(folder: Path) -> None:
    run = folder / "run"
    for number, (name, host) in enumerate(STARTS.items(), 1):
        command = [sys.executable, "scripts/train.py", "configs/train/debug.toml", *MODEL]
        command += ["--data.dataset_path=data/stdlib", f"--run.dir={run}", "--train.compile"]
        command += ["--train.global_batch=8", "--eval.interval=0", "--metrics.log_interval=1"]
        command += [f"--train.max_steps={number}", "--schedule.name=constant"]
        env = {**os.environ, "SLURMD_NODENAME": host}
        # The user's own cache would make the cold start warm.
        env.pop("TORCHINDUCTOR_CACHE_DIR", None)
        subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)
        events = run / "attempts.jsonl"
        start = event_reader.read_kind(events, StartEvent)[-1]
        first = event_reader.read_kind(events, FirstStep)[-1]
        print(f"{name:15} imports {start.parts['imports']:6.1f} s, first step "
              f"{first.time - start.time:6.1f} s", flush=True)  # fmt: skip


def files(folder: Path) -> None:
    trace = folder / "trace"
    program = "import torch, torch.distributed, torch._dynamo, torch.distributed.fsdp"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = ["strace", "-f", "-e", "trace=%file", "-o", str(trace), sys.executable, "-c", program]
    subprocess.run(command, check=True, env=env)
    calls = [line for line in trace.read_text().splitlines() if f'"{sys.prefix}/' in line]
    opened = {
        match[1]
        for line in calls
        if "open" in line and " = -1 " not in line and (match := re.search(r'"([^"]+)"', line))
    }
    there = sum(len(names) for _, _, names in os.walk(sys.prefix))
    print(f"a rank opens {len(opened):,} of the {there:,} files of {sys.prefix}, in {len(calls):,} "
          "calls to the file system; from a copy on its node's disk, none of them")  # fmt: skip


def containers(folder: Path, unpack: float) -> None:
    from benchmarks.soak import cluster_of, table
    from tests.containers import RUNTIMES, container, entered, image
    from tests.trainer.fault.broken_run import BrokenRun

    found: dict[str, list[dict[str, float]]] = {}
    made: dict[str, int] = {}
    with cluster_of(1, folder) as cluster:
        for number in range(3):
            for runtime in ("no container", *RUNTIMES):
                here = folder / f"{number}-{runtime.replace(' ', '-')}"
                here.mkdir()
                env = {"KEMPNER_CODE": "1"}
                if runtime in RUNTIMES:
                    of = image(here, here / "run", cluster.data)
                    slow = unpack if runtime == "pyxis" else 0.0
                    env |= container(runtime, here, of, delay=slow)
                    env["KEMPNER_MOUNTS"] += f",{cluster.data}:{cluster.data}"
                run = BrokenRun(cluster, {}, here)
                began = time.time()
                run.submit("--train.max_steps=3", script="singlenode.sh", **env)
                if run.wait() != 0:
                    raise SystemExit(run.log)
                (start,), (step,) = run.events("start"), run.events("first_step")
                parts = start["parts"] | {"in all": step["time"] - began}
                found.setdefault(runtime, []).append(parts)
                made[runtime] = len(entered(here))
    columns = ("queue", "code", "check", "srun", "container", "imports", "in all")
    rows = [["", *columns, "containers"]]
    for runtime, starts in found.items():
        medians = [statistics.median(s.get(name, 0.0) for s in starts) for name in columns]
        rows.append([runtime, *(f"{value:.1f}" for value in medians), str(made[runtime])])
    print(table(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--containers", action="store_true")
    parser.add_argument("--unpack", type=float, default=5.0)
    args = parser.parse_args()
    if args.files and not shutil.which("strace"):
        parser.error("--files needs strace")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as temporary:
        if args.containers:
            containers(Path(temporary), args.unpack)
        else:
            (files if args.files else kernels)(Path(temporary))
