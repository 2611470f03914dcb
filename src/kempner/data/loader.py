"""Samples -> micro-batches of one rank, as tensors. B samples, T tokens.

A run's position is the number of samples it has consumed, over all ranks and epochs. Sample number
n depends only on n, the seed and the mixture, and the global batch at a position is the numbers
position to position + batch - 1, so that the order is the same for any world size, micro-batch and
prefetch. The size of a step's batch depends only on the step number.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch

from kempner.data.batch import MicroBatch
from kempner.data.mixture import Mixture
from kempner.data.permute import shuffled_indices
from kempner.data.source import IGNORE, Int64, SampleRows, Source
from kempner.data.stages import RampStage, stage_at
from kempner.model.attention import Documents

LENGTH_SAMPLES = 64  # samples measured for the lengths of documents
VALIDATION_SEED = 0  # the same validation samples in every run


class Said(Protocol):
    """The attributes of kempner.train.step.StepResult that a loader reads."""

    @property
    def values(self) -> Mapping[str, float]: ...

    @property
    def after(self) -> Any: ...


class TrainLoader:
    """An endless iterator: next() returns this rank's micro-batches of one global step.

    Rank r of w takes the r-th contiguous part of a global batch. With `prefetch` > 0 a thread reads
    that many steps ahead; next() raises its errors. Not thread-safe.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        mixture: Mixture,
        *,
        stages: Sequence[RampStage],
        rank: int,
        world: int,
        micro: int,
        position: int = 0,
        step: int = 0,
        prefetch: int = 2,
        pin: bool = False,
        reset_positions: bool = True,
        skip: Sequence[Sequence[int]] = (),
    ) -> None:
        """`stages`: the samples of each step. `micro`: maximum samples in a rank's micro-batch.
        `step`: the next step. `reset_positions`: in each document of a row. `skip`: see seek()."""
        assert 0 <= rank < world and position >= 0
        for stage in stages:
            share, rest = divmod(stage.batch, world)
            assert not rest and share % min(micro, share) == 0, "world * micro must divide a batch"
        self.position, self.step = position, step  # samples and steps consumed
        self.tokens = 0  # of the newest batch, over all ranks
        self.phase = 0  # of the mixture, at the last batch
        self.sources, self.mixture = tuple(sources), mixture
        self.names: list[str] = [source.name for source in sources]
        self._stages, self._micro, self._pin = stages, micro, pin
        self._rank, self._world = rank, world
        self._reset_positions = reset_positions
        self._prefetch = prefetch
        self._skip = skip
        self._reader: _Reader | None = None

    def sample_numbers(self, position: int, count: int) -> list[int] | list[list[int]]:
        """Return the data set's indices of the global samples position ... position + count - 1;
        with several sources, pairs of source number and index."""
        sources, indices = self.mixture.draw(position, count)
        if len(self.sources) == 1:
            return [int(index) for index in indices]
        return [[int(i), int(j)] for i, j in zip(sources, indices, strict=True)]

    def keys_per_query(self, window: int | None) -> float | None:
        """Average number of keys that a query sees, over some samples; None where each row is one
        document, and where the data are streamed and cannot be sampled ahead."""
        if any(source.ordered for source in self.sources):
            return None
        numbers, indices = self.mixture.draw(0, min(LENGTH_SAMPLES, self._stages[0].batch))
        if self._rows(numbers[:1], indices[:1]).documents is None:
            return None
        rows = self._rows(numbers, indices)
        assert rows.documents is not None
        index = np.pad(rows.documents, ((0, 0), (1, 0)), constant_values=-1)
        at = np.arange(rows.documents.shape[1])
        begins = np.where(index[:, 1:] != index[:, :-1], at, 0)
        keys = 1 + at - np.maximum.accumulate(begins, axis=1)  # [N, T]
        return float(np.minimum(keys, window or keys.shape[1]).mean())

    def _rows(self, numbers: Int64, indices: Int64) -> SampleRows:
        if len(self.sources) == 1:
            return self.sources[0].read(indices)
        from kempner.data.formats.joined import read_mixed  # one source needs none of it

        return read_mixed(self.sources, numbers, indices)

    # --- what the loop and the recorder ask of any loader (kempner.train.extensions.Loader) ---

    waits_for_all = at_once = False
    state: dict[str, Any] | None = None

    def begin(self, *_: object) -> None:
        """Do nothing."""

    def after_update(self) -> None:
        """Do nothing."""

    def places(self, tokens: int) -> int:
        """Return `tokens`: rows have no other places."""
        return tokens

    def record(self, result: Said, lap: object, counted: str) -> dict[str, Any]:
        """Return loss and tokens of each source, if there are several, and the packed lengths."""
        metrics: dict[str, Any] = {}
        if len(self.names) > 1:
            metrics["sources"] = self._by_source(result)
        if packing := {each.name: each.packing for each in self.sources if each.packing}:
            metrics |= {counted: result.values["tokens"], "packing": packing}
        return metrics

    def _by_source(self, result: Said) -> dict[str, dict[str, float | None]]:
        """Return each source's loss and tokens in this step, and its epochs so far."""
        draws = self.mixture.drawn(result.after.samples)
        figures: dict[str, dict[str, float | None]] = {}
        for source, samples in zip(self.sources, draws, strict=True):
            names = (f"{part} of {source.name}" for part in ("loss_sum", "tokens"))
            loss_sum, tokens = (result.values[name] for name in names)
            loss = loss_sum / tokens if tokens and math.isfinite(loss_sum) else None
            epochs = None if source.ordered else round(samples / len(source), 4)
            figures[source.name] = {"loss": loss, "tokens": tokens, "epochs": epochs}
        return figures

    # --- the batches ---

    def __iter__(self) -> TrainLoader:
        return self

    def __next__(self) -> list[MicroBatch]:
        if not self._prefetch:
            result = self._read(self.position, self.step)
        else:
            if self._reader is None:
                self._reader = _Reader(self._read_on(self.position, self.step), self._prefetch)
            try:
                result = self._reader.next()
            except BaseException:
                self.close()
                raise
        # Counted here, not in the reading thread: reading ahead must not move the run's position.
        ranges = self._ranges(self.position, stage_at(self._stages, self.step).batch)
        self.phase = self.mixture.phase(ranges[0][0])
        self.position = ranges[-1][1]
        stage = stage_at(self._stages, self.step)
        self.tokens = stage.batch * stage.pieces * result[0].inputs.shape[1]
        self.step += 1
        return result

    def seek(
        self,
        position: int,
        step: int,
        skip: Sequence[Sequence[int]] = (),
        mixture: Mixture | None = None,
    ) -> None:
        """Continue at `position` with this step, leaving out the sample numbers in the
        ranges `skip`, [from, to) each. Discards batches read ahead. `mixture`: replaces
        the current one."""
        assert position >= 0
        self.close()
        self.position, self.step, self._skip = position, step, skip
        self.mixture = mixture or self.mixture

    def close(self) -> None:
        """Stop reading ahead; returns when the thread has ended. next() starts it again."""
        if self._reader is not None:
            self._reader.stop()
            self._reader = None

    def _read_on(self, position: int, step: int) -> Iterator[list[MicroBatch]]:
        while True:
            yield self._read(position, step)
            position = self._ranges(position, stage_at(self._stages, step).batch)[-1][1]
            step += 1

    def _ranges(self, position: int, count: int) -> list[tuple[int, int]]:
        """Return the next `count` samples from `position` on, without those left out, as ranges
        [from, to). A batch of a new size may span such a gap."""
        ranges = []
        for begin, end in sorted(map(tuple, self._skip)):
            if position < begin and count:
                ranges.append((position, min(begin, position + count)))
                count -= ranges[-1][1] - position
                position = ranges[-1][1]
            if begin <= position < end and count:
                position = end
        return [*ranges, (position, position + count)] if count or not ranges else ranges

    def _read(self, position: int, step: int) -> list[MicroBatch]:
        stage = stage_at(self._stages, step)
        share = stage.batch // self._world
        # This rank's share follows those of the ranks before it.
        _, first = self._ranges(position, self._rank * share)[-1]
        draws = [self.mixture.draw(begin, end - begin) for begin, end in self._ranges(first, share)]
        numbers, indices = (np.concatenate(column) for column in zip(*draws, strict=True))
        rows, sources = self._rows(numbers, indices), None if len(self.sources) == 1 else numbers
        if stage.pieces > 1:
            rows = rows.cut(stage.pieces)
            sources = None if sources is None else sources.repeat(stage.pieces)
        # The same number of tokens as a micro-batch of whole samples.
        micro = min(self._micro, share) * stage.pieces
        return [
            _tensors(rows, slice(i, i + micro), self._pin, self._reset_positions, sources)
            for i in range(0, len(rows.inputs), micro)
        ]


class _Reader:
    """A thread that reads `steps`, at most `ahead` of next()."""

    def __init__(self, steps: Iterator[list[MicroBatch]], ahead: int) -> None:
        self._steps = steps
        self._free = threading.Semaphore(ahead)
        self._done: SimpleQueue[list[MicroBatch] | BaseException] = SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="data", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._free.acquire() and not self._stopped:
            try:
                self._done.put(next(self._steps))
            except BaseException as error:
                self._done.put(error)
                return

    def next(self) -> list[MicroBatch]:
        result = self._done.get()
        self._free.release()
        if isinstance(result, BaseException):
            raise result
        return result

    def stop(self) -> None:
        # Before the release: the thread it wakes must see this.
        self._stopped = True
        self._free.release()
        self._thread.join()


def val_batches(
    source: Source,
    *,
    samples: int | None,
    micro: int,
    rank: int,
    world: int,
    reset_positions: bool = True,
) -> Iterator[MicroBatch]:
    """Yield the first `samples` (None: all) of a fixed shuffle, as batches [micro, T] of this rank.

    All ranks get equally many batches. Surplus rows have only the label -100, so that the same
    samples count for any world size and micro-batch.
    """
    size = len(source)
    total = size if samples is None else min(samples, size)
    for start in range(0, total, micro * world):
        mine = start + rank * micro
        numbers = np.arange(mine, mine + max(0, min(micro, total - mine)))
        rows = source.read(shuffled_indices(numbers, size, VALIDATION_SEED))
        # A rank without samples also has a batch: FSDP gathers weights on all ranks together.
        if padding := micro - len(numbers):
            rows = _padded(rows, padding)
        yield _tensors(rows, slice(None), False, reset_positions)


def _padded(rows: SampleRows, padding: int) -> SampleRows:
    below = ((0, padding), (0, 0))
    documents = None if rows.documents is None else np.pad(rows.documents, below)
    targets = np.pad(rows.targets, below, constant_values=IGNORE)
    return SampleRows(np.pad(rows.inputs, below), targets, documents)


def reading_speed(
    sources: Sequence[Source], mixture: Mixture, micro: int, seconds: float = 2.0
) -> float:
    """Measure the tokens per second that one core reads, shuffles and converts to tensors, without
    prefetch; in CPU time of this thread, so that other processes do not count."""
    every = [RampStage(0, micro)]
    loader = TrainLoader(sources, mixture, stages=every, rank=0, world=1, micro=micro, prefetch=0)
    next(loader)
    start_time, first = time.thread_time(), loader.position
    while (elapsed := time.thread_time() - start_time) < seconds:
        next(loader)
    return (loader.position - first) * sources[0].seq_len / elapsed


def _tensors(
    rows: SampleRows, part: slice, pin: bool, reset_positions: bool, sources: Int64 | None = None
) -> MicroBatch:
    """Convert some of the rows to contiguous tensors. `sources` [N]: each row's source number."""
    documents = None
    if rows.documents is not None:
        documents = Documents.of(torch.from_numpy(rows.documents[part]), reset_positions)
    batch = MicroBatch(
        torch.from_numpy(np.ascontiguousarray(rows.inputs[part])),
        torch.from_numpy(np.ascontiguousarray(rows.targets[part])),
        documents,
        None if sources is None else torch.from_numpy(sources[part, None]),
    )
    return batch.pin_memory() if pin else batch
