"""Reader of attempts.jsonl: returns the events in order and skips anything else. No torch."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard, TypeVar

from kempner.jobs.records.events import (
    DecisionEvent,
    End,
    Event,
    FaultEvent,
    FirstStep,
    GoBack,
    GpuFault,
    StartEvent,
)
from kempner.jobs.system.reading import read_jsonl

E = TypeVar("E", bound=Event)

LATEST_TIME = 1e11  # Unix seconds, the year 5138; counts are not larger either

EVENT_KINDS: dict[str, type[Event]] = {
    cls.kind_of_event: cls
    for cls in (StartEvent, FirstStep, GoBack, FaultEvent, GpuFault, End, DecisionEvent)
}

HINTS = {name: typing.get_type_hints(cls) for name, cls in EVENT_KINDS.items()}


def read_events(path: Path) -> list[Event]:
    """Read the events of attempts.jsonl and of the hosts in order. Skips lines that are torn, of
    unknown kind or without a time."""
    return known_events(read_records(path))


def read_kind(path: Path, kind: type[E]) -> list[E]:
    """Read the events of one kind."""
    return of_kind(read_events(path), kind)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read the objects of attempts.jsonl in order. Inserts each object of attempts/HOST.jsonl into
    its attempt by time, and always before the decision, as clocks of hosts differ."""
    records = read_jsonl(path)
    others = [each for file in path.with_suffix("").glob("*.jsonl") for each in read_jsonl(file)]
    if not others:
        return records
    of_attempt: dict[Any, list[int]] = {}
    for place, record in enumerate(records):
        of_attempt.setdefault(_attempt(record), []).append(place)
    before: dict[int, list[dict[str, Any]]] = {}
    for other in sorted(others, key=_time):
        own = of_attempt.get(_attempt(other), [])
        places = own or range(len(records))
        after = places[-1] + 1 if places else 0
        later = (
            place
            for place in places
            if (own and records[place].get("event") == "decision")
            or _time(records[place]) > _time(other)
        )
        before.setdefault(next(later, after), []).append(other)
    found = []
    for place in range(len(records) + 1):
        found += before.get(place, []) + records[place : place + 1]
    return found


def _attempt(record: dict[str, Any]) -> Any:
    return record.get("attempt_id") or ("without a batch script", record.get("attempt"))


def _time(record: dict[str, Any]) -> float:
    return time if is_time(time := record.get("time")) else 0.0


def known_events(records: Sequence[dict[str, Any]]) -> list[Event]:
    """Return the events among the objects of attempts.jsonl."""
    found = (parse_event(record) for record in records)
    return [event for event in found if event is not None]


def parse_event(record: dict[str, Any]) -> Event | None:
    """Parse an event from its JSON object; None if it is not an event."""
    name = record.get("event")
    cls = EVENT_KINDS.get(name) if isinstance(name, str) else None
    if cls is None or not is_time(record.get("time")):
        return None
    hints = HINTS[cls.kind_of_event]
    values: dict[str, Any] = {
        field.name: tuple(value) if isinstance(value, list) else value
        for field in dataclasses.fields(cls)
        if fits_type(hints[field.name], value := record.get(field.name))
    }
    return cls(**values)


def is_event(record: dict[str, Any]) -> bool:
    """Return whether an object has the fields that all events have; its kind may be unknown."""
    has_name = isinstance(record.get("event"), str) and fits_type(
        str | None, record.get("attempt_id")
    )
    return has_name and is_time(record.get("time"))


def is_time(value: Any) -> TypeGuard[float]:
    """Return whether a value can be a Unix time: a hostile file may have NaN or 1e300."""
    return fits_type(float, value) and 0 <= value < LATEST_TIME


def of_kind(events: Sequence[Event], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def fits_type(hint: Any, value: Any) -> bool:
    """Return whether a JSON value is valid for a field of this type."""
    if hint is object:
        return True
    if isinstance(hint, types.UnionType):
        return any(fits_type(kind, value) for kind in hint.__args__)
    origin = typing.get_origin(hint)
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin is tuple:
        item = typing.get_args(hint)[0]
        return isinstance(value, list) and all(fits_type(item, each) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits_type(float, each) for each in value.values())
    # "not <" rather than ">=": also true for NaN.
    if isinstance(value, int | float) and not abs(value) < LATEST_TIME:
        return False
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    # In Python a bool is also an int.
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
