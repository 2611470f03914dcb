"""The path from the command line to a configuration that is checked against its files and its
world."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from kempner import bench, compiler
from kempner.bench import Variant
from kempner.checkpoint import commit, fork, ownership
from kempner.config.command_line import Command, help_text, parse_command
from kempner.config.loading import Values, as_dict, load, to_toml
from kempner.config.option import ConfigError
from kempner.config.values import shown, to_text
from kempner.data.sidecar import BYTES, SIDECAR, Sidecar, open_sidecar
from kempner.data.vocabulary import agree, read_vocabulary
from kempner.directories import Kind, read_run_id, refuse_other_file, refuse_others
from kempner.front_door import complain, how_to_run, list_problems, run_program
from kempner.gpu import driver
from kempner.hf.families import family_of
from kempner.hf.source import (
    CONFIG,
    FOLDER,
    TOKENIZER,
    Source,
    find,
    source_tokenizer,
    tokenizer_of_file,
)
from kempner.hf.stored import check_source
from kempner.model.config import OF_CONTEXT, OF_TRAINING, ModelConfig
from kempner.optim.config import learning_rate
from kempner.parallel.layout import Axes, sizes
from kempner.parts import fixed_facts, open_data, open_mixture
from kempner.planner.build import build
from kempner.port_range import BadPortRange, NoFreePort
from kempner.process_group import discover, gpu_on_the_bus
from kempner.progress import Progress
from kempner.resilience.requests import StopRequests
from kempner.run import RunConfig, check_batch, check_pipeline

USAGE = """\
{command} CONFIG.toml [MORE.toml ...] [--section.key=value ...]

  --help                          this list
  --check                         print the resolved configuration as TOML and exit
  --nodes N --gpus-per-node G     with --check: whether it fits N hosts of G processes each
  --build                         with these: build the model as one of their ranks, without memory
  --bench                         measure the configuration, with fake data: [bench]
"""
OTHER_PROGRAM = {
    False: "rl.env: this configuration learns from rewards; submit scripts/slurm/rl.sh with it",
    True: "rl.env = []: no environment to learn from; give [[rl.env]], or train on data, by "
    "scripts/train.py",
}
RANK_0_SPEAKS_S = 5.0
OWN_DIRECTORY = "give one of its own: --run.dir=runs/NAME"
FLAGS = {
    "help": bool,
    "check": bool,
    "build": bool,
    "bench": bool,
    "nodes": int,
    "gpus-per-node": int,
}
# Not the second, newer name: torch 2.9 ignores it for CUDA (pytorch/pytorch#183387), and 2.9 to
# 2.13 all read the first.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def configure(argv: Sequence[str], stop: StopRequests, rewards: bool = False) -> RunConfig:
    """Return the configuration of a command line, checked against the files that it names.
    `rewards`: the program learns from rewards.

    Exits here for --help and --check (0), and for bad input (2, every problem on a line of its
    own).
    """
    command = parse_command(argv, FLAGS)
    usage = USAGE.format(command=how_to_run("rl.py" if rewards else "train.py"))
    if command.flags["help"]:
        run_program(lambda _: print(help_text(RunConfig, usage)))
    if not argv:
        print(f"usage: {usage}", file=sys.stderr)
        sys.exit(2)
    flags = command.flags
    try:
        prefix = "bench-" if flags["bench"] else ""
        cfg = load_config(command.files, command.overrides, command.problems, prefix)
        if flags["bench"]:
            check_bench_files(cfg)
        variants = bench_variants(command, cfg) if flags["bench"] else [Variant("", [], cfg)]
        problems = [text for each in variants for text in check(each.cfg, flags, rewards)]
        if problems:
            raise ConfigError(dict.fromkeys(problems))
        if flags["build"]:
            for each in variants:
                print(build(each.cfg, *size_of(flags)), file=sys.stderr)
    except ConfigError as error:
        reject(error, stop)
    only = flags["check"] or flags["build"]
    if flags["check"] or not (only or "KEMPNER_ATTEMPT_ID" in os.environ or discover().rank):
        warn(cfg)  # once: the scripts have called --check
    if flags["check"]:
        warn_of_compiler(cfg)
        compare_driver(cfg)
    if only:
        run_program(lambda _: print(to_toml(cfg), end=""))
    set_allocator()
    if flags["bench"]:
        sys.exit(bench.measure(Path(cfg.run.dir), variants, discover(), stop.wants_to_leave))
    return cfg


def set_allocator() -> None:
    """Set PyTorch's allocator of GPU memory in this process, unless the user has set it; before
    torch is imported. Not in the environment of the whole job: memory in such segments cannot be
    shared by cudaIpcGetMemHandle, as vLLM does with tensor parallelism
    (vllm-project/vllm#42609)."""
    if not any(os.environ.get(name) for name in ALLOCATOR):
        # Segments that grow fragment less: a run near its memory limit then still fits.
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def check(cfg: RunConfig, flags: Mapping[str, Any], rewards: bool = False) -> list[str]:
    """List the problems of a configuration: with its program, with its files, and in its world."""
    only = flags["check"] or flags["build"]
    if cfg.rl.on != rewards:
        return [OTHER_PROGRAM[rewards]]
    problems = check_inputs(cfg, 0 if only else discover().rank, only)
    if only and (device := compiles_for(cfg)) and (text := compiler.lacking(device)):
        problems.append(text)  # in the batch script, on the first of the nodes
    if flags["nodes"] is not None or flags["gpus-per-node"] is not None:
        problems += check_world(cfg, *size_of(flags))
    elif not only:
        world = discover()
        problems += check_world(cfg, world.size * world.replicas, world.per_node)
    return problems


def compiles_for(cfg: RunConfig) -> str | None:
    """Return the device that this host will compile for, cpu or cuda. None: nothing is compiled, or
    this host is not one of the job's nodes."""
    kind = cfg.distributed.device
    if not cfg.train.compile:
        return None
    if kind != "cpu" and gpu_on_the_bus():
        return "cuda"
    # Not SLURM_JOB_ID: salloc's shell may run on a login node.
    return "cpu" if kind != "cuda" and "SLURMD_NODENAME" in os.environ else None


def warn_of_compiler(cfg: RunConfig) -> None:
    """Warn of what the job's nodes may lack; check() has looked if this is one of them."""
    if not cfg.train.compile or compiles_for(cfg):
        return
    if text := compiler.lacking("cpu" if cfg.distributed.device == "cpu" else "cuda"):
        print(f"warning: {text}; the nodes of a job may have what this host lacks", file=sys.stderr)


def compare_driver(cfg: RunConfig) -> None:
    """Print driver and CUDA side by side; warn if they do not fit: the job's nodes may, and a newer
    libcuda (NVIDIA's cuda-compat) makes up for it."""
    if cfg.distributed.device == "cpu":
        return
    if text := driver.both():
        print(text, file=sys.stderr)
    if text := driver.misfit(driver.driver(), driver.cuda_of_torch()):
        print(f"warning: {text}", file=sys.stderr)


def size_of(flags: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of ranks in all, and on each node, that the command line names."""
    nodes, per_node = flags["nodes"] or 1, flags["gpus-per-node"] or 1
    return nodes * per_node, per_node


def bench_variants(command: Command, cfg: RunConfig) -> list[Variant]:
    """Return the runs that `--bench` starts, with the words for each. Raises ConfigError."""
    found, problems = [], []
    for number, name in enumerate(cfg.bench.compare or ("",), 1):
        more = parse_command(shlex.split(name), {})
        files, given = [*command.files, *more.files], [*command.overrides, *more.overrides]
        try:
            own = load_config(files, given, more.problems)  # its [bench] says which data
            given += bench.overrides(own, f"{cfg.run.dir}/{number}")
            own = load_config(files, given)
            found.append(Variant(name, [*files, *given], own))
        except ConfigError as error:
            problems += [f"bench.compare, {name}: {text}" for text in error.problems]
    if problems:
        raise ConfigError(problems)
    return found


def reject(
    error: ConfigError | BadPortRange | NoFreePort,
    stop: StopRequests,
    leave: Callable[[int], NoReturn] = sys.exit,
) -> NoReturn:
    """Report bad input: every problem on standard error, exit code 2; NoFreePort: 1. `leave` ends
    the process: once the ranks have met, without finalisers, as those of torch's threads may abort
    it.

    Rank 0 speaks for all; the others leave later. srun or torchrun terminates them as soon as rank
    0 has left, and a rank that is not terminated reports its own problem.
    """
    with contextlib.suppress(ConfigError):
        if discover().rank:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(RANK_0_SPEAKS_S)
            if stop.wants_to_leave():  # terminated before that
                leave(2)
    with contextlib.suppress(OSError):  # a closed pipe
        sys.stdout.flush()
    name = Path(sys.argv[0]).stem
    if isinstance(error, NoFreePort):  # others may leave one to the next start
        complain(name, [error.strerror])
        leave(1)
    problems = error.problems if isinstance(error, ConfigError) else [error.strerror]
    # Always a list: the batch script takes its first line as the reason of a refused start.
    leave(complain(name, [list_problems(problems)]))


def load_config(
    files: Sequence[str], overrides: Sequence[str], problems: Sequence[str] = (), prefix: str = ""
) -> RunConfig:
    """Run load() and add what follows from other values: a run without run.dir is named after its
    first configuration file, after `prefix`, one with model.init_from has the shape of those
    weights, and the batch of one with [[rl.env]] is that of [rl]."""
    run_dir = f"runs/{prefix}{Path(files[0]).stem if files else 'default'}"
    cfg = load(RunConfig, files, overrides, problems, partial(complete_model, run_dir=run_dir))
    if cfg.rl.on and cfg.rl.batch_samples is not None:
        cfg = replace(cfg, train=replace(cfg.train, global_batch=cfg.rl.batch_samples))
    return replace(cfg, run=replace(cfg.run, dir=cfg.run.dir or run_dir))


def complete_model(given: Values, run_dir: str) -> list[str]:
    """Complete [model] from the weights of model.init_from, or of the forked run. Returns problems:
    keys that contradict it; the maximum length and training options are not properties of the
    weights. A fork may have another context."""
    model = given["model"]
    if (source := model.get("init_from")) is None:
        return []
    run = Path(given["run"].get("dir") or run_dir)
    try:
        shape = begun(run, Path(given["checkpoint"].get("dir") or run / "checkpoints"), source)
        shape = shape or find(given["run"].get("fork") or source).model()
    except ConfigError as error:
        return [f"model.init_from: {problem}" for problem in error.problems]
    may_change = {"init_from", "max_seq_len", *OF_TRAINING}
    if given["run"].get("fork"):
        may_change |= {*OF_CONTEXT}
    whole = asdict(ModelConfig(**shape))  # what a config.json does not name is as by default
    unset = [key for key in ("n_kv_heads", "head_dim") if model.get(key) is None]
    model |= {key: value for key, value in shape.items() if key in unset or key not in model}
    return [
        f"model.{key} = {shown(model[key])}: the weights of model.init_from = {source} have "
        f"{shown(whole[key])}; leave model.{key} out"
        for key in model
        if key in whole.keys() - may_change and model[key] != whole[key]
    ]


def begun(run: Path, checkpoints: Path, source: str) -> dict[str, Any] | None:
    """Return the [model] section of a run that has a checkpoint, and so needs its source no more;
    None if it has yet to start from `source`."""
    if not has_checkpoint(checkpoints):
        return None
    try:
        model = load(RunConfig, [run / "config.toml"]).model
    except ConfigError:  # not there, or of a version with other options
        return None
    return asdict(model) if model.init_from == source else None


def what_changed(file: Path, cfg: RunConfig, step: int) -> list[str]:
    """List what a resumed run changes: each changed key, from the config.toml that the last attempt
    has left, and the effect on the learning rate of its next step."""
    try:
        before = load(RunConfig, [file])
    except ConfigError:  # not there, or of a version with other options
        return []
    was = as_dict(before)
    found = [
        f"{section}.{key}: {to_text(old)} -> {to_text(new)}"
        for section, now in as_dict(cfg).items()
        for key, new in now.items()
        if (old := was[section][key]) != new
    ]
    rates = [
        learning_rate(c.schedule, c.optimizer.lr, step, c.train.max_steps) for c in (before, cfg)
    ]
    if before.train.max_steps != cfg.train.max_steps and rates[0] != rates[1]:
        found.append(
            f"learning rate after step {step}: {rates[0]:.2e} -> {rates[1]:.2e}; "
            f"schedule.name = {cfg.schedule.name} is stretched to train.max_steps"
        )
    return found


def check_world(cfg: RunConfig, world_size: int, per_node: int) -> list[str]:
    """List problems of axes and batch with this many ranks, `per_node` on each host."""
    found: list[str] = []
    data_ranks = world_size  # the batch is checked all the same when the axes do not fit
    try:
        replicas = cfg.lowcomm.count(world_size, per_node)
        inner = world_size // replicas
        axes = sizes(cfg.distributed, inner, min(per_node, inner))
        data_ranks = axes.data_ranks * replicas
        found += cfg.distributed.island_problems(axes.shard * axes.cp)
        found += check_experts(cfg, axes)
    except ConfigError as error:
        found += error.problems
    try:
        if not cfg.rl.on:
            check_batch(cfg.train, data_ranks)
            check_pipeline(cfg.train, cfg.distributed, data_ranks)
    except ConfigError as error:
        found += error.problems
    return found


def warn(cfg: RunConfig) -> None:
    """Warn of settings that suit a trial of a few steps, or an existing model, but are seldom meant
    in a whole run."""
    if cfg.model.router_is_blind:
        print(
            f"warning: model.init_from = {cfg.model.init_from} has experts_per_token = 1 with "
            "router_normalize: the loss has no gradient for its routers, which stay as they are "
            "but for rounding and model.aux_loss",
            file=sys.stderr,
        )
    try:
        family_of(cfg.model)
    except ConfigError as error:
        why = "; ".join(error.problems)
        print(f"warning: no export to Hugging Face's form: {why}", file=sys.stderr)
    warmup, last = cfg.schedule.warmup_steps, cfg.train.max_steps
    if warmup > last:
        print(
            f"warning: schedule.warmup_steps = {warmup} is more than train.max_steps = {last}: the "
            f"learning rate never reaches its peak; consider --schedule.warmup_steps={last // 10}",
            file=sys.stderr,
        )


def check_experts(cfg: RunConfig, axes: Axes) -> list[str]:
    """List problems of sharding the experts: FSDP cuts them along their width, after tensor
    parallelism, and takes no uneven parts."""
    ranks = axes.shard * axes.cp // cfg.distributed.ep
    if cfg.distributed.ep == 1 or not cfg.model.n_experts:
        return []
    parts = {"dim": ranks, "ffn_dim": ranks * axes.tp}
    tp = f" x tp {axes.tp}" if axes.tp > 1 else ""
    return [
        f"model.{name} = {size}: with distributed.ep = {cfg.distributed.ep} it must divide by the "
        f"{n} ranks that share one expert, dp_shard {axes.shard} x cp {axes.cp} / ep{tp}; choose "
        "another ep or dp_shard"
        for name, n in parts.items()
        if (size := getattr(cfg.model, name)) % n
    ]


def check_tokenizer(weights: Source, cfg: RunConfig) -> list[str]:
    """List problems if the token ids of the data, or of rl.tokenizer, are not those of the
    weights."""
    from kempner.data.opening import has_sidecar  # imports NumPy, which --help does without

    own = source_tokenizer(weights)
    if own is None:
        return []
    if cfg.rl.on:
        theirs = named_tokenizer(cfg.rl.tokenizer)
        if theirs is None or _same_ids(theirs, own):
            return []
        fix = "leave rl.tokenizer out"
        return [_other_ids(f"rl.tokenizer = {cfg.rl.tokenizer}", theirs, own, fix)]
    found = []
    for one in cfg.data.mixed:
        theirs = None
        if has_sidecar(one):
            file = Path(one.path).expanduser() / TOKENIZER
            theirs = {**open_sidecar(one.path).tokenizer, "file": str(file)}
        elif (file := Path(one.tokenizer).expanduser()).is_file():  # text that is streamed
            theirs = tokenizer_of_file(file)
        if theirs is not None and not _same_ids(theirs, own):
            of_bytes = own["kind"] == "bytes"
            given = "bytes" if of_bytes else own["file"]
            fix = f"prepare the data again with --tokenizer {given}"
            if not weights.is_checkpoint and not of_bytes:
                fix += f"; if its ids mean the same, put {TOKENIZER} of the data in place of that"
            found.append(_other_ids(one.path, theirs, own, fix))
    return found


def named_tokenizer(name: str) -> dict[str, str] | None:
    """Describe the tokenizer that rl.tokenizer names, as source_tokenizer() does; None if it is not
    there."""
    folder = Path(name).expanduser()
    if name == BYTES["kind"]:
        return dict(BYTES)
    if name and (folder / TOKENIZER).is_file():
        return tokenizer_of_file(folder / TOKENIZER)
    if name and (folder / SIDECAR).is_file():  # data of bytes
        return Sidecar.load(folder / SIDECAR).tokenizer
    return None


def _other_ids(what: str, theirs: Mapping[str, str], own: Mapping[str, str], fix: str) -> str:
    return (
        f"{what}: its tokenizer is {_shown(theirs)}, that of the weights {_shown(own)}, so that a "
        f"token id means another text; {fix}"
    )


def _same_ids(theirs: Mapping[str, str], own: Mapping[str, str]) -> bool:
    """Return whether token ids mean the same to two tokenizers. The files may differ: a tool has
    rewritten one, or it has more tokens, of a chat template."""
    if theirs["hash"] == own["hash"] or "bytes" in (theirs["kind"], own["kind"]):
        return theirs["hash"] == own["hash"]
    return agree(*(read_vocabulary(Path(each["file"])) for each in (theirs, own)))


def _shown(tokenizer: Mapping[str, str]) -> str:
    """Format a tokenizer: `models/a/tokenizer.json (sha256:1a2b3c4d5e6f)`."""
    return f"{tokenizer['name']} ({tokenizer['hash'][:19]})".replace(" ()", "")


def has_checkpoint(root: Path) -> bool:
    """Return whether the run has a checkpoint. An unreadable directory counts as empty here; the
    check of the input reports it."""
    with contextlib.suppress(OSError):
        return bool(commit.complete(root))
    return False


def check_inputs(cfg: RunConfig, rank: int, servers: bool = False) -> list[str]:
    """List problems of the files: token shards readable and of this vocabulary, the weights to
    start from, the run to be forked, the run directory writable; and with `servers` the engines
    that run already. Creates nothing."""
    found = []
    source = cfg.model.init_from
    again = cfg.preference.loss == "dpo" or cfg.lora.rank > 0  # every start reads these weights
    there = has_checkpoint(cfg.checkpoint_dir)
    begins = not cfg.run.fork and not there
    if source is not None and rank == 0 and (again or begins):
        try:
            weights = find(source, pinned=again)
            check_source(weights, cfg.model)
            found += check_tokenizer(weights, cfg)
            found += changed_config(weights, cfg) if there else []
        except ConfigError as error:
            found += [f"model.init_from: {problem}" for problem in error.problems]
    try:
        sources, held_out = open_data(cfg, rank == 0)
        if cfg.rl.on:
            # imports NumPy, which --help does without
            from kempner.rl.opening import check_isolation, open_parts

            envs, _ = open_parts(cfg, servers)
            if servers:
                check_isolation(envs.values())
        else:
            open_mixture(cfg, sources, Progress().plan(cfg))
        if cfg.distributed.cp > 1 and cfg.distributed.cp_method == "ring":
            found += [
                f"{source.name}: several conversations share a row, and the ring has no mask of "
                "documents; give --distributed.cp_method=ulysses, or --distributed.cp=1"
                for source in (*sources, *held_out)
                if source.packing
            ]
    except ConfigError as error:
        found += error.problems
    others = check_directories(cfg, rank)
    if cfg.run.fork and rank == 0:
        others += fork.problems(cfg.run.fork, Path(cfg.run.dir), cfg.checkpoint_dir)
    if not (found or others) and rank == 0 and cfg.checkpoint.save:
        others = check_checkpoint(cfg)
    return found + others


def changed_config(weights: Source, cfg: RunConfig) -> list[str]:
    """List changes of the weights' config.json, which every start reads, since the run's copy. Keys
    besides the model's own values may change."""
    kept = Path(cfg.run.dir) / FOLDER  # in a fork what the other run has kept
    if weights.is_checkpoint or cfg.run.fork or not (kept / CONFIG).is_file():
        return []
    before, now = Source(weights.name, kept, False).model(), weights.model()
    differ = [
        f"{name} is {shown(before.get(name))} there, {shown(now.get(name))} here"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if not differ:
        return []
    return [
        f"model.init_from: {weights.path / CONFIG} has changed since the run began "
        f"({'; '.join(differ)}); put back what {kept / CONFIG} has"
    ]


def check_checkpoint(cfg: RunConfig) -> list[str]:
    """List reasons why the run cannot continue from its newest checkpoint or, before it has one,
    start from that of run.fork: otherwise each rank would find them by itself, when the start has
    left its traces."""
    from kempner.checkpoint import fits  # imports NumPy, which --help does without

    about = {"fixed": fixed_facts(cfg, True)}
    try:
        if newest := newest_checkpoint(cfg.checkpoint_dir):
            path, manifest = newest  # whose it is, check_directories() knows
            fits.check(path, manifest, {**about, "run": manifest.get("run")})
            if not cfg.rl.on:
                open_mixture(cfg, open_data(cfg, True)[0], Progress.of(manifest).plan(cfg))
        elif cfg.run.fork:
            path = fork.find(cfg.run.fork)
            fits.check_fork(cfg.run.fork, path, commit.read_manifest(path), about)
            found = check_tokenizer(Source(cfg.run.fork, path, True), cfg)
            return [f"run.fork = {cfg.run.fork}: {problem}" for problem in found]
    except commit.Damaged:  # the load sees to it
        pass
    except ConfigError as error:
        return error.problems
    return []


def newest_checkpoint(root: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint that a start would load, as far as its manifest tells, and that. Raises
    ConfigError if it is of another version."""
    for path in commit.complete(root):
        with contextlib.suppress(commit.Damaged):
            return path, commit.read_manifest(path)
    return None


def check_directories(cfg: RunConfig, rank: int) -> list[str]:
    """List problems of run.dir and checkpoint.dir: they must be writable, and hold nothing but this
    run."""
    found = []
    for key, path in (("run.dir", cfg.run.dir), ("checkpoint.dir", cfg.checkpoint.dir)):
        if not path:
            continue  # in the run directory
        # os.path.exists: a directory that may not be entered hides what is in it, without an error
        there = next(p for p in (Path(path), *Path(path).absolute().parents) if os.path.exists(p))
        # Where a container has not mounted it yet (container.sh) this is a directory of the image.
        closed = not os.access(there, os.W_OK | os.X_OK) and "KP_UNMOUNTED" not in os.environ
        if not there.is_dir() or closed:
            what = "not writable" if there.is_dir() else "not a directory"
            found.append(f"{key} = {path}: {there} is {what}; give another --{key}")
    if found or rank:
        return found
    try:
        refuse_others(cfg.run.dir, "run.dir", (Kind.RUN, Kind.STARTED, Kind.NOTES), OWN_DIRECTORY)
    except ConfigError as error:
        return error.problems
    return ownership.problems(cfg.checkpoint_dir, read_run_id(Path(cfg.run.dir)))


def check_bench_files(cfg: RunConfig) -> None:
    """Raise ConfigError if the files of a benchmark would replace others."""
    refuse_others(cfg.run.dir, "run.dir", (Kind.STARTED,), OWN_DIRECTORY)
    if cfg.bench.output_json:
        refuse_other_file(cfg.bench.output_json, "bench.output_json", (bench.SIGN,))
