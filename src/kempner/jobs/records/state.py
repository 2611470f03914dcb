"""The state of a run; it is decided only here, for report.py, status.py and the tests of the batch
script. No torch.

Based on the run's records (attempts.jsonl, status.json, metrics.jsonl), the lock that a live run
holds, and Slurm's answer about the job. All three may be missing.
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

from kempner.jobs.records.attempts import AFTER, CANCELLED_REASON, Attempt, Record, Refusal
from kempner.jobs.slurm import SlurmJob, cluster_name
from kempner.jobs.system.process import birth_ticks, pid_namespace
from kempner.jobs.system.reading import open_regular
from kempner.jobs.this_job import host_name

# A run is silent if it writes no line for this many usual intervals, and at least these seconds.
SILENT_INTERVALS = 10
RUN_SILENCE_S = 120.0
FIRST_LINE_S = 1800.0  # the same before a usual interval is known: a first step may compile
LIVE_STATES = ("running", "silent", "starting", "waiting")
LOCK_BEAT_LOST_S = 120.0  # the holder touches the lock every 5 s; clocks of two hosts may differ

# Slurm's reasons to wait that pass by themselves: squeue(1), "JOB REASON CODES". The last
# alternative is empty: Slurm may give no reason.
PASSING = re.compile(
    r"None|Priority|Resources|BeginTime|Dependency|Licenses|Reservation|JobArrayTaskLimit|Prolog"
    r"|Cleaning|FrontEndDown|PartitionDown|(QOS|Assoc|Max).*|"
)


@dataclass(frozen=True)
class RunState:
    """State of a run. `word`: running, silent, starting, waiting (in the queue); the end of the
    last attempt: done, stopped, interrupted, failed, crashed, hung, killed, cancelled; or, if no
    start became an attempt: refused, cancelled. `attention`: the run needs attention."""

    word: str
    reason: str = ""
    attention: bool = False


@dataclass(frozen=True)
class Lock:
    """The lock of a run directory. `holder`: whether the holding process is alive, None if unknown;
    `beat`: unix time of its last sign of life; `cluster`: Slurm's name of the holder's cluster."""

    holder: bool | None
    beat: float = 0.0
    cluster: str = ""


FREE = Lock(holder=False)


def read_lock(run_dir: Path, now: float) -> Lock:
    path = run_dir / "lock"
    try:
        with open(path, opener=open_regular) as file:
            beat = os.fstat(file.fileno()).st_mtime
            record = json.load(file)
        host, pid, born = record["host"], int(record["pid"]), record["born"]
        boot, cluster = record.get("kernel"), str(record.get("cluster") or "")
    except FileNotFoundError:
        return FREE
    except (OSError, ValueError, KeyError, TypeError):
        return Lock(holder=None)
    # Under another kernel, or in a container's namespace, the id belongs to another process.
    if host == host_name() and boot in (None, pid_namespace()):
        return Lock(birth_ticks(pid) == born, beat, cluster)
    return Lock(now - beat < LOCK_BEAT_LOST_S, beat, cluster)


def slurm_job_of_run(
    run_dir: Path, name: str | None, jobs: dict[str, SlurmJob] | None, lock: Lock
) -> SlurmJob | None:
    """Return the run's job from Slurm; None if unknown: no job, no answer from squeue, another
    user's run, whose jobs squeue does not show, or a live run on another cluster, which numbers its
    jobs separately."""
    if name is None or jobs is None:
        return None
    if lock.holder and lock.cluster and lock.cluster != cluster_name():
        return None
    if name in jobs:
        return jobs[name]
    return SlurmJob(name, "GONE") if run_dir.stat().st_uid == os.getuid() else None


def judge_state(
    attempts: Sequence[Attempt],
    lines: Sequence[Record],
    lock: Lock,
    job: SlurmJob | None,
    refusal: Refusal | None = None,
) -> RunState:
    """Return the current state of a run. `refusal`: of a start since its last attempt; it does not
    change the name of the state."""
    state = _judge(attempts, lines, lock, job, refusal)
    if refusal is None or state.word in (*LIVE_STATES, refusal.word):
        return state
    reason = f"{state.reason}; " if state.attention else ""
    return replace(state, reason=f"{reason}a later start was {refusal.text}")


def _judge(
    attempts: Sequence[Attempt],
    lines: Sequence[Record],
    lock: Lock,
    job: SlurmJob | None,
    refusal: Refusal | None,
) -> RunState:
    last = attempts[-1] if attempts else None
    over = last is not None and last.decision == "end"  # a job of several runs may go on for others
    # A waiting job will start the run again, whatever the records say about its last attempt.
    if job is not None and job.state == "PENDING" and not over:
        when = f", expected {job.start}" if job.start not in ("", "N/A") else ""
        stuck = PASSING.fullmatch(job.why) is None
        return RunState("waiting", f"job {job.number}: {job.why}{when}", attention=stuck)
    if last is not None and last.state in ("done", "stopped"):
        return RunState(last.state, last.reason)
    if last is not None and last.state == "failed":
        return RunState("failed", last.reason, attention=True)
    queued = job is not None and job.state != "GONE"
    # Slurm knows more than the lock, which a killed process leaves behind.
    lives = lock.holder if job is None else queued
    if last is None and refusal is not None and refusal.word == "refused":
        lives = lock.holder  # its job has ended, or goes on for other runs
    if last is None and refusal is not None and not lives:
        return RunState(refusal.word, refusal.reason, attention=refusal.word == "refused")
    if last is None:
        return RunState("starting") if lives else _ended(last, job)
    # Unless it was requeued since: then it starts again.
    if last.decision == "leave" and last.why.startswith(CANCELLED_REASON) and _is_ending(job):
        return RunState("cancelled", last.why) if last.state == "killed" else _ended(last, job)
    if last.state != "killed" or last.decision:  # it has ended; is a new one loading?
        # A beat after that end is from a new start: the lock of the old one may remain.
        again = lock.holder and lock.beat > last.ended
        again = again or (queued and last.decision in (*AFTER, "leave"))
        return RunState("starting") if again else _ended(last, job)
    if lives is False:
        return _ended(last, job)
    return _silent(last, lines) or RunState("running" if last.began else "starting")


def _is_ending(job: SlurmJob | None) -> bool:
    return job is None or job.state in ("GONE", "CANCELLED", "COMPLETING")


def _ended(last: Attempt | None, job: SlurmJob | None) -> RunState:
    """Return the state of a run that is not done and is not continued."""
    if last is None:
        return RunState("killed", "died before it began", attention=True)
    why = ""
    if last.decision == "end":
        why = f"; not requeued: {last.why}"
    elif last.decision == "leave" and last.why.startswith(CANCELLED_REASON):
        why = f"; {last.why}"
    elif job is not None and job.state == "GONE":
        why = f"; job {job.number} has left the queue"
    if last.state == "killed":
        reason = "no error recorded" if last.began else "died before it began"
    else:
        reason = last.reason
    return RunState(last.state, reason + why, attention=True)


def _silent(last: Attempt, lines: Sequence[Record]) -> RunState | None:
    """Return the state "silent" if a run's process exists but no longer trains, else None."""
    # The median of the last gaps is robust against a validation or a slow save.
    times = [line["time"] for line in lines[-20:] if line.get("attempt", -1) == last.number]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    limit = max(RUN_SILENCE_S, SILENT_INTERVALS * statistics.median(gaps)) if gaps else FIRST_LINE_S
    quiet = time.time() - last.ended
    if quiet < limit:
        return None
    return RunState("silent", f"no line for {quiet / 60:.0f} min", attention=True)
