"""Tensor parallelism: each matrix of a block is cut over the ranks of one axis (Megatron-LM,
arXiv:1909.08053), and between the products each rank has only a part of the sequence
(sequence parallelism, arXiv:2205.05198).

    x [B, T/n, D] -> norm -> all-gather [B, T, D] -> wq, wk, wv or w1, w3, cut by rows of the
    weight: heads and hidden units of this rank -> wo or w2, cut by columns: a part of each sum ->
    reduce-scatter [B, T/n, D]

Each expert is cut like w1, w3 and w2; every rank routes all tokens. The vocabulary is cut, too: a
rank looks up and predicts only its own rows of it, so that no rank has the logits of the whole
vocabulary (loss parallelism).

The parameters are DTensors, but a block computes with its parts of them as plain tensors, so that
replacements of a matrix (an adapter, fp8 products) work on a part as on the whole.

Shapes: B rows, T tokens, D width, V vocabulary, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from kempner.model.decoder import Block, Decoder
from kempner.model.loss import VocabularyPart
from kempner.model.moe import Experts
from kempner.parallel.experts import ParallelExperts

SEQUENCE = 1  # dimension of activations [B, T, D]
SHARD_ROWS, SHARD_COLUMNS = Shard(0), Shard(1)  # of a weight [out, in]
CUTS = dict.fromkeys(("wq", "wk", "wv", "w1", "w3"), SHARD_ROWS) | {
    "wo": SHARD_COLUMNS,
    "w2": SHARD_COLUMNS,
}
# torch 2.13 renamed these, and prints a FutureWarning if an old name is called.
_OLD = not hasattr(collectives, "all_gather_single_autograd")
all_gather_tensor_autograd = getattr(
    collectives, f"all_gather_{'tensor' if _OLD else 'single'}_autograd"
)
reduce_scatter_tensor_autograd = getattr(
    collectives, f"reduce_scatter_{'tensor' if _OLD else 'single'}_autograd"
)


def split_matrices(model: Decoder, mesh: DeviceMesh, overlap: bool = False) -> None:
    """Cut the model, which is on the meta device, over the ranks of a one-axis mesh.
    `overlap`: see overlap.py."""
    if overlap:
        from kempner.parallel.overlap import overlap_collectives

        overlap_collectives(mesh)
    # For an embedding this cuts the vocabulary: each rank looks up its own words and has 0 for the
    # others, and the sum over ranks is scattered along the sequence.
    words = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(SEQUENCE))
    parallelize_module(model.embed, mesh, words)
    model.embed.register_forward_hook(_arrived)
    for block in model.blocks:
        _split_block(cast(Block, block), mesh)
    _cut(model.norm, mesh)
    # Hooks run in order of registration: gather, then wait.
    model.norm.register_forward_hook(partial(_gather, mesh.get_group()))
    model.norm.register_forward_hook(_arrived)
    if model.output is not None:  # the loss handles its input and output
        _cut(model.output, mesh, weight=SHARD_ROWS)
    if model.cfg.n_experts:
        # Each of these ranks routes all tokens, and the gradients of its losses are summed.
        model.routings.copies = mesh.size()
    model.loss = VocabularyLoss(model.loss, mesh)


def _split_block(block: Block, mesh: DeviceMesh) -> None:
    for name, module in list(block.named_modules()):
        if isinstance(module, Experts):  # [E, out, in]
            _cut(module, mesh, w1=Shard(1), w3=Shard(1), w2=Shard(2))
            continue
        cut = CUTS.get(name.rpartition(".")[2], Replicate())
        # In an adapter B A one matrix is cut like W; the other has no dimension that is cut.
        a, b = (cut, Replicate()) if cut == SHARD_COLUMNS else (Replicate(), cut)
        _cut(module, mesh, weight=cut, bias=cut, lora_a=a, lora_b=b)
    # Norms work on each rank's own tokens; between gather and scatter all ranks have all tokens.
    for norm in (block.attention_norm, block.ffn_norm):
        norm.register_forward_hook(partial(_gather, mesh.get_group()))
    for layer in (block.attention, block.ffn):
        layer.register_forward_hook(partial(_scatter, mesh.get_group()))


# --- Parameters ---


def _cut(module: nn.Module, mesh: DeviceMesh, **cuts: Placement) -> None:
    """Cut the module's own parameters, by name; those not named are whole on each rank."""
    for name, p in list(module.named_parameters(recurse=False)):
        cut = cuts.get(name, Replicate())
        # None: every rank cuts for itself. On the meta device there is nothing to be sent.
        part = distribute_tensor(p.detach(), mesh, [cut], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, requires_grad=p.requires_grad))


def compute_on_parts(model: Decoder) -> None:
    """Make each block compute with this rank's part of its parameters, as plain tensors. Call it
    after the blocks are wrapped and before they are compiled."""
    for module in (*model.blocks, model.norm):
        cut = [part for part in module.modules() if not isinstance(part, ParallelExperts)]
        module.register_forward_pre_hook(partial(_take_parts, cut))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _take_parts(cut: Sequence[nn.Module], *_: Any) -> None:
    """Put the parts in place of the parameters, where a module's code finds them first.

    This stays outside of compiled code: torch 2.13 cannot compile a recomputed block with a DTensor
    argument, because it takes the mesh for a tensor to be kept.
    """
    for module in cut:
        for name, p in module.named_parameters(recurse=False):
            assert isinstance(p, DTensor)
            module.__dict__[name] = own_part(p)


def own_part(weight: DTensor) -> Tensor:
    """Return this rank's part of a weight. For weights that are whole on every rank,
    such as a norm's, each rank computes a part of the gradient: from its own tokens,
    heads or hidden units."""
    gradients = [Partial() if cut.is_replicate() else cut for cut in weight.placements]
    return weight.to_local(grad_placements=gradients)


# --- Activations ---


def _gather(group: dist.ProcessGroup, _: nn.Module, inputs: Any, y: Tensor) -> Tensor:
    """All-gather this rank's tokens [B, T/n, D] into [B, T, D]. Each rank computes a part
    of their gradient."""
    # For a single row: the same bytes, in a form that the compiler can overlap (overlap.py).
    # Uncompiled, they would still be on their way: see _arrived().
    if y.shape[0] == 1 and torch.compiler.is_compiling():
        return cast(Tensor, all_gather_tensor_autograd(y.flatten(0, 1), 0, group)).unsqueeze(0)
    return cast(Tensor, all_gather_tensor_autograd(y, SEQUENCE, group))


def _scatter(group: dist.ProcessGroup, _: nn.Module, inputs: Any, y: Any) -> Any:
    """Reduce-scatter this rank's part of the sum for all tokens to the sum for its own tokens."""
    if isinstance(y, tuple):  # experts' output and routing
        return _scatter(group, _, inputs, y[0]), *y[1:]
    return cast(Tensor, reduce_scatter_tensor_autograd(y, "sum", SEQUENCE, group))


def _arrived(_: nn.Module, inputs: Any, y: Tensor) -> Tensor:
    """Wait for the tensor: torch 2.13 compiles a block whose input is still on its way
    (AsyncCollectiveTensor), but gives it a gradient of 0."""
    return y.clone()


class VocabularyLoss:
    """The loss `loss`, as loss.cross_entropy, over this rank's rows of the vocabulary."""

    def __init__(self, loss: Callable[..., tuple[Tensor, ...]], mesh: DeviceMesh) -> None:
        self._loss = loss
        self._group, self._rank, self._size = mesh.get_group(), mesh.get_local_rank(), mesh.size()

    def __call__(
        self, x: Tensor, weight: Tensor, targets: Tensor, **more: Any
    ) -> tuple[Tensor, ...]:
        assert isinstance(weight, DTensor)
        rows = -(-weight.shape[0] // self._size)  # as torch.chunk cuts it
        part = VocabularyPart(self._rank * rows, rows, self._over_all_ranks)
        return self._loss(x, weight.to_local(), targets, part=part, **more)

    def _over_all_ranks(self, total: Tensor, target_logit: Tensor) -> tuple[Tensor, Tensor]:
        """Combine over the ranks in one small all-gather: the logarithm of the sum, and the
        target's logit, which is 0 on all ranks but one; [N, 1] each."""
        # Two numbers per token instead of logits over the whole vocabulary.
        own_part = torch.cat((total, target_logit), dim=1)
        parts = [torch.empty_like(own_part) for _ in range(self._size)]
        dist.all_gather(parts, own_part, group=self._group)
        totals, knowns = torch.stack(parts).unsqueeze(3).unbind(2)  # [n, N, 1]
        return totals.logsumexp(0), knowns.sum(0)
