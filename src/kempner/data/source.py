"""The loader's view of a data set: numbered samples. N samples, T tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kempner.config.option import ConfigError

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]

IGNORE = -100  # a target that does not count: padding, or a masked token


@dataclass(frozen=True)
class SampleRows:
    """Samples as read; `targets` are the next tokens of `inputs`."""

    inputs: Int64  # [N, T]
    targets: Int64  # [N, T]; -100 does not count: the loss mask
    documents: Int32 | None = None  # [N, T]: document number in its row, from 0; None: one per row

    def cut(self, pieces: int) -> SampleRows:
        """Cut each row into `pieces` shorter ones, [N * pieces, T / pieces]."""
        size = self.inputs.shape[1] // pieces
        documents = None if self.documents is None else self.documents.reshape(-1, size)
        return SampleRows(self.inputs.reshape(-1, size), self.targets.reshape(-1, size), documents)


class Source(Protocol):
    """A data set of one split, for one sequence length. Reading it is safe in any thread.

    The content of sample `index` depends only on the index and the files, never on earlier reads:
    the order, the mixture and the share of each rank are the loader's.
    """

    name: str
    seq_len: int
    ordered: bool  # read in sequence, not shuffled: endless, or slow to rewind

    @property
    def packing(self) -> dict[str, float] | None:
        """Return metrics of packed rows: how full they are, and what did not fit. None
        if not packed."""
        ...

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def read(self, indices: Int64) -> SampleRows:
        """Read samples `indices` [N], each in 0 to len - 1, in that order."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return everything that determines the samples, as JSON: a run resumes only if
        it is unchanged."""
        ...


class DataError(ConfigError):
    """Something is wrong with the data, or with the text it is made from."""


class Shape(NamedTuple):
    """Shape of the samples that a run reads from a stream."""

    seq_len: int
    vocab_size: int  # of the model: token ids are smaller
    separate: bool = False  # documents do not see each other
    cut: bool = False  # cut conversations longer than a row instead of dropping them
    preferences: bool = False  # pairs of answers instead of text or chats
