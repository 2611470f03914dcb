"""The trainer's view of replicas that train separately; by default there is only one."""

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
    """The null object: a single model."""

    patience = 1.0
    """Number of steps that a request to exit waits for, relative to a plain run."""

    def with_outer(self, state: dict[str, StateProvider]) -> dict[str, StateProvider]:
        """Return the providers of a checkpoint, given those of a plain run."""
        return state

    def checkpointer(self, *parts: Any) -> Checkpointer:
        """Return the object that saves and loads. `parts`: the arguments of Checkpointer."""
        return Checkpointer(*parts)

    def begin(self, progress: Progress) -> Progress:
        """Called when the weights are loaded or initialised; returns where the run continues."""
        return progress

    def after_step(self, progress: Progress, numbers: ReplicaNumbers) -> ReplicaNumbers:
        """Called when a step has updated the weights. `numbers`: of this step and this replica,
        fp64 [] each. Returns the numbers for the host."""
        return numbers

    def record(self, result: StepResult) -> tuple[dict[str, Any], list[str]]:
        """Return an extra line for metrics.jsonl after this step, empty if none, and log lines."""
        return {}, []

    def may_go_back(self, progress: Progress) -> bool:
        """Return whether non-finite steps may send the run back to its last checkpoint: once."""
        return not progress.skip

    def forget_errors(self) -> None:
        """Drop the compression errors: this replica continues with another one's state."""
