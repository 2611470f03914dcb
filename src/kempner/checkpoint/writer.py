"""Saving that hardly disturbs the training: one copy into memory that is kept, then few large
writes.

The memory of a rank is the image of the file that it writes: each tensor between the bytes that
torch.save puts before and after it, so that any reader of torch's distributed checkpoints (DCP)
reads it. The training stands still for the copy alone. Who writes which tensor is planned by DCP,
once, and kept. docs/async-save.md has the measurements.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import io
import math
import mmap
import os
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import DTensor

from kempner.checkpoint.crc import crc32

PAGE = 4096  # what O_DIRECT asks of addresses, offsets and lengths, at most, on known file systems
ALIGN = 64  # torch.save's alignment of the data
CHUNK = 1 << 26  # a write: large for the device, and so short that its bytes are summed from cache


def file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


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
def frame(shape: torch.Size, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """The bytes that torch.save writes before and after the data of a contiguous tensor."""
    stream, size = _Gap(), math.prod(shape) * dtype.itemsize
    strides = torch.empty(shape, device="meta").stride()
    # Reserved, never touched: torch.empty would fill it when algorithms must be deterministic.
    storage = torch.UntypedStorage(size)  # type: ignore[no-untyped-call]
    with torch.serialization.skip_data():
        tensor = torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)
        torch.save(tensor, stream)  # type: ignore[arg-type]
    assert stream.gap == size
    return bytes(stream.before), bytes(stream.after)


class Place(NamedTuple):
    """Where a tensor lies in the file: [offset] before [data] data [.. + size] after."""

    of: MetadataIndex
    shape: torch.Size
    dtype: torch.dtype
    offset: int
    data: int
    size: int
    length: int


def lay_out(items: list[WriteItem]) -> list[Place]:
    """The places of tensors in the order of the plan; a function of shapes and dtypes alone."""
    places, at = [], 0
    for item in items:
        if item.tensor_data is None:
            raise TypeError(f"{item.index.fqn} is no tensor: only tensors go into a checkpoint")
        shape, dtype = item.tensor_data.chunk.sizes, item.tensor_data.properties.dtype
        before, after = frame(shape, dtype)
        size = math.prod(shape) * dtype.itemsize
        length = len(before) + size + len(after)
        places.append(Place(item.index, shape, dtype, at, at + len(before), size, length))
        at += -(-length // ALIGN) * ALIGN
    return places


class Image:
    """This rank's file in memory. Never staged into while it is being written: the caller waits."""

    def __init__(self, items: list[WriteItem], pinned: bool) -> None:
        """`pinned`: a GPU copies into it by itself."""
        places = lay_out(items)
        end = places[-1].offset + places[-1].length if places else 0
        memory = torch.frombuffer(pages(end), dtype=torch.uint8)
        self.bytes = memory.numpy().data[: -(-end // PAGE) * PAGE]
        self.targets: dict[str, Tensor] = {}
        for place in places:
            before, after = frame(place.shape, place.dtype)
            self.bytes[place.offset : place.data] = before
            self.bytes[place.data + place.size : place.offset + place.length] = after
            if place.size:
                data = memory[place.data : place.data + place.size]
                self.targets[place.of.fqn] = data.view(place.dtype).view(place.shape)
        self.pinned = memory if pinned else None
        if pinned:
            cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))

    def close(self) -> None:
        """Give the pinned memory back; the rest goes with the object."""
        if self.pinned is not None:
            cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cuda.cudaHostUnregister(self.pinned.data_ptr())
            self.pinned = None

    @torch.no_grad()
    def stage(self, state: dict[str, Tensor]) -> None:
        """Copy the tensors of this moment in; when it returns, the training may change them."""
        sources = [local(state[name]) for name in self.targets]
        asynchronous = self.pinned is not None
        if sources:
            torch._foreach_copy_(list(self.targets.values()), sources, non_blocking=asynchronous)
        if asynchronous:
            torch.cuda.current_stream().synchronize()


def pages(size: int) -> mmap.mmap:
    """Zeroed memory for at least `size` bytes, whole pages."""
    size = max(-(-size // PAGE) * PAGE, PAGE)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer faults at the first save
        memory.madvise(mmap.MADV_DONTFORK)  # a child would make every page be copied once more
    return memory


def local(tensor: Tensor) -> Tensor:
    """This rank's part, without a gradient."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


# --- The plan ---


class Plan(NamedTuple):
    """Who writes what. `metadata`: the contents of .metadata, the same for each save; rank 0's."""

    items: list[WriteItem]
    metadata: bytes


def geometry_of(state: dict[str, Tensor]) -> list[Any]:
    """All that a plan depends on, to compare: name, shape, dtype, and how it is cut."""
    return [
        (name, tensor.shape, tensor.dtype, getattr(tensor, "placements", None))
        for name, tensor in state.items()
    ]


def make_plan(state: dict[str, Tensor], ranks: _DistWrapper) -> Plan:
    """Let DCP plan on all ranks: of replicas one is written, and each rank writes about as much.

    Raises CheckpointException on all ranks when one fails.
    """
    planner, metadata = DefaultSavePlanner(), b""

    def of_rank() -> SavePlan:
        detached = {name: tensor.detach() for name, tensor in state.items()}
        planner.set_up_planner(detached, is_coordinator=ranks.is_coordinator)
        return planner.create_local_plan()

    def of_all(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        plans, whole = planner.create_global_plan(plans)
        whole.storage_data = {
            place.of: _StorageInfo(file_of(rank), place.offset, place.length)
            for rank, plan in enumerate(plans)
            for place in lay_out(plan.items)
        }
        whole.storage_meta = StorageMeta()
        metadata = pickle.dumps(whole)
        return plans

    items = ranks.reduce_scatter("plan", of_rank, of_all).items
    return Plan(items, metadata)


# --- The file ---


def write_file(path: Path, data: memoryview) -> dict[str, int]:
    """Write whole pages to a new file and make them durable; returns its size and CRC-32.

    Past the page cache where the file system allows it: the cache would cost another copy, and
    memory that the training's files are in. Raises OSError, also when the disk is full.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        set_direct(fd, True)
        done = crc = 0
        while done < len(data):
            try:
                written = os.pwrite(fd, data[done : done + CHUNK], done)
            except OSError as error:
                if error.errno != errno.EINVAL or not set_direct(fd, False):
                    raise
                continue
            crc = crc32(data[done : done + written], crc)
            done += written
        os.fsync(fd)
    finally:
        os.close(fd)
    return {"bytes": done, "crc32": crc}


def set_direct(fd: int, on: bool) -> bool:
    """Turn O_DIRECT on or off; returns whether that changed something."""
    before = fcntl.fcntl(fd, fcntl.F_GETFL)
    after = before | os.O_DIRECT if on else before & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, after)
    except OSError:  # EINVAL: this file system has no such thing
        return False
    return before != after
