"""All runs on one screen: state, step, speed, attempts; those that need attention come first.

    python scripts/status.py                  every run in runs/
    python scripts/status.py runs/7b scratch  these runs, and those in these directories
    python scripts/status.py --json           the same facts, and more, as one JSON document
    python scripts/status.py --nodes          the hosts of these runs: who failed whom
    python scripts/status.py --notify         and tell what is new, by KEMPNER_NOTIFY and the like

Reads the run directories, and asks squeue where there is one; Slurm's accounting is not needed.
Exit code 0 when all is well; 1 when somebody has to look at a run: what it prints says at which,
and why; 2 when there is nothing to show.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from kempner import slurm
from kempner.history import notify
from kempner.history.attempts import Record
from kempner.history.facts import facts, trouble
from kempner.history.nodes import Node, nodes_of
from kempner.history.replicas import replicas_of
from kempner.history.run_history import History, load_history, runs_in
from kempner.history.tables import aligned, duration

TAIL = 1 << 16  # bytes at the end of metrics.jsonl that are read
COLUMNS = ("run", "state", "step", "loss", "tokens/s", "attempts", "left", "")
NODE_COLUMNS = ("host", "runs", "attempts", "hours", "excluded", "faults", "last fault")
SCHEMA = 1  # of --json: docs/monitoring.md


def main(argv: list[str]) -> int:
    options = parse(argv)
    paths = [run for path in options.paths for run in runs_in(path)]
    if not paths:
        print(f"status: error: no run in {', '.join(map(str, options.paths))}", file=sys.stderr)
        return 2
    jobs, now = slurm.my_jobs(), time.time()
    runs = [load_history(path, jobs, TAIL) for path in paths]
    if options.json:
        print(json.dumps(document(runs, now, options.nodes), indent=2, allow_nan=False))
    elif options.nodes:
        print(aligned([NODE_COLUMNS, *map(node_row, nodes_of(runs))], 2, range(1, 5), wrap=True))
    else:
        rows = sorted(map(row, runs), key=lambda cells: (not cells[-1].startswith("!"), cells[0]))
        print(aligned([COLUMNS, *rows], gap=2, right=range(2, 7), wrap=True))
    if options.notify:
        for run in runs:
            for problem in notify.tell_if_new(run, now):
                print(f"status: {problem}", file=sys.stderr)
    return int(any(trouble(run) for run in runs))


def parse(argv: list[str]) -> argparse.Namespace:
    about, _, more = (__doc__ or "").partition("\n")
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("status.py", None, about, more, formatter_class=as_it_is)
    parser.add_argument("paths", nargs="*", type=Path, default=[Path("runs")], metavar="PATH")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--nodes", action="store_true", help="the hosts and their faults")
    parser.add_argument("--notify", action="store_true", help="tell what has not been told yet")
    options = parser.parse_args(argv)
    if options.notify and not notify.ways():
        parser.error("--notify: set KEMPNER_NOTIFY, KEMPNER_WEBHOOK or KEMPNER_MAIL")
    if not (most := os.environ.get("KEMPNER_MAX_CRASHES") or "3").isdecimal():
        parser.error(f"KEMPNER_MAX_CRASHES={most}: must be a number")
    return options


def document(runs: list[History], now: float, nodes: bool) -> dict[str, Any]:
    told = [facts(run, now) for run in runs]
    found: dict[str, Any] = {"schema": SCHEMA, "time": round(now, 3)}
    found["attention"] = sum(each["attention"] for each in told)
    found["runs"] = told
    return found | ({"nodes": [node.as_json() for node in nodes_of(runs)]} if nodes else {})


def node_row(node: Node) -> tuple[str, ...]:
    last = node.last
    kinds = ", ".join(f"{count} {kind}" for kind, count in node.kinds.items())
    ago = f"{duration(time.time() - last.time)} ago: {last.run}: {last.reason}" if last else "-"
    hours = f"{node.seconds / 3600:,.1f}"
    counts = (str(len(node.runs)), str(node.attempts), hours, str(node.excluded))
    return (node.host, *counts, kinds or "-", ago)


def starts(run: History) -> str:
    """How many there were and, of these, how many in place; the job's idle nodes."""
    text = str(sum(attempt.began is not None for attempt in run.attempts))
    if again := sum(attempt.decision == "restart" for attempt in run.attempts):
        text += f", {again} in place"
    idle = run.attempts[-1].spares if run.attempts and not run.attempts[-1].decision else ()
    return f"{text}, {len(idle)} spare" if idle else text


def row(run: History) -> tuple[str, ...]:
    last = next((line for line in reversed(run.lines) if line.get("tokens_per_s") is not None), {})
    step = max(run.step, run.status.get("step", 0), last.get("step", 0))
    left = run.job.left if run.job and run.job.state == "RUNNING" else "-"
    replicas = replicas_of(run.path) if run.state.word == "running" else None
    alive = f", {replicas.here} of {len(replicas.by_number)} replicas" if replicas else ""
    alive += rewarded(last) if run.state.word == "running" else ""
    alive += f", job {run.successor.number} next" if run.successor else ""
    reason = run.state.reason if run.state.word == "waiting" else ""
    if run.state.word == "running" and run.attempts:
        reason = run.attempts[-1].gpu_warning
    if why := trouble(run):
        reason = f"! {why}"
    return (
        str(run.path),
        run.state.word + alive,
        f"{step:,}/{run.status['max_steps']:,}" if "max_steps" in run.status else f"{step:,}",
        "-" if last.get("loss") is None else f"{last['loss']:.4f}",
        f"{last['tokens_per_s']:,.0f}" if last else "-",
        starts(run),
        left,
        reason,
    )


def rewarded(last: Record) -> str:
    """Of reinforcement learning."""
    if last.get("reward") is None:
        return ""
    return f", reward {last['reward']:.2f}, {last.get('engines', 0):.0f} engines"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly in `| head`, as other commands do
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(main(sys.argv[1:]))
