"""Table of report.py --nodes: each node's figures over time, and which have become worse."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from kempner.config.option import ConfigError
from kempner.jobs.records.attempts import Record
from kempner.jobs.records.node_speed import (
    NODE_FIGURES,
    SPEED_FOLDER,
    NodeFigure,
    is_worse,
    load_speeds,
    share_under,
    values_of,
)
from kempner.jobs.report.tables import align_table, format_amount

BARS, PLAIN_BARS = "▁▂▃▄▅▆▇█", "12345678"  # the second if the terminal cannot show the first
SHOWN_PREFLIGHTS = 30  # the newest
SPEED_COLUMNS = ("node", "figure", "last", "times", "over time", "now", "median before", "")


def speeds_table(paths: list[Path], encoding: str) -> str:
    """Format a row for each figure of each node. `paths`: directories of runs, or `node-speeds`
    itself; `encoding`: of the terminal. Raises ConfigError if there are no figures."""
    rows: list[tuple[str, ...]] = []
    for path in dict.fromkeys(paths):
        folder = path if path.name == SPEED_FOLDER else path / SPEED_FOLDER
        for node, lines in load_speeds(folder).items():
            rows += [
                _row(node, lines, key, figure, encoding)
                for key, figure in NODE_FIGURES.items()
                if values_of(lines, key)
            ]
    if not rows:
        names = ", ".join(map(str, paths))
        raise ConfigError(
            f"{names}: no figures of nodes; name the directory that holds the runs: "
            f"scripts/slurm/preflight.sh keeps them in {SPEED_FOLDER} there"
        )
    return align_table([SPEED_COLUMNS, *rows], gap=2, right=(3, 5, 6))


def _row(
    node: str, lines: list[Record], key: str, figure: NodeFigure, encoding: str
) -> tuple[str, ...]:
    values = values_of(lines, key)
    under = share_under(values)
    usual = "-" if under is None else format_amount(statistics.median(values[:-1]), figure.unit)
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(lines[-1]["time"]))
    worse = f"! {under:.0%} worse" if under is not None and is_worse(lines, key) else ""
    bars = draw_bars(values[-SHOWN_PREFLIGHTS:], encoding)
    now = format_amount(values[-1], figure.unit)
    return (node, figure.label, day, str(len(values)), bars, now, usual, worse)


def draw_bars(values: list[float], encoding: str) -> str:
    """Draw a character per value, from half the largest one to the largest: 5 % must show."""
    bars, top = BARS, max(values)
    try:
        bars.encode(encoding)
    except (LookupError, UnicodeEncodeError):
        bars = PLAIN_BARS
    least, last = 0.5 * top, len(bars) - 1
    return "".join(
        bars[round(last * max(0.0, value - least) / (top - least)) if top > 0 else 0]
        for value in values
    )
