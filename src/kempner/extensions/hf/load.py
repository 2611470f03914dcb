"""Load weights from a source into a model, sharded or not: each rank reads only its own part."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kempner.checkpoint import history
from kempner.checkpoint.format.plan import Box, local_part, make_table, own_box
from kempner.checkpoint.format.reader import (
    Want,
    read_table,
    read_tensors,
    read_wanted,
    stored_tensors,
)
from kempner.checkpoint.history import Damaged
from kempner.checkpoint.ranks import Ranks
from kempner.config.option import ConfigError
from kempner.extensions.hf.source import (
    HF_FOLDER,
    WeightsSource,
    copy_model_files,
    held_weights,
    read_hf_config,
)
from kempner.extensions.hf.stored import DOWNLOAD_AGAIN, Stored, check_hf_directory
from kempner.extensions.hf.tensors import tensor_names
from kempner.model.config import ModelConfig
from kempner.parallel.build import buffer_names, parameter_names
from kempner.parallel.config import is_adapter

STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
PIECE = 1 << 24  # bytes read at once


def start_from(model: nn.Module, cfg: ModelConfig, run_dir: Path | None) -> str:
    """Fill the model, on all ranks, with the weights of cfg.init_from; in a new run, also keep the
    files beside them (`run_dir`). Returns one line for the log.

    Raises ConfigError on all ranks if the weights do not fit this model.
    """
    # Over gloo: outcomes and paths are on the host, and NCCL would need them on the GPU.
    ranks = Ranks(dist.new_group(backend="gloo"))
    with contextlib.ExitStack() as reading:

        def choose() -> WeightsSource:  # another run may save a newer one at any time
            source = reading.enter_context(held_weights(cfg.init_from or ""))
            if run_dir is not None and source.carried.is_dir():
                copy_model_files(source.carried, run_dir / HF_FOLDER)
            return source

        # Rank 0 holds the lock in `reading` until all ranks have read.
        source = ranks.on_first(choose)
        try:
            ranks.on_all(lambda: load_weights(model, cfg, source, ranks.rank, ranks.size))
        except Damaged as error:
            raise ConfigError(f"{error}; name an older checkpoint") from None
    return f"starts from the weights of {source.name} ({source.path})"


@torch.no_grad()
def load_weights(
    model: nn.Module, cfg: ModelConfig, source: WeightsSource, rank: int = 0, world: int = 1
) -> None:
    """Fill this rank's part of every parameter but adapters, cast to its dtype, and the biases of
    routers.

    Raises ConfigError if a tensor is missing, superfluous or of another shape, Damaged if a
    checkpoint is damaged.
    """
    named_parameters = parameter_names(model).items()
    parameters: dict[str, Tensor] = {
        name: p for name, p in named_parameters if not is_adapter(name)
    }
    parameters |= buffer_names(model)
    here = make_table(parameters, {}, world)
    boxes = {name: own_box(here[name], rank) for name in parameters}
    if source.is_checkpoint:
        manifest = history.read_manifest(source.path)
        table = read_table(source.path, manifest)
        wants = []
        for name, parameter in parameters.items():
            key = f"model.{name}"
            if key not in table or table[key].shape != parameter.shape:
                raise ConfigError(f"{source.path}: has no {key} of shape {[*parameter.shape]}")
            wants.append(Want(key, key, local_part(parameter), boxes[name]))
        # Ranks read different copies of what every file has.
        read_wanted(source.path, manifest, table, wants, near=rank % manifest["world_size"])
        return
    # Rank 0 alone reads the headers of all files. on_all() raises its error on every rank.
    if rank == 0:
        check_hf_directory(source.path, cfg)
    names = tensor_names(cfg, read_hf_config(source.path)["model_type"])
    with Stored(source.path, "pt") as stored:
        fill_tensors(
            stored,
            [ReadJob(local_part(p), names[name], boxes[name]) for name, p in parameters.items()],
        )


def not_finite(source: WeightsSource) -> str:
    """Return the name of a tensor that contains an infinity or NaN; empty if all are finite. Reads
    all weights, so that the kernel has them cached for load_weights()."""
    if source.is_checkpoint:
        table = stored_tensors(source.path)
        names = [name for name in table if name.startswith("model.") and table[name].layout]
        # Lazily: one tensor is in memory at a time, and the first bad one ends the search.
        tensors = ((name, read_tensors(source.path, [name])[name]) for name in names)
        return next((name for name, tensor in tensors if not is_finite(tensor)), "")
    with Stored(source.path, "pt") as directory, _Files(directory) as files:
        for name in directory.places:
            box = tuple((0, length) for length in directory.shape(name))
            if not all(map(is_finite, files.rows(ReadJob(torch.empty(0), name, box)))):
                return name
    return ""


def is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite. Runs at memory speed, unlike isfinite().all(): NaN
    propagates into both extremes."""
    # aminmax() refuses an empty tensor.
    return not tensor.numel() or all(map(math.isfinite, map(float, tensor.aminmax())))


class ReadJob(NamedTuple):
    """Fill `target`, of any dtype, with a box of the stored tensor `name`."""

    target: Tensor
    name: str
    box: Box

    def by_expert(self) -> Iterator[ReadJob]:
        """Split into one job per expert, because Hugging Face stores experts as separate tensors; a
        `*` in the name stands for the expert's number."""
        if "*" not in self.name:
            yield self
            return
        (first, count), *rest = self.box
        for i in range(count):
            name = self.name.replace("*", str(first + i))
            yield ReadJob(self.target[i], name, tuple(rest))


@torch.no_grad()
def fill_tensors(stored: Stored, jobs: Iterable[ReadJob]) -> None:
    """Read only the rows of the boxes, and copy them.

    Not from the mapped file, which the kernel reads page by page, at a third of the speed.
    """
    # A rank may hold nothing of a tensor with fewer rows than there are ranks.
    jobs = [one for job in jobs if job.target.numel() for one in job.by_expert()]
    with _Files(stored) as files, ThreadPoolExecutor(1) as reader:
        pieces = _pieces(files, jobs)
        # A thread reads the next piece while this one is converted.
        ahead = reader.submit(next, pieces, None)
        while (piece := ahead.result()) is not None:
            ahead = reader.submit(next, pieces, None)
            target, rows = piece
            target.copy_(rows)


def _pieces(files: _Files, jobs: Sequence[ReadJob]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of the targets, with their new contents."""
    for job, after in zip_longest(jobs, jobs[1:]):
        if after is not None:
            # The kernel reads the next tensor while this one is copied.
            files.announce(after)
        columns = [slice(start, start + length) for start, length in job.box[1:]]
        at = 0
        for rows in files.rows(job):
            # Whole rows are read; the columns of a tensor-parallel shard are taken from them.
            yield job.target[at : at + len(rows)], rows[(slice(None), *columns)]
            at += len(rows)


class _Files(contextlib.ExitStack):
    """The files of a model, opened to read whole rows of its tensors."""

    def __init__(self, stored: Stored) -> None:
        super().__init__()
        self._stored = stored
        paths = {place.path for place in stored.places.values()}
        self._files = {path: self.enter_context(path.open("rb", buffering=0)) for path in paths}
        self._buffers = [bytearray(), bytearray()]  # reused: new memory costs as much as reading

    def announce(self, job: ReadJob) -> None:
        """Let the kernel read ahead, in the background, what rows() will request."""
        file, start, (_, count), row, _ = self._find(job)
        os.posix_fadvise(file.fileno(), start, count * row, os.POSIX_FADV_WILLNEED)

    def rows(self, job: ReadJob) -> Iterator[Tensor]:
        """Yield the rows of a box, in all columns, in pieces. A piece stays valid while the next
        one is read."""
        file, start, (_, count), row, dtype = self._find(job)
        # Whole rows, which are contiguous in the file; a box of columns is not.
        columns = self._stored.shape(job.name)[1:]
        most = max(1, PIECE // row)
        file.seek(start)
        for at in range(0, count, most):
            size = min(most, count - at) * row
            self._buffers.reverse()
            if len(self._buffers[0]) < size:
                self._buffers[0] = bytearray(max(size, PIECE))
            view = memoryview(self._buffers[0])[:size]
            bytes_read = 0
            while bytes_read < len(view):
                byte_count = file.readinto(view[bytes_read:])
                if not byte_count:
                    # It was complete when opened: somebody has written to it since.
                    raise ConfigError(f"{file.name}: has become shorter; {DOWNLOAD_AGAIN}")
                bytes_read += byte_count
            yield torch.frombuffer(view, dtype=dtype).view(-1, *columns)

    def _find(self, job: ReadJob) -> tuple[FileIO, int, tuple[int, int], int, torch.dtype]:
        """Return the file, the byte in it, the first row and their number, a row's bytes, the
        dtype."""
        place, dtype = self._stored.places[job.name], STORED_DTYPES[self._stored.dtype(job.name)]
        row = math.prod(self._stored.shape(job.name)[1:]) * dtype.itemsize
        return self._files[place.path], place.at + job.box[0][0] * row, job.box[0], row, dtype
