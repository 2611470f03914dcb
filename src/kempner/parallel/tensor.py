"""Tensor parallelism: each matrix of a block is cut over the ranks of one axis (Megatron-LM,
arXiv:1909.08053), and between the products each rank has a part of the sequence alone (sequence
parallelism, arXiv:2205.05198).

    x [B, T/n, D] -> norm -> all-gather [B, T, D] -> wq, wk, wv or w1, w3, cut by rows of the
    weight: heads and hidden units of this rank -> wo or w2, cut by columns: a part of each sum ->
    reduce-scatter [B, T/n, D]

The plan is torch's own (torch.distributed.tensor.parallel); the block's code sees plain tensors.
The vocabulary is cut, too: a rank looks up, and predicts, its own rows of it alone, so that the
logits of all of it are nowhere (loss parallelism).

Shapes: B rows, T tokens, D width, V vocabulary, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from kempner.loss import VocabularyPart
from kempner.model.decoder import Block, Decoder

SEQUENCE, HEADS = Shard(1), Shard(2)  # of activations [B, T, D] and [B, T, H, E]


def split_matrices(model: Decoder, mesh: DeviceMesh) -> None:
    """Cut the model, which is on the meta device, over the ranks of a one-axis mesh."""
    words = RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE)
    parallelize_module(model.embed, mesh, words)
    for block in model.blocks:
        _split_block(cast(Block, block), mesh)
    distribute_module(model.norm, mesh, None, _on(SEQUENCE), _whole_for_loss)
    if model.output is not None:
        distribute_module(
            model.output, mesh, _cut_rows
        )  # what goes in and out is the loss's matter
    model.loss = VocabularyLoss(model.loss, mesh)


def _split_block(block: Block, mesh: DeviceMesh) -> None:
    rows, columns = ColwiseParallel(), RowwiseParallel(output_layouts=SEQUENCE)
    plan = {f"attention.{name}": rows for name in ("wq", "wk", "wv")}
    plan |= {f"ffn.{name}": rows for name in ("w1", "w3")}
    parallelize_module(block, mesh, {**plan, "attention.wo": columns, "ffn.w2": columns})
    for norm in (block.attention_norm, block.ffn_norm):
        distribute_module(norm, mesh, None, _on(SEQUENCE), _whole)
    for of_heads in (block.attention.q_norm, block.attention.k_norm):
        if isinstance(of_heads, nn.RMSNorm):
            distribute_module(of_heads, mesh, None, _on(HEADS), _local)


def _cut_rows(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
    assert isinstance(module.weight, nn.Parameter)
    module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))


# --- What goes into a module, and comes out of it ---


def _on(placement: Shard) -> Any:
    """Its input is this rank's part of a tensor that is cut so."""

    def enter(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        return (DTensor.from_local(inputs[0], mesh, [placement], run_check=False), *inputs[1:])

    return enter


def _local(_: nn.Module, y: DTensor, mesh: DeviceMesh) -> Any:
    return y.to_local()


def _whole(_: nn.Module, y: DTensor, mesh: DeviceMesh) -> Any:
    """All-gather; what follows are products that expect a DTensor."""
    return y.redistribute(placements=[Replicate()])


def _whole_for_loss(_: nn.Module, y: DTensor, mesh: DeviceMesh) -> Any:
    """All-gather. Of its gradient each rank has the part from its own rows of the vocabulary."""
    return y.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class VocabularyLoss:
    """`loss`, which is loss.cross_entropy, with the rows of the vocabulary that this rank has."""

    def __init__(self, loss: Callable[..., tuple[Tensor, Tensor]], mesh: DeviceMesh) -> None:
        self._loss = loss
        self._group, self._rank, self._size = mesh.get_group(), mesh.get_local_rank(), mesh.size()

    def __call__(self, x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(weight, DTensor)
        first = self._rank * -(-weight.shape[0] // self._size)  # as torch.chunk cuts it
        part = VocabularyPart(first, self._over_all_ranks)
        return self._loss(x, weight.to_local(), targets, part=part)

    def _over_all_ranks(self, total: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """One small all-gather: of the logarithm of the sum, and of the target's logit, 0 on all
        ranks but one; [N, 1] each."""
        ours = torch.cat((total, known), dim=1)
        parts = [torch.empty_like(ours) for _ in range(self._size)]
        dist.all_gather(parts, ours, group=self._group)
        totals, knowns = torch.stack(parts).unsqueeze(3).unbind(2)  # [n, N, 1]
        return totals.logsumexp(0), knowns.sum(0)
