"""The keys and values of texts that are being generated, so that each token is computed once.

B rows of a forward pass, T tokens, D width, H query heads, K key-value heads, E head width, C
tokens that a row holds.

The texts in work are the rows 0 to n - 1 of every layer, without gaps: a step reads slices of the
cache and copies nothing. A text that joins becomes row n, computed or copied from another row; when
one leaves, the last row moves into its place. Prompts and slices have whole blocks of CACHE_BLOCK
tokens: a kernel that is planned or tuned for each shape meets few shapes, not another one with
every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kempner.model.attention import Visible, attend, capped_attention
from kempner.model.config import ModelConfig

CACHE_BLOCK = 64  # masks of a GPU's kernels want a multiple of 8


def whole_blocks(count: int, most: int) -> int:
    """`count` tokens rounded up to whole blocks, but not over `most`."""
    return min(-(-count // CACHE_BLOCK) * CACHE_BLOCK, most)


class KVCache:
    """Preallocated keys and values for `slots` texts of up to `length` tokens each: 2 n_layers
    slots K length E elements."""

    def __init__(
        self,
        cfg: ModelConfig,
        slots: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype,
        fixed: bool = False,
    ) -> None:
        """`fixed`: every forward pass has the same shape, that of a full cache. A product of
        matrices adds in another order when it has more rows, and attention when it has more keys:
        so nothing that a row computes depends on who else is there."""
        shape = (cfg.n_layers, slots, cfg.kv_heads, length, cfg.resolved_head_dim)
        # Zeros, not what the memory happens to hold: what is masked counts 0 times, and 0 times
        # NaN is NaN.
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.slots, self.length, self.window = slots, length, cfg.sliding_window
        self.fixed = fixed
        self.lengths: list[int] = []  # tokens that each row holds

    def join(self, counts: Sequence[int]) -> CacheRows:
        """Add rows for texts of `counts` tokens. The next forward pass reads them as tokens [B, T],
        padded on the right to whole blocks for the longest text."""
        assert len(self.lengths) + len(counts) <= self.slots and max(counts) <= self.length
        self.lengths += counts
        return CacheRows(self, len(self.lengths) - len(counts), counts)

    def step(self) -> CacheRows:
        """Select all rows. The next forward pass reads one more token of each: tokens [B, 1]."""
        assert max(self.lengths) < self.length
        self.lengths = [count + 1 for count in self.lengths]
        return CacheRows(self, 0, None)

    def copy(self, source: int, count: int) -> None:
        """Add a row that begins with the first `count` tokens of row `source`, which may have left
        already: its contents stay until a new row takes its place."""
        row = len(self.lengths)
        self.lengths.append(count)
        if row != source:
            for part in (self.keys, self.values):
                part[:, row, :, :count] = part[:, source, :, :count]

    def leave(self, row: int) -> None:
        """Free a row; the last one moves into its place."""
        length = self.lengths.pop()
        last = len(self.lengths)
        if row == last:
            return
        self.lengths[row] = length
        for part in (self.keys, self.values):
            part[:, row, :, :length] = part[:, last, :, :length]


class CacheRows:
    """The rows of one forward pass: where their new tokens stand, and which keys these see."""

    def __init__(self, cache: KVCache, first: int, counts: Sequence[int] | None) -> None:
        """`counts`: tokens of each new row; None: one more token for each."""
        rows = slice(first, cache.slots if cache.fixed and counts is None else len(cache.lengths))
        self._keys, self._values = cache.keys[:, rows], cache.values[:, rows]
        self._last: Tensor | None = None  # [B]: each new text's last token, before its padding
        self.positions: Tensor | None = None  # int64 [B, T]; None: each row from 0
        self.step: Step | None = None
        device = cache.keys.device
        if counts is None:
            # A free row writes to the last position: what is there is never copied.
            free = [cache.length] * (cache.slots - len(cache.lengths)) if cache.fixed else []
            self.positions = torch.tensor([*cache.lengths, *free], device=device).unsqueeze(1) - 1
            self.step = next_step(cache, self.positions)
        else:
            self._last = torch.tensor(counts, device=device) - 1

    def layer(self, number: int) -> LayerCache:
        return LayerCache(self._keys[number], self._values[number], self.step)

    def last_tokens(self, x: Tensor) -> Tensor:
        """Select each row's last token, without padding, from x [B, T, D]: [B, 1, D]."""
        if self._last is None:
            return x[:, -1:]
        return x[torch.arange(len(x), device=x.device), self._last].unsqueeze(1)


class Step(NamedTuple):
    """A step of one new token a row: where it is written and which positions it sees."""

    at: int | tuple[Tensor, slice, Tensor]  # position, the same in all rows, or an index [B, K, E]
    seen: slice  # of the C positions
    mask: Tensor  # [B, 1, 1, C], 0 or -inf


def next_step(cache: KVCache, positions: Tensor) -> Step:
    """Plan a step for new tokens at `positions` [B, 1]."""
    lengths, window, device = cache.lengths, cache.window, positions.device
    low = 0 if window is None else max(0, min(lengths) - window) // CACHE_BLOCK * CACHE_BLOCK
    high = whole_blocks(max(lengths), cache.length)
    if cache.fixed:
        low, high = 0, cache.length
    keys = torch.arange(low, high, device=device)
    hidden = keys > positions  # [B, C]
    if window is not None:
        hidden |= keys <= positions - window
    mask = torch.zeros(hidden.shape, device=device, dtype=cache.keys.dtype)
    mask.masked_fill_(hidden, -torch.inf)
    rows = torch.arange(len(positions), device=device)
    alike = not cache.fixed and len(set(lengths)) == 1
    at = lengths[0] - 1 if alike else (rows, slice(None), positions.squeeze(1))
    return Step(at, slice(low, high), mask[:, None, None])


class LayerCache(NamedTuple):
    """The rows of one forward pass in one layer."""

    keys: Tensor  # [B, K, length, E]
    values: Tensor  # [B, K, length, E]
    step: Step | None  # None: the texts are new

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
        """Store k and v [B, K, T, E], then attend with q [B, H, T, E]: [B, H, T, E].

        Keys and values of padding are overwritten before any token can see them.
        """
        if self.step is None:
            self.keys[:, :, : k.shape[2]] = k
            self.values[:, :, : v.shape[2]] = v
            return attend(q, k, v, visible)
        at, span, mask = self.step
        index = (slice(None), slice(None), at) if isinstance(at, int) else at
        self.keys[index] = k.squeeze(2)
        self.values[index] = v.squeeze(2)
        # The query heads of one key-value head stand side by side as if they were its tokens: no
        # key is copied or read twice.
        grouped = q.view(q.shape[0], k.shape[1], -1, q.shape[3])  # [B, K, H / K, E]
        keys, values = self.keys[:, :, span], self.values[:, :, span]
        if visible.softcap is not None:
            return capped_attention(grouped, keys, values, mask, visible.softcap).view(q.shape)
        y = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return y.view(q.shape)
