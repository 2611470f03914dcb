"""Mixtures: exact shares over any beginning, and an order that follows from the number alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kempner.data.mixture import Ingredient, Mixture, Phase
from kempner.data.permute import shuffled
from kempner.data.sidecar import DataError

WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8)


def mixture(*phases: tuple[int, list[float]], sizes: list[int], caps: list[int | None]) -> Mixture:
    names = [Ingredient(f"s{i}", *rest) for i, rest in enumerate(zip(sizes, caps, strict=True))]
    return Mixture(names, [Phase(start, tuple(weights)) for start, weights in phases], seed=3)


def free(*phases: tuple[int, list[float]]) -> Mixture:
    count = len(phases[0][1])
    return mixture(*phases, sizes=[10**6] * count, caps=[None] * count)


def largest_deviation(sources: np.ndarray, weights: list[float]) -> float:
    """Over all beginnings: the samples of a source, less its exact share."""
    exact = np.arange(1, len(sources) + 1)[:, None] * np.array(weights) / sum(weights)
    counts = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    return float(np.abs(counts - exact).max())


@settings(deadline=None, max_examples=20)
@given(WEIGHTS)
def test_counts_are_within_one_of_the_exact_share_over_any_beginning(weights: list[float]) -> None:
    assert largest_deviation(free((0, weights)).draw(0, 10_000)[0], weights) < 1 + 1e-6


@settings(deadline=None, max_examples=10)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 10**12))
def test_shares_in_whole_numbers_never_drift(weights: list[int], far: int) -> None:
    mixed = free((0, [float(weight) for weight in weights]))
    exact = np.array(weights) * far / sum(weights)
    assert np.abs(np.array(mixed.drawn(far)) - exact).max() < 1 + 1e-3
    assert sum(mixed.drawn(far)) == far


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 400), st.lists(st.floats(0, 9), min_size=3, max_size=3)),
             max_size=3),
    st.integers(0, 2000),
    st.integers(0, 300),
    st.lists(st.one_of(st.none(), st.integers(1, 4)), min_size=2, max_size=2),
)  # fmt: skip
def test_any_part_of_the_order_is_that_of_the_whole(
    changes: list[tuple[int, list[float]]], position: int, count: int, caps: list[int | None]
) -> None:
    """Phases, limits and epochs; each source's own order is that of a run on it alone."""
    starts = itertools.accumulate(start for start, _ in changes)
    later = [(start, w) for start, (_, w) in zip(starts, changes, strict=True) if any(w)]
    mixed = mixture((0, [1.0, 2.0, 1.5]), *later, sizes=[53, 71, 40], caps=[None, *caps])
    if mixed.end is not None and position + count > mixed.end:
        with pytest.raises(DataError, match="raise max_epochs"):
            mixed.draw(position, count)
        return
    sources, indices = mixed.draw(0, position + count)
    again = mixed.draw(position, count)
    assert again[0].tolist() == sources[position:].tolist()
    assert again[1].tolist() == indices[position:].tolist()
    for i, ingredient in enumerate(mixed.ingredients):
        mine = indices[sources == i]
        assert mine.tolist() == shuffled(np.arange(len(mine)), ingredient.size, 3).tolist()
        assert mixed.drawn(position)[i] == (sources[:position] == i).sum()
        assert len(mine) <= ingredient.size * (ingredient.max_epochs or 99)


def test_each_phase_has_its_exact_shares() -> None:
    phases = [(0, [7.0, 2.0, 1.0]), (1003, [0.0, 1.0, 1.0]), (2500, [1.0, 0.5, 4.1])]
    sources, _ = free(*phases).draw(0, 12_500)
    ends = [*(start for start, _ in phases[1:]), 12_500]
    for (start, weights), end in zip(phases, ends, strict=True):
        assert largest_deviation(sources[start:end], weights) < 1


def test_a_source_that_is_used_up_leaves_its_share_to_the_others() -> None:
    mixed = mixture((0, [1.0, 1.0, 2.0]), sizes=[10, 100, 100], caps=[2, None, 1])
    sources, indices = mixed.draw(0, 1000)
    mine = indices[sources == 0]
    assert len(mine) == 20 and sorted(mine[:10]) == sorted(mine[10:]) == list(range(10))
    first = int(np.flatnonzero(sources == 0)[-1])
    assert 76 <= first < 80
    rest = sources[first + 1 : first + 61]  # 1 : 2 then
    assert abs((rest == 1).sum() - 20) <= 1 and abs((rest == 2).sum() - 40) <= 1
    assert (sources == 2).sum() == 100 and set(sources[400:]) == {1}
    assert mixed.end is None and len(mixed.segments) == 3


def test_when_all_are_used_up_the_mixture_ends() -> None:
    mixed = mixture((0, [1.0, 3.0]), sizes=[10, 10], caps=[1, 3])
    assert mixed.end == 40
    assert np.bincount(mixed.draw(0, 40)[0]).tolist() == [10, 30]
    with pytest.raises(DataError, match="have 40; raise max_epochs"):
        mixed.draw(30, 11)
