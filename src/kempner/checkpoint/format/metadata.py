"""The metadata by which torch's distributed checkpoint (DCP) and its tools read our checkpoints.

    python -m kempner.checkpoint.format.metadata runs/70b/checkpoints/step_00001000

It is one pickle that lists every part of every tensor, so it grows with ranks x tensors. Our own
loading does not need it. A save writes it up to LIMIT, and beyond that this command writes it
afterwards, from the indices of the data files.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from kempner.checkpoint import commit, history
from kempner.checkpoint.format.plan import Table, dtype_of, file_of
from kempner.checkpoint.format.writer import plan_file
from kempner.config.option import ConfigError
from kempner.jobs.system.files import write_atomic
from kempner.jobs.system.front_door import run_program

LIMIT = 50_000  # ranks x tensors: about 2 s, in the background, once per run

_PartEntry = tuple[str, str, dict[str, Any]]  # file, tensor, its entry in the index of the file


def dcp_metadata(table: Table, world: int) -> bytes | None:
    """Compute the metadata from the table alone, before the ranks write. None over the limit."""
    if world * len(table) > LIMIT:
        return None
    return _pickled(
        (file_of(rank), slot.name, slot.entry())
        for rank in range(world)
        for slot in plan_file(table, rank)
    )


def _pickled(parts: Iterable[_PartEntry]) -> bytes:
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for file, name, entry in parts:
        start, size = torch.Size(entry["start"]), torch.Size(entry["size"])
        place = MetadataIndex(name, start)
        if place in places:  # a small tensor, of which every rank has a copy
            continue
        places[place] = _StorageInfo(file, *entry["framed"])
        if name not in tensors:
            properties = TensorProperties(dtype=dtype_of(entry["dtype"]))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), [])
        tensors[name].chunks.append(ChunkStorageMetadata(start, size))
    return pickle.dumps(
        Metadata(tensors, {name: (name,) for name in tensors}, places, StorageMeta())
    )


def write_metadata(path: Path) -> None:
    """Add `.metadata` to a checkpoint that lacks it. Raises Damaged, ConfigError, OSError."""
    from kempner.checkpoint.format.reader import DataFile

    manifest = history.read_manifest(path)

    def parts() -> Iterator[_PartEntry]:
        for rank in range(manifest["world_size"]):
            with DataFile(path, manifest, rank) as file:
                for name, entry in file.index["tensors"].items():
                    yield file_of(rank), name, entry

    with commit.reading_lock(path):
        write_atomic(path / ".metadata", _pickled(parts()))


def main(words: list[str]) -> None:
    from kempner.config.command_line import argument_parser
    from kempner.jobs.system.directories import describe_directory

    parser = argument_parser("python -m kempner.checkpoint.format.metadata", __doc__)
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="RUN/checkpoints/step_N"
    )
    path = parser.parse_args(words).checkpoint
    if not (path / history.MANIFEST).is_file():
        raise ConfigError(
            f"{path} is {describe_directory(path)}, not a checkpoint; name RUN/checkpoints/step_N"
        )
    try:
        write_metadata(path)
    except history.Damaged as error:
        raise ConfigError(f"{path} is damaged: {error}") from None


if __name__ == "__main__":
    run_program(main)
