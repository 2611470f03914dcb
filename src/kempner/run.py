"""One run's configuration: all sections, and the checks across them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from kempner.checkpoint.config import CheckpointConfig
from kempner.config.option import REQUIRED, ConfigError, option
from kempner.data.config import DataConfig, SourceConfig
from kempner.metrics import MetricsConfig
from kempner.model.config import ModelConfig
from kempner.optim.config import OptimizerConfig, ScheduleConfig
from kempner.parallel.config import DistributedConfig, LoraConfig
from kempner.preference.config import PreferenceConfig
from kempner.resilience.config import ResilienceConfig
from kempner.trackers.config import TrackersConfig

# One rank may read the tokens of a whole step at once, 8 bytes each, and max_steps of them must fit
# 64 bits; published runs stay below 2**27. A forward pass of 2**24 tokens exceeds any memory.
MAX_STEP_TOKENS = 2**30
MAX_FORWARD_TOKENS = 2**24
PARTS = ("attention_norm", "attention", "ffn_norm", "ffn")  # the modules of a block


@dataclass(frozen=True)
class RunSection:
    dir: str = option(
        "", "run directory, which identifies the run; unset: runs/<name of the first file>"
    )
    fork: str = option(
        "",
        "begin from a checkpoint of another run: RUN, its directory, or RUN@STEP; see docs/fork.md",
    )
    fork_optimizer: str = option(
        "keep",
        "the optimizer's state of run.fork; fresh: begin with none",
        choices=("keep", "fresh"),
    )


@dataclass(frozen=True)
class TrainConfig:
    max_steps: int = option(1000, "total number of optimizer steps", minimum=1, maximum=10**9)
    seq_len: int = option(1024, "sequence length in tokens", minimum=1, maximum=MAX_FORWARD_TOKENS)
    global_batch: int = option(32, "sequences per step, over all ranks", minimum=1)
    global_batch_tokens: int | None = option(
        None,
        "global batch in tokens; replaces global_batch",
        minimum=1,
        maximum=MAX_STEP_TOKENS,
    )
    micro_batch: int | None = option(
        None, "sequences per forward pass of a rank; unset: its whole share", minimum=1
    )
    grad_clip: float = option(1.0, "maximum gradient norm; 0: no clipping", minimum=0.0)
    dtype: str = option(
        "auto", "compute dtype; weights stay fp32", choices=("auto", "bf16", "fp32")
    )
    compile: bool = option(False, "apply torch.compile to each block and to the loss")
    recompute: str = option(
        "none",
        "activation checkpointing: what the backward pass computes again; selective: all but "
        "matrix products and attention",
        choices=("none", "selective", "full"),
    )
    recompute_every: int = option(
        1, "of the blocks every n-th one is recomputed", minimum=1, maximum=4096
    )
    recompute_modules: tuple[str, ...] = option(
        (),
        "modules of a block that are recomputed, each by itself; unset: the block",
        choices=PARTS,
    )
    offload_activations: int = option(
        0,
        "blocks whose activations may be on the way to the host's memory, where they wait for the "
        "backward pass; 0: activations stay on the device",
        minimum=0,
        maximum=4096,
    )
    seed: int = option(0, "seed for weight initialization", minimum=0)
    deterministic: bool = option(False, "use deterministic kernels only, on GPUs too")

    @property
    def sequences(self) -> int:
        """Sequences of one global step."""
        if self.global_batch_tokens is None:
            return self.global_batch
        return self.global_batch_tokens // self.seq_len

    def problems(self) -> list[str]:
        found = []
        if self.recompute == "none" and (self.recompute_every > 1 or self.recompute_modules):
            found.append(
                "train.recompute_every, train.recompute_modules: nothing is recomputed; set "
                "train.recompute to selective or full, or leave them out"
            )
        most = MAX_STEP_TOKENS // self.seq_len
        if self.sequences > most:
            return [
                *found,
                f"train.global_batch = {self.global_batch}: these sequences of train.seq_len = "
                f"{self.seq_len} are over {MAX_STEP_TOKENS} tokens a step; give at most {most}",
            ]
        if self.global_batch_tokens is None or self.global_batch_tokens % self.seq_len == 0:
            return found
        down = self.global_batch_tokens // self.seq_len * self.seq_len
        return [
            *found,
            f"train.global_batch_tokens = {self.global_batch_tokens}: must be a multiple of "
            f"train.seq_len = {self.seq_len}, such as {down or self.seq_len}",
        ]


@dataclass(frozen=True)
class EvalSetConfig:
    path: str = option(REQUIRED, "directory of token shards, of which the validation split is used")
    name: str = option("", "its name in metrics and messages; unset: the last part of path")


@dataclass(frozen=True)
class EvalConfig:
    interval: int = option(0, "steps between validations; 0: never validate", minimum=0)
    samples: int = option(256, "validation sequences of each set; 0: the whole split", minimum=0)
    sets: tuple[EvalSetConfig, ...] = option(
        (),
        "data sets to validate on, in place of the run's own; [[eval.sets]] in a file; val_loss is "
        "that of the first",
    )

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        return tuple(SourceConfig(each.path, each.name) for each in self.sets)

    def problems(self) -> list[str]:
        names = Counter(source.label for source in self.sources)
        return [
            f"eval.sets: {count} have the name {name}; give each a name of its own"
            for name, count in names.items()
            if count > 1
        ]


@dataclass(frozen=True)
class RunConfig:
    run: RunSection = field(default_factory=RunSection)
    train: TrainConfig = field(default_factory=TrainConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    trackers: TrackersConfig = field(default_factory=TrackersConfig)
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
        if self.preference.loss == "dpo" and self.model.init_from is None:
            found.append(
                "preference.loss = dpo: needs the model to start from, which is also its "
                "reference; give model.init_from"
            )
        if self.lora.rank and self.model.init_from is None:
            found.append(
                f"lora.rank = {self.lora.rank}: adapters need weights to adapt; name them, "
                "--model.init_from=DIR, or train all weights, --lora.rank=0"
            )
        if self.lora.rank and self.preference.loss != "none":
            found.append(
                f"lora.rank = {self.lora.rank}: adapters are not built for preference.loss = "
                f"{self.preference.loss}; train all weights, --lora.rank=0"
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
    if micro * cfg.seq_len > MAX_FORWARD_TOKENS:
        raise ConfigError(
            f"train.micro_batch = {cfg.micro_batch or 'none'}: a forward pass of {micro} sequences "
            f"of {cfg.seq_len} tokens on one rank is too large; give --train.micro_batch at most "
            f"{MAX_FORWARD_TOKENS // cfg.seq_len}"
        )
    return micro
