"""Sums over ranks that are always wrong in the same way: computed again they stay the same, but the
sum of all numbers that a rank receives is the sum of all that were sent to it.

(Algorithm-based fault tolerance: Huang and Abraham, IEEE Transactions on Computers C-33, 1984.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kempner.checkpoint.format.plan import local_part

SUMMED_AT_ONCE = 1 << 24  # elements; torch first copies them to the wider dtype
ROUNDINGS = 64.0  # a difference of so many roundings is a fault; of as many as ranks, if more


class _Message(NamedTuple):
    group: dist.ProcessGroup
    sent: Tensor  # fp64 [2, R]: sum, and sum of squares, of what goes to each of R ranks
    received: Tensor  # fp64 []: the sum of what came
    rounding: float  # of its numbers


class Messages:
    """The reductions of one computation of a step, over groups of more than one rank."""

    def __init__(self) -> None:
        self._messages: list[_Message] = []

    def add(self, received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
        """Add a reduce-scatter: sent [R n] of this rank, received [n]."""
        sums, squares = _sums(sent.view(group.size(), -1))
        total = _sums(received.view(1, -1))[0].sum()
        # Each rank adds to the sum of those before it: where gradients are alike on all ranks, that
        # sum, and what rounding takes from it, grows with their number.
        rounding = max(ROUNDINGS, group.size()) * torch.finfo(sent.dtype).eps
        self._messages.append(_Message(group, torch.stack((sums, squares)), total, rounding))

    def are_wrong(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether this rank has received another sum than was sent, or its fp32 gradients
        have another one than it has received. `parameters`: of which each has gradients by these
        messages; none: gradients are not compared. All ranks call it."""
        received, expected, squares, roundings = [], [], [], []
        # In the order of their first use, which is that of all ranks: each group has an all-reduce.
        for group in dict.fromkeys(message.group for message in self._messages):
            ours = [message for message in self._messages if message.group == group]
            sums = torch.stack([message.sent for message in ours])  # [M, 2, R]
            dist.all_reduce(sums, group=group)
            mine = sums[..., dist.get_rank(group)].cpu()
            expected += mine[:, 0].tolist()
            squares += mine[:, 1].tolist()
            received += torch.stack([message.received for message in ours]).tolist()
            roundings += [message.rounding for message in ours]
        rows = zip(received, expected, squares, roundings, strict=True)
        # First message by message: a sum over all of them hides an error among more roundings.
        if any(not _close(*row) for row in rows):
            return True
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
        if not gradients or not received:
            return False
        # What arrived right may still have been changed on its way into the gradients.
        total = math.fsum(float(_sums(gradient.reshape(1, -1))[0]) for gradient in gradients)
        return not _close(total, math.fsum(received), math.fsum(squares), max(roundings))


def _sums(rows: Tensor) -> Tensor:
    """Return the sum of each row, and that of its squares, fp64 [2, R]."""
    found = torch.zeros(2, len(rows), dtype=torch.float64, device=rows.device)
    for piece in torch.split(rows, max(1, SUMMED_AT_ONCE // len(rows)), 1):
        found[0] += piece.sum(1, dtype=torch.float64)
        found[1] += torch.linalg.vector_norm(piece, dim=1, dtype=torch.float64).square()
    return found


def _close(received: float, expected: float, squares: float, rounding: float) -> bool:
    """Compare sums. Numbers that are not finite are not for this: the step is skipped."""
    # Errors of rounding are independent: their sum grows with the root of the sum of squares.
    difference = received - expected
    return not math.isfinite(difference) or abs(difference) <= rounding * math.sqrt(squares)
