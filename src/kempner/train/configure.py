"""Loading of a configuration from the command line, checked against its files and its world."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kempner.checkpoint import history, ownership
from kempner.checkpoint.history import has_checkpoint
from kempner.config.command_line import parse_command
from kempner.config.loading import SectionValues, load_config_files, to_toml
from kempner.config.option import ConfigError
from kempner.jobs.ranks.placement import discover_world
from kempner.jobs.system.directories import Kind, read_run_id, refuse_others
from kempner.jobs.system.front_door import (
    explain_os_error,
    how_to_run,
    list_problems,
    print_problems,
    run_program,
)
from kempner.train import checks as combinations
from kempner.train import lookup
from kempner.train.parts import fixed_facts, open_data, open_mixture
from kempner.train.progress import Progress
from kempner.train.resilience.requests import StopRequests
from kempner.train.sections import RunConfig, check_batch

if TYPE_CHECKING:
    from kempner.jobs.system.front_door import BadPortRange, NoFreePort
    from kempner.train.extensions import Extension, Variant

CONFIGURE_USAGE = """\
{command} CONFIG.toml [MORE.toml ...] [--section.key=value ...]

  --help [SECTION ...] [--all]    these options; those of a section; those of all sections
  --check                         print the resolved configuration as TOML and exit
  --nodes N --gpus-per-node G     with --check: whether it fits N hosts of G processes each
  --build                         with these: build the model as one of their ranks, without memory
  --bench                         measure the configuration, with fake data: [bench]
"""
RANK_0_SPEAKS_S = 5.0
OWN_DIRECTORY = "give one of its own: --run.dir=runs/NAME"
CONFIGURE_FLAGS = {
    "help": bool,
    "all": bool,
    "check": bool,
    "build": bool,
    "bench": bool,
    "nodes": int,
    "gpus-per-node": int,
}
# The first name is the one to set: torch 2.9 ignores the newer one for CUDA
# (pytorch/pytorch#183387), and 2.9 to 2.13 all read the first.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def configure(
    argv: Sequence[str], stop: StopRequests, program: type[Extension] | None = None
) -> RunConfig:
    """Return the configuration of a command line, checked against the files that it names.
    `program`: the extension whose program is running.

    Exits for --help and --check (code 0) and for bad input (code 2, one problem per line).
    """
    command = parse_command(argv, CONFIGURE_FLAGS)
    flags = command.flags
    usage = CONFIGURE_USAGE.format(command=how_to_run(program.script if program else "train.py"))
    if flags["help"]:
        from kempner.train.help import help_of

        run_program(lambda _: print(help_of(argv, program, usage)))
    if not argv:
        print(f"usage: {usage}", file=sys.stderr)
        sys.exit(2)
    command.problems.extend(["--all: goes with --help"] * flags["all"])
    only = flags["check"] or flags["build"]
    asks = [name for name in ("nodes", "gpus-per-node") if flags[name] is not None]
    command.problems.extend(f"--{name}: goes with --check or --build" for name in asks * (not only))
    try:
        cfg = load_config(
            command.files, command.overrides, command.problems, "bench-" if flags["bench"] else ""
        )
        variants: list[Variant] = []
        if flags["bench"]:
            variants = lookup.of_flag("bench").variants(command, cfg)
        configs = [each.cfg for each in variants] or [cfg]
        problems = [text for each in configs for text in check_config(each, flags, program)]
        if problems:
            raise ConfigError(dict.fromkeys(problems))
        if flags["build"]:
            builder = lookup.of_flag("build")
            for each in configs:
                print(builder.build(each, *world_of_flags(flags)), file=sys.stderr)
    except ConfigError as error:
        reject_input(error, stop)
    if flags["check"] or not (only or "KEMPNER_ATTEMPT_ID" in os.environ or discover_world().rank):
        print_warnings(cfg)  # once: the scripts have already run --check
    if flags["check"]:
        from kempner.train.resilience.save_notes import warn_of_job

        warn_of_job(cfg, world_of_flags(flags) if flags["nodes"] else None, count_replicas)
    if only:
        run_program(lambda _: print(to_toml(cfg), end=""))
    set_allocator()
    if flags["bench"]:
        sys.exit(lookup.of_flag("bench").measure(cfg, variants, stop.wants_to_leave))
    return cfg


def set_allocator() -> None:
    """Configure PyTorch's GPU memory allocator for this process, unless the user has. Must run
    before torch is imported. Not set for the whole job, because cudaIpcGetMemHandle, which vLLM
    uses with tensor parallelism, cannot share expandable segments (vllm-project/vllm#42609)."""
    if not any(os.environ.get(name) for name in ALLOCATOR):
        # Expandable segments fragment less, so that a run near its memory limit still fits.
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def check_config(
    cfg: RunConfig, flags: Mapping[str, Any], program: type[Extension] | None = None
) -> list[str]:
    """List the problems of a configuration with its program, its files and its world."""
    only = flags["check"] or flags["build"]
    used = lookup.used(cfg)
    if program and not any(type(each) is program for each in used):
        used.append(program())
    if wrong := [t for each in used if (t := each.program_problem(cfg, type(each) is program))]:
        return wrong
    # --check has no ranks and checks what rank 0 would.
    problems = check_inputs(cfg, 0 if only else discover_world().rank, only)
    if cfg.train.fp8 != "none" or cfg.train.attention != "auto":
        from kempner.train import levers

        problems += levers.package_problems(cfg) if not only or levers.on_a_node() else []
    if only and cfg.train.compile:
        from kempner.jobs.system import compiler

        # The batch script runs on the first node.
        problems += compiler.problems_of_node(cfg.distributed.device)
    if flags["nodes"] is not None or flags["gpus-per-node"] is not None:
        problems += check_world(cfg, *world_of_flags(flags))
    elif not only:
        world = discover_world()
        problems += check_world(cfg, world.size * world.replicas, world.per_node)
    return problems


def world_of_flags(flags: Mapping[str, Any]) -> tuple[int, int]:
    """Return the total number of ranks and the ranks per node given on the command line."""
    nodes, per_node = flags["nodes"] or 1, flags["gpus-per-node"] or 1
    return nodes * per_node, per_node


def reject_input(
    error: ConfigError | BadPortRange | NoFreePort,
    stop: StopRequests,
    leave: Callable[[int], NoReturn] = sys.exit,
) -> NoReturn:
    """Report every problem on standard error and exit with code 2, or 1 for NoFreePort. `leave`
    ends the process; once the ranks have met, it must skip finalisers, because those of torch's
    threads may abort the process.

    Rank 0 reports for all; the others exit later. srun or torchrun terminates them as soon as rank
    0 exits, and a rank that is not terminated reports its own problem.
    """
    with contextlib.suppress(ConfigError):
        if discover_world().rank:
            # Until now StopRequests has caught it.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(RANK_0_SPEAKS_S)
            if stop.wants_to_leave():  # terminated before that
                leave(2)
    with contextlib.suppress(OSError):  # a closed pipe
        sys.stdout.flush()
    name = Path(sys.argv[0]).stem
    from kempner.jobs.system.front_door import NoFreePort

    if isinstance(error, NoFreePort):  # a port may be free at the next start
        print_problems(name, [error.strerror])
        leave(1)
    problems = error.problems if isinstance(error, ConfigError) else [error.strerror]
    # Always a list: the batch script records its first line as the reason for a refused start.
    leave(print_problems(name, [list_problems(problems)]))


def load_config(
    files: Sequence[str], overrides: Sequence[str], problems: Sequence[str] = (), prefix: str = ""
) -> RunConfig:
    """Run load_config_files() and add derived values: a run without run.dir is named `prefix` plus
    the name of its first configuration file, and extensions add theirs."""
    run_dir = f"runs/{prefix}{Path(files[0]).stem if files else 'default'}"

    def complete(values: SectionValues) -> list[str]:
        return [
            text for one in lookup.used_by(values) for text in one.complete_values(values, run_dir)
        ]

    cfg = load_config_files(
        RunConfig, files, overrides, problems, complete, combinations.combination_problems
    )
    for one in lookup.used(cfg):
        cfg = one.complete(cfg)
    return replace(cfg, run=replace(cfg.run, dir=cfg.run.dir or run_dir))


def check_world(cfg: RunConfig, world_size: int, per_node: int) -> list[str]:
    """List problems of axes and batch with this many ranks, `per_node` on each host."""
    from kempner.parallel.layout import axis_sizes

    problems: list[str] = []
    if world_size == 1 and "symm_mem" in cfg.distributed.overlap:
        problems.append("distributed.overlap: symm_mem needs more than one rank; leave it out")
    data_ranks = world_size  # the batch is checked even if the axes do not fit
    try:
        replicas = count_replicas(cfg, world_size, per_node)
        inner = world_size // replicas
        axes = axis_sizes(cfg.distributed, inner, min(per_node, inner))
        data_ranks = axes.data_ranks * replicas
        problems += cfg.distributed.island_problems(axes.shard * axes.cp)
        if cfg.distributed.ep > 1:
            from kempner.train.axis_checks import check_experts

            problems += check_experts(cfg, axes)
    except ConfigError as error:
        problems += error.problems
    try:
        if not lookup.bringer(cfg):
            check_batch(cfg.train, data_ranks)
            if cfg.distributed.pp > 1:
                from kempner.train.axis_checks import check_pipeline

                check_pipeline(cfg.train, cfg.distributed, data_ranks)
    except ConfigError as error:
        problems += error.problems
    return problems


def print_warnings(cfg: RunConfig) -> None:
    """Warn of settings that suit a trial of a few steps, or an existing model, but are rarely
    intended for a whole run."""
    for one in lookup.used(cfg):
        for text in one.warnings(cfg):
            print(f"warning: {text}", file=sys.stderr)
    batch, tokens = cfg.train.global_batch, cfg.train.global_batch_tokens
    if tokens is not None and batch != type(cfg.train).global_batch:
        print(
            f"warning: train.global_batch = {batch} has no effect: train.global_batch_tokens = "
            f"{tokens} replaces it; give --train.global_batch_tokens={batch * cfg.train.seq_len}, "
            "or none",
            file=sys.stderr,
        )
    for text in _without_effect(cfg):
        print(f"warning: {text}", file=sys.stderr)
    if (every := cfg.resilience.replay_every) and isinstance(cfg.checkpoint.interval, str):
        print(
            f"warning: checkpoint.interval = {cfg.checkpoint.interval}: a step that is saved by "
            f"the clock is not computed twice, as resilience.replay_every = {every} does in steps "
            f"that are saved by their number; consider steps, such as "
            f"--checkpoint.interval={every}",
            file=sys.stderr,
        )
    warmup, last = cfg.schedule.warmup_steps, cfg.train.max_steps
    if warmup > last:
        print(
            f"warning: schedule.warmup_steps = {warmup} is more than train.max_steps = {last}: the "
            f"learning rate never reaches its peak; consider --schedule.warmup_steps={last // 10}",
            file=sys.stderr,
        )
    elif cfg.schedule.name == "wsd" and warmup + (decay := cfg.schedule.decay(last)) > last:
        print(
            f"warning: schedule.warmup_steps = {warmup} and a decay over {decay} steps are more "
            f"than train.max_steps = {last}: the learning rate drops where the warm-up ends; "
            f"consider --schedule.decay_steps={max(1, last - warmup)}",
            file=sys.stderr,
        )


def _without_effect(cfg: RunConfig) -> list[str]:
    schedule, found = cfg.schedule, []
    default = type(schedule)()
    of_wsd = {"decay_steps": schedule.decay_steps, "decay_shape": schedule.decay_shape}
    for key, value in of_wsd.items():
        if schedule.name != "wsd" and value != getattr(default, key):
            found.append(
                f"schedule.{key} = {value} has no effect with schedule.name = {schedule.name}; "
                "give --schedule.name=wsd"
            )
    if cfg.eval.sets and not cfg.eval.interval:
        found.append("eval.sets has no effect: eval.interval = 0; give --eval.interval=500")
    if cfg.run.fork_optimizer == "fresh" and not cfg.run.fork:
        found.append("run.fork_optimizer = fresh has no effect without run.fork; give --run.fork")
    return found


def count_replicas(cfg: RunConfig, world_size: int, per_node: int) -> int:
    """Return the number of replicas in a world. Raises ConfigError if it cannot be divided so."""
    return math.prod(one.count_replicas(cfg, world_size, per_node) for one in lookup.used(cfg))


def check_inputs(cfg: RunConfig, rank: int, servers: bool = False) -> list[str]:
    """List problems of the files: token shards must be readable and use this vocabulary, the
    weights to start from and the run to fork must be usable, and the run directory writable. With
    `servers`, also check the engines that already run. Creates nothing."""
    begun = has_checkpoint(cfg.checkpoint_dir)
    problems = [
        text for one in lookup.used(cfg) for text in one.check_files(cfg, rank, begun, servers)
    ]
    try:
        sources, held_out = open_data(cfg, rank == 0)
        if sources and not (begun and cfg.checkpoint.save):  # else see check_checkpoint()
            open_mixture(cfg, sources, Progress().plan(cfg))
        if cfg.distributed.cp > 1 and cfg.distributed.cp_method == "ring":
            problems += [
                f"{source.name}: several conversations share a row, and the ring does not support "
                "document masks; give --distributed.cp_method=ulysses, or --distributed.cp=1"
                for source in (*sources, *held_out)
                if source.packing
            ]
    except ConfigError as error:
        problems += error.problems
    others = check_directories(cfg, rank)
    if cfg.run.fork and rank == 0:
        from kempner.checkpoint import fork

        others += fork.fork_problems(cfg.run.fork, Path(cfg.run.dir), cfg.checkpoint_dir)
    if not (problems or others) and rank == 0 and cfg.checkpoint.save:
        others = check_checkpoint(cfg)
    return problems + others


def check_checkpoint(cfg: RunConfig) -> list[str]:
    """List reasons why the run cannot continue from its newest checkpoint or, if it has none, start
    from that of run.fork. Otherwise each rank would find them alone, after leaving traces."""
    about = {"fixed": fixed_facts(cfg, True)}
    try:
        if newest := checkpoint_to_load(cfg.checkpoint_dir):
            from kempner.checkpoint import fits

            path, manifest = newest  # check_directories() checks its owner
            fits.check_compatible(path, manifest, {**about, "run": manifest.get("run")})
            if not lookup.bringer(cfg):
                open_mixture(cfg, open_data(cfg, True)[0], Progress.of(manifest).plan(cfg))
        elif cfg.run.fork:
            from kempner.checkpoint import fits, fork
            from kempner.train.resilience.resuming import fork_position

            path = fork.find_fork(cfg.run.fork)
            manifest = history.read_manifest(path)
            fits.check_fork(cfg.run.fork, path, manifest, about)
            if not lookup.bringer(cfg):
                progress, _ = fork_position(manifest, about)
                open_mixture(cfg, open_data(cfg, True)[0], progress.plan(cfg))
            return [text for one in lookup.used(cfg) for text in one.check_fork(cfg, path)]
    except history.Damaged:  # the load handles it
        pass
    except ConfigError as error:
        return error.problems
    return []


def checkpoint_to_load(root: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint that a start would load, judging by its manifest, and the manifest.
    Raises ConfigError if it has another version."""
    for path in history.complete_checkpoints(root):
        with contextlib.suppress(history.Damaged):
            return path, history.read_manifest(path)
    return None


def check_directories(cfg: RunConfig, rank: int) -> list[str]:
    """List problems of run.dir and checkpoint.dir: they must be writable and hold only this run."""
    problems = []
    for key, path in (("run.dir", cfg.run.dir), ("checkpoint.dir", cfg.checkpoint.dir)):
        if not path:
            continue  # in the run directory
        try:
            places = (Path(path), *Path(path).absolute().parents)
        except FileNotFoundError as error:
            return [f"{key} = {path}: {explain_os_error(error)}"]
        # os.path.exists: a directory without search permission hides its contents, with no error
        there = next(place for place in places if os.path.exists(place))
        # Before a container mounts it (container.sh), this is a directory of the image.
        closed = not os.access(there, os.W_OK | os.X_OK) and "KP_UNMOUNTED" not in os.environ
        if not there.is_dir() or closed:
            what = "not writable" if there.is_dir() else "not a directory"
            problems.append(f"{key} = {path}: {there} is {what}; give another --{key}")
    if problems or rank:
        return problems
    try:
        refuse_others(cfg.run.dir, "run.dir", (Kind.RUN, Kind.STARTED, Kind.NOTES), OWN_DIRECTORY)
    except ConfigError as error:
        return error.problems
    return ownership.ownership_problems(cfg.checkpoint_dir, read_run_id(Path(cfg.run.dir)))
