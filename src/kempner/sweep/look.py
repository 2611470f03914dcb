"""States of the points of a sweep: from their run directories first, then from the queue, then from
the accounting, which may be empty. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kempner import slurm
from kempner.history.run_history import History, is_run, load_history
from kempner.history.state import State
from kempner.sweep.journal import Journal
from kempner.sweep.points import Point

TAIL = 1 << 16  # bytes of metrics.jsonl
CANCELLED = State("cancelled")
HOLDS = ("running", "silent", "starting", "waiting", "unknown")  # a job has it, or may have it


@dataclass(frozen=True)
class Look:
    point: Point
    state: State
    tries: int  # submissions
    run: History
    task: str | None  # the newest job, as users name it
    pack: int = 1  # points of that job

    @property
    def new(self) -> bool:
        """True if submit takes it."""
        return self.state.word in ("planned", "cancelled")

    @property
    def failed(self) -> bool:
        """True if it has ended and is not done: resubmit takes it."""
        return self.state.attention and self.state.word not in HOLDS


def look(points: Sequence[Point], journal: Journal, whole: bool = False) -> list[Look]:
    """Look at the points. `whole`: with all lines of metrics.jsonl."""
    jobs = slurm.my_jobs()
    found = [_look(point, journal, jobs, None if whole else TAIL) for point in points]
    lost = [
        each
        for each in found
        if each.failed and each.task and not (each.run.attempts or each.run.refusals)
    ]
    told = slurm.accounted([each.task for each in lost if each.task])
    return [_accounted(each, told) if each in lost else each for each in found]


def _look(
    point: Point, journal: Journal, jobs: dict[str, slurm.Job] | None, tail: int | None
) -> Look:
    task = journal.task(point.name)
    run = load_history(point.run_dir, jobs, tail)
    state = run.state
    job = None if task is None or jobs is None else jobs.get(task, slurm.Job(task, "GONE"))
    refused = any(refusal.job == task for refusal in run.refusals)
    begun = refused or any(attempt.job == task for attempt in run.attempts)
    # The job may go on, for other points.
    over = refused or (begun and run.attempts[-1].decision == "end")
    if task is None and not is_run(point.run_dir):
        state = State("planned")
    elif task is None or state.word in ("done", "stopped"):
        pass
    elif job is None and not begun:
        state = State("unknown", f"job {task}: Slurm does not answer")
    elif job is not None and job.state == "PENDING" and not over:
        state = State("waiting", f"job {task}: {job.why}")
    elif job is not None and job.state != "GONE" and not begun:
        state = State("starting")
    elif job is not None and job.state == "GONE" and journal.was_cancelled(point.name):
        state = CANCELLED
    elif not run.attempts and not refused:
        state = State("killed", f"job {task} ended before the run began", attention=True)
    if any(point.name in each.points for each in journal.open):
        state = State("unknown", "Slurm has not said whether it took the job")
    told = journal.of(point.name)
    return Look(point, state, len(told), run, task, told[-1].pack if told else 1)


def _accounted(each: Look, told: dict[str, str]) -> Look:
    """Complete a run that never began with what the accounting knows of its job."""
    word = told.get(each.task or "", "")
    if not word:
        return each
    if word in ("PENDING", "RUNNING", "REQUEUED", "PREEMPTED", "SUSPENDED"):
        state = State("unknown", f"job {each.task}: {word}")  # not an end
    else:
        state = CANCELLED if word == "CANCELLED" else State("killed", word, attention=True)
    return replace(each, state=state)
