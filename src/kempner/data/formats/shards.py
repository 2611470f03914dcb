"""Encoded units -> token shards, in order; and resuming after a kill.

Shards are written in the order of the input, whatever the number of workers. A shard ends at the
end of an input unit, so that the record of a killed run (dataset.partial.json) is a list of
complete shards and the number of units in them.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kempner.config.option import ConfigError
from kempner.data.prepare.sources import BadLine
from kempner.data.prepare.units import remove_units, unit_file
from kempner.data.sidecar import (
    BAD_LINES,
    DATA_SPLITS,
    PROGRESS,
    SIDECAR,
    SIDECAR_TOKENIZER,
    TOKENIZER_CONFIG,
    UNITS_FOLDER,
    Shard,
    Sidecar,
)
from kempner.data.source import DataError
from kempner.data.text import chat_marks
from kempner.data.text.encode import Encoded
from kempner.data.text.tokenizer import TokenArray
from kempner.jobs.system.directories import MARK_FILE, Kind, mark_directory
from kempner.jobs.system.files import write_atomic

FRESH = re.compile(  # a file that a killed preparation was writing
    r"\.(dataset(\.partial)?\.json|tokenizer(_config)?\.json|bad_lines\.txt|\.kempner"
    r"|(train|val)_\d{5,}(\.\w+)?\.npy)\.\d+\.new"
)
SHOWN_SKIPPED = 5  # skipped files named in a message


class ShardWriter:
    """Collects encoded units and writes them as shards; `sidecar` grows with each shard."""

    def __init__(self, directory: Path, sidecar: Sidecar) -> None:
        self.directory = directory
        self.sidecar = sidecar
        self._pending: dict[str, list[TokenArray]] = {split: [] for split in DATA_SPLITS}
        self._count = dict(sidecar.prepared["progress"])
        self._bad_lines: list[str] = []  # the lines left out
        # The file is written before the count and may have more lines: see _flush().
        if bad_lines := self._count["bad_lines"]:
            self._bad_lines = (directory / BAD_LINES).read_text().splitlines()[:bad_lines]

    @property
    def units_done(self) -> int:
        """Units of the input that are in finished shards or pending."""
        return int(self._count["units"])

    def add(self, unit: Encoded) -> None:
        """Append a unit; its bad lines are left out and recorded."""
        # Write a full shard only when more follows: finish() may move its end to validation.
        full = self._pending_tokens() >= self.sidecar.prepared["settings"]["shard_tokens"]
        if full and any(map(len, unit.tokens.values())):
            self._flush()
        for split, tokens in unit.tokens.items():
            if len(tokens):
                self._pending[split].append(tokens)
        self._count["units"] += 1
        self._count["skipped"] += len(unit.skipped)
        names = dict.fromkeys([*self._count["skipped_names"], *unit.skipped])
        self._count["skipped_names"] = list(names)[:SHOWN_SKIPPED]
        self._count["empty"] += unit.empty
        bad = self.bad_lines(unit)
        self._bad_lines += (one_line(line.name, line) for line in bad)
        self._count["bad_lines"] = len(self._bad_lines)

    def bad_lines(self, unit: Encoded) -> list[BadLine]:
        """Return the bad lines of a unit, numbered as in the file. add() calls it; a unit that is
        not added must still be counted, because line numbers go on from unit to unit."""
        before = []
        for begins, count in unit.lines:
            self._count["lines"] = 0 if begins else self._count["lines"]
            before.append(self._count["lines"])
            self._count["lines"] += count
        return [replace(bad, number=before[bad.piece] + bad.number + 1) for bad in unit.bad]

    def finish(self) -> Sidecar:
        """Write pending tokens, then dataset.json, which makes the data readable."""
        if self._pending_tokens():
            self._balance()
            self._flush()
        elif not self.sidecar.tokens("train"):
            raise DataError("; ".join(["the input has no text", *skipped_remarks(self._count)]))
        self.sidecar.save(self.directory / SIDECAR)
        # After the sidecar: if killed in between, the next start finds finished data.
        (self.directory / PROGRESS).unlink()
        remove_units(self.directory)
        return self.sidecar

    def _pending_tokens(self) -> int:
        return sum(len(tokens) for parts in self._pending.values() for tokens in parts)

    def _balance(self) -> None:
        """Correct the held-out share from the end: with few documents, the hash may hold out far
        too little or too much."""
        fraction = self.sidecar.prepared["settings"]["val_fraction"]
        pending = {name: sum(map(len, parts)) for name, parts in self._pending.items()}
        val = self.sidecar.tokens("val") + pending["val"]
        total = self.sidecar.tokens("train") + pending["train"] + val
        if fraction * total / 2 <= val <= fraction * total * 2:
            return
        want = round(fraction * total) - self.sidecar.tokens("val")
        tokens = np.concatenate([*self._pending["train"], *self._pending["val"]])
        if self.sidecar.kind == "text":
            train, held_out = split_documents(tokens, want, self.sidecar.eod)
        else:
            train, held_out = chat_marks.split_conversations(tokens, want, self.sidecar.kind)
        self._pending = {"train": [train], "val": [held_out]}

    def _flush(self) -> None:
        # Shards and bad lines first, then the record that counts them: after a kill, files without
        # a record are written again.
        splits = dict(self.sidecar.splits)
        for split, parts in self._pending.items():
            if sum(map(len, parts)):
                name = f"{split}_{len(splits[split]):05d}"
                splits[split] = [*splits[split], self._write(name, parts)]
        self._pending = {split: [] for split in DATA_SPLITS}
        if self._bad_lines:
            write_atomic(self.directory / BAD_LINES, "\n".join([*self._bad_lines, ""]))
        prepared = {**self.sidecar.prepared, "progress": dict(self._count)}
        earlier = self.sidecar.prepared["progress"]["units"]
        self.sidecar = replace(self.sidecar, splits=splits, prepared=prepared)
        self.sidecar.save(self.directory / PROGRESS)
        # Only once the record lists them as in shards.
        for number in range(earlier, self.units_done):
            unit_file(self.directory, number).unlink(missing_ok=True)

    def _write(self, name: str, parts: list[TokenArray]) -> Shard:
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


def one_line(where: str, bad: BadLine) -> str:
    """Format a bad line for BAD_LINES: file names and JSON keys may contain line ends
    and invalid UTF-8."""
    text = " ".join(f"{where}:{bad.number}: {bad.reason}".splitlines())
    return text.encode("utf-8", "backslashreplace").decode()


def skipped_remarks(progress: dict[str, Any]) -> list[str]:
    """Describe what was left out, in phrases."""
    names, remarks = progress.get("skipped_names", []), []
    if count := progress["skipped"]:
        examples = f" ({', '.join(names)}{', ...' if count > len(names) else ''})" if names else ""
        remarks.append(
            f"skipped {count} files, or parts of them, that are not UTF-8 text{examples}"
        )
    if count := progress.get("left_out"):
        of = ", ".join(progress["left_out_names"])
        more = ", ..." if count > len(progress["left_out_names"]) else ""
        what = "links to directories or special files"
        remarks.append(f"left out {count} {what} ({of}{more})")
    if progress.get("bad_lines"):
        remarks.append(f"skipped {progress['bad_lines']} bad lines of JSON: see {BAD_LINES}")
    if progress["empty"]:
        remarks.append(f"{progress['empty']} empty documents left out")
    return remarks


def split_documents(tokens: TokenArray, want: int, eod: int) -> tuple[TokenArray, TokenArray]:
    """Cut about `want` tokens off the end: between documents if that yields half to twice as many.

    Otherwise the cut splits a document, and its first part gets an end-of-document token.
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


def _npy(parts: list[TokenArray]) -> Callable[[BinaryIO], object]:
    """Return a writer of a 1-D .npy from its parts. Not np.save, which drops the reason of
    a failed write."""

    def write(file: BinaryIO) -> None:
        shape = (sum(map(len, parts)),)
        header = {"descr": parts[0].dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for part in parts:
            file.write(np.ascontiguousarray(part).data)

    return write


# --- What is in the directory already ---------------------------------------------------------


@contextmanager
def shard_lock(directory: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Lock the directory so that one process writes shards at a time; the tasks of a job, which
    write units, share the lock (fcntl.LOCK_SH). Raises DataError if another holds it."""
    # Lock the directory itself, to leave no lock file in the data.
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
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


def earlier_preparation(directory: Path, sidecar: Sidecar, overwrite: bool) -> Sidecar:
    """Return the sidecar to resume from: `sidecar` (if nothing exists), the record of a killed run,
    or that of finished data.

    Data made with other settings or from other inputs is refused, or removed with `overwrite`.
    """
    for leftover in directory.glob(".*.new"):
        if FRESH.fullmatch(leftover.name):
            leftover.unlink()
    finished = (directory / SIDECAR).is_file()
    record = directory / (SIDECAR if finished else PROGRESS)
    if not record.is_file():
        problems = [
            f"{path}: a shard without a {SIDECAR}; choose another --out, or --overwrite"
            for path in _shards(directory)[:1]
        ]
        if not problems:
            remove_units(directory)
            return sidecar
    else:
        sidecar_there, problems = _examine(record, sidecar, finished)
        redo = finished and overwrite
        if sidecar_there and not problems and not redo:
            return sidecar_there
        if (
            sidecar_there
            and not finished
            and not any(sidecar_there.splits.values())
            and not _units(directory)
        ):
            problems = []  # nothing written yet: nothing is lost
    if problems and not overwrite:
        raise ConfigError(problems)
    # Also with --overwrite, which is for prepared data, not for a user's own files.
    if finished and (strange := _not_recorded(directory)):
        raise ConfigError(
            f"--out = {directory} has files that its {SIDECAR} does not record, and that would be "
            f"replaced: {', '.join(strange)}; move them away, or choose another --out"
        )
    discard_data(directory)
    return sidecar


def begun_preparation(directory: Path, sidecar: Sidecar) -> Sidecar:
    """Return the record of a begun or finished preparation with the same settings. Changes nothing:
    the tasks of a job call it concurrently."""
    finished = (directory / SIDECAR).is_file()
    sidecar_there = Sidecar.load(directory / (SIDECAR if finished else PROGRESS))
    if problems := _differences(directory, sidecar_there, sidecar, finished):
        raise ConfigError(problems)
    return sidecar_there


def _examine(record: Path, sidecar: Sidecar, finished: bool) -> tuple[Sidecar | None, list[str]]:
    try:
        sidecar_there = Sidecar.load(record)
    except ConfigError as error:
        return None, error.problems
    differences = _differences(record.parent, sidecar_there, sidecar, finished)
    return sidecar_there, differences or _damage(record.parent, sidecar_there)


def discard_data(directory: Path) -> None:
    """Remove prepared data, the sidecar first: no reader finds a sidecar without its shards."""
    # First, so that the next start recognises the leftovers of a kill as its own data.
    mark_directory(directory, Kind.DATA)
    for name in (SIDECAR, PROGRESS, SIDECAR_TOKENIZER, TOKENIZER_CONFIG, BAD_LINES):
        (directory / name).unlink(missing_ok=True)
    remove_units(directory)
    for path in _shards(directory):
        path.unlink()


def forget_preparation(directory: Path, is_new: bool) -> None:
    """Remove the record of a preparation that has written no shard, and the directory if it
    `is_new`, created for it. A list of bad lines stays, in a directory that is still marked."""
    if _shards(directory) or _units(directory):
        return
    for name in (PROGRESS, SIDECAR_TOKENIZER, TOKENIZER_CONFIG):
        (directory / name).unlink(missing_ok=True)
    if not (directory / BAD_LINES).exists():
        (directory / MARK_FILE).unlink(missing_ok=True)
    if is_new and not any(directory.iterdir()):
        directory.rmdir()


def _not_recorded(directory: Path) -> list[str]:
    """List files that discard_data() would remove although they do not belong to the finished data;
    none if the sidecar cannot be read."""
    try:
        sidecar_there = Sidecar.load(directory / SIDECAR)
    except ConfigError:
        return []
    shards = [directory / shard.file for shard in itertools.chain(*sidecar_there.splits.values())]
    marks = [path for shard in shards for path in chat_marks.files_of_shard(shard).values()]
    strange = [path.name for path in _shards(directory) if path not in {*shards, *marks}]
    if sidecar_there.tokenizer["kind"] == "bytes" and (directory / SIDECAR_TOKENIZER).exists():
        strange.append(SIDECAR_TOKENIZER)
    return strange


def _units(directory: Path) -> list[Path]:
    return list((directory / UNITS_FOLDER).glob("*.npz"))


def _shards(directory: Path) -> list[Path]:
    return sorted(
        path
        for split in DATA_SPLITS
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
            what = "was made from other inputs (their names, sizes or modification times differ)"
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
        # Only the numbers; a header precedes them.
        least = {path: shard.tokens * np.dtype(there.dtype).itemsize}
        if there.kind != "text":
            least |= dict.fromkeys(chat_marks.files_of_shard(path).values(), shard.documents)
        problems += [
            f"{path}: missing or cut off; prepare the data again with --overwrite"
            for path, size in least.items()
            if not path.is_file() or path.stat().st_size < size
        ]
    return problems
