"""Causal attention: which keys a query sees, and the kernel that computes it.

Shapes: B rows, T tokens, H query heads, K key-value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

try:  # the flash kernel over sequences of different length; older torch lacks its window
    from torch.nn.attention.varlen import varlen_attn

    HAS_VARLEN = {"window_size", "enable_gqa"} <= varlen_attn.__annotations__.keys()
except ImportError:
    HAS_VARLEN = False


@dataclass(frozen=True)
class Documents:
    """Several documents packed into each row: a token sees none but its own document's."""

    index: Tensor  # int32 [B, T]: which document of its row a token belongs to; it never falls
    starts: Tensor  # int32 [N + 1]: where each begins in the flattened B * T tokens, and B * T
    positions: Tensor | None  # int64 [B, T]: from 0 in each document; None: from 0 in each row

    @classmethod
    def of(cls, index: Tensor, reset_positions: bool) -> Documents:
        """From `index` alone, on the CPU."""
        rows, length = index.shape
        first = torch.ones_like(index, dtype=torch.bool)
        first[:, 1:] = index[:, 1:] != index[:, :-1]
        starts = torch.cat((first.flatten().nonzero().squeeze(1), torch.tensor([rows * length])))
        positions = None
        if reset_positions:
            begins = starts[:-1].repeat_interleave(starts.diff())
            positions = (torch.arange(rows * length) - begins).view(rows, length)
        return cls(index.int(), starts.int(), positions)

    def map(self, change: Callable[[Tensor], Tensor]) -> Documents:
        positions = None if self.positions is None else change(self.positions)
        return Documents(change(self.index), change(self.starts), positions)


@dataclass(frozen=True)
class Visible:
    """Which keys each query sees, made once for all layers of a forward pass."""

    window: int | None  # so many keys, its own among them; None: all before it
    starts: Tensor | None = None  # for varlen_attn: of the documents, or of the rows
    mask: Tensor | None = None  # bool [B or 1, 1, T, T], True: seen; where no kernel does without


def visible(
    tokens: Tensor, window: int | None, documents: Documents | None, flash: bool
) -> Visible:
    """The pattern for int64 tokens [B, T]. `flash`: activations have a dtype of the flash kernel.

    Plain causal attention needs no tensor at all. On a GPU, documents and windows take the
    variable-length flash kernel, which skips what a query does not see; elsewhere a dense mask of
    T x T.
    """
    rows, length = tokens.shape
    if window is not None and window >= length:
        window = None
    if window is None and documents is None:
        return Visible(None)
    device = tokens.device
    if device.type == "cuda" and flash and HAS_VARLEN:
        if documents is not None:
            return Visible(window, starts=documents.starts)
        ends = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device)
        return Visible(window, starts=ends)
    at = torch.arange(length, device=device)
    behind = at[:, None] - at  # [T, T]: how far a key lies behind its query
    seen = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
    mask = seen[None, None]
    if documents is not None:
        index = documents.index
        mask = mask & (index[:, None, :, None] == index[:, None, None, :])
    return Visible(window, mask=mask)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Visible) -> Tensor:
    """Attention of q [B, H, T, E] over k and v [B, K, T, E]: [B, H, T, E]."""
    grouped = q.shape[1] != k.shape[1]
    if seen.starts is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen.mask, is_causal=seen.mask is None, enable_gqa=grouped
        )
    rows, _, length, _ = q.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [B * T, heads, E]
    left = -1 if seen.window is None else seen.window - 1
    # A document never leaves its row, so that T is a bound for its length that the host knows.
    y: Tensor = varlen_attn(  # type: ignore[assignment]  # a tuple only if asked for more
        q, k, v, seen.starts, seen.starts, length, length, window_size=(left, 0), enable_gqa=grouped
    )
    return y.view(rows, length, *y.shape[1:]).transpose(1, 2)
