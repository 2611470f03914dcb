"""A key-value cache for text generation, so that each token is computed once.

B rows of a forward pass, T tokens, D width, H query heads, K key-value heads, E head width, C
tokens that a row holds.

The active texts are rows 0 to n - 1 of every layer, without gaps: a step reads slices of the cache
and copies nothing. A text that joins becomes row n, computed or copied from another row; when one
leaves, the last row moves into its place. Prompts and slices have whole blocks of CACHE_BLOCK
tokens, so that kernels planned or tuned per shape meet few shapes, not a new one with every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kempner.model.attention import Visible, attend
from kempner.model.config import ModelConfig

CACHE_BLOCK = 64  # mask sizes of GPU kernels must be multiples of 8


def whole_blocks(count: int, most: int) -> int:
    """Round `count` tokens up to whole blocks, but at most `most`."""
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
        """`fixed`: every forward pass has the shape of a full cache. A matrix product sums in
        another order with more rows, and attention with more keys; a fixed shape makes each row's
        results independent of the other rows."""
        shape = (cfg.n_layers, slots, cfg.kv_heads, length, cfg.resolved_head_dim)
        # Zeros, not uninitialised memory: masked values count 0 times, and 0 times NaN is NaN.
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

    def advance(self) -> list[int]:
        """Count one more token in each row, which the next TokenStep reads; returns
        the new lengths."""
        assert max(self.lengths) < self.length
        self.lengths = [count + 1 for count in self.lengths]
        return self.lengths

    def span(self, lengths: Sequence[int]) -> tuple[int, int]:
        """Return the range of places visible to the newest token of rows of these lengths."""
        if self.fixed:
            return 0, self.length
        window = self.length if self.window is None else self.window
        # The shortest row decides: its newest token sees furthest back.
        low = max(0, min(lengths) - window) // CACHE_BLOCK * CACHE_BLOCK
        return low, whole_blocks(max(lengths), self.length)

    def copy(self, source: int, count: int) -> None:
        """Add a row that begins with the first `count` tokens of row `source`, which may have left:
        its contents stay until a new row takes its place."""
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
    """The rows of new texts that a forward pass reads from their first token on."""

    def __init__(self, cache: KVCache, first: int, counts: Sequence[int]) -> None:
        """`counts`: tokens of each new row."""
        rows = slice(first, len(cache.lengths))
        self._keys, self._values = cache.keys[:, rows], cache.values[:, rows]
        # [B]: each new text's last token, before its padding.
        self._last = torch.tensor(counts, device=cache.keys.device) - 1

    def layer(self, number: int) -> LayerCache:
        return LayerCache(self._keys[number], self._values[number])

    def last_tokens(self, x: Tensor) -> Tensor:
        """Select each row's last token, without padding, from x [B, T, D]: [B, 1, D]."""
        return x[torch.arange(len(x), device=x.device), self._last].unsqueeze(1)


class LayerCache(NamedTuple):
    """The rows of one forward pass in one layer."""

    keys: Tensor  # [B, K, length, E]
    values: Tensor  # [B, K, length, E]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
        """Store k and v [B, K, T, E], then attend with q [B, H, T, E]: [B, H, T, E].

        Keys and values of padding are overwritten before any token can see them.
        """
        self.keys[:, :, : k.shape[2]] = k
        self.values[:, :, : v.shape[2]] = v
        return attend(q, k, v, visible)
