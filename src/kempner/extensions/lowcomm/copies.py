"""Copies of the weights within a replica (HSDP): each exchanges some rows with the other
replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from kempner.parallel.layout import REPLICATE


class Copies:
    """The ranks of a replica that hold the same part of each parameter; here only this one."""

    index, count = 0, 1

    def gather(self, ours: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Gather the parts of all copies, `sizes` elements, on each of them."""
        return [ours]


class SeveralCopies(Copies):
    def __init__(self, parameter: DTensor) -> None:
        mesh = parameter.device_mesh
        self._group, self.index = mesh.get_group(REPLICATE), mesh.get_local_rank(REPLICATE)
        self.count = self._group.size()

    def gather(self, ours: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        # all_gather() requires parts of equal size.
        padded = torch.nn.functional.pad(ours, (0, max(sizes) - len(ours)))
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, self._group)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def copies_of(parameter: Tensor) -> Copies:
    if isinstance(parameter, DTensor) and REPLICATE in (parameter.device_mesh.mesh_dim_names or ()):
        return SeveralCopies(parameter)
    return Copies()


class ParameterRows(NamedTuple):
    """Rows of a parameter, counted in the `matrix()` of its part on this rank."""

    i: int  # index in the lists
    rows: slice
    shape: tuple[int, int]


def pieces_of(tensors: Sequence[Tensor], copy: int, count: int) -> list[ParameterRows]:
    """Return the pieces that a copy sends: equal shares of the rows of each parameter; copies take
    turns for vectors."""
    pieces = []
    for i, tensor in enumerate(tensors):
        rows, columns = matrix_shape(tensor.shape)
        # Both ends are rounded alike, so the pieces leave no gap and differ by at most one row.
        first, end = (rows * number // count for number in (copy, copy + 1))
        if rows == 1:
            # Otherwise the one row of a vector would always go to the last copy.
            first, end = 0, int(i % count == copy)
        pieces.append(ParameterRows(i, slice(first, end), (end - first, columns)))
    return pieces


def rows_of(tensors: Sequence[Tensor], piece: ParameterRows) -> Tensor:
    """View the rows of a piece, [R, C]."""
    tensor = tensors[piece.i]
    return tensor.view(matrix_shape(tensor.shape))[piece.rows]


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return rows and columns of a parameter, or of a part of it: a vector is one row."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1
