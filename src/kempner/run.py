"""One run's configuration: all sections, and the checks across them and against its files."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kempner import mesh
from kempner.checkpoint.config import CheckpointConfig
from kempner.command_line import help_text, parse_command
from kempner.config import ConfigError, load, option, to_toml
from kempner.data.config import DataConfig
from kempner.launch import Place, discover
from kempner.mesh import DistributedConfig
from kempner.metrics import MetricsConfig
from kempner.model.config import ModelConfig
from kempner.optim.config import OptimizerConfig, ScheduleConfig
from kempner.resilience import GO_ON, ResilienceConfig, StopRequests, Verdict

if TYPE_CHECKING:
    from kempner.checkpoint.dcp import Checkpointer
    from kempner.data.dataset import TokenDataset
    from kempner.data.loader import MicroBatch, TrainLoader

USAGE = """\
python scripts/train.py CONFIG.toml [MORE.toml ...] [--section.key=value ...]

  --help                          this list
  --check                         print the resolved configuration as TOML and exit
  --nodes N --gpus-per-node G     with --check: does it fit N hosts with G processes each?
"""
Position = dict[str, Any]  # what position() returns
RANK_0_SPEAKS_S = 5.0
FLAGS = {"help": bool, "check": bool, "nodes": int, "gpus-per-node": int}


@dataclass(frozen=True)
class RunSection:
    dir: str = option(
        "", "directory of the run, its identity; unset: runs/<name of the first file>"
    )


@dataclass(frozen=True)
class TrainConfig:
    max_steps: int = option(1000, "optimizer steps of the whole run", minimum=1)
    seq_len: int = option(1024, "tokens of a sequence", minimum=1)
    global_batch: int = option(32, "sequences of a step, over all ranks", minimum=1)
    global_batch_tokens: int | None = option(
        None, "the same in tokens, in place of global_batch", minimum=1
    )
    micro_batch: int | None = option(
        None, "sequences of one forward; unset: all of the rank's share", minimum=1
    )
    grad_clip: float = option(1.0, "largest norm of the gradient; 0: no clipping", minimum=0.0)
    dtype: str = option(
        "auto", "of the computation; the weights are fp32", choices=("auto", "bf16", "fp32")
    )
    compile: bool = option(False, "torch.compile of each block and of the loss")
    recompute: bool = option(False, "recompute the blocks in backward, to save memory")
    seed: int = option(0, "of the initial weights", minimum=0)
    deterministic: bool = option(False, "only deterministic kernels, also on a GPU")

    @property
    def sequences(self) -> int:
        """Sequences of one global step."""
        if self.global_batch_tokens is None:
            return self.global_batch
        return self.global_batch_tokens // self.seq_len

    def problems(self) -> list[str]:
        if self.global_batch_tokens is None or self.global_batch_tokens % self.seq_len == 0:
            return []
        down = self.global_batch_tokens // self.seq_len * self.seq_len
        return [
            f"train.global_batch_tokens = {self.global_batch_tokens}: must be a multiple of "
            f"train.seq_len = {self.seq_len}, such as {down or self.seq_len}"
        ]


@dataclass(frozen=True)
class EvalConfig:
    interval: int = option(0, "steps between validations; 0: none", minimum=0)
    samples: int = option(256, "sequences of the held-out split; 0: all", minimum=0)


@dataclass(frozen=True)
class RunConfig:
    run: RunSection = field(default_factory=RunSection)
    train: TrainConfig = field(default_factory=TrainConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)

    @property
    def checkpoint_dir(self) -> Path:
        return Path(self.checkpoint.dir or f"{self.run.dir}/checkpoints")

    def problems(self) -> list[str]:
        found = []
        if self.train.seq_len > self.model.max_seq_len:
            found.append(
                f"train.seq_len = {self.train.seq_len}: at most model.max_seq_len = "
                f"{self.model.max_seq_len}; raise that, or shorten the sequences"
            )
        return found


def micro_batch(cfg: TrainConfig, world_size: int) -> int:
    """Sequences of one forward on one rank. Raises ConfigError with the arithmetic when the batch
    does not divide."""
    share, rest = divmod(cfg.sequences, world_size)
    micro = cfg.micro_batch or share
    if rest or share % micro:
        unit = world_size * (cfg.micro_batch or 1)
        near, key = max(unit, cfg.sequences // unit * unit), "train.global_batch"
        if cfg.global_batch_tokens is not None:
            near, key = near * cfg.seq_len, "train.global_batch_tokens"
        what = f"{world_size} ranks" + (f" x micro_batch {micro}" if cfg.micro_batch else "")
        raise ConfigError([
            f"{key}: {cfg.sequences} sequences do not divide by {what} = {unit}; "
            f"give a multiple of {unit} sequences, such as --{key}={near}"
        ])  # fmt: skip
    return micro


def configure(argv: Sequence[str], stop: StopRequests) -> RunConfig:
    """The configuration of a command line, checked against the files that it names.

    Exits here for --help and --check (0), and for bad input (2, every problem on a line of its
    own).
    """
    command = parse_command(argv, FLAGS)
    if command.flags["help"]:
        print(help_text(RunConfig, USAGE))
        sys.exit(0)
    if not argv:
        print(f"usage: {USAGE}", file=sys.stderr)
        sys.exit(2)
    try:
        cfg = with_run_dir(
            load(RunConfig, command.files, command.overrides, command.problems), command.files
        )
        nodes, per_node = command.flags["nodes"], command.flags["gpus-per-node"]
        problems = check_inputs(cfg)
        if nodes is not None or per_node is not None:
            problems += check_world(cfg, (nodes or 1) * (per_node or 1))
        elif not command.flags["check"]:
            problems += check_world(cfg, discover().world_size)
        if problems:
            raise ConfigError(problems)
    except ConfigError as error:
        reject(error, stop)
    if command.flags["check"]:
        print(to_toml(cfg), end="")
        sys.exit(0)
    return cfg


def reject(error: ConfigError, stop: StopRequests) -> NoReturn:
    """Bad input: every problem on standard error, exit code 2.

    Rank 0 speaks for all; the others leave later: srun or torchrun ends them as soon as rank 0 has
    left, and one that is not told to go has a problem of its own.
    """
    with contextlib.suppress(ConfigError):
        if discover().rank:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(RANK_0_SPEAKS_S)
            if stop.wants_to_leave():  # told before that
                sys.exit(2)
    count = len(error.problems)
    print(f"error: {count} problem{'s' * (count > 1)} with the input", file=sys.stderr)
    for problem in error.problems:
        print(f"  - {problem}", file=sys.stderr)
    sys.exit(2)


def with_run_dir(cfg: RunConfig, files: Sequence[str]) -> RunConfig:
    """Without a run.dir of its own a run is named after its first file."""
    name = Path(files[0]).stem if files else "default"
    return replace(cfg, run=replace(cfg.run, dir=cfg.run.dir or f"runs/{name}"))


def check_world(cfg: RunConfig, world_size: int) -> list[str]:
    """Do the mesh and the batch fit so many ranks?"""
    found = []
    for check in (
        lambda: mesh.sizes(cfg.distributed, world_size),
        lambda: micro_batch(cfg.train, world_size),
    ):
        try:
            check()
        except ConfigError as error:
            found += error.problems
    return found


def check_inputs(cfg: RunConfig) -> list[str]:
    """Can the files be used: token shards readable and of this vocabulary, run directory writable?
    Creates nothing."""
    found = []
    try:
        open_data(cfg)
    except ConfigError as error:
        found += error.problems
    for key, path in (("run.dir", cfg.run.dir), ("checkpoint.dir", cfg.checkpoint.dir)):
        if not path:
            continue  # in the run directory
        # os.path.exists: a directory that may not be entered hides what is in it, without an error
        there = next(p for p in (Path(path), *Path(path).absolute().parents) if os.path.exists(p))
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            what = "not writable" if there.is_dir() else "not a directory"
            found.append(f"{key} = {path}: {there} is {what}; give another --{key}")
    return found


def seed_everything(cfg: TrainConfig) -> None:
    import torch

    torch.manual_seed(cfg.seed)
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def open_data(cfg: RunConfig) -> tuple[TokenDataset, TokenDataset | None]:
    """The training split and, when the run validates, the held-out one. Raises ConfigError."""
    from kempner.data.dataset import TokenDataset

    def split(name: str) -> TokenDataset:
        return TokenDataset.open(
            cfg.data.dataset_path, name, cfg.train.seq_len, cfg.model.vocab_size
        )

    return split("train"), split("val") if cfg.eval.interval else None


def open_loaders(
    cfg: RunConfig, place: Place, pin: bool, at: Position
) -> tuple[TrainLoader, Callable[[], Iterator[MicroBatch]]]:
    """This rank's share of the data: the training's loader at its position, and what makes an
    iterator over the held-out batches."""
    from kempner.data.loader import TrainLoader, val_batches

    train, held_out = open_data(cfg)
    micro = micro_batch(cfg.train, place.world_size)
    loader = TrainLoader(
        train,
        seed=cfg.data.seed,
        batch=cfg.train.sequences,
        rank=place.rank,
        world=place.world_size,
        micro=micro,
        position=at["samples"],
        prefetch=cfg.data.prefetch,
        pin=pin,
        skip=at["skip"],
    )

    def held_out_batches() -> Iterator[MicroBatch]:
        assert held_out is not None
        return val_batches(
            held_out,
            samples=cfg.eval.samples or None,
            micro=micro,
            rank=place.rank,
            world=place.world_size,
        )

    return loader, held_out_batches


def position(manifest: dict[str, Any] | None) -> Position:
    """Where a run is, from the manifest of its checkpoint: steps, samples and tokens so far, and
    the ranges of sample numbers that are left out, because they were not finite."""
    start: Position = {"step": 0, "samples": 0, "tokens": 0, "skip": []}
    return start if manifest is None else {key: manifest[key] for key in start}


def go_back(
    at: Position, bad: list[int], verdict: Verdict, checkpointer: Checkpointer, loader: TrainLoader
) -> tuple[Position, Verdict]:
    """To the last checkpoint, from where the samples numbered bad[0] to bad[1] - 1 are left out;
    returns where the run is then, and what is next."""
    manifest = checkpointer.load()
    if manifest is None:
        reason = f"{verdict.reason}; no checkpoint to go back to"
        return at, Verdict(state="failed", reason=reason)
    at = {**position(manifest), "skip": [bad]}
    loader.seek(at["samples"], at["skip"])
    checkpointer.log(
        f"{verdict.reason}: back to step {at['step']}, without the samples {bad[0]} to {bad[1] - 1}"
    )
    return at, GO_ON
