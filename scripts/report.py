"""What became of a run, or of several side by side: a table and a picture.

    python scripts/report.py runs/quickstart
    python scripts/report.py runs/a runs/b --out compared.png

The picture shows loss, throughput and learning rate over the steps; dotted lines are the starts of
attempts. It works on a run that still trains. Exit code 0, or 2 when a run has nothing to show.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kempner import history
from kempner.history import Attempt, History, Record

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

    Average = Callable[[list[float]], float]

PARTS = ("data", "compute", "checkpoint", "eval")
FORMATS = (".png", ".pdf", ".svg")
SMOOTH_FROM = 150  # points; fewer are shown as they are
MARK_UNTIL = 25  # points; fewer get a dot each, for a line through one point is nothing
LOG_FROM = 3.0  # largest loss over smallest


def main(argv: list[str]) -> int:
    options = parse(argv)
    runs, problems = find_runs(options.runs)
    if problems:
        return fail(*problems)
    print(table(runs))
    for run in runs:
        print(f"\nattempts of {run.path}\n{attempt_table(run)}")
    alone = runs[0].path / "report.png" if len(runs) == 1 else Path("report.png")
    out = options.out or alone
    try:
        draw(runs, out)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print("\nno picture: it needs matplotlib; install it by `pip install -e '.[plot]'`")
        return 0
    except OSError as error:
        return fail(f"{out}: {error.strerror}; name another file by --out")
    print(f"\npicture: {out}")
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
            problems.append(
                f"{path}: no step is recorded yet; there is a line every metrics.log_interval steps"
            )
        else:
            problems.append(f"{path}: not a run; name the run.dir of a training")
    return runs, problems


# --- The table --------------------------------------------------------------------------------


def table(runs: list[History]) -> str:
    """One row per figure, one column per run."""
    columns = [{"run": str(run.path), **facts(run)} for run in runs]
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
        **wall_time(run.attempts),
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
    times = {part: sum(line.get(f"{part}_time", 0.0) for line in lines) for part in PARTS}
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


def wall_time(attempts: list[Attempt]) -> dict[str, str]:
    """From the first start to the last sign of life, and what of it lay between attempts: queue,
    start-up, and starts that came to nothing."""
    spans = [(a.began, a.ended) for a in attempts if a.began is not None and a.ended is not None]
    whole = max(end for _, end in spans) - min(begin for begin, _ in spans) if spans else 0.0
    between = whole - sum(end - begin for begin, end in spans)
    return {
        "wall time": duration(whole),
        "  between attempts": duration(between),
        "attempts": f"{len(attempts):,}",
    }


def attempt_table(run: History) -> str:
    rows = [["", "job", "ranks", "hosts", "steps", "time", "end"]]
    for attempt in run.attempts:
        began, ended = attempt.began, attempt.ended
        hosts = attempt.hosts
        rows.append([
            str(attempt.number),
            attempt.job or "-",
            str(attempt.world_size or "-"),
            f"{hosts[0]} and {len(hosts) - 1} more" if len(hosts) > 2 else ",".join(hosts) or "-",
            f"{attempt.first_step:,} to {attempt.last_step:,}" if began else "-",
            duration(ended - began) if began and ended else "-",
            ending(attempt),
        ])  # fmt: skip
    return aligned(rows)


def ending(attempt: Attempt) -> str:
    if attempt.state == "lost":
        return "lost: it was killed without a word"
    return f"{attempt.state}: {attempt.reason}" if attempt.reason else attempt.state


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
