"""What the batch script asks the records before it decides on another attempt. No torch.

    python -m kempner.history.faulty_host RUN_DIR JOB ATTEMPT_ID SRUN_LOG

prints five lines: how many attempts of the job in a row, before this one, made no progress; the
host that this attempt failed on, or nothing; "again" when the job's previous attempt failed on it
too; how often the job has excluded a host; and why no other attempt can succeed, or nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kempner.files import read_jsonl

Record = dict[str, Any]

# "srun: error: node2: tasks 2-3: Killed". Terminated is what srun itself does to the ranks that are
# left, an exit code says less than the rank's own record, and a rank that aborts has waited for
# somebody else: NCCL's watchdog calls abort() when a collective times out.
DEATH = re.compile(
    r"^srun: error: (\S+): tasks? [\d,-]+: (?!Terminated|Exited|Aborted)", re.MULTILINE
)


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
    killed = DEATH.findall(srun_log)
    if not faults and len(set(killed)) > 1:  # all at once: the cause is not on one host
        return ""
    if killed:
        return str(killed[0])
    own = (fault for fault in faults if fault.get("kind") == "crash" and not fault.get("lost_peer"))
    return str(next((fault["hosts"][0] for fault in own if fault.get("hosts")), ""))


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


def main(run_dir: Path, job: str, attempt_id: str, srun_log: Path) -> None:
    records = read_jsonl(run_dir / "attempts.jsonl")
    made = [r for r in records if r.get("event") == "decision" and r.get("job") == job]
    faults = [r for r in records if r.get("event") == "fault" and r.get("attempt_id") == attempt_id]
    host = host_of(faults, srun_log.read_text(errors="replace") if srun_log.is_file() else "")
    print(no_progress(made))
    print(host)
    print("again" if host and host == blamed_before(made) else "")
    print(sum(bool(decision.get("excluded")) for decision in made))
    print(final_reason(faults))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
