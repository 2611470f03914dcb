"""Packing of whole documents into rows of fixed length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kempner.data.source import Int64

ROW_BLOCK = 256  # rows examined together


@dataclass(frozen=True)
class Packing:
    """A packing: row r holds the items order[starts[r] : starts[r + 1]]."""

    order: Int64  # [N] numbers of the items
    starts: Int64  # [R + 1]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.starts) - 1


def first_fit_decreasing(lengths: Int64, room: int) -> Packing:
    """Pack items of `lengths` [N], each from 1 to `room`, into as few rows of `room` as
    first-fit decreasing needs (at most 11/9 of the fewest possible plus 1; Dósa, 2007),
    without splitting one.

    The longest items come first, equal ones in order, and each goes into the first row with room
    for it. Items of one length fill the rows from the first on, so that a whole length is placed at
    once, and a million items take seconds, not hours.
    """
    order = np.argsort(-lengths, kind="stable")
    rows = np.empty_like(order)  # of the items in `order`
    # Room left in each row, by blocks; 0 for rows not begun.
    left = np.zeros((-(-len(lengths) // ROW_BLOCK), ROW_BLOCK), np.int64)
    largest = left.max(axis=1)  # of each block
    begun = done = 0  # rows, items
    sizes, counts = np.unique(lengths, return_counts=True)
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = done + count
        # The first rows take as many as they can, until no items are left. Only blocks with room
        # are examined: otherwise time grows as rows times sizes.
        with_room = np.flatnonzero(largest[: -(-begun // ROW_BLOCK)] >= size)
        at, width = 0, 1
        while done < end and at < len(with_room):
            blocks = with_room[at : at + width]
            takes = (left[blocks] // size).ravel()
            before = np.cumsum(takes) - takes  # items of this size in the rows before
            takes = np.clip(end - done - before, 0, takes)
            numbers = (blocks[:, None] * ROW_BLOCK + np.arange(ROW_BLOCK)).ravel()
            placed = int(takes.sum())
            rows[done : done + placed] = np.repeat(numbers, takes)
            left[blocks] -= takes.reshape(-1, ROW_BLOCK) * size
            largest[blocks] = left[blocks].max(axis=1)
            done, at, width = done + placed, at + width, 2 * width
        # The rest fills new rows, one after the other.
        rest, per_row = end - done, room // size
        rows[done:end] = begun + np.arange(rest) // per_row
        new = np.full(-(-rest // per_row), room - per_row * size)
        if rest % per_row:
            new[-1] = room - rest % per_row * size
        left.reshape(-1)[begun : begun + len(new)] = new
        first, begun, done = begun // ROW_BLOCK, begun + len(new), end
        if rest:
            changed = slice(first, -(-begun // ROW_BLOCK))
            largest[changed] = left[changed].max(axis=1)
    # Stable: within a row the longest item stays first.
    by_row = np.argsort(rows, kind="stable")
    starts = np.searchsorted(rows[by_row], np.arange(begun + 1))
    return Packing(order[by_row], starts)
