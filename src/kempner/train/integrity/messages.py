"""Checks of sums over ranks that are always wrong in the same way. Recomputation reproduces such an
error, but the sum of all numbers that a rank receives must equal the sum of all sent to it.

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

SUMMED_AT_ONCE = 1 << 24  # elements; torch first copies them to a wider dtype
ROUNDINGS = 64.0  # roundings that make a difference a fault; the number of ranks, if greater


class _Message(NamedTuple):
    group: dist.ProcessGroup
    sent: Tensor  # fp64 [2, R]: sum and sum of squares of the numbers for each of R ranks
    received: Tensor  # fp64 []: the sum of the numbers received
    rounding: float  # of its numbers


class Messages:
    """The reductions of one computation of a step, over groups of more than one rank."""

    def __init__(self) -> None:
        self._messages: list[_Message] = []

    def add(self, received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
        """Add a reduce-scatter: this rank has sent [R n] and received [n]."""
        sums, squares = _sums(sent.view(group.size(), -1))
        total = _sums(received.view(1, -1))[0].sum()
        # Each rank adds to the sum of the ranks before it. If gradients are alike on all ranks,
        # that sum and its rounding error grow with the number of ranks.
        rounding = max(ROUNDINGS, group.size()) * torch.finfo(sent.dtype).eps
        self._messages.append(_Message(group, torch.stack((sums, squares)), total, rounding))

    def are_wrong(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether the sum that this rank has received differs from the sum sent, or that of
        its fp32 gradients from the sum received. `parameters`: those whose gradients come from
        these messages; if empty, gradients are not compared. Collective."""
        received, expected, squares, roundings = [], [], [], []
        # All ranks use the groups in the same order: each group needs an all-reduce.
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
        # First each message alone: a sum over all of them hides an error among more roundings.
        if any(not _close(*row) for row in rows):
            return True
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
        if not gradients or not received:
            return False
        # Numbers that arrived intact may still have changed on their way into the gradients.
        total = math.fsum(float(_sums(gradient.reshape(1, -1))[0]) for gradient in gradients)
        return not _close(total, math.fsum(received), math.fsum(squares), max(roundings))


def _sums(rows: Tensor) -> Tensor:
    """Return the sum of each row and the sum of its squares, fp64 [2, R]."""
    found = torch.zeros(2, len(rows), dtype=torch.float64, device=rows.device)
    for piece in torch.split(rows, max(1, SUMMED_AT_ONCE // len(rows)), 1):
        found[0] += piece.sum(1, dtype=torch.float64)
        found[1] += torch.linalg.vector_norm(piece, dim=1, dtype=torch.float64).square()
    return found


def _close(received: float, expected: float, squares: float, rounding: float) -> bool:
    """Compare sums. Non-finite numbers pass: their step is skipped anyway."""
    # Rounding errors are independent: their sum grows with the root of the sum of squares.
    difference = received - expected
    return not math.isfinite(difference) or abs(difference) <= rounding * math.sqrt(squares)
