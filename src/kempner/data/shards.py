"""Encoded units -> token shards, in order; and resuming after a kill.

Shards are written in the order of the input, whatever the number of workers. A shard ends where a
unit of the input ends, so that the record of a killed run (dataset.partial.json) is a list of whole
shards and the number of units that are in them.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kempner.config.option import ConfigError
from kempner.data import chat_marks
from kempner.data.encode import SHOWN, Encoded
from kempner.data.sidecar import (
    PROGRESS,
    SIDECAR,
    SPLITS,
    TOKENIZER,
    DataError,
    Shard,
    Sidecar,
)
from kempner.data.tokenizer import Tokens
from kempner.files import write_atomic


class Writer:
    """Collects encoded units and writes them as shards; `sidecar` grows with each shard."""

    def __init__(self, directory: Path, sidecar: Sidecar) -> None:
        self.directory = directory
        self.sidecar = sidecar
        self._pending: dict[str, list[Tokens]] = {split: [] for split in SPLITS}
        self._count = dict(sidecar.prepared["progress"])

    @property
    def units_done(self) -> int:
        """Units of the input that are in finished shards or pending."""
        return int(self._count["units"])

    def add(self, unit: Encoded) -> None:
        # Written when more comes: the last shard stays open for finish().
        full = self._pending_tokens() >= self.sidecar.prepared["settings"]["shard_tokens"]
        if full and any(map(len, unit.tokens.values())):
            self._flush()
        for split, tokens in unit.tokens.items():
            if len(tokens):
                self._pending[split].append(tokens)
        self._count["units"] += 1
        self._count["skipped"] += len(unit.skipped)
        names = dict.fromkeys([*self._count["skipped_names"], *unit.skipped])
        self._count["skipped_names"] = list(names)[:SHOWN]
        self._count["empty"] += unit.empty
        self._count["bad_lines"] += unit.bad_lines

    def finish(self) -> Sidecar:
        """Write what is pending and then dataset.json: from now on the data can be read."""
        if self._pending_tokens():
            self._balance()
            self._flush()
        elif not self.sidecar.tokens("train"):
            raise DataError("; ".join(["there is no text in the input", *remarks(self._count)]))
        self.sidecar.save(self.directory / SIDECAR)
        (self.directory / PROGRESS).unlink()
        return self.sidecar

    def _pending_tokens(self) -> int:
        return sum(len(tokens) for parts in self._pending.values() for tokens in parts)

    def _balance(self) -> None:
        """A hash of few documents may hold out far too little or too much: cut off the end then."""
        fraction = self.sidecar.prepared["settings"]["val_fraction"]
        pending = {name: sum(map(len, parts)) for name, parts in self._pending.items()}
        val = self.sidecar.tokens("val") + pending["val"]
        total = self.sidecar.tokens("train") + pending["train"] + val
        if fraction * total / 2 <= val <= fraction * total * 2:
            return
        want = round(fraction * total) - self.sidecar.tokens("val")
        tokens = np.concatenate([*self._pending["train"], *self._pending["val"]])
        if self.sidecar.kind == "text":
            train, held_out = split_tail(tokens, want, self.sidecar.eod)
        else:
            train, held_out = chat_marks.split_tail(tokens, want, self.sidecar.kind)
        self._pending = {"train": [train], "val": [held_out]}

    def _flush(self) -> None:
        splits = dict(self.sidecar.splits)
        for split, parts in self._pending.items():
            if sum(map(len, parts)):
                name = f"{split}_{len(splits[split]):05d}"
                splits[split] = [*splits[split], self._write(name, parts)]
        self._pending = {split: [] for split in SPLITS}
        prepared = {**self.sidecar.prepared, "progress": dict(self._count)}
        self.sidecar = replace(self.sidecar, splits=splits, prepared=prepared)
        self.sidecar.save(self.directory / PROGRESS)

    def _write(self, name: str, parts: list[Tokens]) -> Shard:
        if self.sidecar.kind == "text":
            documents = sum(int(np.count_nonzero(part == self.sidecar.eod)) for part in parts)
        else:
            parts, beside = chat_marks.take_apart(parts, self.sidecar.dtype)
            documents = len(beside["ends"])
            for what, array in beside.items():
                write_atomic(self.directory / f"{name}.{what}.npy", _npy([array]))
        write_atomic(self.directory / f"{name}.npy", _npy(parts))
        return Shard(
            file=f"{name}.npy",
            tokens=sum(map(len, parts)),
            documents=documents,
            max_id=max(int(part.max()) for part in parts if len(part)),
        )


def remarks(progress: dict[str, Any]) -> list[str]:
    """What was left out, a phrase each."""
    names, found = progress.get("skipped_names", []), []
    if count := progress["skipped"]:
        named = f" ({', '.join(names)}{', ...' if count > len(names) else ''})" if names else ""
        found.append(f"skipped {count} files, or parts of them, that are not UTF-8 text{named}")
    if progress.get("bad_lines"):
        found.append(f"skipped {progress['bad_lines']} bad lines of JSON")
    if progress["empty"]:
        found.append(f"{progress['empty']} empty documents left out")
    return found


def split_tail(tokens: Tokens, want: int, eod: int) -> tuple[Tokens, Tokens]:
    """Cut about `want` tokens off the end: between documents if that gives half to twice of it.

    Otherwise the cut goes through a document, whose first part gets an end of its own.
    """
    size = len(tokens)
    want = min(max(want, 0), size // 2)
    borders = np.flatnonzero(tokens == eod) + 1
    held_out = size - borders
    good = borders[(held_out >= want / 2) & (held_out <= want * 2) & (borders > 0)]
    if good.size:
        cut = int(good[np.abs(size - good - want).argmin()])
        return tokens[:cut], tokens[cut:]
    cut = size - want
    return np.append(tokens[:cut], np.array([eod], tokens.dtype)), tokens[cut:]


def _npy(parts: list[Tokens]) -> Callable[[BinaryIO], object]:
    """Write a 1-D .npy from its parts. Not np.save: that forgets why a write failed."""

    def write(file: BinaryIO) -> None:
        shape = (sum(map(len, parts)),)
        header = {"descr": parts[0].dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for part in parts:
            file.write(np.ascontiguousarray(part).data)

    return write


# --- What is in the directory already ---------------------------------------------------------


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Only one process writes to the directory at a time."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise DataError(
            f"{directory}: another prepare_data.py is writing it; wait until it ends"
        ) from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(handle)


def earlier(directory: Path, sidecar: Sidecar, overwrite: bool) -> Sidecar:
    """Where to resume: `sidecar` (nothing there), the record of a killed run, or finished data.

    What was made with other settings or from other inputs is refused, or removed by `overwrite`.
    """
    for leftover in directory.glob(".*.new"):
        leftover.unlink()
    finished = (directory / SIDECAR).is_file()
    record = directory / (SIDECAR if finished else PROGRESS)
    if not record.is_file():
        problems = [
            f"{path}: a shard, but there is no {SIDECAR}; choose another --out, or --overwrite"
            for path in _shards(directory)[:1]
        ]
        if not problems:
            return sidecar
    else:
        found, problems = _examine(record, sidecar, finished)
        redo = finished and overwrite
        if found and not problems and not redo:
            return found
        if found and not finished and not any(found.splits.values()):
            problems = []  # nothing was written yet: nothing is lost
    if problems and not overwrite:
        raise ConfigError(problems)
    discard(directory)
    return sidecar


def _examine(record: Path, wanted: Sidecar, finished: bool) -> tuple[Sidecar | None, list[str]]:
    try:
        found = Sidecar.load(record)
    except ConfigError as error:
        return None, error.problems
    differences = _differences(record.parent, found, wanted, finished)
    return found, differences or _damage(record.parent, found)


def discard(directory: Path) -> None:
    """Remove prepared data, the sidecar first: no reader finds a sidecar without its shards."""
    for name in (SIDECAR, PROGRESS, TOKENIZER):
        (directory / name).unlink(missing_ok=True)
    for path in _shards(directory):
        path.unlink()


def _shards(directory: Path) -> list[Path]:
    return sorted(
        path
        for split in SPLITS
        for path in directory.glob(f"{split}_[0-9][0-9][0-9][0-9][0-9]*.npy")
    )


def _differences(directory: Path, there: Sidecar, here: Sidecar, finished: bool) -> list[str]:
    old, new = there.prepared.get("settings", {}), here.prepared["settings"]
    state = "finished" if finished else "unfinished"
    problems = []
    for key in new:
        if old.get(key) == new[key]:
            continue
        if key in ("tokenizer", "dtype"):
            what = f"was made with {key} {old.get(key)}, not {new[key]}; the two are never mixed"
        elif key == "inputs":
            what = "was made from other inputs (their names, sizes or times of writing differ)"
        else:
            what = f"was made with {key} = {old.get(key)}, not {new[key]}"
        problems.append(
            f"{directory}: the {state} data in it {what}; choose another --out, or --overwrite"
        )
    return problems


def _damage(directory: Path, there: Sidecar) -> list[str]:
    problems = []
    for shard in itertools.chain(*there.splits.values()):
        path = directory / shard.file
        least = shard.tokens * np.dtype(there.dtype).itemsize
        if not path.is_file() or path.stat().st_size < least:
            problems.append(f"{path}: missing or cut off; prepare the data again with --overwrite")
    return problems
