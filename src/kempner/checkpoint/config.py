"""The [checkpoint] section."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kempner.config.option import option
from kempner.config.values import format_value

DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|h|d)")
SPREAD = 16  # at most so many copies share the writing: a loading rank opens as many files
_LONGEST_S = 366 * 86400.0
UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}  # seconds


@dataclass(frozen=True)
class CheckpointConfig:
    dir: str = option("", "directory of the checkpoints; unset: <run.dir>/checkpoints")
    interval: int | str = option(
        500,
        "steps or time between saves, such as 500, 20min or 2h; auto: chosen from the failures of "
        "the run and the cost of its saves; 0: only at the end",
        minimum=0,
        maximum=10**9,
    )
    save: bool = option(
        True, "false: neither write nor load checkpoints, for runs that only measure"
    )
    async_save: bool = option(True, "write in the background, after a copy to host memory")
    keep_last_n: int = option(2, "number of newest checkpoints to keep", minimum=1)
    keep_every: int = option(
        0, "also save multiples of this many steps, and keep them; 0: none", minimum=0
    )
    powers_of_two: bool = option(
        False, "also save steps 0 (before any update), 1, 2, 4, 8, ..., and keep them for good"
    )

    def is_due(self, step: int) -> bool:
        """Return whether a run saves after `step` steps, other than its last, whatever the time."""
        by_step = isinstance(self.interval, int) and self.interval
        regular = by_step and step % by_step == 0
        kept = self.keep_every and step and step % self.keep_every == 0
        return bool(regular or kept or (self.powers_of_two and is_power_of_two(step)))

    @property
    def seconds(self) -> float | None:
        """Seconds between saves; None if checkpoint.interval is not a duration."""
        found = DURATION.fullmatch(str(self.interval))
        return float(found[1]) * UNITS[found[2]] if found else None

    def problems(self) -> list[str]:
        problems = []
        is_time = self.seconds and self.seconds <= _LONGEST_S
        if isinstance(self.interval, str) and self.interval != "auto" and not is_time:
            number = self.interval.isascii() and self.interval.isdigit()
            fix = f"{self.interval}, without quotes" if number else "500, 20min or auto"
            problems.append(
                f"checkpoint.interval = {format_value(self.interval)}: must be a number of steps, "
                f"a time above 0 and up to 366 d, in s, min, h or d, or auto; write {fix}"
            )
        if self.powers_of_two and not self.save:
            problems.append(
                "checkpoint.powers_of_two: checkpoint.save = false writes no checkpoints; leave "
                "one of the two out"
            )
        return problems


def is_power_of_two(step: int) -> bool:
    """Return whether `step` is a power of two, or 0, which starts a series of such checkpoints."""
    return step & (step - 1) == 0
