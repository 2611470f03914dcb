"""A model and its tokenizer from a run directory or a checkpoint, in this one process."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kempner.checkpoint import commit
from kempner.config import toml
from kempner.config.option import ConfigError
from kempner.data.sidecar import SIDECAR
from kempner.data.tokenizer import Tokenizer, load_tokenizer
from kempner.model.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from kempner.model.decoder import Decoder

GENERATION = "generation_config.json"  # of Hugging Face: which tokens end a text, among others


class Loaded(NamedTuple):
    model: Decoder
    tokenizer: Tokenizer
    begin: list[int]  # tokens before each text
    ends: set[int]  # tokens that end one
    window: int  # tokens that the model has been trained to see
    about: str  # for messages


def load(source: Path, device: str) -> Loaded:
    """`source`: a run, a directory of checkpoints, or a checkpoint. `device`: auto, cpu or cuda.

    The weights are bf16 on a GPU and fp32 on a CPU. Retention leaves the checkpoint alone while it
    is read. Raises ConfigError, or ValueError for a damaged checkpoint; each says what to do.
    """
    path = find_checkpoint(source)
    with commit.reading(path):
        manifest = commit.read_manifest(path)
        directory = find_tokenizer(source, path)
        tokenizer = load_tokenizer(directory)
        model = read_model(path, manifest, pick_device(device))
    return Loaded(
        model,
        tokenizer,
        begin=[tokenizer.eod],  # a document begins where one has ended
        ends={tokenizer.eod, *end_tokens(directory / "hf")},
        window=min(manifest["fixed"]["train"]["seq_len"], model.cfg.max_seq_len),
        about=f"step {manifest['step']:,} of {path}",
    )


def find_checkpoint(source: Path) -> Path:
    """The checkpoint that `source` names: itself, or the best one of a run or of a directory of
    checkpoints."""
    if not source.is_dir():
        raise ConfigError(f"{source}: no such directory; name a run or one of its checkpoints")
    if (source / commit.MANIFEST).is_file():
        return source.resolve()
    root = source / "checkpoints"
    if not root.is_dir() and (source / "config.toml").is_file():
        root = Path(read_config(source)["checkpoint"]["dir"])  # checkpoint.dir was set
    for path in commit.complete(root) or commit.complete(source):
        if (path / commit.MANIFEST).is_file():
            return path.resolve()
    raise ConfigError(
        f"{source}: contains no complete checkpoint; a run saves one every "
        "checkpoint.interval steps and at its end"
    )


def find_tokenizer(source: Path, checkpoint: Path) -> Path:
    """The directory that has the run's tokenizer: the run, or the data that it was made from."""
    config = read_config(checkpoint)
    named = (Path(config["run"]["dir"]), Path(config["data"]["dataset_path"]).expanduser())
    tried = dict.fromkeys((source, checkpoint.parent.parent, *named))
    for directory in tried:
        if (directory / SIDECAR).is_file():
            return directory
    raise ConfigError(
        f"{checkpoint}: its tokenizer is in none of {', '.join(map(str, tried))}; "
        f"copy {SIDECAR} (and tokenizer.json) from the data into the first of them"
    )


def end_tokens(directory: Path) -> list[int]:
    """The ids that generation_config.json names, none without one. A chat model ends its turn with
    another token than a document."""
    with contextlib.suppress(FileNotFoundError):
        ids = json.loads((directory / GENERATION).read_text()).get("eos_token_id") or []
        return [ids] if isinstance(ids, int) else list(ids)
    return []


def read_config(directory: Path) -> dict[str, Any]:
    return toml.loads((directory / "config.toml").read_text())


def pick_device(kind: str) -> torch.device:
    import torch

    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: no GPU is visible; give --device cpu")
    return torch.device("cuda" if kind != "cpu" and torch.cuda.is_available() else "cpu")


def read_model(path: Path, manifest: dict[str, Any], device: torch.device) -> Decoder:
    """The model of a checkpoint. Raises ValueError when the checkpoint is damaged."""
    from kempner.checkpoint.reader import read_into

    model = empty_model(ModelConfig(**manifest["fixed"]["model"]), device)
    try:
        read_into(path, {f"model.{name}": p for name, p in model.named_parameters()})
    except ValueError as error:
        raise ValueError(f"{error}; name an older checkpoint") from None
    return model


def empty_model(cfg: ModelConfig, device: torch.device) -> Decoder:
    """A model without values, for inference."""
    import torch

    from kempner.model.decoder import Decoder, rope_table
    from kempner.parallel.build import compute_dtype

    with torch.device("meta"):
        model = Decoder(cfg).to(compute_dtype("auto", device.type))
    model = model.to_empty(device=device).eval().requires_grad_(False)
    model.rope = rope_table(cfg).to(device)  # it stays fp32
    return model
