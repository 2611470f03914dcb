"""The metadata that torch's distributed checkpoint (DCP) reads, from a table of tensors."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
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

from kempner.checkpoint.format.plan import Table, dtype_of, file_of
from kempner.checkpoint.format.writer import plan_file

LIMIT = 50_000  # ranks x tensors: about 2 s, in the background, once per run


PartEntry = tuple[str, str, dict[str, Any]]  # file, tensor, its entry in the index of the file


def dcp_metadata(table: Table, world: int) -> bytes | None:
    """Compute the metadata from the table alone, before the ranks write; None above LIMIT."""
    if world * len(table) > LIMIT:
        return None
    return pickled_metadata(
        (file_of(rank), slot.name, slot.entry())
        for rank in range(world)
        for slot in plan_file(table, rank)
    )


def pickled_metadata(parts: Iterable[PartEntry]) -> bytes:
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for file, name, entry in parts:
        start, size = torch.Size(entry["start"]), torch.Size(entry["size"])
        place = MetadataIndex(name, start)
        if place in places:  # a small tensor that every rank has a copy of
            continue
        # The bytes as torch.save would write them: DCP passes them to torch.load().
        places[place] = _StorageInfo(file, *entry["framed"])
        if name not in tensors:
            properties = TensorProperties(dtype=dtype_of(entry["dtype"]))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), [])
        tensors[name].chunks.append(ChunkStorageMetadata(start, size))
    return pickle.dumps(
        Metadata(tensors, {name: (name,) for name in tensors}, places, StorageMeta())
    )
