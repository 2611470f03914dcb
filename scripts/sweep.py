"""Many runs from one file: plan them, submit them as job arrays, and compare what comes out.

    python scripts/sweep.py SWEEP.toml plan [--gpu H100]  check every point, and say what it costs
    python scripts/sweep.py SWEEP.toml submit             what is new; returns at once
    python scripts/sweep.py SWEEP.toml status             how each point stands
    python scripts/sweep.py SWEEP.toml resubmit           what has failed, and nothing else
    python scripts/sweep.py SWEEP.toml cancel             what is queued or running
    python scripts/sweep.py SWEEP.toml table              the results: text, CSV and a picture

Without Slurm, `submit --here` runs the points on this machine, one after another. docs/sweeps.md
has the format of the file. Exit code 1: something was not submitted, or has failed; 2: bad input,
every problem on a line of its own, and nothing is submitted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kempner import slurm
from kempner.config.option import ConfigError
from kempner.config.values import did_you_mean
from kempner.history.run_history import is_run
from kempner.history.tables import aligned
from kempner.planner.cost import GPUS
from kempner.sweep import results
from kempner.sweep.cost import gpu_hours
from kempner.sweep.file import Sweep, read_sweep
from kempner.sweep.journal import Journal, locked
from kempner.sweep.look import Look, look
from kempner.sweep.points import Point, check_points, expand
from kempner.sweep.resources import profile_environment
from kempner.sweep.submit import Array, arrays_of, find, record, submit, write_points

COMMANDS = ("plan", "submit", "status", "resubmit", "cancel", "table")


def main(argv: list[str]) -> int:
    options = parse(argv)
    try:
        sweep = read_sweep(options.sweep)
        points = expand(sweep)
        if options.command == "plan":
            return plan(sweep, points, options.gpu)
        if options.command == "table":
            return results.write(sweep, points, options)
        if options.command == "status":
            return status(sweep, look(points, Journal(folder(sweep))))
        with locked(folder(sweep)) as journal:
            settle(journal)
            if options.command == "cancel":
                return cancel(journal, look(points, journal))
            return send(sweep, look(points, journal), journal, options)
    except ConfigError as error:
        print(f"sweep: error: {len(error.problems)} problem(s) with the input", file=sys.stderr)
        print("\n".join(f"  - {text}" for text in error.problems), file=sys.stderr)
    except BlockingIOError:
        fail(f"another sweep.py works in {folder(sweep)}: wait until it has ended")
    return 2


def parse(argv: list[str]) -> argparse.Namespace:
    about, _, more = (__doc__ or "").partition("\n")
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("sweep.py", None, about, more, formatter_class=as_it_is)
    parser.add_argument("sweep", type=Path, metavar="SWEEP.toml")
    parser.add_argument("command", metavar="COMMAND", help=", ".join(COMMANDS))
    parser.add_argument("--gpu", metavar="NAME", help=f"plan: one of {', '.join(GPUS)}")
    parser.add_argument("--here", action="store_true", help="(re)submit: run on this machine")
    parser.add_argument("--x", metavar="AXIS", help="table: the axis of the picture")
    parser.add_argument("--step", type=int, metavar="N", help="table: compare at step N")
    options = parser.parse_args(argv)
    if options.command not in COMMANDS:
        near = did_you_mean(options.command, COMMANDS)
        parser.error(f"{options.command}: unknown command{near}; give one of {', '.join(COMMANDS)}")
    if options.gpu is not None and options.gpu not in GPUS:
        parser.error(f"--gpu={options.gpu}: is not known; give one of {', '.join(GPUS)}")
    for name, commands in (
        ("gpu", ("plan",)), ("here", ("submit", "resubmit")), ("x", ("table",)),
        ("step", ("table",)),
    ):  # fmt: skip
        if getattr(options, name) and options.command not in commands:
            parser.error(f"--{name}: has no effect with {options.command}; leave it out")
    return options


def fail(problem: str) -> None:
    print(f"sweep: error: {problem}", file=sys.stderr)


def say(text: str) -> None:
    print(f"sweep: {text}", file=sys.stderr, flush=True)


def folder(sweep: Sweep) -> Path:
    """The sweep's own files, beside its run directories."""
    return sweep.dir / "sweep"


def plan(sweep: Sweep, points: list[Point], gpu: str | None) -> int:
    """Check every point, and say what would be submitted."""
    arrays = check(sweep, points)
    rows = [["point", "steps", "parameters", "GPUs", "GPU hours", "speed"]]
    hours: list[float | None] = []
    for point in points:
        spent, source = gpu_hours(point, GPUS[gpu] if gpu else None)
        hours.append(spent)
        rows.append([
            point.name,
            f"{point.cfg.train.max_steps:,}",
            f"{point.cfg.model.count_parameters():,}",
            str(point.resources.nodes * point.resources.gpus_per_node),
            "-" if spent is None else f"{spent:,.2f}",
            source,
        ])  # fmt: skip
    print(aligned(rows, 2, range(1, 5)))
    print(f"\n{len(points)} points in {sweep.dir}, {len(arrays)} array(s):")
    for array in arrays:
        print(f"  sbatch --array={array.indices} {' '.join(array.words)} {array.script.name}")
    known = [spent for spent in hours if spent is not None]
    cost = f"{sum(known):,.2f} GPU hours" if known else "cost unknown"
    if missing := len(hours) - len(known):
        cost += (
            f"; {missing} point(s) without a speed: give --gpu NAME for the planner's estimate, or "
            "resources.tokens_per_s"
        )
    print(cost)
    return 0


def check(sweep: Sweep, points: Sequence[Point]) -> list[Array]:
    """The arrays of these points, all of it sound. Raises ConfigError with all problems."""
    problems: list[str] = []
    arrays: list[Array] = []
    if is_run(sweep.dir):
        problems.append(f"{sweep.dir}: is the directory of a run; give the sweep another name")
    try:
        profile_environment(sweep.profile)
    except ConfigError as error:
        problems += error.problems
    try:
        arrays = arrays_of(sweep, points, slurm.max_array_size())
    except ConfigError as error:
        problems += error.problems
    try:
        check_points(points)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return arrays


def settle(journal: Journal) -> None:
    """What an earlier sweep.py could not record, because it was killed or Slurm was away."""
    for submission in journal.open:
        record(journal, submission, find(journal, submission))


def send(
    sweep: Sweep, looks: Sequence[Look], journal: Journal, options: argparse.Namespace
) -> int:  # fmt: skip
    """submit: what is new; resubmit: what has failed, unless it was tried often enough."""
    again = options.command == "resubmit"
    chosen = [each for each in looks if (each.failed if again else each.new)]
    tired = [each for each in chosen if again and each.tries >= sweep.tries]
    points = [each.point for each in chosen if each not in tired]
    for each in tired:
        say(
            f"{each.point.name}: {each.state.word} after {each.tries} tries (tries = {sweep.tries})"
        )
    if unknown := [each for each in looks if each.state.word == "unknown"]:
        say(f"{len(unknown)} point(s) left alone: {unknown[0].state.reason}")
    if not points:
        print(f"nothing to {options.command}; {counts(looks)}")
        return 1 if tired or unknown else 0
    arrays = check(sweep, points)
    rule = sweep.early_stop
    stop = {"KEMPNER_EARLY_STOP": f"{rule.after}:{rule.least}"} if rule else {}
    if options.here:
        return run_here(journal.folder, points, stop)
    if shutil.which("sbatch") is None:
        raise ConfigError(f"there is no sbatch here: {options.command} --here runs the points")
    env = profile_environment(sweep.profile) | stop
    missing = 0
    for array in arrays:
        if submit(sweep, array, journal, env, say):
            job = journal.task(array.points[0].name) or ""
            print(f"job {job.partition('_')[0]}: {len(array.points)} point(s)")
        else:
            missing += len(array.points)
    if missing:
        fail(f"{missing} point(s) were not submitted; '{options.command}' again submits them alone")
    return 1 if missing else 0


def run_here(own: Path, points: Sequence[Point], more: dict[str, str]) -> int:
    """One after another, with the same script, outside Slurm."""
    configs = write_points(own, points)
    failed = []
    for number, point in enumerate(points, 1):
        print(f"{number} of {len(points)}: {point.name}", flush=True)
        command = ["bash", str(point.resources.script), str(configs[point.name])]
        env = {**os.environ, **more, "KEMPNER_NPROC": str(point.resources.world_size)}
        code = subprocess.run(command, env=env).returncode
        if code == 130 or code < 0:
            return 130
        failed += [point.name] if code else []
    for name in failed:
        fail(f"{name} has failed")
    return 1 if failed else 0


def counts(looks: Sequence[Look]) -> str:
    number = Counter(each.state.word for each in looks)
    return ", ".join(f"{count} {word}" for word, count in number.most_common())


def status(sweep: Sweep, looks: Sequence[Look]) -> int:
    rows = [("point", "state", "step", "tries", "job", "")]
    for each in looks:
        rows.append((
            each.point.name,
            each.state.word,
            f"{each.run.step:,}/{each.point.cfg.train.max_steps:,}",
            str(each.tries),
            each.task or "-",
            f"! {each.state.reason}" if each.state.attention else each.state.reason,
        ))  # fmt: skip
    print(aligned(rows, 2, range(2, 4), wrap=True))
    print(f"{len(looks)} points: {counts(looks)}")
    return 1 if any(each.state.attention for each in looks) else 0


def cancel(journal: Journal, looks: Sequence[Look]) -> int:
    """scancel of what is queued or running; its run directories stay, and submit continues them."""
    held = [each for each in looks if each.task and each.state.word in
            ("running", "silent", "starting", "waiting")]  # fmt: skip
    if held:
        tasks = [each.task or "" for each in held]
        done = subprocess.run(["scancel", *tasks], capture_output=True, text=True)
        if done.returncode:
            fail(f"scancel failed, nothing is recorded: {done.stderr.strip()}")
            return 1
        journal.append(event="cancelled", points=[each.point.name for each in held])
    print(f"{len(held)} point(s) cancelled")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly in `| head`, as other commands do
    sys.exit(main(sys.argv[1:]))
