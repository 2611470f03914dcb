"""How long the page of many runs takes to write, and how large it is.

    python -m benchmarks.page --runs 200 --lines 2000

Makes run directories, each with the attempts, faults, logs and lines of a run that was interrupted
now and then, then runs `report.py DIR --html` and `status.py DIR --json` in processes of their own.
The times are those of the whole processes, by the clock and of the CPUs; `read` are the seconds of
a CPU that json.loads of the same metrics.jsonl files takes, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kempner.jobs.system.reading import read_jsonl

ROOT = Path(__file__).resolve().parents[1]


def make(run: Path, lines: int, attempts: int, chance: random.Random) -> None:
    (run / "logs/latest").mkdir(parents=True)
    began, pace, text, events = time.time() - 86400, 40000 / lines, [], []
    each = lines // attempts
    for a in range(attempts):
        at, first = began + a * (each * pace + 400), 10 * a * each
        head = {"job": "12", "restart": a, "attempt_id": f"12.{a}", "attempt": a}
        hosts = [f"node{chance.randrange(64)}" for _ in range(4)]
        start = {"event": "start", "time": at + 60, "step": first, "nodes": hosts, "world_size": 32}
        events.append({**head, **start, "process_began": at + 5, "batch_began": at})
        events.append({**head, "event": "first_step", "time": at + 90, "step": first + 1})
        for i in range(1, each + 1):
            step = first + 10 * i
            loss = 2 + 9 * math.exp(-step / 3000) + 0.1 * chance.random()
            figures = {"loss": loss, "lr": 3e-4, "grad_norm": 1 + chance.random(), "skipped": 0}
            figures |= {"tokens": step * 524288, "samples": step * 256, "mfu": 0.41}
            figures |= {"tokens_per_s": 4e5 + 2e4 * chance.random(), "step_time": pace / 10}
            figures |= {"data_time": 0.01, "compute_time": 0.9, "eval_time": 0.0}
            figures |= {"checkpoint_time": 0.05 * (i % 20 == 0), "memory_gib": 61.25}
            text.append({"step": step, "time": at + 90 + i * pace, "attempt": a, **figures})
        end = at + 90 + each * pace
        fault = {"kind": "crash", "reason": f"rank 3 on {hosts[0]}: RuntimeError: CUDA error: ..."}
        events.append({**head, "event": "fault", "time": end, "hosts": hosts[:1], **fault})
        decided = {"decision": "requeue", "why": "crashed", "blamed": hosts[0], "excluded": ""}
        events.append({**head, "event": "decision", "time": end + 5, "step": first, **decided})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in text))
    (run / "attempts.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    status = {"state": "running", "step": 0, "max_steps": 20 * lines, "attempt": attempts - 1}
    (run / "status.json").write_text(json.dumps(status))
    log = "".join(f"2026-11-22 step {k} loss 2.{k} lr 3e-4 |g| 0.9 4.1k tok/s\n" for k in range(99))
    (run / "logs/latest/rank-0.log").write_text(log)


def timed(*words: object) -> tuple[float, float]:
    """Seconds by the clock, and of CPUs: those do not grow with what else this machine does."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, spent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--lines", type=int, default=2000, help="of metrics.jsonl, in each run")
    parser.add_argument("--attempts", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs, chance = [Path(folder) / f"run-{i:03}" for i in range(args.runs)], random.Random(1)
        for run in runs:
            make(run, args.lines, args.attempts, chance)
        for _ in range(args.repeat):
            began = time.process_time()
            size = sum(len(read_jsonl(run / "metrics.jsonl")) for run in runs)
            read = time.process_time() - began
            page = timed(ROOT / "scripts/report.py", folder, "--html")
            status = timed(ROOT / "scripts/status.py", folder, "--json", "--nodes")
            size = (Path(folder) / "report.html").stat().st_size
            print(
                f"{args.runs} runs of {args.lines:,} lines: page {size / 1e6:.2f} MB, "
                f"{page[0]:.1f} s ({page[1]:.1f} s of CPUs); status {status[0]:.1f} s "
                f"({status[1]:.1f}); read {read:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
