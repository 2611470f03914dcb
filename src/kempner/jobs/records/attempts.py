"""The attempts of a run, each built from its events and its lines of metrics. No torch."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from kempner.jobs.records.event_reader import of_kind, parse_event
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
BAD_INPUT_REASON = "bad input"  # the batch script's reason if the program refused its input
CANCELLED_REASON = "the job was cancelled"  # its reason after scancel
# ECMA-48 control sequences, then control characters except tab and line feed: program output must
# not control the terminal of a reader.
CONTROL_CHARACTERS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
REASON_WIDTH = 100  # characters of a reason in one line; the logs have all


@dataclass(frozen=True)
class Refusal:
    """A start that never became an attempt: the program refused its input, or Slurm ended the job
    first. It does not change the state of the run."""

    word: Literal["refused", "cancelled"]
    reason: str
    job: str | None
    time: float

    @property
    def text(self) -> str:
        return f"{self.word}: {self.reason}" if self.reason else self.word


@dataclass(frozen=True)
class Attempt:
    """One start of the run. Times are unix seconds, steps are counts of steps done."""

    number: int  # -1: it died before it got one
    attempt_id: str | None
    job: str | None
    restart: int
    hosts: tuple[str, ...]
    world_size: int
    lineage: tuple[str, ...]  # RUN@STEP that the run is a fork of, then earlier ancestors
    opened: float  # start of the batch script or, without one, of the process
    began: float | None  # when the state was loaded; None: never
    stepped: float | None  # when the first step was done
    first_step: int  # steps done when it began
    ended: float  # last sign of life
    last_step: int  # as far as known
    state: AttemptState  # "killed" if its end is unknown: only the judge knows whether it runs
    reason: str
    spares: tuple[str, ...]  # nodes of the job that were idle when it began
    # Of the batch script: restart, requeue, chain, end, leave; "" if none.
    decision: str
    why: str
    excluded: str  # the host excluded from the next attempt
    gpu_faults: tuple[GpuFault, ...]
    committed: int | None  # step of the newest checkpoint after it
    changed: tuple[str, ...] = ()  # since the previous attempt: configuration, code, packages
    startup: dict[str, float] = field(default_factory=dict)  # seconds of its parts: startup.py
    counted: bool = True  # its steps are known; a program under run.sh must print them
    wrong_numbers: tuple[str, ...] = ()  # computed by a device, in words
    foreign: bool = False  # a program under run.sh: the content of its checkpoints is unknown

    @property
    def name(self) -> str:
        return "-" if self.number < 0 else str(self.number)

    @property
    def steps(self) -> str:
        """The first and the last step, as far as known: if a program does not print its steps, the
        last one is the number of a checkpoint."""
        first = f"{self.first_step:,}" if self.counted else "-"
        last = f"{self.last_step:,}" if self.counted or self.last_step else "-"
        return f"{first} to {last}" if self.began and (first, last) != ("-", "-") else "-"

    @property
    def device_warning(self) -> str:
        """Warning about the attempt's devices in one line; "" if none."""
        warnings = [f"{f.host}: {f.reason}" for f in self.gpu_faults if f.answer != "note"]
        warnings += self.wrong_numbers
        more = f" and {len(warnings) - 1} more" if len(warnings) > 1 else ""
        return f"{warnings[-1]}{more}" if warnings else ""

    def smaller(self, attempts: Sequence[Attempt]) -> str:
        """Return a one-line warning if the job has fewer ranks than at its first start."""
        first = next((a for a in attempts if a.job == self.job and a.began), self)
        if not self.job or not 0 < self.world_size < first.world_size:
            return ""
        nodes = f"{len(first.hosts)} node{'s' * (len(first.hosts) != 1)}"
        return (
            f"{self.world_size:,} of {first.world_size:,} tasks: the first start of job {self.job}"
            f" had {nodes}"
        )

    @property
    def cause(self) -> str:
        """Cause of the attempt's end, as text."""
        if self.state == "killed":
            return "killed, no error recorded" if self.began else "died before it began"
        return f"{self.state}: {self.reason}" if self.reason else self.state

    @property
    def ending(self) -> str:
        """Cause of the end and the batch script's action."""
        text = self.cause
        if done := AFTER.get(self.decision):
            text += f"; {done} without {self.excluded}" if self.excluded else f"; {done}"
        elif self.decision == "end" and self.state not in ("done", "stopped", "failed"):
            text += f"; not requeued: {self.why}"
        return text

    @property
    def short_ending(self) -> str:
        """The ending, shortened for one line of a table or a picture."""
        reason = textwrap.shorten(self.reason, REASON_WIDTH, placeholder=" ...")
        return self.ending.replace(self.reason, reason) if self.reason else self.ending


def strip_control(text: str) -> str:
    """Remove colors and other control characters from a program's text."""
    return CONTROL_CHARACTERS.sub("", text)


def is_known(record: Record, *keys: str) -> bool:
    """Return whether the record has numbers under these keys."""
    for key in keys:  # noqa: SIM110 - all() takes longer, and there may be 100,000 lines
        if not isinstance(record.get(key), (int, float)):
            return False
    return True


def attempts_of(
    events: Sequence[Event], lines: Sequence[Record], status: Record
) -> tuple[list[Attempt], list[Refusal]]:
    """Return the attempts in order, each from its events and lines, and the starts that never
    became an attempt. status.json supplies the last end if a full disk kept it out of
    attempts.jsonl."""
    # Events of the GPU samplers are not signs of life and may come before the start.
    own = [event for event in events if not isinstance(event, GpuFault)]
    groups, of = _by_attempt(_with_end_of(status, own)), by_number(lines)
    refusals = [(group, _refusal(group)) for group in groups]
    groups = [group for group, refusal in refusals if refusal is None]
    gpus = of_kind(events, GpuFault)
    found = []
    for group, after in zip(groups, [*groups[1:], []], strict=False):
        number = next((event.attempt for event in group if event.attempt is not None), -1)
        resumed = [start.step for start in of_kind(after, StartEvent)]
        faults = tuple(fault for fault in gpus if fault.attempt == number)
        found.append(_attempt(number, group, of.get(number, []), resumed, faults))
    return found, [refusal for _, refusal in refusals if refusal is not None]


def _refusal(events: list[Event]) -> Refusal | None:
    """Return a refusal if the only events of a start are the batch script's decisions to end it."""
    last = events[-1]
    if not all(isinstance(event, DecisionEvent) for event in events) or not isinstance(
        last, DecisionEvent
    ):
        return None
    if last.decision == "end" and last.why.startswith(BAD_INPUT_REASON):
        reason = last.why.removeprefix(BAD_INPUT_REASON).lstrip(": ")
        return Refusal("refused", strip_control(reason) or BAD_INPUT_REASON, last.job, last.time)
    if last.decision == "leave":
        return Refusal("cancelled", "before the run began", last.job, last.time)
    return None


def _with_end_of(status: Record, events: Sequence[Event]) -> list[Event]:
    """Add the end in status.json to the events if it is missing."""
    end = parse_event({**status, "event": "end"}) if status.get("state") in ENDS else None
    keys = {key for event in of_kind(events, End) for key in (event.attempt, event.attempt_id)}
    if end is None or {end.attempt, end.attempt_id} & (keys - {None}):
        return list(events)
    return [*events, end]


def _by_attempt(events: Sequence[Event]) -> list[list[Event]]:
    """Group the events by attempt. A decision of the batch script has no attempt number; it shares
    only the attempt_id with other events of its attempt."""
    groups: list[list[Event]] = []
    by_key: dict[str | int | None, list[Event]] = {}
    for event in events:
        key = event.attempt_id or event.attempt
        if key not in by_key or isinstance(event, StartEvent):
            by_key[key] = []
            groups.append(by_key[key])
        by_key[key].append(event)
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
    """Make an attempt. `resumed`: the step from which the next attempt continued, if any."""
    start = next(iter(of_kind(events, StartEvent)), None)
    stepped = next(iter(of_kind(events, FirstStep)), None)
    decision = next(reversed(of_kind(events, DecisionEvent)), None)
    state, reason = _end(events)
    first, is_counted = _first_step(start, of_kind(events, FirstStep))
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
        reason=strip_control(reason),
        spares=start.spares if start else (),
        decision=decision.decision if decision else "",
        why=strip_control(decision.why) if decision else "",
        excluded=decision.excluded if decision else "",
        gpu_faults=gpu_faults,
        committed=decision.step if decision else None,
        changed=start.changed if start else (),
        startup=_startup(start, stepped),
        counted=is_counted,
        wrong_numbers=tuple(
            strip_control(fault.reason)
            for fault in of_kind(events, FaultEvent)
            if fault.kind == "corruption"
        ),
        foreign=start is not None and start.step is None,
    )


def _first_step(start: StartEvent | None, stepped: list[FirstStep]) -> tuple[int, bool]:
    """Return the step from which an attempt continued, and whether its steps are known."""
    if start is None or start.step is not None:
        return (start.step or 0 if start else 0), True
    starts = [first.began for first in stepped if first.began is not None]
    return (starts[0], True) if starts else (0, False)


def _startup(start: StartEvent | None, stepped: FirstStep | None) -> dict[str, float]:
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
    """Return the last step: that of the end event or, without one, the largest on record."""
    if ends := [end.step for end in of_kind(events, End) if end.step is not None]:
        return ends[-1]
    foreign = any(start.step is None for start in of_kind(events, StartEvent))
    kinds = (
        (FirstStep, FaultEvent, GoBack)
        if foreign
        else (FirstStep, FaultEvent, GoBack, DecisionEvent)
    )
    steps = [e.step for e in events if isinstance(e, kinds)]
    steps += [*resumed, *(line["step"] for line in lines[-1:])]
    return max(first, *(step for step in steps if step is not None), 0)


def _end(events: list[Event]) -> tuple[AttemptState, str]:
    """Return the state and the reason. An orderly end takes precedence over a crash while leaving.
    If one rank crashes, the others lose it: their faults are not the cause."""
    if ends := of_kind(events, End):
        return ends[-1].state, ends[-1].reason
    faults = of_kind(events, FaultEvent)
    if not faults:
        return "killed", ""
    fault = next((fault for fault in faults if not fault.lost_peer), faults[0])
    if fault.lost_peer:  # no rank says why: it was killed, or its host is gone
        witness = fault.reason.partition(": ")[0]
        return "crashed", f"a rank died, no error recorded; {witness} lost the connection to it"
    if fault.final:
        return "failed", fault.reason
    return "hung" if fault.kind == "hang" else "crashed", fault.reason
