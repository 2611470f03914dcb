"""All my runs in one screen: where each is, how fast, how often restarted, and which need a hand.

    python scripts/status.py                  every run in runs/
    python scripts/status.py runs/7b scratch  these runs, and those in these directories

From the run directories, and from squeue where there is one; Slurm's accounting is not needed.
Exit code 0; 2 when there is nothing to show.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from kempner.files import read_jsonl
from kempner.history.attempts import Record

TAIL = 1 << 16  # bytes of metrics.jsonl that are looked at: the newest lines
# A running job without a new line for so many times the usual interval stands still.
STALE = 10
STALE_S = 120.0
COLUMNS = ("run", "state", "step", "loss", "tokens/s", "starts", "left", "")


@dataclass(frozen=True)
class Job:
    """A job as squeue tells of it."""

    state: str
    left: str  # time until its limit
    why: str  # it is pending
    start: str  # expected, as Slurm writes it


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
    jobs = ask_squeue()
    rows = sorted((row(run, jobs) for run in runs), key=lambda cells: (cells[-1] == "", cells[0]))
    width = shutil.get_terminal_size((160, 0)).columns
    for cells in [COLUMNS, *rows]:
        widths = [max(len(r[i]) for r in [COLUMNS, *rows]) for i in range(len(COLUMNS))]
        text = "  ".join(
            cell.rjust(w) if 2 <= i <= 6 else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        text = text.rstrip()
        print(text if len(text) <= width else f"{text[: width - 3]}...")
    return 0


def find(path: Path) -> list[Path]:
    """The run itself, or the runs in a directory."""
    if is_run(path):
        return [path]
    return sorted(run for run in path.iterdir() if is_run(run)) if path.is_dir() else []


def is_run(path: Path) -> bool:
    return (path / "status.json").is_file() or (path / "attempts.jsonl").is_file()


def ask_squeue() -> dict[str, Job] | None:
    """My jobs by number, None without an answer."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(
            ["squeue", "--me", "--noheader", "--format=%i|%T|%L|%r|%S"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
        fields = (line.split("|") for line in told.stdout.splitlines())
        return {number: Job(*rest) for number, *rest in fields if len(rest) == 4}
    return None


def row(run: Path, jobs: dict[str, Job] | None) -> tuple[str, ...]:
    status: Record = {}
    with contextlib.suppress(OSError, ValueError):
        status = json.loads((run / "status.json").read_text())
    events = read_jsonl(run / "attempts.jsonl")
    lines = [line for line in read_jsonl(run / "metrics.jsonl", TAIL) if "tokens_per_s" in line]
    last: Record = lines[-1] if lines else {}
    name = status.get("job") or next((e["job"] for e in reversed(events) if e.get("job")), None)
    job = (jobs or {}).get(str(name))
    asked = jobs is not None and run.stat().st_uid == os.getuid()  # squeue told of my jobs alone
    state, attention = judge(status, events, lines, name, job, asked)
    step = max(status.get("step", 0), last.get("step", 0))
    return (
        str(run),
        state,
        f"{step:,}/{status['max_steps']:,}" if "max_steps" in status else f"{step:,}",
        "-" if last.get("loss") is None else f"{last['loss']:.4f}",
        f"{last['tokens_per_s']:,.0f}" if last else "-",
        str(sum(event.get("event") == "start" for event in events)),
        job.left if job and job.state == "RUNNING" else "-",
        attention,
    )


def judge(
    status: Record,
    events: list[Record],
    lines: list[Record],
    name: str | None,
    job: Job | None,
    asked: bool,
) -> tuple[str, str]:
    """The state in a word, and what somebody should look at; "! " before it when it is urgent."""
    state, reason = str(status.get("state", "?")), str(status.get("reason", ""))
    decisions = [event for event in events if event.get("event") == "decision"]
    why = str(decisions[-1].get("why", "")) if decisions else ""
    if job is not None and job.state == "PENDING":
        when = f", expected {job.start}" if job.start not in ("", "N/A") else ""
        return "waiting", f"job {name}: {job.why}{when}"
    if state in ("done", "stopped"):
        return state, ""
    if state == "failed":
        return state, f"! {reason}"
    if job is not None:
        return standing_still(lines) or ("running", "")
    if state == "interrupted":
        return state, f"! not requeued: {why or reason}"
    if name is None or not asked:  # outside Slurm: only its lines tell
        return standing_still(lines) or (state, "")
    return "crashed", f"! job {name} has left the queue: {why or 'without a word'}"


def standing_still(lines: list[Record]) -> tuple[str, str] | None:
    """A job that runs, but trains no more."""
    times = [line["time"] for line in lines[-20:] if "time" in line]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    limit = max(STALE_S, STALE * statistics.median(gaps)) if gaps else 1800.0
    silent = time.time() - times[-1] if times else 0.0
    if silent < limit:
        return None
    return "silent", f"! no line for {silent / 60:.0f} min"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as other commands in front of head do
    sys.exit(main(sys.argv[1:]))
