"""Muon: momentum with orthogonalised matrices (Jordan et al., 2024; arXiv:2502.16982).

Orthogonalising needs a whole matrix, but matrices are spread over the ranks. So in each batch of as
many matrices as ranks, rank i gathers matrix i, orthogonalises it, and sends the parts back: two
all-to-alls, and each matrix is computed once, however it is sharded or replicated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from kempner.checkpoint.format.plan import (
    Box,
    StoredTensor,
    box_slices,
    chunks_of,
    own_box,
)
from kempner.checkpoint.format.reader import ranks_with
from kempner.optim.config import STATE
from kempner.optim.rule import Guard, ParameterGroup, ParameterPart, Rule

# For the five iterations; chosen so that every singular value of at least 1e-3 ends near 1.
COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
EPS = 1e-7


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return approximately U V^T of the singular value decomposition of each matrix [...,
    rows, columns]: its singular values are 0.97 to 1.04. Newton-Schulz iterations, in the
    dtype of the matrices."""
    x = matrices.reshape(-1, *matrices.shape[-2:])
    tall = x.shape[1] > x.shape[2]
    # The smaller Gram matrix: rows x rows of the wider form.
    x = x.mT if tall else x
    norm = x.float().norm(dim=(1, 2), keepdim=True)
    # The Frobenius norm bounds the largest singular value: all of them begin in 0 to 1.
    x = (x / (norm + EPS)).to(matrices.dtype)
    for a, b, c in COEFFICIENTS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrices.shape)


def orthogonal_parts(
    parts: Sequence[Tensor], wholes: Sequence[StoredTensor], group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Return this rank's part of each orthogonalised matrix, given its part of each matrix. All
    ranks of the group must call it, with at most as many matrices as ranks. `wholes`: shapes and
    sharding of the matrices."""
    rank, world = dist.get_rank(group) if dist.is_initialized() else 0, ranks_in(group)
    if world == 1:
        return [orthogonalise(part) for part in parts]
    chunks = dict(chunks_of({str(i): whole for i, whole in enumerate(wholes)}, rank))
    mine = wholes[rank] if rank < len(wholes) else None

    # Each part reaches its owner from exactly one of the ranks that hold it.
    outgoing = [
        part.flatten()
        if str(i) in chunks and (i == rank or not whole.everywhere)
        else part.new_empty(0)
        for i, (part, whole) in enumerate(zip(parts, wholes, strict=True))
    ]
    # The last batch may have fewer matrices than ranks: ranks without one receive nothing.
    outgoing += [parts[0].new_empty(0)] * (world - len(parts))
    boxes: dict[int, Box] = {}
    if mine is not None:
        boxes = {other: own_box(mine, other) for other in ranks_with(mine, mine.whole, near=rank)}
    # Every rank computes the sizes from the layouts alone: nothing is exchanged beforehand.
    receive_sizes = [_size(boxes[r]) if r in boxes else 0 for r in range(world)]
    incoming = _all_to_all(outgoing, receive_sizes, group)

    # The result goes to every rank that holds a part, copies included.
    outgoing = [parts[0].new_empty(0)] * world
    if mine is not None:
        matrix = parts[0].new_empty(mine.shape)
        for other, box in boxes.items():
            matrix[box_slices(box)] = incoming[other].view([length for _, length in box])
        matrix = orthogonalise(matrix)
        outgoing = [matrix[box_slices(own_box(mine, other))].flatten() for other in range(world)]
    sizes = [part.numel() for part in parts] + [0] * (world - len(parts))
    incoming = _all_to_all(outgoing, sizes, group)
    return [chunk.view(part.shape) for chunk, part in zip(incoming, parts, strict=False)]


def ranks_in(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def _all_to_all(
    outgoing: Sequence[Tensor], sizes: Sequence[int], group: dist.ProcessGroup | None
) -> list[Tensor]:
    """Send outgoing[r] to rank r; return what each rank sent, sizes[r] elements from rank r."""
    packed = torch.cat(list(outgoing))
    output = packed.new_empty(sum(sizes))
    lengths = [len(part) for part in outgoing]
    dist.all_to_all_single(output, packed, list(sizes), lengths, group)
    return list(torch.split(output, list(sizes)))


def _size(box: Box) -> int:
    return math.prod(length for _, length in box)


class Muon(Rule):
    """Muon for matrices and stacks of them. The momentum is a mean, not a sum: Newton-Schulz is
    invariant to the factor between them."""

    averages, copies = STATE["muon"]

    def batches(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Batch as many matrices as there are ranks, of similar size, so that all ranks work."""
        world = ranks_in(self.ranks)
        by_size = sorted(parameters, key=lambda p: -p.numel())
        return [by_size[i : i + world] for i in range(0, len(by_size), world)]

    def update(self, group: ParameterGroup, parts: Sequence[ParameterPart], guard: Guard) -> None:
        guard.prepare(parts)
        keep, beta = guard.keep(), group["momentum"]
        for part in parts:
            part.state["momentum"].lerp_(part.grad, (1 - beta) * keep)
            part.state["step"].add_(keep)
        changes = [
            part.grad.lerp(part.state["momentum"], beta)
            if group["nesterov"]
            else part.state["momentum"]
            for part in parts
        ]
        # On a CPU, products in bf16 are no faster.
        dtype = torch.bfloat16 if changes[0].is_cuda else torch.float32
        wholes = [part.whole for part in parts]
        # Rounded before the exchange: it halves the bytes, and the iterations are in bf16 anyway.
        orthogonal = orthogonal_parts([x.to(dtype) for x in changes], wholes, self.ranks)
        rate = group["lr"] * keep
        for part, change in zip(parts, orthogonal, strict=True):
            scale = SCALES[group["scale"]](*part.whole.shape[-2:])
            part.weight.mul_(1 - rate * group["weight_decay"]).sub_(change * (rate * scale))


SCALES = {
    # The root mean square of AdamW's updates: its learning rate and decay apply (arXiv:2502.16982).
    "adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    # The same change of the output at every width (arXiv:2310.17813).
    "spectral": lambda rows, columns: math.sqrt(rows / columns),
}
