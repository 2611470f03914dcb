"""The [distributed] section."""

from __future__ import annotations

from dataclasses import dataclass

from kempner.config.option import option


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
