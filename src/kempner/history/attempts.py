"""The attempts of a run, from attempts.jsonl and the lines that each has written. No torch."""

from __future__ import annotations

import contextlib
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kempner.files import step_of

Record = dict[str, Any]
REASON_WIDTH = 100  # characters; the whole is in the logs
EVENTS = ("start", "first_step", "fault", "end", "decision")


@dataclass(frozen=True)
class Attempt:
    """One start of the run. Times are unix seconds, steps are counts of steps done."""

    number: int  # -1: it died before it had one
    job: str | None
    restart: int
    hosts: tuple[str, ...]
    world_size: int
    opened: float  # the batch script or, without one, the process began
    began: float | None  # the state was loaded and the first step came; None: it never got there
    stepped: float | None  # the first step was done
    first_step: int  # when it began
    ended: float  # its last sign of life
    last_step: int  # as far as the records tell
    state: str  # how it ended: running, done, interrupted, stopped, failed, crashed, hung, killed
    reason: str
    decision: str  # of the batch script: requeue, end, leave, "" where there is none
    why: str
    excluded: str  # the host that it left out of the next attempt
    committed: int | None  # step of the newest checkpoint after it

    @property
    def name(self) -> str:
        return "-" if self.number < 0 else str(self.number)

    @property
    def ending(self) -> str:
        """In words, how it ended, and what the batch script has made of it."""
        text = self.state
        if text == "killed":
            text = "killed without a word" if self.began else "died before it began"
        elif self.reason:
            text += ": " + textwrap.shorten(self.reason, REASON_WIDTH, placeholder=" ...")
        if self.decision == "requeue":
            text += f"; requeued without {self.excluded}" if self.excluded else "; requeued"
        elif self.decision == "end" and self.state not in ("done", "stopped", "failed"):
            text += f"; not requeued: {self.why}"
        return text


def is_known(record: Record, *keys: str) -> bool:
    """Whether the record has numbers under these keys."""
    return all(isinstance(record.get(key), (int, float)) for key in keys)


def attempts_of(events: list[Record], lines: list[Record], status: Record) -> list[Attempt]:
    """The attempts in their order, each from its events and lines: one that was killed without a
    word has no more than these."""
    groups, of = _by_attempt(_kind(events, *EVENTS)), by_number(lines)
    found = []
    for group, after in zip(groups, [*groups[1:], []], strict=False):
        number = next((event["attempt"] for event in group if is_known(event, "attempt")), -1)
        resumed = [event["step"] for event in _kind(after, "start") if is_known(event, "step")]
        found.append(_attempt(number, group, of.get(number, []), resumed))
    return [
        replace(a, state="running")
        if a.state == "killed"
        and not a.decision
        and (status.get("state"), status.get("attempt")) == ("running", a.number)
        else a
        for a in found
    ]


def _by_attempt(events: list[Record]) -> list[list[Record]]:
    """A decision of the batch script has no number; what it has in common with the events of its
    attempt, if it had any, is the attempt_id."""
    groups: list[list[Record]] = []
    known: dict[Any, list[Record]] = {}
    for event in events:
        key = event.get("attempt_id") or event.get("attempt")
        if key not in known or event.get("event") == "start":
            known[key] = []
            groups.append(known[key])
        known[key].append(event)
    return groups


def by_number(lines: list[Record]) -> dict[int, list[Record]]:
    of: dict[int, list[Record]] = {}
    for line in lines:
        of.setdefault(line.get("attempt", -1), []).append(line)
    return of


def _kind(events: list[Record], *kinds: str) -> list[Record]:
    return [event for event in events if event.get("event") in kinds]


def _attempt(number: int, events: list[Record], lines: list[Record], resumed: list[int]) -> Attempt:
    """`resumed`: the step that the next attempt has gone on from, if there is one."""
    start = next(iter(_kind(events, "start")), {})
    stepped = next(iter(_kind(events, "first_step")), {})
    end = next(iter(_kind(events, "end")), {})
    decision = next(reversed(_kind(events, "decision")), {})
    faults = _kind(events, "fault")
    # When one rank crashes the others lose it: theirs are no causes.
    fault = next((event for event in faults if not event.get("lost_peer")), (faults or [{}])[0])
    opened = (
        event[key]
        for key in ("batch_began", "process_began", "time")
        for event in events
        if is_known(event, key)
    )
    first = start.get("step") or 0
    told = [*lines[-1:], *_kind(events, "first_step", "fault"), decision]
    reached = [first, *resumed, *(record["step"] for record in told if is_known(record, "step"))]
    last = end["step"] if is_known(end, "step") else max(reached)
    reason = str((end or fault).get("reason", ""))
    if not end and fault.get("lost_peer"):  # nobody else: it was killed, or its host is gone
        reason = f"a rank died without a word, {reason.partition(': ')[0]} lost it"
    kind = {"crash": "crashed", "hang": "hung"}.get(fault.get("kind", ""), "killed")
    return Attempt(
        number=number,
        job=events[0].get("job"),
        restart=events[0].get("restart") or 0,
        hosts=tuple(start.get("nodes") or ()),
        world_size=start.get("world_size") or 0,
        opened=next(opened),
        began=start.get("time"),
        stepped=stepped.get("time"),
        first_step=first,
        ended=max(record["time"] for record in (*events, *lines)),
        last_step=last if start else first,
        state=str(end.get("state", kind)),
        reason=reason,
        decision=str(decision.get("decision", "")),
        why=str(decision.get("why", "")),
        excluded=str(decision.get("excluded") or ""),
        committed=decision.get("step"),
    )


def newest_checkpoint(checkpoints: Path) -> int | None:
    with contextlib.suppress(OSError):
        return step_of((checkpoints / "latest").readlink().name)
    return None
