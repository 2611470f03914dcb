"""The figures of benchmarks/scale.py as a table and as a plot."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

RANKS = (256, 1024, 4096, 16384)


@dataclass
class Row:
    what: str
    unit: str
    values: dict[int, float]  # by number of ranks
    measured: list[int]


def row(what: str, unit: str, found: dict[int, float], power: float) -> Row:
    """Beyond the largest number of ranks that was measured, its figure grows with `power`."""
    most = max(found)
    values = {w: found.get(w, found[most] * (w / most) ** power) for w in RANKS}
    return Row(what, unit, values, [w for w in RANKS if w in found])


def shown(row: Row, ranks: int) -> str:
    value = row.values[ranks]
    digits = 0 if value >= 10 or value == int(value) else 2
    return f"{'' if ranks in row.measured else '~'}{value:,.{digits}f}"


def table(rows: list[Row], before: list[Row] | None) -> str:
    lines = [["", *(f"{w:,} ranks" for w in RANKS)], ["---"] * (1 + len(RANKS))]
    old = {row.what: row for row in before or []}
    for row in rows:
        cells = [
            (f"{shown(old[row.what], w)} -> " if row.what in old else "") + shown(row, w)
            for w in RANKS
        ]
        lines.append([f"{row.what}{', ' + row.unit if row.unit else ''}", *cells])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |"
        for line in lines
    )


def plot(rows: list[Row], before: list[Row], file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    old = {row.what: row for row in before}
    figure, axes = pyplot.subplots(3, 4, figsize=(15, 9), sharex=True)
    for axis, row in zip(axes.flat, rows, strict=False):
        for label, line in (("before", old[row.what]), ("now", row)):
            (drawn,) = axis.plot(RANKS, [line.values[w] for w in RANKS], "o-", label=label)
            guessed = [w for w in RANKS if w not in line.measured]
            axis.plot(
                guessed, [line.values[w] for w in guessed], "o", color=drawn.get_color(),
                markerfacecolor="white",
            )  # fmt: skip
        known = [x for line in (old[row.what], row) for x in line.values.values() if x]
        axis.set_xscale("log")
        axis.set_yscale("symlog", linthresh=min(known))  # has a zero
        axis.set_ylim(0, 2 * max(known))
        axis.set_title(f"{row.what}{', ' + row.unit if row.unit else ''}", fontsize=11)
        axis.set_xticks(RANKS, [f"{w:,}" for w in RANKS], fontsize=9)
        axis.minorticks_off()
    axes.flat[0].legend()
    figure.supxlabel("ranks; a hollow point is extrapolated from the largest run")
    figure.tight_layout()
    figure.savefig(file, dpi=80)


def read(file: str) -> list[Row]:
    rows = [Row(**entry) for entry in json.loads(Path(file).read_text())]
    for row in rows:
        row.values = {int(w): value for w, value in row.values.items()}
    return rows
