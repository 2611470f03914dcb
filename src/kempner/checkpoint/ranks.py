"""Collective actions: one rank or all ranks act, and all raise if one fails. Each costs one or two
collectives of a constant size."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from kempner.checkpoint.history import Damaged
from kempner.config.option import ConfigError

_T = TypeVar("_T")
# All ranks raise the worst outcome of any rank.
OUTCOME_FINE, OUTCOME_DAMAGED, OUTCOME_CONFIG, OUTCOME_OTHER = range(4)


class Ranks:
    """All ranks, over a gloo group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def on_first(self, act: Callable[[], _T]) -> _T:
        """Run `act` on rank 0; all ranks get its result, or its error."""
        result: list[Any] = [OUTCOME_FINE, None]
        error = None
        if self.rank == 0:
            try:
                result[1] = act()
            except Exception as caught:
                # Others get text: an exception may not be picklable.
                error, result = caught, [_kind(caught), self.describe(caught)]
        with in_touch():
            dist.broadcast_object_list(result, 0, self.group)
        if result[0] != OUTCOME_FINE:
            raise _shared(result[0], result[1], error)
        return result[1]  # type: ignore[no-any-return]

    def on_all(self, act: Callable[[], _T], most: list[int] | None = None) -> _T:
        """Run `act` on every rank; returns this rank's result if all have succeeded. `most`:
        numbers that become the largest of all ranks."""
        result = error = None
        try:
            result = act()
        except Exception as caught:
            error = caught
        # One number encodes the worst kind first, then the lowest rank.
        own_kind = _kind(error) * self.size + self.size - 1 - self.rank
        worst = torch.tensor([own_kind, *(most or ())])
        with in_touch():
            dist.all_reduce(worst, dist.ReduceOp.MAX, self.group)
        kind, place = divmod(int(worst[0]), self.size)
        if most:
            most[:] = worst[1:].tolist()
        if kind != OUTCOME_FINE:
            # All ranks know the failed rank from the number: only it has to send its message.
            messages = [self.describe(error) if error else ""]
            with in_touch():
                dist.broadcast_object_list(messages, self.size - 1 - place, self.group)
            raise _shared(kind, messages[0], error)
        return result  # type: ignore[return-value]

    def largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        most = torch.tensor(number)
        with in_touch():
            dist.all_reduce(most, dist.ReduceOp.MAX, self.group)
        return int(most)

    def slowest(self, seconds: float) -> tuple[int, float, float]:
        """Return the slowest rank, its seconds, and the mean of the others'."""
        total = torch.tensor(seconds, dtype=torch.float64)
        # Time and rank in one integer: one maximum finds both.
        most = torch.tensor(round(seconds * 1e6) * self.size + self.rank)
        with in_touch():
            dist.all_reduce(total, group=self.group)
            dist.all_reduce(most, dist.ReduceOp.MAX, self.group)
        micros, rank = divmod(int(most), self.size)
        return rank, micros / 1e6, (total.item() - micros / 1e6) / max(1, self.size - 1)

    def describe(self, error: BaseException) -> str:
        """Describe the error in one line with its rank, unless the rank does not matter."""
        if isinstance(error, (ConfigError, Damaged, PeerFailed)):
            return str(error)
        return f"rank {self.rank}: {type(error).__name__}: {error}"


class PeerFailed(RuntimeError):
    """Another rank failed; the message has its rank and its error."""


class PeersLost(PeerFailed):
    """A collective itself has failed. Gloo then closes its connections, so that no later collective
    of the group can succeed."""


@contextlib.contextmanager
def in_touch() -> Iterator[None]:
    """Raise PeersLost for an error of the collectives within."""
    try:
        yield
    except RuntimeError as error:
        raise PeersLost(f"the ranks have lost contact: {error}") from error


def _kind(error: BaseException | None) -> int:
    if error is None:
        return OUTCOME_FINE
    if isinstance(error, Damaged):
        return OUTCOME_DAMAGED
    return OUTCOME_CONFIG if isinstance(error, ConfigError) else OUTCOME_OTHER


def _shared(kind: int, message: str, own: Exception | None) -> Exception:
    """Return the error to raise here: this rank's own if it is of the worst kind."""
    if own is not None and _kind(own) == kind:
        return own
    return {OUTCOME_DAMAGED: Damaged, OUTCOME_CONFIG: ConfigError, OUTCOME_OTHER: PeerFailed}[kind](
        message
    )
