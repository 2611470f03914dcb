"""Rows that can only be read in sequence, tokenized on the fly: an endless stream.

Sample i is the tokens i * T to (i + 1) * T of all documents in order, over and over. To find it,
everything before it is read, from the nearest bookmark on: the iterator's state, and the tokens
read but not used. Rank 0 writes one every 1024 samples to a file, so that a resumed run starts at
once; without the file it only takes longer.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kempner.data.config import SourceConfig
from kempner.data.formats.stream import StreamTokens, separate_documents
from kempner.data.source import DataError, Int64, SampleRows, Shape
from kempner.data.text.tokenizer import FileTokenizer
from kempner.jobs.system.files import LineFile
from kempner.jobs.system.reading import read_jsonl

READ_AHEAD = 64  # documents encoded together
BOOKMARK = 1024  # samples from one bookmark to the next
ENDLESS = 1 << 62  # samples: their number is unknown
START: dict[str, Any] = {"sample": 0, "state": None, "left": [], "begins": []}


class StreamedDocuments:
    ordered = True  # sample after sample: no shuffle
    packing = None

    def __init__(
        self, cfg: SourceConfig, shape: Shape, make: Callable[[], Any], file: Path, write: bool
    ) -> None:
        """`make` returns the data set at its start, a datasets.IterableDataset. `file`: the
        bookmarks, written if `write`."""
        self.name, self.seq_len, self._path = cfg.label, shape.seq_len, cfg.path
        self._vocab_size, self._separate = shape.vocab_size, shape.separate
        self._make, self._file, self._write = make, file, write
        rows = iter(make())
        first = next(rows, None)
        if first is None:
            raise DataError(f"{cfg.path}: has no rows")
        self._column = pick_column(cfg, list(first))
        values = (row[self._column] for row in itertools.chain([first], rows))
        # The first rows may be empty.
        value = next(filter(None, values), first[self._column])
        self._tokenizer = self._open_tokenizer(cfg) if isinstance(value, str) else None
        if value and not (isinstance(value, str) or _are_ids(value)):
            raise DataError(
                f"{cfg.path}: column {self._column} holds neither text nor lists of token ids; "
                "name the one that does with `column` in data.sources"
            )
        self._found_none = False  # since the last end of the rows
        self._sought = False  # whether the bookmarks were read
        self._data: Any = None
        self._rows: Iterator[Any] = iter(())
        self._left = np.empty(0, np.int64)  # tokens from sample `_sample` on
        self._begins = np.empty(0, np.bool_)  # which of them begin a document
        self._go_to(START)

    def _open_tokenizer(self, cfg: SourceConfig) -> FileTokenizer:
        if not cfg.tokenizer:
            raise DataError(
                f"{cfg.path}: column {self._column} is text; name its tokenizer.json with "
                "`tokenizer` in data.sources, or prepare the data with prepare_data.py"
            )
        tokenizer = FileTokenizer(Path(cfg.tokenizer).expanduser())
        if tokenizer.vocab_size > self._vocab_size:
            raise DataError(
                f"{cfg.tokenizer}: has {tokenizer.vocab_size} tokens, but model.vocab_size is "
                f"{self._vocab_size}; give --model.vocab_size={tokenizer.vocab_size} or more"
            )
        return tokenizer

    def __len__(self) -> int:
        return ENDLESS

    def identity(self) -> dict[str, Any]:
        return self._identity

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        top = os.path.expanduser(self._path)
        files = f"{top}/state.json" if os.path.isdir(top) else top
        matches = sorted(glob.glob(files, recursive=True))
        sizes = [f"{os.path.basename(path)}: {os.path.getsize(path)} bytes" for path in matches]
        return {
            "files": sizes or [self._path],
            "column": self._column,
            "tokenizer": self._tokenizer.describe()["hash"] if self._tokenizer else "",
        }

    def read(self, indices: Int64) -> SampleRows:
        """Read samples `indices` [N]; fast in rising order only. Raises DataError if a token is
        outside the model's vocabulary."""
        length = self.seq_len + 1
        rows = np.empty((len(indices), length), np.int64)
        begins = np.empty(rows.shape, np.bool_)
        for row, starts, index in zip(rows, begins, indices.tolist(), strict=True):
            # Backwards, or the first read after a start: continue from a bookmark.
            if index < self._sample or not self._sought:
                self._go_to(self._bookmark(index))
                self._sought = True
            while self._sample <= index:
                self._fill(length)
                # Also for unwanted samples: a stream is only read forward.
                row[:], starts[:] = self._left[:length], self._begins[:length]
                # The last token is also the first input of the next sample.
                self._left, self._begins = self._left[length - 1 :], self._begins[length - 1 :]
                self._sample += 1
        if rows.size and rows.view(np.uint64).max() >= self._vocab_size:
            raise DataError(
                f"{self._path}: token {rows.max()}, but model.vocab_size is {self._vocab_size}"
            )
        return (
            separate_documents(rows, begins)
            if self._separate
            else SampleRows(rows[:, :-1], rows[:, 1:])
        )

    def _fill(self, length: int) -> None:
        """Read until there are `length` tokens."""
        # Only if rows are read next: then the iterator's state and `left` match.
        if self._sample >= self._next_mark and len(self._left) < length:
            self._mark()
        while len(self._left) < length:
            documents = self._documents()
            first = [np.arange(len(document)) == 0 for document in documents]
            self._left = np.concatenate([self._left, *documents])
            self._begins = np.concatenate([self._begins, *first])

    def _documents(self) -> list[StreamTokens]:
        """Tokenize the next rows; after the last, the first again."""
        rows = list(itertools.islice(self._rows, READ_AHEAD))
        if not rows:
            if self._found_none:
                raise DataError(f"{self._path}: column {self._column!r} is empty in all rows")
            # Not at the first end: reading may have begun in the middle.
            self._found_none = True
            self._data = self._make()
            self._rows = iter(self._data)
            rows = list(itertools.islice(self._rows, READ_AHEAD))
        texts = [row[self._column] for row in rows if row[self._column]]
        self._found_none = self._found_none and not texts
        if self._tokenizer is None:
            return [np.asarray(ids, np.int64) for ids in texts]
        return [ids.astype(np.int64) for ids in self._tokenizer.encode_documents(texts)]

    # --- Bookmarks ---

    def _mark(self) -> None:
        self._next_mark = self._sample + BOOKMARK
        if self._write:
            mark = {
                "of": self.identity(),
                "seq_len": self.seq_len,
                "sample": self._sample,
                "state": self._data.state_dict(),
                "left": self._left.tolist(),
                "begins": np.flatnonzero(self._begins).tolist(),
            }
            with contextlib.suppress(OSError):  # e.g. a full disk: only time is lost
                self._file.parent.mkdir(parents=True, exist_ok=True)
                LineFile(self._file).write(json.dumps(mark))

    def _bookmark(self, index: int) -> dict[str, Any]:
        """Return the last bookmark that is not past sample `index`."""
        best = START
        for mark in read_jsonl(self._file):
            # With other files or another length, the state would lead to other samples.
            same_stream = mark.get("of") == self.identity() and mark.get("seq_len") == self.seq_len
            if same_stream and best["sample"] < mark["sample"] <= index:
                best = mark
        return best

    def _go_to(self, mark: dict[str, Any]) -> None:
        self._sample = mark["sample"]
        self._next_mark = self._sample + BOOKMARK
        self._left = np.array(mark["left"], np.int64)
        self._begins = np.zeros(len(self._left), np.bool_)
        self._begins[mark["begins"]] = True
        self._data = self._make()
        if mark["state"] is not None:
            self._data.load_state_dict(mark["state"])
        self._rows = iter(self._data)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) for item in value)


def pick_column(cfg: SourceConfig, names: list[str]) -> str:
    """Choose the column of token ids or text to read."""
    columns = (cfg.column,) if cfg.column else ("input_ids", "text")
    for name in columns:
        if name in names:
            return name
    raise DataError(
        f"{cfg.path}: has no column {' or '.join(columns)} (has: {', '.join(names)}); name it with "
        "`column` in data.sources"
    )
