"""Documents -> token shards: encoding in parallel, writing in order, going on after a kill.

Shards are written in the order of the input, whatever the number of workers. A shard ends where a
unit of the input ends, so that the record of a killed run (dataset.partial.json) is a list of whole
shards and the number of units that are in them.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kempner.config import ConfigError
from kempner.data.sidecar import (
    PROGRESS,
    SIDECAR,
    SPLITS,
    TOKENIZER,
    DataError,
    Shard,
    Sidecar,
    write_atomic,
)
from kempner.data.sources import Piece, Undecodable, documents, is_held_out
from kempner.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

Tokens = NDArray[np.integer[Any]]


# --- Encoding: in the workers -----------------------------------------------------------------


@dataclass(frozen=True)
class Encoding:
    """What a worker needs to encode a unit."""

    tokenizer_file: str  # "" for bytes
    eod: int
    dtype: str
    text_key: str
    val_fraction: float

    def tokenizer(self) -> Tokenizer:
        if not self.tokenizer_file:
            return ByteTokenizer()
        return FileTokenizer(Path(self.tokenizer_file), eod=self.eod)


@dataclass
class Encoded:
    """One unit of the input, encoded."""

    tokens: dict[str, Tokens]
    empty: int = 0  # documents without a character
    skipped: int = 0  # files, or pieces of large ones, that are not UTF-8 text
    size: int = 0  # bytes of input


def encode(unit: list[Piece], how: Encoding, tokenizer: Tokenizer) -> Encoded:
    parts: dict[str, list[Tokens]] = {split: [] for split in SPLITS}
    result = Encoded({})
    for piece in unit:
        result.size += piece.size
        try:
            texts = list(documents(piece, how.text_key))
        except Undecodable:
            result.skipped += 1
            continue
        filled = [text for text in texts if text]
        result.empty += len(texts) - len(filled)
        for text, ids in zip(filled, tokenizer.encode_documents(filled), strict=True):
            parts["val" if is_held_out(text, how.val_fraction) else "train"].append(ids)
    nothing = np.empty(0, how.dtype)
    result.tokens = {
        split: np.concatenate([nothing, *arrays], dtype=how.dtype, casting="unsafe")
        for split, arrays in parts.items()
    }
    return result


def encode_all(units: Iterable[list[Piece]], how: Encoding, workers: int) -> Iterator[Encoded]:
    """Encode the units in `workers` processes; the results come in the order of the units."""
    os.environ["TOKENIZERS_PARALLELISM"] = (
        "false"  # one thread each: the processes are the parallelism
    )
    if workers == 1:
        tokenizer = how.tokenizer()
        yield from (encode(unit, how, tokenizer) for unit in units)
        return
    # spawn: a process forked from one with threads (tokenizers has some) may hang.
    # An executor, not a Pool: it notices when a worker is killed.
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(how,)
    )
    running: deque[Future[Encoded]] = deque()
    try:
        source = iter(units)
        running.extend(pool.submit(_encode, unit) for unit in itertools.islice(source, 2 * workers))
        while running:
            yield running.popleft().result()
            running.extend(pool.submit(_encode, unit) for unit in itertools.islice(source, 1))
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(how: Encoding) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_die_with_parent, daemon=True).start()
    global _worker
    _worker = (how, how.tokenizer())


def _die_with_parent() -> None:
    """A worker whose parent was killed would wait for its next unit for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


_worker: tuple[Encoding, Tokenizer]


def _encode(unit: list[Piece]) -> Encoded:
    how, tokenizer = _worker
    return encode(unit, how, tokenizer)


# --- Writing: in the parent -------------------------------------------------------------------


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
        self._count["empty"] += unit.empty
        self._count["skipped"] += unit.skipped

    def finish(self) -> Sidecar:
        """Write what is pending and then dataset.json: from now on the data can be read."""
        if self._pending_tokens():
            self._balance()
            self._flush()
        elif not self.sidecar.tokens("train"):
            raise DataError("there is no text in the input" + self.remarks())
        self.sidecar.save(self.directory / SIDECAR)
        (self.directory / PROGRESS).unlink()
        return self.sidecar

    def remarks(self) -> str:
        """What was passed over, as the end of a sentence."""
        files, empty = self._count["skipped"], self._count["empty"]
        remark = f"; {files} files (or parts of them) skipped: not UTF-8 text" if files else ""
        return remark + (f"; {empty} empty documents left out" if empty else "")

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
        train, held_out = split_tail(tokens, want, self.sidecar.eod)
        self._pending = {"train": [train], "val": [held_out]}

    def _flush(self) -> None:
        splits = dict(self.sidecar.splits)
        for split, parts in self._pending.items():
            if sum(map(len, parts)):
                name = f"{split}_{len(splits[split]):05d}.npy"
                write_atomic(self.directory / name, _npy(parts))
                splits[split] = [*splits[split], self._describe(name, parts)]
        self._pending = {split: [] for split in SPLITS}
        prepared = {**self.sidecar.prepared, "progress": dict(self._count)}
        self.sidecar = replace(self.sidecar, splits=splits, prepared=prepared)
        self.sidecar.save(self.directory / PROGRESS)

    def _describe(self, name: str, parts: list[Tokens]) -> Shard:
        return Shard(
            file=name,
            tokens=sum(map(len, parts)),
            documents=sum(int(np.count_nonzero(part == self.sidecar.eod)) for part in parts),
            max_id=max(int(part.max()) for part in parts if len(part)),
        )


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


def earlier(directory: Path, sidecar: Sidecar, overwrite: bool) -> Sidecar:
    """What to go on from: `sidecar` (nothing there), the record of a killed run, or finished data.

    What was made with other settings or from other inputs is refused, or removed by `overwrite`.
    """
    for leftover in directory.glob(".*.tmp"):
        leftover.unlink()
    finished = (directory / SIDECAR).is_file()
    record = directory / (SIDECAR if finished else PROGRESS)
    if record.is_file() and not (finished and overwrite):
        try:
            found = Sidecar.load(record)
            problems = _differences(directory, found, sidecar, finished) or _damage(
                directory, found
            )
        except ConfigError as error:
            problems = error.problems
        if not problems:
            return found
        if not overwrite and (finished or found.splits["train"] or found.splits["val"]):
            raise ConfigError(problems)
    elif not overwrite and (strange := _shards(directory)):
        raise DataError(
            f"{directory}: holds {strange[0].name} but no {SIDECAR}; "
            "choose another --out, or --overwrite"
        )
    discard(directory)
    return sidecar


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
    old, new = there.prepared["settings"], here.prepared["settings"]
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
