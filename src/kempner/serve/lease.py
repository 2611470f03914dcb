"""Which run an engine works for. The standard library alone: it is in vLLM's process, too."""

from __future__ import annotations

import threading
import time

RUN = "X-Kempner-Run"  # header: which run asks


class Refused(ValueError):
    """These weights cannot be taken; the model is as it was."""


class Lease:
    """The run whose weights these are. It keeps the engine as long as it asks now and then how the
    engine is; two runs at one engine would train on each other's samples."""

    SECONDS = 10.0

    def __init__(self) -> None:
        self.run, self._until, self._lock = "", 0.0, threading.Lock()

    @property
    def held(self) -> bool:
        return bool(self.run) and time.monotonic() < self._until

    def renew(self, run: str) -> None:
        if run and run == self.run:
            self._until = time.monotonic() + self.SECONDS

    def take(self, run: str) -> bool:
        """Whether the weights were those of another run, or of none. Raises Refused."""
        with self._lock:
            other = run != self.run
            if other and self.held:
                raise Refused(
                    f"this engine has the weights of the run {self.run}, which uses it; end that "
                    "run, or start another engine"
                )
            self.run = run
            self.renew(run)
            return other
