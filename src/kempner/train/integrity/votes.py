"""Votes on which rank computed wrong numbers, after several ranks computed the same batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kempner.train.integrity.fingerprint import NO_PLACE, Places


class Difference(NamedTuple):
    """The first place where two computations of a batch differ, and the norms of both there."""

    place: int = NO_PLACE
    first: float = 0.0
    second: float = 0.0

    def describe(self, places: Places, first: str, second: str) -> str:
        """Describe the difference. `first`, `second`: when or where each was computed."""
        what = places.name(self.place)
        if self.first == self.second:  # e.g. a sign
            return f"{what} had other bits {first} than {second}, and the same norm {self.first!r}"
        return f"{what} had the norm {self.first!r} {first} and {self.second!r} {second}"


def difference(ours: Tensor, others: Tensor, tolerance: float = 0.0) -> Difference:
    """Compare the rows of two traces. Norms that differ by at most `tolerance`, as a share of the
    larger one, are equal."""
    # Not even the same blocks have run: the traces differ from the first place on.
    if ours.shape != others.shape or not ours[:, 0].equal(others[:, 0]):
        return Difference(0)
    differs = (ours[:, 1:] != others[:, 1:]).any(1)
    if tolerance:
        differs &= relative(ours, others) > tolerance
    if not differs.any():
        return Difference()
    # By place, not by row: gradients are reduced while the backward pass continues.
    i = int(ours[:, 0].masked_fill(~differs, NO_PLACE).argmin())
    return Difference(int(ours[i, 0]), float(_norms(ours)[i]), float(_norms(others)[i]))


def relative(ours: Tensor, others: Tensor) -> Tensor:
    """Return the relative difference of the norms of two traces, as a share of the larger one, fp64
    [N]; 1 where one is not finite."""
    a, b = _norms(ours), _norms(others)
    share = (a - b).abs() / a.maximum(b).clamp(min=torch.finfo(a.dtype).tiny)
    return share.nan_to_num(nan=1.0, posinf=1.0)


def _norms(rows: Tensor) -> Tensor:
    return rows[:, 2].contiguous().view(torch.float64)


class Ballot(NamedTuple):
    """Several computations of one rank's batch: the rank that made each, the owner first, and the
    first difference of each pair, in the order of itertools.combinations()."""

    ranks: tuple[int, ...]
    differences: tuple[Difference, ...]

    def pairs(self) -> list[tuple[int, int, Difference]]:
        """Return each pair of computations and its difference."""
        numbers = itertools.combinations(range(len(self.ranks)), 2)
        return [(*pair, found) for pair, found in zip(numbers, self.differences, strict=True)]


def suspects(ballots: Sequence[Ballot], units: Sequence[int]) -> frozenset[int]:
    """Return the rank that has computed wrong numbers; several if any of them may have, or all
    have; empty if all agree. `units`: the number of each owner's unit, the ranks that exchange
    activations. A fault of one reaches the others, so the earliest place decides."""
    by_unit: dict[int, list[Ballot]] = {}
    for unit, ballot in zip(units, ballots, strict=True):
        by_unit.setdefault(unit, []).append(ballot)
    found = [ranks for unit in by_unit.values() if (ranks := _suspects_of(unit))]
    if not found:
        return frozenset()
    # A rank that is always wrong is suspected for its own batch and for those of others.
    return frozenset.intersection(*found) or frozenset.union(*found)


def _suspects_of(unit: Sequence[Ballot]) -> frozenset[int]:
    """Return the suspects. A rank that differs from itself is at fault. If none does, two
    agreeing ranks outvote a third. Otherwise any may be: a device that is always wrong
    agrees with itself."""
    ranks = unit[0].ranks
    places = {
        pair: min(ballot.pairs()[i][2].place for ballot in unit)
        for i, pair in enumerate(itertools.combinations(range(len(ranks)), 2))
    }
    if min(places.values()) == NO_PLACE:
        return frozenset()
    # Differing computations by the same rank.
    unsteady = {
        p for p, place in places.items() if ranks[p[0]] == ranks[p[1]] and place != NO_PLACE
    }
    # Ranks that another rank confirms.
    agreeing = {
        ranks[side]
        for pair, place in places.items()
        if place == NO_PLACE and ranks[pair[0]] != ranks[pair[1]]
        for side in pair
    }
    if unsteady:
        sides = {side for pair in unsteady for side in pair}
    else:
        sides = {side for side, rank in enumerate(ranks) if rank not in agreeing}
    telling = {p for p in unsteady or places if places[p] != NO_PLACE and sides.intersection(p)}
    # A fault spreads, so only the earliest place tells which rank it began on.
    first = min(places[pair] for pair in telling)
    return frozenset(
        ballot.ranks[side]
        for ballot in unit
        for a, b, difference in ballot.pairs()
        if (a, b) in telling and difference.place == first
        for side in sides.intersection((a, b))
    )
