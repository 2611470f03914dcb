"""The judge that the batch script asks at the end of a step. No torch.

    python -m kempner.jobs.records.judge RUN_DIR SRUN_LOG [NAME=VALUE ...]

reads the records of the run, asks Slurm about other nodes if one is to be excluded, and prints
front_door.ANSWER and the eleven lines of DECISION_FIELDS. NAME=VALUE are facts that only the batch
script has (kp_facts of requeue.sh); a missing one is unknown.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kempner.jobs import slurm
from kempner.jobs.records.decision import BatchDecision, StepEnd, decide_next
from kempner.jobs.records.event_reader import is_time, read_records
from kempner.jobs.records.faulty_host import (
    blamed_before,
    broken_hosts,
    controller_away,
    decisions_without_progress,
    excluded_by,
    excluded_in_vain,
    file_system_faults_before,
    final_reason,
    host_of,
    launch_failed_on,
    progress_at,
    sees_no_program,
    site_fault,
    start_up,
)
from kempner.jobs.report.tables import visible_text
from kempner.jobs.system.front_door import ANSWER, run_module
from kempner.jobs.system.reading import open_regular

_Record = dict[str, Any]

DECISION_FIELDS = (
    "decision",
    "why",
    "kind",
    "no_progress",
    "blamed",
    "excluded",
    "replaced",
    "fault",
    "pause",
    "start",
    "notes",
)
BROKEN_HOST = "has a broken"
BLIND = "did not see the program twice in a row"
IN_USE = "is in use by"  # jobs/lock.py: another job trains in this directory
DAY_S = 86400.0  # older exclusions no longer count


@dataclass(frozen=True)
class JobFacts:
    """Facts from NAME=VALUE on the command line."""

    given: Mapping[str, str]

    def text(self, name: str) -> str:
        return self.given.get(name, "")

    def words(self, name: str) -> tuple[str, ...]:
        return tuple(self.text(name).replace(",", " ").split())

    def number(self, name: str, default: float) -> float:
        try:
            return float(self.text(name))
        except ValueError:
            return default

    def count(self, name: str, default: int) -> int:
        return int(self.number(name, default))

    def flag(self, name: str) -> bool:
        return self.text(name) not in ("", "0")


def records_of(run_dir: Path) -> tuple[list[_Record], str]:
    """Read the records of the run. Returns them, and the error if they cannot be read."""
    try:
        # read_records() treats an unreadable file as empty: a run that has never started.
        with open(run_dir / "attempts.jsonl", "rb", opener=open_regular) as file:
            file.read(1)
    except FileNotFoundError:
        if not run_dir.is_dir():
            return [], f"the run directory {run_dir} is not there"
    except OSError as error:
        return [], f"the records of the run cannot be read: {error.strerror}"
    return read_records(run_dir / "attempts.jsonl"), ""


def jobs_have_trained(records: Sequence[_Record], jobs: Sequence[str], command: str) -> bool:
    """Return whether a start of these jobs, or any start with this command (a hash), has done a
    step or made progress."""
    own = {
        record.get("attempt_id")
        for record in records
        if record.get("event") == "start" and command and record.get("command") == command
    }
    for record in records:
        if record.get("job") in jobs or record.get("attempt_id") in own:
            if record.get("event") == "first_step":
                return True
            # An exclusion resets the count without a step.
            came_further = record.get("no_progress") == 0 and not excluded_by(record)
            if record.get("event") == "decision" and came_further:
                return True
    return False


def hours_waited(decisions: Sequence[_Record], now: float) -> float:
    """Return the hours since the first decision in a row about a fault of the site."""
    began = now
    for decision in reversed(decisions):
        if decision.get("kind") != "site" or not is_time(decision.get("time")):
            break
        began = float(decision["time"])
    return max(0.0, now - began) / 3600


def collect_facts(
    run_dir: Path, srun_log: Path, facts: JobFacts, now: float
) -> tuple[StepEnd, str]:
    """Collect the known facts and the blamed host."""
    jobs, attempt_id = facts.words("jobs"), facts.text("attempt")
    records, unread = records_of(run_dir)
    decisions = [r for r in records if r.get("event") == "decision" and r.get("job") in jobs]
    ours = [r for r in records if r.get("attempt_id") == attempt_id]
    faults = [record for record in ours if record.get("event") == "fault"]
    # After `faults`: a replica's crash does not end the step, but a GPU found broken there counts.
    for path in sorted(run_dir.glob("replicas/*")):
        found_there = read_records(path / "attempts.jsonl")
        ours += [r for r in found_there if r.get("attempt_id") == attempt_id]
    srun_text = srun_log.read_text(errors="replace") if srun_log.is_file() else ""

    broken, device = broken_hosts(ours)
    nodes = facts.words("places")
    # The most reliable sign first: a broken device, a task that did not start, ranks and srun.
    host = (
        ",".join(broken)
        or launch_failed_on(srun_text, facts.count("tasks", 1), nodes)
        or host_of(faults, srun_text)
        or facts.text("early")
    )
    script = sees_no_program(faults, srun_text)
    if script and not os.path.exists(script):  # not here either: the script is gone
        host = ""
    # Twice in a row: a single crash may be the program's fault.
    again = bool(broken) or (bool(host) and host == blamed_before(decisions))
    bad, lost_hosts = facts.words("bad"), facts.words("lost")
    blind = again and bool(script)
    fault = BLIND if blind else "failed twice in a row"
    if facts.flag("preflight"):
        fault = "failed the preflight"
    elif broken:
        fault = f"{BROKEN_HOST} {device}"
    faulty = lost_hosts or (bad if facts.flag("preflight") else broken or (host,) * again)
    blamed = ",".join(lost_hosts or (bad if facts.flag("preflight") else (host,)))
    # An orderly exit is no fault, except after wrong numbers: repaired, but the host is left.
    orderly = facts.text("run") == "interrupted"
    if orderly and not any(record.get("kind") == "corruption" for record in faults):
        faulty, blamed = (), ""
    # Another job has the run: no host is to blame. A job that has trained here has lost the run
    # between two of its starts and waits for that job's end; any other job is refused.
    refusal, in_use = facts.text("refusal") if facts.count("code", 0) == 2 else "", ""
    if IN_USE in refusal:
        faulty, blamed = (), ""
        in_use = refusal.split(": wait for it")[0] if jobs_have_trained(records, jobs, "") else ""
    spent_nodes = facts.words("spent")
    if spent_nodes and not faulty:
        fault = "was replaced by a spare node"

    away = controller_away(srun_text)
    # Unreadable records prove nothing: without this, bad input would end the run.
    trained = bool(unread) or jobs_have_trained(records, jobs, facts.text("command"))
    # With one node, only the next node shows whether it was the node or the file system.
    alone = facts.count("nodes", 1) == 1
    committed = facts.count("committed", -1)
    earlier = file_system_faults_before(records, decisions, committed) if alone else ()
    site = "" if orderly else unread or away or site_fault(faults, earlier) or in_use
    # A check that failed, not by bad input: unreadable file, lack of memory, missing package.
    if facts.text("early") and trained and facts.count("code", 0) != 2:
        site = site or facts.text("what")
    before, in_vain = decisions_without_progress(decisions), excluded_in_vain(decisions)
    if unread:
        before = facts.count("before", -1)
    elif decisions and facts.count("committed_before", -1) > progress_at(decisions[-1]):
        before = in_vain = 0  # an attempt without a recorded end has made progress
    # Not counted: a fault of the site, and a start that was asked to leave before it trained.
    count = before + (0 if site or facts.flag("cut_short") else 1)
    if committed > facts.count("committed_before", -1):
        count = in_vain = 0
    # Nodes with broken hardware do not count against KEMPNER_EXCLUDE.
    certain = re.compile(f"{BROKEN_HOST}|{BLIND}")
    out = [d for d in decisions if not certain.search(str(d.get("why")))]
    end = StepEnd(
        run=facts.text("run"),
        what=facts.text("what") or "the step has ended",
        refused=(refusal or " ") if facts.count("code", 0) == 2 else "",
        # Another job's steps in this run directory do not validate this job's input.
        trained=bool(unread) or (trained and IN_USE not in refusal),
        final=final_reason(faults),
        site=site,
        away=bool(site) and site == away,
        waited=hours_waited(decisions, now),
        no_progress=count,
        job=facts.text("job") or "running",  # type: ignore[arg-type]
        slurm=facts.text("slurm"),
        batch=facts.flag("batch"),
        interrupt=facts.flag("interrupt"),
        may_requeue=facts.text("requeue") != "0",
        chain=facts.text("chain"),  # type: ignore[arg-type]
        successor=facts.text("successor"),
        faulty=faulty,
        fault=fault,
        lost=bool(lost_hosts),
        broken=bool(broken) or blind,
        preflight=facts.flag("preflight"),
        spent=spent_nodes,
        spares=facts.count("spares", 0),
        nodes=facts.count("nodes", 1),
        needed=facts.count("nodes", 1) + facts.count("wanted_spares", 0),
        excluded=len({h for d in out if _age(d, now) < DAY_S for h in excluded_by(d)}),
        in_vain=in_vain,
        room=facts.flag("room"),
        created=not facts.flag("not_created"),
        early=bool(facts.text("early")),
        left=facts.number("left", 0.0) if facts.text("left") else None,
        start=start_up(ours, facts.number("began", now)),
        max_crashes=facts.count("max_crashes", 3),
        max_excluded=facts.count("max_excluded", 2),
        max_wait=facts.number("max_wait", 24.0),
    )
    return end, blamed


def _age(decision: _Record, now: float) -> float:
    began = decision.get("time")
    return now - began if is_time(began) else 0.0


def with_others(end: StepEnd, request: str) -> StepEnd:
    """Add the number of other nodes, if it is needed."""
    if not (end.faulty and not end.lost) and not end.spent:
        return end
    return replace(end, others=slurm.other_nodes(request, (*end.faulty, *end.spent)))


def decision_fields(decision: BatchDecision, end: StepEnd, blamed: str) -> dict[str, object]:
    """Return the answer for the batch script."""
    return {
        "decision": decision.answer,
        "why": decision.why,
        "kind": decision.kind,
        "no_progress": decision.no_progress,
        "blamed": blamed,
        "excluded": ",".join(decision.excluded),
        "replaced": ",".join(decision.replaced),
        "fault": end.fault,
        "pause": decision.pause,
        "start": round(end.start),
        "notes": "; ".join(decision.notes),
    }


def main(run_dir: str, srun_log: str, *facts: str) -> None:
    job_facts = JobFacts(dict(fact.split("=", 1) for fact in facts))
    end, blamed = collect_facts(Path(run_dir), Path(srun_log), job_facts, time.time())
    end = with_others(end, job_facts.text("request"))
    fields = decision_fields(decide_next(end), end, blamed)
    print(ANSWER)
    for name in DECISION_FIELDS:  # one line each, whatever the records hold
        print(visible_text(" ".join(str(fields[name]).split())))


if __name__ == "__main__":
    os.environ.setdefault("LC_ALL", "C.UTF-8")
    run_module(main, __doc__, 2, sys.maxsize)
