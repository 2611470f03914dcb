"""One run: all sections of its configuration, the checks across them, and its directory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kempner import mesh
from kempner.checkpoint.commit import write_atomic
from kempner.checkpoint.config import CheckpointConfig
from kempner.command_line import help_text, parse_command
from kempner.config import ConfigError, config_hash, load, option, to_toml
from kempner.data.config import DataConfig
from kempner.data.sidecar import copy_tokenizer
from kempner.launch import Place, forget_rendezvous, job_name
from kempner.mesh import DistributedConfig
from kempner.metrics import MetricsConfig
from kempner.model.config import ModelConfig
from kempner.optim.config import OptimizerConfig, ScheduleConfig

if TYPE_CHECKING:
    from kempner.data.dataset import TokenDataset

USAGE = """\
python scripts/train.py CONFIG.toml [MORE.toml ...] [--section.key=value ...]

  --help                          this list
  --check                         print the resolved configuration as TOML and exit
  --nodes N --gpus-per-node G     with --check: does it fit N hosts with G processes each?
"""
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
    max_skipped: int = option(
        10, "stop after so many non-finite steps in a row; their updates are skipped", minimum=1
    )
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
        near = max(unit, cfg.sequences // unit * unit)
        what = f"{world_size} ranks" + (f" x micro_batch {micro}" if cfg.micro_batch else "")
        raise ConfigError([
            f"train.global_batch: {cfg.sequences} sequences do not divide by {what} = {unit}; "
            f"give a multiple of {unit}, such as --train.global_batch={near}"
        ])  # fmt: skip
    return micro


def configure(argv: Sequence[str]) -> RunConfig:
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
        if problems:
            raise ConfigError(problems)
    except ConfigError as error:
        reject(error)
    if command.flags["check"]:
        print(to_toml(cfg), end="")
        sys.exit(0)
    return cfg


def reject(error: ConfigError) -> NoReturn:
    """Bad input: every problem on standard error, exit code 2."""
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
    from kempner.data.dataset import TokenDataset

    found = []
    for split in ("train", *(["val"] if cfg.eval.interval else [])):
        try:
            TokenDataset.open(cfg.data.dataset_path, split, cfg.train.seq_len, cfg.model.vocab_size)
        except ConfigError as error:
            found += error.problems
    for key, path in (("run.dir", cfg.run.dir), ("checkpoint.dir", cfg.checkpoint_dir)):
        there = next(p for p in (Path(path), *Path(path).absolute().parents) if p.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            what = "not writable" if there.is_dir() else "not a directory"
            found.append(f"{key} = {path}: {there} is {what}; give another --{key}")
    return list(dict.fromkeys(found))


class Run:
    """The run directory as this rank sees it: logs, status.json and attempts.jsonl."""

    def __init__(self, cfg: RunConfig, place: Place) -> None:
        """Open the directory as a new attempt. All ranks call it, once the process group stands."""
        import torch.distributed as dist

        self.cfg, self.place = cfg, place
        self.dir = Path(cfg.run.dir)
        self.step = 0
        self._bar: Any = None
        number = [0]
        if place.rank == 0:
            self.dir.mkdir(parents=True, exist_ok=True)
            number = [count_attempts(self.dir)]
        dist.broadcast_object_list(number, src=0)
        self.attempt: int = number[0]
        hosts: list[str] = [""] * place.world_size
        dist.all_gather_object(hosts, socket.gethostname())
        self.hosts = list(dict.fromkeys(hosts))
        self._open_log()

    def begin(self, step: int) -> None:
        """The state is loaded and the first step comes: record the start."""
        self.step = step
        if self.place.rank == 0:
            forget_rendezvous(self.dir)
            write_atomic(self.dir / "config.toml", to_toml(self.cfg))
            copy_tokenizer(self.cfg.data.dataset_path, self.dir)  # generate.py needs the run alone
            self._event("start", nodes=self.hosts, world_size=self.place.world_size)
            self.status("running", "")
        source = f"continues after step {step}" if step else "starts"
        self.say(
            f"run {self.dir} {source}: attempt {self.attempt}, world size {self.place.world_size} "
            f"on {', '.join(self.hosts)}, {self.cfg.model.count_parameters():,} parameters"
        )
        if step >= self.cfg.train.max_steps:
            self.say(
                f"the run is complete: {step} of {self.cfg.train.max_steps} steps; "
                "raise train.max_steps to go on"
            )
        elif self.place.rank == 0 and sys.stdout.isatty():
            from tqdm import tqdm  # comes with huggingface-hub

            steps = self.cfg.train.max_steps
            self._bar = tqdm(total=steps, initial=step, unit="step", file=sys.stdout)

    def say(self, text: str) -> None:
        """A line in this rank's log, and on rank 0 on the console too."""
        self.log(text)
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        elif self.place.rank == 0:
            with contextlib.suppress(OSError):  # a closed terminal must not end the training
                print(text, flush=True)

    def progress(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def end(self, state: str, reason: str) -> None:
        """Record how the attempt ends; the batch script reads status.json."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self.place.rank == 0:
            self.say(f"{state} after step {self.step}" + (f": {reason}" if reason else ""))
            self._event("end", state=state, reason=reason)
            self.status(state, reason)

    def contents(self, data: TokenDataset) -> tuple[dict[str, str], dict[str, Any]]:
        """What a checkpoint holds beside tensors: files by name, and facts for its manifest. Those
        under "fixed" make the meaning of its weights and its position: a checkpoint of others is
        refused."""
        shards = json.dumps([asdict(shard) for shard in data.sidecar.splits["train"]])
        return {"config.toml": to_toml(self.cfg)}, {
            "config_hash": config_hash(self.cfg),
            "fixed": {
                "model": asdict(self.cfg.model),
                "train": {"seq_len": self.cfg.train.seq_len},
                "data": {
                    "seed": self.cfg.data.seed,
                    "tokens": hashlib.sha256(shards.encode()).hexdigest()[:16],
                },
            },
        }

    def status(self, state: str, reason: str) -> None:
        record = {
            "state": state,
            "step": self.step,
            "max_steps": self.cfg.train.max_steps,
            "reason": reason,
            "attempt": self.attempt,
            "attempt_id": os.environ.get("KEMPNER_ATTEMPT_ID"),
            "job": job_name(),
            "time": round(time.time(), 3),
        }
        write_atomic(self.dir / "status.json", json.dumps(record) + "\n")

    def log(self, text: str) -> None:
        """A line in this rank's log."""
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def crashed(self, error: BaseException) -> int:
        """Write down an exception that ends this rank; returns the exit code: 2 for bad input, else
        1."""
        self.log("".join(traceback.format_exception(error)).rstrip())
        where = f"rank {self.place.rank} on {socket.gethostname()}"
        detail = (
            f"{error}" if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        )
        with open(self._stderr, "w", closefd=False) as stderr:
            print(f"error: {where}: {detail}\n  (traceback in {self._log.name})", file=stderr)
        reason = f"{where}: {detail.splitlines()[0]}"
        with contextlib.suppress(OSError):  # on a full disk the message above is what is left
            self._event("end", state="crashed", reason=reason)
            if isinstance(error, ConfigError):
                self.status("failed", reason)  # another start would end in the same way
        return 2 if isinstance(error, ConfigError) else 1

    def _event(self, event: str, **more: Any) -> None:
        record = {
            "event": event,
            "attempt": self.attempt,
            "time": round(time.time(), 3),
            "job": job_name(),
            "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
            "attempt_id": os.environ.get("KEMPNER_ATTEMPT_ID"),
            "step": self.step,
            **more,
        }
        with open(self.dir / "attempts.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")

    def _open_log(self) -> None:
        """logs/attempt-K/rank-R.log; rank 0 keeps the console too, the other ranks' output goes to
        their log."""
        logs = self.dir / "logs" / f"attempt-{self.attempt}"
        logs.mkdir(parents=True, exist_ok=True)
        self._log = open(logs / f"rank-{self.place.rank}.log", "a", buffering=1)  # noqa: SIM115
        self._stderr = os.dup(2)
        if self.place.rank == 0:
            link = self.dir / "logs" / "latest"
            fresh = link.with_name(".latest.new")
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(logs.name)
            fresh.replace(link)
        else:
            os.dup2(self._log.fileno(), 1)
            os.dup2(self._log.fileno(), 2)


def seed_everything(cfg: TrainConfig) -> None:
    import torch

    torch.manual_seed(cfg.seed)
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def count_attempts(run_dir: Path) -> int:
    """Starts of this run so far, from its logs: a start that died before its first step counts
    too."""
    logs = run_dir / "logs"
    numbers = [p.name[8:] for p in logs.glob("attempt-*")] if logs.is_dir() else []
    return max((int(n) for n in numbers if n.isdigit()), default=-1) + 1
