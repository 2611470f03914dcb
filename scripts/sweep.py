"""Run many runs from one file: plan them, submit them as job arrays, and compare the results.

    python scripts/sweep.py SWEEP.toml plan [--gpu H100]  check every point, and say what it costs
    python scripts/sweep.py SWEEP.toml submit             what is new; returns at once
    python scripts/sweep.py SWEEP.toml status             how each point stands
    python scripts/sweep.py SWEEP.toml resubmit           what has failed, and nothing else
    python scripts/sweep.py SWEEP.toml cancel             what is queued or running
    python scripts/sweep.py SWEEP.toml table              the results: text, CSV and a picture

Without Slurm, `submit --here` runs the points on this machine, one after another.
docs/extensions/sweeps.md has the format of the file. Exit code 1: something was not submitted, or
has failed; 2: bad input, every problem on a line of its own, and nothing is submitted.
"""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(__file__))  # PYTHONSAFEPATH leaves it out
    import first

    first.begin()  # before anything that may be missing or slow

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kempner.config.command_line import argument_parser
from kempner.config.option import ConfigError
from kempner.config.values import did_you_mean
from kempner.directories import Kind, describe, kind_of, refuse_others
from kempner.front_door import interruptible, run_program
from kempner.history.run_history import is_run
from kempner.history.tables import aligned
from kempner.planner.cost import GPUS
from kempner.slurm import plain_environment
from kempner.sweep import results
from kempner.sweep.cost import Hours, gpu_hours
from kempner.sweep.file import Sweep, read_sweep
from kempner.sweep.here import run_here
from kempner.sweep.journal import Journal, locked
from kempner.sweep.keys import Values
from kempner.sweep.look import Look, look
from kempner.sweep.points import Point, expand
from kempner.sweep.propose import propose, proposed, room
from kempner.sweep.resources import profile_environment
from kempner.sweep.submit import check, held_arrays, settle, submit, throttle

PATIENCE_S = 120  # with [propose]: jobs that end at the same time submit, too
COMMANDS = ("plan", "submit", "status", "resubmit", "cancel", "table")


def main(argv: list[str]) -> int:
    options = parse(argv)
    sweep = read_sweep(options.sweep)
    refuse_directory(sweep)
    begun = kind_of(folder(sweep)) is Kind.SWEEP or options.command == "submit"
    interruptible()
    try:
        journal = Journal(folder(sweep))
        points = points_of(sweep, journal)
        if options.command == "plan":
            return plan(sweep, points, journal, options.gpu)
        if options.command == "table":
            return results.write(sweep, points, options, begun)
        if options.command == "status":
            return status(sweep, look(points, journal))
        if options.from_job and sweep.propose is None:  # the file was edited since
            return 0
        wait = PATIENCE_S if sweep.propose else 0
        lock = locked(folder(sweep), wait) if begun else contextlib.nullcontext(journal)
        with lock as journal:
            settle_all(journal, options)
            if sweep.propose:  # another one may have proposed some
                points = points_of(sweep, journal)
            if options.command == "cancel":
                return cancel(journal, look(points, journal))
            if sweep.propose and options.command == "submit":
                return search(sweep, points, journal, options)
            return send(sweep, look(points, journal), journal, options)
    except BlockingIOError:
        where = folder(sweep)
        raise ConfigError(f"another sweep.py works in {where}: wait until it has ended") from None
    except BrokenPipeError:  # whoever reads what this prints has left
        raise
    except OSError as error:  # a full disk: an array that was not recorded is asked for by its name
        why = f"{error.filename or folder(sweep)}: {error.strerror or error}"
        fail(f"{why}; mend that, and call it again: nothing is submitted twice")
        return 1
    except KeyboardInterrupt:
        fail("interrupted; what Slurm has taken by then is found by the next command")
        return 130


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argument_parser("sweep.py", __doc__)
    parser.add_argument("sweep", type=Path, metavar="SWEEP.toml")
    parser.add_argument("command", metavar="COMMAND", help=", ".join(COMMANDS))
    parser.add_argument("--gpu", metavar="NAME", help=f"plan: one of {', '.join(GPUS)}")
    parser.add_argument("--here", action="store_true", help="(re)submit: run on this machine")
    parser.add_argument("--from-job", action="store_true", help="submit: a job's own, at its end")
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


def fail(problem: str) -> None:
    print(f"sweep: error: {problem}", file=sys.stderr)


def say(text: str) -> None:
    print(f"sweep: {text}", file=sys.stderr, flush=True)


def folder(sweep: Sweep) -> Path:
    """Return the directory of the sweep's own files, beside its run directories."""
    return sweep.dir / "sweep"


def refuse_directory(sweep: Sweep) -> None:
    """Raise ConfigError unless DIR/NAME is a sweep, or does not exist yet, or holds a few notes."""
    place, fix = sweep.dir, "give the sweep another name, or another dir"
    above = next(path for path in place.absolute().parents if os.path.lexists(path))
    if not above.is_dir():
        raise ConfigError(f"{sweep.file}: dir/name = {place}: {above} is {describe(above)}; {fix}")
    refuse_others(folder(sweep), f"{sweep.file}: dir/name/sweep", (Kind.SWEEP,), fix)
    kinds: tuple[Kind, ...] = (Kind.STARTED, Kind.NOTES)
    if kind_of(folder(sweep)) is Kind.SWEEP:
        kinds = (Kind.SWEEP,)
    elif kind_of(folder(sweep)) is Kind.EMPTY and os.listdir(place) == ["sweep"]:
        return  # submit was killed
    elif is_run(place):
        kinds = ()
    refuse_others(place, f"{sweep.file}: dir/name", kinds, fix)


def points_of(sweep: Sweep, journal: Journal) -> list[Point]:
    """Return all points; with [propose] those that are proposed so far."""
    return proposed(sweep, journal) if sweep.propose else expand(sweep)


def settle_all(journal: Journal, options: argparse.Namespace) -> None:
    for job in settle(journal, options.here):
        say(f"job {job}: Slurm registered it late; what waits of it is cancelled")


def next_points(
    sweep: Sweep, looks: Sequence[Look], journal: Journal, most: int | None = None
) -> dict[str, Values]:  # fmt: skip
    """Return the values of the points that follow from the results so far, by name ([propose])."""
    count, why = room(sweep, looks)
    if why:
        say(why)
    count = count if most is None else min(count, most)
    found = propose(sweep, looks, journal, count) if count else {}
    if len(found) < count:
        say(f"{len(found)} new point(s): the ranges hold no others that fulfil the conditions")
    return found


def plan(sweep: Sweep, points: list[Point], journal: Journal, gpu: str | None) -> int:
    """Check every point, and say what would be submitted."""
    if sweep.propose:  # in memory alone
        journal.proposed |= next_points(sweep, look(points, journal), journal)
        points = proposed(sweep, journal)
    arrays = check(sweep, points)
    rows = [["point", "steps", "parameters", "GPUs", "GPU hours", "speed"]]
    hours: list[Hours | None] = []
    for point in points:
        spent, source = gpu_hours(point, GPUS[gpu] if gpu else None)
        hours.append(spent)
        rows.append([
            point.name,
            f"{point.cfg.train.max_steps:,}",
            f"{point.cfg.model.count_parameters():,}",
            str(point.resources.nodes * point.resources.gpus_per_node),
            "-" if spent is None else str(spent),
            source,
        ])  # fmt: skip
    print(aligned(rows, 2, range(1, 5)))
    print(f"\n{number_of(sweep, points)} points in {sweep.dir}, {len(arrays)} array(s):")
    for array in arrays:
        words = " ".join([*array.words, array.script.name, *array.program[1:]])
        print(f"  sbatch --array={array.indices} {words}")
    known = [spent for spent in hours if spent is not None]
    total = Hours(sum(each.least for each in known), sum(each.most for each in known))
    cost = f"{total} GPU hours" if known else "cost unknown"
    missing = len(hours) - len(known)
    if missing:
        cost += (
            f"; {missing} point(s) without a speed: give --gpu NAME for the planner's estimate, or "
            "resources.tokens_per_s"
        )
    print(cost)
    return 0


def number_of(sweep: Sweep, points: Sequence[object]) -> str:
    """Return the number of points; with [propose] also how many there will be."""
    return f"{len(points)} of {sweep.propose.points}" if sweep.propose else str(len(points))


def search(sweep: Sweep, points: list[Point], journal: Journal, options: argparse.Namespace) -> int:
    """Submit with [propose]: the next points, too; with --here each follows from all before it."""
    code = 0
    while True:
        looks = look(points, journal)
        if options.from_job and any(each.state.word == "cancelled" for each in looks):
            say("points were cancelled: nothing is proposed until you submit again")
            return 0
        more = next_points(sweep, looks, journal, 1 if options.here else None)
        journal.proposed |= more
        points = proposed(sweep, journal)
        check(sweep, [point for point in points if point.name in more])
        for name, values in more.items():
            journal.append(event="proposed", point=name, values=values)
        looks = look(points, journal)
        code = max(code, send(sweep, looks, journal, options))
        if not options.here or code == 130 or not any(each.new for each in looks):
            return code
        if any(each.new for each in look(points, journal)):  # it did not even begin
            return code


def send(
    sweep: Sweep, looks: Sequence[Look], journal: Journal, options: argparse.Namespace
) -> int:  # fmt: skip
    """Submit what is new, or resubmit what has failed, unless it was tried often enough."""
    again = options.command == "resubmit"
    chosen = [each for each in looks if (each.failed if again else each.new)]
    tired = [each for each in chosen if again and each.tries >= sweep.tries]
    points = [each.point for each in chosen if each not in tired]
    for each in tired:
        say(
            f"{each.point.name}: {each.state.word} after {each.tries} tries (tries = {sweep.tries})"
        )
    unknown = [each for each in looks if each.state.word == "unknown"]
    if unknown:
        say(
            f"{len(unknown)} point(s) left alone: {unknown[0].state.reason}; call it again when "
            "Slurm answers, or with --here to run them on this machine"
        )
    if not points:
        print(f"nothing to {options.command}; {counts(looks)}")
        return 1 if tired or unknown else 0
    # Counted first: the next points of [propose] have to fit in, too.
    held = held_arrays(looks) if sweep.max_running and not sweep.propose else []
    arrays = check(sweep, points, [] if options.here else held)
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
            problem = throttle(array)
            if problem:
                say(f"job {array.job}: its limit stays as it is: {problem}")
        else:
            taken = submit(sweep, array, journal, env, say)
            for part in taken:
                print(f"job {part.job}: {len(part.points)} point(s)")
            missing += len(array.points) - sum(len(part.points) for part in taken)
    if missing:
        fix = f"'{options.command}' again submits them alone, and with --here runs them here"
        fail(f"{missing} point(s) were not submitted; {fix}")
    return 1 if missing else 0


def counts(looks: Sequence[Look]) -> str:
    number = Counter(each.state.word for each in looks)
    return ", ".join(f"{count} {word}" for word, count in number.most_common()) or "none yet"


def status(sweep: Sweep, looks: Sequence[Look]) -> int:
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
    print(aligned(rows, 2, range(2, 4), wrap=True))
    print(f"{number_of(sweep, looks)} points: {counts(looks)}")
    return 1 if any(each.state.attention for each in looks) else 0


def cancel(journal: Journal, looks: Sequence[Look]) -> int:
    """Cancel what is queued or running; its run directories stay, and submit continues them."""
    held = [each for each in looks if each.task and each.state.word in
            ("running", "silent", "starting", "waiting")]  # fmt: skip
    if held:
        tasks = sorted({each.task or "" for each in held})
        env = plain_environment()
        done = subprocess.run(["scancel", *tasks], capture_output=True, text=True, env=env)
        if done.returncode:
            fail(f"scancel failed, nothing is recorded: {done.stderr.strip()}")
            return 1
        journal.append(event="cancelled", points=[each.point.name for each in held])
    print(f"{len(held)} point(s) cancelled")
    return 0


if __name__ == "__main__":
    run_program(main)
