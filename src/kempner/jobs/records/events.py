"""The schema of attempts.jsonl: one JSON object per line, one class per kind of event. No torch.

The trainer appends all kinds but Decision, which the batch script writes (kp_record in
scripts/slurm). Rank 0 and, between two attempts, the batch script write attempts.jsonl; all others
write attempts/HOST.jsonl, so that no file has writers on two hosts at once, which NFS would mix up.
docs/start/monitoring.md has the schema as a table. Readers ignore unknown kinds and fields; a field
that is missing or of another type has its default.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from kempner.jobs.system.files import end_torn_line
from kempner.jobs.this_job import host_name


@dataclass(frozen=True, kw_only=True)
class Event:
    """Fields of all events. `attempt_id`: the batch script's name of the attempt, which links a
    decision to the trainer's events."""

    kind_of_event: ClassVar[str] = ""
    time: float  # unix seconds
    job: str | None = None  # Slurm's job id as users write it: 12 or 12_3
    restart: int = 0  # Slurm's restart count
    attempt_id: str | None = None
    attempt: int | None = None  # number of the attempt; a decision has none
    step: int | None = None  # steps done; in a decision: of the newest checkpoint, -1: none


@dataclass(frozen=True, kw_only=True)
class StartEvent(Event):
    """The state is loaded; training begins after `step`, None if only the program knows it."""

    kind_of_event = "start"
    nodes: tuple[str, ...] = ()
    world_size: int = 0
    process_began: float | None = None  # unix seconds
    batch_began: float | None = None  # of the batch script; None without one
    lineage: tuple[str, ...] = ()  # RUN@STEP that the run is a fork of, then earlier ancestors
    spares: tuple[str, ...] = ()  # idle nodes of the job, to replace a lost node
    code: str = ""  # it runs RUN/code/CODE; "": the repository itself
    commit: str = ""
    versions: tuple[str, ...] = ()  # of packages, "NAME VERSION"
    command: str = ""  # hash of the command that run.sh started, or of the configuration
    changed: tuple[str, ...] = ()  # since the last attempt, in words
    parts: dict[str, float] = field(default_factory=dict)  # of the start-up, seconds: startup.py


@dataclass(frozen=True, kw_only=True)
class FirstStep(Event):
    """The first step of the attempt is done: the start-up ends here. For a program under run.sh
    that prints its steps: the first printed step, and the step from which it continued."""

    kind_of_event = "first_step"
    printed: int | None = None
    began: int | None = None


@dataclass(frozen=True, kw_only=True)
class GoBack(Event):
    """Return to the checkpoint of step `to` after too many skipped steps in a row; samples skip[0]
    to skip[1] - 1 are left out from there."""

    kind_of_event = "go_back"
    to: int = 0
    skip: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class FaultEvent(Event):
    """A rank raised an error (crash), ran out of memory (oom), was ended by the watchdog (hang), or
    computed wrong numbers (corruption)."""

    kind_of_event = "fault"
    kind: Literal["crash", "oom", "hang", "corruption"] = "crash"
    reason: str = ""
    ranks: tuple[int, ...] = ()  # that raised the error, or did not answer
    hosts: tuple[str, ...] = ()  # of these ranks
    lost_peer: bool = False  # the error only says that another rank is gone
    final: bool = False  # another start would end in the same way: do not restart


@dataclass(frozen=True, kw_only=True)
class GpuFault(Event):
    """A finding about a GPU: of a node's sampler (jobs/gpu/findings.py), once per attempt, or of an
    auditing spare (numbers)."""

    kind_of_event = "gpu"
    kind: Literal["xid", "lost", "ecc", "memory", "throttled", "link", "silent", "numbers"] = "xid"
    answer: Literal["end", "exclude", "warn", "note"] = "note"
    reason: str = ""  # with the GPU
    host: str = ""
    gpu: int = -1  # its number in the node, -1: unknown
    uuid: str = ""
    pci: str = ""  # bus id, such as 0000:3b:00
    serial: str = ""
    xid: int | None = None


@dataclass(frozen=True, kw_only=True)
class End(Event):
    """An orderly end; `state` as in status.json."""

    kind_of_event = "end"
    state: Literal["done", "interrupted", "stopped", "failed"] = "failed"
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class DecisionEvent(Event):
    """The batch script's decision after the attempt, and the reason."""

    kind_of_event = "decision"
    # restart: at once, in the same job; leave: to Slurm
    decision: Literal["restart", "requeue", "chain", "end", "leave"] = "end"
    why: str = ""
    # Attempts of this job in a row, including this one, without a new checkpoint; None: not counted
    no_progress: int | None = None
    blamed: str = ""  # the host on which the attempt failed
    excluded: str = ""  # the same, if the next attempt avoids it
    # Whose fault it was: the program's input, the program, a host, the site; "": nobody's.
    kind: str = ""
    batch_began: float | None = None
    # Progress as the batch script counts it: `step`, or the checkpoints of a program under run.sh.
    committed: int | None = None


def own_file(path: Path) -> Path:
    """Return the file for events of all processes but rank 0 and the batch script."""
    return path.with_suffix("") / f"{host_name()}.jsonl"


def append_event(path: Path, event: Event) -> None:
    """Append a line to attempts.jsonl or own_file(). Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    end_torn_line(path)
    values = dataclasses.asdict(event)
    with open(path, "a") as file:
        file.write(json.dumps({"event": event.kind_of_event, **values}) + "\n")
