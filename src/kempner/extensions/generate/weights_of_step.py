"""Weights that are multiplied in one product, and heads that are rotated together, for the plain
and the compiled step of one token. Shapes: as in token_step.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

Norms = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


# A tensor made in inference mode cannot be updated in place outside it.
@torch.inference_mode(False)
@torch.no_grad()
def join_weights(parts: Sequence[Tensor]) -> Tensor:
    """Return the concatenation of all parts, which become (or already are) views of it.

    On a CPU a matrix is stored by columns: MKL multiplies a vector by it up to three times as fast
    (benchmarks/generate.py, AMD EPYC).
    """
    first, sizes = parts[0], [len(part) for part in parts]
    columns = first.ndim == 2 and first.device.type == "cpu"
    stride = (1, sum(sizes)) if columns else first.new_empty((1, *first.shape[1:])).stride()
    places = [first.data_ptr() + at * stride[0] * first.itemsize for at in accumulate(sizes)]
    memory = {part.untyped_storage().data_ptr() for part in parts}
    # They are views already if an earlier step of this model joined them.
    if (
        len(memory) == 1
        and all(part.stride() == stride for part in parts)
        and [part.data_ptr() for part in parts[1:]] == places[:-1]
    ):
        return first.detach().as_strided((sum(sizes), *first.shape[1:]), stride)
    whole = torch.cat([part.detach() for part in parts])
    if columns:
        whole = whole.t().contiguous().t()
    for part, view in zip(parts, torch.split(whole, sizes), strict=True):
        part.data = view
    return whole


def turn_heads(
    heads: Tensor, rope: Tensor, kv_heads: int, norms: Norms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [B, H, E], k and v [B, K, E] of all heads [B, H + 2 K, E]. `norms`: of q and k."""
    qk, v = heads[:, :-kv_heads], heads[:, -kv_heads:]
    if norms is not None:
        q, k = qk[:, :-kv_heads], qk[:, -kv_heads:]
        qk = torch.cat((norms[0](q), norms[1](k)), 1)
    # Queries and keys at once, and in fp32 as in apply_rope().
    qk = qk.float()
    half = heads.shape[-1] // 2
    turned = torch.addcmul(qk * rope[0], qk.roll(half, -1), rope[1]).type_as(v)
    return turned[:, :-kv_heads], turned[:, -kv_heads:], v
