"""The path from the command line of tune.py to its result. No torch."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kempner.config.command_line import Command
from kempner.config.loading import to_toml
from kempner.config.option import ConfigError
from kempner.extensions.bench.measure import write_bench_status
from kempner.extensions.planner.memory import GIB, estimate_memory
from kempner.extensions.tune import report, verified
from kempner.extensions.tune.journal import TuneJournal
from kempner.extensions.tune.machine import ask_machine, machine_of
from kempner.extensions.tune.runs import Orders, Runs, trial_of, with_batch
from kempner.extensions.tune.search import Search
from kempner.extensions.tune.space import (
    MAY_BE_ALLOWED,
    Overrides,
    RankDevice,
    Space,
    shorter_batch,
)
from kempner.jobs.ranks.host_memory import available_memory
from kempner.jobs.ranks.placement import World, discover_world
from kempner.jobs.report.tables import format_duration
from kempner.jobs.system.directories import Kind, refuse_others
from kempner.jobs.system.files import try_to_write, write_atomic
from kempner.jobs.system.seal import refuse_other_file
from kempner.train import lookup
from kempner.train.configure import (
    OWN_DIRECTORY,
    check_config,
    check_world,
    load_config,
    print_warnings,
)
from kempner.train.resilience.requests import STOP_REQUEST, StopRequests
from kempner.train.sections import RunConfig

TUNE_FLAGS = {
    "help": bool,
    "check": bool,
    "nodes": int,
    "gpus-per-node": int,
    "minutes": str,
    "out": str,
    "allow": str,
    "record": bool,
}
MINUTES = 10.0
NO_BUILD = {"build": False}  # check_config() requires it, too


@dataclass(frozen=True)
class TuneOptions:
    """The flags of a tune."""

    seconds: float
    out: Path
    allow: tuple[str, ...]
    record: bool


def configure_tune(command: Command) -> tuple[RunConfig, TuneOptions]:
    """Return the configuration and the flags, checked. Raises ConfigError."""
    flags, problems = command.flags, list(command.problems)
    try:
        minutes = float(flags["minutes"] or MINUTES)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < math.inf:
        problems.append(
            f"--minutes={flags['minutes']}: must be a number over 0; write --minutes=10"
        )
    allow = tuple(filter(None, (flags["allow"] or "").split(",")))
    problems += [
        f"--allow={name}: is not known; give {', '.join(MAY_BE_ALLOWED)}"
        for name in allow
        if name not in MAY_BE_ALLOWED
    ]
    cfg = load_config(command.files, command.overrides, problems, "tune-")
    if lookup.bringer(cfg):
        raise ConfigError(
            "the batches of this run come from another program, which a tune does not start; "
            "measure it with rl.py --bench, or leave the section out"
        )
    refuse_others(cfg.run.dir, "run.dir", (Kind.STARTED,), OWN_DIRECTORY)
    out = Path(flags["out"] or f"{cfg.run.dir}/tuned.toml").expanduser()
    _refuse_out(out)
    # Checked as the first measurement will run, which must not find errors minutes later.
    trial = trial_of(command, {}, Path(cfg.run.dir, "tune/trials/0000"), 1, 1)
    if problems := check_config(trial.cfg, {**flags, **NO_BUILD}):
        raise ConfigError(dict.fromkeys(problems))
    return cfg, TuneOptions(60 * minutes, out, allow, bool(flags["record"]))


def _refuse_out(out: Path) -> None:
    """Raise ConfigError unless the file can be written at the end. Creates nothing."""
    if out.is_dir():
        raise ConfigError(f"--out = {out}: is a directory; name a file in it, {out}/tuned.toml")
    refuse_other_file(out, "--out", (report.OVERLAY_SIGN,))
    there = next(path for path in out.absolute().parents if os.path.exists(path))
    what = ""
    if not there.is_dir():
        what = f"{there} is not a directory"
    # Before a container has mounted it (container.sh), this is a directory of the image.
    elif (problem := _unwritable(there)) and "KP_UNMOUNTED" not in os.environ:
        what = f"{there} is not writable: {problem}"
    elif out.exists() and not out.is_file():
        what = "is not a regular file"
    if what:
        raise ConfigError(f"--out = {out}: {what}; name another file")


def _unwritable(folder: Path) -> str:
    """Return why no file can be made there; "" if one can."""
    try:
        try_to_write(folder)
    except OSError as error:
        return str(error.strerror)
    return ""


def tune(command: Command, cfg: RunConfig, options: TuneOptions, stop: StopRequests) -> int:
    """Measure on all ranks of this start; rank 0 decides and reports. Returns the exit
    code. Raises ConfigError."""
    world = discover_world()
    orders = Orders(Path(cfg.run.dir, "tune"))
    if world.rank:
        return orders.follow(stop.wants_to_leave)
    print_warnings(cfg)
    # The other ranks end with this code if this one raises ConfigError.
    code = 2
    try:
        code = _lead(command, cfg, options, stop, world, orders)
    finally:
        if world.size > 1:
            orders.post({"code": code})
    return code


@dataclass(frozen=True)
class TuneSubject:
    """The subject of a tune. `of_trials`: the command line of its runs, whose steps may be shorter
    than those of `command`, the one typed; `facts`: of the machine."""

    command: Command
    of_trials: Command
    run_dir: Path
    options: TuneOptions
    world: World
    facts: dict[str, Any]

    @property
    def ranks(self) -> int:
        return self.world.size * self.world.replicas


def _lead(
    command: Command,
    cfg: RunConfig,
    options: TuneOptions,
    stop: StopRequests,
    world: World,
    orders: Orders,
) -> int:
    folder, ranks = Path(cfg.run.dir, "tune"), world.size * world.replicas
    facts = ask_machine(cfg.distributed.device)
    machine = machine_of(facts, world.per_node)
    # Now, so that it is not refused after ten minutes of measurements.
    if options.record:
        verified.new_entry(command.files, (), _gpu_of_table(machine), 1, 1)
    short, of_trials = shorter_batch(cfg, ranks, world.per_node, machine), command
    if short is not None:
        _say(f"the measured steps have {short:,} sequences, not {cfg.train.sequences:,}")
        of_trials = with_batch(command, cfg, short)
        cfg = load_config(of_trials.files, of_trials.overrides, (), "tune-")
    if not machine.is_gpu:
        _refuse_large_state(cfg, ranks, world.per_node)
    near, cut = world.per_node, short is not None
    space = Space(cfg, ranks, near, machine, check_world, options.allow, cut)
    journal = TuneJournal(folder, _subject(cfg, facts, world))
    # Read once: the journal later adds this start's runs, which the clock below already counts.
    spent, began = journal.spent, time.monotonic()

    def left() -> float:
        return options.seconds - spent - (time.monotonic() - began)

    runs = Runs(of_trials, folder, journal, orders, left, stop.wants_to_leave)
    first = [*report.remembered(folder / "record.json"), *_verified(space, command, facts)]
    search = Search(space, runs, left, _known(space, first), _say)
    _say(f"{facts['device']}, world size {ranks}, torch {facts['torch']}: tokens/s of")
    for result in journal.results:
        search.take(*result)
    if journal.results:
        rest = max(0.0, left())
        _say(f"  {len(journal.results)} runs of an earlier start count; {rest:.0f} s are left")
    try:
        search.run()
    except (ConfigError, OSError):  # a full disk: keep the measurements
        if search.trials:
            _say(f"\n{report.tune_table(search)}")
        raise
    journal.close()
    took = spent + time.monotonic() - began
    subject = TuneSubject(command, of_trials, Path(cfg.run.dir), options, world, facts)
    code = _report(subject, search, took)
    write_bench_status(subject.run_dir, _state(stop, code), "a tune")
    return code


def _refuse_large_state(cfg: RunConfig, ranks: int, per_node: int) -> None:
    """Raise ConfigError if the ranks of this host would exhaust its memory, which makes the kernel
    kill other programs, too."""
    parts = estimate_memory(cfg, ranks, per_node, gpu=False).parts
    need = per_node * sum(parts.get(name, 0.0) for name in ("weights", "gradients", "optimizer"))
    if need > (there := available_memory()):
        raise ConfigError(
            f"weights, gradients and optimizer of this host's ranks need {need / GIB:.1f} GiB, and "
            f"{there / GIB:.1f} GiB are available; tune it on more hosts, or on GPUs"
        )


def _gpu_of_table(machine: RankDevice) -> str:
    if machine.spec is None:
        raise ConfigError(
            f"--record: {machine.name} is not one of the GPUs of configs/verified; leave it out"
        )
    return machine.spec.name


def _say(text: str) -> None:
    print(text, flush=True)


def _state(stop: StopRequests, code: int) -> str:
    """Return the state for the batch script: an interrupted job restarts, and continues."""
    if stop.flags[STOP_REQUEST]:
        return "stopped"
    if stop.wants_to_leave():
        return "interrupted"
    return "failed" if code else "done"


def _subject(cfg: RunConfig, facts: dict[str, Any], world: World) -> str:
    """Return a hash of what a journal's results depend on: this configuration and code on
    such a machine."""
    # Not the host's name: a requeued job continues with its results on another node of its kind.
    names = ("device", "memory_gib", "driver", "torch", "cuda", "cpus", "commit")
    of_machine = [facts[name] for name in names]
    text = f"{to_toml(cfg)}{of_machine}{world.size}/{world.per_node}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _known(space: Space, candidates: list[Overrides]) -> list[Overrides]:
    """Return the candidates that change only levers of this space: a record may be old, or
    of another configuration."""
    keys = {key for axis in space.axes for key in axis.keys}
    return [one for one in candidates if one.keys() <= keys]


def _verified(space: Space, command: Command, facts: dict[str, Any]) -> list[Overrides]:
    """Return the candidates in the table of verified figures for this shape and GPU."""
    spec = space.machine.spec
    entry = verified.read_entry(verified.shape_of(command), spec.name) if spec else None
    if entry is None:
        return []
    try:
        cfg = load_config(command.files, [*command.overrides, *entry.changes])
    except ConfigError:  # the options of this command conflict with the entry's
        return []
    keys = [key for axis in space.axes for key in axis.keys]
    values = {key: getattr(getattr(cfg, key.split(".")[0]), key.split(".")[1]) for key in keys}
    return [space.canonical(values)]


def _keep_earlier(out: Path, text: str) -> None:
    """Keep an earlier tune's result under another name, if it differs in a value."""
    with contextlib.suppress(FileNotFoundError):
        before = out.read_text()
        # The comments contain date and speed, which always differ.
        if report.values_in(before) != report.values_in(text):
            when = time.strftime("%Y%m%d-%H%M%S", time.localtime(out.stat().st_mtime))
            kept = out.with_name(f"{out.stem}-{when}{out.suffix}")
            out.rename(kept)
            _say(f"the earlier {out} differs, and is now {kept}")


def _report(subject: TuneSubject, search: Search, took: float) -> int:
    """Print the table and write the files; returns the exit code."""
    best, tokens, facts, out = search.best, search.space.tokens, subject.facts, subject.options.out
    _say(f"\n{report.tune_table(search)}")
    record = subject.run_dir / "tune/record.json"
    about = {"time": time.time(), "command": shlex.join(sys.argv), "machine": facts}
    # Even if no candidate has finished: it contains the reason of each.
    report.write_record(record, search, about, subject.ranks)
    if best is None:
        why = "the reasons are above" if search.trials else "give the same command again to go on"
        _say(f"\nno candidate finished: {why}")
        return 1
    driver = f"driver {facts['driver']}, " if facts["driver"] else ""
    lines = [
        f"{shlex.join(subject.of_trials.files)} on {subject.ranks} x {facts['device']}, "
        f"torch {facts['torch']}, {driver}commit {facts['commit']}",
        f"{time.strftime('%Y-%m-%d')}: {tokens / best.step:,.0f} tokens/s +- "
        f"{best.error / best.step:.1%}, {best.gib:.2f} GiB; of {len(search.trials)} candidates "
        f"in {format_duration(took)}",
    ]
    text = report.overlay_text(best.overrides, lines)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _keep_earlier(out, text)
        write_atomic(out, text)
    except OSError as error:  # do not lose a result that took long to find
        _say(f"WARNING: --out = {out}: cannot be written: {error.strerror}")
        out = subject.run_dir / "tuned.toml"
        write_atomic(out, text)
    itself = search.trials.get("as configured")
    if best.overrides and itself and itself.seconds:
        _say(f"\nthe best is {itself.step / best.step:.2f} times as fast as the configuration")
    elif not best.overrides:
        _say("\nthe configuration is already the best")
    if subject.options.record:
        place = verified.record(subject.of_trials, best, search.space, facts, subject.world)
        _say(f"verified: {place or 'the recorded figure is not slower, and stays'}")
    use = report.command_with(subject.command, best.overrides, out, subject.world)
    _say(f"record: {record}\nuse it with:\n    {use}")
    return 0
