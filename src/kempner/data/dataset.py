"""Token shards as numbered samples.

The shards of a split are one stream of tokens. Sample i is the tokens i * seq_len to
(i + 1) * seq_len, both included: seq_len inputs and, one further, seq_len targets. It may
run over the end of a shard. The last tokens, too few for a sample, are not used.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kempner.config.option import ConfigError
from kempner.data.permute import Int64
from kempner.data.sidecar import DataError, Shard, Sidecar, open_sidecar

Tokens = NDArray[np.integer[Any]]


class TokenDataset:
    """The samples of one split, memory-mapped. Reading is safe in any thread and after a fork."""

    def __init__(
        self, path: Path, sidecar: Sidecar, split: str, seq_len: int, vocab_size: int
    ) -> None:
        """Use open(): it checks what this takes for granted."""
        self.path = path
        self.sidecar = sidecar
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self._shards = sidecar.splits[split]
        _allow_open_files(len(self._shards))
        # As plain arrays: a slice of a numpy.memmap costs several times as much.
        self._arrays: list[Tokens] = [
            np.asarray(np.load(path / shard.file, mmap_mode="r")) for shard in self._shards
        ]
        # Where each shard begins in the stream, and the end of the last.
        self._starts = np.cumsum([0, *(shard.tokens for shard in self._shards)])

    @classmethod
    def open(cls, path: str | Path, split: str, seq_len: int, vocab_size: int) -> TokenDataset:
        """The split (train, val) of a data directory, for a model of `vocab_size`.

        Raises ConfigError with everything that is wrong: the directory, the sidecar, a shard that
        is not what the sidecar says, too few tokens, ids that the model has no row for.
        """
        directory = Path(path).expanduser()
        sidecar = open_sidecar(path)
        problems = [
            problem
            for shard in sidecar.splits[split]
            for problem in _check_shard(directory / shard.file, shard, sidecar.dtype)
        ]
        largest = max((shard.max_id for shard in sidecar.splits[split]), default=0)
        if max(sidecar.vocab_size, largest + 1) > vocab_size:
            problems.append(
                f"{path}: its tokens go to {max(sidecar.vocab_size - 1, largest)} (tokenizer "
                f"{sidecar.tokenizer['name']}), the model has {vocab_size} rows; "
                f"give --model.vocab_size={max(sidecar.vocab_size, largest + 1)} or more"
            )
        if sidecar.tokens(split) <= seq_len:
            more = "prepare more text" + (", or a larger --val-fraction" if split == "val" else "")
            problems.append(
                f"{path}: {sidecar.tokens(split)} tokens in split {split}, a sample needs "
                f"{seq_len + 1}; {more}, or give a shorter sequence length"
            )
        if problems:
            raise ConfigError(problems)
        return cls(directory, sidecar, split, seq_len, vocab_size)

    def __len__(self) -> int:
        """Samples."""
        return int((self._starts[-1] - 1) // self.seq_len)

    def read(self, indices: Int64) -> Int64:
        """Samples `indices` [N], in that order: int64 [N, seq_len + 1].

        Raises DataError, with shard and offset, when a token is not in the model's vocabulary.
        """
        assert indices.size == 0 or (indices.min() >= 0 and indices.max() < len(self))
        length = self.seq_len + 1
        rows = np.empty((len(indices), length), np.int64)
        shards, offsets = self._place(indices * self.seq_len)
        for row, shard, offset in zip(rows, shards.tolist(), offsets.tolist(), strict=True):
            tokens = self._arrays[shard][offset : offset + length]
            row[: len(tokens)] = tokens
            while (have := len(tokens)) < length:  # it goes on in the next shard
                shard += 1
                tokens = np.append(tokens, self._arrays[shard][: length - have])
                row[have : len(tokens)] = tokens[have:]
        if rows.size and rows.max() >= self.vocab_size:
            self._complain(indices, rows)
        return rows

    def _place(self, positions: Int64) -> tuple[Int64, Int64]:
        """Shards and offsets in them of positions in the stream."""
        shards = np.searchsorted(self._starts, positions, side="right") - 1
        return shards, positions - self._starts[shards]

    def _complain(self, indices: Int64, rows: Int64) -> None:
        row, column = np.argwhere(rows >= self.vocab_size)[0]
        shard, offset = self._place(indices[row] * self.seq_len + column)
        raise DataError(
            f"{self.path / self._shards[shard].file}: token {rows[row, column]} at offset "
            f"{offset}, the model has {self.vocab_size} rows; "
            "the shard is not what its sidecar says, prepare the data again"
        )


def _check_shard(path: Path, shard: Shard, dtype: str) -> list[str]:
    """Is the file what the sidecar says? Only its header and size are read."""
    again = "prepare the data again"
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
            shape, _, found = read[version[0]](file)
            bytes_of_tokens = path.stat().st_size - file.tell()
    except OSError as error:
        return [f"{path}: {error.strerror}; {again}"]
    except (ValueError, KeyError) as error:
        return [f"{path}: not a .npy file ({error}); {again}"]
    if dtype not in ("uint16", "uint32"):
        return [f"{path}: dtype {dtype} in the sidecar, must be uint16 or uint32; {again}"]
    if found != np.dtype(dtype):
        return [f"{path}: holds {found}, the sidecar says {dtype}; {again}"]
    if shape != (shard.tokens,) or bytes_of_tokens != shard.tokens * found.itemsize:
        return [
            f"{path}: {bytes_of_tokens} bytes of shape {shape}, the sidecar says "
            f"{shard.tokens} tokens of {dtype}; {again}"
        ]
    return []


def _allow_open_files(count: int) -> None:
    """A mapped shard keeps a file open, and the usual limit is 1024: raise it as needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + 512
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
