"""A micro-batch, the input of a forward pass. B rows, T tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kempner.model.attention import Documents


@dataclass(frozen=True)
class MicroBatch:
    inputs: Tensor  # int64 [B, T]
    targets: Tensor  # int64 [B, T]; -100 does not count
    documents: Documents | None = None  # None: each row is one document
    sources: Tensor | None = None  # int64 [B, 1]: number of the data source; None: only one

    def to(self, device: torch.device) -> MicroBatch:
        """Copy to the device; from pinned memory without making the host wait."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> MicroBatch:
        return self._map(lambda tensor: tensor.pin_memory())

    def columns(self, index: Tensor) -> MicroBatch:
        """Select the tokens `index` [t] of each row; documents stay those of whole rows."""
        return replace(self, inputs=self.inputs[:, index], targets=self.targets[:, index])

    def _map(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        return MicroBatch(
            change(self.inputs),
            change(self.targets),
            None if self.documents is None else self.documents.map(change),
            None if self.sources is None else change(self.sources),
        )
