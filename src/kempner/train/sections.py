"""A run's configuration: all sections, and the checks across them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kempner.checkpoint.config import CheckpointConfig
from kempner.config.option import REQUIRED_OPTION, ConfigError, Sections, option
from kempner.data.config import DataConfig, SourceConfig
from kempner.data.stages import RampStage, ramp_problems, ramp_stages, stage_at
from kempner.jobs.trackers.config import TrackersConfig
from kempner.model.config import ModelConfig
from kempner.optim.config import FreezeConfig, OptimizerConfig, ScheduleConfig
from kempner.parallel.config import DistributedConfig, ExpertsConfig, LoraConfig
from kempner.train import lookup
from kempner.train.recording.config import MetricsConfig, ProfileConfig
from kempner.train.resilience.config import ResilienceConfig

# A rank may read the tokens of a whole step at once, 8 bytes each, and those of max_steps must fit
# 64 bits; published runs stay below 2**27. A forward pass of 2**24 tokens exceeds any memory.
MAX_STEP_TOKENS = 2**30
MAX_FORWARD_TOKENS = 2**24
BUDGETS = ("budget-75", "budget-50", "budget-25")  # values of train.recompute
BLOCK_PARTS = ("attention_norm", "attention", "ffn_norm", "ffn")  # the modules of a block


@dataclass(frozen=True)
class RunSection:
    dir: str = option(
        "", "run directory, which identifies the run; unset: runs/<name of the first file>"
    )
    fork: str = option(
        "",
        "begin from a checkpoint of another run: RUN, its directory, or RUN@STEP; "
        "see docs/guide/fork.md",
    )
    fork_optimizer: str = option(
        "keep",
        "optimizer state taken over from run.fork; fresh: begin with none",
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
    batch_ramp: tuple[int, int, int] | None = option(
        None,
        "[B, I, N]: the batch begins with B sequences and grows by I at a time; step N has the "
        "global batch; unset: all steps have it",
        minimum=1,
    )
    seq_len_ramp: tuple[int, int] | None = option(
        None,
        "[L, N]: sequences are cut into shorter ones of L tokens; L doubles at equal intervals "
        "until they are whole at step N; unset: never cut",
        minimum=1,
    )
    grad_clip: float = option(1.0, "maximum gradient norm; 0: no clipping", minimum=0.0)
    dtype: str = option(
        "auto",
        "dtype of the products; auto: bf16 on a GPU, else fp32",
        choices=("auto", "bf16", "fp32"),
    )
    weights: str = option(
        "fp32",
        "dtype of the weights and their gradients; bf16: half the memory, and updates are rounded "
        "stochastically; see optimizer.moments, too",
        choices=("fp32", "bf16"),
    )
    fp8: str = option(
        "none",
        "matrix products of the blocks in 8-bit floats, by torchao, with one scale per tensor or "
        "row; _gather: FSDP sends these, too; needs an Ada, Hopper or later GPU; mxfp8: one scale "
        "per 32 numbers; needs a Blackwell GPU",
        choices=("none", "tensorwise", "tensorwise_gather", "rowwise", "mxfp8"),
    )
    attention: str = option(
        "auto",
        "attention kernel; auto: the fastest that torch has for the shape; fa3, fa4: "
        "FlashAttention 3 and 4, from their own packages",
        choices=("auto", "cudnn", "flash", "fa3", "fa4", "efficient", "math"),
    )
    loss_chunk: int | None = option(
        None,
        "tokens whose logits exist at once; unset: enough for 2^27 logits, or 2^29 if compiled on "
        "a GPU",
        minimum=1,
        maximum=MAX_FORWARD_TOKENS,
    )
    z_loss: float = option(
        0.0, "coefficient of the z-loss of the output, which keeps its logits small", minimum=0.0
    )
    compile: bool = option(False, "apply torch.compile")
    compile_scope: str = option(
        "block",
        "what train.compile compiles: each block and the loss, or the whole model",
        choices=("block", "model"),
    )
    recompute: str = option(
        "none",
        "activation checkpointing: what the backward pass computes again; selective: all but "
        "matrix products and attention; budget-N: what the compiler chooses, to keep N % of the "
        "activations; auto: as little as the memory allows",
        choices=("none", "selective", *BUDGETS, "full", "auto"),
    )
    recompute_every: int = option(1, "recompute only every n-th block", minimum=1, maximum=4096)
    recompute_modules: tuple[str, ...] = option(
        (),
        "modules of a block that are recomputed, each by itself; unset: the block",
        choices=BLOCK_PARTS,
    )
    offload_activations: int = option(
        0,
        "blocks whose activations may be in transit to host memory, where they wait for the "
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

    @functools.cached_property
    def stages(self) -> list[RampStage]:
        """Sizes of all steps."""
        first, over = self.seq_len_ramp or (self.seq_len, 0)
        doublings = (self.seq_len // first).bit_length() - 1
        return ramp_stages(
            self.sequences, self.batch_ramp, [2**i for i in range(doublings, 0, -1)], over
        )

    def stage(self, step: int) -> RampStage:
        """Return the sizes of a step."""
        return stage_at(self.stages, step)

    def problems(self) -> list[str]:
        problems = ramp_problems(self.sequences, self.batch_ramp, self.seq_len, self.seq_len_ramp)
        by_block = self.recompute in ("selective", "full")
        if not by_block and (self.recompute_every > 1 or self.recompute_modules):
            problems.append(
                f"train.recompute_every, train.recompute_modules: train.recompute = "
                f"{self.recompute} chooses no blocks; set it to selective or full, or leave them "
                "out"
            )
        if self.recompute in BUDGETS and not self.compile:
            problems.append(
                f"train.recompute = {self.recompute}: is done by the compiler; add "
                "--train.compile, or give selective or full"
            )
        most = MAX_STEP_TOKENS // self.seq_len
        if self.sequences > most:
            problems.append(
                f"train.global_batch = {self.global_batch}: with train.seq_len = {self.seq_len} "
                f"this is over {MAX_STEP_TOKENS} tokens a step; give at most {most}"
            )
        elif self.global_batch_tokens is not None and self.global_batch_tokens % self.seq_len:
            down = self.global_batch_tokens // self.seq_len * self.seq_len
            problems.append(
                f"train.global_batch_tokens = {self.global_batch_tokens}: must be a multiple of "
                f"train.seq_len = {self.seq_len}, such as {down or self.seq_len}"
            )
        if self.weights == "bf16" and self.dtype != "bf16":
            problems.append(
                f"train.weights = bf16: with train.dtype = {self.dtype} the products would be no "
                "more exact than the weights; add --train.dtype=bf16"
            )
        if self.compile_scope == "model" and not self.compile:
            problems.append(
                "train.compile_scope = model: nothing is compiled; add --train.compile, or leave "
                "train.compile_scope out"
            )
        if self.compile_scope == "model" and self.offload_activations:
            problems.append(
                "train.offload_activations with train.compile_scope = model: activations are "
                "offloaded block by block; leave one of the two out"
            )
        return problems


@dataclass(frozen=True)
class EvalSetConfig:
    path: str = option(REQUIRED_OPTION, "directory of token shards, whose validation split is used")
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
            f"eval.sets: {count} have the name {name}; give each its own name"
            for name, count in names.items()
            if count > 1
        ]


@dataclass(frozen=True)
class RunConfig(Sections):
    """The trainer's sections are fields; those of extensions are found by name: cfg.of(CLASS)."""

    run: RunSection = field(default_factory=RunSection)
    train: TrainConfig = field(default_factory=TrainConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    freeze: FreezeConfig = field(default_factory=FreezeConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    trackers: TrackersConfig = field(default_factory=TrackersConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    @classmethod
    def find_sections(cls, name: str) -> Mapping[str, type]:
        return lookup.sections_with(name)

    @classmethod
    def all_sections(cls) -> Mapping[str, type]:
        return lookup.every_section()

    @property
    def checkpoint_dir(self) -> Path:
        return Path(self.checkpoint.dir or f"{self.run.dir}/checkpoints")


def check_batch(cfg: TrainConfig, world_size: int) -> None:
    """Raise ConfigError with the arithmetic if the global batch of some step does not divide into
    the micro-batches of `world_size` ranks."""
    for batch in sorted({stage.batch for stage in cfg.stages}, reverse=True):
        micro_batch(cfg, world_size, batch)


def micro_batch(cfg: TrainConfig, world_size: int, batch: int) -> int:
    """Return the sequences of one forward on one rank, in a step of `batch`: train.micro_batch, or
    all if a rank has fewer."""
    share, rest = divmod(batch, world_size)
    ramp = batch != cfg.sequences
    micro = cfg.micro_batch or share
    micro = min(micro, share) if ramp else micro
    if rest or not micro or share % micro:
        unit = world_size * (cfg.micro_batch or 1)
        near, key = max(unit, batch // unit * unit), "train.global_batch"
        if cfg.global_batch_tokens is not None:
            near, key = near * cfg.seq_len, "train.global_batch_tokens"
        what = f"{world_size:,} rank{'s' * (world_size > 1)}"
        what += f" x micro_batch {cfg.micro_batch}" if cfg.micro_batch else ""
        if ramp:
            raise ConfigError(
                f"train.batch_ramp: {batch} sequences do not divide by {what} = {unit}; start and "
                f"increase by multiples of {unit} sequences"
            )
        if batch < unit:
            raise ConfigError(
                f"{key}: {batch:,} sequences cannot be shared by {what}, which need at least "
                f"{unit:,}; give --{key}={near}, or fewer ranks"
            )
        raise ConfigError(
            f"{key}: {batch} sequences do not divide by {what} = {unit}; "
            f"give a multiple of {unit} sequences, such as --{key}={near}"
        )
    if micro * cfg.seq_len > MAX_FORWARD_TOKENS:
        raise ConfigError(
            f"train.micro_batch = {cfg.micro_batch or 'none'}: a forward pass of {micro} sequences "
            f"of {cfg.seq_len} tokens on one rank is too large; give --train.micro_batch at most "
            f"{MAX_FORWARD_TOKENS // cfg.seq_len}"
        )
    return micro
