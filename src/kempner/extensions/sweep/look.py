"""States of the points of a sweep: from their run directories, then from the queue, then from the
accounting, which may be empty. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kempner.extensions.sweep.journal import Journal
from kempner.extensions.sweep.points import SweepPoint
from kempner.jobs import slurm
from kempner.jobs.records.run_history import History, is_run, load_history
from kempner.jobs.records.state import RunState

# A run's state is in its newest lines, and a sweep may have thousands of long files.
METRICS_TAIL_BYTES = 1 << 16  # bytes of metrics.jsonl
CANCELLED_STATE = RunState("cancelled")
HOLDS = ("running", "silent", "starting", "waiting", "unknown")  # a job has, or may have, the point


@dataclass(frozen=True)
class PointStatus:
    point: SweepPoint
    state: RunState
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
        """True if it has ended but is not done: resubmit takes it."""
        return self.state.attention and self.state.word not in HOLDS


def look_at_points(
    points: Sequence[SweepPoint], journal: Journal, whole: bool = False
) -> list[PointStatus]:
    """Look at the points. `whole`: read all lines of metrics.jsonl."""
    # Before reading the directories: a run that ends in between has then recorded its end. In the
    # other order its job would be gone while its records still say that it runs.
    jobs = slurm.my_jobs()
    statuses = [
        _look(point, journal, jobs, None if whole else METRICS_TAIL_BYTES) for point in points
    ]
    # sacct may be slow, or have no database: ask it only if nothing else is known.
    unknown = [
        status
        for status in statuses
        if status.failed and status.task and not (status.run.attempts or status.run.refusals)
    ]
    states = slurm.accounted_states([status.task for status in unknown if status.task])
    names = {status.point.name for status in unknown}
    return [
        _accounted(status, states) if status.point.name in names else status for status in statuses
    ]


def _look(
    point: SweepPoint, journal: Journal, jobs: dict[str, slurm.SlurmJob] | None, tail: int | None
) -> PointStatus:
    task = journal.task(point.name)
    run = load_history(point.run_dir, jobs, tail)
    state = run.state
    job = None if task is None or jobs is None else jobs.get(task, slurm.SlurmJob(task, "GONE"))
    is_refused = any(refusal.job == task for refusal in run.refusals)
    has_begun = is_refused or any(attempt.job == task for attempt in run.attempts)
    # The job may continue with other points.
    over = is_refused or (has_begun and run.attempts[-1].decision == "end")
    if task is None and not is_run(point.run_dir):
        state = RunState("planned")
    # An orderly end is final, whatever the queue says: the job may still be ending, or run other
    # points on its node.
    elif task is None or state.word in ("done", "stopped"):
        pass
    elif job is None and not has_begun:
        state = RunState("unknown", f"job {task}: Slurm does not answer")
    elif job is not None and job.state == "PENDING" and not over:
        state = RunState("waiting", f"job {task}: {job.why}")
    elif job is not None and job.state != "GONE" and not has_begun:
        state = RunState("starting")
    elif job is not None and job.state == "GONE" and journal.was_cancelled(point.name):
        state = CANCELLED_STATE
    elif not run.attempts and not is_refused:
        state = RunState("killed", f"job {task} ended before the run began", attention=True)
    # Regardless of its files: a second array would be a second job of the run.
    if any(point.name in each.points for each in journal.open):
        state = RunState("unknown", "Slurm has not said whether it accepted the job")
    submissions = journal.of(point.name)
    return PointStatus(
        point, state, len(submissions), run, task, submissions[-1].pack if submissions else 1
    )


def _accounted(status: PointStatus, states: dict[str, str]) -> PointStatus:
    """Complete the state of a run that never began with the accounting's record of its job."""
    word = states.get(status.task or "", "")
    if not word:
        return status
    if word in ("PENDING", "RUNNING", "REQUEUED", "PREEMPTED", "SUSPENDED"):
        state = RunState("unknown", f"job {status.task}: {word}")  # not an end
    else:
        state = CANCELLED_STATE if word == "CANCELLED" else RunState("killed", word, attention=True)
    return replace(status, state=state)
