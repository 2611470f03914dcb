"""Run many runs from one file: plan them, submit them as job arrays, and compare the results.

    python scripts/sweep.py SWEEP.toml plan [--gpu H100]  check every point and print the cost
    python scripts/sweep.py SWEEP.toml submit             submit new points; returns at once
    python scripts/sweep.py SWEEP.toml status             print the state of each point
    python scripts/sweep.py SWEEP.toml resubmit           submit only failed points
    python scripts/sweep.py SWEEP.toml cancel             cancel what is queued or running
    python scripts/sweep.py SWEEP.toml table              the results as text, CSV and a picture

Without Slurm, `submit --here` runs the points on this machine, one after another.
docs/extensions/sweeps.md has the format of the file. Exit code 1: something was not submitted, or
has failed; 2: bad input, one line per problem, and nothing is submitted.
"""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(__file__))  # PYTHONSAFEPATH leaves it out
    import first

    first.start_program()  # before anything that may be missing or slow

import argparse
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kempner.config.command_line import argument_parser
from kempner.config.option import ConfigError
from kempner.config.values import did_you_mean
from kempner.extensions.planner.gpus import GPUS
from kempner.extensions.sweep import results
from kempner.extensions.sweep.cost import Hours, gpu_hours
from kempner.extensions.sweep.file import Sweep, read_sweep
from kempner.extensions.sweep.here import run_here
from kempner.extensions.sweep.journal import Journal, locked_journal
from kempner.extensions.sweep.keys import PointValues
from kempner.extensions.sweep.look import PointStatus, look_at_points
from kempner.extensions.sweep.points import SweepPoint, expand_points
from kempner.extensions.sweep.propose import proposal_room, propose_values, proposed_points
from kempner.extensions.sweep.resources import profile_environment
from kempner.extensions.sweep.submit import (
    held_arrays,
    plan_arrays,
    settle_journal,
    submit_array,
    throttle_array,
)
from kempner.jobs.records.run_history import is_run
from kempner.jobs.report.tables import align_table
from kempner.jobs.slurm import plain_environment
from kempner.jobs.system.directories import Kind, describe_directory, directory_kind, refuse_others
from kempner.jobs.system.front_door import interruptible, run_program

JOURNAL_PATIENCE_S = 120  # with [propose]: jobs that end at the same time also submit
COMMANDS = ("plan", "submit", "status", "resubmit", "cancel", "table")


def main(argv: list[str]) -> int:
    options = parse(argv)
    sweep = read_sweep(options.sweep)
    refuse_directory(sweep)
    has_begun = directory_kind(sweep_folder(sweep)) is Kind.SWEEP or options.command == "submit"
    interruptible()
    try:
        journal = Journal(sweep_folder(sweep))
        points = points_of(sweep, journal)
        if options.command == "plan":
            return print_points(sweep, points, journal, options.gpu)
        if options.command == "table":
            return results.write_results(sweep, points, options, has_begun)
        if options.command == "status":
            return print_sweep(sweep, look_at_points(points, journal))
        if options.from_job and sweep.propose is None:  # the file was edited since
            return 0
        wait = JOURNAL_PATIENCE_S if sweep.propose else 0
        lock = (
            locked_journal(sweep_folder(sweep), wait)
            if has_begun
            else contextlib.nullcontext(journal)
        )
        with lock as journal:
            settle_all(journal, options)
            if sweep.propose:  # another process may have proposed some
                points = points_of(sweep, journal)
            if options.command == "cancel":
                return cancel_sweep(journal, look_at_points(points, journal))
            if sweep.propose and options.command == "submit":
                return print_search(sweep, points, journal, options)
            return send_arrays(sweep, look_at_points(points, journal), journal, options)
    except BlockingIOError:
        where = sweep_folder(sweep)
        raise ConfigError(f"another sweep.py works in {where}: wait until it has ended") from None
    except BrokenPipeError:  # the reader of our output has left
        raise
    except OSError as error:  # a full disk: an unrecorded array is looked up by its name
        why = f"{error.filename or sweep_folder(sweep)}: {error.strerror or error}"
        print_failure(f"{why}; fix that, and run it again: nothing is submitted twice")
        return 1
    except KeyboardInterrupt:
        print_failure("interrupted; the next command finds the jobs that Slurm has accepted")
        return 130


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argument_parser("sweep.py", __doc__)
    parser.add_argument("sweep", type=Path, metavar="SWEEP.toml")
    parser.add_argument("command", metavar="COMMAND", help=", ".join(COMMANDS))
    parser.add_argument("--gpu", metavar="NAME", help=f"plan: one of {', '.join(GPUS)}")
    parser.add_argument("--here", action="store_true", help="(re)submit: run on this machine")
    parser.add_argument("--from-job", action="store_true", help="submit: used by a job at its end")
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
        ("step", ("table",)), ("from_job", ("submit",)),
    ):  # fmt: skip
        if getattr(options, name) and options.command not in commands:
            name = name.replace("_", "-")
            parser.error(f"--{name}: has no effect with {options.command}; leave it out")
    return options


def print_failure(problem: str) -> None:
    print(f"sweep: error: {problem}", file=sys.stderr)


def print_status(text: str) -> None:
    print(f"sweep: {text}", file=sys.stderr, flush=True)


def sweep_folder(sweep: Sweep) -> Path:
    """Return the directory of the sweep's own files, beside its run directories."""
    return sweep.dir / "sweep"


def refuse_directory(sweep: Sweep) -> None:
    """Raise ConfigError unless DIR/NAME is a sweep, or does not exist yet, or holds a few notes."""
    place, fix = sweep.dir, "give the sweep another name, or another dir"
    above = next(path for path in place.absolute().parents if os.path.lexists(path))
    if not above.is_dir():
        raise ConfigError(
            f"{sweep.file}: dir/name = {place}: {above} is {describe_directory(above)}; {fix}"
        )
    refuse_others(sweep_folder(sweep), f"{sweep.file}: dir/name/sweep", (Kind.SWEEP,), fix)
    kinds: tuple[Kind, ...] = (Kind.STARTED, Kind.NOTES)
    if directory_kind(sweep_folder(sweep)) is Kind.SWEEP:
        kinds = (Kind.SWEEP,)
    elif directory_kind(sweep_folder(sweep)) is Kind.EMPTY and os.listdir(place) == ["sweep"]:
        return  # submit was killed
    elif is_run(place):
        kinds = ()
    refuse_others(place, f"{sweep.file}: dir/name", kinds, fix)


def points_of(sweep: Sweep, journal: Journal) -> list[SweepPoint]:
    """Return all points; with [propose] those proposed so far."""
    return proposed_points(sweep, journal) if sweep.propose else expand_points(sweep)


def settle_all(journal: Journal, options: argparse.Namespace) -> None:
    for job in settle_journal(journal, options.here):
        print_status(f"job {job}: Slurm registered it late; its pending tasks are cancelled")


def next_points(
    sweep: Sweep, looks: Sequence[PointStatus], journal: Journal, most: int | None = None
) -> dict[str, PointValues]:  # fmt: skip
    """Return the values of the points that follow from the results so far, by name ([propose])."""
    count, why = proposal_room(sweep, looks)
    if why:
        print_status(why)
    count = count if most is None else min(count, most)
    proposals = propose_values(sweep, looks, journal, count) if count else {}
    if len(proposals) < count:
        print_status(
            f"{len(proposals)} new point(s): the ranges contain no others that meet the conditions"
        )
    return proposals


def print_points(sweep: Sweep, points: list[SweepPoint], journal: Journal, gpu: str | None) -> int:
    """Check every point, and print what would be submitted."""
    if sweep.propose:  # only in memory
        journal.proposed |= next_points(sweep, look_at_points(points, journal), journal)
        points = proposed_points(sweep, journal)
    arrays = plan_arrays(sweep, points)
    rows = [["point", "steps", "parameters", "GPUs", "GPU hours", "speed"]]
    hours: list[Hours | None] = []
    for point in points:
        estimate, source = gpu_hours(point, GPUS[gpu] if gpu else None)
        hours.append(estimate)
        rows.append([
            point.name,
            f"{point.cfg.train.max_steps:,}",
            f"{point.cfg.model.count_parameters():,}",
            str(point.resources.nodes * point.resources.gpus_per_node),
            "-" if estimate is None else str(estimate),
            source,
        ])  # fmt: skip
    print(align_table(rows, 2, range(1, 5)))
    print(f"\n{number_of(sweep, points)} points in {sweep.dir}, {len(arrays)} array(s):")
    for array in arrays:
        words = shlex.join([*array.words, array.script.name, *array.program[1:]])
        print(f"  sbatch --array={array.indices} {words}")
    estimates = [estimate for estimate in hours if estimate is not None]
    total = Hours(sum(each.least for each in estimates), sum(each.most for each in estimates))
    cost = f"{total} GPU hours" if estimates else "cost unknown"
    missing = len(hours) - len(estimates)
    if missing:
        cost += (
            f"; {missing} point(s) without a speed: give --gpu NAME for the planner's estimate, or "
            "resources.tokens_per_s"
        )
    print(cost)
    return 0


def number_of(sweep: Sweep, points: Sequence[object]) -> str:
    """Return the number of points; with [propose] also the final number."""
    return f"{len(points)} of {sweep.propose.points}" if sweep.propose else str(len(points))


def print_search(
    sweep: Sweep, points: list[SweepPoint], journal: Journal, options: argparse.Namespace
) -> int:
    """Submit with [propose]: the next points, too; with --here each uses all earlier results."""
    code = 0
    while True:
        looks = look_at_points(points, journal)
        if options.from_job and any(each.state.word == "cancelled" for each in looks):
            print_status("points were cancelled: nothing is proposed until you submit again")
            return 0
        more = next_points(sweep, looks, journal, 1 if options.here else None)
        journal.proposed |= more
        points = proposed_points(sweep, journal)
        # It raises ConfigError for values that do not fit, before they are recorded.
        plan_arrays(sweep, [point for point in points if point.name in more])
        for name, values in more.items():
            # Before the submission: once a job has a point of this name, its values must be known.
            journal.append(event="proposed", point=name, values=values)
        looks = look_at_points(points, journal)
        code = max(code, send_arrays(sweep, looks, journal, options))
        if not options.here or code == 130 or not any(each.new for each in looks):
            return code
        if any(each.new for each in look_at_points(points, journal)):  # it did not start
            return code


def send_arrays(
    sweep: Sweep, looks: Sequence[PointStatus], journal: Journal, options: argparse.Namespace
) -> int:  # fmt: skip
    """Submit new points, or resubmit failed ones that have tries left."""
    again = options.command == "resubmit"
    candidates = [each for each in looks if (each.failed if again else each.new)]
    tired = [each for each in candidates if again and each.tries >= sweep.tries]
    points = [each.point for each in candidates if each not in tired]
    for each in tired:
        print_status(
            f"{each.point.name}: {each.state.word} after {each.tries} tries (tries = {sweep.tries})"
        )
    unknown = [each for each in looks if each.state.word == "unknown"]
    if unknown:
        print_status(
            f"{len(unknown)} point(s) left alone: {unknown[0].state.reason}; run it again when "
            "Slurm answers, or with --here to run them on this machine"
        )
    if not points:
        print(f"nothing to {options.command}; {count_states(looks)}")
        return 1 if tired or unknown else 0
    # Counted first: the next points of [propose] must also fit.
    slurm_arrays = held_arrays(looks) if sweep.max_running and not sweep.propose else []
    arrays = plan_arrays(sweep, points, [] if options.here else slurm_arrays)
    rule = sweep.early_stop
    beside = {"KEMPNER_EARLY_STOP": f"{rule.after}:{rule.least}"} if rule else {}
    if options.here:
        return run_here(journal.folder, points, beside)
    if shutil.which("sbatch") is None:
        raise ConfigError(f"this host has no sbatch: {options.command} --here runs the points")
    if sweep.propose:
        beside["KEMPNER_PROPOSE"] = str(sweep.file.absolute())
        beside["KEMPNER_PROPOSE_PYTHON"] = sys.executable
    env = profile_environment(sweep.profile) | beside
    missing = 0
    for array in arrays:
        if array.job:
            problem = throttle_array(array)
            if problem:
                print_status(f"job {array.job}: its limit is unchanged: {problem}")
        else:
            taken = submit_array(sweep, array, journal, env, print_status)
            for part in taken:
                print(f"job {part.job}: {len(part.points)} point(s)")
            missing += len(array.points) - sum(len(part.points) for part in taken)
    if missing:
        fix = f"'{options.command}' again submits them alone, and with --here runs them here"
        print_failure(f"{missing} point(s) were not submitted; {fix}")
    return 1 if missing else 0


def count_states(looks: Sequence[PointStatus]) -> str:
    number = Counter(each.state.word for each in looks)
    return ", ".join(f"{count} {word}" for word, count in number.most_common()) or "none yet"


def print_sweep(sweep: Sweep, looks: Sequence[PointStatus]) -> int:
    rows = [("point", "state", "step", "tries", "job", "")]
    for each in looks:
        rows.append((
            each.point.name,
            each.state.word,
            f"{each.run.step_text}/{each.point.cfg.train.max_steps:,}",
            str(each.tries),
            each.task or "-",
            f"! {each.state.reason}" if each.state.attention else each.state.reason,
        ))  # fmt: skip
    print(align_table(rows, 2, range(2, 4), wrap=True))
    print(f"{number_of(sweep, looks)} points: {count_states(looks)}")
    return 1 if any(each.state.attention for each in looks) else 0


def cancel_sweep(journal: Journal, looks: Sequence[PointStatus]) -> int:
    """Cancel what is queued or running; its run directories stay, and submit continues them."""
    active_points = [each for each in looks if each.task and each.state.word in
            ("running", "silent", "starting", "waiting")]  # fmt: skip
    left: set[str] = set()
    if active_points:
        tasks = sorted({each.task or "" for each in active_points})
        env = plain_environment()
        done = subprocess.run(["scancel", *tasks], capture_output=True, text=True, env=env)
        if done.returncode:
            # scancel names the jobs that it has not cancelled, unless it has cancelled none.
            left = {*re.findall(r"\b\d+(?:_\d+)?\b", done.stderr)} & {*tasks} or {*tasks}
            print_failure(f"scancel failed for {', '.join(sorted(left))}: {done.stderr.strip()}")
    points = [each.point.name for each in active_points if each.task not in left]
    if points:
        journal.append(event="cancelled", points=points)
    print(f"{len(points)} point(s) cancelled")
    return 1 if left else 0


if __name__ == "__main__":
    run_program(main)
