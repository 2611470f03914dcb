"""The results of a sweep: a sorted table, a CSV file, and a picture of the loss over an axis."""

from __future__ import annotations

import argparse
import csv
import io
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kempner.config.option import ConfigError
from kempner.config.values import did_you_mean
from kempner.extensions.sweep.file import Sweep
from kempner.extensions.sweep.journal import Journal
from kempner.extensions.sweep.look import PointStatus, look_at_points
from kempner.extensions.sweep.points import SweepPoint, short_value
from kempner.jobs.records.run_history import History
from kempner.jobs.report.tables import align_table
from kempner.jobs.system.files import write_atomic
from kempner.jobs.system.picture import refuse_other_picture, save_picture
from kempner.jobs.system.seal import refuse_other_file

TABLE_SIGN = (
    ",step,state,tokens_per_s,parameters,run\n"  # of a table.csv: the end of its first line
)
LAST_LINES = 10  # lines of metrics.jsonl averaged for the training loss
LOG_SCALE_FROM = 8.0  # ratio of the largest to the smallest value of an axis


@dataclass(frozen=True)
class Row:
    look: PointStatus
    loss: float | None
    at: int | None  # step

    def value(self, name: str) -> Any:
        return self.look.point.values[name]

    @property
    def done(self) -> bool:
        return self.look.state.word == "done"


def write_results(
    sweep: Sweep, points: list[SweepPoint], options: argparse.Namespace, has_begun: bool
) -> int:
    """Print the table and, once the sweep has begun, write sweep/table.csv and
    table.png. Raises ConfigError."""
    x = axis_of(sweep, points, options.x)
    own = sweep.dir / "sweep"
    table, picture = own / "table.csv", own / "table.png"
    refuse_other_file(table, "the table", (TABLE_SIGN,))
    refuse_other_picture(picture, "the picture", named=False)
    looks = look_at_points(points, Journal(own), whole=True)
    kind = "val_loss" if any(each.run.validations for each in looks) else "loss"
    rows = [Row(each, *loss_of(each.run, kind, options.step)) for each in looks]
    rows.sort(key=lambda row: math.inf if row.loss is None else row.loss)
    head = [*sweep.varied, kind, "at step", "state", "tokens/s", "run"]
    cells = [[*map(short_value, map(row.value, sweep.varied)), *row_figures(row)] for row in rows]
    print(align_table([head, *cells], 2, range(len(head) - 1)))
    if not has_begun:
        print("sweep: nothing is submitted yet: the table is not written", file=sys.stderr)
        return 0
    # resolve(), so that a link to a file elsewhere stays a link.
    write_atomic(table.resolve(), as_csv(sweep, kind, rows))
    files = [str(table)]
    if x is not None and any(row.loss is not None for row in rows):
        try:
            plot_results(sweep, rows, x, kind, picture)
            files.append(str(picture))
        except ModuleNotFoundError:
            fix = ".venv/bin/pip install -c constraints.txt -e '.[plot]'"
            print(f"sweep: no picture: matplotlib is not installed; run {fix}", file=sys.stderr)
    print(f"written: {', '.join(files)}")
    return 0


def loss_of(run: History, kind: str, step: int | None) -> tuple[float | None, int | None]:
    """Return the newest loss, or the newest up to `step`, with its step."""
    lines = run.validations if kind == "val_loss" else run.losses
    lines = [line for line in lines if step is None or line["step"] <= step][-LAST_LINES:]
    if not lines:
        return None, None
    # One batch gives a noisy loss, but a validation covers a whole set.
    last = lines[-1:] if kind == "val_loss" else lines
    values = [line[kind] for line in last]
    if None in values:  # not finite
        return math.inf, lines[-1]["step"]
    return statistics.fmean(values), lines[-1]["step"]


def tokens_per_second(run: History) -> float | None:
    rates = [line["tokens_per_s"] for line in run.losses if line.get("tokens_per_s")]
    return statistics.median(rates) if rates else None


def row_figures(row: Row) -> list[str]:
    speed = tokens_per_second(row.look.run)
    return [
        "-" if row.loss is None else f"{row.loss:.4f}",
        "-" if row.at is None else f"{row.at:,}",
        row.look.state.word,
        "-" if speed is None else f"{speed:,.0f}",
        row.look.point.name,
    ]


def as_csv(sweep: Sweep, kind: str, rows: Sequence[Row]) -> str:
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow([*sweep.varied, kind, "step", "state", "tokens_per_s", "parameters", "run"])
    for row in rows:
        own = [row.value(name) for name in sweep.varied]
        count = row.look.point.cfg.model.count_parameters()
        figures = [row.loss, row.at, row.look.state.word, tokens_per_second(row.look.run), count]
        out.writerow([*own, *figures, row.look.point.run_dir])
    return text.getvalue()


def axis_of(sweep: Sweep, points: Sequence[SweepPoint], name: str | None) -> str | None:
    """Choose the picture's axis: the requested one, or the one with the most values."""
    values = {key: {p.values[key] for p in points if _is_number(p.values[key])}
              for key in sweep.varied}  # fmt: skip
    if name is None:
        usable = [key for key in values if len(values[key]) > 1]
        return max(usable, key=lambda key: len(values[key]), default=None)
    if name not in values:
        near = did_you_mean(name, values)
        raise ConfigError(f"--x={name}: is not an axis{near}; give one of {', '.join(values)}")
    if not values[name]:
        raise ConfigError(f"--x={name}: has no numbers; take another axis")
    return name


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def plot_results(sweep: Sweep, rows: Sequence[Row], x: str, kind: str, out: Path) -> None:
    """Draw one line per combination of the other axes; a star marks the best finished run, hollow
    points mark unfinished runs."""
    # Not pyplot, which may choose a backend that needs a display, and keeps each figure.
    from matplotlib.figure import Figure

    lines: dict[str, list[tuple[float, float, bool]]] = {}  # x, loss, done
    for row in rows:
        if row.loss is not None and math.isfinite(row.loss) and _is_number(row.value(x)):
            others = [f"{k}={short_value(row.value(k))}" for k in sweep.varied if k != x]
            lines.setdefault(", ".join(others), []).append((row.value(x), row.loss, row.done))
    figure = Figure(figsize=(8, 5), dpi=130, layout="constrained")
    axes = figure.subplots()
    for label, group in sorted(lines.items()):
        group.sort()
        (line,) = axes.plot([p[0] for p in group], [p[1] for p in group], label=label)
        color = line.get_color()
        for at, loss, done in group:
            axes.plot(at, loss, "o", color=color, markerfacecolor=color if done else "white")
    best_runs = [(loss, at) for group in lines.values() for at, loss, done in group if done]
    if best_runs:
        loss, at = min(best_runs)
        axes.plot(at, loss, "*", color="black", markersize=14, zorder=3)
        where: dict[str, Any] = {"xytext": (0, -16), "textcoords": "offset points", "ha": "center"}
        axes.annotate(f"{short_value(at)}: {loss:.4f}", (at, loss), **where)
    x_values = [at for group in lines.values() for at, _, _ in group]
    if x_values and min(x_values) > 0 and max(x_values) / min(x_values) >= LOG_SCALE_FROM:
        axes.set_xscale("log")
    axes.set(xlabel=x, ylabel=kind, title=f"{sweep.name}: {len(rows)} points")
    axes.margins(y=0.15)
    if any(lines):
        axes.legend(loc="best", fontsize=8)
    axes.grid(color="0.9", linewidth=0.7)
    save_picture(figure, out)
