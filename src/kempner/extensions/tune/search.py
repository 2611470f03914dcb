"""The search for the fastest candidate in a given time. No torch, and no processes: `measure`
is passed in.

Short runs of many candidates come first: the configuration itself, candidates of earlier tunes, the
planner's best, and then all that differ from the fastest so far in one lever, until none is left.
Successive halving follows (Jamieson and Talwalkar, arXiv:1502.07943): the better half of the best
is measured three times as long, repeatedly, until one is left.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kempner.extensions.planner.memory import GIB
from kempner.extensions.tune.space import (
    LONG_TUNE_STEP_S,
    Overrides,
    Space,
    describe_candidate,
    unplanned,
)
from kempner.extensions.tune.trials import LearnedMemory, Measurement, Trial, rank_trials

EXPLORE = 0.6  # of the time, for the short runs
FINALISTS = 8  # with which the halving begins
FACTOR = 3  # by which the runs of each rung are longer than those before
RUNGS = 3
RUN_SHARE, SHORTEST_S, LONGEST_S = 0.005, 0.2, 3.0  # of all time: the steps of a short run
FIRST_STEPS, MOST_STEPS = 5, 100  # of the first run, whose step time is unknown; of any short run
WARM_UP = 3  # steps; if steps are long, only one
RUN_PATIENCE = 4.0  # a run may take this many times as long as the others
RUN_PATIENCE_S = 120.0  # and at least this long, because it may compile a model


class OutOfTime(Exception):
    """No time is left, or this process was asked to leave."""


class Measure(Protocol):
    def __call__(
        self, overrides: Overrides, rung: int, warmup: int, steps: int, limit: float
    ) -> Measurement:
        """Run a candidate for so many steps, at most `limit` seconds. Raises OutOfTime."""
        ...


class Search:
    """A search over the candidates of a space."""

    def __init__(
        self,
        space: Space,
        measure: Measure,
        left: Callable[[], float],
        first: Sequence[Overrides] = (),
        say: Callable[[str], None] = print,
    ) -> None:
        """`left`: returns the seconds left; `first`: candidates to begin with."""
        self.space, self._measure, self._left, self._say = space, measure, left, say
        self.memory = LearnedMemory(space.machine.limit, space.machine.is_gpu)
        self.trials: dict[str, Trial] = {}
        self.skipped: dict[str, float] = {}  # candidate -> the bytes it would need
        self._short_s = min(max(RUN_SHARE * left(), SHORTEST_S), LONGEST_S)
        self._first = [{}, *first, *space.planned()]

    def run(self) -> None:
        """Search until no candidate or no time is left."""
        try:
            while self._explore(self._left() * (1 - EXPLORE)):
                self._halve()
        except OutOfTime:
            pass

    @property
    def best(self) -> Trial | None:
        """The best so far, among the longest comparable runs."""
        for rung in range(RUNGS, 0, -1):
            longest = rank_trials([one for one in self.trials.values() if one.rung >= rung])
            if len(longest) > 1:
                return longest[0]
        return next(iter(self.ranked), None)

    @property
    def ranked(self) -> list[Trial]:
        return rank_trials(list(self.trials.values()))

    def take(self, overrides: Overrides, rung: int, result: Measurement) -> Trial:
        """Take the result of a run, of this search or an earlier one."""
        planned = self.space.memory(overrides)
        new = Trial(overrides, planned, self.space.seconds(overrides))
        trial = self.trials.setdefault(describe_candidate(overrides), new)
        trial.runs.append(result)
        if not result.killed:
            trial.rung = max(trial.rung, rung)
        if result.out_of_memory:
            self.memory.learn(unplanned(overrides), planned, None)
        # Once per candidate: its longer runs would count again in the median error.
        elif rung == 0 and not result.failed:
            self.memory.learn(unplanned(overrides), planned, result.gib * GIB)
        return trial

    # --- many, briefly ---

    def _explore(self, keep: float) -> bool:
        """Measure candidates briefly until `keep` seconds are left, or no other one is near the
        fastest; returns whether there was one."""
        count = len(self.trials)
        while (other := next(self._untried(), None)) is not None:
            # However short the time, measure one candidate, so that there is a result.
            if self._left() <= keep and self.trials:
                break
            self._try(other, 0)
        return len(self.trials) > count

    def _untried(self) -> Iterator[Overrides]:
        fastest = next(iter(sorted(self.ranked, key=lambda one: one.step)), None)
        near = self.space.neighbours(fastest.overrides if fastest else {})
        for overrides in itertools.chain(self._first, near):
            other = self.space.canonical(overrides)
            name = describe_candidate(other)
            if name in self.trials or not self.space.is_allowed(other):
                continue
            kind, planned = unplanned(other), self.space.memory(other)
            if not self.trials or self.memory.fits(kind, planned):
                # Results since it was skipped now admit it.
                self.skipped.pop(name, None)
                yield other
            elif name not in self.skipped:
                self.skipped[name] = need = self.memory.predict(kind, planned)
                self._say(f"  left out, as it would need {need / GIB:.2f} GiB: {name}")

    # --- the best, longer ---

    def _halve(self) -> None:
        """Measure the better half three times as long, repeatedly, until one is left; the
        configuration itself takes part once, for comparison."""
        alive = self.ranked[:FINALISTS]
        for rung in range(1, RUNGS + 1):
            alive = alive[: math.ceil(len(alive) / 2)]
            itself = self.trials.get(describe_candidate({}))
            if rung == 1 and itself and not itself.failed and itself not in alive:
                alive.append(itself)
            if len(alive) < 2:
                break
            for trial in alive:
                if trial.rung < rung:
                    self._try(trial.overrides, rung)
            alive = rank_trials(alive)

    def _try(self, overrides: Overrides, rung: int) -> None:
        warmup, steps = self._length(overrides, rung)
        walls = [run.wall for trial in self.trials.values() for run in trial.runs]
        # An upper bound, because the start of a run does not grow with its steps.
        usual = statistics.median(walls or [RUN_PATIENCE_S]) * FACTOR**rung
        limit = max(RUN_PATIENCE_S, RUN_PATIENCE * usual)
        left = self._left()
        # The configuration itself is always measured: all others are compared with it.
        limit = min(left if self.trials else max(RUN_PATIENCE_S, left), limit)
        result = self._measure(overrides, rung, warmup, steps, limit)
        if result.killed and not overrides:
            self._say(f"  {describe_candidate(overrides)}: {result.failed}; once more")
            limit = min(self._left(), limit)
            result = self._measure(overrides, rung, warmup, steps, limit)
        trial = self.take(overrides, rung, result)
        tokens = self.space.tokens
        failed = result.failed or trial.failed
        speed = failed or f"{tokens / trial.step:,.0f} tokens/s"
        self._say(f"  {describe_candidate(overrides)}: {speed}")

    def _length(self, overrides: Overrides, rung: int) -> tuple[int, int]:
        """Return a run's numbers of steps, for warm-up and for measurement. Raises OutOfTime if
        there is time for too few."""
        ranked = self.ranked
        if not ranked:
            return WARM_UP, FIRST_STEPS
        step = min(one.step for one in ranked)
        warmup = WARM_UP if step < LONG_TUNE_STEP_S else 1
        steps = min(max(round(self._short_s / step), FIRST_STEPS), MOST_STEPS) * FACTOR**rung
        if rung:
            own = self.trials[describe_candidate(overrides)].step
            # The seconds of a run outside its steps: imports, compilation, warm-up.
            starts = [
                run.wall - sum(run.seconds) for one in ranked for run in one.runs if run.seconds
            ]
            steps = min(steps, int((self._left() - statistics.median(starts)) / own) - warmup)
            if steps < FIRST_STEPS:
                raise OutOfTime
        return warmup, steps
