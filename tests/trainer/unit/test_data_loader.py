"""The order of training: the same for any world size, micro-batch, prefetch and resumption."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kempner.config.option import ConfigError
from kempner.data.batch import MicroBatch
from kempner.data.formats.dataset import TokenDataset
from kempner.data.loader import (
    TrainLoader,
    reading_speed,
    val_batches,
)
from kempner.data.mixture import Ingredient, Mixture, MixturePhase
from kempner.data.permute import shuffled_indices
from kempner.data.sidecar import SIDECAR, Shard, Sidecar
from kempner.data.source import IGNORE, SampleRows
from kempner.data.stages import RampStage

SEQ_LEN = 3
SAMPLES = 53  # a prime: epochs end inside batches


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """53 samples; the first token of sample i is 3 i."""
    path = tmp_path_factory.mktemp("data")
    shards = []
    for i, part in enumerate(np.array_split(np.arange(SAMPLES * SEQ_LEN + 2, dtype=np.uint16), 4)):
        np.save(path / f"{i}.npy", part)
        shards.append(Shard(f"{i}.npy", len(part), 0, int(part.max())))
    about = {"name": "bytes", "kind": "bytes", "hash": ""}
    Sidecar(about, "uint16", 500, 0, {"train": shards, "val": shards}, {}).save(path / SIDECAR)
    return TokenDataset.open(path, "train", SEQ_LEN, 500)


def loader(data: TokenDataset, **changes: Any) -> TrainLoader:
    given = {"stages": [RampStage(0, 12)], "rank": 0, "world": 1, "micro": 12, "prefetch": 0}
    return TrainLoader([data], Mixture.alone(data, seed=1), **{**given, **changes})


def samples(micro_batches: list[MicroBatch]) -> list[int]:
    """Which samples these are; checks that each is whole and the targets are one further."""
    rows = []
    for batch in micro_batches:
        inputs, targets = batch.inputs, batch.targets
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.is_contiguous() and targets.is_contiguous()
        assert torch.equal(targets, inputs + 1)
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(SEQ_LEN))
        rows += [int(first) // SEQ_LEN for first in inputs[:, 0]]
    return rows


def steps(source: TrainLoader, count: int) -> list[list[int]]:
    result = [samples(next(source)) for _ in range(count)]
    source.close()
    return result


def test_an_epoch_reads_every_sample_once_and_the_next_in_another_order(data: TokenDataset) -> None:
    assert len(data) == SAMPLES
    read = list(chain(*steps(loader(data, stages=[RampStage(0, 2)], micro=2), SAMPLES)))
    first, second = read[:SAMPLES], read[SAMPLES:]
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert first != second and first != sorted(first)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([(1, 12), (2, 3), (3, 4), (4, 1), (6, 2), (12, 1)]),
    st.integers(0, 130),
    st.integers(0, 3),
)
def test_any_world_size_split_prefetch_and_position_read_the_same_batches(
    data: TokenDataset, split: tuple[int, int], position: int, prefetch: int
) -> None:
    world, micro = split
    expected = [
        shuffled_indices(np.arange(12) + position + 12 * i, SAMPLES, 1).tolist() for i in range(6)
    ]
    ranks = [
        loader(data, rank=r, world=world, micro=micro, position=position, prefetch=prefetch)
        for r in range(world)
    ]
    assert len(next(loader(data, world=world, micro=micro))) == 12 // (world * micro)
    parts = [steps(rank, 6) for rank in ranks]
    assert [list(chain(*step)) for step in zip(*parts, strict=True)] == expected
    assert {rank.position for rank in ranks} == {position + 72}
    assert ranks[0].sample_numbers(position, 12) == expected[0]


RAMP = [RampStage(0, 2), RampStage(3, 4), RampStage(5, 12)]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_growing_batch_reads_the_samples_in_order_from_any_step_on(
    data: TokenDataset, prefetch: int
) -> None:
    expected = shuffled_indices(np.arange(30), SAMPLES, 1).tolist()
    ends = [0, 2, 4, 6, 10, 14, 26]
    for done, position in enumerate(ends[:-1]):
        ranks = [
            loader(data, stages=RAMP, rank=r, world=2, micro=3, position=position, step=done,
                   prefetch=prefetch)
            for r in range(2)
        ]  # fmt: skip
        parts = [steps(rank, len(ends) - 1 - done) for rank in ranks]
        read = [list(chain(*step)) for step in zip(*parts, strict=True)]
        assert read == [expected[a:b] for a, b in itertools.pairwise(ends[done:])]
        assert {(rank.position, rank.step) for rank in ranks} == {(26, 6)}


def test_a_shorter_length_cuts_each_sample_and_loses_no_token(data: TokenDataset) -> None:
    whole = next(loader(data, stages=[RampStage(0, 4)], micro=2))
    cut = next(loader(data, stages=[RampStage(0, 4, 3), RampStage(1, 4)], micro=2))
    assert [batch.inputs.shape for batch in cut] == [(6, 1), (6, 1)]
    for long, short in zip(whole, cut, strict=True):
        assert torch.equal(long.inputs.flatten(), short.inputs.flatten())
        assert torch.equal(long.targets.flatten(), short.targets.flatten())


def test_the_pieces_of_a_row_have_its_source_and_its_documents(data: TokenDataset) -> None:
    mixture = Mixture([Ingredient("a", 9), Ingredient("b", 9)], [MixturePhase(0, (1.0, 2.0))])
    two = {"rank": 0, "world": 1, "micro": 6, "prefetch": 0}
    (whole,) = next(TrainLoader([data, data], mixture, stages=[RampStage(0, 6)], **two))
    (cut,) = next(TrainLoader([data, data], mixture, stages=[RampStage(0, 6, 3)], **two))
    assert whole.sources is not None and cut.sources is not None
    assert torch.equal(cut.sources, whole.sources.repeat_interleave(3, dim=0))
    index = np.array([[0, 0, 1, 1], [0, 1, 1, 1]], np.int32)
    rows = SampleRows(np.arange(8).reshape(2, 4), np.arange(8).reshape(2, 4), index).cut(2)
    assert rows.documents is not None
    assert rows.documents.tolist() == [[0, 0], [1, 1], [0, 1], [1, 1]]
    assert rows.inputs.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_resuming_at_any_step_continues_the_unbroken_run(data: TokenDataset) -> None:
    unbroken = steps(loader(data), 10)
    for done in range(10):
        first = loader(data, prefetch=2)
        read = [samples(next(first)) for _ in range(done)]
        first.close()
        assert read + steps(loader(data, position=first.position), 10 - done) == unbroken


@pytest.mark.parametrize("prefetch", [0, 3])
def test_seek_leaves_out_ranges_and_what_was_read_ahead(data: TokenDataset, prefetch: int) -> None:
    source = loader(data, prefetch=prefetch)
    next(source)
    source.seek(19, 0, [(31, 55), (55, 60)])
    assert source.position == 19
    for position in (19, 60, 72):  # 31 to 59 are left out
        assert samples(next(source)) == source.sample_numbers(position, 12)
        assert source.position == position + 12
    source.seek(0, 0)
    assert samples(next(source)) == source.sample_numbers(0, 12)
    source.close()
    resumed = loader(data, prefetch=prefetch, position=31, skip=[(31, 55), (55, 60)])
    assert samples(next(resumed)) == resumed.sample_numbers(60, 12)
    resumed.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_batch_reaches_over_samples_that_are_left_out(data: TokenDataset, prefetch: int) -> None:
    """As after a start with another global batch; whichever rank the gap is in."""
    skip = [(40, 45), (20, 30)]
    ranks = [loader(data, rank=r, world=2, micro=6, prefetch=prefetch, skip=skip) for r in (0, 1)]
    expected = [*range(20), *range(30, 40), *range(45, 75)]
    for step in range(5):
        found = [each for rank in ranks for each in samples(next(rank))]
        own = expected[12 * step : 12 * step + 12]
        assert found == [ranks[0].sample_numbers(number, 1)[0] for number in own]
        assert ranks[0].position == own[-1] + 1
    for rank in ranks:
        rank.close()


def test_position_counts_what_was_taken_not_what_was_read_ahead(data: TokenDataset) -> None:
    source = loader(data, prefetch=4)
    assert source.position == 0
    next(source)
    assert source.position == 12
    source.close()
    assert source.position == 12
    assert samples(next(source)) == source.sample_numbers(12, 12)
    source.close()


class Slow:
    """A data set that counts its reads, and fails at one of them."""

    ordered = False

    def __init__(self, data: TokenDataset, fail_at: int = 0) -> None:
        self.data, self.fail_at = data, fail_at
        self.name, self.seq_len = data.name, data.seq_len
        self.reads = 0
        self.progress = threading.Condition()

    def __len__(self) -> int:
        return len(self.data)

    def read(self, indices: np.ndarray) -> SampleRows:
        with self.progress:
            self.reads += 1
            self.progress.notify_all()
        if self.reads == self.fail_at:
            raise ConfigError("the shard is bad")
        return self.data.read(indices)

    def wait(self, reads: int) -> bool:
        with self.progress:
            return self.progress.wait_for(lambda: self.reads >= reads, timeout=5)


def data_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "data"]


def test_reading_ahead_is_bounded_and_close_ends_the_thread(data: TokenDataset) -> None:
    slow = Slow(data)
    source = loader(slow, prefetch=3)
    assert not data_threads() and slow.reads == 0
    next(source)
    assert slow.wait(4)  # the one taken, and three ahead
    assert len(data_threads()) == 1 and data_threads()[0].daemon
    time.sleep(0.1)
    assert slow.reads == 4
    source.close()
    source.close()
    assert not data_threads()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_in_the_background_reaches_the_consumer_in_its_place(
    data: TokenDataset, prefetch: int
) -> None:
    slow = Slow(data, fail_at=3)
    source = loader(slow, prefetch=prefetch)
    next(source)
    next(source)
    with pytest.raises(ConfigError, match="the shard is bad"):
        next(source)
    assert source.position == 24 and not data_threads()
    assert samples(next(source)) == source.sample_numbers(24, 12)  # it can be tried again
    source.close()


def validation(data: TokenDataset, world: int, micro: int, count: int | None) -> Iterator[Any]:
    for rank in range(world):
        yield list(val_batches(data, samples=count, micro=micro, rank=rank, world=world))


@pytest.mark.parametrize("count, expected", [(None, 53), (10, 10), (1, 1), (1000, 53)])
def test_validation_counts_the_same_samples_once_for_any_world_size(
    data: TokenDataset, count: int | None, expected: int
) -> None:
    seen = []
    for world, micro in ((1, 1), (1, 7), (2, 4), (4, 3), (8, 8)):
        ranks = list(validation(data, world, micro, count))
        assert len({len(batches) for batches in ranks}) == 1
        real = []
        for batch in (batch for batches in ranks for batch in batches):
            inputs, targets = batch.inputs, batch.targets
            assert inputs.shape == targets.shape == (micro, SEQ_LEN)
            kept = (targets != IGNORE).all(dim=1)
            assert torch.equal(kept, (targets != IGNORE).any(dim=1))
            assert inputs.min() >= 0
            real += samples([MicroBatch(inputs[kept], targets[kept])])
        assert len(real) == len(set(real)) == expected
        seen.append(sorted(real))
    assert all(numbers == seen[0] for numbers in seen)
    assert expected == 53 or expected == 1 or seen[0] != list(range(expected))


def test_reading_is_far_faster_than_any_training(tmp_path: Path) -> None:
    """docs/guide/data.md has 22 to 340 M tokens/s: the limit leaves a busy machine a margin."""
    np.save(tmp_path / "0.npy", np.zeros(4_000_000, np.uint16))
    about = {"name": "bytes", "kind": "bytes", "hash": ""}
    splits: dict[str, list[Shard]] = {"train": [Shard("0.npy", 4_000_000, 0, 0)], "val": []}
    Sidecar(about, "uint16", 1, 0, splits, {}).save(tmp_path / SIDECAR)
    data = TokenDataset.open(tmp_path, "train", 2048, 1)
    assert reading_speed([data], Mixture.alone(data, 0), micro=16, seconds=0.2) > 5e6
