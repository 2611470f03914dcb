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
    powers_of_two: bool = option(
        False, "also save steps 0 (before any update), 1, 2, 4, 8, ..., and keep them for good"
    )

    def is_due(self, step: int) -> bool:
        """Return whether a run saves after `step` steps, if they are not its last."""
        regular = self.interval > 0 and step % self.interval == 0
        return regular or (self.powers_of_two and is_power_of_two(step))

    def problems(self) -> list[str]:
        if self.save or not self.powers_of_two:
            return []
        return [
            "checkpoint.powers_of_two: checkpoint.save = false writes no checkpoints; leave one of "
            "the two out"
        ]


def is_power_of_two(step: int) -> bool:
    """Return whether `step` is a power of two, or 0, which starts a series of such checkpoints."""
    return step & (step - 1) == 0
