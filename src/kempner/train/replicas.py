"""Copies of a model that train apart, as the trainer sees them: by default there are none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kempner.checkpoint.checkpointer import Checkpointer
from kempner.checkpoint.state import StateProvider

if TYPE_CHECKING:
    from kempner.train.progress import Progress
    from kempner.train.step import StepResult

ReplicaNumbers = dict[str, Tensor]
Waiting = Callable[..., AbstractContextManager[None]]


class Replicas:
    """The null object: one model that nobody else trains."""

    patience = 1.0
    """Steps that a request to leave waits for, as a multiple of those of a plain run."""

    def with_outer(self, state: dict[str, StateProvider]) -> dict[str, StateProvider]:
        """The providers of a checkpoint, from those of a plain run."""
        return state

    def checkpointer(self, *parts: Any) -> Checkpointer:
        """Saves and loads; `parts` are the arguments of Checkpointer."""
        return Checkpointer(*parts)

    def begin(self, progress: Progress) -> Progress:
        """The weights are loaded, or made; returns where the run goes on."""
        return progress

    def after_step(self, progress: Progress, numbers: ReplicaNumbers) -> ReplicaNumbers:
        """The weights of a step are there; `numbers`: of this step and this replica, fp64 [] each.
        Returns the numbers that the host reads."""
        return numbers

    def record(self, result: StepResult) -> tuple[dict[str, Any], list[str]]:
        """A line of its own in metrics.jsonl after this step, empty where there is none; and what
        the log says of it."""
        return {}, []

    def may_go_back(self, progress: Progress) -> bool:
        """Return whether non-finite steps may lead back to the last checkpoint: once."""
        return not progress.skip

    def forget_errors(self) -> None:
        """Drop the errors of the compression: this replica goes on with another one's state."""
