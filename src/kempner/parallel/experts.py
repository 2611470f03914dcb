"""Expert parallelism: each of ep ranks holds E / ep experts of every layer, and the tokens travel
to their experts and back (arXiv:2006.16668). The ranks still read different samples.

Each layer takes two exchanges of all tokens, and two in the backward pass, instead of gathering the
experts' weights. Shapes: M rows, D width, E experts of the layer, L = E / ep experts of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from kempner.model.decoder import Decoder
from kempner.model.moe import Experts, has_grouped_mm, take_rows, through_experts
from kempner.parallel.layout import EP, Layout


class ParallelExperts(nn.Module):
    """The parameters of `base`, cut along the experts; their names stay. `mesh`: of ep, and of tp
    if that has cut each expert."""

    w1: nn.Parameter
    w2: nn.Parameter
    w3: nn.Parameter

    def __init__(self, base: Experts, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh[EP]
        for name, p in base.named_parameters():
            cuts = [Shard(0), *(p.placements if isinstance(p, DTensor) else ())]
            whole = torch.empty(p.shape, dtype=p.dtype, device="meta")
            part = distribute_tensor(whole, mesh, cuts, src_data_rank=None)
            self.register_parameter(name, nn.Parameter(part, requires_grad=p.requires_grad))

    def forward(self, x: Tensor, load: Tensor) -> Tensor:
        """Apply the experts to x [M, D], sorted by expert, with load [E], as Experts does."""
        ranks, group = self.mesh.size(), self.mesh.get_group()
        send_load = load.view(ranks, -1)  # [ep, L]: by the rank that has the expert
        arrived = all_to_all_single(send_load, None, None, group)  # [ep, L]: by the rank it is from
        there, here = torch.stack((send_load.sum(1), arrived.sum(1))).tolist()  # the host must know
        x = all_to_all_single_autograd(x, here, there, group)
        # Tokens arrive rank by rank, each rank's sorted by expert: merge them into one order.
        expert = torch.arange(load.numel(), device=x.device) % send_load.shape[1]
        order = expert.repeat_interleave(arrived.flatten(), output_size=len(x)).argsort(stable=True)
        place = order.argsort()
        weights = [_local(w) for w in (self.w1, self.w2, self.w3)]
        y = through_experts(take_rows(x, order, place), arrived.sum(0), *weights)
        return all_to_all_single_autograd(take_rows(y, place, order), there, here, group)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def split_experts(model: Decoder, layout: Layout) -> None:
    """Cut the experts of every layer over the ep ranks. Call it before sharding."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Experts):
            model.set_submodule(name, ParallelExperts(module, layout.expert_mesh))


def keep_from_compiler(model: Decoder, dtype: torch.dtype) -> None:
    """Exclude experts from compilation if they read each expert's load on the host: it differs
    every time, and each value would compile again. torch's grouped kernel reads it on the
    device."""
    for module in model.modules():
        w1 = _local(module.w1) if isinstance(module, Experts) else None
        grouped = w1 is not None and has_grouped_mm(w1.to(dtype), w1)
        if isinstance(module, Experts | ParallelExperts) and not grouped:
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign, no-untyped-call]


def shard_experts(model: Decoder, layout: Layout, **options: Any) -> None:
    """Apply fully_shard, with these options, over the ranks that have the same experts. An expert's
    gradient already sums the tokens of all ep ranks: summed over those ranks as well it would be ep
    times too large."""
    for module in model.modules():
        if isinstance(module, ParallelExperts):
            fully_shard(
                module,
                mesh=layout.expert_parameter_mesh,
                **options,
                shard_placement_fn=lambda _: Shard(1),  # the experts themselves are cut already
            )
