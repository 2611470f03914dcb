"""Who is slow, and since when."""

from __future__ import annotations

import torch
from torch import nn

from kempner.resilience.straggler import WINDOW, BlockClock, Stragglers


def test_a_slow_rank_is_named_ever_less_often_and_when_it_is_well_again() -> None:
    said: list[str] = []
    watch = Stragglers(["one", "one", "two", "two"], said.append)
    for step in range(1, 9 * WINDOW + 1):
        slow = 0.35 if WINDOW < step <= 8 * WINDOW else 0.1
        watch.update(step, [0.1, 0.1, slow, 0.12])
    first = WINDOW + 1
    named = [f"rank 2 on two is 3.5 times slower than the median rank since step {first}"] * 3
    assert [text.partition(" (")[0] for text in said[:3]] == [f"straggler: {x}" for x in named]
    assert "(250 ms a step)" in said[0]
    well = f"as fast as the others again, after steps {first} to {9 * WINDOW}"
    assert said[3:] == [f"straggler: rank 2 on two is {well}"]


def test_one_slow_step_is_no_straggler() -> None:
    said: list[str] = []
    watch = Stragglers(["one", "two"], said.append)
    for step in range(1, 3 * WINDOW + 1):
        watch.update(step, [0.1, 5.0 if step % 9 == 0 else 0.1])
    assert said == []


def test_the_clock_scales_one_block_to_all_of_them() -> None:
    blocks = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])
    clock = BlockClock(blocks, torch.device("cpu"))
    for _ in range(2):  # what is taken is of the step before
        blocks[0](torch.randn(512, 64))
        assert clock.take() >= 0.0
    blocks[1](torch.randn(512, 64))
    assert clock.take() > 0.0
    assert clock.take() == 0.0  # the first block has done nothing in the third step
