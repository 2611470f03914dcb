"""First-fit decreasing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kempner.data.packing import ROW_BLOCK, first_fit_decreasing


def by_the_book(lengths: list[int], room: int) -> list[list[int]]:
    rows: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        for row in rows:
            if sum(lengths[other] for other in row) + lengths[item] <= room:
                row.append(item)
                break
        else:
            rows.append([item])
    return rows


@pytest.fixture(params=[2, ROW_BLOCK], autouse=True, scope="module")
def block(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rows that are looked at together: a few of these cases fill more than one such block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kempner.data.packing.ROW_BLOCK", request.param)
        yield


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 30).flatmap(
    lambda room: st.tuples(st.lists(st.integers(1, room), max_size=60), st.just(room))
))  # fmt: skip
def test_it_packs_as_first_fit_decreasing_does(case: tuple[list[int], int]) -> None:
    lengths, room = case
    packing = first_fit_decreasing(np.array(lengths, np.int64), room)
    assert len(packing.order) == len(lengths)
    found = [packing.order[a:b].tolist() for a, b in pairwise(packing.starts)]
    assert found == by_the_book(lengths, room)
