"""Picture of report.py with the curves of runs over their steps. The other one: timeline.py."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kempner.jobs.records.attempts import Record
from kempner.jobs.records.run_history import History, is_number, main_figures
from kempner.jobs.system.picture import save_picture

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

    Average = Callable[[np.ndarray], np.floating[Any]]

SMOOTH_FROM = 150  # points; fewer are shown as they are
MARK_UNTIL = 25  # points; fewer get dots: a line through a single point is invisible
LOG_LOSS_FROM = 3.0  # largest loss over smallest


def plot_runs(runs: list[History], out: Path) -> None:
    """Draw the curves. Raises ModuleNotFoundError without matplotlib, OSError if `out` cannot be
    written."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    tasks = sorted({name for run in runs for line in run.results for name in main_figures(line)})
    rewarded = any("reward" in line for run in runs for line in run.losses)
    more_rows = (2,) * (bool(tasks) + rewarded)
    # Not with pyplot, which chooses a display backend and keeps each figure.
    figure = Figure(figsize=(9, 8.5 + 2.5 * len(more_rows)), dpi=130, layout="constrained")
    heights = (3, 1.4, 1.1, *more_rows)
    loss, rate, lr, *more = panels = figure.subplots(
        len(heights), 1, sharex=True, height_ratios=heights
    )
    colors = matplotlib.color_sequences["tab10"]
    alone = len(runs) == 1
    for i, (run, name) in enumerate(zip(runs, short_names(runs), strict=True)):
        color = colors[i % len(colors)]
        plot_curve(loss, run.losses, "loss", np.mean, color, "training" if alone else name)
        # A median: a step that waits for a save or a validation would lower a mean.
        plot_curve(rate, run.losses, "tokens_per_s", np.median, color)
        plot_curve(lr, run.losses, "lr", np.median, color)
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
    plot_legend(loss, runs)
    if alone:
        title = f"{runs[0].path}: {runs[0].state.word}, step {runs[0].step_text}"
        loss.set_title(title, loc="left", fontsize=11)
    save_picture(figure, out)


def draw_rewards(axes: Axes, runs: list[History]) -> None:
    """Draw the mean reward of each step's samples (reinforcement learning)."""
    for run, name in zip(runs, short_names(runs), strict=True):
        lines = [line for line in run.losses if "reward" in line]
        steps = [line["step"] for line in lines]
        rewards = [math.nan if line["reward"] is None else line["reward"] for line in lines]
        axes.plot(steps, rewards, linewidth=1.2, label=name)
    axes.set(ylabel="mean reward")
    if len(runs) > 1:
        axes.legend(fontsize=8, frameon=False)


def draw_results(axes: Axes, runs: list[History], tasks: list[str]) -> None:
    """Draw one line for each task of each run."""
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
    axes.set(ylim=(0, None), ylabel="evaluation")
    axes.legend(loc="best", framealpha=0.9, fontsize=8)


def plot_curve(
    axes: Axes, lines: list[Record], key: str, average: Average, color: Any, label: str = ""
) -> None:
    """Plot the values against the step; a long series is drawn pale under its moving average."""
    steps = [line["step"] for line in lines]
    values = [line[key] if is_number(line.get(key)) else math.nan for line in lines]  # a gap
    if len(steps) >= SMOOTH_FROM:
        axes.plot(steps, values, color=color, linewidth=0.6, alpha=0.3)
        steps, values = smooth_values(steps, values, average)
    marker = "o" if len(steps) < MARK_UNTIL else ""
    axes.plot(steps, values, color=color, linewidth=1.4, marker=marker, markersize=3, label=label)


def smooth_values(
    steps: list[int], values: list[float], average: Average
) -> tuple[list[int], list[float]]:
    """Average over a moving window of a 40th of the points, evaluated at about 400 of them. The
    window is centered, so that the curve does not lag; near the start, where the loss falls
    steeply, it is shorter."""
    array = np.array(values)
    last = len(values) - 1
    centers = [*range(0, last, max(1, last // 400)), last]
    result = []
    for i in centers:
        reach = min(max(2, last // 80), i)
        window = array[i - reach : i + reach + 1]
        window = window[np.isfinite(window)]
        result.append(float(average(window)) if len(window) else math.nan)
    return [steps[i] for i in centers], result


def mark_starts(panels: Any, run: History, color: Any) -> None:
    """Draw a dotted line at the step from which each later attempt resumed."""
    # A set: attempts that crash one after another resume from the same step.
    for step in {a.first_step for a in run.attempts[1:] if a.began and a.counted}:
        for panel in panels:
            panel.axvline(step, color=color, linestyle=":", linewidth=1.0, zorder=1)


def scale_loss(axes: Axes, runs: list[History]) -> None:
    """Use a logarithmic axis if a linear one would show little but the first steps."""
    from matplotlib.ticker import LogLocator, NullLocator

    values = [line["loss"] for run in runs for line in run.losses if line["loss"] is not None]
    rewarded = any("reward" in line for run in runs for line in run.losses[:1])
    axes.set_ylabel("policy loss" if rewarded else "loss (nats per token)")
    if values and min(values) > 0 and max(values) / min(values) >= LOG_LOSS_FROM:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda loss, _: f"{loss:g}")


def plot_legend(axes: Axes, runs: list[History]) -> None:
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
    axes.legend(handles, labels, loc="best", framealpha=0.9, fontsize=9)


def short_names(runs: list[History]) -> list[str]:
    """Return the shortest trailing parts that distinguish the paths."""
    paths = [run.path.absolute().parts for run in runs]
    for count in range(1, max(map(len, paths))):
        names = ["/".join(path[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(run.path) for run in runs]
