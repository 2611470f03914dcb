"""The schema of attempts.jsonl: one JSON object a line, one class for each kind of event. No torch.

The trainer appends all kinds but Decision, which the batch script writes (kp_record in
scripts/slurm). docs/monitoring.md has the same as a table. A reader ignores kinds and fields that
it does not know; a field that is missing, or of another type, has its default.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from kempner.files import end_torn_line, read_jsonl

E = TypeVar("E", bound="Event")


@dataclass(frozen=True, kw_only=True)
class Event:
    """What all events have. `attempt_id` is the batch script's name of the attempt, which a
    decision has in common with the trainer's events."""

    kind_of_event: ClassVar[str] = ""
    time: float  # unix seconds
    job: str | None = None  # Slurm's, as users name it: 12 or 12_3
    restart: int = 0  # Slurm's restart count
    attempt_id: str | None = None
    attempt: int | None = None  # number of the attempt; a decision has none
    step: int | None = None  # steps done; of a decision: that of the newest checkpoint, -1: none


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """The state is loaded; training begins after `step`."""

    kind_of_event = "start"
    nodes: tuple[str, ...] = ()
    world_size: int = 0
    process_began: float | None = None  # unix seconds
    batch_began: float | None = None  # of the batch script; None without one
    lineage: tuple[str, ...] = ()  # RUN@STEP that the run is a fork of, and those before that


@dataclass(frozen=True, kw_only=True)
class FirstStep(Event):
    """The first step of the attempt is done: the start-up ends here."""

    kind_of_event = "first_step"


@dataclass(frozen=True, kw_only=True)
class GoBack(Event):
    """Too many steps in a row were not finite: back to the checkpoint of `to`, from where the
    samples numbered skip[0] to skip[1] - 1 are left out."""

    kind_of_event = "go_back"
    to: int = 0
    skip: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Fault(Event):
    """A rank raised an error (crash), ran out of memory (oom), or the watchdog ended it (hang)."""

    kind_of_event = "fault"
    kind: Literal["crash", "oom", "hang"] = "crash"
    reason: str = ""
    ranks: tuple[int, ...] = ()  # that raised the error, or did not answer
    hosts: tuple[str, ...] = ()  # of these ranks
    lost_peer: bool = False  # the error only says that another rank is gone
    final: bool = False  # another start would end in the same way: it is not restarted


@dataclass(frozen=True, kw_only=True)
class End(Event):
    """An orderly end; `state` as in status.json."""

    kind_of_event = "end"
    state: Literal["done", "interrupted", "stopped", "failed"] = "failed"
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Decision(Event):
    """What the batch script did after the attempt, and why."""

    kind_of_event = "decision"
    decision: Literal["requeue", "end", "leave"] = "end"  # leave: to Slurm
    why: str = ""
    # Attempts of this job in a row, with this one, without a new checkpoint; None: not counted.
    no_progress: int | None = None
    blamed: str = ""  # the host that the attempt failed on
    excluded: str = ""  # the same, where the next attempt does without it
    batch_began: float | None = None


KINDS: dict[str, type[Event]] = {
    cls.kind_of_event: cls for cls in (Start, FirstStep, GoBack, Fault, End, Decision)
}


def append(path: Path, event: Event) -> None:
    """Add a line to attempts.jsonl."""
    end_torn_line(path)
    values = dataclasses.asdict(event)
    with open(path, "a") as file:
        file.write(json.dumps({"event": event.kind_of_event, **values}) + "\n")


def read(path: Path) -> list[Event]:
    """The events of attempts.jsonl in order; lines that are torn, of unknown kind or without a time
    are left out."""
    found = (parse(record) for record in read_jsonl(path))
    return [event for event in found if event is not None]


def parse(record: dict[str, Any]) -> Event | None:
    """An event from its JSON object, None when it is none."""
    name = record.get("event")
    cls = KINDS.get(name) if isinstance(name, str) else None
    if cls is None or not _fits(float, record.get("time")):
        return None
    hints = typing.get_type_hints(cls)
    known: dict[str, Any] = {
        field.name: tuple(value) if isinstance(value, list) else value
        for field in dataclasses.fields(cls)
        if _fits(hints[field.name], value := record.get(field.name))
    }
    return cls(**known)


def of_kind(events: Sequence[Event], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def _fits(hint: Any, value: Any) -> bool:
    """Whether a value from JSON may stand in a field of this type."""
    if isinstance(hint, types.UnionType):
        return any(_fits(kind, value) for kind in hint.__args__)
    origin = typing.get_origin(hint)
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin is tuple:
        item = typing.get_args(hint)[0]
        return isinstance(value, list) and all(_fits(item, each) for each in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
