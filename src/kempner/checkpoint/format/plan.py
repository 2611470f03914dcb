"""Distribution of tensors over ranks and files, which each rank computes alone.

A table lists every tensor of a checkpoint once, with its global shape and the mesh that cuts it.
From the table alone follow the contents of every rank's file (when saving) and the files that hold
any part of any tensor (when loading), in time that does not grow with the number of ranks. Nothing
is gathered, and no rank needs a list of all files.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kempner.checkpoint.config import SPREAD

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

# Every rank writes its copy of a replicated tensor of at most this size.
SMALL_TENSOR_BYTES = 1 << 16
FILES_PER_FOLDER = 256  # data files in one directory

Box = tuple[tuple[int, int], ...]  # of a tensor: (start, length) in each dimension


class CheckpointLayout(NamedTuple):
    """A mesh over the ranks from `first` on, in row-major order: over all, or over those of the
    pipeline stage that has the tensor. `cuts`: for each axis of the mesh the tensor dimension
    that it shards, None where it replicates. `order`: the axes in the order in which they cut,
    empty for their own order: of two axes that cut one dimension the first cuts the whole, the
    second its parts."""

    mesh: tuple[int, ...]
    cuts: tuple[int | None, ...]
    order: tuple[int, ...] = ()
    first: int = 0

    @property
    def axes(self) -> tuple[int, ...]:
        """Return the axes in the order in which they cut."""
        return self.order or tuple(range(len(self.mesh)))

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + math.prod(self.mesh))

    def at(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of one of its ranks in the mesh."""
        indices, rank = [], rank - self.first
        for size in reversed(self.mesh):
            rank, index = divmod(rank, size)
            indices.append(index)
        return tuple(reversed(indices))


class StoredTensor(NamedTuple):
    """A tensor in the table. `layout` is None for a tensor that is separate on each rank; the `*`
    in its name then stands for the rank. `turn` decides which of the replicas writes it."""

    shape: torch.Size
    dtype: torch.dtype
    layout: CheckpointLayout | None
    turn: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def whole(self) -> Box:
        return tuple((0, length) for length in self.shape)

    @property
    def everywhere(self) -> bool:
        """True if every rank writes it, so that no rank opens another's file for a few bytes."""
        cut = self.layout is None or any(dim is not None for dim in self.layout.cuts)
        return not cut and self.nbytes <= SMALL_TENSOR_BYTES


Table = dict[str, StoredTensor]


def file_of(rank: int) -> str:
    """Return the path of a rank's data file in the checkpoint. Subdirectories, because one of
    16,000 files is slow on every parallel file system."""
    return f"ranks-{rank // FILES_PER_FOLDER:03d}/__{rank}_0.distcp"


# --- From tensors to a table ---


def is_distributed(tensor: Tensor) -> TypeIs[DTensor]:
    """Return whether this is a DTensor, without importing the class (0.3 s)."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return isinstance(tensor, kind)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory, without a gradient."""
    part = tensor.to_local() if is_distributed(tensor) else tensor
    return getattr(part, "_tensor", part).detach()  # the master of a weight that FSDP sends in fp8


def make_table(shared: Mapping[str, Tensor], own: Mapping[str, Tensor], world: int) -> Table:
    """Make the table. `shared`: tensors that all ranks hold parts or copies of. `own`: those of
    this rank alone, with a `*` in the name. Equal on all ranks that hold these: all, or those
    of a stage.

    Raises TypeError for a DTensor whose placement cannot be stored.
    """
    ranks = ranks_of(shared.values(), world)
    meshes = dict[int, tuple[int, ...]]()
    by_size = sorted(shared, key=lambda name: (-shared[name].nbytes, name))
    turns = {name: turn for turn, name in enumerate(by_size)}
    table = {
        name: StoredTensor(t.shape, t.dtype, _layout_of(name, t, ranks, meshes), turns[name])
        for name, t in shared.items()
    }
    return table | {name: StoredTensor(t.shape, t.dtype, None, 0) for name, t in own.items()}


def ranks_of(tensors: Iterable[Tensor], world: int) -> range:
    """Return the ranks that together hold these tensors: those of a DTensor's mesh, as all these
    meshes have the same ranks; else all."""
    mesh = next((t.device_mesh for t in tensors if is_distributed(t)), None)
    if mesh is None:
        return range(world)
    first = int(mesh.mesh.min())
    return range(first, first + mesh.size())


def _layout_of(
    name: str, tensor: Tensor, ranks: range, meshes: dict[int, tuple[int, ...]]
) -> CheckpointLayout:
    """Return a tensor's layout. `meshes`: cached shapes by identity, because a DeviceMesh
    recomputes its properties and carries thousands of tensors."""
    if not is_distributed(tensor):
        return CheckpointLayout((len(ranks),), (None,), (), ranks.start)
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, cuts, late = tensor.device_mesh, list[int | None](), list[int]()
    if (shape := meshes.get(id(mesh))) is None:
        # CheckpointLayout.at() finds a rank's place by row-major order.
        if mesh.mesh.flatten().tolist() != list(ranks):
            raise TypeError(f"{name}: its mesh does not hold the ranks {ranks} in order")
        shape = meshes[id(mesh)] = tuple(mesh.mesh.shape)
    for axis, placement in enumerate(tensor.placements):
        if not isinstance(placement, (Shard, Replicate, _StridedShard)):
            raise TypeError(f"{name}: cannot store the placement {placement}")
        cuts.append(None if isinstance(placement, Replicate) else placement.dim)
        late += [axis] if isinstance(placement, _StridedShard) else []
    # Tensor parallelism cuts first and FSDP shards its parts, although FSDP's axis is outer.
    order = [axis for axis in range(len(shape)) if axis not in late] + late
    return CheckpointLayout(shape, tuple(cuts), tuple(order) if late else (), ranks.start)


def own_box(spec: StoredTensor, rank: int) -> Box:
    """Return the part of a tensor that a rank holds, as torch.chunk cuts it."""
    if spec.layout is None:
        return spec.whole
    box = list(spec.whole)
    mesh, cuts = spec.layout[:2]
    at = spec.layout.at(rank)
    for axis in spec.layout.axes:
        size, index = mesh[axis], at[axis]
        if (dim := cuts[axis]) is not None:
            start, length = box[dim]
            step = -(-length // size)
            box[dim] = (start + min(index * step, length), max(0, min(step, length - index * step)))
    return tuple(box)


def box_slices(box: Box) -> tuple[slice, ...]:
    """Convert a box to an index into the whole tensor."""
    return tuple(slice(start, start + length) for start, length in box)


def writing_replica(turn: int, size: int) -> int:
    """Choose which of `size` replicas writes: few enough to read from, spread over different hosts,
    and each with about as many bytes (turns go by size)."""
    count = min(size, SPREAD)
    return turn % count * size // count


# --- What a rank writes, and who has what ---


def chunks_of(table: Table, rank: int) -> list[tuple[str, Box]]:
    """List names and boxes of the contents of a rank's file, in order."""
    boxes = ((name, _written_box(spec, rank)) for name, spec in table.items())
    return [(name, box) for name, box in boxes if box is not None]


def _written_box(spec: StoredTensor, rank: int) -> Box | None:
    if spec.layout is None:
        return spec.whole
    if rank not in spec.layout.ranks:
        return None
    if spec.everywhere:
        return spec.whole
    mesh, cuts = spec.layout[:2]
    at = spec.layout.at(rank)
    # One replica along each axis writes; all ranks know which one without communication.
    for size, dim, index in zip(mesh, cuts, at, strict=True):
        if dim is None and index != writing_replica(spec.turn, size):
            return None
    box = own_box(spec, rank)
    if all(length for _, length in box):
        return box
    # An empty tensor is still written once, so that readers of the checkpoint see its name.
    first = all(index == 0 for dim, index in zip(cuts, at, strict=True) if dim is not None)
    return box if spec.nbytes == 0 and first else None


# --- The table as JSON ---


def to_json(table: Table) -> dict[str, Any]:
    # Thousands of tensors share a few layouts: each is stored once.
    layouts = list(dict.fromkeys(spec.layout for spec in table.values()))
    return {
        "layouts": layouts,
        "tensors": {
            name: [str(s.dtype).removeprefix("torch."), s.shape, layouts.index(s.layout), s.turn]
            for name, s in table.items()
        },
    }


def dtype_of(name: str) -> torch.dtype:
    """Parse a dtype's name. Raises ValueError if this version of torch lacks it."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype


TENSORS = "tensors.json"  # the table: what each tensor is, and which mesh cuts it
