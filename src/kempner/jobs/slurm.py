"""The interface to SLURM: the variables of a job and its steps, when the job ends, and whether
another job still runs.

Every question to the controller may go unanswered (no SLURM, a container without scontrol, a busy
controller): then the answer is None, and nothing depends on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import math
import os
import re
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SIOCGIFADDR = 0x8915
LAST_STEP = 0xFFFFFF00  # higher numbers are those of steps with a name
# Slurm's commands read these as options: with SQUEUE_STATES=PENDING a job that runs is not there.
SLURM_OPTIONS = re.compile(
    r"(SQUEUE|SINFO|SACCT|SCONTROL|SCANCEL)_|SLURM_(TIME_FORMAT|BITSTR_LEN)$"
)
NO_NODES = re.compile(  # the states of jobs that hold none
    "PENDING|COMPLETED|CANCELLED|FAILED|TIMEOUT|PREEMPTED|NODE_FAIL|BOOT_FAIL|DEADLINE|REVOKED"
    "|OUT_OF_MEMORY|REQUEUED|REQUEUE_HOLD|SPECIAL_EXIT"
)
_asks: list[bool] = []  # this process has asked stop_requested()


def job_name(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the job of this process as users name it (`12`, or `12_3` in an array), None outside
    SLURM."""
    if "SLURM_ARRAY_JOB_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env.get('SLURM_ARRAY_TASK_ID', '?')}"
    return env.get("SLURM_JOB_ID")


def is_here() -> bool:
    """Return whether this is a host of a cluster, whose jobs may run on other ones: it has sbatch,
    or a batch script has started this process in a container, which has none."""
    return shutil.which("sbatch") is not None or "KP_UNMOUNTED" in os.environ


def on_node() -> bool:
    """Return whether this process is on a node of its job: a shell of salloc may be on a login
    node."""
    return "SLURMD_NODENAME" in os.environ


def start_name() -> str:
    """Return the name of this start: no other step, of this job or of another, has it."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    return ".".join(os.environ.get(name, "0") for name in names)


def attempt_name() -> str:
    """Return the name of this attempt, fit for a file: the batch script's; without one that of this
    process, which then has to tell the others."""
    own = f"{socket.gethostname()}.{os.getpid()}.{int(time.time())}"
    return re.sub(r"[^\w.-]", "_", os.environ.get("KEMPNER_ATTEMPT_ID") or own)


def tasks_per_node(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the tasks on each node of this step, from SLURM_STEP_TASKS_PER_NODE (`4(x2)`, or `4`);
    None if the nodes differ or nothing is set."""
    counts = set(re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", env.get("SLURM_STEP_TASKS_PER_NODE", "")))
    return int(counts.pop()) if len(counts) == 1 else None


def own_address() -> str:
    """Return the address of this host that the other hosts of the job reach: that of the interface
    which routes to the host of srun."""
    peer = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    if peer:
        family = socket.AF_INET6 if ":" in peer else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # UDP: nothing is sent, the kernel only picks the route
            address = str(probe.getsockname()[0])
        if not address.startswith("127."):
            return address
    return socket.gethostname()


def fast_address() -> str | None:
    """Return the IPv4 address of this host on the fast network: that of the first interface that
    lib/network.sh has chosen for gloo. None if none is named, or it has no such address."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])
        except OSError:
            return None


def plain_environment() -> dict[str, str]:
    """Return an environment for a command of Slurm, without the options that the user's shell
    exports."""
    return {name: value for name, value in os.environ.items() if not SLURM_OPTIONS.match(name)}


def _run(*command: str) -> subprocess.CompletedProcess[str] | None:
    env = plain_environment()
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _ask(*command: str) -> str | None:
    done = _run(*command)
    return done.stdout if done is not None and done.returncode == 0 else None


class _NoAnswer(Exception):
    """No answer to a question that cannot be left open."""


def _insist(*command: str) -> str:
    """Ask as _ask does, but again for some seconds: a busy controller drops one question and
    answers the next. Raises _NoAnswer."""
    end = time.monotonic() + 5
    while (told := _ask(*command)) is None:
        if time.monotonic() > end:
            raise _NoAnswer
        time.sleep(1)
    return told


def job_fields(job: str) -> dict[str, str]:
    """Return the fields of `scontrol show job`, {} without an answer."""
    return _fields(_ask("scontrol", "show", "job", "-o", job) or "")


def _fields(told: str) -> dict[str, str]:
    return dict(re.findall(r"(\S+?)=(\S*)", told))


def end_of(fields: dict[str, str]) -> float | None:
    """Return the end of a job in unix seconds, None if it has none."""
    try:
        return time.mktime(time.strptime(fields["EndTime"], "%Y-%m-%dT%H:%M:%S"))
    except (KeyError, ValueError):
        return None


def kill_wait() -> float:
    """Return the seconds from SIGTERM to SIGKILL on this cluster; 30, Slurm's default, if it does
    not say."""
    found = re.search(r"^KillWait\s*=\s*(\d+)", _ask("scontrol", "show", "config") or "", re.M)
    return float(found[1]) if found else 30.0


def seconds_to_live(job: str) -> float | None:
    """Return the seconds until SIGKILL, after a request to leave; None if SLURM does not say.

    While the job's state is RUNNING the request was the warning, or a preemption, whose grace time
    Slurm has made the job's new end: KillWait comes after that end. If that end is unknown the
    request is taken for the warning. In any other state the job is being ended, and KillWait is all
    that is left.
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


def signal_lead() -> float | None:
    """Return the seconds between the warning signal and the end of the job, from the batch script;
    None if there is none, or it is the user's own."""
    try:
        return float(os.environ.get("KEMPNER_SIGNAL_LEAD", ""))
    except ValueError:
        return None


def short_window(save: float, step: float) -> str | None:
    """Return a warning if the time between the warning signal and the end of the job
    (KEMPNER_SIGNAL_LEAD, from the batch script) is shorter than the run needs in order to leave.

    It needs twice the `save` seconds of a checkpoint, and three times `step`, the longest time that
    passes before a request is acted on: the step in flight, the one after it, and one that is
    slower than the median. The size that the warning suggests has 30 s more, for the exit.
    """
    lead = signal_lead()
    needed = time_to_leave(save, step)
    if lead is None or lead >= needed:
        return None
    enough = 30 * math.ceil((needed + 30) / 30)
    return (
        f"WARNING: a checkpoint takes {save:.1f} s and a step {step:.1f} s, and the signal comes "
        f"only {lead:.0f} s before the end of the job: export SBATCH_SIGNAL=B:SIGTERM@{enough} "
        "before sbatch, or change the line #SBATCH --signal of the script"
    )


def time_to_leave(save: float, step: float) -> float:
    """Return the seconds that a run needs from a request to leave until its last checkpoint is
    durable."""
    return 2 * save + 3 * step


def is_running(job: str) -> bool | None:
    """Return whether this job, one of this user and cluster, holds nodes. False only by Slurm's own
    words; None if it does not answer, or says nothing of it."""
    words = ("--noheader", "--states=all", "--jobs", job, "--format", "%T")
    done = _run("squeue", *words)
    if done is None:
        return None
    if done.returncode:
        return False if "Invalid job id" in done.stderr else None
    states = done.stdout.split()
    return any(not NO_NODES.fullmatch(state) for state in states) if states else None


def step_runs(step: str | None) -> bool | None:
    """Return whether this step (0, 1, ...) of our own job exists. None if SLURM does not answer,
    and for a step that it shows by a name: batch, interactive."""
    job = own_job()
    if job is None or step is None or int(step) > LAST_STEP:
        return None
    steps = _ask("squeue", "--noheader", "--steps", "--jobs", job, "--format", "%i")
    return None if steps is None else any(x.endswith(f".{step}") for x in steps.split())


def own_job() -> str | None:
    return os.environ.get("SLURM_JOB_ID")


def host_name() -> str:
    """Return this host as Slurm names it, so that it may go into ExcNodeList; outside Slurm its own
    name, which may have a domain that Slurm's lacks."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(frozen=True)
class SlurmJob:
    """A job as squeue shows it."""

    number: str
    state: str  # RUNNING, PENDING, ...; GONE when it has left the queue
    left: str = ""  # time until its limit
    why: str = ""  # it is pending
    start: str = ""  # expected, as Slurm writes it


def my_jobs() -> dict[str, SlurmJob] | None:
    """Return my jobs in the queue by number, None without an answer."""
    told = _ask("squeue", "--me", "--array", "--noheader", "--format=%i|%T|%L|%r|%S")
    if told is None:
        return None
    fields = (line.split("|") for line in told.splitlines())
    return {job[0]: SlurmJob(*job) for job in fields if len(job) == 5}


def jobs_named(name: str) -> list[str] | None:
    """Return the numbers of my jobs with this name, an array's own, also of those that ended
    minutes ago; None without an answer."""
    words = ("--me", "--noheader", "--states=all", f"--name={name}", "--format=%F")
    told = _ask("squeue", *words)
    return None if told is None else list(dict.fromkeys(told.split()))


def waiting_arrays() -> dict[str, str]:
    """Return the names of my jobs that wait, by their numbers, an array's own; none without an
    answer."""
    told = _ask("squeue", "--me", "--noheader", "--states=PENDING", "--format=%F|%j") or ""
    return {job: name for line in told.splitlines() for job, _, name in [line.partition("|")]}


def other_nodes(request: str, without: Sequence[str]) -> int | None:
    """Count the nodes that could take a job, except those in `without` and those that it excludes
    already; None if unknown. Nodes that are busy count: the job waits for them.

    Of the request, the output of `scontrol show job`, it uses the partition, the named nodes, the
    features (with & or |), the kinds and numbers of GPUs and the reservation.
    """
    fields = _fields(request)
    with contextlib.suppress(_NoAnswer, KeyError):
        return _other_nodes(fields, without)
    return None


def _other_nodes(fields: Mapping[str, str], without: Sequence[str]) -> int | None:
    told = _insist("sinfo", "-h", "-N", "-p", fields["Partition"], "-o", "%N|%t|%f|%G")
    allowed: set[str] | None = None
    for names in (_named(fields, "ReqNodeList"), _reserved(fields)):
        if names is not None:
            allowed = set(names) if allowed is None else allowed & set(names)
    left_out = {*without, *(_named(fields, "ExcNodeList") or ())}
    wanted = _is_set(fields.get("Features", ""))
    if wanted and not re.fullmatch(r"[\w.&|-]+", wanted):
        return None  # counts and brackets: only Slurm knows
    found = set()
    for line in told.splitlines():
        name, _, rest = line.partition("|")
        state, features, gres = (*rest.split("|"), "", "", "")[:3]
        if re.match(r"down|drain|drng|fail|maint|unk", state) or name in left_out:
            continue
        if allowed is not None and name not in allowed:
            continue
        if _has_features(wanted, features) and _has_gpus(fields.get("TresPerNode", ""), gres):
            found.add(name)
    return len(found)


def _is_set(value: str) -> str:
    return "" if value in ("(null)", "N/A") else value


def _named(fields: Mapping[str, str], name: str) -> list[str] | None:
    """Return the hosts of a field of the job, None if it is not set."""
    value = _is_set(fields.get(name, ""))
    if not value:
        return None
    return _insist("scontrol", "show", "hostnames", value).split()


def _reserved(fields: Mapping[str, str]) -> list[str] | None:
    name = _is_set(fields.get("Reservation", ""))
    if not name:
        return None
    return _named(_fields(_insist("scontrol", "show", "res", "-o", name)), "Nodes") or []


def _has_features(wanted: str, features: str) -> bool:
    has = set(features.split(","))
    return all(has & set(word.split("|")) for word in wanted.split("&") if word)


def _has_gpus(wanted: str, gres: str) -> bool:
    """Return whether a node with these GRES (gpu:h100:4(S:0-1)) has the GPUs of TresPerNode
    (gres:gpu:h100:4)."""
    for kind, count in re.findall(r"gpu((?::[A-Za-z][^:,(=]*)?)(?:[:=](\d+))?", wanted):
        has = re.findall(r"gpu((?::[A-Za-z][^:,(=]*)?)(?::(\d+))?", gres)
        if sum(int(n or 1) for own, n in has if kind in ("", own)) < int(count or 1):
            return False
    return True


@functools.cache
def cluster_name() -> str | None:
    """Return the name of the cluster that answers here; None without an answer."""
    if name := os.environ.get("SLURM_CLUSTER_NAME"):
        return name
    found = re.search(r"^ClusterName\s*=\s*(\S+)", _ask("scontrol", "show", "config") or "", re.M)
    return found[1] if found else None


def max_array_size() -> int | None:
    """Return the bound of an array's largest index, which is under it; None without an answer."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", _ask("scontrol", "show", "config") or "", re.M)
    return int(found[1]) if found else None


def accounted_states(jobs: Sequence[str]) -> dict[str, str]:
    """Return the last state of jobs by Slurm's accounting, by name (12, or 12_3 of an array);
    unknown jobs are left out, or all if there is no accounting."""
    words = ("-X", "-P", "-n", "-S", "now-60days", "-j", ",".join(jobs), "-o", "JobID,State")
    told = _ask("sacct", *words) if jobs else None
    lines = (line.partition("|") for line in (told or "").splitlines())
    return {job: state.partition(" ")[0] for job, _, state in lines if state}


# --- for programs under scripts/slurm/run.sh: docs/start/any-program.md --------------------------


def stop_requested() -> bool:
    """Return whether this program is asked to save and leave: the time limit is near, the job is
    preempted, the user wants it. Cheap enough for every step. Ranks may hear of it a step apart: if
    they save together, let one of them decide, or reduce the answers. Outside run.sh always
    False."""
    place = os.environ.get("KEMPNER_STOP_FILE")
    if place is None:
        return False
    if not _asks:  # the supervisor then sends no signal
        _asks.append(True)
        with contextlib.suppress(OSError):
            open(os.path.join(os.path.dirname(place), "asks"), "w").close()
    return os.path.exists(place)


def end_time() -> float | None:
    """Return the end of this job, in unix seconds; None if unknown, and outside run.sh. It may
    move. Every rank may ask in every step: one supervisor asks Slurm for all."""
    place = os.environ.get("KEMPNER_STOP_FILE")
    if place is None:
        return None
    try:
        with open(os.path.join(os.path.dirname(place), "end")) as file:
            return float(file.read())
    except (OSError, ValueError):
        return None


def seconds_left() -> float | None:
    """Return the seconds until the end of this job, None if unknown."""
    end = end_time()
    return None if end is None else end - time.time()


def beat(step: int | None = None) -> None:
    """Give a sign of life, for run.sh --heartbeat, and the program's step."""
    place = os.environ.get("KEMPNER_HEARTBEAT")
    if place is not None:
        with contextlib.suppress(OSError), open(place, "w") as file:
            file.write("" if step is None else str(step))
