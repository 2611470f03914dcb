"""Saves by the clock, loaded if checkpoint.interval is a duration or auto: rank 0 decides when one
is due, and all ranks save at the step whose all-reduce tells them."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

# 419 unexpected interruptions of 16,384 GPUs in 54 days: The Llama 3 Herd of Models,
# section 3.3.4 (arXiv:2407.21783).
GPU_SECONDS_PER_FAILURE = 54 * 86400 * 16384 / 419
FIRST_S = 600.0  # until the first save, whose cost is not yet known
SHORTEST_INTERVAL_S, LONGEST_INTERVAL_S = 60.0, 7200.0
WORTH_SAYING = 1.2  # a change of the interval by this factor is logged


class SaveTimer:
    """A timer of saves that are `seconds` apart."""

    def __init__(self, seconds: float) -> None:
        """`seconds` from now until the first save; infinity on ranks other than the first."""
        self.seconds = seconds
        self._last = time.monotonic()

    def is_due(self) -> bool:
        return time.monotonic() - self._last >= self.seconds

    def restart(self) -> None:
        """Count from now on: a save has begun."""
        self._last = time.monotonic()

    def learn(self, cost: float) -> None:
        """Record that a save has prolonged the steps by `cost` seconds in total."""


class YoungTimer(SaveTimer):
    """A timer that follows Young's rule (CACM 17(9), 1974; Daly, FGCS 22(3), 2006, has the same
    leading term): an interval of sqrt(2 x cost of a save x mean time between failures) loses least
    to saves and to steps that are computed twice."""

    def __init__(
        self, ranks: int, ran: float, failures: int, say: Callable[[str], None] = lambda _: None
    ) -> None:
        """`ran`, `failures`: seconds that the run has trained so far, and how often it failed."""
        super().__init__(FIRST_S)
        self._ranks, self._ran, self._failures, self._say = ranks, ran, failures, say
        self._began = time.monotonic()
        self._costs: deque[float] = deque(maxlen=8)
        self._said = FIRST_S

    def learn(self, cost: float) -> None:
        self._costs.append(cost)
        mean = sum(self._costs) / len(self._costs)
        ran = self._ran + time.monotonic() - self._began
        between = seconds_between_failures(self._ranks, ran, self._failures)
        self.seconds = young_interval(mean, between)
        if len(self._costs) == 1 or max(ratio := self.seconds / self._said, 1 / ratio) > (
            WORTH_SAYING
        ):
            # Compare with the last report, not the last interval, to report slow drift, too.
            self._said = self.seconds
            self._say(
                f"checkpoint.interval = auto: a save every {self.seconds / 60:.1f} min (each costs "
                f"{mean:.2g} s of steps; {self._failures} failures in {ran / 3600:.1f} h, so one "
                f"is expected in {between / 3600:,.1f} h)"
            )


def open_timer(
    seconds: float | None,
    first: bool,
    run_dir: Path,
    attempt: int,
    ranks: int,
    say: Callable[[str], None],
) -> SaveTimer:
    """Open the timer of an attempt. `seconds`: None is auto; `first`: on rank 0, which decides."""
    if not first:
        return SaveTimer(math.inf)
    if seconds is not None:
        return SaveTimer(seconds)
    return YoungTimer(ranks, *failures_of(run_dir, attempt), say)


def young_interval(cost: float, between_failures: float) -> float:
    """Return the seconds between saves, within sensible limits. Arguments in seconds."""
    return min(max(math.sqrt(2 * cost * between_failures), SHORTEST_INTERVAL_S), LONGEST_INTERVAL_S)


def seconds_between_failures(ranks: int, ran: float, failures: int) -> float:
    """Estimate the mean time between failures of a run: the prior is one failure in the published
    time for as many GPUs."""
    return (GPU_SECONDS_PER_FAILURE / ranks + ran) / (1 + failures)


def failures_of(run_dir: Path, attempt: int) -> tuple[float, int]:
    """Return the seconds that earlier attempts of a run lasted, and how many failed; one that ended
    on request did not."""
    from kempner.jobs.records.run_history import load_history

    earlier = [each for each in load_history(run_dir).attempts if each.number < attempt]
    failures = sum(each.state in ("crashed", "hung", "killed") for each in earlier)
    return sum(max(0.0, each.ended - each.opened) for each in earlier), failures


def describe_auto(ranks: int) -> str:
    """Describe how checkpoint.interval = auto chooses, for --check."""
    between = seconds_between_failures(ranks, 0.0, 0)
    return (
        f"checkpoint.interval = auto: the first save comes after {FIRST_S / 60:.0f} min of steps, "
        "then one every sqrt(2 x cost of a save x mean time between failures), from "
        f"{SHORTEST_INTERVAL_S / 60:.0f} min to {LONGEST_INTERVAL_S / 3600:.0f} h; the cost is "
        f"measured, and failures are counted; before the first, {ranks:,} ranks are assumed to "
        f"fail once in {between / 3600:,.0f} h (one failure in "
        f"{GPU_SECONDS_PER_FAILURE / 3600:,.0f} h of a GPU)"
    )
