"""The attempts of a run, each from its events and the lines that it has written. No torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from kempner.history.events import (
    Decision,
    End,
    Event,
    Fault,
    FirstStep,
    GoBack,
    GpuFault,
    Start,
    of_kind,
    parse,
)

Record = dict[str, Any]
AttemptState = Literal[
    "running", "done", "interrupted", "stopped", "failed", "crashed", "hung", "killed"
]
ENDS = get_args(get_type_hints(End)["state"])  # orderly ones
AFTER = {  # by decision
    "restart": "restarted in place",
    "requeue": "requeued",
    "chain": "continued by the next job of its chain",
}
REASON_WIDTH = 100  # characters of a reason in one line; the logs have the whole


@dataclass(frozen=True)
class Attempt:
    """One start of the run. Times are unix seconds, steps are counts of steps done."""

    number: int  # -1: it died before it had one
    attempt_id: str | None
    job: str | None
    restart: int
    hosts: tuple[str, ...]
    world_size: int
    lineage: tuple[str, ...]  # RUN@STEP that the run is a fork of, and those before that
    opened: float  # the batch script or, without one, the process began
    began: float | None  # the state was loaded; None: it never got there
    stepped: float | None  # the first step was done
    first_step: int  # when it began
    ended: float  # its last sign of life
    last_step: int  # as far as is known
    state: AttemptState  # "killed" where nothing says how it ended: only the judge knows if it runs
    reason: str
    spares: tuple[str, ...]  # nodes of the job that were idle when it began
    decision: (
        str  # of the batch script: restart, requeue, chain, end, leave; "" where there is none
    )
    why: str
    excluded: str  # the host that it left out of the next attempt
    gpu_faults: tuple[GpuFault, ...]
    committed: int | None  # step of the newest checkpoint after it
    changed: tuple[str, ...] = ()  # since the attempt before: configuration, code, packages
    startup: dict[str, float] = field(default_factory=dict)  # seconds of its parts: startup.py

    @property
    def name(self) -> str:
        return "-" if self.number < 0 else str(self.number)

    @property
    def gpu_warning(self) -> str:
        """What somebody should know of the GPUs, in one line."""
        told = [f"{f.host}: {f.reason}" for f in self.gpu_faults if f.answer != "note"]
        more = f" and {len(told) - 1} more" if len(told) > 1 else ""
        return f"{told[-1]}{more}" if told else ""

    @property
    def cause(self) -> str:
        """How it ended, in words."""
        if self.state == "killed":
            return "killed, no error recorded" if self.began else "died before it began"
        return f"{self.state}: {self.reason}" if self.reason else self.state

    @property
    def ending(self) -> str:
        """How it ended, and what the batch script did then."""
        text = self.cause
        if done := AFTER.get(self.decision):
            text += f"; {done} without {self.excluded}" if self.excluded else f"; {done}"
        elif self.decision == "end" and self.state not in ("done", "stopped", "failed"):
            text += f"; not requeued: {self.why}"
        return text

    @property
    def short_ending(self) -> str:
        """The same in one line of a table or a picture."""
        reason = textwrap.shorten(self.reason, REASON_WIDTH, placeholder=" ...")
        return self.ending.replace(self.reason, reason) if self.reason else self.ending


def is_known(record: Record, *keys: str) -> bool:
    """Whether the record has numbers under these keys."""
    for key in keys:  # noqa: SIM110 - all() takes longer, and there may be 100,000 lines
        if not isinstance(record.get(key), (int, float)):
            return False
    return True


def attempts_of(events: Sequence[Event], lines: Sequence[Record], status: Record) -> list[Attempt]:
    """The attempts in order, each from its events and lines; status.json has the end of the last
    one even where a full disk has kept it out of attempts.jsonl."""
    # Those of the samplers are no signs of life, and may come before the start.
    own = [event for event in events if not isinstance(event, GpuFault)]
    groups, of = _by_attempt(_with_end_of(status, own)), by_number(lines)
    gpus = of_kind(events, GpuFault)
    found = []
    for group, after in zip(groups, [*groups[1:], []], strict=False):
        number = next((event.attempt for event in group if event.attempt is not None), -1)
        resumed = [start.step for start in of_kind(after, Start)]
        faults = tuple(fault for fault in gpus if fault.attempt == number)
        found.append(_attempt(number, group, of.get(number, []), resumed, faults))
    return found


def _with_end_of(status: Record, events: Sequence[Event]) -> list[Event]:
    """The events and, where they lack the end that status.json has, that one."""
    end = parse({**status, "event": "end"}) if status.get("state") in ENDS else None
    known = {key for event in of_kind(events, End) for key in (event.attempt, event.attempt_id)}
    if end is None or {end.attempt, end.attempt_id} & (known - {None}):
        return list(events)
    return [*events, end]


def _by_attempt(events: Sequence[Event]) -> list[list[Event]]:
    """A decision of the batch script has no number; what it has in common with the events of its
    attempt, if there are any, is the attempt_id."""
    groups: list[list[Event]] = []
    known: dict[str | int | None, list[Event]] = {}
    for event in events:
        key = event.attempt_id or event.attempt
        if key not in known or isinstance(event, Start):
            known[key] = []
            groups.append(known[key])
        known[key].append(event)
    return groups


def by_number(lines: Sequence[Record]) -> dict[int, list[Record]]:
    of: dict[int, list[Record]] = {}
    for line in lines:
        of.setdefault(line.get("attempt", -1), []).append(line)
    return of


def _attempt(
    number: int,
    events: list[Event],
    lines: list[Record],
    resumed: list[int | None],
    gpu_faults: tuple[GpuFault, ...],
) -> Attempt:
    """`resumed`: the step from which the next attempt continued, if there is one."""
    start = next(iter(of_kind(events, Start)), None)
    stepped = next(iter(of_kind(events, FirstStep)), None)
    decision = next(reversed(of_kind(events, Decision)), None)
    state, reason = _end(events)
    first = start.step or 0 if start else 0
    return Attempt(
        number=number,
        attempt_id=next((event.attempt_id for event in events if event.attempt_id), None),
        job=events[0].job,
        restart=events[0].restart,
        hosts=start.nodes if start else (),
        world_size=start.world_size if start else 0,
        lineage=start.lineage if start else (),
        opened=_opened(events),
        began=start.time if start else None,
        stepped=stepped.time if stepped else None,
        first_step=first,
        ended=max(*(event.time for event in events), *(line["time"] for line in lines), 0.0),
        last_step=_last_step(first, events, lines, resumed) if start else first,
        state=state,
        reason=reason,
        spares=start.spares if start else (),
        decision=decision.decision if decision else "",
        why=decision.why if decision else "",
        excluded=decision.excluded if decision else "",
        gpu_faults=gpu_faults,
        committed=decision.step if decision else None,
        changed=start.changed if start else (),
        startup=_startup(start, stepped),
    )


def _startup(start: Start | None, stepped: FirstStep | None) -> dict[str, float]:
    if start is None or not start.parts:
        return {}
    return {**start.parts, **({"first step": stepped.time - start.time} if stepped else {})}


def _opened(events: list[Event]) -> float:
    for key in ("batch_began", "process_began"):
        for event in events:
            if time := getattr(event, key, None):
                return float(time)
    return events[0].time


def _last_step(
    first: int, events: list[Event], lines: list[Record], resumed: list[int | None]
) -> int:
    """As its end says or, without one, the furthest that is recorded."""
    if ends := [end.step for end in of_kind(events, End) if end.step is not None]:
        return ends[-1]
    told = [e.step for e in events if isinstance(e, (FirstStep, Fault, GoBack, Decision))]
    told += [*resumed, *(line["step"] for line in lines[-1:])]
    return max(first, *(step for step in told if step is not None), 0)


def _end(events: list[Event]) -> tuple[AttemptState, str]:
    """The state and the reason. An orderly end counts before a crash while leaving. When one rank
    crashes the others lose it: their faults are not the cause."""
    if ends := of_kind(events, End):
        return ends[-1].state, ends[-1].reason
    faults = of_kind(events, Fault)
    if not faults:
        return "killed", ""
    fault = next((fault for fault in faults if not fault.lost_peer), faults[0])
    if fault.lost_peer:  # no rank says why: it was killed, or its host is gone
        lost = fault.reason.partition(": ")[0]
        return "crashed", f"a rank died, no error recorded; {lost} lost the connection to it"
    if fault.final:
        return "failed", fault.reason
    return "hung" if fault.kind == "hang" else "crashed", fault.reason
