"""Tables on a terminal. No torch."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection, Sequence

WIDTH = 160  # columns, where the output is not a terminal
INDENT = 4


def aligned(
    rows: Sequence[Sequence[str]], gap: int, right: Collection[int] = (), *, wrap: bool = False
) -> str:
    """Rows of equally many cells as columns, `gap` spaces apart; those numbered in `right` are
    aligned to the right. `wrap`: a last cell that does not fit beside the others goes below
    them."""
    width = shutil.get_terminal_size((WIDTH, 0)).columns
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for *cells, last in rows:
        row = (" " * gap).join(
            cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
            for i, cell in enumerate(cells)
        )
        line = f"{row}{' ' * gap}{last}".rstrip()
        if len(line) <= width or not wrap:
            lines.append(line)
        else:
            indent = " " * INDENT
            below = textwrap.wrap(
                last, max(width, 40), initial_indent=indent, subsequent_indent=indent
            )
            lines += [row.rstrip(), *below]
    return "\n".join(lines)
