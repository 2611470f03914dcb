"""Wrong numbers: what is found of bits that flip, and whether anybody is blamed without them.

    python -m benchmarks.corruption faults [--only message weight]
    python -m benchmarks.corruption clean [--steps 100] [--only ep2 pp2]

`faults`: three ranks on this CPU train a small model; rank 1 flips a bit in each place in turn,
once and in all computations from step 6 on. A row says how many steps later it was found, who was
named, and whether the losses are those of a run without it, to the bit: all of them where the step
was mended, else those up to the checkpoint that the run goes back to. `clean`:
products of axes, each of whose steps is computed twice or more; a row says how many replays there
were, and how many ended in a blame.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.soak import table

ROOT = Path(__file__).resolve().parents[1]
FAULTY = ROOT / "tests/trainer/fault/faulty_train.py"
MODEL = (
    "configs/train/debug.toml",
    "--data.dataset_path=fake:",
    "--model.dim=64",
    "--model.n_layers=2",
    "--model.ffn_dim=96",
    "--train.seq_len=32",
    "--train.micro_batch=2",
    "--eval.interval=0",
    "--metrics.log_interval=1",
    "--train.deterministic",
)
FAULTS = ("activation", "returning", "product", "gradient", "message", "weight", "moment")
MEMORY = ("weight", "moment")  # what no computation mends
FIRST, BATCH, STEPS = 6, 12, 16  # the first step with a fault; sequences a step; steps of a run
EXPERTS = ("--model.n_experts=4", "--model.ffn_dim=16", "--model.router_bias")
AXES: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "dp2": (2, ()),
    "hsdp2 x dp2": (4, ("--distributed.dp_replicate=2",)),
    "tp2 x dp2": (4, ("--distributed.tp=2",)),
    "cp2 x dp2": (4, ("--distributed.cp=2",)),
    "pp2 x dp2": (4, ("--distributed.pp=2",)),
    "ep2 x dp2": (4, ("--distributed.ep=2", *EXPERTS)),
    "tp2 x cp2": (4, ("--distributed.tp=2", "--distributed.cp=2")),
    "pp2 x tp2": (4, ("--distributed.pp=2", "--distributed.tp=2")),
    "pp2 x cp2": (4, ("--distributed.pp=2", "--distributed.cp=2")),
    "pp2 x ep2": (4, ("--distributed.pp=2", "--distributed.ep=2", *EXPERTS)),
    "ep2 x tp2": (4, ("--distributed.ep=2", "--distributed.tp=2", *EXPERTS)),
}


def train(run: Path, ranks: int, words: Sequence[str], faults: str = "") -> int:
    """Train by torchrun; returns the exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(FAULTY), *MODEL, f"--run.dir={run}", *words]
    env = {**os.environ, "FAULTS": faults, "OMP_NUM_THREADS": "1"}
    with open(run.with_suffix(".log"), "w") as log:
        return subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=log).returncode


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def found(run: Path) -> list[dict[str, Any]]:
    return [r for r in records(run / "attempts.jsonl") if r.get("kind") == "corruption"]


def losses(run: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in records(run / "metrics.jsonl") if "loss" in r}


def faults_table(folder: Path, only: Sequence[str]) -> str:
    words = (f"--train.max_steps={STEPS}", f"--train.global_batch={BATCH}")
    words += ("--checkpoint.interval=4",)
    train(folder / "sound", 3, words)
    sound = losses(folder / "sound")
    rows = [["bit flipped in", "how often", "steps later", "named", "losses"]]
    for what in only or FAULTS:
        for often in ("once", "always"):
            run = folder / f"{what}-{often}"
            until = BATCH * FIRST if often == "once" else 10**6
            # faulty_train.py counts samples that are consumed, not steps.
            fault = f"flip of={what} rank=1 from={BATCH * (FIRST - 1)} to={until}"
            fault += f" once={run}.struck" if often == "once" else ""
            watch = ("--resilience.replay_every=2", "--resilience.checksum_every=1")
            train(run, 3, (*words, *watch), fault)
            first, *_ = [*found(run), {}]
            last = max(sound) if often == "once" and what not in MEMORY else 4  # the checkpoint
            done = {step: loss for step, loss in losses(run).items() if step <= last}
            good = done == {step: loss for step, loss in sound.items() if step <= last}
            late = str(first["step"] + 1 - FIRST) if first else "never"
            named = ", ".join(f"rank {rank}" for rank in first.get("ranks", ()))
            rows.append([what, often, late, named, "equal" if good else "differ"])
    return table(rows)


def clean_table(folder: Path, steps: int, only: Sequence[str]) -> str:
    rows: list[list[str]] = []
    for name, (ranks, words) in AXES.items():
        if only and not any(part in name for part in only):
            continue
        run = folder / name.replace(" ", "-")
        watch = ("--resilience.replay_every=1", "--resilience.checksum_every=1")
        size = (f"--train.max_steps={steps}", "--train.global_batch=8", "--checkpoint.interval=50")
        code = train(run, ranks, (*size, *watch, *words))
        if code:
            print(run.with_suffix(".log").read_text()[-3000:], file=sys.stderr)
        done = max(losses(run), default=0)
        rows.append([name, str(ranks), str(done), str(len(found(run))), str(code)])
    sums = [str(sum(int(row[i]) for row in rows)) for i in (2, 3)]
    head = ["axes", "ranks", "replays", "blamed", "exit code"]
    return table([head, *rows, ["together", "", *sums, ""]])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.corruption",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("faults", "clean"))
    parser.add_argument("--steps", type=int, default=100, help="of each run of `clean`")
    parser.add_argument("--only", nargs="+", default=[], help="these faults, or parts of axes")
    args = parser.parse_args()
    if args.what == "faults" and (wrong := {*args.only} - {*FAULTS}):
        parser.error(f"--only: unknown {', '.join(sorted(wrong))}; choose from {', '.join(FAULTS)}")
    with tempfile.TemporaryDirectory(prefix="kempner-corruption-") as folder:
        if args.what == "faults":
            print(faults_table(Path(folder), args.only))
        else:
            print(clean_table(Path(folder), args.steps, args.only))


if __name__ == "__main__":
    main()
