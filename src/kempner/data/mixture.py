"""The mixture: sample number n -> its source and its index there, a function only of n, the seed
and the mixture. No torch.

A run is cut into segments with fixed shares of the sources: a segment ends where a phase begins, or
where a source reaches its limit of epochs. Within a segment the order of the sources is a repeating
pattern, so that any n is found without those before it.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from kempner.data.permute import shuffled_indices
from kempner.data.source import DataError, Int64, Source

LONGEST_PATTERN = 1 << 14  # if shares need a longer one, counts drift by at most 1 per turn
WEIGHT_PRECISION = 1 << 40

Parts = tuple[int, ...]  # shares of the sources, as multiples of one over their sum


@dataclass(frozen=True)
class Ingredient:
    """The facts about a source that the mixture needs."""

    name: str
    size: int  # samples
    max_epochs: int | None = None
    ordered: bool = False  # read in its own order, not shuffled


@dataclass(frozen=True)
class MixturePhase:
    start: int  # the first sample number
    weights: tuple[float, ...]  # one for each source, any sum


@dataclass(frozen=True)
class Segment:
    """The sample numbers from `start` on, up to the next segment."""

    start: int
    parts: Parts
    base: tuple[int, ...]  # samples of each source before `start`

    @functools.cached_property
    def counts(self) -> Int64:
        """Samples of each source in one turn of the pattern."""
        return self._count(mixture_pattern(self.parts)[0])

    def _count(self, order: Int64) -> Int64:
        return np.bincount(order, minlength=len(self.parts))

    @property
    def shares(self) -> list[float]:
        """Share of each source."""
        return [part / sum(self.parts) for part in self.parts]

    def drawn(self, number: int) -> list[int]:
        """Count the samples of each source before sample number `number`, from the start
        of the run."""
        order, _ = mixture_pattern(self.parts)
        turns, place = divmod(number - self.start, len(order))
        total = np.array(self.base) + turns * self.counts + self._count(order[:place])
        return [int(count) for count in total]


class Mixture:
    """The order of all samples of a run."""

    def __init__(
        self, ingredients: Sequence[Ingredient], phases: Sequence[MixturePhase], seed: int = 0
    ) -> None:
        """`phases`: by rising start, the first at 0."""
        self.ingredients, self.phases, self.seed = tuple(ingredients), tuple(phases), seed
        self.segments: list[Segment] = []
        self.end: int | None = None  # the first sample number for which no source is left
        self._cut()
        self._starts = np.array([segment.start for segment in self.segments], np.int64)

    @classmethod
    def alone(cls, source: Source, seed: int) -> Mixture:
        part = Ingredient(source.name, len(source), ordered=source.ordered)
        return cls([part], [MixturePhase(0, (1.0,))], seed)

    def _cut(self) -> None:
        limits = [
            math.inf if part.max_epochs is None else part.max_epochs * part.size
            for part in self.ingredients
        ]
        base = [0] * len(self.ingredients)
        ends = [phase.start for phase in self.phases[1:]]
        for phase, end in itertools.zip_longest(self.phases, ends):
            start = phase.start
            while end is None or start < end:
                remaining = [limit - used for limit, used in zip(limits, base, strict=True)]
                weights = [
                    w if more > 0 else 0.0 for w, more in zip(phase.weights, remaining, strict=True)
                ]
                if not any(weights):
                    self.end = start
                    return
                segment = Segment(start, whole_parts(weights), tuple(base))
                self.segments.append(segment)
                stop = min((last for last in _used_up(segment, remaining)), default=math.inf)
                stop = stop if end is None else min(stop, end)
                if stop == math.inf:
                    return
                start = int(stop)
                base = segment.drawn(start)

    def segment(self, number: int) -> Segment:
        """Find the segment of a sample number."""
        return self.segments[int(np.searchsorted(self._starts, number, side="right")) - 1]

    def draw(self, position: int, count: int) -> tuple[Int64, Int64]:
        """Return the source and the index in it of sample numbers position ... position + count -
        1. Every epoch of a source is a separate shuffle. Raises DataError at the end."""
        if self.end is not None and position + count > self.end:
            raise DataError(self.too_short(position + count))
        numbers = np.arange(position, position + count, dtype=np.int64)
        if len(self.ingredients) == 1:
            return np.zeros_like(numbers), self._places(0, numbers)
        which = np.searchsorted(self._starts, numbers, side="right") - 1
        sources, running = np.empty_like(numbers), np.empty_like(numbers)
        for i in np.unique(which).tolist():
            segment, mine = self.segments[i], which == i
            order, ranks = mixture_pattern(segment.parts)
            turn, place = np.divmod(numbers[mine] - segment.start, len(order))
            found = order[place]
            sources[mine] = found
            # Earlier uses of the source: before this segment, in this turn, in whole turns.
            running[mine] = np.array(segment.base)[found] + ranks[place]
            running[mine] += turn * segment.counts[found]
        indices = np.empty_like(running)
        for i in np.unique(sources).tolist():
            mine = sources == i
            indices[mine] = self._places(i, running[mine])
        return sources, indices

    def _places(self, source: int, running: Int64) -> Int64:
        """Return the indices of the samples of a source with these running numbers."""
        one = self.ingredients[source]
        return running if one.ordered else shuffled_indices(running, one.size, self.seed)

    def drawn(self, number: int) -> list[int]:
        """Count the samples of each source before sample number `number`."""
        return self.segment(number).drawn(number)

    def phase(self, number: int) -> int:
        """Return the index of a sample number's phase."""
        return bisect.bisect_right([phase.start for phase in self.phases], number) - 1

    def too_short(self, samples: int) -> str:
        names = ", ".join(part.name for part in self.ingredients)
        return (
            f"data: {samples} samples are requested, but with max_epochs the sources ({names}) "
            f"have {self.end}; raise max_epochs, add a source, or lower train.max_steps"
        )

    def uses(self, name: str, samples: int) -> bool:
        """Return whether a source is among the first `samples` samples."""
        return any(name in shares for _, shares in self.past(samples))

    def past(self, samples: int) -> list[tuple[int, dict[str, float]]]:
        """Return (start, shares) of each segment that the first `samples` samples follow from."""
        return [
            (
                segment.start,
                {
                    ingredient.name: share
                    for ingredient, share in zip(self.ingredients, segment.shares, strict=True)
                    if share
                },
            )
            for segment in self.segments
            if segment.start < samples
        ]


def _used_up(segment: Segment, remaining: Sequence[float]) -> list[int]:
    """Return, for each source with a limit, the sample number that would exceed it."""
    order, _ = mixture_pattern(segment.parts)
    exhausted = []
    for i, more in enumerate(remaining):
        if segment.parts[i] and more != math.inf:
            # The turn in which its samples run out, and the place that would take one more.
            turns, rest = divmod(int(more), int(segment.counts[i]))
            place = int(np.flatnonzero(order == i)[rest])
            exhausted.append(segment.start + turns * len(order) + place)
    return exhausted


def whole_parts(weights: Sequence[float]) -> Parts:
    """Express weights as whole parts: exact if at most LONGEST_PATTERN parts suffice (7 : 2 : 1,
    0.35 : 0.65); else of WEIGHT_PRECISION parts, with at least one sample per turn for each."""
    # By decimal digits: 0.1 is 1/10, not the nearest binary fraction.
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    common = math.lcm(*(share.denominator for share in shares))
    if common <= LONGEST_PATTERN:
        return tuple(int(share * common) for share in shares)
    least = WEIGHT_PRECISION // LONGEST_PATTERN
    parts = [max(least, int(share * WEIGHT_PRECISION)) if share else 0 for share in shares]
    # The largest share absorbs all rounding errors.
    parts[parts.index(max(parts))] += WEIGHT_PRECISION - sum(parts)
    return tuple(parts)


@functools.lru_cache(64)
def mixture_pattern(parts: Parts) -> tuple[Int64, Int64]:
    """Build one turn: the source at each place, and how often it came before in the turn.

    Over any prefix each source's count is less than one from its exact share: the quota method
    (Balinski and Young, American Mathematical Monthly 82, 1975). Each place goes to the source with
    the least (count + 1) / share of those that would not exceed their share rounded up.
    """
    whole = sum(parts)
    share = np.array(parts, np.int64)
    counts = np.zeros_like(share)
    order, ranks = (np.empty(min(whole, LONGEST_PATTERN), np.int64) for _ in range(2))
    with np.errstate(divide="ignore"):
        gap: NDArray[np.float64] = 1.0 / share
    due = gap.copy()  # (count + 1) / share
    for place in range(len(order)):
        # In integers: rounding must not break the quota.
        may = counts * whole < (place + 1) * share
        i = int(np.where(may, due, np.inf).argmin())
        order[place], ranks[place] = i, counts[i]
        counts[i] += 1
        due[i] = (counts[i] + 1) * gap[i]
    return order, ranks
