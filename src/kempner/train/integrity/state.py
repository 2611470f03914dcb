"""Checksums of the weights and of the optimizer's state: only the update may change them, and their
copies are equal."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from kempner.checkpoint.format.plan import local_part
from kempner.checkpoint.ranks import PeerFailed
from kempner.checkpoint.state import ModelState, OptimizerState
from kempner.parallel.layout import Layout
from kempner.train.integrity.fingerprint import checksum
from kempner.train.integrity.peers import Peers

Sums = dict[str, int]  # tensor name -> checksum


class StateChecks:
    """This rank's state, as checksums."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout) -> None:
        self._providers = (ModelState(model), OptimizerState(model, optimizer))
        self.copies = layout.sizes.replicate
        self._place = (layout.at._replace(replicate=0), layout.at.replicate)

    def take(self) -> Sums:
        """Return the checksums of all tensors. The host waits for the device."""
        sums = {
            name: checksum(local_part(value))
            for each in self._providers
            for name, value in each.tensors().items()
        }
        by_device: dict[torch.device, list[str]] = {}
        for name, value in sums.items():
            by_device.setdefault(value.device, []).append(name)
        # Wait once per device, not once per tensor.
        return {
            name: number
            for names in by_device.values()
            for name, number in zip(
                names, torch.stack([sums[name] for name in names]).tolist(), strict=True
            )
        }

    def odd_copies(self, sums: Sums, peers: Peers) -> list[int]:
        """Return the ranks whose part of the state differs from that of most replicas or, without a
        majority, all ranks that hold this part. Collective."""
        # Python's integers, because the sum of many checksums may exceed 64 bits.
        found = peers.gather((self._place, sum(sums.values())))
        holders: dict[object, list[tuple[int, int]]] = {}
        for rank, ((place, _), total) in enumerate(found):
            holders.setdefault(place, []).append((rank, total))
        odd: list[int] = []
        for part in holders.values():
            counts = Counter(total for _, total in part).most_common()
            clear = len(counts) == 1 or counts[0][1] > counts[1][1]
            odd += [rank for rank, total in part if not clear or total != counts[0][0]]
        return odd


def changed(before: Sums, after: Sums) -> list[str]:
    """Return the names of the tensors that have changed."""
    return [name for name, number in before.items() if after.get(name) != number]


class WrongNumbers(PeerFailed):
    """A device has computed wrong numbers, or its memory has changed. The rank that raises this is
    not to blame."""

    def __init__(self, reason: str, ranks: Any = ()) -> None:
        super().__init__(reason)
        self.ranks = tuple(sorted(ranks))
