"""The [distributed] section."""

from __future__ import annotations

from dataclasses import dataclass

from kempner.config.option import option

LONGEST_S = 30 * 86400.0  # timers overflow far above that


@dataclass(frozen=True)
class DistributedConfig:
    dp_shard: int = option(
        -1, "ranks that shard one copy of the weights (FSDP); -1: all remaining ranks"
    )
    dp_replicate: int = option(
        1, "replicas of the weights (HSDP; with dp_shard=1 plain data parallelism)", minimum=1
    )
    tp: int = option(1, "tensor-parallel ranks; only 1 is supported", minimum=1)
    cp: int = option(1, "context-parallel ranks; only 1 is supported", minimum=1)
    ep: int = option(1, "expert-parallel ranks; only 1 is supported", minimum=1)
    device: str = option("auto", "device to train on", choices=("auto", "cuda", "cpu"))
    start_timeout: float = option(
        600.0,
        "seconds allowed for all ranks to start and for the first step",
        minimum=1.0,
        maximum=LONGEST_S,
    )
    timeout: float = option(
        300.0,
        "seconds that a collective may take after the first step",
        minimum=1.0,
        maximum=LONGEST_S,
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
