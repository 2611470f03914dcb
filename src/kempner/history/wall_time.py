"""Where the wall time of a run went, over all attempts. No torch."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kempner.history.attempts import Attempt, Record, by_number, is_known

# From the best to the worst.
PARTS = ("training", "validation", "saving", "lost", "stalled", "start-up", "shutdown", "queue")
# From one line to the next, steps that take so many times the median, and seconds more, stood
# still: a network that was away for a while, a file system that did not answer.
STALL, STALL_S = 1.5, 5.0


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


def life_of(attempts: list[Attempt], lines: list[Record], newest: int | None) -> Life:
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

    paces = [
        _seconds(s) / (s.last - s.first) for s in itertools.chain(*stretches) if s.ended > s.began
    ]
    pace = statistics.median(paces) if paces else 0.0

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
            usual = pace * (stretch.last - stretch.first)
            stalled = stepping - usual if stepping > max(STALL * usual, usual + STALL_S) else 0.0
            stepping -= stalled
            lost = stepping * stretch.lost / (stretch.last - stretch.first)
            end = at + seconds
            until(at + stalled, "stalled")
            until(at + stepping - lost, "training")
            until(min(end, at + lost), "lost")
            until(min(end, at + stretch.saving), "saving")
            until(end if stretch.validation else at, "validation")
        until(attempt.ended, "shutdown")
    undone = [sum(stretch.lost for stretch in found) for found in stretches]
    return Life(phases, list(itertools.chain(*stretches)), startups, undone)


def _seconds(stretch: Stretch) -> float:
    """Those of its steps alone."""
    return max(0.0, stretch.ended - stretch.began - stretch.saving - stretch.validation)


def _all_stretches(attempts: list[Attempt], lines: list[Record]) -> list[list[Stretch]]:
    """The steps of each attempt, in the order in which they were done."""
    of = by_number(lines)
    timed = {n: [line for line in of[n] if is_known(line, "step_time")] for n in of}
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
        if not is_known(line, "step_time"):  # of a validation, or of a step that was not finite
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
