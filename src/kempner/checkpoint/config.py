"""The [checkpoint] section."""

from __future__ import annotations

from dataclasses import dataclass

from kempner.config.option import option


@dataclass(frozen=True)
class CheckpointConfig:
    dir: str = option("", "directory of the checkpoints; unset: <run.dir>/checkpoints")
    interval: int = option(500, "steps between saves; 0: only at the end", minimum=0)
    save: bool = option(
        True, "false: neither write nor load checkpoints, for runs that only measure"
    )
    async_save: bool = option(True, "write in the background, after a copy to host memory")
    keep_last_n: int = option(2, "number of newest checkpoints to keep", minimum=1)
    keep_every: int = option(
        0, "also keep checkpoints at multiples of this many steps; 0: none", minimum=0
    )
