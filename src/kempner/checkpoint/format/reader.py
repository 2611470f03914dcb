"""Reading of checkpoints: raw bytes at known offsets, each block verified as it is read. Nothing is
unpickled, so that files cannot run code and do not depend on the version of Python.

    path = history.latest_checkpoint(Path("runs/debug/checkpoints"))
    tensors = read_tensors(path, ["model.embed.weight"])      # whole, on the CPU, one process
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kempner.checkpoint import history
from kempner.checkpoint.format.crc import crc32
from kempner.checkpoint.format.plan import (
    TENSORS,
    Box,
    CheckpointLayout,
    StoredTensor,
    Table,
    dtype_of,
    file_of,
    writing_replica,
)
from kempner.checkpoint.format.writer import FILE_MAGIC, FOOTER
from kempner.checkpoint.history import Damaged

# Read first at the end of a file; usually contains the whole index.
INDEX_TAIL_BYTES = 1 << 16


class Want(NamedTuple):
    """A box of a tensor to read into `target`; the tensor is `key` in the table and
    `name` on disk."""

    key: str
    name: str
    target: Tensor
    box: Box


def from_json(content: dict[str, Any]) -> Table:
    layouts = [
        None
        if entry is None
        else CheckpointLayout(*(tuple(x) if isinstance(x, list) else int(x) for x in entry))  # type: ignore[arg-type]
        for entry in content["layouts"]
    ]
    return {
        name: StoredTensor(torch.Size(shape), dtype_of(dtype), layouts[layout], turn)
        for name, (dtype, shape, layout, turn) in content["tensors"].items()
    }


def ranks_with(spec: StoredTensor, box: Box, near: int) -> Iterator[int]:
    """Yield the ranks whose files together hold a box of a shared tensor. `near`: the rank to
    prefer if every rank has a copy."""
    assert spec.layout is not None
    mesh, cuts = spec.layout[:2]
    axes, ranks = spec.layout.axes, spec.layout.ranks
    if not all(length for _, length in box):
        return
    if spec.everywhere:
        yield ranks[near % len(ranks)]
        return

    def walk(cut: int, rank: int, region: Box) -> Iterator[int]:
        if cut == len(axes):
            yield rank
            return
        # In the order in which the axes cut: the second of two on one dimension cuts the parts.
        axis = axes[cut]
        size, dim, apart = mesh[axis], cuts[axis], math.prod(mesh[axis + 1 :])
        if dim is None:
            yield from walk(cut + 1, rank + writing_replica(spec.turn, size) * apart, region)
            return
        start, length = region[dim]
        # The cuts of plan.own_box(): parts of equal length, of which the last may be shorter.
        step = max(1, -(-length // size))
        first = max(box[dim][0] - start, 0)
        end = min(sum(box[dim]) - start, length)
        for index in range(first // step, -(-end // step)):
            part = (start + index * step, min(step, length - index * step))
            yield from walk(
                cut + 1, rank + index * apart, (*region[:dim], part, *region[dim + 1 :])
            )

    yield from walk(0, ranks.start, spec.whole)


class DataFile:
    """One rank's file: its index, and its blocks, each verified when it is read."""

    def __init__(self, path: Path, manifest: dict[str, Any], rank: int) -> None:
        """Raises Damaged if the file is missing, short, torn, or of another checkpoint."""
        self.path = path / file_of(rank)
        try:
            self._fd = os.open(self.path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Damaged(f"{self.path}: {error.strerror}") from None
        try:
            self.index = self._read_index()
            # A file copied from another step or rank is complete and has valid checksums.
            for key, value in (("step", manifest["step"]), ("rank", rank)):
                if self.index[key] != value:
                    raise self._damage(f"its {key} is {self.index[key]}, expected {value}")
            self._block_size: int = self.index["block"]
            self._buffer = bytearray(self._block_size)
            self._in_buffer = -1
        # __exit__ is not called for what __init__ raises.
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> DataFile:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        os.close(self._fd)

    def _damage(self, what: str) -> Damaged:
        return Damaged(f"{self.path}: {what}")

    def _read_index(self) -> dict[str, Any]:
        size = os.fstat(self._fd).st_size
        tail = os.pread(self._fd, INDEX_TAIL_BYTES, max(0, size - INDEX_TAIL_BYTES))
        if len(tail) < FOOTER.size:
            raise self._damage(f"{size} bytes are too few for a data file")
        magic, at, length, crc = FOOTER.unpack(tail[-FOOTER.size :])
        if magic != FILE_MAGIC or at + length + FOOTER.size > size:
            raise self._damage(f"its {size} bytes do not end as a data file does")
        first = at - (size - len(tail))
        # Usually the tail contains the whole index.
        text = tail[first : first + length] if first >= 0 else os.pread(self._fd, length, at)
        if zlib.crc32(text) != crc:
            raise self._damage("the CRC-32 of its index differs")
        return json.loads(text)  # type: ignore[no-any-return]

    def block(self, k: int) -> memoryview:
        """Return the k-th block, verified. It is valid until the next call."""
        start = k * self._block_size
        view = memoryview(self._buffer)[: min(self._block_size, self.index["bytes"] - start)]
        if self._in_buffer != k:
            # Until verified, the buffer holds no block.
            self._in_buffer, bytes_read = -1, 0
            while bytes_read < len(view):
                count = os.preadv(self._fd, [view[bytes_read:]], start + bytes_read)
                if count == 0:
                    raise self._damage(f"it ends after {start + bytes_read} bytes")
                bytes_read += count
            if crc32(view) != self.index["crc32"][k]:
                raise self._damage(f"the CRC-32 of bytes {start} to {start + len(view)} differs")
            self._in_buffer = k
        return view

    def read(self, start: int, target: Tensor, dtype: torch.dtype) -> None:
        """Fill `target` [N] with the N elements of `dtype` from byte `start` on, cast to its own.
        Elements never cross blocks: both begin at multiples of their size."""
        stop, size = start + len(target) * dtype.itemsize, self._block_size
        for k in range(start // size, -(-stop // size)):
            low, high = max(start, k * size), min(stop, (k + 1) * size)
            part = torch.frombuffer(self.block(k)[low - k * size : high - k * size], dtype=dtype)
            target[(low - start) // dtype.itemsize :][: len(part)].copy_(part)

    def announce(self, want: Want) -> None:
        """Let the kernel prefetch what fill() will read."""
        if (entry := self.index["tensors"].get(want.name)) is not None:
            (first, rows), row = _overlap(want, entry)[0], _row_bytes(entry)
            os.posix_fadvise(
                self._fd, entry["at"] + first * row, rows * row, os.POSIX_FADV_WILLNEED
            )

    def fill(self, want: Want, spec: StoredTensor) -> None:
        """Copy the part of a wanted box that is in this file."""
        entry = self.index["tensors"].get(want.name)
        # Index and table have separate checksums: both may be intact but from different saves.
        if entry is None or (entry["shape"], f"torch.{entry['dtype']}") != (
            [*spec.shape],
            str(spec.dtype),
        ):
            raise self._damage(f"it does not hold {want.name} as {TENSORS} says")
        rows, *inner = _overlap(want, entry)
        part = want.target
        for dim, (here, (start, _)) in enumerate(zip(entry["start"], want.box, strict=True)):
            low, length = (rows, *inner)[dim]
            part = part.narrow(dim, here + low - start, length)
        if part.numel() == 0:
            return
        # Read whole stored rows in one piece.
        first = entry["at"] + rows[0] * _row_bytes(entry)
        # Read straight into the target if its memory has the file's order, else through a copy.
        columns = entry["size"][1:]
        if part.is_contiguous() and [length for _, length in inner] == columns:
            self.read(first, part.view(-1), spec.dtype)
            return
        stored_rows = torch.empty((rows[1], *columns), dtype=spec.dtype)
        self.read(first, stored_rows.view(-1), spec.dtype)
        for dim, (start, length) in enumerate(inner, 1):
            stored_rows = stored_rows.narrow(dim, start, length)
        part.copy_(stored_rows)


def _overlap(want: Want, entry: dict[str, Any]) -> list[tuple[int, int]]:
    """Return start and length, in each dimension, of the overlap with the stored part; a scalar
    counts as one row."""
    ranges = []
    for (start, length), here, size in zip(want.box, entry["start"], entry["size"], strict=True):
        low = max(start - here, 0)
        ranges.append((low, min(start + length - here, size) - low))
    return ranges or [(0, 1)]


def _row_bytes(entry: dict[str, Any]) -> int:
    return int(entry["bytes"] // (entry["size"] or [1])[0])


@torch.no_grad()
def read_wanted(
    path: Path, manifest: dict[str, Any], table: Table, wants: Iterable[Want], near: int
) -> None:
    """Fill the targets from the files that hold parts of them; no other file is opened, and each
    block is read once.

    Raises Damaged. `near`: the rank whose file to prefer if every file has a copy.
    """
    by_rank = defaultdict(list)
    for want in wants:
        spec = table[want.key]
        if spec.layout is None:
            # Named PREFIX.RANK.NAME, and in that rank's own file.
            by_rank[int(want.name.split(".")[1])].append(want)
            continue
        for rank in ranks_with(spec, want.box, near):
            by_rank[rank].append(want)
    for rank, of_rank in sorted(by_rank.items()):
        with DataFile(path, manifest, rank) as file:
            entries = file.index["tensors"]
            # In file order, so that each block is read and verified once.
            of_rank.sort(key=lambda want: entries.get(want.name, {"at": 0})["at"])
            for want, after in zip_longest(of_rank, of_rank[1:]):
                if after is not None:
                    file.announce(after)
                file.fill(want, table[want.key])


# --- For one process, without a model ---


def read_table(path: Path, manifest: dict[str, Any]) -> Table:
    """Read the table of a checkpoint. Raises Damaged."""
    return from_json(json.loads(history.read_listed(path, manifest, TENSORS)))


def stored_tensors(path: Path) -> Table:
    """Map each tensor's name to shape and dtype; `*` in a name stands for each rank."""
    return read_table(path, history.read_manifest(path))


def read_tensors(path: Path, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Read whole tensors into memory, whatever the number of ranks that wrote them; by default all
    shared tensors. Needs no process group.

    Raises Damaged if the checkpoint is damaged, KeyError for an unknown name.
    """
    table = stored_tensors(path)
    if names is None:
        names = [name for name, stored in table.items() if stored.layout is not None]
    stored = {name: table[_key(name, table)] for name in names}
    targets = {name: torch.empty(of.shape, dtype=of.dtype) for name, of in stored.items()}
    read_into(path, targets)
    return targets


def read_into(path: Path, targets: Mapping[str, Tensor]) -> None:
    """Read whole tensors into the caller's, on any device and cast to their dtype."""
    manifest = history.read_manifest(path)
    table = read_table(path, manifest)
    keys = {name: _key(name, table) for name in targets}
    wants = [Want(keys[name], name, t, table[keys[name]].whole) for name, t in targets.items()]
    read_wanted(path, manifest, table, wants, near=0)


def _key(name: str, table: Table) -> str:
    """Return a tensor's key in the table: rng.3.cpu is there as rng.*.cpu."""
    return name if name in table else re.sub(r"\.\d+\.", ".*.", name, count=1)


def verify_checkpoint(path: Path) -> list[str]:
    """Read everything in a checkpoint; returns a list of the damage."""
    try:
        manifest = history.read_manifest(path)
    except Damaged as error:
        return [str(error)]
    wrong = []
    for name in manifest["files"]:
        try:
            history.read_listed(path, manifest, name)
        except Damaged as error:
            wrong.append(str(error))
    for rank in range(manifest["world_size"]):
        try:
            with DataFile(path, manifest, rank) as file:
                for k in range(math.ceil(file.index["bytes"] / file.index["block"])):
                    file.block(k)
        except Damaged as error:
            wrong.append(str(error))
    return wrong
