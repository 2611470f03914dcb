"""Sources of weights: a directory in Hugging Face format, a model of the hub, or a run.

No torch: a configuration is checked against its source before a GPU is requested.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kempner.checkpoint import commit, history, named
from kempner.config import toml
from kempner.config.option import ConfigError
from kempner.data.sidecar import BYTES_EOD, BYTES_TOKENIZER, SIDECAR, Sidecar
from kempner.data.text.vocabulary import read_vocabulary
from kempner.extensions.hf.families import Config, model_values
from kempner.jobs.system import hub
from kempner.jobs.system.files import step_of_name, write_atomic
from kempner.model.config import ModelConfig

HF_FOLDER = "hf"  # in a run: the files an imported model had beside its weights
CONFIG_FILE = "config.json"
GENERATION = "generation_config.json"  # names the tokens that end a text, among others
TOKENIZER_FILE = "tokenizer.json"


class WeightsSource(NamedTuple):
    """Weights on this machine: a directory in Hugging Face format, or a checkpoint of a run."""

    name: str  # as the user gave it
    path: Path
    is_checkpoint: bool

    @property
    def carried(self) -> Path:
        """The directory of the model's config.json and tokenizer, which a checkpoint may lack."""
        return run_of(self.path) / HF_FOLDER if self.is_checkpoint else self.path

    def model(self) -> dict[str, Any]:
        """Return the source's [model] section: values by key. Raises ConfigError."""
        if not self.is_checkpoint:
            return model_values(read_hf_config(self.path), str(self.path / CONFIG_FILE))
        try:
            fixed = history.read_manifest(self.path)["fixed"]
        except history.Damaged as error:
            raise ConfigError(f"{error}; name an older checkpoint") from None
        model = ModelConfig(**fixed["model"])
        # Explicit, as in a config.json: if unset, they would follow from the reader's other keys.
        heads = {"n_kv_heads": model.kv_heads, "head_dim": model.resolved_head_dim}
        values = asdict(model) | heads
        del values["init_from"]
        return values


def find_weights(name: str, download: bool = False, pinned: bool = False) -> WeightsSource:
    """Resolve `name`: PATH, OWNER/NAME[@REVISION] of the hub, or RUN[@STEP]. Raises ConfigError.

    With `pinned`, a run without a step is refused, because its newest checkpoint changes. A model
    of the hub is looked up in the local cache only, unless `download` is set: cluster nodes have no
    network, and a thousand ranks must not query one server.
    """
    path = Path(name).expanduser()
    if path.is_dir() and (path / CONFIG_FILE).is_file():
        return WeightsSource(name, path, False)
    directory, step = named.split_name(name)
    if directory.is_dir():
        if not any((directory / file).exists() for file in named.CHECKPOINT_SIGNS):
            raise ConfigError(
                f"{name or 'an empty name'}: is neither a model, with a {CONFIG_FILE}, nor a run; "
                "name one"
            )
        source = WeightsSource(name, named.find_checkpoint(name), True)
        # The path of a checkpoint already names its step.
        if pinned and step is None and path.resolve() != source.path:
            step = step_of_name(source.path.name)
            raise ConfigError(
                f"{name}: every start reads these weights, and they must stay the same; name a "
                f"step, such as {name}@{step}"
            )
        return source
    return WeightsSource(name, hub.hub_snapshot(name, download), False)


@contextlib.contextmanager
def held_weights(name: str, download: bool = False) -> Iterator[WeightsSource]:
    """Run find_weights() and protect a checkpoint from its run's retention while it is read. A
    damaged one is bad input and raises ConfigError."""
    source = find_weights(name, download)
    if not source.is_checkpoint:
        yield source
        return
    with commit.reading_lock(source.path):
        # Only under the lock, because retention may have removed it before.
        if (source.path / history.MANIFEST).exists():
            try:
                yield source
            except history.Damaged as error:
                fix = f"name an older one, {run_of(source.path)}@STEP"
                raise ConfigError(f"{source.path} is damaged: {error}; {fix}") from None
            return
    with held_weights(name) as source:  # removed in between: now there is a newer one
        yield source


def run_of(checkpoint: Path) -> Path:
    """Return the run directory of a checkpoint: its parent, unless checkpoint.dir was set."""
    around = checkpoint.parent.parent
    with contextlib.suppress(OSError, ValueError, KeyError):
        run_dir = Path(toml.loads((checkpoint / "config.toml").read_text())["run"]["dir"])
        # The surrounding directory comes first: a run may have been moved or copied since the save.
        if run_dir.is_dir() and not (around / "config.toml").is_file():
            return run_dir
    return around


def read_hf_config(directory: Path, name: str = CONFIG_FILE) -> Config:
    """Read the config.json of a directory, or its GENERATION. Raises ConfigError."""
    try:
        content = json.loads((directory / name).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory / name}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{directory / name}: not a JSON object")
    return content


def copy_model_files(source: Path, target: Path, patterns: Sequence[str] = hub.CARRIED) -> None:
    """Copy config.json, generation_config.json, and the tokenizer's files."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in patterns):
            # Each file atomically: a killed start must not leave half of a tokenizer.
            with file.open("rb") as reader:
                write_atomic(target / file.name, partial(shutil.copyfileobj, reader))


def source_tokenizer(source: WeightsSource) -> dict[str, str] | None:
    """Return name, kind and hash of the tokenizer that the weights were trained with, as in a
    sidecar, and its file, if any; None if it is not with the weights. Raises ConfigError."""
    run = run_of(source.path)
    # First: hf/ holds the tokenizer of the original model; the run's data may have another.
    if source.is_checkpoint and (run / SIDECAR).is_file():
        return {**Sidecar.load(run / SIDECAR).tokenizer, "file": str(run / TOKENIZER_FILE)}
    file = source.carried / TOKENIZER_FILE
    if is_of_bytes(source.carried):
        return dict(BYTES_TOKENIZER)
    return tokenizer_of_file(file) if file.is_file() else None


def tokenizer_of_file(file: Path) -> dict[str, str]:
    """Describe a tokenizer.json like source_tokenizer()."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    name = "/".join(file.parts[-2:])
    return {"name": name, "kind": TOKENIZER_FILE, "hash": f"sha256:{digest}", "file": str(file)}


def is_of_bytes(directory: Path) -> bool:
    """Return whether a directory holds a model of bytes, as export() writes it: its texts end with
    token 256, and it has no tokenizer."""
    return end_tokens(directory) == [BYTES_EOD] and not (directory / TOKENIZER_FILE).is_file()


def end_tokens(directory: Path) -> list[int]:
    """Return the ids that generation_config.json or config.json name, none without either. A chat
    model ends a turn and a document with different tokens. Raises ConfigError."""
    # In the order of transformers.
    for name in (GENERATION, CONFIG_FILE):
        if (directory / name).is_file():
            ids = read_hf_config(directory, name).get("eos_token_id")
            if ids is not None:
                return [ids] if isinstance(ids, int) else list(ids)
    return []


def vocabulary_size(directory: Path) -> int:
    """Return one more than the largest id of tokenizer.json; 0 without one. Raises ConfigError."""
    file = directory / TOKENIZER_FILE
    return max(read_vocabulary(file), default=-1) + 1 if file.is_file() else 0
