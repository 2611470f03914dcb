"""Mode mesh: all replicas in one srun step, fixed for its duration."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from kempner.extensions.lowcomm.outer import Decode, Handle

if TYPE_CHECKING:
    from kempner.jobs.ranks.placement import World

# The watchdog, not gloo, detects hangs; a lost replica's closed sockets show at once.
TIMEOUT = timedelta(hours=1)


class MeshExchange:
    """Groups of the ranks with the same number in all replicas: each group moves its own part of
    the model, all parts at the same time."""

    def __init__(self, world: World, device: torch.device) -> None:
        # Made by hand: new_group() takes ranks of the default group, which is the replica's.
        store = dist.PrefixStore(f"between/{world.rank}", world.store)
        self.count = world.replicas
        self.sent = 0
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self._group = dist.ProcessGroupNCCL(store, world.replica, self.count, options)
        else:
            self._group = dist.ProcessGroupGloo(store, world.replica, self.count, TIMEOUT)

    def start(self, ours: Tensor, name: str, decode: Decode | None = None) -> Handle:
        """Start an exchange. Counts the bytes of a ring, which sends 2 (K - 1) / K of the data that
        it sums, and K - 1 times the data that it gathers."""
        if decode is None:
            self.sent += 2 * (self.count - 1) * ours.nbytes // self.count
            return _Sum(self._group.allreduce([ours]), ours, self.count)
        self.sent += (self.count - 1) * ours.nbytes
        parts = [torch.empty_like(ours) for _ in range(self.count)]
        return _Parts(self._group.allgather([parts], [ours]), ours, parts, decode)


class _Sum:
    def __init__(self, work: dist.Work, ours: Tensor, count: int) -> None:
        self._work, self._ours, self._count = work, ours, count

    def wait(self) -> Tensor:
        self._work.wait()
        return self._ours / self._count


class _Parts:
    def __init__(self, work: dist.Work, ours: Tensor, parts: list[Tensor], decode: Decode) -> None:
        self._work, self._ours, self._parts, self._decode = work, ours, parts, decode

    def wait(self) -> Tensor:
        self._work.wait()
        # In the order of the replicas, so that the sum is bit-identical on all.
        total = self._decode(self._parts[0])
        for part in self._parts[1:]:
            total += self._decode(part)
        return total / len(self._parts)
