"""Several sources joined: the samples of the first, then those of the second, and so on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kempner.data.source import Int64, SampleRows, Source


class Joined:
    ordered = False
    packing = None

    def __init__(self, sources: Sequence[Source]) -> None:
        self.name, self.seq_len = "+".join(each.name for each in sources), sources[0].seq_len
        self._sources = sources
        self._starts = np.cumsum([0, *(len(each) for each in sources)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: Int64) -> SampleRows:
        numbers = np.searchsorted(self._starts, indices, side="right") - 1
        return read_mixed(self._sources, numbers, indices - self._starts[numbers])

    def identity(self) -> dict[str, Any]:
        return {"joined": [each.identity() for each in self._sources]}


def read_mixed(sources: Sequence[Source], numbers: Int64, indices: Int64) -> SampleRows:
    """Read for each row n [N] the sample indices[n] of the source numbers[n]."""
    shape = len(numbers), sources[0].seq_len
    inputs, targets = np.empty(shape, np.int64), np.empty(shape, np.int64)
    documents = None
    for i in np.unique(numbers).tolist():
        mine = np.flatnonzero(numbers == i)
        rows = sources[i].read(indices[mine])
        inputs[mine], targets[mine] = rows.inputs, rows.targets
        if rows.documents is not None:
            documents = np.zeros(shape, np.int32) if documents is None else documents
            documents[mine] = rows.documents
    return SampleRows(inputs, targets, documents)
