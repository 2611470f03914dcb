"""Show all runs on one screen: state, step, speed, attempts; those that need attention come first.

    python scripts/status.py                  every run in runs/
    python scripts/status.py runs/7b scratch  these runs, and those in these directories
    python scripts/status.py --json           the same facts and more as one JSON document
    python scripts/status.py --nodes          the hosts of these runs, with their failures
    python scripts/status.py --notify         also notify of news, by KEMPNER_NOTIFY and the like

Reads the run directories, and asks squeue if available; Slurm's accounting is not needed. Exit code
0 if all is well; 1 if a run needs attention: the output says which, and why; 2 if there is nothing
to show, or a run does not exist or cannot be read.
"""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(__file__))  # PYTHONSAFEPATH leaves it out
    import first

    first.start_program()  # before anything that may be missing or slow

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from kempner.config.command_line import argument_parser
from kempner.jobs import slurm
from kempner.jobs.records.attempts import Record
from kempner.jobs.records.facts import newest_step, run_facts, run_trouble
from kempner.jobs.records.nodes import NodeHistory, nodes_of
from kempner.jobs.records.run_history import (
    RECORDS,
    History,
    load_history,
    runs_in,
    unreadable_in,
)
from kempner.jobs.records.state import LIVE_STATES
from kempner.jobs.report import notify
from kempner.jobs.report.idle import idle_share
from kempner.jobs.report.replicas import replicas_of
from kempner.jobs.report.tables import align_table, format_duration
from kempner.jobs.system.front_door import run_program

STATUS_TAIL_BYTES = 1 << 16  # bytes read from the end of metrics.jsonl
STATUS_COLUMNS = ("run", "state", "step", "loss", "tokens/s", "attempts", "idle", "left", "")
NODE_COLUMNS = ("host", "runs", "attempts", "hours", "excluded", "faults", "last fault")
SCHEMA = 1  # of --json: docs/start/monitoring.md


def main(argv: list[str]) -> int:
    options = parse(argv)
    runs_by_path = {path: runs_in(path) for path in options.paths}
    hidden = {path: unreadable_in(path) for path in options.paths}
    problems = [
        no_run(path) for path in options.paths if not runs_by_path[path] and not hidden[path]
    ]
    problems += dict.fromkeys(why_hidden(path) for paths in hidden.values() for path in paths)
    for problem in problems:
        print(f"status: error: {problem}", file=sys.stderr)
    paths = [*dict.fromkeys(run for runs in runs_by_path.values() for run in runs)]
    if not paths:
        return 2
    jobs, now = slurm.my_jobs(), time.time()
    runs = [load_history(path, jobs, STATUS_TAIL_BYTES) for path in paths]
    if options.json:
        print(json.dumps(status_json(runs, now, options.nodes), indent=2, allow_nan=False))
    elif options.nodes:
        print(
            align_table([NODE_COLUMNS, *map(node_row, nodes_of(runs))], 2, range(1, 5), wrap=True)
        )
    else:
        rows = sorted(
            map(status_row, runs), key=lambda cells: (not cells[-1].startswith("!"), cells[0])
        )
        print(align_table([STATUS_COLUMNS, *rows], gap=2, right=range(2, 8), wrap=True))
    if options.notify:
        for run in runs:
            for problem in notify.tell_if_new(run, now):
                print(f"status: {problem}", file=sys.stderr)
    return 2 if problems else int(any(run_trouble(run) for run in runs))


def no_run(path: Path) -> str:
    """Return why there is nothing to show for a path."""
    try:
        os.listdir(path)
    except FileNotFoundError:
        return f"{path}: no such directory; name a run, or a directory of runs (ls runs)"
    except NotADirectoryError:
        return f"{path}: is a file; name a run, or a directory of runs (ls runs)"
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}; ls -ld {path} shows its permissions"
    return f"no run in {path}; name a run, or a directory of runs (ls runs)"


def why_hidden(path: Path) -> str:
    """Return why a run that may exist is not shown, or only in part."""
    if path.is_symlink() and not os.path.exists(path):
        return f"{path}: a broken link to {os.readlink(path)}; correct or remove it"
    if path.name in RECORDS and not path.is_file():
        return f"{path}: is not a regular file; remove it"
    return f"{path}: cannot be read: Permission denied; ls -ld {path} shows its permissions"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argument_parser("status.py", __doc__)
    parser.add_argument("paths", nargs="*", type=Path, default=[Path("runs")], metavar="PATH")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--nodes", action="store_true", help="the hosts and their faults")
    parser.add_argument("--notify", action="store_true", help="send the notifications that are due")
    options = parser.parse_args(argv)
    if options.notify and not notify.notification_ways():
        parser.error("--notify: set KEMPNER_NOTIFY, KEMPNER_WEBHOOK or KEMPNER_MAIL")
    most = os.environ.get("KEMPNER_MAX_CRASHES") or "3"
    if not most.isdecimal():
        parser.error(f"KEMPNER_MAX_CRASHES={most}: must be a number")
    return options


def status_json(runs: list[History], now: float, nodes: bool) -> dict[str, Any]:
    facts = [run_facts(run, now) for run in runs]
    answer: dict[str, Any] = {"schema": SCHEMA, "time": round(now, 3)}
    answer["attention"] = sum(each["attention"] for each in facts)
    answer["runs"] = facts
    return answer | ({"nodes": [node.as_json() for node in nodes_of(runs)]} if nodes else {})


def node_row(node: NodeHistory) -> tuple[str, ...]:
    last = node.last
    kinds = ", ".join(f"{count} {kind}" for kind, count in node.kinds.items())
    ago = (
        f"{format_duration(time.time() - last.time)} ago: {last.run}: {last.reason}"
        if last
        else "-"
    )
    hours = f"{node.seconds / 3600:,.1f}"
    counts = (str(len(node.runs)), str(node.attempts), hours, str(node.excluded))
    return (node.host, *counts, kinds or "-", ago)


def count_starts(run: History) -> str:
    """Return the number of starts, how many of them were in place, and the job's idle nodes."""
    text = str(sum(attempt.began is not None for attempt in run.attempts))
    again = sum(attempt.decision == "restart" for attempt in run.attempts)
    if again:
        text += f", {again} in place"
    idle = run.attempts[-1].spares if run.attempts and not run.attempts[-1].decision else ()
    return f"{text}, {len(idle)} spare" if idle else text


def status_row(run: History) -> tuple[str, ...]:
    last = next((line for line in reversed(run.lines) if line.get("tokens_per_s") is not None), {})
    step = newest_step(run)
    done = "-" if step is None else f"{step:,}"
    time_left = run.job.left if run.job and run.job.state == "RUNNING" else "-"
    replicas = replicas_of(run.path) if run.state.word == "running" else None
    alive = f", {replicas.here} of {len(replicas.by_number)} replicas" if replicas else ""
    alive += reward_words(last) if run.state.word == "running" else ""
    alive += f", job {run.successor.number} next" if run.successor else ""
    reason = run.state.reason if run.state.word in ("waiting", "cancelled") else ""
    if run.state.word == "running":
        reason = run.warning
    if run.refusal and run.state.word not in LIVE_STATES:
        reason = run.state.reason
    why, idle = run_trouble(run), idle_share(run)
    if why:
        reason = f"! {why}"
    return (
        str(run.path),
        run.state.word + alive,
        f"{done}/{run.status['max_steps']:,}" if "max_steps" in run.status else done,
        "-" if last.get("loss") is None else f"{last['loss']:.4f}",
        f"{last['tokens_per_s']:,.0f}" if last else "-",
        count_starts(run),
        "-" if idle is None else f"{idle:.0%}",
        time_left,
        reason,
    )


def reward_words(last: Record) -> str:
    """Describe the state of reinforcement learning."""
    if last.get("reward") is None:
        return ""
    return f", reward {last['reward']:.2f}, {last.get('engines', 0):.0f} engines"


if __name__ == "__main__":
    run_program(main)
