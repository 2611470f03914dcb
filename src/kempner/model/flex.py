"""flex_attention, loaded if all other kernels need a T x T mask: for documents and windows with
capped scores, or in fp32, on a GPU. Shapes: T tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@functools.cache  # one function per cap: torch.compile recognises it
def score_change(softcap: float) -> Callable[..., Tensor]:
    """Make flex_attention's score function for the same cap."""

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@functools.cache
def compiled_flex() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return flex_attention, compiled even if its caller is not, because only then is it a fused
    kernel, and create_block_mask, which when compiled never materialises the T x T mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from kempner.jobs.system.compiler import keep_private

    keep_private()
    return torch.compile(flex_attention), torch.compile(create_block_mask)


def block_mask(
    rows: int | None, length: int, window: int | None, index: Tensor | None, device: torch.device
) -> BlockMask:
    """Make the mask of the tiles that flex_attention computes. `rows`: None if all rows share one
    pattern; `index`: see Documents."""

    def seen(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        keep = query >= key
        if window is not None:
            keep = keep & (query - key < window)
        if index is not None:
            keep = keep & (index[row, query] == index[row, key])
        return keep

    # None: all heads see the same keys.
    create = compiled_flex()[1]
    return create(seen, rows, None, length, length, device=device)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=4)  # made once, not in every step
def causal_blocks(length: int, window: int | None, device: torch.device) -> BlockMask:
    return block_mask(None, length, window, None, device)
