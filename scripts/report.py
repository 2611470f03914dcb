"""What became of a run, or of several side by side: a table and a picture.

    python scripts/report.py runs/quickstart
    python scripts/report.py runs/a runs/b --out compared.png

The picture shows loss, throughput and learning rate over the steps; dotted lines are the starts of
attempts. Of a run with several attempts there is a second one, timeline.png: what the run did when,
and how each attempt ended. It works on a run that still trains. Exit code 0, or 2 when a run has
nothing to show.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kempner import history
from kempner.attempts import Attempt, Record
from kempner.history import History
from kempner.life import Life

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

    Average = Callable[[list[float]], float]

STEP_PARTS = ("data", "compute", "checkpoint", "eval")
FORMATS = (".png", ".pdf", ".svg")
SMOOTH_FROM = 150  # points; fewer are shown as they are
MARK_UNTIL = 25  # points; fewer get a dot each, for a line through one point is nothing
LOG_FROM = 3.0  # largest loss over smallest
STOP_ROWS = 5  # of numbers above the timeline
REASON_WIDTH = 100  # characters; the whole is in the logs
REASONS_UNTIL = 12  # attempts; of more, the reasons are in the table alone
PART_COLORS = {
    "training": "tab:blue",
    "validation": "tab:cyan",
    "saving": "tab:orange",
    "lost": "tab:red",
    "stalled": "tab:purple",
    "start-up": "0.45",
    "shutdown": "burlywood",
    "queue": "0.88",
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


def main(argv: list[str]) -> int:
    options = parse(argv)
    runs, problems = find_runs(options.runs)
    if problems:
        return fail(*problems)
    print(table(runs))
    for run in runs:
        print(f"\nattempts of {run.path}\n{attempt_table(run)}")
    alone = len(runs) == 1
    out = options.out or (runs[0].path / "report.png" if alone else Path("report.png"))
    timeline = None
    if alone and len(runs[0].attempts) > 1 and runs[0].life.wall:
        name = f"{out.stem}-timeline{out.suffix}" if options.out else "timeline.png"
        timeline = out.with_name(name)
    try:
        draw(runs, out)
        if timeline is not None:
            draw_timeline(runs[0], timeline)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print("\nno picture: it needs matplotlib; install it by `pip install -e '.[plot]'`")
        return 0
    except OSError as error:
        return fail(f"{out}: {error.strerror}; name another file by --out")
    print(f"\npicture: {out}")
    if timeline is not None:
        print(f"timeline: {timeline}")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    about, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="report.py",
        description=about,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"the picture, {', '.join(FORMATS)} (default: RUN/report.png; of several, report.png)",
    )
    options = parser.parse_args(argv)
    if options.out is not None and options.out.suffix not in FORMATS:
        parser.error(f"--out {options.out}: must end in {', '.join(FORMATS)}")
    return options


def fail(*problems: str) -> int:
    for problem in problems:
        print(f"report: error: {problem}", file=sys.stderr)
    return 2


def find_runs(paths: list[Path]) -> tuple[list[History], list[str]]:
    runs, problems = [], []
    for path in dict.fromkeys(paths):
        if not path.is_dir():
            problems.append(f"{path}: no such directory; name the run.dir of a training")
            continue
        run = history.load(path)
        if run.losses:
            runs.append(run)
        elif run.status or run.attempts:
            ends = [a for a in run.attempts if a.state != "running"]
            last = f"; the last attempt: {ending(ends[-1])}" if ends else ""
            problems.append(
                f"{path}: no step is recorded yet; there is a line every metrics.log_interval "
                f"steps{last}"
            )
        else:
            problems.append(f"{path}: not a run; name the run.dir of a training")
    return runs, problems


# --- The table --------------------------------------------------------------------------------


def table(runs: list[History]) -> str:
    """One row per figure, one column per run."""
    several = any(len(run.attempts) > 1 for run in runs)
    columns = [{"run": str(run.path), **facts(run), **wall_time(run, several)} for run in runs]
    return aligned([[name, *(column[name] for column in columns)] for name in columns[0]])


def facts(run: History) -> dict[str, str]:
    losses = [line for line in run.losses if line["loss"] is not None]  # None: not finite
    last = run.losses[-1]
    return {
        "state": state(run),
        "step": f"{run.step:,} of {run.status.get('max_steps', 0):,}",
        "loss, first": at_step(losses[:1], "loss"),
        "loss, last": at_step(losses[-1:], "loss"),
        "loss, best": at_step(best(losses, "loss"), "loss"),
        "validation, last": at_step(run.validations[-1:], "val_loss"),
        "validation, best": at_step(best(run.validations, "val_loss"), "val_loss"),
        "non-finite steps": f"{skipped(run.losses):,}",
        "tokens": f"{last['tokens']:,}",
        "tokens/s, median": f"{median(run.losses, 'tokens_per_s'):,.0f}",
        "step time, median": f"{median(run.losses, 'step_time'):.3g} s",
        **shares(run.losses),
        "MFU, median": mfu(run.losses),
        "memory, most": f"{max(line.get('memory_gib', 0.0) for line in run.losses):.2f} GiB",
    }


def state(run: History) -> str:
    if run.state != "running":
        return run.state
    return f"running, last line {duration(time.time() - run.lines[-1]['time'])} ago"


def at_step(lines: list[Record], key: str) -> str:
    return f"{lines[0][key]:.4f} at step {lines[0]['step']:,}" if lines else "-"


def best(lines: list[Record], key: str) -> list[Record]:
    finite = [line for line in lines if line[key] is not None]
    return [min(finite, key=lambda line: line[key])] if finite else []


def median(lines: list[Record], key: str) -> float:
    return statistics.median(line[key] for line in lines)


def shares(lines: list[Record]) -> dict[str, str]:
    """Where the time of the steps went. A median would hide a part that comes every 100th line."""
    total = sum(line["step_time"] for line in lines)
    times = {part: sum(line.get(f"{part}_time", 0.0) for line in lines) for part in STEP_PARTS}
    return {f"  {part}": f"{seconds / total:.1%}" for part, seconds in times.items()}


def skipped(lines: list[Record]) -> int:
    """Steps whose update was left out, because it was not finite: every attempt counts its own."""
    counts: dict[int, int] = {}
    for line in lines:
        attempt, count = line.get("attempt", 0), line.get("skipped", 0)
        counts[attempt] = max(count, counts.get(attempt, 0))
    return sum(counts.values())


def mfu(lines: list[Record]) -> str:
    known = [line for line in lines if line.get("mfu") is not None]
    return f"{median(known, 'mfu'):.1%}" if known else "-"


def wall_time(run: History, several: bool) -> dict[str, str]:
    """From the first start to the last sign of life. `several`: and what each part of it went
    to."""
    life = run.life
    parts = {
        f"  {part}": f"{duration(seconds)}, {seconds / max(life.wall, 1e-9):.1%}"
        for part, seconds in life.parts.items()
    }
    recomputed = f"{sum(life.lost):,}" + more(*run.attempts)
    return {
        "wall time": duration(life.wall),
        **(parts if several else {}),
        "effective training time ratio": f"{life.effective:.1%}",
        **({"steps recomputed": recomputed} if several else {}),
        "attempts": f"{len(run.attempts):,}",
    }


def more(*attempts: Attempt) -> str:
    """One that was killed has done steps after its last line, fewer than metrics.log_interval."""
    return " or more" if any(a.state == "killed" and a.began for a in attempts) else ""


def attempt_table(run: History) -> str:
    """What a run needs that was never broken is less than what one with many attempts does."""
    rows = [["", "job", "ranks", "hosts", "steps", "recomputed", "start-up", "time", "end"]]
    life = run.life
    for attempt, startup, lost in zip(run.attempts, life.startups, life.lost, strict=True):
        began, hosts = attempt.began, attempt.hosts
        job = attempt.job and f"{attempt.job}.{attempt.restart}"
        rows.append([
            name(attempt),
            job or "-",
            str(attempt.world_size or "-"),
            f"{hosts[0]} and {len(hosts) - 1} more" if len(hosts) > 2 else ",".join(hosts) or "-",
            f"{attempt.first_step:,} to {attempt.last_step:,}" if began else "-",
            f"{lost:,}{more(attempt)}",
            "-" if startup is None else duration(startup),
            duration(attempt.ended - attempt.opened),
            ending(attempt),
        ])  # fmt: skip
    alone = len(run.attempts) == 1
    return aligned([row[:5] + row[7:] if alone else row for row in rows])


def name(attempt: Attempt) -> str:
    return "-" if attempt.number < 0 else str(attempt.number)


def ending(attempt: Attempt) -> str:
    """How it ended, and what the batch script has made of it."""
    text = attempt.state
    if text == "killed":
        text = "killed without a word" if attempt.began else "died before it began"
    elif attempt.reason:
        text += ": " + textwrap.shorten(attempt.reason, REASON_WIDTH, placeholder=" ...")
    if attempt.decision == "requeue":
        text += f"; requeued without {attempt.excluded}" if attempt.excluded else "; requeued"
    elif attempt.decision == "end" and attempt.state not in ("done", "stopped", "failed"):
        text += f"; not requeued: {attempt.why}"
    return text


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{max(seconds, 0.0):.1f} s"
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    return (
        f"{minutes} min {int(seconds) % 60} s" if minutes < 60 else f"{hours} h {minutes % 60} min"
    )


def aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("   ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


# --- The picture ------------------------------------------------------------------------------


def draw(runs: list[History], out: Path) -> None:
    """Raises ModuleNotFoundError without matplotlib, OSError when `out` cannot be written."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure = Figure(figsize=(9, 8.5), dpi=130, layout="constrained")
    loss, rate, lr = panels = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1.4, 1.1))
    colors = matplotlib.colormaps["tab10"].colors
    alone = len(runs) == 1
    for i, (run, name) in enumerate(zip(runs, short_names(runs), strict=True)):
        color = colors[i % len(colors)]
        curve(loss, run.losses, "loss", statistics.fmean, color, "training" if alone else name)
        curve(rate, run.losses, "tokens_per_s", statistics.median, color)
        curve(lr, run.losses, "lr", statistics.median, color)
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
    rate.set(ylim=(0, None), ylabel="throughput (tokens/s)")
    rate.yaxis.set_major_formatter(EngFormatter(sep=""))
    lr.set(ylim=(0, None), ylabel="learning rate", xlabel="step")
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
        title = f"{runs[0].path}: {runs[0].state}, step {runs[0].step:,}"
        loss.set_title(title, loc="left", fontsize=11)
    figure.savefig(out)


def curve(
    axes: Axes, lines: list[Record], key: str, average: Average, color: Any, label: str = ""
) -> None:
    """The values over the steps; many of them pale, under their smoothed form."""
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
    """The average around some 400 of the points, over a 40th of all. The window is centered, so
    that the curve does not lag; in the beginning, where it falls steeply, it grows from nothing."""
    last = len(values) - 1
    centers = [*range(0, last, max(1, last // 400)), last]
    result = []
    for i in centers:
        reach = min(max(2, last // 80), i)
        window = [v for v in values[i - reach : i + reach + 1] if math.isfinite(v)]
        result.append(average(window) if window else math.nan)
    return [steps[i] for i in centers], result


def mark_starts(panels: Any, run: History, color: Any) -> None:
    """A dotted line where an attempt goes on from."""
    for step in {a.first_step for a in run.attempts[1:] if a.began is not None}:
        for panel in panels:
            panel.axvline(step, color=color, linestyle=":", linewidth=1.0, zorder=1)


def scale_loss(axes: Axes, runs: list[History]) -> None:
    """Logarithmic when the losses span so much that a linear axis would show the first steps
    alone."""
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
    styles = {
        "validation": ("--", len(runs) > 1 and any(run.validations for run in runs)),
        "start of an attempt": (":", any(len(run.attempts) > 1 for run in runs)),
    }
    for label, (style, used) in styles.items():
        if used:
            handles.append(Line2D([], [], color="0.45", linestyle=style, linewidth=1.2))
            labels.append(label)
    axes.legend(handles, labels, loc="upper right", framealpha=0.9, fontsize=9)


def draw_timeline(run: History, out: Path) -> None:
    """The steps over the time, with every stop, and below what the time was spent on. Raises as
    draw does."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    life = run.life
    zero = life.phases[0].began
    unit, size = next(
        (unit, size)
        for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
        if life.wall >= 3 * size or size == 1
    )
    reasons = [f"{name(a)} {ending(a)}" for a in run.attempts if a.state != "running"]
    if len(reasons) > REASONS_UNTIL:
        reasons = ["how each attempt ended: see the table of report.py"]
    figure = Figure(figsize=(11, 6 + 0.16 * len(reasons)), dpi=130, layout="constrained")
    steps, bar = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    draw_steps(steps, life, lambda at: (at - zero) / size)
    draw_phases(bar, life, size)
    mark_stops(steps, run, [(a.ended - zero) / size for a in run.attempts])
    steps.set(ylabel="step", ylim=(0, None), xlim=(0, life.wall / size))
    steps.yaxis.set_major_locator(MaxNLocator(integer=True))
    steps.yaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    steps.grid(color="0.92", linewidth=0.7)
    steps.spines[["top", "right"]].set_visible(False)
    lines = (textwrap.shorten(text, 140, placeholder=" ...") for text in reasons)
    bar.set_xlabel("\n".join((f"{unit} since the first start", "", *lines)), loc="left")
    ratio = f"effective training time ratio {life.effective:.1%}"
    figure.suptitle(f"{run.path}: {run.state}, step {run.step:,}; {ratio}", fontsize=11)
    handles, labels = (
        a + b
        for a, b in zip(*(panel.get_legend_handles_labels() for panel in (bar, steps)), strict=True)
    )
    figure.legend(handles, labels, loc="outside right upper", fontsize=9)
    figure.savefig(out)


def draw_steps(axes: Axes, life: Life, x: Callable[[float], float]) -> None:
    """The line falls back where a resume has undone steps."""
    kept: list[tuple[float, float]] = []
    lost: list[tuple[float, float]] = []
    gone: list[tuple[float, float]] = []  # between attempts, and back
    gap = (math.nan, math.nan)
    before = None
    for s in life.stretches:
        stands = s.last - s.lost
        middle = s.began + (s.ended - s.began) * (stands - s.first) / (s.last - s.first)
        kept += [(x(s.began), s.first), (x(middle), stands), gap]
        lost += [(x(middle), stands), (x(s.ended), s.last), gap] if s.lost else []
        if before is not None and (before.ended, before.last) != (s.began, s.first):
            corner = (x(s.began), before.last)
            gone += [(x(before.ended), before.last), corner, (x(s.began), s.first), gap]
        before = s
    axes.plot(*zip(*(gone or [gap]), strict=True), color="0.6", linewidth=0.8, linestyle=":")
    axes.plot(*zip(*(kept or [gap]), strict=True), color=PART_COLORS["training"], linewidth=2)
    axes.plot(*zip(*(lost or [gap]), strict=True), color=PART_COLORS["lost"], linewidth=2)


def draw_phases(axes: Axes, life: Life, size: float) -> None:
    """The share of each part in every 600th of the time: what is longer shows as itself, what is
    shorter as much as it takes."""
    zero = life.phases[0].began
    edges = np.linspace(0, life.wall, 601)
    base = np.zeros(600)
    for part, seconds in life.parts.items():
        times, spent = [0.0], [0.0]
        for phase in life.phases:
            if phase.part == part:
                times += [phase.began - zero, phase.ended - zero]
                spent += [spent[-1], spent[-1] + phase.ended - phase.began]
        top = base + np.diff(np.interp(edges, times, spent)) / np.diff(edges)
        label = f"{part} {seconds / life.wall:.1%}"
        axes.stairs(
            top, edges / size, baseline=base, fill=True, color=PART_COLORS[part], label=label
        )
        base = top
    axes.set(ylim=(0, 1), yticks=(), ylabel="time spent")


def mark_stops(axes: Axes, run: History, ends: list[float]) -> None:
    """A line at each stop and, above, the number of the attempt in the color of its end. Numbers
    that would lie on each other go into rows."""
    width = max(ends) / 38  # of a number
    rows: list[float] = []  # where the last number of each row stands
    for attempt, end in zip(run.attempts, ends, strict=True):
        if attempt.state == "running":
            continue
        row = next((i for i, last in enumerate(rows) if end - last > width), len(rows))
        if row == STOP_ROWS:  # all are full here: to the right
            row = rows.index(min(rows))
        place = max([end, *(last + width for last in rows[row : row + 1])])
        rows[row : row + 1] = [place]
        color = STATE_COLORS.get(attempt.state, "0.35")
        axes.axvline(end, color=color, linewidth=0.8, alpha=0.5, zorder=1)
        axes.annotate(
            name(attempt),
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
    """The last parts of the paths, as few as tell them apart."""
    paths = [run.path.absolute().parts for run in runs]
    for count in range(1, max(map(len, paths))):
        names = ["/".join(path[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(run.path) for run in runs]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
