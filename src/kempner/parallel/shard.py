"""FSDP2 (fully_shard): which weights are gathered together, how long they stay, and when gradients
are reduced."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from kempner.model.decoder import Decoder
from kempner.parallel.config import DistributedConfig
from kempner.parallel.experts import shard_experts
from kempner.parallel.layout import Layout


def shard(
    model: Decoder,
    layout: Layout,
    dtype: torch.dtype,
    cfg: DistributedConfig,
    frozen: bool,
    whole: bool,
) -> None:
    """fully_shard per block, over the embedding, and over the final norm and the output layer; HSDP
    when the replicate axis is over 1. A tied embedding is needed at both ends: it stays with the
    model itself, and gathered until the backward pass has ended. `whole`: of the model at once,
    without hooks in it.

    Gradients are summed, not averaged: the loss is divided by the tokens of all ranks, so the sum
    is the mean.
    """
    cuda = layout.mesh.device_type == "cuda"
    policy = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.bfloat16 if cfg.reduce_dtype == "bf16" else torch.float32,
        cast_forward_inputs=False,
    )
    offload = CPUOffloadPolicy(pin_memory=cuda) if cfg.fsdp_cpu_offload else OffloadPolicy()

    cut = partial(fully_shard, mesh=layout.parameter_mesh, mp_policy=policy, offload_policy=offload)
    between = not cfg.sync_once and (cfg.reshard_island or cfg.reshard_after_forward)
    shard_experts(
        model,
        layout,
        reshard_after_forward=frozen or bool(between),  # an island is one of the blocks' ranks
        mp_policy=policy,
        offload_policy=offload,
    )
    if model.output is not None and not whole:
        cut(model.embed, reshard_after_forward=frozen or between)
        assert isinstance(model.embed, FSDPModule)
        model.embed.set_unshard_in_backward(False)  # its gradient needs no weight
        # What comes last in the forward pass comes first in the backward pass.
        cut([model.norm, model.output], reshard_after_forward=frozen)
    for block in () if whole else model.blocks:
        cut(block, reshard_after_forward=frozen or between)
    cut(model, reshard_after_forward=frozen)
    model.sync_once = cfg.sync_once  # type: ignore[assignment]
    if cfg.prefetch_blocks:
        prefetch(model, cfg.prefetch_blocks)
    for module in model.modules():
        if isinstance(module, FSDPModule) and layout.parameter_mesh.size() > 1:
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
            module.set_gradient_divide_factor(1.0)


def prefetch(model: Decoder, count: int) -> None:
    """Ask for the weights of `count` blocks ahead, from the block before them on. Left to itself
    FSDP2 asks for one in the backward pass, and in the forward pass for as many as the host is
    ahead of the device."""
    order: list[Any] = [model.embed, *model.blocks] if model.output is not None else [*model.blocks]
    end = [] if model.output is None else [model.norm]  # stands for its group
    for i, module in enumerate(order):
        module.set_modules_to_forward_prefetch([*order, *end][i + 1 : i + 1 + count])
        module.set_modules_to_backward_prefetch(order[max(0, i - count) : i][::-1])


def begin_micro_batch(model: nn.Module, last: bool) -> None:
    """Before the forward of each micro-batch of a step; `last`: of the step. Gradients cross from
    one replica to another once in a step, with the last one. With distributed.sync_once so do all:
    until then each rank sums its own in fp32, and keeps the gathered weights."""
    if not isinstance(model, FSDPModule):
        return
    if model.sync_once:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
    else:
        model.set_requires_all_reduce(last)
