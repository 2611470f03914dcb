"""The pictures of report.py: the curves of runs, and the timeline of one with several attempts."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kempner.history.attempts import Record
from kempner.history.results import PREFIX
from kempner.history.run_history import History
from kempner.history.wall_time import WallTime

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

    Average = Callable[[np.ndarray], np.floating[Any]]

SMOOTH_FROM = 150  # points; fewer are shown as they are
MARK_UNTIL = 25  # points; fewer get a dot each: a line through a single point is invisible
LOG_FROM = 3.0  # largest loss over smallest
STOP_ROWS = 5  # of numbers above the timeline
REASONS_UNTIL = 12  # attempts; with more, only the table has the reasons
PART_COLORS = {
    "training": "tab:blue",
    "validation": "tab:cyan",
    "saving": "tab:orange",
    "lost": "tab:red",
    "stalled": "tab:purple",
    "start-up": "0.45",
    "shutdown": "burlywood",
    "not running": "0.88",
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


def draw(runs: list[History], out: Path) -> None:
    """Raises ModuleNotFoundError without matplotlib, OSError when `out` cannot be written."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    tasks = sorted({name for run in runs for line in run.results for name in main_figures(line)})
    rewarded = any("reward" in line for run in runs for line in run.losses)
    more_rows = (2,) * (bool(tasks) + rewarded)
    figure = Figure(figsize=(9, 8.5 + 2.5 * len(more_rows)), dpi=130, layout="constrained")
    heights = (3, 1.4, 1.1, *more_rows)
    loss, rate, lr, *more = panels = figure.subplots(
        len(heights), 1, sharex=True, height_ratios=heights
    )
    colors = matplotlib.color_sequences["tab10"]
    alone = len(runs) == 1
    for i, (run, name) in enumerate(zip(runs, short_names(runs), strict=True)):
        color = colors[i % len(colors)]
        curve(loss, run.losses, "loss", np.mean, color, "training" if alone else name)
        curve(rate, run.losses, "tokens_per_s", np.median, color)
        curve(lr, run.losses, "lr", np.median, color)
        loss.plot(
            [line["step"] for line in run.validations],
            [
                math.nan if line["val_loss"] is None else line["val_loss"]
                for line in run.validations
            ],
            color=colors[1] if alone else color,
            linestyle="-" if alone else "--",
            marker="o",
            markersize=3.5,
            linewidth=1.2,
            label="validation" if alone and run.validations else "",
        )
        mark_starts(panels, run, "0.45" if alone else color)
    scale_loss(loss, runs)
    if rewarded:
        draw_rewards(more.pop(0), runs)
    for panel in more:
        draw_results(panel, runs, tasks)
    rate.set(ylim=(0, None), ylabel="throughput (tokens/s)")
    rate.yaxis.set_major_formatter(EngFormatter(sep=""))
    lr.set(ylim=(0, None), ylabel="learning rate")
    panels[-1].set_xlabel("step")
    lr.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    lr.xaxis.set_major_locator(MaxNLocator(integer=True))
    lr.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    for panel in panels:
        panel.margins(x=0.01)
        panel.grid(color="0.9", linewidth=0.7)
        panel.spines[["top", "right"]].set_visible(False)
    lr.set_xlim(0, None)
    legend(loss, runs)
    if alone:
        title = f"{runs[0].path}: {runs[0].state.word}, step {runs[0].step:,}"
        loss.set_title(title, loc="left", fontsize=11)
    figure.savefig(out)


def main_figures(line: Record) -> dict[str, float]:
    """The figures of a result that lie from 0 to 1, such as accuracies: without their errors."""
    return {
        name.removeprefix(PREFIX): value
        for name, value in line.items()
        if name.startswith(PREFIX) and "stderr" not in name and 0 <= value <= 1
    }


def draw_rewards(axes: Axes, runs: list[History]) -> None:
    """The mean reward of each step's samples (reinforcement learning)."""
    for run, name in zip(runs, short_names(runs), strict=True):
        lines = [line for line in run.losses if "reward" in line]
        steps = [line["step"] for line in lines]
        axes.plot(steps, [line["reward"] for line in lines], linewidth=1.2, label=name)
    axes.set(ylabel="mean reward")
    if len(runs) > 1:
        axes.legend(fontsize=8, frameon=False)


def draw_results(axes: Axes, runs: list[History], tasks: list[str]) -> None:
    """One line for each task of each run."""
    for run, name in zip(runs, short_names(runs), strict=True):
        for task in tasks:
            points = [
                (line["step"], figures[task])
                for line in run.results
                if task in (figures := main_figures(line))
            ]
            if points:
                label = task if len(runs) == 1 else f"{name}: {task}"
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3.5, label=label)
    axes.set(ylim=(0, None), ylabel="tasks")
    axes.legend(loc="best", framealpha=0.9, fontsize=8)


def curve(
    axes: Axes, lines: list[Record], key: str, average: Average, color: Any, label: str = ""
) -> None:
    """Plot the values against the step; a long series is drawn pale under its moving average."""
    steps = [line["step"] for line in lines]
    values = [math.nan if line[key] is None else line[key] for line in lines]  # a gap
    if len(steps) >= SMOOTH_FROM:
        axes.plot(steps, values, color=color, linewidth=0.6, alpha=0.3)
        steps, values = smoothed(steps, values, average)
    marker = "o" if len(steps) < MARK_UNTIL else ""
    axes.plot(steps, values, color=color, linewidth=1.4, marker=marker, markersize=3, label=label)


def smoothed(
    steps: list[int], values: list[float], average: Average
) -> tuple[list[int], list[float]]:
    """A moving average over a 40th of the points, evaluated at about 400 of them. The window is
    centered, so that the curve does not lag; near the start, where the loss falls steeply, it is
    shorter."""
    known = np.array(values)
    last = len(values) - 1
    centers = [*range(0, last, max(1, last // 400)), last]
    result = []
    for i in centers:
        reach = min(max(2, last // 80), i)
        window = known[i - reach : i + reach + 1]
        window = window[np.isfinite(window)]
        result.append(float(average(window)) if len(window) else math.nan)
    return [steps[i] for i in centers], result


def mark_starts(panels: Any, run: History, color: Any) -> None:
    """Draw a dotted line at the step from which each later attempt resumed."""
    for step in {a.first_step for a in run.attempts[1:] if a.began is not None}:
        for panel in panels:
            panel.axvline(step, color=color, linestyle=":", linewidth=1.0, zorder=1)


def scale_loss(axes: Axes, runs: list[History]) -> None:
    """Use a logarithmic axis when the losses span so much that a linear one would only show the
    first steps."""
    from matplotlib.ticker import LogLocator, NullLocator

    values = [line["loss"] for run in runs for line in run.losses if line["loss"] is not None]
    axes.set_ylabel("loss (nats per token)")
    if values and min(values) > 0 and max(values) / min(values) >= LOG_FROM:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda loss, _: f"{loss:g}")


def legend(axes: Axes, runs: list[History]) -> None:
    from matplotlib.lines import Line2D

    handles, labels = axes.get_legend_handles_labels()
    styles: dict[str, tuple[Any, bool]] = {
        "validation": ("--", len(runs) > 1 and any(run.validations for run in runs)),
        "start of an attempt": (":", any(len(run.attempts) > 1 for run in runs)),
    }
    for label, (style, used) in styles.items():
        if used:
            handles.append(Line2D([], [], color="0.45", linestyle=style, linewidth=1.2))
            labels.append(label)
    axes.legend(handles, labels, loc="upper right", framealpha=0.9, fontsize=9)


def draw_timeline(run: History, out: Path) -> None:
    """Plot the step against time, with every stop, above a bar of how the time was spent. Raises
    what draw() raises."""
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
    steps.set(ylabel="step", ylim=(0, None), xlim=(0, time.total / size))
    steps.yaxis.set_major_locator(MaxNLocator(integer=True))
    steps.yaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    steps.grid(color="0.92", linewidth=0.7)
    steps.spines[["top", "right"]].set_visible(False)
    lines = (textwrap.shorten(text, 140, placeholder=" ...") for text in reasons)
    bar.set_xlabel("\n".join((f"{unit} since the first start", "", *lines)), loc="left")
    ratio = f"effective training time ratio {time.effective:.1%}"
    figure.suptitle(f"{run.path}: {run.state.word}, step {run.step:,}; {ratio}", fontsize=11)
    handles, labels = (
        a + b
        for a, b in zip(*(panel.get_legend_handles_labels() for panel in (bar, steps)), strict=True)
    )
    figure.legend(handles, labels, loc="outside right upper", fontsize=9)
    figure.savefig(out)


def draw_steps(axes: Axes, time: WallTime, x: Callable[[float], float]) -> None:
    """Plot the step against time. The line drops where a resume has undone steps."""
    kept: list[tuple[float, float]] = []
    lost: list[tuple[float, float]] = []
    gone: list[tuple[float, float]] = []  # between attempts, and back
    gap = (math.nan, math.nan)
    before = None
    for s in time.stretches:
        kept_to = s.last - s.lost
        middle = s.began + (s.ended - s.began) * (kept_to - s.first) / (s.last - s.first)
        kept += [(x(s.began), s.first), (x(middle), kept_to), gap]
        lost += [(x(middle), kept_to), (x(s.ended), s.last), gap] if s.lost else []
        if before is not None and (before.ended, before.last) != (s.began, s.first):
            corner = (x(s.began), before.last)
            gone += [(x(before.ended), before.last), corner, (x(s.began), s.first), gap]
        before = s
    axes.plot(*zip(*(gone or [gap]), strict=True), color="0.6", linewidth=0.8, linestyle=":")
    axes.plot(*zip(*(kept or [gap]), strict=True), color=PART_COLORS["training"], linewidth=2)
    axes.plot(*zip(*(lost or [gap]), strict=True), color=PART_COLORS["lost"], linewidth=2)


def draw_phases(axes: Axes, time: WallTime, size: float) -> None:
    """Stack the share of each part in every 600th of the time, so that phases shorter than a pixel
    still show in proportion."""
    zero = time.phases[0].began
    edges = np.linspace(0, time.total, 601)
    base = np.zeros(600)
    for part, seconds in time.parts.items():
        times, spent = [0.0], [0.0]
        for phase in time.phases:
            if phase.part == part:
                times += [phase.began - zero, phase.ended - zero]
                spent += [spent[-1], spent[-1] + phase.ended - phase.began]
        top = base + np.diff(np.interp(edges, times, spent)) / np.diff(edges)
        label = f"{part} {seconds / time.total:.1%}"
        axes.stairs(
            top, edges / size, baseline=base, fill=True, color=PART_COLORS[part], label=label
        )
        base = top
    axes.set(ylim=(0, 1), yticks=(), ylabel="time spent")


def mark_stops(axes: Axes, run: History, ends: list[float]) -> None:
    """Draw a line at each stop and, above it, the number of the attempt in the color of its end.
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


def short_names(runs: list[History]) -> list[str]:
    """The shortest trailing parts of the paths that tell them apart."""
    paths = [run.path.absolute().parts for run in runs]
    for count in range(1, max(map(len, paths))):
        names = ["/".join(path[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(run.path) for run in runs]
