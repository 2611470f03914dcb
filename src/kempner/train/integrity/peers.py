"""Ranks that compute each other's batches."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

from kempner.parallel.layout import Layout


class Peers:
    """The ranks with the same part of the model, some units away along the data axis. A unit: ranks
    that exchange activations and so compute a batch together."""

    def __init__(self, layout: Layout, host: str, device: str) -> None:
        """Collective. `device`: the name of this rank's device, such as `NVIDIA H100`."""
        self._layout = layout
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        seen: list[Any] = [None] * self.size
        dist.all_gather_object(seen, (host, device))
        self.hosts = [host for host, _ in seen]
        # Another kind of GPU may sum in another order and cannot be a witness.
        self.alike = len({device for _, device in seen}) == 1
        ep = 1 if layout.ep is None else layout.ep.size()
        self._unit = max(1, ep // layout.sizes.cp)  # data ranks whose tokens meet in the experts
        others = range(self._unit, layout.data_ranks, self._unit)
        self.shifts = self._on_other_hosts(list(others)) if self.alike else []

    def _on_other_hosts(self, shifts: list[int]) -> list[int]:
        """Return the shifts that take every rank to another host; all shifts if none does."""
        far = [self.hosts[self.at(shift)] != self.hosts[self.rank] for shift in shifts]
        if not far:
            return []
        # All ranks exchange by the same shift: it must take each of them to another host.
        flags = torch.tensor(far, dtype=torch.int64)
        dist.all_reduce(flags, dist.ReduceOp.MIN)
        return [shift for shift, flag in zip(shifts, flags.tolist(), strict=True) if flag] or shifts

    @property
    def unit(self) -> int:
        """Number of this rank's unit."""
        return self._layout.data_rank // self._unit

    def at(self, shift: int) -> int:
        """Return the rank `shift` data ranks further."""
        sizes = self._layout.sizes
        number = (self._layout.data_rank + shift) % self._layout.data_ranks
        replicate, shard = divmod(number, sizes.shard)
        rank = 0
        for index, size in zip(
            self._layout.at._replace(replicate=replicate, shard=shard), sizes, strict=True
        ):
            rank = rank * size + index
        return rank

    def exchange(self, message: Any, shift: int) -> Any:
        """Send an object `shift` data ranks further and return the one from as far back. Over gloo,
        in host memory."""
        to, source = self.at(shift), self.at(-shift)
        if to == self.rank:
            return message
        data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        # Sizes first: the ranks' pickles differ in length.
        size = _swap(torch.tensor([data.numel()]), torch.zeros(1, dtype=torch.int64), to, source)
        theirs = _swap(data, torch.empty(int(size), dtype=torch.uint8), to, source)
        return pickle.loads(theirs.numpy().tobytes())

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers."""
        value = torch.tensor(number)
        dist.all_reduce(value, dist.ReduceOp.MIN)
        return int(value)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def _swap(ours: torch.Tensor, theirs: torch.Tensor, to: int, source: int) -> torch.Tensor:
    # Post both before waiting for either: in a ring, sends alone would wait for each other.
    works = [dist.isend(ours, to), dist.irecv(theirs, source)]
    for work in works:
        assert work is not None
        work.wait()
    return theirs
