"""Chat data as numbered samples: whole conversations packed into rows of T tokens.

A conversation of n + 1 tokens takes n places of a row, because its last token is only a target. The
rest of a row is one more document, which is not in the loss. The packing depends only on the
lengths and T, so that the samples are the same for every rank, resume and world size. The two
answers of a preference are neighbours in a row.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kempner.config.option import ConfigError
from kempner.data.formats.dataset import (
    PREPARE_AGAIN,
    map_array,
    mapped_files,
    unreadable_file,
)
from kempner.data.packing import first_fit_decreasing
from kempner.data.sidecar import SIDECAR, Sidecar, open_sidecar
from kempner.data.source import IGNORE, DataError, Int64, SampleRows, Shape
from kempner.data.text.chat_marks import GROUP, files_of_shard

LossMask = NDArray[np.bool_]

LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)  # of rows, in the table of a preparation


class ChatDataset:
    """Samples of one split, for one sequence length."""

    ordered = False

    def __init__(self, path: Path, sidecar: Sidecar, split: str, shape: Shape, name: str) -> None:
        """Use open(), which checks the assumptions made here."""
        self.name, self.seq_len, self.path, self._shape = name, shape.seq_len, path, shape
        self.sidecar = sidecar
        self._files = [path / shard.file for shard in sidecar.splits[split]]
        self._masks = [files_of_shard(file)["loss_mask"] for file in self._files]
        self._sizes = [shard.tokens for shard in sidecar.splits[split]]
        counts = [shard.documents for shard in sidecar.splits[split]]
        ends = [
            # Copy: the map of each of thousands of shards would keep a file open.
            np.array(map_array(files_of_shard(file)["ends"], count, "int64"))
            for file, count in zip(self._files, counts, strict=True)
        ]
        shards = np.repeat(np.arange(len(ends)), counts)
        begins = np.concatenate(
            [np.empty(0, np.int64), *(np.append(0, each[:-1]) for each in ends)]
        )
        lengths = np.concatenate([np.empty(0, np.int64), *ends]) - begins - 1
        # Unit of packing: a conversation, or both answers of a preference.
        group = GROUP[sidecar.kind]
        longer = lengths.reshape(-1, group).sum(1) > self.seq_len
        self.longer = int(longer.sum())
        if shape.cut:
            # Each answer of a preference gets its half of a row: both must fit into one.
            cut = np.minimum(lengths, self.seq_len // group)
            lengths = np.where(np.repeat(longer, group), cut, lengths)
        # Each conversation's shard, its offset there, and the number of places it takes.
        self._where = np.stack([shards, begins, lengths], axis=1)
        size = lengths.reshape(-1, group).sum(1)
        fits = size <= self.seq_len
        if shape.cut:
            # Only cut conversations can have lost their answers: read no other loss masks.
            # In their order, each shard is mapped once.
            masks = functools.lru_cache(1)(lambda shard: self._map_shard(shard)[1])
            whole = [
                not longer[i] or self._has_answers(i, group, masks) for i in range(len(longer))
            ]
            fits &= np.array(whole, bool)
        self.without_answer = int(longer.sum() - (longer & fits).sum()) if shape.cut else 0
        fitting = np.flatnonzero(fits)
        packing = first_fit_decreasing(size[fitting], self.seq_len)
        items = fitting[packing.order]
        self._order = (items[:, None] * group + np.arange(group)).flatten()
        self._starts = packing.starts * group
        self.filled = float(size[fitting].sum() / max(1, len(packing) * self.seq_len))
        self.packing = {"filled": round(self.filled, 4), "too_long": self.longer}
        if shape.cut:
            self.packing["without_answer"] = self.without_answer

    def _has_answers(self, number: int, group: int, masks: Callable[[int], LossMask]) -> bool:
        """Return whether each conversation of a group, up to where it is cut, has a
        token in the loss. A preference whose prompt fills both halves of a row would
        leave two equal documents."""
        for shard, begin, length in self._where[number * group : (number + 1) * group].tolist():
            if not masks(shard)[begin + 1 : begin + 1 + length].any():
                return False
        return True

    @classmethod
    def open(
        cls,
        path: str | Path,
        split: str,
        shape: Shape,
        check_shards: bool = True,
        name: str = "",
    ) -> ChatDataset:
        """Open a split, as TokenDataset.open. Raises ConfigError with all problems."""
        directory, sidecar = Path(path).expanduser(), open_sidecar(path)
        try:
            result = cls(directory, sidecar, split, shape, name or directory.name)
        except OSError as error:
            raise DataError(unreadable_file(error)) from None
        problems = []
        if check_shards:
            for number in range(len(result._files)):
                try:
                    result._map_shard(number)
                except DataError as error:
                    problems += error.problems
                except OSError as error:
                    problems.append(unreadable_file(error))
        if sidecar.vocab_size > shape.vocab_size:
            problems.append(
                f"{path}: token ids go up to {sidecar.vocab_size - 1} (tokenizer "
                f"{sidecar.tokenizer['name']}), but model.vocab_size is {shape.vocab_size}; "
                f"give --model.vocab_size={sidecar.vocab_size} or more"
            )
        if not len(result):
            more = ", and all are longer than that" if result.longer else ""
            if more and result.without_answer:
                more += ", even their prompts alone"
            problems.append(
                f"{path}: no conversation fits rows of {shape.seq_len} tokens in split {split}: it "
                f"has {len(result._where)}{more}; prepare more data"
                + (", or a larger --val-fraction" if split == "val" else "")
                + (", or give a longer --train.seq_len or --data.too_long=cut" if more else "")
            )
        if problems:
            raise ConfigError(problems)
        return result

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._starts) - 1

    def describe(self) -> str:
        what = {"chat": "conversations", "preference": "preferences"}[self.sidecar.kind]
        items = len(self._order) // GROUP[self.sidecar.kind]
        verb = "cut" if self._shape.cut else "dropped"
        longer = f", {self.longer:,} longer than that {verb}" if self.longer else ""
        if self.without_answer:
            longer += f", of which {self.without_answer:,} are dropped: no answer was left"
        return (
            f"{items:,} {what} in {len(self):,} rows of {self.seq_len:,}, "
            f"{self.filled:.1%} full{longer}"
        )

    def identity(self) -> dict[str, Any]:
        """Return the lengths, which identify the conversations; the samples follow
        from packing them."""
        lengths = hashlib.sha256(self._where[:, 2].tobytes()).hexdigest()[:16]
        dropped = {"without_answer": self.without_answer} if self.without_answer else {}
        return {"conversations": lengths, "seq_len": self.seq_len, **dropped}

    def read(self, indices: Int64) -> SampleRows:
        """Read rows `indices` [N], in that order. Raises DataError if a shard differs
        from the sidecar, OSError if it cannot be read."""
        shape = (len(indices), self.seq_len)
        inputs = np.full(shape, self.sidecar.eod, np.int64)
        targets = np.full(shape, IGNORE, np.int64)
        documents = np.empty(shape, np.int32)
        for row, index in enumerate(indices.tolist()):
            packed = self._order[self._starts[index] : self._starts[index + 1]]
            at = 0
            for number, (shard, begin, length) in enumerate(self._where[packed].tolist()):
                tokens, mask = self._map_shard(shard, mapped_files())
                inputs[row, at : at + length] = tokens[begin : begin + length]
                # The predicted token must be in the loss, not the one before it.
                after = slice(begin + 1, begin + 1 + length)
                np.copyto(targets[row, at : at + length], tokens[after], where=mask[after])
                documents[row, at : at + length] = number
                at += length
            documents[row, at:] = len(packed)
        if inputs.size and inputs.max() >= self._shape.vocab_size:
            raise DataError(
                f"{self.path}: token {inputs.max()}, but model.vocab_size is "
                f"{self._shape.vocab_size}; the shards differ from {SIDECAR}, {PREPARE_AGAIN}"
            )
        return SampleRows(inputs, targets, documents)

    def _map_shard(
        self, number: int, map_file: Callable[[Path, int, str], NDArray[Any]] = map_array
    ) -> tuple[NDArray[Any], LossMask]:
        """Map a shard: its ids, and a mask of those in the loss."""
        size = self._sizes[number]
        tokens = map_file(self._files[number], size, self.sidecar.dtype)
        return tokens, map_file(self._masks[number], size, "uint8").view(np.bool_)


def packing_table(directory: Path, sidecar: Sidecar) -> list[str]:
    """Describe how the training split packs into rows of the usual lengths, one per line, up to the
    first that fits every conversation."""
    lines = []
    for length in LENGTHS:
        data = ChatDataset(directory, sidecar, "train", Shape(length, sidecar.vocab_size), "")
        if len(data):
            lines.append(f"--train.seq_len={length}: {data.describe()}")
        if not data.longer:
            break
    return lines
