"""Who writes what: every element of every tensor is in one file, and a load finds it there, on any
mesh; and what a rank opens and plans does not grow with the ranks."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from kempner.checkpoint.format.plan import (
    SPREAD,
    CheckpointLayout,
    StoredTensor,
    Table,
    chunks_of,
    own_box,
    to_json,
)
from kempner.checkpoint.format.reader import from_json, ranks_with

SHAPES = [(7, 3), (64, 2), (1,), (), (0, 4), (300, 100), (5, 11)]
LAYOUTS = {
    "plain": CheckpointLayout((6,), (None,)),
    "shard": CheckpointLayout((6,), (0,)),
    "hybrid": CheckpointLayout((2, 3), (None, 0)),
    "columns": CheckpointLayout((6,), (1,)),
    "both": CheckpointLayout((2, 3), (0, 1)),
    "twice": CheckpointLayout((3, 2), (0, 0)),
    "stage": CheckpointLayout((3,), (0,), (), 3),
    "copies in a stage": CheckpointLayout((2,), (None,), (), 2),
}


def table_of(layout: CheckpointLayout) -> Table:
    dims = max((dim + 1 for dim in layout.cuts if dim is not None), default=0)
    shapes = [shape for shape in SHAPES if len(shape) >= dims]
    return {
        str(shape): StoredTensor(torch.Size(shape), torch.float32, layout, turn)
        for turn, shape in enumerate(shapes)
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_is_written_once(name: str) -> None:
    table = table_of(LAYOUTS[name])
    counts = {key: torch.zeros(stored.shape) for key, stored in table.items()}
    for rank in range(6):
        for key, box in chunks_of(table, rank):
            if not table[key].everywhere or rank == LAYOUTS[name].first:
                counts[key][tuple(slice(a, a + n) for a, n in box)] += 1
    assert all(bool((count == 1).all()) for count in counts.values())
    written = {key for rank in range(6) for key, _ in chunks_of(table, rank)}
    assert written == table.keys()  # also those without elements


@pytest.mark.parametrize(("old", "new"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_a_load_on_any_mesh_finds_all_that_it_needs(old: str, new: str) -> None:
    stored, wanted = table_of(LAYOUTS[old]), table_of(LAYOUTS[new])
    held = [dict(chunks_of(stored, rank)) for rank in range(6)]
    for rank, key in itertools.product(LAYOUTS[new].ranks, stored.keys() & wanted.keys()):
        box = own_box(wanted[key], rank)
        covered = torch.zeros(stored[key].shape)
        for owner in ranks_with(stored[key], box, near=rank):
            covered[tuple(slice(a, a + n) for a, n in held[owner][key])] += 1
        part = covered[tuple(slice(a, a + n) for a, n in box)]
        assert bool((part == 1).all()), (key, rank)


def test_own_box_is_that_of_torch_chunk() -> None:
    for length, size in itertools.product(range(20), range(1, 9)):
        stored = StoredTensor(torch.Size([length]), torch.int64, CheckpointLayout((size,), (0,)), 0)
        parts = torch.arange(length).chunk(size)
        for rank in range(size):
            start, count = own_box(stored, rank)[0]
            expected = parts[rank].tolist() if rank < len(parts) else []
            assert list(range(start, start + count)) == expected


def big(layout: CheckpointLayout) -> Table:
    """Names and shapes as a 7B model has them."""
    shapes = [(4096, 4096), (11008, 4096), (4096, 11008), (4096,), (32000, 4096), ()]
    return {
        f"t{turn}": StoredTensor(torch.Size(shape), torch.float32, layout if shape else plain, turn)
        for turn, (shape, _) in enumerate(itertools.product(shapes, range(30)))
        for plain in [CheckpointLayout((layout.mesh[0] * layout.mesh[-1],), (None,))]
    }


def opened(table: Table, rank: int, near: int, wanted: Table) -> set[int]:
    return {
        owner
        for key, stored in table.items()
        for owner in ranks_with(stored, own_box(wanted[key], rank), near)
    }


def test_a_rank_opens_few_files_whatever_the_world() -> None:
    for world in (64, 1024, 16384):
        shard = big(CheckpointLayout((world,), (0,)))
        rank = world // 3
        assert opened(shard, rank, rank, shard) == {rank}
        hybrid = big(CheckpointLayout((world // 8, 8), (None, 0)))
        assert len(opened(hybrid, rank, rank, hybrid)) <= SPREAD + 1
        half = big(CheckpointLayout((world // 2,), (0,)))
        assert len(opened(shard, rank // 2, rank // 2, half)) <= 8
        assert len(opened(half, rank, rank // 2, shard)) <= 3


def test_replicas_share_the_writing() -> None:
    table = big(CheckpointLayout((4, 2), (None, 0)))
    load = [
        sum(table[key].nbytes for key, _ in chunks_of(table, rank) if not table[key].everywhere)
        for rank in range(8)
    ]
    assert max(load) < 1.1 * min(load)


def test_the_table_survives_json() -> None:
    table = {
        **table_of(LAYOUTS["stage"]),
        "rng.*.cpu": StoredTensor(torch.Size([8]), torch.uint8, None, 0),
    }
    assert from_json(json.loads(json.dumps(to_json(table)))) == table
