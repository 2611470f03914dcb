"""Seconds from a fault until a run that hangs says who hangs, and until it ends.

    python -m benchmarks.hangs
    python -m benchmarks.hangs --only stopped gil --ranks 2

Real runs of a small model, gloo, all ranks on this machine. In each, rank 1 does in the middle of a
step what one of FAULTS says. The clock runs from there until a line of a log names it, and until
the rank that leads has recorded the hang and exits with 70. The limit without an inquiry is that of
the same run: 120 s, or 20 median steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEP = "at=kempner.train.step:reduce_step:before nth=25"
FAULTS = {
    "stopped": f"kill {STEP} signal=SIGSTOP",
    "gil": f"keep_gil {STEP}",
    "file": f"open {STEP} path=%s/fifo",
    "collective": f"collective {STEP}",
    "shape": f"shape {STEP}",
    "sleep": f"hold {STEP} s=600",
    "validation": "kill at=kempner.train.evaluate:reduce_step:before nth=7 signal=SIGSTOP",
    # Only named: a save has half an hour.
    "save": "hold at=kempner.checkpoint.checkpointer:Checkpointer._write:before s=600",
}
MORE = {
    "validation": ("--eval.interval=10", "--eval.samples=18"),
    "save": ("--checkpoint.interval=20",),
}
WORDS = (
    "--model.vocab_size=64", "--model.dim=32", "--model.n_layers=1", "--model.n_heads=4",
    "--model.n_kv_heads=4", "--model.ffn_dim=32", "--train.seq_len=32", "--train.max_steps=100000",
    "--data.dataset_path=fake:",
)  # fmt: skip


def start(
    folder: Path, rank: int, ranks: int, faults: str, more: Sequence[str]
) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    env |= {
        "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{ranks}",
        "LOCAL_WORLD_SIZE": f"{ranks}", "FAULTS": faults, "PYTHONPATH": f"{ROOT / 'src'}",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    words = [*WORDS, f"--train.global_batch={2 * ranks}", f"--run.dir={folder / 'run'}"]
    words += ["--distributed.device=cpu", *more]  # a later one counts
    with open(folder / f"out-{rank}", "wb") as out:
        return subprocess.Popen(
            [sys.executable, "tests/trainer/fault/faulty_train.py", *words],
            cwd=ROOT,
            env=env,
            stdout=out,
            stderr=out,
        )


def measure(
    fault: str, ranks: int, culprit: int, *more: str
) -> tuple[float, float, list[str], str]:
    """Seconds until the first line, until the verdict; the lines; the reason that is recorded."""
    with tempfile.TemporaryDirectory(prefix="hangs-") as place:
        folder = Path(place)
        struck = folder / "struck"
        line = f"{fault.replace('%s', place)} rank={culprit} once={struck}\nslow ms=100"
        processes = [start(folder, rank, ranks, line, more) for rank in range(ranks)]
        # Rank 0 leads the inquiry, or rank 1 where rank 0 can answer nothing any more.
        leader = processes[1 if culprit == 0 and fault.startswith(("kill", "keep_gil")) else 0]
        began = named = 0.0
        lines: list[str] = []
        try:
            until = time.time() + 300
            only_named = "_write" in fault
            while leader.poll() is None and time.time() < until and not (only_named and named):
                time.sleep(0.1)
                if not began and struck.exists():
                    # faulty_train.py makes the file when the fault strikes.
                    began = struck.stat().st_mtime
                for log in folder.glob("run/logs/attempt-0/rank-*.log"):
                    for text in log.read_text(errors="replace").splitlines():
                        said = text.partition(" watchdog: ")[2]
                        if said.startswith("no step for") and said not in lines:
                            lines.append(said)
                            named = named or time.time()
            ended = time.time() if leader.poll() is not None else math.nan
            said = "\n".join((folder / f"out-{r}").read_text()[-2000:] for r in range(ranks))
        finally:
            for process in processes:
                process.kill()
                process.wait()
        records = [folder / "run/attempts.jsonl", *folder.glob("run/attempts/*.jsonl")]
        written = [path.read_text() for path in records if path.exists()]
        events = [json.loads(text) for each in written for text in each.splitlines()]
        faults = [event for event in events if event["event"] == "fault"]
        reason = "; ".join(f"{e['kind']} {e['ranks']} {e['hosts']}: {e['reason']}" for e in faults)
        return named - began, ended - began, lines, reason or said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--culprit", type=int, default=1, help="the rank that hangs")
    args = parser.parse_args()
    rows = []
    for name in args.only:
        named, ended, lines, reason = measure(
            FAULTS[name], args.ranks, args.culprit, *MORE.get(name, ())
        )
        print(f"\n{name}: named after {named:.1f} s, ended after {ended:.1f} s", flush=True)
        print("\n".join(f"  {line}" for line in lines), f"\n  recorded: {reason}", flush=True)
        rows.append(f"| {name} | {named:.0f} | {ended:.0f} |")
    print("\n| Fault | named, s | ended, s |\n|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
