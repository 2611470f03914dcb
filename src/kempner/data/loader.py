"""Samples -> the micro-batches of one rank, as tensors. B samples, T tokens.

A run's position is the number of samples it has consumed, over all ranks and epochs. What sample
number n is follows from n and the seed alone, and the global batch at a position is the numbers
position to position + batch - 1: the order is the same for any world size,
micro-batch and prefetch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import numpy as np
import torch

from kempner.data.batch import MicroBatch
from kempner.data.permute import epoch_seed, permute
from kempner.data.source import IGNORE, Int64, Rows, Source
from kempner.model.attention import Documents

VALIDATION_SEED = 0  # validation samples are the same ones in every run


def sample_numbers(position: int, count: int, n: int, seed: int) -> Int64:
    """Where the sample numbers position ... position + count - 1 are in a data set of `n` samples.

    Each epoch of n numbers is a shuffle of its own; `count` may run over the end of epochs.
    """
    numbers = np.arange(position, position + count, dtype=np.int64)
    epochs, index = np.divmod(numbers, n)
    result = np.empty_like(index)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        result[inside] = permute(index[inside], n, epoch_seed(seed, int(epoch)))
    return result


class TrainLoader:
    """next() gives this rank's micro-batches of one global step; it never ends.

    Of a global batch rank r of w takes the r-th contiguous part. With `prefetch` > 0 a thread reads
    that many steps ahead; an error in it comes out of next(). One loader is used by one thread.
    """

    def __init__(
        self,
        dataset: Source,
        *,
        seed: int,
        batch: int,
        rank: int,
        world: int,
        micro: int,
        position: int = 0,
        prefetch: int = 2,
        pin: bool = False,
        skip: Sequence[Sequence[int]] = (),
    ) -> None:
        """`batch`: samples of a global step. `micro`: samples of a micro-batch of one rank. `skip`:
        see seek()."""
        assert 0 <= rank < world and position >= 0
        assert batch % (world * micro) == 0, "batch must be a multiple of world * micro"
        self.position = position  # samples consumed
        self._dataset = dataset
        self._seed = seed
        self._batch, self._micro, self._pin = batch, micro, pin
        self._rank, self._share = rank, batch // world
        self._prefetch = prefetch
        self._skip = skip
        self._reader: _Reader | None = None

    def sample_numbers(self, position: int, count: int) -> Int64:
        """The data set's indices of the global samples position ... position + count - 1."""
        return sample_numbers(position, count, len(self._dataset), self._seed)

    def __iter__(self) -> TrainLoader:
        return self

    def __next__(self) -> list[MicroBatch]:
        for begin, end in self._skip:
            if begin <= self.position < end:
                self.seek(end, self._skip)
        if not self._prefetch:
            result = self._read(self.position)
        else:
            if self._reader is None:
                self._reader = _Reader(self._read, self.position, self._batch, self._prefetch)
            try:
                result = self._reader.next()
            except BaseException:
                self.close()
                raise
        self.position += self._batch
        return result

    def seek(self, position: int, skip: Sequence[Sequence[int]] = ()) -> None:
        """Go on at `position`, and leave out the sample numbers of the ranges `skip`, [from, to)
        each; what has been read ahead is thrown away."""
        assert position >= 0
        self.close()
        self.position, self._skip = position, skip

    def close(self) -> None:
        """Stop reading ahead; returns when the thread has ended. next() would start again."""
        if self._reader is not None:
            self._reader.stop()
            self._reader = None

    def _read(self, position: int) -> list[MicroBatch]:
        indices = self.sample_numbers(position + self._rank * self._share, self._share)
        rows = self._dataset.read(indices)
        return [
            _tensors(rows, slice(i, i + self._micro), self._pin)
            for i in range(0, self._share, self._micro)
        ]


class _Reader:
    """A thread that calls read(position), read(position + step), ..., `ahead` of next()."""

    def __init__(
        self, read: Callable[[int], list[MicroBatch]], position: int, step: int, ahead: int
    ) -> None:
        self._read = read
        self._free = threading.Semaphore(ahead)
        self._done: SimpleQueue[list[MicroBatch] | BaseException] = SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(
            target=self._run, args=(position, step), name="data", daemon=True
        )
        self._thread.start()

    def _run(self, position: int, step: int) -> None:
        while self._free.acquire() and not self._stopped:
            try:
                self._done.put(self._read(position))
            except BaseException as error:
                self._done.put(error)
                return
            position += step

    def next(self) -> list[MicroBatch]:
        result = self._done.get()
        self._free.release()
        if isinstance(result, BaseException):
            raise result
        return result

    def stop(self) -> None:
        self._stopped = True
        self._free.release()
        self._thread.join()


def val_batches(
    dataset: Source,
    *,
    samples: int | None,
    micro: int,
    rank: int,
    world: int,
) -> Iterator[MicroBatch]:
    """The first `samples` (None: all) of a fixed shuffle, as batches [micro, T] of this rank.

    Every rank gets equally many batches. Surplus rows have only the label -100, so the samples that
    count are the same for any world size and micro-batch.
    """
    size = len(dataset)
    total = size if samples is None else min(samples, size)
    for start in range(0, total, micro * world):
        mine = start + rank * micro
        numbers = sample_numbers(mine, max(0, min(micro, total - mine)), size, VALIDATION_SEED)
        rows = dataset.read(numbers)
        if missing := micro - len(numbers):
            rows = _padded(rows, missing)
        yield _tensors(rows, slice(None), pin=False)


def reading_speed(dataset: Source, micro: int, seconds: float = 2.0) -> float:
    """Tokens per second that one core reads, shuffles and makes into tensors, without prefetch."""
    loader = TrainLoader(dataset, seed=0, batch=micro, rank=0, world=1, micro=micro, prefetch=0)
    next(loader)
    began, first = time.perf_counter(), loader.position
    while (elapsed := time.perf_counter() - began) < seconds:
        next(loader)
    return (loader.position - first) * dataset.seq_len / elapsed


def _tensors(rows: Rows, part: slice, pin: bool) -> MicroBatch:
    """Some of the rows as tensors, each contiguous."""
    inputs = torch.from_numpy(np.ascontiguousarray(rows.inputs[part]))
    targets = torch.from_numpy(np.ascontiguousarray(rows.targets[part]))
    documents = None
    if rows.documents is not None:
        index = torch.from_numpy(np.ascontiguousarray(rows.documents[part]))
        documents = Documents.of(index, reset_positions=True)
    batch = MicroBatch(inputs, targets, documents)
    return batch.pin_memory() if pin else batch


def _padded(rows: Rows, missing: int) -> Rows:
    """With rows that do not count."""
    more = (missing, rows.inputs.shape[1])
    documents = rows.documents
    if documents is not None:
        documents = np.concatenate([documents, np.zeros(more, np.int32)])
    return Rows(
        np.concatenate([rows.inputs, np.zeros(more, np.int64)]),
        np.concatenate([rows.targets, np.full(more, IGNORE, np.int64)]),
        documents,
    )
