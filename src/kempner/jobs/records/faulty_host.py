"""Diagnosis of an attempt's end from its records and srun's log: which host, and why. No torch."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from typing import Any

from kempner.jobs.records.event_reader import is_time

_Record = dict[str, Any]

# "srun: error: node2: tasks 2-3: Killed". Not Terminated, as srun itself ends the remaining ranks;
# not an exit code, as the rank's own record says more; and not Aborted, as such a rank has waited
# for another one: NCCL's watchdog calls abort() if a collective times out.
DEATH = re.compile(
    r"^srun: error: (\S+): tasks? [\d,-]+: (?!Terminated|Exited|Aborted)", re.MULTILINE
)

# "srun: error: task 0 launch failed: Unspecified error": srun then kills the tasks of other nodes.
NOT_LAUNCHED = re.compile(r"^srun: error: task (\d+) launch failed", re.MULTILINE)

ENDING = "kempner: ending the other ranks"  # restart.sh kills the remaining ranks

# After this line srun or restart.sh ends the remaining ranks: later deaths are not the cause.
ENDED_BY_US = re.compile(rf"^{ENDING}|Terminating StepId=|Job step aborted", re.MULTILINE)

# A rank's exit code, except for an orderly exit: interrupted, for a new attempt, or lost lock.
LEFT_OUT_REASON = re.compile(
    r"^srun: error: (\S+): tasks? [\d,-]+: Exited with exit code (?!7[567]$)\d+$", re.MULTILINE
)

# A task's shell could not read its script: the host does not see the shared directory.
NO_SCRIPT = re.compile(r"(/\S*/lib/task\.sh): (?!line )")

# No rank has begun: the controller did not answer srun. Slurm's other reasons concern the request.
AWAY = re.compile(
    r"^srun: error: Unable to create step for job \S+: "
    r"(.*(?:timed out|contact|onnection|ommunication|try again|Zero Bytes).*)$",
    re.MULTILINE,
)

# Errors of a rank if a file system has failed, not the rank.
FILE_SYSTEM = re.compile(
    r"\[Errno (5|108|112|116|121)\]|Input/output error|Stale file handle|Remote I/O error"
    r"|Transport endpoint|\[Errno 110\][^:]*: '"  # with a file's name: not of a connection
)


def host_of(faults: Sequence[_Record], srun_log: str) -> str:
    """Return the host on which an attempt failed; "" if nothing points to one.

    A rank that does not answer hangs alone, and srun causes all later ends. A rank killed by a
    signal (kernel, out of memory, broken hardware) leaves no record, but srun reports it; the
    others only lose their peer. Otherwise it is the first rank with its own error or, if no rank
    recorded an error, the host on which the program ended before it could.
    """
    for fault in faults:
        if fault.get("kind") == "hang":
            hosts = fault.get("hosts", [])
            return str(hosts[0]) if len(hosts) == 1 else ""
    before = ENDED_BY_US.split(srun_log, maxsplit=1)[0]
    killed = DEATH.findall(before)
    if not faults and len(set(killed)) > 1:  # all at once: the cause is not on one host
        return ""
    if killed:
        return str(killed[0])
    own = (fault for fault in faults if fault.get("kind") == "crash" and not fault.get("lost_peer"))
    host = next((fault["hosts"][0] for fault in own if fault.get("hosts")), "")
    early_hosts = set(LEFT_OUT_REASON.findall(before))
    if not faults and len(early_hosts) == 1:
        host = early_hosts.pop()
    return str(host)


def sees_no_program(faults: Sequence[_Record], srun_log: str) -> str:
    """Return the script that a task's shell could not read, if no rank has a record; else ""."""
    found = None if faults else NO_SCRIPT.search(srun_log)
    return found[1] if found else ""


def file_system_faults(faults: Sequence[_Record]) -> list[_Record]:
    """Return the errors of ranks whose file system has failed."""
    return [f for f in faults if FILE_SYSTEM.search(str(f.get("reason", "")))]


def progress_at(decision: _Record) -> float:
    """Return the progress at a decision, in the unit of `committed`; infinity if not recorded."""
    # Under run.sh `step` is the number in a checkpoint's name, and `committed` counts checkpoints.
    progress = decision.get("committed", decision.get("step"))
    return progress if isinstance(progress, int) else math.inf


def file_system_faults_before(
    records: Sequence[_Record], decisions: Sequence[_Record], committed: int
) -> list[_Record]:
    """Return the file system errors of the last attempts in a row that ended with one, as far back
    as the run had already made the progress `committed`."""
    found: list[_Record] = []
    for decision in reversed(decisions):
        own = [r for r in records if r.get("attempt_id") == decision.get("attempt_id")]
        failed = file_system_faults([r for r in own if r.get("event") == "fault"])
        if not failed or progress_at(decision) < committed:
            break
        found += failed
    return found


def site_fault(faults: Sequence[_Record], before: Sequence[_Record] = ()) -> str:
    """Describe a file system that fails on several hosts; "" without one. A failure on only one
    host is that host's fault. `before`: those of earlier attempts, if they count as well."""
    failed = file_system_faults(faults)
    failed += before if failed else ()
    host_lists = [fault.get("hosts") for fault in failed]
    hosts = {str(host) for each in host_lists if isinstance(each, list) for host in each}
    if len(hosts) < 2:
        return ""
    reason = " ".join(str(failed[0].get("reason", "")).split())
    return f"a file system fails on {len(hosts)} hosts: {reason}"


def controller_away(srun_log: str) -> str:
    """Return why srun could not create the step, if the controller was the cause; else ""."""
    found = AWAY.search(srun_log)
    return f"srun could not create the step: {found[1]}" if found else ""


def launch_failed_on(srun_log: str, per_node: int, nodes: Sequence[str]) -> str:
    """Return the first host on which a task could not be launched; "" without one. Tasks are
    distributed in blocks."""
    found = NOT_LAUNCHED.search(srun_log)
    place = int(found[1]) // per_node if found else len(nodes)
    return nodes[place] if place < len(nodes) else ""


def decisions_without_progress(decisions: Sequence[_Record]) -> int:
    """Count the attempts in a row, up to the last decision, without a new checkpoint. A decision
    has null if the batch script had no time to count."""
    count = 0
    for decision in decisions:
        number = decision.get("no_progress")
        count = number if isinstance(number, int) else count + 1
    return count


def excluded_by(decision: _Record) -> list[str]:
    """Return the nodes that the job excludes since this decision."""
    if decision.get("decision") == "restart":  # a spare has replaced them
        return []
    return str(decision.get("excluded", "")).replace(",", " ").split()


def excluded_in_vain(decisions: Sequence[_Record]) -> int:
    """Count the nodes excluded since the last new checkpoint. A node may appear twice, if Slurm did
    not take the first request."""
    hosts: set[str] = set()
    newest = math.inf
    for decision in decisions:
        names, step = excluded_by(decision), decision.get("step")
        step = step if isinstance(step, int) else newest
        # An exclusion sets the count to 0 with or without progress: there the step decides.
        if step > newest or (not names and decision.get("no_progress") == 0):
            hosts.clear()
        hosts.update(names)
        newest = step
    return len(hosts)


def blamed_before(decisions: Sequence[_Record]) -> str:
    """Return the host that the last decision blamed."""
    return str(decisions[-1].get("blamed", "")) if decisions else ""


def final_reason(faults: Sequence[_Record]) -> str:
    """Return why no other attempt can succeed: a fault that would recur, such as out of memory."""
    reason = next((str(f.get("reason", "")) for f in faults if f.get("final") is True), "")
    return " ".join(reason.split())


def start_up(events: Sequence[_Record], batch_began: float) -> int:
    """Return the seconds from an attempt's start to the end of its first step, or until now; for a
    program whose steps are unknown, to its own start."""
    stepped = [e.get("time") for e in events if e.get("event") == "first_step"]
    began = [e.get("time") for e in events if e.get("event") == "start" and e.get("step") is None]
    end = next((float(t) for t in (*stepped, *began) if is_time(t)), time.time())
    return max(0, round(end - batch_began))


def broken_hosts(faults: Sequence[_Record]) -> tuple[tuple[str, ...], str]:
    """Return the hosts to exclude at the first occurrence, and the finding: the host of the first
    GPU found broken, or the hosts that computed wrong numbers. Empty without a finding."""
    for fault in faults:
        reason = " ".join(str(fault.get("reason", "")).split())
        if fault.get("event") == "gpu" and fault.get("answer") in ("end", "exclude"):
            return (str(fault.get("host", "")),), reason
        hosts = fault.get("hosts")
        if fault.get("kind") == "corruption" and isinstance(hosts, list) and hosts:
            return tuple(map(str, hosts)), f"device: {reason}"
    return (), ""
