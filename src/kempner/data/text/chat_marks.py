"""Marks on the tokens of chat data: in the loss, end of a conversation.

Between the worker that encodes a unit and its shard, both are bits above the id, so that everything
on the way handles one array, as for text. On disk the ids are an ordinary shard, beside
`.loss_mask.npy`, uint8 [tokens], and `.ends.npy`, int64 [conversations], the end of each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kempner.data.text.tokenizer import Span, TokenArray

IN_LOSS_BIT, LAST_BIT = np.uint32(1 << 31), np.uint32(1 << 30)
ID = np.uint32((1 << 30) - 1)
GROUP = {"chat": 1, "preference": 2}  # conversations that belong together


def files_of_shard(shard: Path) -> dict[str, Path]:
    """Map content to file: the files beside a shard."""
    return {what: shard.with_suffix(f".{what}.npy") for what in ("loss_mask", "ends")}


def mark_tokens(ids: list[int], offsets: list[Span], spans: list[Span]) -> TokenArray:
    """Mark token ids with their bits, uint32 [N]. A token is in the loss if it has a character of a
    span, as in transformers' assistant mask."""
    tokens = np.array(ids, np.uint32)
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    for start, end in spans:
        # A token without a character, such as a prefix, overlaps no span.
        tokens[(starts < end) & (ends > start)] |= IN_LOSS_BIT
    # A slice, because a text may have no tokens.
    tokens[-1:] |= LAST_BIT
    return tokens


def take_apart(
    parts: list[TokenArray], dtype: str
) -> tuple[list[TokenArray], dict[str, NDArray[Any]]]:
    """Split marked tokens into ids and the arrays beside them, by name."""
    tokens = np.concatenate(parts)
    mask = ((tokens & IN_LOSS_BIT) != 0).astype(np.uint8)
    return [(tokens & ID).astype(dtype)], {"loss_mask": mask, "ends": _ends(tokens)}


def split_conversations(tokens: TokenArray, want: int, kind: str) -> tuple[TokenArray, TokenArray]:
    """Cut about `want` tokens off the end, between two conversations (or preferences)."""
    # Never between the two answers of a preference.
    borders = _ends(tokens)[GROUP[kind] - 1 :: GROUP[kind]]
    cut = int(borders[np.abs(len(tokens) - borders - want).argmin()])
    return tokens[:cut], tokens[cut:]


def _ends(tokens: TokenArray) -> NDArray[np.int64]:
    return np.flatnonzero(tokens & LAST_BIT) + 1
