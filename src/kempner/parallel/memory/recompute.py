"""Activation checkpointing (arXiv:1604.06174): the backward pass recomputes activations that the
forward pass has not kept.

Applied to every n-th block, or to some of its modules. `full` keeps only the inputs; `selective`
(arXiv:2205.05198) also keeps the outputs of matrix products and attention, nearly all of the work,
and recomputes only norms, rotations and the activation function.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import SAC_IGNORED_OPS, create_selective_checkpoint_contexts

from kempner.model.decoder import Decoder

if TYPE_CHECKING:
    from kempner.parallel.build import ModelSettings

# Outputs that `selective` keeps. Not aten.bmm: in attention without a fused kernel its output is
# the whole matrix of scores, T x T for each head.
PRODUCT_OPERATORS = (
    "aten.mm",
    "aten.addmm",
    "aten._scaled_mm",
    "aten._grouped_mm",
    "aten._scaled_grouped_mm",
)
# Ignored: FSDP of experts, within a block, labels its work for the profiler, and does more of it
# when the block is recomputed; the kept outputs would not match.
OPERATOR_LABELS = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)
ATTENTION_OPERATORS = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "torch_attn._varlen_attn",
)


def add_recompute(model: Decoder, cfg: ModelSettings) -> None:
    """Wrap the recomputed modules. Call it before compiling and sharding, so that the recomputation
    is compiled, too, and finds the weights gathered."""
    # Nothing here is random, so generator states need not be saved and restored.
    settings: dict[str, Any] = {"preserve_rng_state": False}
    if cfg.recompute == "selective":
        SAC_IGNORED_OPS.update(OPERATOR_LABELS)
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, kept_operators())
    wrap: Any = partial(checkpoint_wrapper, **settings)
    for i in range(0, len(model.blocks), cfg.recompute_every):
        if not cfg.recompute_modules:
            model.blocks[i] = wrap(model.blocks[i])
        for name in cfg.recompute_modules:
            setattr(model.blocks[i], name, wrap(getattr(model.blocks[i], name)))


def kept_operators() -> list[Any]:
    """List the operators whose outputs `selective` keeps, as far as this torch has them."""
    operators = []
    for name in (*PRODUCT_OPERATORS, *ATTENTION_OPERATORS):
        library, _, operator = name.partition(".")
        packet = getattr(getattr(torch.ops, library), operator, None)
        if packet is not None:
            operators += [getattr(packet, overload) for overload in packet.overloads()]
    return operators
