"""Packing of samples into the rows of a batch, equally many on every rank. No torch. R
rows, T tokens."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from kempner.data.packing import first_fit_decreasing
from kempner.data.source import IGNORE

Arrays = dict[str, NDArray[np.generic]]


class Sample(NamedTuple):
    """A conversation as tokens, both given and sampled. All [n]."""

    tokens: NDArray[np.int32]
    sampled: NDArray[np.bool_]  # by the model: only these count toward the loss
    logprobs: NDArray[np.float32]  # of the sampled tokens; 0 elsewhere

    @property
    def places(self) -> int:
        """Places that it occupies in a row: its last token is only a target."""
        return len(self.tokens) - 1


def pack_batch(
    samples: Sequence[Sample],
    advantages: Sequence[float],
    versions: Sequence[int],
    seq_len: int,
    ranks: int,
    micro_batch: int,
) -> list[Arrays]:
    """Make the rank files of a batch, as exchange.Batch defines them. Each sample takes at most
    `seq_len` places. `versions`: the oldest weights that drew tokens of each sample.

    Outside attention every row costs the same, even an empty one. In attention a document costs
    the square of its length: there are as few rows as first-fit decreasing needs, rounded up (each
    rank has equally many, in whole micro-batches), and the added rows take their share.
    """
    lengths = np.array([sample.places for sample in samples])
    assert lengths.max() <= seq_len
    packing = first_fit_decreasing(lengths, seq_len)
    # Each micro-batch has collectives: a rank with one fewer would block the others.
    unit = ranks * micro_batch
    count = -(-len(packing) // unit) * unit
    # Balanced rows may fail to fit; first-fit decreasing never does.
    rows = spread_samples(lengths, seq_len, count)
    if rows is None:
        order, starts = packing.order.tolist(), packing.starts.tolist()
        rows = [order[a:b] for a, b in itertools.pairwise(starts)]
        rows += [[] for _ in range(count - len(rows))]
    rank_files = []
    for numbers in deal_rows(rows, lengths, ranks):
        arrays = empty_rows(len(numbers), seq_len)
        for row, number in enumerate(numbers):
            items = [(samples[item], advantages[item], versions[item]) for item in rows[number]]
            fill_row({name: array[row] for name, array in arrays.items()}, items)
        rank_files.append(arrays)
    return rank_files


def spread_samples(lengths: NDArray[np.int64], room: int, count: int) -> list[list[int]] | None:
    """Spread the samples, longest first, each into the cheapest row that has room; None if one
    finds no room."""
    rows: list[list[int]] = [[] for _ in range(count)]
    space, cost = np.full(count, room), np.zeros(count)
    # Stable, so that the rows of a batch do not depend on how a sort breaks ties.
    for item in np.argsort(-lengths, kind="stable").tolist():
        row = int(np.where(space >= lengths[item], cost, np.inf).argmin())
        if space[row] < lengths[item]:
            return None
        rows[row].append(item)
        space[row] -= lengths[item]
        cost[row] += float(lengths[item]) ** 2
    return rows


def deal_rows(
    rows: Sequence[Sequence[int]], lengths: NDArray[np.int64], ranks: int
) -> list[list[int]]:  # fmt: skip
    """Deal the rows to the ranks, equally many to each: the most expensive first, each to the rank
    with the least cost so far."""
    costs = [float((lengths[list(row)] ** 2).sum()) if row else 0.0 for row in rows]
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    open_ranks = [(0.0, rank) for rank in range(ranks)]  # a heap: the least cost is first
    for row in sorted(range(len(rows)), key=lambda row: -costs[row]):
        cost, rank = heapq.heappop(open_ranks)
        dealt[rank].append(row)
        if len(dealt[rank]) < len(rows) // ranks:
            heapq.heappush(open_ranks, (cost + costs[row], rank))
    return dealt


def empty_rows(count: int, seq_len: int) -> Arrays:
    """Make rows without samples: one document, in which nothing counts."""
    shape = (count, seq_len)
    return {
        "inputs": np.zeros(shape, np.int32),
        "targets": np.full(shape, IGNORE, np.int32),
        "documents": np.zeros(shape, np.int32),
        "logprobs": np.zeros(shape, np.float32),
        "advantages": np.zeros(shape, np.float32),
        "versions": np.zeros(shape, np.int32),
    }


def fill_row(row: Arrays, items: Sequence[tuple[Sample, float, int]]) -> None:
    """Fill one row, whose arrays are [T]. The rest at its end is one more document."""
    at = 0
    for number, (sample, advantage, version) in enumerate(items):
        there = slice(at, at + sample.places)
        # The row's targets are the tokens shifted by one.
        counts = sample.sampled[1:]
        row["inputs"][there] = sample.tokens[:-1]
        row["targets"][there] = np.where(counts, sample.tokens[1:], IGNORE)
        row["documents"][there] = number
        row["logprobs"][there] = np.where(counts, sample.logprobs[1:], 0.0)
        row["advantages"][there] = np.where(counts, np.float32(advantage), np.float32(0.0))
        row["versions"][there] = version
        at += sample.places
    row["documents"][at:] = len(items)


def tokens_that_count(ranks: Sequence[Arrays]) -> int:
    return int(sum((arrays["targets"] != IGNORE).sum() for arrays in ranks))


def write_rank_files(folder: Path, ranks: Sequence[Arrays]) -> None:
    """Write rank_0.safetensors ... Raises OSError, for example on a full disk. Without fsync: no
    attempt reads an earlier one's files, and nothing reads them before batch.json exists."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, arrays in enumerate(ranks):
        (folder / f"rank_{rank}.safetensors").write_bytes(save(arrays))
