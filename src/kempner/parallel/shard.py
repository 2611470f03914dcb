"""FSDP2 (fully_shard): the weights gathered together, how long they stay, and when
gradients are reduced."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from kempner.model.decoder import Decoder
from kempner.parallel.config import DistributedConfig
from kempner.parallel.layout import Layout
from kempner.parallel.single import AddUp


def shard_model(
    model: Decoder,
    layout: Layout,
    dtype: torch.dtype,
    cfg: DistributedConfig,
    frozen: bool,
    whole: bool,
) -> None:
    """Apply fully_shard to each block, to the embedding, and to the final norm and the output
    layer; HSDP if the replicate axis is over 1. A tied embedding is needed at both ends: it stays
    with the root module, gathered until the backward pass has ended. `whole`: no hooks inside.

    Gradients are summed, not averaged: the loss is divided by the tokens of all ranks, so the sum
    is the mean.
    """
    cuda = layout.mesh.device_type == "cuda"
    policy = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.bfloat16 if cfg.reduce_dtype == "bf16" else torch.float32,
        # FSDP would also cast RoPE's angles, an input of each block that stays in fp32.
        cast_forward_inputs=False,
    )
    offload = CPUOffloadPolicy(pin_memory=cuda) if cfg.fsdp_cpu_offload else OffloadPolicy()

    cut = partial(fully_shard, mesh=layout.parameter_mesh, mp_policy=policy, offload_policy=offload)
    # False, True, or the number of ranks over which fully_shard keeps the weights cut.
    between = not cfg.sync_once and (cfg.reshard_island or cfg.reshard_after_forward)
    if layout.ep is not None:
        from kempner.parallel.experts import shard_experts

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
        # The last modules of the forward pass come first in the backward pass: freeing them would
        # gather them again at once.
        cut([model.norm, model.output], reshard_after_forward=frozen)
    for block in () if whole else model.blocks:
        cut(block, reshard_after_forward=frozen or between)
    cut(model, reshard_after_forward=frozen)
    model.sync_once = cfg.sync_once  # type: ignore[assignment]
    model.reduces_in_bf16 = cfg.reduce_dtype == "bf16"  # type: ignore[assignment]
    model.begin_micro_batch = partial(begin_micro_batch, model)
    # Only now: prefetching names modules that fully_shard has wrapped.
    if cfg.prefetch_blocks:
        prefetch_blocks(model, cfg.prefetch_blocks)
    for module in model.modules():
        if isinstance(module, FSDPModule) and layout.parameter_mesh.size() > 1:
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
            module.set_gradient_divide_factor(1.0)
    if cfg.overlap:
        from kempner.parallel.overlap import choose_messages

        choose_messages(model, layout, cfg.overlap)


@contextmanager
def one_island(layout: Layout) -> Iterator[None]:
    """Let all modules wrapped in this context share one mesh for distributed.reshard_island. By
    default fully_shard makes one per module, with new groups and an NCCL communicator each."""
    name = "torch.distributed.fsdp._fully_shard._fully_shard"
    fsdp: Any = importlib.import_module(name)
    make, found = fsdp._get_post_forward_mesh_info, list[Any]()

    def island(between: bool | int, whole: Any) -> Any:
        if isinstance(between, bool) or between == whole.shard_mesh_size:
            return make(bool(between), whole)
        if not found:
            found.append(make(between, whole))
            # In the layout, so that the watchdog sets their timeout as it does for the others.
            layout.added_groups.extend(found[0].mesh.get_all_groups())
        return found[0]

    fsdp._get_post_forward_mesh_info = island
    try:
        yield
    finally:
        fsdp._get_post_forward_mesh_info = make


def prefetch_blocks(model: Decoder, count: int) -> None:
    """Gather the weights of `count` blocks ahead of their use. By default FSDP2
    prefetches one block in the backward pass, and in the forward pass as many as the host
    is ahead of the device."""
    order: list[Any] = [model.embed, *model.blocks] if model.output is not None else [*model.blocks]
    end = [] if model.output is None else [model.norm]  # represents its group
    for i, module in enumerate(order):
        module.set_modules_to_forward_prefetch([*order, *end][i + 1 : i + 1 + count])
        module.set_modules_to_backward_prefetch(order[max(0, i - count) : i][::-1])


class GradientSums:
    """Sums of the gradients of bf16 weights over the micro-batches of a step, in fp32. By itself,
    FSDP2 casts each reduced gradient to the dtype of its weight and adds it there, which is 0.8 %
    off after 64 micro-batches, and 6 % after 512. `add`: add_up(), or the same compiled."""

    def __init__(self, model: nn.Module, add: AddUp) -> None:
        self._add_up = add
        self.last = True  # the next backward pass is the step's last
        self._sums: dict[Tensor, Tensor] = {}
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dtype == torch.bfloat16:
                parameter.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _add(self, parameter: Tensor) -> None:
        """Take over a micro-batch's gradient; after the last, give the sum to the parameter."""
        gradient, total = parameter.grad, self._sums.pop(parameter, None)
        assert gradient is not None
        # It is the only one, or with sync_once FSDP2 has summed before casting.
        if self.last and total is None:
            return
        if gradient.device.type == "cpu" and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # copied to the host (fsdp_cpu_offload)
        total = self._add_up(total, gradient, torch.float32)
        if self.last:
            parameter.grad = total.to(parameter.dtype)
        else:
            parameter.grad, self._sums[parameter] = None, total


def begin_micro_batch(model: Any, last: bool, first: bool = False) -> None:
    """Prepare the communication of a micro-batch, before its forward; `first`, `last`: of the step,
    in which weights do not change. Gradients are reduced between replicas once per step, with the
    last one. With distributed.sync_once this holds for all reductions: until then each rank sums
    its own gradients in fp32 and keeps the gathered weights. With reduce_dtype = bf16 replicas
    reduce each time: FSDP2 would hold the sum of the earlier ones in bf16."""
    model.unchanged = not first
    if model.fp32_sums is not None:
        model.fp32_sums.last = last
    if model.sync_once:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
    else:
        model.set_requires_all_reduce(bool(last or model.reduces_in_bf16))
