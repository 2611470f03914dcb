"""The shuffle: a bijection for every size and seed, and one that looks like chance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kempner.data.permute import epoch_seed, permute

seeds = st.integers(0, 2**64 - 1)


@settings(deadline=None)
@given(st.integers(1, 3000), seeds)
def test_every_value_appears_once(n: int, seed: int) -> None:
    assert sorted(permute(np.arange(n), n, seed)) == list(range(n))


@settings(deadline=None)
@given(st.integers(1, 2**62), seeds, st.data())
def test_large_sizes_stay_in_range_and_collide_nowhere(
    n: int, seed: int, data: st.DataObject
) -> None:
    index = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=50))))
    image = permute(index, n, seed)
    assert image.min() >= 0 and image.max() < n and len(set(image)) == len(index)


@settings(deadline=None)
@given(st.integers(1, 10**6), seeds, st.data())
def test_an_image_depends_on_its_own_index_alone(n: int, seed: int, data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    one_by_one = [int(permute(index[i : i + 1], n, seed)[0]) for i in range(len(index))]
    assert permute(index, n, seed).tolist() == one_by_one


def test_the_order_is_the_one_that_checkpoints_were_made_with() -> None:
    """Resumed runs rely on it: a change here repeats and skips data in every run that exists."""
    assert permute(np.arange(10), 10, 7).tolist() == [4, 0, 7, 2, 6, 8, 1, 5, 3, 9]
    assert epoch_seed(0, 1) == 627405149472732430


def test_positions_are_uniform_over_seeds_and_neighbours_are_torn_apart() -> None:
    n, tries = 12, 6000
    images = np.array([permute(np.arange(n), n, seed) for seed in range(tries)])
    for place in range(n):
        counts = np.bincount(images[:, place], minlength=n)
        chi2 = float(((counts - tries / n) ** 2 / (tries / n)).sum())
        assert chi2 < 40, f"place {place}: {counts}"  # 11 degrees of freedom: p < 1e-4
    followed = float((np.diff(images, axis=1) == 1).mean())
    assert followed == pytest.approx(1 / n, rel=0.1)


def test_epochs_and_seeds_do_not_share_orders() -> None:
    orders = {
        tuple(permute(np.arange(50), 50, epoch_seed(seed, epoch)))
        for seed in range(20)
        for epoch in range(20)
    }
    assert len(orders) == 400
