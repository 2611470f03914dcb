"""Random tokens, for measurements: `data.dataset_path = "fake:"`. T tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from kempner.data.source import IGNORE, Int32, Int64, SampleRows, Shape

FAKE_SAMPLES = 1 << 40
DOCUMENTS = 8  # in a row, on average


class FakeDataset:
    """Rows of random tokens, determined by the sample's number. Separate documents have
    exponentially distributed lengths, about DOCUMENTS per row."""

    ordered = False
    packing = None

    def __init__(self, name: str, shape: Shape) -> None:
        self.name, self.seq_len = name, shape.seq_len
        self._vocab_size, self._separate = shape.vocab_size, shape.separate

    def __len__(self) -> int:
        return FAKE_SAMPLES

    def identity(self) -> dict[str, Any]:
        return {"seq_len": self.seq_len}

    def read(self, indices: Int64) -> SampleRows:
        """Read samples `indices` [N]."""
        length = self.seq_len
        rows = np.empty((len(indices), length + 1), np.int64)
        documents = np.zeros((len(indices), length), np.int32) if self._separate else None
        for i, index in enumerate(indices):
            random = np.random.default_rng(int(index))
            rows[i] = random.integers(self._vocab_size, size=length + 1)
            if documents is not None:
                documents[i] = _documents(random, length)
        inputs, targets = rows[:, :-1], rows[:, 1:].copy()
        if documents is not None:  # a document's last token does not predict the next document
            targets[:, :-1][documents[:, 1:] != documents[:, :-1]] = IGNORE
        return SampleRows(inputs, targets, documents)


def _documents(random: np.random.Generator, length: int) -> Int32:
    """Return the document number of each of `length` tokens, [T]."""
    mean = max(1.0, length / DOCUMENTS)
    lengths = 1 + random.exponential(mean, size=length).astype(np.int64)
    return np.searchsorted(np.cumsum(lengths), np.arange(length), side="right").astype(np.int32)
