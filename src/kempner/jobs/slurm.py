"""The interface to SLURM: the end of a job, and whether another job still runs; for programs under
run.sh, whether they are asked to leave. this_job.py reads this job's environment.

Any query to the controller may go unanswered (no SLURM, a container without scontrol, a busy
controller): then the answer is None, and nothing depends on it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kempner.jobs.this_job import own_job, signal_lead

# Slurm's commands read these as options: SQUEUE_STATES=PENDING would hide running jobs.
SLURM_OPTIONS = re.compile(
    r"(SQUEUE|SINFO|SACCT|SCONTROL|SCANCEL)_|SLURM_(TIME_FORMAT|BITSTR_LEN)$"
)
NO_NODES = re.compile(  # states of jobs without nodes
    "PENDING|COMPLETED|CANCELLED|FAILED|TIMEOUT|PREEMPTED|NODE_FAIL|BOOT_FAIL|DEADLINE|REVOKED"
    "|OUT_OF_MEMORY|REQUEUED|REQUEUE_HOLD|SPECIAL_EXIT"
)
_asks: list[bool] = []  # not empty once this process has called stop_requested()


def plain_environment() -> dict[str, str]:
    """Return an environment for a Slurm command, without options that the user's shell exports."""
    return {name: value for name, value in os.environ.items() if not SLURM_OPTIONS.match(name)}


def _run(*command: str) -> subprocess.CompletedProcess[str] | None:
    env = plain_environment()
    try:
        # Without its controller, a Slurm command takes 20 s to fail. Names may have any bytes.
        return subprocess.run(command, capture_output=True, errors="replace", timeout=10, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _ask(*command: str) -> str | None:
    done = _run(*command)
    return done.stdout if done is not None and done.returncode == 0 else None


class _NoAnswer(Exception):
    """No answer to a query that needs one."""


def _insist(*command: str) -> str:
    """Repeat _ask() for some seconds, as a busy controller may drop a query. Raises _NoAnswer."""
    end = time.monotonic() + 5
    while (output := _ask(*command)) is None:
        if time.monotonic() > end:
            raise _NoAnswer
        time.sleep(1)
    return output


def job_fields(job: str) -> dict[str, str]:
    """Return the fields of `scontrol show job`; {} without an answer."""
    return _fields(_ask("scontrol", "show", "job", "-o", job) or "")


def _fields(text: str) -> dict[str, str]:
    return dict(re.findall(r"(\S+?)=(\S*)", text))


def end_of(fields: dict[str, str]) -> float | None:
    """Return the end of a job in unix seconds; None if it has none."""
    try:
        # Local time in this format: plain_environment() drops the user's SLURM_TIME_FORMAT.
        return time.mktime(time.strptime(fields["EndTime"], "%Y-%m-%dT%H:%M:%S"))
    except (KeyError, ValueError):
        return None


def kill_wait() -> float:
    """Return the seconds from SIGTERM to SIGKILL here; 30, Slurm's default, if unknown."""
    found = re.search(r"^KillWait\s*=\s*(\d+)", _ask("scontrol", "show", "config") or "", re.M)
    return float(found[1]) if found else 30.0


def seconds_to_live(job: str) -> float | None:
    """Return the seconds until SIGKILL after a request to leave; None if SLURM does not say.

    If the job's state is RUNNING, the request was the warning, or a preemption whose grace time is
    the job's new end: KillWait comes after that end. If the end is unknown, the request counts as
    the warning. In any other state Slurm is ending the job, and only KillWait is left.
    """
    fields = job_fields(job)
    if not fields:
        return None
    if fields.get("JobState") != "RUNNING":
        return kill_wait()
    end, lead = end_of(fields), signal_lead()
    if end is None:
        return None if lead is None else lead + kill_wait()
    return end - time.time() + kill_wait()


def is_running(job: str) -> bool | None:
    """Return whether this job, of this user and cluster, holds nodes. False only if Slurm says so;
    None if it does not answer or does not show the job."""
    # All states: by default squeue omits ended jobs, and no line could mean either an ended or a
    # hidden job (PrivateData).
    words = ("--noheader", "--states=all", "--jobs", job, "--format", "%T")
    done = _run("squeue", *words)
    if done is None:
        return None
    if done.returncode:
        # The controller forgets a job MinJobAge (300 s by default) after its end.
        return False if "Invalid job id" in done.stderr else None
    states = done.stdout.split()
    return any(not NO_NODES.fullmatch(state) for state in states) if states else None


def step_runs(step: int | None) -> bool | None:
    """Return whether this step (0, 1, ...) of our job exists. None if SLURM does not answer, or for
    a step without a number."""
    job = own_job()
    if job is None or step is None:
        return None
    steps = _ask("squeue", "--noheader", "--steps", "--jobs", job, "--format", "%i")
    return None if steps is None else any(x.endswith(f".{step}") for x in steps.split())


@dataclass(frozen=True)
class SlurmJob:
    """A job as squeue shows it."""

    number: str
    state: str  # RUNNING, PENDING, ...; GONE if it has left the queue
    left: str = ""  # time until its limit
    why: str = ""  # reason for pending
    start: str = ""  # expected start, as Slurm writes it


def my_jobs() -> dict[str, SlurmJob] | None:
    """Return this user's queued jobs by number; None without an answer."""
    # With --array each task of an array has a line, named as by job_name(): 12_3.
    output = _ask("squeue", "--me", "--array", "--noheader", "--format=%i|%T|%L|%r|%S")
    if output is None:
        return None
    fields = (line.split("|") for line in output.splitlines())
    return {job[0]: SlurmJob(*job) for job in fields if len(job) == 5}


def jobs_named(name: str) -> list[str] | None:
    """Return the numbers of this user's jobs with this name (of an array, its own number), even if
    they ended minutes ago; None without an answer."""
    words = ("--me", "--noheader", "--states=all", f"--name={name}", "--format=%F")
    output = _ask("squeue", *words)
    return None if output is None else list(dict.fromkeys(output.split()))


def waiting_arrays() -> dict[str, str]:
    """Return the names of this user's pending jobs by number (of an array, its own number); {}
    without an answer."""
    output = _ask("squeue", "--me", "--noheader", "--states=PENDING", "--format=%F|%j") or ""
    return {job: name for line in output.splitlines() for job, _, name in [line.partition("|")]}


def other_nodes(request: str, without: Sequence[str]) -> int | None:
    """Count the nodes that could take a job, except those in `without` and those that it already
    excludes; None if unknown. Busy nodes count: the job waits for them.

    Of `request`, the output of `scontrol show job`, it uses the partition, the named nodes, the
    features (with & or |), the kinds and numbers of GPUs, and the reservation.
    """
    fields = _fields(request)
    with contextlib.suppress(_NoAnswer, KeyError):
        return _other_nodes(fields, without)
    return None


def _other_nodes(fields: Mapping[str, str], without: Sequence[str]) -> int | None:
    output = _insist("sinfo", "-h", "-N", "-p", fields["Partition"], "-o", "%N|%t|%f|%G")
    allowed: set[str] | None = None
    for names in (_named(fields, "ReqNodeList"), _reserved(fields)):
        if names is not None:
            allowed = set(names) if allowed is None else allowed & set(names)
    left_out = {*without, *(_named(fields, "ExcNodeList") or ())}
    constraint = _is_set(fields.get("Features", ""))
    if constraint and not re.fullmatch(r"[\w.&|-]+", constraint):
        return None  # counts and brackets: only Slurm knows
    # A set: a node has a line for each named partition.
    nodes = set()
    for line in output.splitlines():
        name, _, rest = line.partition("|")
        state, features, gres = (*rest.split("|"), "", "", "")[:3]
        if re.match(r"down|drain|drng|fail|futr|inval|maint|unk", state) or name in left_out:
            continue
        if allowed is not None and name not in allowed:
            continue
        if _has_features(constraint, features) and _has_gpus(fields.get("TresPerNode", ""), gres):
            nodes.add(name)
    return len(nodes)


def _is_set(value: str) -> str:
    return "" if value in ("(null)", "N/A") else value


def _named(fields: Mapping[str, str], name: str) -> list[str] | None:
    """Return the hosts in a field of the job; None if it is not set."""
    value = _is_set(fields.get(name, ""))
    if not value:
        return None
    return _insist("scontrol", "show", "hostnames", value).split()


def _reserved(fields: Mapping[str, str]) -> list[str] | None:
    name = _is_set(fields.get("Reservation", ""))
    if not name:
        return None
    return _named(_fields(_insist("scontrol", "show", "res", "-o", name)), "Nodes") or []


def _has_features(constraint: str, features: str) -> bool:
    has = set(features.split(","))
    return all(has & set(word.split("|")) for word in constraint.split("&") if word)


def _has_gpus(request: str, gres: str) -> bool:
    """Return whether a node with these GRES (gpu:h100:4(S:0-1)) has the GPUs of TresPerNode
    (gres:gpu:h100:4)."""
    for kind, count in re.findall(r"gpu((?::[A-Za-z][^:,(=]*)?)(?:[:=](\d+))?", request):
        has = re.findall(r"gpu((?::[A-Za-z][^:,(=]*)?)(?::(\d+))?", gres)
        if sum(int(n or 1) for own, n in has if kind in ("", own)) < int(count or 1):
            return False
    return True


# Cached: status.py calls it for each of many runs.
@functools.cache
def cluster_name() -> str | None:
    """Return the name of this cluster; None without an answer."""
    if name := os.environ.get("SLURM_CLUSTER_NAME"):
        return name
    found = re.search(r"^ClusterName\s*=\s*(\S+)", _ask("scontrol", "show", "config") or "", re.M)
    return found[1] if found else None


def max_array_size() -> int | None:
    """Return MaxArraySize, one more than the largest array index; None without an answer."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", _ask("scontrol", "show", "config") or "", re.M)
    return int(found[1]) if found else None


def accounted_states(jobs: Sequence[str]) -> dict[str, str]:
    """Return the last state of jobs from Slurm's accounting, by name (12, or 12_3 of an array).
    Omits unknown jobs, or all if there is no accounting."""
    words = ("-X", "-P", "-n", "-S", "now-60days", "-o", "JobID,State", "-j")
    # Linux limits an argument to 128 KiB.
    parts = (jobs[begin : begin + 1000] for begin in range(0, len(jobs), 1000))
    output = "".join(_ask("sacct", *words, ",".join(part)) or "" for part in parts)
    lines = (line.partition("|") for line in output.splitlines())
    # sacct writes "CANCELLED by 1000", with the user id.
    return {job: state.partition(" ")[0] for job, _, state in lines if state}


# --- for programs under scripts/slurm/run.sh: docs/start/any-program.md --------------------------


def stop_requested() -> bool:
    """Return whether this program is asked to save and leave: the time limit is near, the job is
    preempted, or the user requests it. False outside run.sh. Cheap enough for every step. Ranks may
    see it a step apart: if they save together, let one of them decide or reduce the answers."""
    place = os.environ.get("KEMPNER_STOP_FILE")
    if place is None:
        return False
    # This file tells the supervisor that the program needs no signal.
    if not _asks:
        _asks.append(True)
        with contextlib.suppress(OSError):
            open(os.path.join(os.path.dirname(place), "asks"), "w").close()
    return os.path.exists(place)


def end_time() -> float | None:
    """Return the end of this job in unix seconds; None if unknown or outside run.sh. It may move.
    Every rank may call this in every step: one supervisor asks Slurm for all."""
    place = os.environ.get("KEMPNER_STOP_FILE")
    if place is None:
        return None
    try:
        with open(os.path.join(os.path.dirname(place), "end")) as file:
            return float(file.read())
    except (OSError, ValueError):
        return None


def seconds_left() -> float | None:
    """Return the seconds until the end of this job; None if unknown."""
    end = end_time()
    return None if end is None else end - time.time()


def beat(step: int | None = None) -> None:
    """Send a heartbeat for run.sh --heartbeat, with the program's step."""
    place = os.environ.get("KEMPNER_HEARTBEAT")
    if place is not None:
        with contextlib.suppress(OSError), open(place, "w") as file:
            file.write("" if step is None else str(step))
