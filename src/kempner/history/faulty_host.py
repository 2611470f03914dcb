"""What the batch script asks the records before it decides on another attempt. No torch.

    python -m kempner.history.faulty_host RUN_DIR JOBS ATTEMPT_ID SRUN_LOG TASKS_PER_NODE NODES

prints seven lines: how many attempts of the jobs (12, or those of a chain: 12,13) in a row, before
this one, made no progress; the host that this attempt failed on, or nothing; "again" when it is to
be left out: the previous attempt failed on it too, or one of its GPUs is broken; how often the jobs
have excluded a host; why no other attempt can succeed, or nothing; what is wrong with the GPU, or
nothing; and the seconds that the attempt took until its first step was done or, without one, has
taken in all.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kempner.front_door import run_module
from kempner.history.events import is_time, read_records
from kempner.history.tables import visible

Record = dict[str, Any]

# "srun: error: node2: tasks 2-3: Killed". Terminated is what srun itself does to the ranks that are
# left, an exit code says less than the rank's own record, and a rank that aborts has waited for
# somebody else: NCCL's watchdog calls abort() when a collective times out.
DEATH = re.compile(
    r"^srun: error: (\S+): tasks? [\d,-]+: (?!Terminated|Exited|Aborted)", re.MULTILINE
)

# "srun: error: task 0 launch failed: Unspecified error": srun then kills the tasks of other nodes.
NOT_LAUNCHED = re.compile(r"^srun: error: task (\d+) launch failed", re.MULTILINE)

ENDING = "kempner: ending the other ranks"  # restart.sh kills those that are left


def host_of(faults: Sequence[Record], srun_log: str) -> str:
    """The host that an attempt failed on, "" when nothing points at one.

    A rank that does not answer hangs alone; all that follows is srun's doing. A rank that a signal
    killed (kernel, out of memory, broken hardware) leaves no record, but srun reports it; the
    others only lose their peer. Otherwise it is the first rank with an error of its own.
    """
    for fault in faults:
        if fault.get("kind") == "hang":
            hosts = fault.get("hosts", [])
            return str(hosts[0]) if len(hosts) == 1 else ""
    killed = DEATH.findall(srun_log.partition(ENDING)[0])
    if not faults and len(set(killed)) > 1:  # all at once: the cause is not on one host
        return ""
    if killed:
        return str(killed[0])
    own = (fault for fault in faults if fault.get("kind") == "crash" and not fault.get("lost_peer"))
    return str(next((fault["hosts"][0] for fault in own if fault.get("hosts")), ""))


def launch_failed_on(srun_log: str, per_node: int, nodes: Sequence[str]) -> str:
    """The first host on which a task could not be started at all, "" without one. Tasks are dealt
    out in blocks."""
    found = NOT_LAUNCHED.search(srun_log)
    place = int(found[1]) // per_node if found else len(nodes)
    return nodes[place] if place < len(nodes) else ""


def no_progress(decisions: Sequence[Record]) -> int:
    """How many attempts in a row, up to the last decision, made no new checkpoint. A decision says
    null where the batch script had no time to count."""
    count = 0
    for decision in decisions:
        known = decision.get("no_progress")
        count = known if isinstance(known, int) else count + 1
    return count


def blamed_before(decisions: Sequence[Record]) -> str:
    """The host that the last decision was made on."""
    return str(decisions[-1].get("blamed", "")) if decisions else ""


def final_reason(faults: Sequence[Record]) -> str:
    """Why no other attempt can succeed: a fault that would come again, such as out of memory."""
    found = next((str(f.get("reason", "")) for f in faults if f.get("final") is True), "")
    return " ".join(found.split())


def start_up(events: Sequence[Record], batch_began: float) -> int:
    """Seconds of an attempt until its first step was done, or until now."""
    stepped = (e.get("time") for e in events if e.get("event") == "first_step")
    ended = next((float(t) for t in stepped if is_time(t)), time.time())
    return max(0, round(ended - batch_began))


def broken_gpu(faults: Sequence[Record]) -> tuple[str, str]:
    """The host with the first GPU that was found broken, and what it is; of two empty strings
    without one."""
    for fault in faults:
        if fault.get("event") == "gpu" and fault.get("answer") in ("end", "exclude"):
            return str(fault.get("host", "")), " ".join(str(fault.get("reason", "")).split())
    return "", ""


def main(
    run_dir: Path,
    jobs: str,
    attempt_id: str,
    srun_log: Path,
    per_node: int = 1,
    nodes: Sequence[str] = (),
) -> None:
    records = read_records(run_dir / "attempts.jsonl")
    decisions = [r for r in records if r.get("event") == "decision"]
    made = [r for r in decisions if r.get("job") in jobs.split(",")]
    ours = [r for r in records if r.get("attempt_id") == attempt_id]
    faults = [record for record in ours if record.get("event") == "fault"]
    for path in sorted(run_dir.glob("replicas/*")):
        found = read_records(path / "attempts.jsonl")
        ours += [r for r in found if r.get("attempt_id") == attempt_id]
    broken, why = broken_gpu(ours)
    said = srun_log.read_text(errors="replace") if srun_log.is_file() else ""
    host = broken or launch_failed_on(said, per_node, nodes) or host_of(faults, said)
    answers = (
        no_progress(made),
        host,
        "again" if broken or (host and host == blamed_before(made)) else "",
        sum(bool(d.get("excluded")) for d in made if d.get("decision") != "restart"),
        final_reason(faults),
        why,
        start_up(ours, float(os.environ.get("KEMPNER_BATCH_BEGAN") or time.time())),
    )
    for answer in answers:  # one line each, whatever the records hold
        print(visible(" ".join(str(answer).split())))


if __name__ == "__main__":
    run_module(
        lambda run, jobs, id, log, tasks, *nodes: main(
            Path(run), jobs, id, Path(log), int(tasks), nodes
        ),
        __doc__,
        5,
        sys.maxsize,
    )
