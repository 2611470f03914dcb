"""The mesh of ranks: replicate x shard. Sizes come from [distributed] and must fit the world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kempner.config import ConfigError, option

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class DistributedConfig:
    dp_shard: int = option(
        -1, "ranks that share one copy of the weights (FSDP); -1: all that are left"
    )
    dp_replicate: int = option(
        1, "copies of the weights (HSDP; dp_shard=1 makes it plain data parallel)", minimum=1
    )
    tp: int = option(1, "tensor-parallel ranks; only 1 is built", minimum=1)
    cp: int = option(1, "context-parallel ranks; only 1 is built", minimum=1)
    ep: int = option(1, "expert-parallel ranks; only 1 is built", minimum=1)
    device: str = option("auto", "where to train", choices=("auto", "cuda", "cpu"))
    start_timeout: float = option(
        600.0, "seconds for all ranks to come up and for the first step", minimum=1.0
    )
    timeout: float = option(
        300.0, "seconds that a collective may take after the first step", minimum=1.0
    )

    def problems(self) -> list[str]:
        found = [
            f"distributed.{axis} = {getattr(self, axis)}: this axis is not built yet; leave it at 1"
            for axis in ("tp", "cp", "ep")
            if getattr(self, axis) != 1
        ]
        if self.dp_shard == 0 or self.dp_shard < -1:
            found.append(
                f"distributed.dp_shard = {self.dp_shard}: give a size from 1, or -1 for all "
                "ranks that are left"
            )
        return found


def sizes(cfg: DistributedConfig, world_size: int) -> tuple[int, int]:
    """(replicate, shard) for a world. Raises ConfigError with the arithmetic when they do not
    multiply to it."""
    replicate = cfg.dp_replicate
    shard = cfg.dp_shard if cfg.dp_shard != -1 else max(1, world_size // replicate)
    if replicate * shard != world_size:
        asked = "rest" if cfg.dp_shard == -1 else str(cfg.dp_shard)
        raise ConfigError([
            f"distributed: dp_replicate {replicate} x dp_shard {asked} does not make the world of "
            f"{world_size} ranks ({replicate} x {shard} = {replicate * shard}); choose sizes whose "
            f"product is {world_size}, or dp_shard=-1 with a dp_replicate that divides "
            f"{world_size}, or start {replicate * shard} tasks"
        ])  # fmt: skip
    return replicate, shard


def build(cfg: DistributedConfig, world_size: int, device_type: str) -> DeviceMesh:
    """The 2-D mesh with axes (replicate, shard) over all ranks; neighbours in rank share a copy."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(
        device_type, sizes(cfg, world_size), mesh_dim_names=("replicate", "shard")
    )
