"""Check a configuration against the weights that it names. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kempner.checkpoint.history import has_checkpoint
from kempner.config.loading import SectionValues, load_config_files
from kempner.config.option import ConfigError
from kempner.config.values import format_value
from kempner.data.sidecar import open_sidecar
from kempner.data.text.vocabulary import read_vocabulary, vocabularies_agree
from kempner.extensions.hf.source import (
    CONFIG_FILE,
    HF_FOLDER,
    TOKENIZER_FILE,
    WeightsSource,
    find_weights,
    source_tokenizer,
    tokenizer_of_file,
)
from kempner.model.config import OF_CONTEXT, OF_TRAINING, ModelConfig
from kempner.train.sections import RunConfig


def complete_model(values: SectionValues, run_dir: str) -> list[str]:
    """Fill in [model] from the weights of model.init_from, or from the run that is forked. A key
    that contradicts them is a problem, except the maximum length and options that only shape the
    training, which are not part of the weights. A fork may have another context."""
    model = values["model"]
    if (source := model.get("init_from")) is None:
        return []
    run = Path(values["run"].get("dir") or run_dir)
    try:
        shape = model_of_begun_run(
            run, Path(values["checkpoint"].get("dir") or run / "checkpoints"), source
        )
        shape = shape or find_weights(values["run"].get("fork") or source).model()
    except ConfigError as error:
        return [f"model.init_from: {problem}" for problem in error.problems]
    may_change = {"init_from", "max_seq_len", *OF_TRAINING}
    if values["run"].get("fork"):
        may_change |= {*OF_CONTEXT}
    whole = asdict(ModelConfig(**shape))  # what a config.json omits has its default
    # Here None means a value derived from others: the weights' value replaces it.
    unset = [key for key in ("n_kv_heads", "head_dim") if model.get(key) is None]
    model |= {key: value for key, value in shape.items() if key in unset or key not in model}
    return [
        f"model.{key} = {format_value(model[key])}: the weights of model.init_from = {source} have "
        f"{format_value(whole[key])}; leave model.{key} out"
        for key in model
        if key in whole.keys() - may_change and model[key] != whole[key]
    ]


def model_of_begun_run(run: Path, checkpoints: Path, source: str) -> dict[str, Any] | None:
    """Return the [model] section of a run that has a checkpoint, and so no longer needs its source;
    None if it has yet to start from `source`."""
    if not has_checkpoint(checkpoints):
        return None
    try:
        model = load_config_files(RunConfig, [run / "config.toml"]).model
    except ConfigError:  # missing, or of a version with other options
        return None
    return asdict(model) if model.init_from == source else None


def check_tokenizer(weights: WeightsSource, cfg: RunConfig) -> list[str]:
    """List the problems if the token ids of the data differ from those of the weights."""
    from kempner.data.opening import has_sidecar  # imports NumPy, which --help avoids

    own = source_tokenizer(weights)
    if own is None:
        return []
    problems = []
    for one in cfg.data.mixed:
        theirs = None
        if has_sidecar(one):
            file = Path(one.path).expanduser() / TOKENIZER_FILE
            theirs = {**open_sidecar(one.path).tokenizer, "file": str(file)}
        elif (file := Path(one.tokenizer).expanduser()).is_file():  # streamed text
            theirs = tokenizer_of_file(file)
        if theirs is not None and not same_ids(theirs, own):
            of_bytes = own["kind"] == "bytes"
            name = "bytes" if of_bytes else own["file"]
            fix = f"prepare the data again with --tokenizer {name}"
            # A run's tokenizer cannot be replaced: the dataset.json beside it has its hash.
            if not weights.is_checkpoint and not of_bytes:
                fix += f"; if its ids mean the same, put the data's {TOKENIZER_FILE} in its place"
            problems.append(other_ids(one.path, theirs, own, fix))
    return problems


def other_ids(what: str, theirs: Mapping[str, str], own: Mapping[str, str], fix: str) -> str:
    return (
        f"{what}: its tokenizer is {_shown(theirs)}, that of the weights {_shown(own)}, so that a "
        f"token id means different text; {fix}"
    )


def same_ids(theirs: Mapping[str, str], own: Mapping[str, str]) -> bool:
    """Return whether token ids mean the same to two tokenizers. The files may differ: a tool may
    have rewritten one, or one may have more tokens, those of a chat template."""
    # A byte tokenizer has no vocabulary file: it equals only itself.
    if theirs["hash"] == own["hash"] or "bytes" in (theirs["kind"], own["kind"]):
        return theirs["hash"] == own["hash"]
    return vocabularies_agree(*(read_vocabulary(Path(each["file"])) for each in (theirs, own)))


def _shown(tokenizer: Mapping[str, str]) -> str:
    """Describe a tokenizer: `models/a/tokenizer.json (sha256:1a2b3c4d5e6f)`."""
    return f"{tokenizer['name']} ({tokenizer['hash'][:19]})".replace(" ()", "")


def changed_config(weights: WeightsSource, cfg: RunConfig) -> list[str]:
    """List differences between the config.json of weights that every start reads and the run's copy
    of it. Only the model's own values count."""
    copy = Path(cfg.run.dir) / HF_FOLDER  # in a fork, the other run's copy
    if weights.is_checkpoint or cfg.run.fork or not (copy / CONFIG_FILE).is_file():
        return []
    # Compared as values: a tool may rewrite the file, or add keys.
    before, now = WeightsSource(weights.name, copy, False).model(), weights.model()
    differ = [
        f"{name} is {format_value(before.get(name))} there, {format_value(now.get(name))} here"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if not differ:
        return []
    return [
        f"model.init_from: {weights.path / CONFIG_FILE} has changed since the run began "
        f"({'; '.join(differ)}); restore it from {copy / CONFIG_FILE}"
    ]
