"""The mesh of ranks: replicate x shard. Sizes come from [distributed] and must fit the world."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kempner.config.option import ConfigError
from kempner.parallel.config import DistributedConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def sizes(cfg: DistributedConfig, world_size: int) -> tuple[int, int]:
    """(replicate, shard) for a world. Raises ConfigError with the arithmetic when they do not
    multiply to it."""
    replicate = cfg.dp_replicate
    shard = cfg.dp_shard if cfg.dp_shard != -1 else max(1, world_size // replicate)
    if replicate * shard != world_size:
        asked = "rest" if cfg.dp_shard == -1 else str(cfg.dp_shard)
        raise ConfigError(
            f"distributed: dp_replicate {replicate} x dp_shard {asked} does not make the world of "
            f"{world_size} ranks ({replicate} x {shard} = {replicate * shard}); choose sizes whose "
            f"product is {world_size}, or dp_shard=-1 with a dp_replicate that divides "
            f"{world_size}, or start {replicate * shard} tasks"
        )
    return replicate, shard


def build(cfg: DistributedConfig, world_size: int, device_type: str) -> DeviceMesh:
    """The 2-D mesh with axes (replicate, shard) over all ranks; neighbours in rank share a copy."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(
        device_type, sizes(cfg, world_size), mesh_dim_names=("replicate", "shard")
    )
