"""The axes of the mesh, and everything derived from them.

No other module counts ranks: this one knows a rank's share of the data, the ranks over which a
step's numbers are summed, and how many copies of a gradient exist. A rank's number is its place
along the axes in row-major order, outermost first:

    pp         stages of the model, one after another
    replicate  copies of the weights (HSDP), on different data
    shard      shards of one copy (FSDP), on different data
    cp         parts of one sequence; they shard the weights, too
    tp         parts of one matrix product, of the same tokens

Expert parallelism (ep) is not a separate axis: the experts are cut over the inner ranks of shard x
cp, and FSDP shards each of them over the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from kempner.config.option import ConfigError
from kempner.parallel.config import DistributedConfig

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

# Axis names of the meshes; FSDP shards over shard x cp.
PP, REPLICATE, FSDP, CP, TP, EP = "pp", "replicate", "fsdp", "cp", "tp", "ep"


class Axes(NamedTuple):
    """A number per axis: its size (the product is the world), or a rank's index along it."""

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def data_ranks(self) -> int:
        """The number of ranks that read different samples."""
        return self.replicate * self.shard


def axis_sizes(cfg: DistributedConfig, world_size: int, per_node: int) -> Axes:
    """Compute the sizes of the axes for a world of nodes with `per_node` ranks each. Raises
    ConfigError with the arithmetic if their product is not the world size."""
    replicate, shard, inner = cfg.dp_replicate, cfg.dp_shard, cfg.cp * cfg.tp
    group = ""
    if cfg.nodes_per_fsdp_group is not None:
        replicate, ranks = -1, cfg.nodes_per_fsdp_group * per_node
        group = f" (nodes_per_fsdp_group {cfg.nodes_per_fsdp_group} x {per_node} ranks a node)"
        if ranks % inner:
            raise ConfigError(
                f"distributed:{group[1:]} = {ranks} ranks are not divisible by cp {cfg.cp} x tp "
                f"{cfg.tp} = {inner}; choose cp and tp that divide {ranks}"
            )
        shard = ranks // inner
    requested = Axes(cfg.pp, replicate, shard, cfg.cp, cfg.tp)
    if shard == -1:
        shard = max(1, world_size // (cfg.pp * inner * replicate))
    elif replicate == -1:
        replicate = max(1, world_size // (cfg.pp * inner * shard))
    axes = requested._replace(replicate=replicate, shard=shard)
    if (product := math.prod(axes)) != world_size:
        names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        axis_list = [
            (name, "rest" if size == -1 else str(size), str(size_there))
            for name, size, size_there in zip(names, requested, axes, strict=True)
            if size_there > 1 or name.startswith("dp_")
        ]
        request_text = " x ".join(f"{name} {size}" for name, size, _ in axis_list)
        others = " x ".join(name for name, *_ in axis_list if name != "dp_shard")
        raise ConfigError(
            f"distributed: {request_text}{group} does not make the world of {world_size} "
            f"rank{'s' * (world_size > 1)} "
            f"({' x '.join(size_there for *_, size_there in axis_list)} = {product}); choose "
            f"sizes whose product is {world_size}, or dp_shard=-1 with a {others} that divides "
            f"{world_size}, or start {product} task{'s' * (product > 1)}"
        )
    if shard * cfg.cp % cfg.ep:
        raise ConfigError(
            f"distributed.ep = {cfg.ep}: must divide dp_shard {shard} x cp {cfg.cp} = "
            f"{shard * cfg.cp}, whose ranks share the experts"
        )
    return axes


def is_alone(axes: Axes, cfg: DistributedConfig) -> bool:
    """Return whether a single rank has the whole model in its memory and needs no FSDP."""
    return math.prod(axes) == 1 and not cfg.fsdp_cpu_offload


@dataclass(frozen=True)
class Layout:
    """The ranks along each axis, and this rank's place among them."""

    sizes: Axes
    rank: int
    mesh: DeviceMesh  # of the weights, over all ranks: pp, replicate, fsdp, tp, if over 1
    cp_mesh: DeviceMesh | None = None  # the same ranks, with an axis cp; None: cp is 1
    ep_mesh: DeviceMesh | None = None  # pp, replicate, fsdp, ep, tp; None: ep is 1
    # This replica of lowcomm/ and their number; the layout describes one replica.
    replica: int = 0
    replicas: int = 1
    added_groups: list[dist.ProcessGroup] = field(default_factory=list, compare=False)

    @property
    def at(self) -> Axes:
        """This rank's index along each axis."""
        rank, indices = self.rank, []
        for size in reversed(self.sizes):
            rank, index = divmod(rank, size)
            indices.append(index)
        return Axes(*reversed(indices))

    # --- Data ---

    @property
    def data_rank(self) -> int:
        """Index of this rank's share of a batch. Ranks that share a copy of the weights are
        neighbours but read different samples; those along pp, cp and tp read the same."""
        return self.at.replicate * self.sizes.shard + self.at.shard

    @property
    def data_ranks(self) -> int:
        return self.sizes.data_ranks

    @property
    def share(self) -> int:
        """Index of this rank's share of the global batch among all replicas."""
        return self.replica * self.data_ranks + self.data_rank

    @property
    def shares(self) -> int:
        return self.replicas * self.data_ranks

    # --- Meshes; None: of one rank ---

    @cached_property
    def pp(self) -> DeviceMesh | None:
        return _axis(self.mesh, PP)

    @cached_property
    def cp(self) -> DeviceMesh | None:
        return _axis(self.cp_mesh, CP)

    @cached_property
    def tp(self) -> DeviceMesh | None:
        return _axis(self.mesh, TP)

    @cached_property
    def ep(self) -> DeviceMesh | None:
        return _axis(self.ep_mesh, EP)

    @property
    def expert_mesh(self) -> DeviceMesh:
        """Mesh over which experts are cut if ep is over 1: ep, and tp if that is over 1."""
        assert self.ep_mesh is not None
        return self.ep_mesh[EP, TP] if self.tp is not None else self.ep_mesh[EP]

    @cached_property
    def parameter_mesh(self) -> DeviceMesh:
        """Mesh of fully_shard for the parameters: FSDP, or HSDP with several copies."""
        return _data_parallel(self.mesh)

    @cached_property
    def expert_parameter_mesh(self) -> DeviceMesh:
        """Mesh of fully_shard for the experts of an expert-parallel rank. If ep is 1, they
        are ordinary parameters."""
        return _data_parallel(self.ep_mesh or self.mesh)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        meshes = (self.mesh, self.cp_mesh, self.ep_mesh)
        groups = [group for mesh in meshes if mesh is not None for group in mesh.get_all_groups()]
        return groups + self.added_groups

    @property
    def blocks_apart(self) -> bool:
        """True if no rank waits for another within a block, once its weights are gathered."""
        return self.sizes.tp * self.sizes.cp == 1 and self.ep_mesh is None

    # --- Sums ---

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place: losses and token counts that went through once(),
        flags, and norm_sq()."""
        import torch.distributed as dist

        dist.all_reduce(values)
        return values

    def once(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of numbers about its tokens, by name: the ranks of one tp group
        have the same tokens, and sum() must count them once."""
        if self.sizes.tp == 1:
            return dict(values)
        # Multiply by 0 instead of dropping: 0 times NaN or infinity is NaN, so any rank's shows.
        share = float(self.at.tp == 0)
        return {name: value * share for name, value in values.items()}

    def norm_sq(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return this rank's part of the squared norm of all gradients, fp32 [];
        sum() completes it.

        A gradient that several ranks hold (the copies of HSDP) counts once in total: each rank
        contributes its square over their number.
        """
        import torch

        from kempner.checkpoint.format.plan import local_part

        by_copies: dict[int, list[Tensor]] = {}
        parameters = list(parameters)
        for parameter in parameters:
            if (grad := parameter.grad) is not None:
                by_copies.setdefault(self.copies(grad), []).append(local_part(grad))
        parts = [
            # In fp32: squares of bf16 gradients would keep only 8 bits.
            torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).square().sum() / copies
            for copies, grads in by_copies.items()
        ]
        if not parts:  # all parameters of this pipeline stage are frozen
            return torch.zeros((), device=parameters[0].device)
        return torch.stack(parts).sum()

    def copies(self, tensor: Tensor) -> int:
        """Count the ranks that hold the same part of a parameter or its gradient: those of its
        pipeline stage along all axes that do not cut it."""
        from kempner.checkpoint.format.plan import is_distributed

        ranks = math.prod(self.sizes) // self.sizes.pp
        if not is_distributed(tensor):
            return ranks
        cuts = math.prod(
            tensor.device_mesh.size(axis)
            for axis, placement in enumerate(tensor.placements)
            # Not is_shard(): it is False for a _StridedShard, which FSDP over tp makes.
            if not placement.is_replicate()
        )
        return ranks // cuts


def _axis(mesh: DeviceMesh | None, name: str) -> DeviceMesh | None:
    return mesh[name] if mesh is not None and name in (mesh.mesh_dim_names or ()) else None


def _data_parallel(mesh: DeviceMesh) -> DeviceMesh:
    several = REPLICATE in (mesh.mesh_dim_names or ())
    return mesh[REPLICATE, FSDP] if several else mesh[FSDP]


def build_layout(
    cfg: DistributedConfig,
    world_size: int,
    per_node: int,
    device_type: str,
    replica: tuple[int, int] = (0, 1),
) -> Layout:
    """Build the meshes over all ranks; neighbours in rank are neighbours along tp, then
    cp, then shard.

    The axes of the weights have one mesh, with shard x cp as one axis: fully_shard composes only
    axes of one mesh, and an axis made by flattening two cannot be sliced out together with others.
    `replica`: this replica's number, and the number of replicas.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    axes = axis_sizes(cfg, world_size, per_node)
    pp, replicate, shard, cp, tp = axes
    outer = {PP: pp, REPLICATE: replicate}

    def mesh(axes: dict[str, int]) -> DeviceMesh:
        # fully_shard needs its axis even at size 1; the others would only add groups.
        real_axes = {name: size for name, size in axes.items() if size > 1 or name == FSDP}
        return init_device_mesh(
            device_type, tuple(real_axes.values()), mesh_dim_names=tuple(real_axes)
        )

    weights = mesh({**outer, FSDP: shard * cp, TP: tp})
    sequences = mesh({"data": pp * replicate * shard, CP: cp, TP: tp}) if cp > 1 else None
    experts = (
        mesh({**outer, FSDP: shard * cp // cfg.ep, EP: cfg.ep, TP: tp}) if cfg.ep > 1 else None
    )
    return Layout(axes, dist.get_rank(), weights, sequences, experts, *replica)
