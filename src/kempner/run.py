"""One run's configuration: all sections, and the checks across them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kempner.checkpoint.config import CheckpointConfig
from kempner.config.option import ConfigError, option
from kempner.data.config import DataConfig
from kempner.metrics import MetricsConfig
from kempner.model.config import ModelConfig
from kempner.optim.config import OptimizerConfig, ScheduleConfig
from kempner.parallel.config import DistributedConfig
from kempner.resilience.config import ResilienceConfig

if TYPE_CHECKING:
    pass


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
        raise ConfigError(
            f"{key}: {cfg.sequences} sequences do not divide by {what} = {unit}; "
            f"give a multiple of {unit} sequences, such as --{key}={near}"
        )
    return micro
