"""Acting together: what one rank or all ranks do, and one error for all when somebody fails. Each
costs one or two collectives of a constant size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from kempner.checkpoint.commit import Damaged
from kempner.config.option import ConfigError

T = TypeVar("T")
FINE, DAMAGED, CONFIG, OTHER = range(4)  # the worst that any rank met is what all ranks raise


class Ranks:
    """All ranks, over a gloo group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def on_first(self, act: Callable[[], T]) -> T:
        """Rank 0 does it; all get its result, or its error."""
        told: list[Any] = [FINE, None]
        error = None
        if self.rank == 0:
            try:
                told[1] = act()
            except Exception as caught:
                error, told = caught, [_kind(caught), self.describe(caught)]
        dist.broadcast_object_list(told, 0, self.group)
        if told[0] != FINE:
            raise _shared(told[0], told[1], error)
        return told[1]  # type: ignore[no-any-return]

    def on_all(self, act: Callable[[], T]) -> T:
        """Every rank does it; returns this rank's result when all have succeeded."""
        result = error = None
        try:
            result = act()
        except Exception as caught:
            error = caught
        # The worst kind, and of those that met it the lowest rank, in one number.
        worst = torch.tensor(_kind(error) * self.size + self.size - 1 - self.rank)
        dist.all_reduce(worst, dist.ReduceOp.MAX, self.group)
        kind, place = divmod(int(worst), self.size)
        if kind != FINE:
            told = [self.describe(error) if error else ""]
            dist.broadcast_object_list(told, self.size - 1 - place, self.group)
            raise _shared(kind, told[0], error)
        return result  # type: ignore[return-value]

    def describe(self, error: BaseException) -> str:
        """One line that says on which rank, unless it does not matter."""
        if isinstance(error, (ConfigError, Damaged, PeerFailed)):
            return str(error)
        return f"rank {self.rank}: {type(error).__name__}: {error}"


class PeerFailed(RuntimeError):
    """Another rank failed; the message has its rank and its error."""


def _kind(error: BaseException | None) -> int:
    if error is None:
        return FINE
    if isinstance(error, Damaged):
        return DAMAGED
    return CONFIG if isinstance(error, ConfigError) else OTHER


def _shared(kind: int, told: str, own: Exception | None) -> Exception:
    """The error to raise here: this rank's own where it is of the worst kind."""
    if own is not None and _kind(own) == kind:
        return own
    return {DAMAGED: Damaged, CONFIG: ConfigError, OTHER: PeerFailed}[kind](told)
