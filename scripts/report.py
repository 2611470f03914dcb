"""Summarize a run, or several side by side: a table and a picture.

    python scripts/report.py runs/quickstart
    python scripts/report.py runs/a runs/b --out compared.png
    python scripts/report.py runs/quickstart --html           a page: runs/quickstart/report.html
    python scripts/report.py runs/ --html --watch 60          of all runs, repeatedly
    python scripts/report.py --nodes runs                     node speeds measured by preflight

The picture shows loss, throughput and learning rate over the steps; dotted lines mark the starts of
attempts. A run with several attempts gets a second one, timeline.png: what the run did when, and
how each attempt ended. The page is one file without scripts: copy it, open it anywhere. Runs that
are still training can be reported too. Exit code 0, or 2 if a run has nothing to show.
"""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(__file__))  # PYTHONSAFEPATH leaves it out
    import first

    first.start_program()  # before anything that may be missing or slow

import argparse
import sys
import time
from pathlib import Path

from kempner.config.command_line import argument_parser
from kempner.config.option import ConfigError
from kempner.jobs import slurm
from kempner.jobs.records.run_history import History, file_size, is_run, load_history, runs_in
from kempner.jobs.report.page.write import PAGE_SIGN, write_page
from kempner.jobs.report.replicas import replicas_of
from kempner.jobs.report.summary import (
    attempt_table,
    refused_starts,
    replica_table,
    start_times,
    summary_table,
)
from kempner.jobs.system.directories import describe_directory
from kempner.jobs.system.front_door import run_program
from kempner.jobs.system.picture import refuse_other_picture
from kempner.jobs.system.seal import refuse_other_file

FORMATS = (".png", ".pdf", ".svg")
SHOWN_RUNS = 5  # runs named in a message


def main(argv: list[str]) -> int:
    options = parse(argv)
    if options.nodes:
        from kempner.jobs.report.node_speeds import speeds_table

        print(speeds_table(options.runs, sys.stdout.encoding))
        return 0
    return print_summary(options) if options.html is None else write_html(options)


def print_summary(options: argparse.Namespace) -> int:
    """Print the table, and draw the pictures."""
    runs, problems = find_runs(options.runs)
    if problems:
        raise ConfigError(problems)
    out, times = draw_pictures(runs, options.out)
    print(summary_table(runs))
    for run in runs:
        print(
            f"\nattempts of {run.path}\n{attempt_table(run)}{start_times(run)}{refused_starts(run)}"
        )
        replicas = replicas_of(run.path)
        if replicas:
            print(f"\nreplicas of {run.path}\n{replica_table(replicas)}")
    from kempner.jobs.report import plots, timeline  # they need numpy, and the page does not

    try:
        runs_with_losses = [run for run in runs if run.losses]
        if runs_with_losses:
            plots.plot_runs(runs_with_losses, out)
        if times is not None:
            timeline.plot_timeline(runs[0], times)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        fix = ".venv/bin/pip install -c constraints.txt -e '.[plot]'"
        print(f"\nno plot: matplotlib is not installed; run {fix}")
        return 0
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}; name another file by --out") from None
    if runs_with_losses:
        print(f"\npicture: {out}")
    if times is not None:
        print(f"timeline: {times}")
    return 0


def draw_pictures(runs: list[History], option: Path | None) -> tuple[Path, Path | None]:
    """Return the paths of the pictures: of the curves and, for one run with several attempts, of
    its time. Raises ConfigError if another program's file is there."""
    alone, times = len(runs) == 1, None
    out = option or (runs[0].path / "report.png" if alone else Path("report.png"))
    refuse_other_picture(out, "--out", option is not None)
    if alone and len(runs[0].attempts) > 1 and runs[0].wall_time.total:
        times = out.with_name(f"{out.stem}-timeline{out.suffix}" if option else "timeline.png")
        refuse_other_picture(times, "--out", option is not None)
    return out, times


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argument_parser("report.py", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"the picture, {', '.join(FORMATS)} (default: RUN/report.png; several: report.png)",
    )
    parser.add_argument(
        "--html",
        type=Path,
        nargs="?",
        const=True,  # no Path: "." would equal the empty one
        metavar="FILE",
        help="write a page instead (default: report.html in RUN, or in the directory of runs)",
    )
    parser.add_argument(
        "--nodes",
        action="store_true",
        help="print preflight's figures over time; RUN is the directory that holds the runs",
    )
    seconds = {"type": int, "metavar": "SECONDS"}
    parser.add_argument("--watch", **seconds, help="rewrite the page this often until all runs end")
    parser.add_argument("--refresh", **seconds, help="interval at which the page reloads")
    options = parser.parse_args(argv)
    if options.nodes and (options.html is not None or options.out is not None):
        parser.error("--nodes prints a table: leave --out and --html out")
    if options.html is None and (options.watch or options.refresh):
        parser.error("--watch and --refresh are for a page: add --html")
    for name in ("watch", "refresh"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} {value}: must be 1 second or more")
    if options.html not in (None, True) and options.html.suffix not in (".html", ".htm"):
        parser.error(f"--html {options.html}: must end in .html; name the runs before --html")
    if options.html is not None and options.out is not None:
        parser.error("--out is for a picture, and --html writes a page: leave one of them out")
    if options.out is not None and options.out.suffix not in FORMATS:
        parser.error(f"--out {options.out}: must end in {', '.join(FORMATS)}")
    return options


def write_html(options: argparse.Namespace) -> int:
    """Write the page of a run, or of all runs in directories."""
    paths = list(dict.fromkeys(options.runs))
    runs = list(dict.fromkeys(run for path in paths for run in runs_in(path)))
    if not runs:
        names = ", ".join(map(str, paths))
        fix = "name a run directory, or a directory of runs"
        raise ConfigError(f"no run in {names}; {fix}")
    page = options.html
    if page is True:
        page = (paths[0] if len(paths) == 1 else Path()) / "report.html"
    while True:
        try:
            refuse_other_file(page, "--html", (PAGE_SIGN,))
            lives = write_page(runs, page, slurm.my_jobs(), options.watch or options.refresh)
        except OSError as error:
            fix = "name another file by --html FILE"
            raise ConfigError(f"{page}: {error.strerror}; {fix}") from None
        if not (options.watch and lives):
            print(f"page: {page}")
            return 0
        time.sleep(options.watch)
        runs = list(dict.fromkeys(run for path in paths for run in runs_in(path)))


def find_runs(paths: list[Path]) -> tuple[list[History], list[str]]:
    runs, problems, jobs = [], [], slurm.my_jobs()
    for path in dict.fromkeys(paths):
        if not path.is_dir():
            there = path.exists() or path.is_symlink()
            what = f" is {describe_directory(path)}" if there else ": no such directory"
            problems.append(f"{path}{what}; name the run.dir of a training")
            continue
        run = load_history(path, jobs)
        if run.losses or is_program(run):
            runs.append(run)
        elif file_size(path / "metrics.jsonl") and not run.lines:
            problems.append(
                f"{path}/metrics.jsonl: no line has a step and its time; is this another file?"
            )
        elif is_run(path):
            ends = [a for a in run.attempts if a.state != "running"]
            last = f"; the last attempt: {ends[-1].ending}" if ends else ""
            last = f"; {run.refusal.text}" if run.refusal else last
            problems.append(
                f"{path}: no step is recorded yet; a line is written every metrics.log_interval "
                f"steps{last}"
            )
        elif runs_in(path):
            names = ", ".join(str(run) for run in runs_in(path)[:SHOWN_RUNS])
            problems.append(
                f"{path}: is a directory of runs; add --html for their page, or name one: {names}"
            )
        else:
            problems.append(
                f"{path} is {describe_directory(path)}, not a run; name the run.dir of a training"
            )
    return runs, problems


def is_program(run: History) -> bool:
    """Return whether it is a run of run.sh: it has attempts, and no figures."""
    return any(a.began for a in run.attempts) and not (run.path / "config.toml").exists()


if __name__ == "__main__":
    run_program(main)
