"""Opening of a run's sources and their mixture from [data]; comparison with a checkpoint's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from kempner.config.option import ConfigError
from kempner.data.config import FAKE, DataConfig, SourceConfig
from kempner.data.mixture import Ingredient, Mixture, MixturePhase
from kempner.data.source import Shape, Source
from kempner.jobs.system.front_door import how_to_run

DataFacts = dict[str, Any]  # JSON


@dataclass(frozen=True)
class Opening:
    """Settings for opening the sources of a run."""

    shape: Shape
    check: bool  # all files, as on rank 0
    bookmarks: Path  # directory for those of streamed data sets


def open_sources(cfg: DataConfig, how: Opening) -> list[Source]:
    """Open the training split of each source. Raises ConfigError with all their problems."""
    sources, problems = _splits(cfg.mixed, "train", how)
    # In this order: each check relies on the previous ones.
    problems = problems or _other_kind(cfg) or one_vocabulary(cfg) or _uncounted(cfg, sources)
    if problems:
        raise ConfigError(problems)
    return sources


def open_held_out(cfg: DataConfig, sets: Sequence[SourceConfig], how: Opening) -> list[Source]:
    """Open the validation splits of these sets; without any, those of the run's sources that have
    one, joined. Raises ConfigError."""
    alone = len(cfg.mixed) == 1
    own = [one for one in cfg.mixed if alone or format_of(one, how).holds_out(one, how)]
    sources, problems = _splits(sets or own, "val", how)
    if sets and not problems:
        problems += one_vocabulary(replace(cfg, sources=(*cfg.mixed, *sets)))
    if problems or not sources:
        *others, last = problems or ["data.sources: none of them has a validation split"]
        raise ConfigError(others, f"{last}; or do not validate: give --eval.interval=0")
    if sets or len(sources) == 1:
        return list(sources)

    from kempner.data.formats.joined import Joined

    return [Joined(sources)]


class DataFormat(NamedTuple):
    """A data format. Its dependencies are imported when a source has it."""

    has: Callable[[SourceConfig], bool]
    open: Callable[[SourceConfig, str, Opening], Source]  # source, split; raises ConfigError
    holds_out: Callable[[SourceConfig, Opening], bool]  # is there a validation split?


def format_of(cfg: SourceConfig, how: Opening) -> DataFormat:
    """Return the first of FORMATS that the source has. Pairs of answers are
    always prepared data."""
    found = (each for each in FORMATS if each.has(cfg))
    return PREPARED if how.shape.preferences else next(found, PREPARED)


def _splits(
    sources: Sequence[SourceConfig], split: str, how: Opening
) -> tuple[list[Source], list[str]]:
    splits, problems = [], []
    for one in sources:
        try:
            splits.append(open_split(one, split, how))
        except ConfigError as error:
            problems += error.problems
    return splits, problems


def open_split(cfg: SourceConfig, split: str, how: Opening) -> Source:
    """Open the samples of one split of a source. Raises ConfigError."""
    return format_of(cfg, how).open(cfg, split, how)


def _open_fake(cfg: SourceConfig, split: str, how: Opening) -> Source:

    from kempner.data.formats.fake import FakeDataset

    return FakeDataset(cfg.label, how.shape)


def _open_prepared(cfg: SourceConfig, split: str, how: Opening) -> Source:
    from kempner.data.sidecar import open_sidecar

    shape, kind = how.shape, open_sidecar(cfg.path).kind  # reports what is missing
    if (kind == "preference") != shape.preferences:
        raise ConfigError(
            f"{cfg.path}: holds data of the kind {kind}; "
            + (
                "preference.loss needs the kind preference: prepare_data.py --kind preference"
                if shape.preferences
                else "give --preference.loss=dpo or reward"
            )
        )

    copy = Path(cfg.path).expanduser()
    if os.environ.get("KEMPNER_STAGED"):
        from kempner.data.prepare.stage import staged_dir

        copy = staged_dir(cfg.path)
    if kind != "text":
        from kempner.data.formats.chat_dataset import ChatDataset

        return ChatDataset.open(copy, split, shape, how.check, name=cfg.label)

    from kempner.data.formats.dataset import TokenDataset

    return TokenDataset.open(
        copy,
        split,
        shape.seq_len,
        shape.vocab_size,
        how.check,
        separate=shape.separate,
        name=cfg.label,
    )


def _prepared_hold_out(cfg: SourceConfig, how: Opening) -> bool:
    from kempner.data.sidecar import open_sidecar

    # More than seq_len: a sample has one more token, its last target.
    return open_sidecar(cfg.path).tokens("val") > how.shape.seq_len


def _is_megatron(cfg: SourceConfig) -> bool:
    from kempner.data.formats.megatron import is_megatron

    return is_megatron(cfg.path)


def _open_megatron(cfg: SourceConfig, split: str, how: Opening) -> Source:
    from kempner.data.formats.megatron import MegatronDataset

    if split != "train":
        raise ConfigError(f"{cfg.path}: Megatron files have no validation split")
    return MegatronDataset.open(cfg.path, how.shape, cfg.label, how.check)


def _is_hugging_face(cfg: SourceConfig) -> bool:
    from kempner.data.formats.hf_dataset import is_hugging_face

    return is_hugging_face(cfg.path)


def _open_hugging_face(cfg: SourceConfig, split: str, how: Opening) -> Source:
    from kempner.data.formats.hf_dataset import open_hugging_face

    return open_hugging_face(cfg, split, how.shape, how.check, how.bookmarks)


def _hugging_face_holds_out(cfg: SourceConfig, how: Opening) -> bool:
    return (Path(cfg.path).expanduser() / "dataset_dict.json").is_file()


def _other_kind(cfg: DataConfig) -> list[str]:
    """List sources whose kind is not data.kind: plain text would train a chat model without an
    error, but to another end."""
    kinds = [(one.path, _kind_of(one)) for one in cfg.mixed if cfg.kind and one.path != FAKE]
    how = "no --kind" if cfg.kind == "text" else f"--kind {cfg.kind} --tokenizer DIR"
    return [
        f"{path}: holds data of the kind {kind}, and data.kind = {cfg.kind}; prepare them by "
        f"`{how_to_run('prepare_data.py')}` with {how}, or give --data.kind={kind}"
        for path, kind in kinds
        if kind != cfg.kind
    ]


def _kind_of(cfg: SourceConfig) -> str:
    if not has_sidecar(cfg):
        return "text"
    from kempner.data.sidecar import open_sidecar

    return open_sidecar(cfg.path).kind


def _uncounted(cfg: DataConfig, sources: Sequence[Source]) -> list[str]:
    """List problems of sources of unknown size: they have no share by size, and no epochs."""
    return [
        f"data source {one.label}: is streamed, and its size is not known; "
        + ("remove max_epochs" if one.max_epochs else "give each source a weight")
        for one, source in zip(cfg.mixed, sources, strict=True)
        if source.ordered and (one.max_epochs or (one.weight is None and len(sources) > 1))
    ]


def one_vocabulary(cfg: DataConfig) -> list[str]:
    """List the token shards made with a different tokenizer than the first."""
    prepared = [one.path for one in cfg.mixed if has_sidecar(one)]
    if len(prepared) < 2:
        return []
    from kempner.data.sidecar import open_sidecar

    tokenizers = [(path, open_sidecar(path).tokenizer) for path in prepared]
    return [
        f"{path}: its tokenizer is {tokenizer['name']}, that of {tokenizers[0][0]} is "
        f"{tokenizers[0][1]['name']}; a token id must mean the same in all sources: prepare it "
        f"again with --tokenizer {tokenizers[0][0]}/tokenizer.json"
        for path, tokenizer in tokenizers[1:]
        if tokenizer["hash"] != tokenizers[0][1]["hash"]
    ]


def has_sidecar(cfg: SourceConfig) -> bool:
    if cfg.path == FAKE:
        return False
    from kempner.data.sidecar import SIDECAR

    return (Path(cfg.path).expanduser() / SIDECAR).is_file()


PREPARED = DataFormat(has_sidecar, _open_prepared, _prepared_hold_out)
FORMATS = (  # in the order in which they are looked for
    DataFormat(lambda cfg: cfg.path == FAKE, _open_fake, lambda *_: False),
    PREPARED,
    DataFormat(_is_megatron, _open_megatron, lambda *_: False),
    DataFormat(_is_hugging_face, _open_hugging_face, _hugging_face_holds_out),
)


def facts_of(cfg: DataConfig, sources: Sequence[Source]) -> DataFacts:
    """Return everything that determines a mixture, as JSON for a manifest."""
    return {
        "sources": [
            {
                "name": one.label,
                "path": str(Path(one.path).expanduser().absolute()),
                "size": len(source),
                "ordered": source.ordered,
                "max_epochs": one.max_epochs,
                "weight": one.weight,
                **source.identity(),
            }
            for one, source in zip(cfg.mixed, sources, strict=True)
        ],
        "phases": [asdict(phase) for phase in cfg.phases],
        "temperature": cfg.temperature,
    }


def mixture_of(facts: Mapping[str, Any], starts: Sequence[int], seed: int = 0) -> Mixture:
    """Build the mixture from its facts. `starts`: the sample number at which each phase begins. A
    phase without weights has those of the sources, whose default weight is their size."""
    keys = ("name", "size", "max_epochs", "ordered")
    parts = [Ingredient(*(one[key] for key in keys)) for one in facts["sources"]]
    own = [one["size"] if one["weight"] is None else one["weight"] for one in facts["sources"]]

    later = zip(starts, facts["phases"], strict=True)
    weights = [(0, own), *((start, entry["weights"] or own) for start, entry in later)]
    power = 1.0 / facts["temperature"]
    phases = [MixturePhase(start, _to_the_power(each, power)) for start, each in weights]
    if any(b.start <= a.start for a, b in pairwise(phases)):
        raise ConfigError(
            "data.phases: must be in the order in which they begin, but begin at samples "
            f"{', '.join(str(start) for start in starts)}; correct start_step or start_token"
        )
    return Mixture(parts, phases, seed)


def _to_the_power(weights: Sequence[float], power: float) -> tuple[float, ...]:
    """Raise weights to a power; if that leaves the range of floats, their ratios to the largest."""
    with contextlib.suppress(OverflowError):
        powers = tuple(weight**power if weight else 0.0 for weight in weights)
        if any(powers):
            return powers
    largest = max(weights)
    return tuple((weight / largest) ** power for weight in weights)
