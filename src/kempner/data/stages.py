"""Stages of a run: samples of each step, and the sequences each sample is cut into. No torch.

A sample is always train.seq_len tokens. A shorter sequence length cuts it into equal pieces, which
are separate rows: sample numbers, and so the position of a run, do not change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

MAX_RISES = 1000  # of the batch; each is a stage in lists


class RampStage(NamedTuple):
    """The steps from `start` on, up to the next stage."""

    start: int
    batch: int  # samples of a global step
    pieces: int = 1  # sequences that each sample is cut into


def ramp_stages(
    batch: int, batch_ramp: Sequence[int] | None, pieces: Sequence[int], over: int
) -> list[RampStage]:
    """Compute the stages. `batch_ramp`: samples of the first step, increment, and the step that
    first has `batch`. `pieces`: by rising sequence length, each for an equal part of the first
    `over` steps; 1 after them."""
    first, increment, steps = batch_ramp or (batch, 1, 0)
    rises = (batch - first) // increment
    # Round up, so that the last rise is at the step given by the option.
    batches = [(-(-i * steps // max(1, rises)), first + i * increment) for i in range(rises + 1)]
    cuts = [(-(-i * over // len(pieces)), each) for i, each in enumerate(pieces)]
    cuts.append((over if pieces else 0, 1))
    starts = sorted({start for start, _ in (*batches, *cuts)})
    return [RampStage(at, _last(batches, at), _last(cuts, at)) for at in starts]


def ramp_problems(
    batch: int, batch_ramp: Sequence[int] | None, seq_len: int, seq_len_ramp: Sequence[int] | None
) -> list[str]:
    """List problems of the ramps of [train] for a global batch of `batch` sequences
    of `seq_len` tokens."""
    problems = []
    if batch_ramp is not None:
        first, increment, _ = batch_ramp
        rises, rest = divmod(batch - first, increment)
        if rises < 1 or rest:
            problems.append(
                f"train.batch_ramp = {list(batch_ramp)}: from {first} by {increment} does not lead "
                f"to the global batch of {batch} sequences; give an increment that divides the "
                "difference"
            )
        elif rises > MAX_RISES:
            problems.append(
                f"train.batch_ramp = {list(batch_ramp)}: grows {rises} times; give a larger "
                f"increment, for at most {MAX_RISES}"
            )
    if seq_len_ramp is not None:
        ratio, rest = divmod(seq_len, seq_len_ramp[0])
        if rest or ratio < 2 or ratio & (ratio - 1):
            problems.append(
                f"train.seq_len_ramp = {list(seq_len_ramp)}: doubling {seq_len_ramp[0]} does not "
                f"lead to train.seq_len = {seq_len}; give a half, a quarter, an eighth, ... of it"
            )
    return problems


def _last(values: Sequence[tuple[int, int]], step: int) -> int:
    """Return the newest value at a step."""
    return [value for start, value in values if start <= step][-1]


def stage_at(all_stages: Sequence[RampStage], step: int) -> RampStage:
    return [stage for stage in all_stages if stage.start <= step][-1]


def samples_between(all_stages: Sequence[RampStage], begin: int, end: int) -> int:
    """Count the samples of the steps `begin` to `end` - 1; negative if `end` comes first."""
    return _samples_before(all_stages, end) - _samples_before(all_stages, begin)


def _samples_before(all_stages: Sequence[RampStage], step: int) -> int:
    stops = [*(stage.start for stage in all_stages[1:]), math.inf]
    return sum(
        stage.batch * int(max(0, min(step, stop) - stage.start))
        for stage, stop in zip(all_stages, stops, strict=True)
    )


def step_of_sample(all_stages: Sequence[RampStage], begin: int, samples: int) -> int:
    """Return the first step that comes at least `samples` samples after step `begin`."""
    total = _samples_before(all_stages, begin) + samples
    for stage, later in pairwise((*all_stages, None)):
        assert stage is not None
        step = stage.start + -((_samples_before(all_stages, stage.start) - total) // stage.batch)
        if later is None or step <= later.start:
            return step
    raise AssertionError("the last stage has no end")
