"""All runs on one screen: state, step, speed, attempts; those that need attention come first.

    python scripts/status.py                  every run in runs/
    python scripts/status.py runs/7b scratch  these runs, and those in these directories

Reads the run directories, and asks squeue where there is one; Slurm's accounting is not needed.
Exit code 0; 2 when there is nothing to show.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from kempner import slurm
from kempner.history.attempts import Record
from kempner.history.replicas import replicas_of
from kempner.history.run_history import is_run, load_history
from kempner.history.tables import aligned

TAIL = 1 << 16  # bytes at the end of metrics.jsonl that are read
COLUMNS = ("run", "state", "step", "loss", "tokens/s", "attempts", "left", "")


def main(argv: list[str]) -> int:
    about, _, more = (__doc__ or "").partition("\n")
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("status.py", None, about, more, formatter_class=as_it_is)
    parser.add_argument("paths", nargs="*", type=Path, default=[Path("runs")], metavar="PATH")
    paths = parser.parse_args(argv).paths
    runs = [run for path in paths for run in find(path)]
    if not runs:
        print(f"status: error: no run in {', '.join(map(str, paths))}", file=sys.stderr)
        return 2
    jobs = slurm.my_jobs()
    rows = sorted((row(run, jobs) for run in runs), key=lambda cells: (cells[-1] == "", cells[0]))
    print(aligned([COLUMNS, *rows], gap=2, right=range(2, 7), wrap=True))
    return 0


def find(path: Path) -> list[Path]:
    """The run itself, or the runs in a directory."""
    if is_run(path):
        return [path]
    return sorted(run for run in path.iterdir() if is_run(run)) if path.is_dir() else []


def row(path: Path, jobs: dict[str, slurm.Job] | None) -> tuple[str, ...]:
    run = load_history(path, jobs, TAIL)
    last = next((line for line in reversed(run.lines) if "tokens_per_s" in line), {})
    step = max(run.step, run.status.get("step", 0), last.get("step", 0))
    left = run.job.left if run.job and run.job.state == "RUNNING" else "-"
    replicas = replicas_of(path) if run.state.word == "running" else None
    alive = f", {replicas.here} of {len(replicas.by_number)} replicas" if replicas else ""
    alive += rewarded(last) if run.state.word == "running" else ""
    reason = run.state.reason if run.state.attention or run.state.word == "waiting" else ""
    return (
        str(path),
        run.state.word + alive,
        f"{step:,}/{run.status['max_steps']:,}" if "max_steps" in run.status else f"{step:,}",
        "-" if last.get("loss") is None else f"{last['loss']:.4f}",
        f"{last['tokens_per_s']:,.0f}" if last else "-",
        str(sum(attempt.began is not None for attempt in run.attempts)),
        left,
        f"! {reason}" if run.state.attention else reason,
    )


def rewarded(last: Record) -> str:
    """Of reinforcement learning."""
    if "reward" not in last:
        return ""
    return f", reward {last['reward']:.2f}, {last.get('engines', 0):.0f} engines"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly in `| head`, as other commands do
    sys.exit(main(sys.argv[1:]))
