"""The [data] section: which tokens, in which order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import PurePath

from kempner.config.option import REQUIRED_OPTION, option

FAKE = "fake:"  # instead of a path: random tokens, for measurements


@dataclass(frozen=True)
class SourceConfig:
    path: str = option(
        REQUIRED_OPTION,
        "directory of token shards, Megatron's .bin and .idx without their endings, a Hugging Face "
        "data set saved to disk, or Parquet or JSONL files to stream",
    )
    name: str = option(
        "", "its name in metrics and messages; unset: the last part of path that is not a pattern"
    )
    weight: float | None = option(
        None, "its share of the samples, relative to the others; unset: its size", minimum=0.0
    )
    max_epochs: int | None = option(
        None, "most times a sample is used; then the other sources take its share", minimum=1
    )

    column: str = option(
        "", "of a Hugging Face data set or files: the tokens or text; unset: input_ids, or text"
    )
    tokenizer: str = option("", "tokenizer.json to encode a column of text with")

    @property
    def label(self) -> str:
        path = PurePath(self.path)
        return self.name or (path.parent if "*" in path.name else path).name


@dataclass(frozen=True)
class PhaseConfig:
    start_step: int | None = option(None, "the step at which it begins, counted from 0", minimum=1)
    start_token: int | None = option(
        None, "the number of trained tokens after which it begins", minimum=1
    )
    weights: tuple[float, ...] = option(
        (), "weights in the order of data.sources; unset: those of the sources", minimum=0.0
    )
    lr_scale: float = option(1.0, "factor of the scheduled learning rate", minimum=0.0)


@dataclass(frozen=True)
class DataConfig:
    dataset_path: str = option(
        "",
        "directory of token shards made by scripts/prepare_data.py; fake: is random tokens, for a "
        "check or a measurement without data",
    )
    sources: tuple[SourceConfig, ...] = option(
        (), "several data sets, in place of dataset_path; [[data.sources]] in a file"
    )
    kind: str | None = option(
        None, "what the sources must hold; none: anything", choices=("text", "chat", "preference")
    )
    temperature: float = option(
        1.0,
        "shares are proportional to weight^(1/temperature); large: all equal",
        minimum=1e-3,
        maximum=1e6,
    )
    phases: tuple[PhaseConfig, ...] = option(
        (), "changes of the weights or the learning rate; [[data.phases]] in a file"
    )
    too_long: str = option(
        "drop",
        "what to do with conversations longer than train.seq_len: drop them, or cut off their end",
        choices=("drop", "cut"),
    )
    document_mask: bool = option(
        False, "tokens attend only to their own document, and none is predicted from another"
    )
    reset_positions: bool = option(
        True, "with document_mask, positions begin at 0 in each document, not in each sample"
    )
    seed: int = option(0, "shuffling seed", minimum=0)
    prefetch: int = option(
        2,
        "global batches to read ahead in the background; 0: read inside the step",
        minimum=0,
        maximum=1024,
    )

    @property
    def lr_scales(self) -> tuple[float, ...]:
        """Learning-rate factor of each phase; 1 before the first of `phases`."""
        return (1.0, *(phase.lr_scale for phase in self.phases))

    @property
    def mixed(self) -> tuple[SourceConfig, ...]:
        """Sources of the mixture; dataset_path alone counts as one. Empty if a run
        learns from rewards."""
        one = (SourceConfig(self.dataset_path),) if self.dataset_path else ()
        return self.sources or one

    def problems(self) -> list[str]:
        problems = []
        if self.dataset_path and self.sources:
            problems.append(
                "data.dataset_path: cannot be combined with data.sources; make it one of "
                'these, or give --data.dataset_path=""'
            )
        if len({source.weight is None for source in self.sources}) == 2:
            problems.append(
                "data.sources: some have a weight and some have none; write all or none"
            )
        if self.sources and all(source.weight == 0 for source in self.sources):
            problems.append("data.sources: all weights are 0; at least one must not be")
        names = Counter(source.label for source in self.mixed)
        problems += [
            f"data.sources: {count} have the name {name}; give each its own name"
            for name, count in names.items()
            if count > 1
        ]
        for i, phase in enumerate(self.phases):
            where = f"data.phases[{i}]"
            if (phase.start_step is None) == (phase.start_token is None):
                problems.append(f"{where}: must have either start_step or start_token; write one")
            if len(phase.weights) not in (0, len(self.mixed)):
                problems.append(
                    f"{where}.weights: {len(phase.weights)} weights for {len(self.mixed)} "
                    "sources; write one for each, in the order of data.sources"
                )
            elif phase.weights and not any(phase.weights):
                problems.append(f"{where}.weights: all are 0; at least one must not be")
        return problems
