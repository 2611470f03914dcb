"""Write checkpoints with little disturbance of the training: one copy into reused memory, then
few large writes.

A rank's memory holds the image of the file that it writes: each tensor between the bytes that
torch.save puts before and after it, so that any reader of torch's distributed checkpoints (DCP) can
read it. Training waits only for that copy. docs/reference/benchmarks.md has the measurements.

Behind the image, the file ends with its own index as JSON, and a footer with the index's offset:

    image, whole pages | index | zeros | footer
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import io
import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kempner.checkpoint.format.crc import crc32
from kempner.checkpoint.format.plan import Box, Table, chunks_of, local_part

PAGE = 4096  # the strictest O_DIRECT alignment of known file systems: addresses, offsets, lengths
ALIGN = 64  # torch.save's alignment of the data
WRITE = 1 << 26  # bytes of a write: large for the device, checksummed while in cache
# Bytes that share a CRC-32, so that a reader of a part verifies little more than it needs.
CRC_BLOCK_BYTES = 1 << 23
FOOTER = struct.Struct("<8sQQI4x")  # FILE_MAGIC, offset and length of the index, its CRC-32
FILE_MAGIC = b"kempner2"


# --- The image of a file ---


class _Gap(io.RawIOBase):
    """A stream for torch.save under skip_data: keeps what is written before and after the gap."""

    def __init__(self) -> None:
        self.before, self.after, self.gap = bytearray(), bytearray(), 0

    def write(self, data: Any) -> int:
        part = self.after if self.gap else self.before
        part += data
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert whence == os.SEEK_CUR and not self.gap
        self.gap = offset
        return len(self.before) + offset


@functools.cache
def torch_save_frame(shape: torch.Size, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """Return the bytes that torch.save writes before and after the data of a contiguous tensor."""
    stream, size = _Gap(), math.prod(shape) * dtype.itemsize
    strides = torch.empty(shape, device="meta").stride()
    # Reserved, never touched: torch.empty would fill it under deterministic algorithms.
    storage = torch.UntypedStorage(size)  # type: ignore[no-untyped-call]
    with torch.serialization.skip_data():
        tensor = torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)
        torch.save(tensor, stream)  # type: ignore[arg-type]
    assert stream.gap == size
    return bytes(stream.before), bytes(stream.after)


class Slot(NamedTuple):
    """Place of a tensor's part in the file: [offset] before [data] data [.. + size] after."""

    key: str  # in the table
    name: str  # on disk
    dtype: torch.dtype
    shape: torch.Size  # of the whole tensor
    box: Box  # the part stored here
    offset: int
    data: int
    size: int
    length: int

    @property
    def local_shape(self) -> torch.Size:
        return torch.Size(length for _, length in self.box)

    def entry(self) -> dict[str, Any]:
        """Return the slot's entry in the file's index."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": self.shape,
            "start": [start for start, _ in self.box],
            "size": self.local_shape,
            "at": self.data,
            "bytes": self.size,
            "framed": [self.offset, self.length],  # as in torch.save, for readers of DCP
        }


FilePlan = list[Slot]


def plan_file(table: Table, rank: int) -> FilePlan:
    """Plan a rank's file: contents and offsets, from the table alone, without communication."""
    plan, at = [], 0
    for key, box in chunks_of(table, rank):
        spec = table[key]
        shape = torch.Size(length for _, length in box)
        before, after = torch_save_frame(shape, spec.dtype)
        size = math.prod(shape) * spec.dtype.itemsize
        length = len(before) + size + len(after)
        name = key.replace("*", str(rank)) if spec.layout is None else key
        data = at + len(before)
        plan.append(Slot(key, name, spec.dtype, spec.shape, box, at, data, size, length))
        # Aligned, so that the data can be viewed in their dtype in place.
        at += -(-length // ALIGN) * ALIGN
    return plan


def image_bytes(plan: FilePlan) -> int:
    return plan[-1].offset + plan[-1].length if plan else 0


class Image:
    """This rank's file in memory. The caller never stages into it while it is being written."""

    waves = 1
    """Number of parts; with more than one, the steps wait until all are written."""

    def __init__(
        self, plan: FilePlan, device: torch.device | None, warn: Callable[[str], None]
    ) -> None:
        """`device`: the GPU that copies into the memory, None on a CPU. May run in a thread.

        Pinning can fail although the rest of a save works (a limit on locked memory, a virtual
        machine). Then the memory stays pageable, with a warning, and copies are slower.
        """
        end = image_bytes(plan)
        memory = torch.frombuffer(allocate_pages(end), dtype=torch.uint8)
        memory[::PAGE] = 0  # fault the pages in now, so that the first save does not
        self.bytes = memory.numpy().data[: -(-end // PAGE) * PAGE]
        self.entries = {slot.name: slot.entry() for slot in plan}
        self.targets: dict[str, Tensor] = {}
        for slot in plan:
            before, after = torch_save_frame(slot.local_shape, slot.dtype)
            self.bytes[slot.offset : slot.data] = before
            self.bytes[slot.data + slot.size : slot.offset + slot.length] = after
            if slot.size:
                data = memory[slot.data : slot.data + slot.size]
                self.targets[slot.key] = data.view(slot.dtype).view(slot.local_shape)
        self._pinned: Tensor | None = None
        if device is not None:
            from kempner.checkpoint.format.pinned import pin_memory

            self._pinned = memory if pin_memory(memory, device, warn) else None

    def close(self) -> None:
        """Unpin the memory; it is freed with the object."""
        if self._pinned is not None:
            from kempner.checkpoint.format.pinned import unpin_memory

            unpin_memory(self._pinned)
            self._pinned = None

    def pieces(self) -> Iterable[memoryview]:
        """Return the bytes of the file in order; all but the last are whole writes."""
        return [self.bytes]

    @torch.no_grad()
    def stage(self, state: dict[str, Tensor]) -> None:
        """Copy the tensors; once this returns, training may change them."""
        sources = [local_part(state[key]) for key in self.targets]
        asynchronous = self._pinned is not None
        if sources:
            torch._foreach_copy_(list(self.targets.values()), sources, non_blocking=asynchronous)
        if asynchronous:
            # When this returns, the training overwrites the sources.
            torch.cuda.current_stream().synchronize()


def allocate_pages(size: int) -> mmap.mmap:
    """Allocate zeroed memory for at least `size` bytes, in whole pages."""
    size = max(-(-size // PAGE) * PAGE, PAGE)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a kernel without it
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer faults at the first save
        memory.madvise(mmap.MADV_DONTFORK)  # a fork must not copy these pages
    return memory


# --- The file ---


def write_file(path: Path, pieces: Iterable[memoryview], index: dict[str, Any]) -> None:
    """Write the pieces of the image, whole pages, and the index with its sums to a new file;
    make it durable.

    Bypasses the page cache if the file system allows it: the cache would cost another copy, and
    memory that holds the training's files. Raises OSError with the path, also if the disk is full.
    """
    try:
        # O_EXCL: never write into a file that another process has begun.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            set_direct(fd, True)
            sums, at = list[int](), 0
            for part in (
                each[k : k + WRITE] for each in pieces for k in range(0, len(each), WRITE)
            ):
                _write(fd, part, at)
                at += len(part)
                # Checksum right after the write, while the part is in the CPU cache.
                sums += [
                    crc32(part[k : k + CRC_BLOCK_BYTES])
                    for k in range(0, len(part), CRC_BLOCK_BYTES)
                ]
            index = {**index, "bytes": at, "block": CRC_BLOCK_BYTES, "crc32": sums}
            _write(fd, _trailer(index, at), at)
            # O_DIRECT skips the page cache, not the disk's own cache nor the file's metadata.
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        # The errors of pwrite() and fsync() do not name the file.
        raise OSError(error.errno, error.strerror, str(path)) from error


def _trailer(index: dict[str, Any], at: int) -> memoryview:
    """Return the index and the footer, which ends a page."""
    text = json.dumps(index, separators=(",", ":")).encode()
    length = -(-(len(text) + FOOTER.size) // PAGE) * PAGE
    # In separate pages: O_DIRECT needs an aligned address and length.
    memory = memoryview(allocate_pages(length))
    memory[: len(text)] = text
    memory[length - FOOTER.size : length] = FOOTER.pack(FILE_MAGIC, at, len(text), zlib.crc32(text))
    return memory[:length]


def _write(fd: int, data: memoryview, at: int) -> None:
    bytes_written = 0
    while bytes_written < len(data):
        try:
            bytes_written += os.pwrite(fd, data[bytes_written:], at + bytes_written)
        except OSError as error:
            # Some file systems accept O_DIRECT but refuse the write: use the page cache.
            if error.errno != errno.EINVAL or not set_direct(fd, False):
                raise


def set_direct(fd: int, on: bool) -> bool:
    """Turn O_DIRECT on or off; returns whether that changed anything."""
    before = fcntl.fcntl(fd, fcntl.F_GETFL)
    after = before | os.O_DIRECT if on else before & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, after)
    except OSError:  # EINVAL: this file system does not support it
        return False
    return before != after
