"""Packing of whole documents into rows of fixed length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kempner.data.source import Int64


@dataclass(frozen=True)
class Packing:
    """A packing: row r holds the items order[starts[r] : starts[r + 1]]."""

    order: Int64  # [N] numbers of the items
    starts: Int64  # [R + 1]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.starts) - 1


def first_fit_decreasing(lengths: Int64, room: int) -> Packing:
    """Pack items of `lengths` [N], each from 1 to `room`, into as few rows of `room` as first-fit
    decreasing needs (at most 11/9 of the fewest possible plus 1; Dósa, 2007), without splitting
    one.

    The longest items come first, equal ones in their order, and each goes into the first row that
    has room for it. Items of one length fill the rows from the first one on, each as far as it
    takes any: so a whole length is placed at once, and a million items take seconds, not hours.
    """
    order = np.argsort(-lengths, kind="stable")
    rows = np.empty_like(order)  # of the items in `order`
    row_room = np.empty(0, np.int64)  # room left in each row
    live = np.empty(0, np.int64)  # rows that can take the shortest item
    done = 0
    sizes, counts = np.unique(lengths, return_counts=True)
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        # How many items of this size each open row takes: the first rows as many as they can, until
        # there are no more items.
        takes = row_room[live] // size
        before = np.cumsum(takes) - takes  # items of this size in the rows before
        takes = np.clip(count - before, 0, takes)
        placed, per_row = int(takes.sum()), room // size
        # The rest fills new rows, one after the other.
        new_rows = np.arange(count - placed) // per_row + len(row_room)
        rows[done : done + count] = np.concatenate([np.repeat(live, takes), new_rows])
        row_room[live] -= takes * size
        first, rest = len(row_room), count - placed
        new = np.full(-(-rest // per_row), room - per_row * size)
        if rest % per_row:
            new[-1] = room - rest % per_row * size
        row_room = np.concatenate([row_room, new])
        live = np.concatenate([live, np.arange(first, len(row_room))])
        # A row without room for the shortest item takes none any more.
        live = live[row_room[live] >= sizes[0]]
        done += count
    # Stable: within a row the longest item stays the first.
    by_row = np.argsort(rows, kind="stable")
    starts = np.searchsorted(rows[by_row], np.arange(len(row_room) + 1))
    return Packing(order[by_row], starts)
