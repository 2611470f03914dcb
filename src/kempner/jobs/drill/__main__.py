"""Drill on this cluster, started by scripts/slurm/drill.sh.

    python -m kempner.jobs.drill [--minutes N] [--only CASES] [SBATCH OPTIONS] [-- COMMAND]

Prints the cost, its actions and a table. runs/drill-TIME/ also gets the table, with the logs and
records of the jobs. Exit code 0: no promise is broken; 1: some are, or none was tried; 2: bad
input; 130: ended by Ctrl-C or SIGTERM, with the table so far.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kempner.jobs.drill.cases import OWN, PromiseRow, judge_all
from kempner.jobs.drill.conduct import Drill
from kempner.jobs.drill.plan import MOST_GPU_HOURS, Plan, parse_plan, with_shape
from kempner.jobs.drill.site import facts_of_site
from kempner.jobs.report.tables import align_table
from kempner.jobs.system.front_door import interruptible, run_program

WORDS = {True: "holds", False: "DOES NOT HOLD", None: "not tried"}
JSON_SCHEMA = 1


def main(argv: list[str]) -> int:
    plan = with_shape(parse_plan(argv))
    folder = make_folder(Path("runs"))
    log = (folder / "drill.log").open("a", buffering=1)

    def say(line: str) -> None:
        print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)
        log.write(f"[{time.strftime('%F %H:%M:%S')}] {line}\n")

    print(cost_of(plan, folder), flush=True)
    # From here on there may be jobs to cancel.
    interruptible()
    # Treated like Ctrl-C, so that the jobs are cancelled however the drill ends.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    site = facts_of_site()
    drill = Drill(plan, folder, say)
    interrupted = False
    try:
        drill.run()
    except KeyboardInterrupt:
        interrupted = True
        say("ended by a signal; the jobs of the drill are cancelled")
        drill.leave_out_rest("the drill was ended before")
    rows = judge_all([trial.seen for trial in drill.trials]) + host_rows(drill.broken_hosts)
    text = f"{result_table(rows)}\n\n{closing_words(rows, drill)}"
    (folder / "table.txt").write_text(text + "\n")
    answer = {"schema": JSON_SCHEMA, "time": round(time.time(), 3), "request": plan.request,
              "site": site, "gpu_hours": round(drill.gpu_seconds / 3600, 3),
              "rows": [vars(row) for row in rows]}  # fmt: skip
    (folder / "table.json").write_text(json.dumps(answer, indent=2) + "\n")
    print(f"\n{text}\n{folder}/ has the table (table.txt, table.json) and the logs of each case")
    if interrupted:
        return 128 + signal.SIGINT
    return int(any(row.holds is False for row in rows) or not any(row.holds for row in rows))


def make_folder(parent: Path) -> Path:
    """Make the drill's directory; its name is the prefix of the job names."""
    while True:
        folder = (parent / time.strftime("drill-%Y%m%d-%H%M%S")).absolute()
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            time.sleep(1)


def cost_of(plan: Plan, folder: Path) -> str:
    """Describe what the drill will cost."""
    jobs = f"{len(plan.cases)} jobs" if len(plan.cases) > 1 else "one job"
    minutes = sum(case.usual for case in plan.cases)
    cost = f"about {minutes * plan.nodes:.0f} minutes of a node"
    if plan.gpus:
        cost = f"about {plan.gpu_hours:.1f} GPU hours"
    lines = [
        f"drill: {jobs} of {plan.nodes} node(s) with {plan.gpus} GPU(s), {plan.tasks} rank(s) on"
        f" each: {cost}; it ends itself at {MOST_GPU_HOURS:.0f} GPU hours and after {plan.minutes}"
        f" minute{'s' if plan.minutes != 1 else ''}",
        "it strikes only its own jobs; Ctrl-C cancels them",
        f"directory: {folder}",
    ]
    if any(case is OWN for case in plan.cases):
        lines.insert(1, f"one of them is your program: {' '.join(plan.command)}")
    return "\n".join(lines)


def host_rows(broken: dict[str, str]) -> list[PromiseRow]:
    """Return a row about the hosts that cannot open a job's batch log, if any."""
    if not broken:
        return []
    each = "; ".join(f"{host}: {why}" for host, why in broken.items())
    ask = f"does {', '.join(broken)} see {Path.cwd()}? If not, give --exclude={','.join(broken)}"
    return [PromiseRow("hosts", "Each host can open the batch log of a job", False, each, ask)]


def result_table(rows: Sequence[PromiseRow]) -> str:
    """Format one line per promise, and the questions to the site's staff."""
    head = ("case", "here", "promise", "because")
    cells: list[Sequence[str]] = [head]
    cells += [(row.name, WORDS[row.holds], row.promise, row.because) for row in rows]
    asks = {row.ask: row for row in rows if row.holds is False and row.ask}
    text = align_table(cells, 2, wrap=True)
    if asks:
        text += "\n\nask the site's staff:\n"
        text += "\n".join(f"  {row.name}: {ask}" for ask, row in asks.items())
    return text


def closing_words(rows: Sequence[PromiseRow], drill: Any) -> str:
    """Format the summary in one line."""
    count = {kind: sum(row.holds is kind for row in rows) for kind in WORDS}
    text = f"{count[True]} of {len(rows)} promises hold here"
    text += f", {count[False]} {'does' if count[False] == 1 else 'do'} not" if count[False] else ""
    text += f", {count[None]} could not be tried" if count[None] else ""
    return f"{text}; {drill.gpu_seconds / 3600:.2f} GPU hours, " + (
        f"{drill.node_seconds / 60:.0f} minutes of a node"
    )


if __name__ == "__main__":
    sys.argv[0] = "drill"
    run_program(main)
