"""Passes of a step's micro-batches through a model: one by one, or through the stages
of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from kempner.data.batch import MicroBatch
from kempner.model.decoder import Decoder

LossOf = Callable[[Any, MicroBatch], Tensor]
"""Maps a model, to be called as Decoder is, and a micro-batch on its device to the value to
differentiate, fp32 []."""
_T = TypeVar("_T")


def backward_passes(
    model: Decoder,
    loss_of: LossOf,
    micro_batches: Sequence[MicroBatch],
    device: torch.device,
    interrupt: Callable[[], _T | None],
) -> _T | None:
    """Accumulate the gradients of the losses of all micro-batches of a step. Between two of them
    `interrupt()` may end it: a result that is not None is returned at once. A pipeline cannot
    stop in between."""
    if model.pipeline is not None:
        model.pipeline.backward_passes(loss_of, [batch.to(device) for batch in micro_batches])
        return None
    for i, batch in enumerate(micro_batches):
        if i and (answer := interrupt()) is not None:
            return answer
        if model.begin_micro_batch is not None:
            model.begin_micro_batch(last=i == len(micro_batches) - 1, first=i == 0)
        loss_of(model, batch.to(device)).backward()  # type: ignore[no-untyped-call]
    return None


def forward_passes(
    model: Decoder, loss_of: LossOf, micro_batches: Sequence[MicroBatch], device: torch.device
) -> None:
    """Compute the losses of some micro-batches, without gradients."""
    batches = [batch.to(device) for batch in micro_batches]
    if model.pipeline is not None:
        model.pipeline.forward_passes(loss_of, batches)
        return
    for batch in batches:
        loss_of(model, batch)


def at_once(model: Decoder) -> int:
    """Return the number of micro-batches that forward_passes() should get at once."""
    return 1 if model.pipeline is None else model.pipeline.ranks
