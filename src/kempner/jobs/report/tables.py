"""Tables on a terminal. No torch."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Collection, Sequence

TABLE_WIDTH = 160  # columns, if the output is not a terminal
INDENT = 4
# Control characters except tab and newline, and those that change the direction of text: with them
# a name can look like another one, or move a terminal's cursor.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


def visible_text(text: str) -> str:
    """Make every character of a text visible, showing control characters as their numbers."""
    return UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def align_table(
    rows: Sequence[Sequence[str]], gap: int, right: Collection[int] = (), *, wrap: bool = False
) -> str:
    """Align rows of equally many cells, `gap` spaces apart; columns numbered in `right` are aligned
    to the right. `wrap`: put a last cell that does not fit below the others."""
    rows = [[visible_text(" ".join(cell.split("\n"))) for cell in row] for row in rows]
    width = shutil.get_terminal_size((TABLE_WIDTH, 0)).columns
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
            # At least 40 columns: a narrower column of words would be unreadable.
            below = textwrap.wrap(
                last, max(width, 40), initial_indent=indent, subsequent_indent=indent
            )
            lines += [row.rstrip(), *below]
    return "\n".join(lines)


def format_duration(seconds: float) -> str:
    if seconds < 60:
        return f"{max(seconds, 0.0):.1f} s"
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    return (
        f"{minutes} min {int(seconds) % 60} s" if minutes < 60 else f"{hours} h {minutes % 60} min"
    )


def format_amount(amount: float | None, unit: str) -> str:
    """Format an amount per second: 6.1e14, "FLOP/s" -> 610 TFLOP/s."""
    if not amount:
        return "-"
    size, prefix = next(
        ((size, name) for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if amount >= size),
        (1e3, "k"),
    )
    return f"{amount / size:.3g} {prefix}{unit}"
