"""Cross entropy over the vocabulary, in chunks of tokens, so that the logits of a whole batch never
exist at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORE = -100  # a target that does not count: padding, another's words
CHUNK_LOGITS = 1 << 27  # logits in one chunk: 0.5 GiB in fp32


def _chunk_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        F.linear(x, weight).float(), targets, ignore_index=IGNORE, reduction="sum"
    )


def cross_entropy_sum(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log p(target) over the targets that are not -100, fp32 [].

    x [N, D], weight [V, D], targets int64 [N]. A sum and a count travel better than a mean: ranks
    and micro-batches with different numbers of real tokens add up to the exact mean, and one
    without any adds 0, not NaN.
    """
    rows = max(1, CHUNK_LOGITS // weight.shape[0])
    if x.shape[0] <= rows:
        return _chunk_loss(x, weight, targets)
    parts = [
        checkpoint(_chunk_loss, part, weight, labels, use_reentrant=False, preserve_rng_state=False)
        for part, labels in zip(torch.split(x, rows), torch.split(targets, rows), strict=True)
    ]
    return torch.stack(parts).sum()
