"""The watcher beside the ranks, started by the batch script: regularly rewrites the run's page
(KEMPNER_PAGE) and notifies of a stall. No torch, and no query to Slurm.

    python -m kempner.jobs.records.watch RUN_DIR [SECONDS]

SECONDS: between two pages; none: no page

The watchdog ends hangs. This watcher sees the stalls that the watchdog misses because it is off or
waits for a file system: no line of the run for ten times the usual interval
(jobs/records/state.py). The process ends with the batch script.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from kempner.config.option import ConfigError
from kempner.jobs.records.run_history import load_history
from kempner.jobs.report import notify
from kempner.jobs.report.page.write import PAGE_SIGN, write_page
from kempner.jobs.system.front_door import run_module
from kempner.jobs.system.seal import refuse_other_file

STALL_POLL_S = 60.0  # between two checks for a stall


def main(run_dir: Path, every: int | None) -> None:
    """Watch the run. `every`: seconds between two pages; None: no page."""
    parent, now = os.getppid(), time.monotonic()
    due: dict[Callable[[Path, int | None], list[str]], float] = {}
    if every:
        due[write_page_beside] = now
    if notify.notification_ways():
        due[notify_stall] = now + STALL_POLL_S
    past_problems: set[str] = set()  # print each once: it may last for hours
    # When the batch script is gone, the kernel gives this process another parent.
    while due and os.getppid() == parent:
        for act in [act for act, at in due.items() if at <= time.monotonic()]:
            due[act] = time.monotonic() + (
                STALL_POLL_S if act is notify_stall else every or STALL_POLL_S
            )
            for problem in act(run_dir, every):
                if problem not in past_problems:
                    print(f"kempner: {problem}", flush=True)
                past_problems.add(problem)
        # Wake at least once per minute to notice the end of the batch script.
        time.sleep(max(0.0, min(STALL_POLL_S, min(due.values()) - time.monotonic())))


def write_page_beside(run_dir: Path, every: int | None) -> list[str]:
    """Write the page. Returns the problems, one line each."""
    try:
        refuse_other_file(run_dir / "report.html", "the page", (PAGE_SIGN,))
        write_page([run_dir], run_dir / "report.html", None, every)
    except ConfigError as error:
        return error.problems
    except OSError as error:  # a full disk; the next one may succeed
        return [f"no page: {error.strerror}"]
    return []


def notify_stall(run_dir: Path, _: int | None) -> list[str]:
    """Notify of a stall, once. Returns the problems. The batch script notifies of the end."""
    run = load_history(run_dir, None, notify.NOTIFY_TAIL_BYTES)
    return notify.tell_if_new(run, time.time()) if notify.event_of(run, 0) == "stall" else []


if __name__ == "__main__":
    run_module(lambda run, every=None: main(Path(run), every and int(every)), __doc__, 1, 2)
