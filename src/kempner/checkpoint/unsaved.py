"""A stand-in for the Checkpointer if checkpoint.save is off: measurements leave no files."""

from __future__ import annotations

from typing import Any

from kempner.checkpoint.checkpointer import Checkpointer


class Unsaved(Checkpointer):
    """A checkpointer that neither reads nor writes; every step counts as durable."""

    def __init__(self) -> None:
        # No super().__init__(), which makes groups, threads and a lock.
        self._pending = None
        self.saved_step, self.failed_saves, self.seconds = -1, 0, None

    def load(self, only: int | None = None) -> dict[str, Any] | None:
        return None

    def save(self, step: int, position: dict[str, Any]) -> None:
        self.saved_step = step

    def poll(self, step_time: float = 0.0) -> None:
        pass

    def close(self, seconds: float | None = None, prune: bool = True) -> None:
        pass
