"""The [checkpoint] section."""

from __future__ import annotations

from dataclasses import dataclass

from kempner.config.option import option


@dataclass(frozen=True)
class CheckpointConfig:
    dir: str = option("", "checkpoint directory; unset: <run.dir>/checkpoints")
    interval: int = option(500, "steps between checkpoints; 0: only at the end", minimum=0)
    async_save: bool = option(True, "write in the background while training continues")
    keep_last_n: int = option(2, "number of newest checkpoints to keep", minimum=1)
    keep_every: int = option(
        0, "also keep every checkpoint whose step is a multiple of this; 0: none", minimum=0
    )
