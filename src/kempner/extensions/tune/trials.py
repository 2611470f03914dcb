"""The measurements of each candidate, the order of the candidates, and the error of the planner's
memory estimate. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from kempner.extensions.tune.space import Overrides

LEAST_GAIN = 0.005  # of a step: smaller gains change nothing
TO_SIGMA = 1.349  # distance between a normal distribution's quartiles, in standard deviations
OF_MEDIAN = 1.253  # error of the median, in errors of the mean


@dataclass(frozen=True)
class Measurement:
    """One run of a candidate."""

    seconds: tuple[float, ...] = ()  # of each step that counts
    gib: float = 0.0  # rank 0's peak
    mfu: float | None = None
    failed: str = ""  # reason why there are no figures
    out_of_memory: bool = False
    killed: bool = False  # by the host, which reveals nothing about the candidate
    wall: float = 0.0  # seconds of the whole run, including its start


@dataclass
class Trial:
    """A candidate and its runs. `planned_bytes`, `planned_seconds`: the planner's estimates."""

    overrides: Overrides
    planned_bytes: float
    planned_seconds: float | None = None
    rung: int = -1  # the longest completed run
    runs: list[Measurement] = field(default_factory=list)

    @property
    def failed(self) -> str:
        """Reason why it does not count; a run killed by the host does not invalidate another."""
        runs = [run for run in self.runs if not (run.killed and self.seconds)]
        return next((run.failed for run in runs if run.failed), "")

    @property
    def seconds(self) -> list[float]:
        return [step for run in self.runs for step in run.seconds]

    @property
    def step(self) -> float:
        """Seconds of a step: the median, which a few slow steps do not shift."""
        return statistics.median(self.seconds)

    @property
    def error(self) -> float:
        """Seconds by which the median may be wrong (one standard error)."""
        steps = self.seconds
        if len(steps) < 3:
            return self.step  # unknown
        # Quartiles, because a few slow steps would shift a standard deviation.
        low, _, high = statistics.quantiles(steps, n=4)
        return OF_MEDIAN * (high - low) / TO_SIGMA / math.sqrt(len(steps))

    @property
    def gib(self) -> float:
        return max(run.gib for run in self.runs)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation of a step of median duration."""
        run = [run for run in self.runs if run.seconds][-1]
        return run.mfu and run.mfu * statistics.median(run.seconds) / self.step


def rank_trials(trials: Sequence[Trial]) -> list[Trial]:
    """Sort what was measured, the best first: the fastest or, of those that cannot be told from
    it, the one with the fewest changes."""
    left = sorted((one for one in trials if one.seconds and not one.failed), key=lambda t: t.step)
    ranked: list[Trial] = []
    while left:
        first = left[0]
        tied = [one for one in left if _is_tied(one, first)]
        ranked.append(min(tied, key=lambda one: (len(one.overrides), one.step)))
        left.remove(ranked[-1])
    return ranked


def _is_tied(one: Trial, fastest: Trial) -> bool:
    least = LEAST_GAIN * fastest.step
    return one.step - fastest.step <= max(math.hypot(one.error, fastest.error), least)


class LearnedMemory:
    """The planner's estimate of memory, corrected by its error so far. On a GPU the error is a
    factor; on a CPU, where the measured process includes its libraries, a number of bytes."""

    def __init__(self, limit: float, gpu: bool) -> None:
        """`limit`: bytes of a rank."""
        self.limit, self._gpu = limit, gpu
        self._errors: list[float] = []
        self._too_large: dict[str, float] = {}  # the least estimate that ran out, by kind

    def learn(self, kind: str, planned: float, measured: float | None) -> None:
        """Take one result in bytes; None: out of memory. `kind`: the part of the candidate that
        the estimate ignores."""
        if measured is None:
            self._too_large[kind] = min(planned, self._too_large.get(kind, math.inf))
        else:
            self._errors.append(measured / planned if self._gpu else measured - planned)

    @property
    def error(self) -> float:
        """The factor, or the bytes, by which the planner is wrong (median)."""
        return statistics.median(self._errors or [1.0 if self._gpu else 0.0])

    def predict(self, kind: str, planned: float) -> float:
        """Return the bytes that a candidate will need. If its plan is as large as that of one that
        ran out of memory, it does not fit, even if the others' errors suggest it."""
        expected = planned * self.error if self._gpu else planned + self.error
        least = self._too_large.get(kind, math.inf)
        return max(expected, self.limit * planned / least) if planned >= least else expected

    def fits(self, kind: str, planned: float) -> bool:
        return self.predict(kind, planned) < self.limit
