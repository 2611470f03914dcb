"""Wall time of a run by part, over all attempts. No torch."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kempner.jobs.records.attempts import Attempt, Record, by_number, is_known

UNCOUNTED = "running"  # for a program whose steps are unknown
# From the best to the worst.
TIME_PARTS = (
    "training",
    UNCOUNTED,
    "validation",
    "saving",
    "lost",
    "stalled",
    "start-up",
    "shutdown",
    "not running",
    "ended",  # as requested, until a user continues it
)
# Between two lines, steps that take this many times the median, and this many seconds more, count
# as stalled: the network was down, or a file system did not answer.
STALL, STALL_S = 1.5, 5.0


class TimePhase(NamedTuple):
    """A piece of the wall time, which begins where the previous one ends. Unix seconds."""

    part: str  # one of TIME_PARTS
    began: float
    ended: float


class Stretch(NamedTuple):
    """Consecutive steps of one attempt, from one record to the next: `first` and `last` are the
    step counts before and after. Steps up to `kept` count; a resume has undone the others."""

    attempt: int  # index in the list of attempts
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
class WallTime:
    """The wall time of a run over all attempts, from the first start to the last record."""

    phases: list[TimePhase]
    stretches: list[Stretch]
    startups: list[float | None]  # seconds until the first step of each attempt; None: no step
    lost: list[int | None]  # steps of each attempt that a resume has undone; None: unknown

    @property
    def total(self) -> float:
        return self.phases[-1].ended - self.phases[0].began if self.phases else 0.0

    @cached_property
    def parts(self) -> dict[str, float]:
        """Return the seconds of each of TIME_PARTS, which add up to the total."""
        seconds: dict[str, list[float]] = {part: [] for part in TIME_PARTS}
        for phase in self.phases:
            seconds[phase.part].append(phase.ended - phase.began)
        return {part: math.fsum(each) for part, each in seconds.items()}

    @property
    def effective(self) -> float | None:
        """Return the effective training time ratio: the share of the wall time spent on steps that
        count, excluding the time for which the run had ended as requested; None if the steps of an
        attempt, or those that count, are unknown."""
        if None in self.lost:
            return None
        run_time = self.total - self.parts["ended"]
        return self.parts["training"] / run_time if run_time else 0.0


def wall_time_of(attempts: list[Attempt], lines: list[Record], newest: int | None) -> WallTime:
    """Compute the wall time. `newest`: step of the newest checkpoint, None if unknown."""
    stretches = _all_stretches(attempts, lines)
    _mark_kept(attempts, stretches, newest)
    paces = [
        _seconds(s) / (s.last - s.first) for s in itertools.chain(*stretches) if s.ended > s.began
    ]
    pace = statistics.median(paces) if paces else 0.0
    phases = _Phases(attempts[0].opened if attempts else 0.0)
    startups = []
    between = "not running"
    for attempt, own in zip(attempts, stretches, strict=True):
        phases.until(attempt.opened, between)
        between = "ended" if attempt.state in ("done", "stopped") else "not running"
        opened = phases.at
        if not attempt.counted and attempt.began is not None:
            phases.until(attempt.began, "start-up")
            phases.until(attempt.ended, UNCOUNTED)
        phases.until(own[0].began if own else attempt.ended, "start-up")
        startups.append(phases.at - opened if own else None)
        for stretch in own:
            phases.add(stretch, pace)
        phases.until(attempt.ended, "shutdown")
    undone = _undone(attempts, stretches)
    return WallTime(phases.found, list(itertools.chain(*stretches)), startups, undone)


def _undone(attempts: list[Attempt], stretches: list[list[Stretch]]) -> list[int | None]:
    """Count the steps of each attempt that a later one has undone. The step from which a program
    continues is known once it prints a step."""
    counts: list[int | None] = []
    starts = [attempt for attempt in attempts if attempt.began is not None]
    is_known = not starts or not starts[-1].foreign or starts[-1].state in ("running", "done")
    for attempt, own in zip(reversed(attempts), reversed(stretches), strict=True):
        if attempt.began is None:
            counts.append(0)
            continue
        counts.append(sum(each.lost for each in own) if is_known and attempt.counted else None)
        is_known = is_known or attempt.counted
    return counts[::-1]


def _mark_kept(attempts: list[Attempt], stretches: list[list[Stretch]], newest: int | None) -> None:
    """Set `kept` of each stretch, backwards from the last one: a resume undoes everything beyond
    its first step."""
    limit = math.inf
    if attempts and attempts[-1].state in ("crashed", "hung", "killed", "failed"):
        if newest is None and not any(attempt.foreign for attempt in attempts):
            newest = attempts[-1].committed
        limit = math.inf if newest is None else newest  # the rest would have to be repeated
    for attempt, own in zip(reversed(attempts), reversed(stretches), strict=True):
        for i in reversed(range(len(own))):
            if limit < own[i].last:
                own[i] = own[i]._replace(kept=limit)
            limit = min(limit, own[i].first)
        if attempt.began is not None and attempt.counted:
            limit = min(limit, attempt.first_step)


class _Phases:
    """Consecutive phases; neighbours of the same part are merged."""

    def __init__(self, at: float) -> None:
        self.found: list[TimePhase] = []
        self.at = at

    def until(self, time: float, part: str) -> None:
        if time <= self.at:  # the clocks of two hosts may differ
            return
        if self.found and self.found[-1].part == part:
            self.found[-1] = TimePhase(part, self.found[-1].began, time)
        else:
            self.found.append(TimePhase(part, self.at, time))
        self.at = time

    def add(self, stretch: Stretch, pace: float) -> None:
        """Add the parts of a stretch; `pace`: the usual seconds of a step."""
        seconds = max(0.0, stretch.ended - self.at)
        stepping = max(0.0, seconds - stretch.saving - stretch.validation)
        usual = pace * (stretch.last - stretch.first)
        stalled = stepping - usual if stepping > max(STALL * usual, usual + STALL_S) else 0.0
        stepping -= stalled
        lost_seconds = stepping * stretch.lost / (stretch.last - stretch.first)
        end = self.at + seconds
        # Their position is not recorded: put stalls first, saves and validation last.
        if stalled:
            self.until(self.at + stalled, "stalled")
        self.until(self.at + stepping - lost_seconds, "training")
        if lost_seconds:
            self.until(min(end, self.at + lost_seconds), "lost")
        if stretch.saving:
            self.until(min(end, self.at + stretch.saving), "saving")
        if stretch.validation:
            self.until(end, "validation")


def _seconds(stretch: Stretch) -> float:
    """Return the seconds that its steps took, without saves and validation."""
    return max(0.0, stretch.ended - stretch.began - stretch.saving - stretch.validation)


def _all_stretches(attempts: list[Attempt], lines: list[Record]) -> list[list[Stretch]]:
    """Return the steps of each attempt, in the order in which they ran."""
    of = by_number(lines)
    timed = {n: [line for line in of[n] if is_known(line, "step_time")] for n in of}
    gaps = [b["step"] - a["step"] for n in of for a, b in itertools.pairwise(timed[n])]
    every = statistics.mode([gap for gap in gaps if gap > 0] or [1])  # metrics.log_interval
    paces = {n: [_pace(line) for line in timed[n]] for n in of}
    later = [*itertools.chain(*(own[1:] for own in timed.values()))]
    usual = {
        key: statistics.fmean(line.get(key, 0.0) for line in later)
        for key in ("checkpoint_time", "eval_time")
        if later
    }
    # The first line counts only if there is no other: a first step may compile.
    everybody = [*itertools.chain(*(own[1:] for own in paces.values()))]
    everybody = everybody or [*itertools.chain(*paces.values())] or [math.inf]
    stretches = []
    for i, attempt in enumerate(attempts):
        pace = statistics.median(paces.get(attempt.number, [])[1:] or everybody)
        stretches.append(_stretches(i, attempt, of.get(attempt.number, []), every, pace, usual))
    return stretches


def _pace(line: Record) -> float:
    """Return the seconds of a step without saves and validation."""
    pace: float = line["step_time"]
    pace -= line.get("checkpoint_time", 0.0) + line.get("eval_time", 0.0)
    return max(0.0, pace)


def _stretches(
    i: int, attempt: Attempt, lines: list[Record], every: int, pace: float, usual: Record
) -> list[Stretch]:
    """Return the attempt's steps. `every`: steps between its lines; `pace`: seconds of a step
    without a line; `usual`: those of its saves and validation, by the names of lines.

    A line is written after its step has ended: the numbers are read one step late, possibly after a
    save. The sum of step_time since the start gives the right time.
    """
    first = attempt.first_step
    if attempt.began is None or attempt.last_step <= first or not attempt.counted:
        return []
    clock, last_step, reached = attempt.began, first, first + 1
    at = min(attempt.stepped or clock + pace, attempt.ended)
    stretches = [Stretch(i, first, first + 1, at, at)]
    for line in lines:
        step, done = line["step"], stretches[-1].last
        if not is_known(line, "step_time"):  # a validation, or a non-finite step
            reached = max(reached, step)
            continue
        count = max(1, step - last_step)
        clock += line["step_time"] * count
        if usual and last_step == first < step - every:
            # The lines before it were not read: it only marks the end of their steps.
            line, clock = line | usual, line["time"]
        when = max(at, min(line["time"], clock))
        if step <= last_step:  # the run rolled back to a checkpoint after the step `reached`
            # How far is not recorded; this is the first line since, at most one interval later.
            back = max((step - 1) // every * every, min(first, step - 1))
            undone = reached - done
            if undone > 0:
                # Steps before and after the rollback share the time between the lines.
                middle = at + (when - at) * undone / (undone + step - back)
                stretches.append(Stretch(i, done, reached, at, middle))
                at = middle
            done = back
        if step > done:
            saving = line.get("checkpoint_time", 0.0) * count
            validation = line.get("eval_time", 0.0) * count
            stretches.append(Stretch(i, done, step, at, when, saving, validation))
            at = when
        last_step = reached = step
    more = attempt.last_step - stretches[-1].last  # after the last line
    if more > 0:
        end = max(at, min(attempt.ended, at + more * pace))
        stretches.append(Stretch(i, stretches[-1].last, attempt.last_step, at, end))
    return stretches
