"""The plan of the soak: the seed alone decides it."""

import itertools

from benchmarks.soak import GAP, KINDS, draw


def test_plan() -> None:
    plan = draw(40, seed=3)
    assert plan == draw(40, seed=3) != draw(40, seed=4)
    assert {fault.kind for fault in plan[:20]} == set(KINDS)
    steps = [0.0, *(fault.step for fault in plan)]
    assert all(b - a >= GAP[0] - 0.1 for a, b in itertools.pairwise(steps))
