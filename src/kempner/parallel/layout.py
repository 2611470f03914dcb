"""Which ranks do what: the axes of the mesh, and all that follows from them.

Everything else asks here and never counts ranks itself: which share of the data is mine, over whom
the numbers of a step are summed, how often a gradient exists. A new axis (tensor, context, expert,
pipeline) changes this file and its own plan, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kempner.config.option import ConfigError
from kempner.parallel.config import DistributedConfig

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

REPLICATE, SHARD = "replicate", "shard"


class Sizes(NamedTuple):
    """Ranks along each axis, outermost first; their product is the world."""

    replicate: int
    shard: int

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples: all of them, along these two axes."""
        return self.replicate * self.shard


def sizes(cfg: DistributedConfig, world_size: int, per_node: int) -> Sizes:
    """The sizes of the axes for a world of nodes with `per_node` ranks each. Raises ConfigError
    with the arithmetic when they do not multiply to it."""
    replicate, shard = cfg.dp_replicate, cfg.dp_shard
    if cfg.nodes_per_fsdp_group is not None:
        replicate, shard = -1, cfg.nodes_per_fsdp_group * per_node
    asked = " x ".join(
        f"{name} {'rest' if size == -1 else size}"
        for name, size in (("dp_replicate", replicate), ("dp_shard", shard))
    )
    if shard == -1:
        shard = max(1, world_size // replicate)
    elif replicate == -1:
        replicate = max(1, world_size // shard)
    if replicate * shard != world_size:
        nodes = (
            f" (nodes_per_fsdp_group {cfg.nodes_per_fsdp_group} x {per_node} ranks a node)"
            if cfg.nodes_per_fsdp_group
            else ""
        )
        raise ConfigError(
            f"distributed: {asked}{nodes} does not make the world of "
            f"{world_size} ranks ({replicate} x {shard} = {replicate * shard}); choose sizes whose "
            f"product is {world_size}, or dp_shard=-1 with a dp_replicate that divides "
            f"{world_size}, or start {replicate * shard} tasks"
        )
    return Sizes(replicate, shard)


@dataclass(frozen=True)
class Layout:
    """The mesh over all ranks and this rank's place in it."""

    mesh: DeviceMesh

    @property
    def data_rank(self) -> int:
        """Which share of a global batch is this rank's. Ranks that share a copy of the weights are
        neighbours, and read different samples all the same."""
        replicate, shard = self.mesh.get_coordinate() or (0, 0)
        return int(replicate) * self.mesh[SHARD].size() + int(shard)

    @property
    def data_ranks(self) -> int:
        return self.mesh.size()

    @property
    def parameter_mesh(self) -> DeviceMesh:
        """Over which fully_shard cuts and copies the parameters: FSDP, or HSDP where there are
        several copies."""
        return self.mesh if self.mesh[REPLICATE].size() > 1 else self.mesh[SHARD]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        return self.mesh.get_all_groups()

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place: of losses, token counts, flags, and norm_sq()."""
        import torch.distributed as dist

        dist.all_reduce(values)
        return values

    def norm_sq(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """This rank's part of the squared norm of all gradients, fp32 []: sum() makes it whole.

        A gradient that several ranks hold (the copies of HSDP) counts once in all, so that each
        contributes its square over their number.
        """
        import torch
        from torch.distributed.tensor import DTensor

        by_copies: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            if (grad := parameter.grad) is not None:
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                by_copies.setdefault(self.copies(grad), []).append(local)
        parts = [
            torch.stack(torch._foreach_norm(grads)).square().sum() / copies
            for copies, grads in by_copies.items()
        ]
        return torch.stack(parts).sum()

    def copies(self, tensor: Tensor) -> int:
        """How many ranks hold the same part of a parameter or its gradient."""
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            return self.mesh.size()
        cuts = math.prod(
            tensor.device_mesh.size(axis)
            for axis, placement in enumerate(tensor.placements)
            if placement.is_shard()
        )
        return self.mesh.size() // cuts


def build_layout(
    cfg: DistributedConfig, world_size: int, per_node: int, device_type: str
) -> Layout:
    """The 2-D mesh with axes (replicate, shard) over all ranks; neighbours in rank share a copy."""
    from torch.distributed.device_mesh import init_device_mesh

    found = sizes(cfg, world_size, per_node)
    return Layout(init_device_mesh(device_type, found, mesh_dim_names=(REPLICATE, SHARD)))
