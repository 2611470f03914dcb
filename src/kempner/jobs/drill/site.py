"""Queries and commands of the drill to Slurm: its jobs by name, and how to preempt them here."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kempner.jobs.slurm import job_fields, plain_environment

TRIES, BETWEEN_S = 3, 2.0  # a busy controller may drop one query and answer the next


@dataclass(frozen=True)
class SlurmAnswer:
    """The answer of a command. `ok`: its exit code was 0; `text`: its output, or its error, which
    is never empty."""

    ok: bool
    text: str


def tell(*command: str, env: dict[str, str] | None = None, seconds: float = 60) -> SlurmAnswer:
    """Run a Slurm command once."""
    env = {**plain_environment(), **(env or {})}
    try:
        done = subprocess.run(
            command, capture_output=True, errors="replace", timeout=seconds, env=env,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return SlurmAnswer(False, str(error))
    if done.returncode:
        return SlurmAnswer(False, done.stderr.strip() or f"exit code {done.returncode}")
    return SlurmAnswer(True, done.stdout)


def ask(*command: str) -> str | None:
    """Return the output of a command; None if it fails TRIES times."""
    for number in range(TRIES):
        said = tell(*command)
        if said.ok:
            return said.text
        time.sleep(BETWEEN_S if number < TRIES - 1 else 0)
    return None


@dataclass(frozen=True)
class QueuedJob:
    """A job of the drill, as squeue shows it."""

    number: str
    name: str
    state: str
    why: str


def jobs_of(prefix: str) -> list[QueuedJob] | None:
    """Return this user's queued jobs whose names begin with `prefix`; None without an answer."""
    # One try: the drill asks again in seconds.
    said = tell("squeue", "--me", "--noheader", "--format=%i|%j|%T|%r", seconds=20)
    if not said.ok:
        return None
    fields = (line.split("|", 3) for line in said.text.splitlines())
    return [QueuedJob(*job) for job in fields if len(job) == 4 and job[1].startswith(prefix)]


def nodes_of_job(job: str) -> list[str]:
    """Return the hosts of a running job if it is exclusive, else []."""
    fields = job_fields(job)
    # NO: exclusive. With OK, YES or USER another job may be on the same nodes.
    if fields.get("JobState") != "RUNNING" or fields.get("OverSubscribe") != "NO":
        return []
    return (ask("scontrol", "show", "hostnames", fields.get("NodeList", "")) or "").split()


def setting(name: str) -> str:
    """Return a value of slurm.conf; "" if unknown."""
    found = re.search(rf"^{name}\s*=\s*(\S+)", ask("scontrol", "show", "config") or "", re.M)
    return found[1] if found else ""


def facts_of_site() -> dict[str, str]:
    """Return the settings on which the kit's promises depend."""
    names = ("SLURM_VERSION", "ClusterName", "KillWait", "JobRequeue", "PreemptType",
             "PreemptMode", "SlurmdTimeout", "AccountingStorageEnforce")  # fmt: skip
    text = ask("scontrol", "show", "config") or ""
    found = {name: re.search(rf"^{name}\s*=\s*(.+?)\s*$", text, re.M) for name in names}
    return {name: match[1] for name, match in found.items() if match}


def preempting_option(job: str) -> tuple[str, str]:
    """Return the option of a job that would preempt this one, or "" and the reason."""
    kind, fields = setting("PreemptType"), job_fields(job)
    if kind == "preempt/partition_prio":
        return _by_partition(fields)
    if kind == "preempt/qos":
        return _by_qos(fields)
    return "", f"this site preempts no job (PreemptType={kind or 'unknown'})"


def _by_partition(fields: dict[str, str]) -> tuple[str, str]:
    text = ask("scontrol", "show", "partition", "-o") or ""
    parts = [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in text.splitlines()]
    own = next((p for p in parts if p.get("PartitionName") == fields.get("Partition")), {})
    # A partition's mode overrides the cluster's: slurm.conf(5).
    if own.get("PreemptMode") == "OFF":
        return "", f"jobs of partition {own.get('PartitionName')} are not preempted"
    # With this plugin a higher tier preempts a lower one; job priority does not count.
    least = int(own.get("PriorityTier", "1"))
    for part in parts:
        higher = part.get("State") == "UP" and int(part.get("PriorityTier", "0")) > least
        if higher and _may_submit(option := f"--partition={part['PartitionName']}"):
            return option, ""
    return "", "no partition of a higher priority takes a job of yours"


def _by_qos(fields: dict[str, str]) -> tuple[str, str]:
    text = ask("sacctmgr", "-nP", "show", "qos", "format=Name,Preempt") or ""
    own = fields.get("QOS", "")
    user = f"user={os.environ.get('USER', '')}"
    mine = ask("sacctmgr", "-nP", "show", "associations", user, "format=QOS") or ""
    allowed = set(re.split(r"[,\s]+", mine))
    for line in text.splitlines():
        # The column Preempt lists the QOS that this one may preempt.
        name, _, over = line.partition("|")
        if own and own in over.split(",") and name in allowed and _may_submit(f"--qos={name}"):
            return f"--qos={name}", ""
    return "", f"no QOS of yours preempts jobs of QOS {own}"


def _may_submit(option: str) -> bool:
    # The controller checks limits, accounts and access; nothing is queued.
    return tell("sbatch", "--test-only", "--time=1", option, "--wrap=:").ok


def without_sizes(options: Sequence[str]) -> list[str]:
    """Return a request's options for the account and the kind of node, without those for the number
    of nodes and the time. GPU options stay: a GPU partition may refuse a job without one."""
    kept = r"--(account|reservation|clusters|gpus-per-node|gres|constraint)\b|-[AMC]"
    return [option for option in options if re.match(kept, option)]
