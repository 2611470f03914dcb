"""A stream of tokens, cut into numbered samples. N samples, T tokens.

Sample i is the tokens i * T to (i + 1) * T, both included: T inputs and, one further, T targets.
It may cross the end of a part of the stream (a shard, a file). Last tokens too few for a sample
are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kempner.config.option import ConfigError
from kempner.data.source import IGNORE, DataError, Int32, Int64, SampleRows, Shape

StreamTokens = NDArray[np.integer[Any]]  # 1-D


class TokenStream:
    """Samples of a stream in parts, which a subclass supplies."""

    ordered = False
    packing = None

    def __init__(self, name: str, sizes: Sequence[int], shape: Shape) -> None:
        """`sizes`: the tokens of each part."""
        self.name, self.seq_len = name, shape.seq_len
        self.vocab_size, self._separate = shape.vocab_size, shape.separate
        # Offset of each part in the stream, and the end of the last.
        self._starts = np.cumsum([0, *sizes], dtype=np.int64)

    def part(self, number: int) -> StreamTokens:
        """Return the tokens of a part, usually memory-mapped. Raises DataError, OSError."""
        raise NotImplementedError

    def part_name(self, number: int) -> str:
        raise NotImplementedError

    def begins(self, positions: Int64, rows: Int64) -> NDArray[np.bool_]:
        """Mark the tokens that begin a document; the first of a row is never used. rows [N, T + 1]
        are the tokens of the stream from `positions` [N] on."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Number of samples."""
        # One token is reserved for the last target.
        return max(0, int((self._starts[-1] - 1) // self.seq_len))

    def read(self, indices: Int64) -> SampleRows:
        """Read samples `indices` [N], in that order.

        Raises OSError if a part cannot be read, DataError if it is not as it was prepared or, with
        its name and the offset, if a token is outside the model's vocabulary.
        """
        assert indices.size == 0 or (indices.min() >= 0 and indices.max() < len(self))
        length = self.seq_len + 1
        rows = np.empty((len(indices), length), np.int64)
        places = indices * self.seq_len
        parts, offsets = self._place(places)
        for row, part, offset in zip(rows, parts.tolist(), offsets.tolist(), strict=True):
            tokens = self.part(part)[offset : offset + length]
            row[: len(tokens)] = tokens
            have = len(tokens)
            while have < length:  # the sample continues in the next part
                part += 1
                tokens = self.part(part)[: length - have]
                row[have : have + len(tokens)] = tokens
                have += len(tokens)
        # One comparison covers both ends: negative ids are large unsigned numbers.
        if rows.size and rows.view(np.uint64).max() >= self.vocab_size:
            self._complain(places, rows)
        if not self._separate:
            return SampleRows(rows[:, :-1], rows[:, 1:])
        return separate_documents(rows, self.begins(places, rows))

    def _place(self, positions: Int64) -> tuple[Int64, Int64]:
        """Split positions in the stream into parts and offsets in them."""
        # side="right": of parts that begin at the same position, only the last has tokens.
        parts = np.searchsorted(self._starts, positions, side="right") - 1
        return parts, positions - self._starts[parts]

    def _complain(self, places: Int64, rows: Int64) -> None:
        row, column = np.argwhere(rows.view(np.uint64) >= self.vocab_size)[0]
        part, offset = self._place(places[row] + column)
        raise DataError(
            f"{self.part_name(int(part))}: token {rows[row, column]} at offset {offset}, but "
            f"model.vocab_size is {self.vocab_size}; these tokens were not prepared for this "
            "model; prepare the data again"
        )


def separate_documents(rows: Int64, begins: NDArray[np.bool_]) -> SampleRows:
    """Make rows of samples [N, T + 1] in which a document begins at each `begins`. A document's
    first token is not a target: nothing predicts it."""
    documents: Int32 = np.zeros((rows.shape[0], rows.shape[1] - 1), np.int32)
    np.cumsum(begins[:, 1:-1], axis=1, dtype=np.int32, out=documents[:, 1:])
    return SampleRows(rows[:, :-1], np.where(begins[:, 1:], IGNORE, rows[:, 1:]), documents)


def begins_at(starts: Int64, positions: Int64, length: int) -> NDArray[np.bool_]:
    """Mark document starts from a table: `starts`, in rising order, of all documents in the stream;
    rows of `length` tokens from `positions` [N] on."""
    result = np.zeros((len(positions), length), np.bool_)
    low = np.searchsorted(starts, positions, side="left")
    high = np.searchsorted(starts, positions + length, side="left")
    for row, position, begin, end in zip(
        result, positions, low.tolist(), high.tolist(), strict=True
    ):
        row[starts[begin:end] - position] = True
    return result


def stream_problems(
    path: str, split: str, tokens: int, largest: int, shape: Shape, about: str
) -> list[str]:
    """List the reasons why a stream of `tokens` tokens, with ids up to `largest`,
    cannot be used."""
    problems = []
    if largest >= shape.vocab_size:
        problems.append(
            f"{path}: token ids go up to {largest} ({about}), but model.vocab_size is "
            f"{shape.vocab_size}; give --model.vocab_size={largest + 1} or more"
        )
    if tokens <= shape.seq_len:
        more = "prepare more text" + (", or a larger --val-fraction" if split == "val" else "")
        problems.append(
            f"{path}: {tokens} tokens in split {split}, a sample needs {shape.seq_len + 1}; "
            f"{more}, or give a shorter sequence length"
        )
    return problems


def raise_problems(problems: list[str]) -> None:
    if problems:
        raise ConfigError(problems)
