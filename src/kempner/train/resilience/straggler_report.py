"""Messages on slow ranks, collectives and saves. Loaded only when there is one."""

from __future__ import annotations

import statistics
from collections.abc import Callable

SLOW_WINDOWS = 2  # in a row: a single one is noise, such as another job's burst on a shared node
# What to look at, by the part of a rank's own work.
WHAT = {"compute": ": it computes slower", "input": ": it waits for its data"}


class StragglerReport:
    """Reports of a rank that stays slow, with exponential back-off, and of its recovery."""

    def __init__(self, hosts: list[str], window: int, say: Callable[[str], None]) -> None:
        """`hosts`: of each rank; `window`: steps of one comparison."""
        self._hosts, self._window, self._say = hosts, window, say
        self._rank, self._since = -1, 0  # the slow one, and the first step of its first slow window
        self._said = False
        self._grown = 0  # windows in a row

    def update(self, step: int, slow: int, ratio: float, late: float, part: str) -> None:
        """Take the slow rank of the window that ended with `step`, -1 for none: `late` in seconds a
        step, for the most part by `part`, of WHAT."""
        # Report recovery only of what was reported: a single slow window was noise.
        if self._rank >= 0 and slow != self._rank:
            if self._said:
                self._say(
                    f"straggler: rank {self._rank} on {self._hosts[self._rank]} is as fast as the "
                    f"others again, after steps {self._since} to {step}"
                )
            self._rank, self._said = -1, False
        if slow < 0:
            return
        if self._rank < 0:
            self._rank, self._since = slow, step - self._window + 1
        windows = (step - self._since + 1) // self._window
        if windows >= SLOW_WINDOWS and windows & (windows - 1) == 0:  # a power of two
            self._said = True
            self._say(
                f"straggler: rank {slow} on {self._hosts[slow]} is {ratio:.1f} times slower than "
                f"the other ranks since step {self._since} ({1000 * late:.0f} ms a step)"
                f"{WHAT[part]}"
            )

    def collectives(self, step: int, windows: list[tuple[float, float]], grown: bool) -> None:
        """Take whether the time outside of every rank's own work has grown while no rank
        is slow. Reports it once it persists; the longer time is then normal. `windows`:
        as in have_collectives_grown()."""
        self._grown = self._grown + 1 if grown else 0
        if self._grown < SLOW_WINDOWS:
            return
        rest = statistics.median(rest for _, rest in windows[-SLOW_WINDOWS:])
        usual = statistics.median(rest for _, rest in windows[:-SLOW_WINDOWS])
        self._say(
            f"slow collectives: since step {step - SLOW_WINDOWS * self._window + 1} steps spend "
            f"{1000 * rest:.0f} ms outside of every rank's own work, before {1000 * usual:.0f} ms: "
            "the network, or the hosts, are slower (scripts/slurm/preflight.sh measures them)"
        )
        del windows[:-SLOW_WINDOWS]
        self._grown = 0


def describe_slow_save(step: int, host: str, rank: int, seconds: float, others: float) -> str:
    """Describe a rank that was slow to write its part of a checkpoint."""
    return (
        f"straggler: rank {rank} on {host} is slow to save: its part of the checkpoint of step "
        f"{step} took {seconds:.1f} s, those of the other ranks {others:.1f} s on average"
    )
