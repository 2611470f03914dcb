"""The state of a run: the one place that decides it, for report.py, status.py and the tests of the
batch script. No torch.

It judges from the run's own records (attempts.jsonl, status.json, metrics.jsonl), from the lock
that a living run holds, and from what Slurm says of the job. All three may be missing.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kempner.history.attempts import AFTER, CANCELLED, Attempt, Record, Refusal
from kempner.process import birth, kernel
from kempner.slurm import Job, cluster_name, host_name

# A run is silent without a new line for this many usual intervals, and at least these seconds.
SILENT = 10
SILENT_S = 120.0
FIRST_LINE_S = 1800.0  # before there is a usual interval: a first step may compile
LIVE = ("running", "silent", "starting", "waiting")
LOCK_BEAT_LOST_S = 120.0  # the holder touches the lock every 5 s; clocks of two hosts may differ

# Slurm's reasons to wait that pass by themselves: squeue(1), "JOB REASON CODES".
PASSING = re.compile(
    r"None|Priority|Resources|BeginTime|Dependency|Licenses|Reservation|JobArrayTaskLimit|Prolog"
    r"|Cleaning|FrontEndDown|PartitionDown|(QOS|Assoc|Max).*|"
)


@dataclass(frozen=True)
class State:
    """`word`: running, silent, starting, waiting (in the queue), or how the last attempt ended:
    done, stopped, interrupted, failed, crashed, hung, killed, cancelled; or that no start became an
    attempt: refused, cancelled. `attention`: somebody has to look."""

    word: str
    reason: str = ""
    attention: bool = False


@dataclass(frozen=True)
class Lock:
    """The lock of a run directory. `holder`: whether the process that holds it lives, None if
    unknown; `beat`: unix time of its last sign of life; `cluster`: Slurm's name of the holder's
    cluster."""

    holder: bool | None
    beat: float = 0.0
    cluster: str = ""


FREE = Lock(holder=False)


def read_lock(run_dir: Path, now: float) -> Lock:
    path = run_dir / "lock"
    try:
        beat = path.stat().st_mtime
        record = json.loads(path.read_text())
        host, pid, born = record["host"], int(record["pid"]), record["born"]
        boot, cluster = record.get("kernel"), str(record.get("cluster") or "")
    except FileNotFoundError:
        return FREE
    except (OSError, ValueError, KeyError, TypeError):
        return Lock(holder=None)
    if host == host_name() and boot in (None, kernel()):  # else that host has another's processes
        return Lock(birth(pid) == born, beat, cluster)
    return Lock(now - beat < LOCK_BEAT_LOST_S, beat, cluster)


def job_of(run_dir: Path, name: str | None, jobs: dict[str, Job] | None, lock: Lock) -> Job | None:
    """Return the run's job from Slurm, None if unknown: no job, no answer of squeue, a run of
    somebody else, whose jobs squeue has not shown, or one that lives on another cluster, whose jobs
    have numbers of their own."""
    if name is None or jobs is None:
        return None
    if lock.holder and lock.cluster and lock.cluster != cluster_name():
        return None
    if name in jobs:
        return jobs[name]
    return Job(name, "GONE") if run_dir.stat().st_uid == os.getuid() else None


def judge(
    attempts: Sequence[Attempt],
    lines: Sequence[Record],
    lock: Lock,
    job: Job | None,
    refusal: Refusal | None = None,
) -> State:
    """Return the state of a run now. `refusal`: of a start since its last attempt; it does not
    change the name of the state."""
    state = _judge(attempts, lines, lock, job, refusal)
    if refusal is None or state.word in (*LIVE, refusal.word):
        return state
    reason = f"{state.reason}; " if state.attention else ""
    return replace(state, reason=f"{reason}a later start was {refusal.text}")


def _judge(
    attempts: Sequence[Attempt],
    lines: Sequence[Record],
    lock: Lock,
    job: Job | None,
    refusal: Refusal | None,
) -> State:
    last = attempts[-1] if attempts else None
    over = last is not None and last.decision == "end"  # a job of several runs may go on for others
    if job is not None and job.state == "PENDING" and not over:
        when = f", expected {job.start}" if job.start not in ("", "N/A") else ""
        stuck = PASSING.fullmatch(job.why) is None
        return State("waiting", f"job {job.number}: {job.why}{when}", attention=stuck)
    if last is not None and last.state in ("done", "stopped"):
        return State(last.state, last.reason)
    if last is not None and last.state == "failed":
        return State("failed", last.reason, attention=True)
    queued = job is not None and job.state != "GONE"
    lives = lock.holder if job is None else queued
    if last is None and refusal is not None and refusal.word == "refused":
        lives = lock.holder  # its job has ended, or goes on for other runs
    if last is None and refusal is not None and not lives:
        return State(refusal.word, refusal.reason, attention=refusal.word == "refused")
    if last is None:
        return State("starting") if lives else _ended(last, job)
    if last.decision == "leave" and last.why.startswith(CANCELLED) and _is_ending(job):
        return State("cancelled", last.why) if last.state == "killed" else _ended(last, job)
    if last.state != "killed" or last.decision:  # it has ended; does a new one load already?
        again = lock.holder and lock.beat > last.ended
        again = again or (queued and last.decision in (*AFTER, "leave"))
        return State("starting") if again else _ended(last, job)
    if lives is False:
        return _ended(last, job)
    return _silent(last, lines) or State("running" if last.began else "starting")


def _is_ending(job: Job | None) -> bool:
    return job is None or job.state in ("GONE", "CANCELLED", "COMPLETING")


def _ended(last: Attempt | None, job: Job | None) -> State:
    """Return the state of a run that is not done, and that nothing continues."""
    if last is None:
        return State("killed", "died before it began", attention=True)
    why = ""
    if last.decision == "end":
        why = f"; not requeued: {last.why}"
    elif last.decision == "leave" and last.why.startswith(CANCELLED):
        why = f"; {last.why}"
    elif job is not None and job.state == "GONE":
        why = f"; job {job.number} has left the queue"
    if last.state == "killed":
        reason = "no error recorded" if last.began else "died before it began"
    else:
        reason = last.reason
    return State(last.state, reason + why, attention=True)


def _silent(last: Attempt, lines: Sequence[Record]) -> State | None:
    """Return the state of a run whose process is there, but which trains no more."""
    times = [line["time"] for line in lines[-20:] if line.get("attempt", -1) == last.number]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    limit = max(SILENT_S, SILENT * statistics.median(gaps)) if gaps else FIRST_LINE_S
    quiet = time.time() - last.ended
    if quiet < limit:
        return None
    return State("silent", f"no line for {quiet / 60:.0f} min", attention=True)
