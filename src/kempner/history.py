"""What a run directory tells of its run: its steps, its attempts, and where its wall time went. No
torch.

A run that still goes, was killed in the middle of a line, or never got to its first step has a
history too: what is missing is None, and nothing here raises because of it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import statistics
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

Record = dict[str, Any]
EVENTS = ("start", "first_step", "fault", "end", "decision")
# Where the wall time of a run goes, from the best to the worst.
PARTS = ("training", "validation", "saving", "lost", "start-up", "shutdown", "queue")


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
    decision: str  # of the batch script: requeue, end, or "" where there is none
    why: str
    excluded: str  # the host that it left out of the next attempt
    committed: int | None  # step of the newest checkpoint after it


class Phase(NamedTuple):
    """A piece of the wall time; each begins where the one before has ended. Unix seconds."""

    part: str  # one of PARTS
    began: float
    ended: float


class Stretch(NamedTuple):
    """Steps in a row of one attempt, from one record to the next: `first` to `last` are the counts
    before and after. `kept`: those up to this one count; the others were undone by a resume."""

    attempt: int  # its place in the list of attempts
    first: int
    last: int
    began: float
    ended: float
    saving: float = 0.0  # seconds of it
    validation: float = 0.0
    kept: float = math.inf

    @property
    def lost(self) -> int:
        return max(0, self.last - max(self.first, int(min(self.kept, self.last))))


@dataclass(frozen=True)
class Life:
    """The wall time of a run over all attempts, from the first start to the last sign of life."""

    phases: list[Phase]
    stretches: list[Stretch]
    startups: list[float | None]  # seconds until the first step of each attempt; None: none came
    lost: list[int]  # steps of each attempt that did not last

    @property
    def wall(self) -> float:
        return self.phases[-1].ended - self.phases[0].began if self.phases else 0.0

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of each of PARTS; together they are the wall time."""
        return {
            part: math.fsum(p.ended - p.began for p in self.phases if p.part == part)
            for part in PARTS
        }

    @property
    def effective(self) -> float:
        """Effective training time ratio: the part of the wall time that trained steps which
        count."""
        return self.parts["training"] / self.wall if self.wall else 0.0


@dataclass(frozen=True)
class History:
    """`losses` and `validations` are the lines of metrics.jsonl that stand, by step; `lines` has
    those too that a later attempt has done again."""

    path: Path
    status: Record
    lines: list[Record] = field(repr=False)
    attempts: list[Attempt]

    @cached_property
    def losses(self) -> list[Record]:
        return standing([line for line in self.lines if "loss" in line], self.attempts)

    @cached_property
    def validations(self) -> list[Record]:
        return standing([line for line in self.lines if "val_loss" in line], self.attempts)

    @cached_property
    def life(self) -> Life:
        return _life(self.attempts, self.lines, _newest_checkpoint(self.path / "checkpoints"))

    @property
    def step(self) -> int:
        """Steps done, as far as the records tell: status.json of a running attempt is older."""
        newest = self.attempts[-1].last_step if self.attempts else 0
        last = self.losses[-1]["step"] if self.losses else 0
        return max(newest, last)

    @property
    def state(self) -> str:
        """As in status.json, or what no status tells: the last attempt has crashed, hung, or was
        killed, and the run may be started again."""
        state = str(self.status.get("state", "unknown"))
        last = self.attempts[-1].state if self.attempts else ""
        newer = last in ("crashed", "hung") and state != "failed"
        return last if newer or (last, state) == ("killed", "running") else state


def load(path: Path) -> History:
    """Read a run directory; files that are not there count as empty."""
    status = {}
    with contextlib.suppress(OSError, ValueError):
        status = json.loads((path / "status.json").read_text())
    lines = [line for line in read_lines(path / "metrics.jsonl") if _is_known(line, "step", "time")]
    events = [
        event
        for event in _kind(read_lines(path / "attempts.jsonl"), *EVENTS)
        if _is_known(event, "time")
    ]
    return History(path, status, lines, _attempts(events, lines, status))


def read_lines(path: Path) -> list[Record]:
    """The objects of a JSONL file in order, without the lines that a crash has torn."""
    found = []
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                found.append(record)
    return found


def _is_known(record: Record, *keys: str) -> bool:
    """Whether the record has numbers under these keys."""
    return all(isinstance(record.get(key), (int, float)) for key in keys)


def standing(lines: list[Record], attempts: list[Attempt]) -> list[Record]:
    """The lines that count, by step. A line undoes those of its step and of later ones before it:
    the run has gone back. The start of an attempt does so before it has a line."""
    limits = {
        attempt.number: min(
            (
                later.first_step
                for later in attempts
                if later.number > attempt.number and later.began
            ),
            default=None,
        )
        for attempt in attempts
    }
    stand: list[Record] = []
    for line in lines:
        limit = limits.get(line.get("attempt", -1))
        if limit is not None and line["step"] > limit:
            continue
        while stand and stand[-1]["step"] >= line["step"]:
            stand.pop()
        stand.append(line)
    return stand


# --- The attempts -----------------------------------------------------------------------------


def _attempts(events: list[Record], lines: list[Record], status: Record) -> list[Attempt]:
    """The attempts in their order, each from its events and lines: one that was killed without a
    word has no more than these."""
    groups, of = _by_attempt(events), _by_number(lines)
    found = []
    for group, after in zip(groups, [*groups[1:], []], strict=False):
        number = next((event["attempt"] for event in group if _is_known(event, "attempt")), -1)
        resumed = [event["step"] for event in _kind(after, "start") if _is_known(event, "step")]
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


def _by_number(lines: list[Record]) -> dict[int, list[Record]]:
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
        if _is_known(event, key)
    )
    first = start.get("step") or 0
    told = [*lines[-1:], *_kind(events, "first_step", "fault"), decision]
    reached = [first, *resumed, *(record["step"] for record in told if _is_known(record, "step"))]
    last = end["step"] if _is_known(end, "step") else max(reached)
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


def _newest_checkpoint(checkpoints: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int((checkpoints / "latest").readlink().name.removeprefix("step_"))
    return None


# --- Its life ---------------------------------------------------------------------------------


def _life(attempts: list[Attempt], lines: list[Record], newest: int | None) -> Life:
    """`newest`: step of the newest checkpoint, None where it is not known."""
    stretches = _all_stretches(attempts, lines)
    kept = math.inf
    if attempts and attempts[-1].state in ("crashed", "hung", "killed", "failed"):
        newest = attempts[-1].committed if newest is None else newest
        kept = math.inf if newest is None else newest  # the rest would have to be done again
    for attempt, found in zip(reversed(attempts), reversed(stretches), strict=True):
        for i in reversed(range(len(found))):
            found[i] = found[i]._replace(kept=kept)
            kept = min(kept, found[i].first)
        kept = kept if attempt.began is None else min(kept, attempt.first_step)
    phases: list[Phase] = []
    startups = []
    at = attempts[0].opened if attempts else 0.0

    def until(time: float, part: str) -> None:
        nonlocal at
        if time > at:  # the clocks of two hosts may differ
            phases.append(Phase(part, at, time))
            at = time

    for attempt, found in zip(attempts, stretches, strict=True):
        until(attempt.opened, "queue")
        opened = at
        until(found[0].began if found else attempt.ended, "start-up")
        startups.append(at - opened if found else None)
        for stretch in found:
            seconds = max(0.0, stretch.ended - at)
            stepping = max(0.0, seconds - stretch.saving - stretch.validation)
            lost = stepping * stretch.lost / (stretch.last - stretch.first)
            end = at + seconds
            until(at + stepping - lost, "training")
            until(min(end, at + lost), "lost")
            until(min(end, at + stretch.saving), "saving")
            until(end if stretch.validation else at, "validation")
        until(attempt.ended, "shutdown")
    undone = [sum(stretch.lost for stretch in found) for found in stretches]
    return Life(phases, list(itertools.chain(*stretches)), startups, undone)


def _all_stretches(attempts: list[Attempt], lines: list[Record]) -> list[list[Stretch]]:
    """The steps of each attempt, in the order in which they were done."""
    of = _by_number(lines)
    timed = {n: [line for line in of[n] if _is_known(line, "step_time")] for n in of}
    gaps = [b["step"] - a["step"] for n in of for a, b in itertools.pairwise(timed[n])]
    every = statistics.mode([gap for gap in gaps if gap > 0] or [1])  # metrics.log_interval
    paces = {n: [_pace(line) for line in timed[n]] for n in of}
    # Not of the first lines, where others tell: a first step may compile.
    everybody = [*itertools.chain(*(own[1:] for own in paces.values()))]
    everybody = everybody or [*itertools.chain(*paces.values())] or [math.inf]
    found = []
    for i, attempt in enumerate(attempts):
        pace = statistics.median(paces.get(attempt.number, [])[1:] or everybody)
        found.append(_stretches(i, attempt, of.get(attempt.number, []), every, pace))
    return found


def _pace(line: Record) -> float:
    """Seconds of a step alone."""
    others = sum(line.get(f"{part}_time", 0.0) for part in ("checkpoint", "eval"))
    pace: float = line["step_time"] - others
    return max(0.0, pace)


def _stretches(
    i: int, attempt: Attempt, lines: list[Record], every: int, pace: float
) -> list[Stretch]:
    """The attempt's steps. `every`: steps between its lines; `pace`: seconds of a step that no line
    tells of.

    A line is written later than its step was done: the numbers are read one step late, and a save
    may come in between. What its step_time tells, added up from the start, is the right time.
    """
    first = attempt.first_step
    if attempt.began is None or attempt.last_step <= first:
        return []
    clock, counted, reached = attempt.began, first, first + 1
    at = min(attempt.stepped or clock + pace, attempt.ended)
    found = [Stretch(i, first, first + 1, at, at)]
    for line in lines:
        step, done = line["step"], found[-1].last
        if not _is_known(line, "step_time"):  # of a validation, or of a step that was not finite
            reached = max(reached, step)
            continue
        count = max(1, step - counted)
        clock += line["step_time"] * count
        when = max(at, min(line["time"], clock))
        if step <= counted:  # it went back by itself, after the step `reached`
            back = max((step - 1) // every * every, min(first, step - 1))
            undone = reached - done
            if undone > 0:
                middle = at + (when - at) * undone / (undone + step - back)
                found.append(Stretch(i, done, reached, at, middle))
                at = middle
            done = back
        if step > done:
            saving, validation = (
                line.get(f"{k}_time", 0.0) * count for k in ("checkpoint", "eval")
            )
            found.append(Stretch(i, done, step, at, when, saving, validation))
            at = when
        counted = reached = step
    more = attempt.last_step - found[-1].last  # after the last line
    if more > 0:
        end = max(at, min(attempt.ended, at + more * pace))
        found.append(Stretch(i, found[-1].last, attempt.last_step, at, end))
    return found
