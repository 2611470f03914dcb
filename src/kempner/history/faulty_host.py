"""Whose fault was it? The host that a crash or a hang came from, for the batch script. No torch.

    python -m kempner.history.faulty_host RUN_DIR JOB ATTEMPT_ID SRUN_LOG

prints the host that this attempt failed on, or nothing, and on a second line the same host when the
attempt of this job before has failed on it too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from kempner.files import read_jsonl
from kempner.history.attempts import Record

# "srun: error: node2: tasks 2-3: Killed". Terminated is what srun itself does to the ranks that are
# left, and an exit code says less than the rank's own record.
DEATH = re.compile(r"^srun: error: (\S+): tasks? [\d,-]+: (?!Terminated|Exited)", re.MULTILINE)


def host_of(faults: Sequence[Record], srun_log: str) -> str:
    """The host that an attempt failed on, "" when nothing points at one.

    A rank that does not answer hangs alone; all that follows is srun's doing. A rank that a signal
    has killed (kernel, out of memory, broken hardware) leaves no record, and srun tells of it; the
    others only lose their peer. Else it is the first rank with an error of its own.
    """
    for fault in faults:
        if fault.get("kind") == "hang":
            hosts = fault.get("hosts", [])
            return str(hosts[0]) if len(hosts) == 1 else ""
    killed = DEATH.findall(srun_log)
    if not faults and len(set(killed)) > 1:  # all at once: what killed them is not of one host
        return ""
    if killed:
        return str(killed[0])
    own = (fault for fault in faults if fault.get("kind") == "crash" and not fault.get("lost_peer"))
    return str(next((fault["hosts"][0] for fault in own if fault.get("hosts")), ""))


def blamed_before(records: Sequence[Record], job: str) -> str:
    """The host that the newest decision about this job was made on."""
    made = [r for r in records if r.get("event") == "decision" and r.get("job") == job]
    return str(made[-1].get("blamed", "")) if made else ""


def main(run_dir: Path, job: str, attempt_id: str, srun_log: Path) -> None:
    records = read_jsonl(run_dir / "attempts.jsonl")
    faults = [r for r in records if r.get("event") == "fault" and r.get("attempt_id") == attempt_id]
    text = srun_log.read_text(errors="replace") if srun_log.exists() else ""
    host = host_of(faults, text)
    print(host)
    if host and host == blamed_before(records, job):
        print(host)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
