"""What the trainer asks of SLURM: when this job ends, and whether another one still lives.

Every question may go unanswered (no SLURM, a container without scontrol, a busy controller): then
the answer is None, and nothing depends on it.
"""

from __future__ import annotations

import math
import os
import re
import socket
import subprocess
import time
from dataclasses import dataclass


def _ask(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def job_fields(job: str) -> dict[str, str]:
    """What `scontrol show job` says of it, {} when it says nothing."""
    return dict(re.findall(r"(\S+?)=(\S*)", _ask("scontrol", "show", "job", "-o", job) or ""))


def end_of(fields: dict[str, str]) -> float | None:
    """The end of a job in unix seconds, None when it has none."""
    try:
        return time.mktime(time.strptime(fields["EndTime"], "%Y-%m-%dT%H:%M:%S"))
    except (KeyError, ValueError):
        return None


def kill_wait() -> float:
    """Seconds from SIGTERM to SIGKILL on this cluster; 30, Slurm's default, when it does not
    say."""
    found = re.search(r"^KillWait\s*=\s*(\d+)", _ask("scontrol", "show", "config") or "", re.M)
    return float(found[1]) if found else 30.0


def seconds_to_live(job: str) -> float | None:
    """After a request to leave: seconds until SIGKILL, None when SLURM does not say.

    While the job's state is RUNNING the request was the warning, or a preemption, whose grace time
    Slurm has made the job's new end: KillWait comes after that end. In any other state the job is
    being ended, and KillWait is all that is left.
    """
    fields = job_fields(job)
    if not fields:
        return None
    end = end_of(fields)
    if fields.get("JobState") != "RUNNING" or end is None:
        return kill_wait()
    return end - time.time() + kill_wait()


def short_window(save: float) -> str | None:
    """A warning, when the time between the warning signal and the end of the job
    (KEMPNER_SIGNAL_LEAD, from the batch script) is under twice the `save` seconds of a checkpoint.

    The size that it names is twice the save and 30 s, for the step on the way and the exit.
    """
    try:
        lead = float(os.environ.get("KEMPNER_SIGNAL_LEAD", ""))
    except ValueError:  # unset: not a batch job, or the user's own script
        return None
    if lead >= 2 * save:
        return None
    enough = 30 * math.ceil((2 * save + 30) / 30)
    return (
        f"WARNING: a checkpoint takes {save:.1f} s, and the signal comes only {lead:.0f} s before "
        f"the end of the job: export SBATCH_SIGNAL=B:SIGTERM@{enough} before sbatch, or change the "
        "line #SBATCH --signal of the script"
    )


def is_running(job: str) -> bool | None:
    """Does this job hold nodes? None when SLURM does not answer."""
    states = _ask("squeue", "--noheader", "--jobs", job, "--format", "%T")
    if states is not None:
        return any(state not in ("PENDING", "") for state in states.split())
    # squeue fails for a job that the controller has forgotten, and for a controller that is away.
    return False if _ask("squeue", "--noheader", "--me") is not None else None


def own_job() -> str | None:
    return os.environ.get("SLURM_JOB_ID")


def host_name() -> str:
    """This host as Slurm names it, so that it may go into ExcNodeList; outside Slurm its own
    name, which may have a domain that Slurm's lacks."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(frozen=True)
class Job:
    """A job as squeue shows it."""

    number: str
    state: str  # RUNNING, PENDING, ...; GONE when it has left the queue
    left: str = ""  # time until its limit
    why: str = ""  # it is pending
    start: str = ""  # expected, as Slurm writes it


def my_jobs() -> dict[str, Job] | None:
    """My jobs in the queue by number, None without an answer."""
    told = _ask("squeue", "--me", "--noheader", "--format=%i|%T|%L|%r|%S")
    if told is None:
        return None
    fields = (line.split("|") for line in told.splitlines())
    return {job[0]: Job(*job) for job in fields if len(job) == 5}
