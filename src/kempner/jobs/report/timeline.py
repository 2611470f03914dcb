"""Timeline of report.py: what a run of several attempts did when, and how each attempt ended. The
other picture: plots.py."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kempner.jobs.records.run_history import History
from kempner.jobs.report.wall_time import WallTime
from kempner.jobs.system.picture import save_picture

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

STOP_ROWS = 5  # rows of numbers above the timeline
REASONS_UNTIL = 12  # attempts; with more, only the table has the reasons
PART_COLORS = {
    "training": "tab:blue",
    "running": "lightsteelblue",
    "validation": "tab:cyan",
    "saving": "tab:orange",
    "lost": "tab:red",
    "stalled": "tab:purple",
    "start-up": "0.45",
    "shutdown": "burlywood",
    "not running": "0.88",
    "ended": "white",
}
STATE_COLORS = {
    "done": "tab:green",
    "interrupted": "0.35",
    "stopped": "tab:olive",
    "failed": "tab:brown",
    "crashed": "tab:red",
    "hung": "tab:purple",
    "killed": "black",
}


def plot_timeline(run: History, out: Path) -> None:
    """Plot the step against time, with every stop, above a bar of how the time was spent. Raises
    ModuleNotFoundError without matplotlib, OSError when `out` cannot be written."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    time = run.wall_time
    zero = time.phases[0].began
    unit, size = next(
        (unit, size)
        for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
        if time.total >= 3 * size or size == 1
    )
    reasons = [f"{a.name} {a.short_ending}" for a in run.attempts if a.state != "running"]
    if len(reasons) > REASONS_UNTIL:
        reasons = ["how each attempt ended: see the table of report.py"]
    figure = Figure(figsize=(11, 6 + 0.16 * len(reasons)), dpi=130, layout="constrained")
    steps, bar = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    draw_steps(steps, time, lambda at: (at - zero) / size)
    draw_phases(bar, time, size)
    mark_stops(steps, run, [(a.ended - zero) / size for a in run.attempts])
    steps.set(
        ylabel="step", ylim=(0, None), xlim=(0, 1.02 * time.total / size)
    )  # room for the last number
    steps.yaxis.set_major_locator(MaxNLocator(integer=True))
    steps.yaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    steps.grid(color="0.92", linewidth=0.7)
    steps.spines[["top", "right"]].set_visible(False)
    lines = (textwrap.shorten(text, 140, placeholder=" ...") for text in reasons)
    bar.set_xlabel("\n".join((f"{unit} since the first start", "", *lines)), loc="left")
    effective = "-" if time.effective is None else f"{time.effective:.1%}"
    ratio = f"effective training time ratio {effective}"
    figure.suptitle(f"{run.path}: {run.state.word}, step {run.step_text}; {ratio}", fontsize=11)
    handles, labels = (
        a + b
        for a, b in zip(*(panel.get_legend_handles_labels() for panel in (bar, steps)), strict=True)
    )
    figure.legend(handles, labels, loc="outside right upper", fontsize=9)
    save_picture(figure, out)


def draw_steps(axes: Axes, time: WallTime, x: Callable[[float], float]) -> None:
    """Plot the step against time. The line drops where a resume has undone steps."""
    kept_points: list[tuple[float, float]] = []
    lost_points: list[tuple[float, float]] = []
    gap_points: list[tuple[float, float]] = []  # between attempts, and back
    # A non-finite point interrupts a line: one call draws all pieces.
    gap = (math.nan, math.nan)
    before = None
    for s in time.stretches:
        kept_to = s.last - s.lost
        # The kept steps come first; all steps of a stretch are assumed to be equally long.
        middle = s.began + (s.ended - s.began) * (kept_to - s.first) / (s.last - s.first)
        kept_points += [(x(s.began), s.first), (x(middle), kept_to), gap]
        lost_points += [(x(middle), kept_to), (x(s.ended), s.last), gap] if s.lost else []
        if before is not None and (before.ended, before.last) != (s.began, s.first):
            corner = (x(s.began), before.last)
            gap_points += [(x(before.ended), before.last), corner, (x(s.began), s.first), gap]
        before = s
    axes.plot(*zip(*(gap_points or [gap]), strict=True), color="0.6", linewidth=0.8, linestyle=":")
    axes.plot(
        *zip(*(kept_points or [gap]), strict=True), color=PART_COLORS["training"], linewidth=2
    )
    axes.plot(*zip(*(lost_points or [gap]), strict=True), color=PART_COLORS["lost"], linewidth=2)


def draw_phases(axes: Axes, time: WallTime, size: float) -> None:
    """Stack the share of each part in every 600th of the time, so that phases shorter than a pixel
    still show in proportion."""
    zero = time.phases[0].began
    edges = np.linspace(0, time.total, 601)
    base = np.zeros(600)
    for part, seconds in time.parts.items():
        times, totals = [0.0], [0.0]
        for phase in time.phases:
            if phase.part == part:
                times += [phase.began - zero, phase.ended - zero]
                totals += [totals[-1], totals[-1] + phase.ended - phase.began]
        # The share of a part in an interval is the growth of its cumulative time from edge to edge.
        top = base + np.diff(np.interp(edges, times, totals)) / np.diff(edges)
        label = f"{part} {seconds / time.total:.1%}"
        axes.stairs(
            top, edges / size, baseline=base, fill=True, color=PART_COLORS[part], label=label
        )
        base = top
    axes.set(ylim=(0, 1), yticks=(), ylabel="time spent")


def mark_stops(axes: Axes, run: History, ends: list[float]) -> None:
    """Draw a line at each stop, with the number of the attempt above it in the color of its end.
    Numbers that would overlap are placed in several rows."""
    width = max(ends) / 38  # of a number
    rows: list[float] = []  # the position of the last number of each row
    for attempt, end in zip(run.attempts, ends, strict=True):
        if attempt.state == "running":
            continue
        row = next((i for i, last in enumerate(rows) if end - last > width), len(rows))
        if row == STOP_ROWS:  # all rows are full here: move it to the right
            row = rows.index(min(rows))
        place = max([end, *(last + width for last in rows[row : row + 1])])
        rows[row : row + 1] = [place]
        color = STATE_COLORS.get(attempt.state, "0.35")
        axes.axvline(end, color=color, linewidth=0.8, alpha=0.5, zorder=1)
        axes.annotate(
            attempt.name,
            (end, 1),
            xytext=(place, 1.03 + 0.055 * row),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="center",
            color="white",
            fontsize=7.5,
            bbox={"boxstyle": "circle,pad=0.25", "facecolor": color, "edgecolor": "none"},
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.8, "alpha": 0.5},
        )
    for state, color in STATE_COLORS.items():
        if count := sum(attempt.state == state for attempt in run.attempts):
            axes.plot([], [], "o", color=color, label=f"{state}: {count}")
