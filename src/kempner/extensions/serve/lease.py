"""The run that an engine works for. Standard library only, because vLLM's process imports this."""

from __future__ import annotations

import math
import threading
import time

RUN = "X-Kempner-Run"  # header: the requesting run


class LeaseRefused(ValueError):
    """An engine cannot take these weights; its model is unchanged, unless they are not finite."""


class WeightsWithdrawn(LeaseRefused):
    """The trainer offers other weights by now."""


class LeaseHeld(LeaseRefused):
    """Another run uses the engine."""


class Lease:
    """The attempt of a run, RUN#ATTEMPT, whose weights the engine has. The run keeps the
    engine as long as it regularly asks for its health; two runs on one engine would train on
    each other's samples."""

    SECONDS = 180.0  # more than the 120 s for which rl.sh lets an orchestrator be silent

    def __init__(self) -> None:
        self.run, self._since, self._lock = "", -math.inf, threading.Lock()

    def held(self, run: str) -> bool:
        """Return whether a run other than this one uses the engine."""
        # Attempts of one run follow one another: none keeps an engine from the next.
        others = bool(self.run) and self.run.partition("#")[0] != run.partition("#")[0]
        return others and time.monotonic() < self._since + self.SECONDS

    def renew(self, run: str) -> None:
        if run and run == self.run:
            self._since = time.monotonic()

    def release(self, run: str) -> None:
        """End the lease of a run that has ended."""
        if run == self.run:
            # The name stays, because the weights are still that run's.
            self._since = -math.inf

    def take(self, run: str) -> bool:
        """Take the engine for a run; returns whether the weights were those of another attempt, or
        none. Raises LeaseHeld."""
        # Two runs may ask at the same time: one gets the engine.
        with self._lock:
            if self.held(run):
                raise LeaseHeld(
                    f"this engine has the weights of the run {self.run.partition('#')[0]}, which "
                    f"uses it; end that run, or start another engine. A run that has died keeps "
                    f"its engines for {self.SECONDS:.0f} s"
                )
            other, self.run = run != self.run, run
            self.renew(run)
            return other
