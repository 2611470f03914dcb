"""A checkpoint, whatever number of ranks wrote it -> a directory in Hugging Face's form."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kempner.checkpoint import commit
from kempner.checkpoint.reader import Want, read_table, read_wanted
from kempner.config.option import ConfigError
from kempner.data.sidecar import SIDECAR, Sidecar
from kempner.files import fsync, write_atomic
from kempner.hf.families import Config, config_json, tensor_names
from kempner.hf.source import CONFIG, FOLDER, TOKENIZER, carry, read_config, run_of
from kempner.hf.stored import INDEX, SINGLE
from kempner.model.config import ModelConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(checkpoint: Path, out: Path, dtype: str, shard_bytes: int) -> Path:
    """Write the model of a checkpoint, which the caller protects from retention, to a new
    directory; returns it.

    `dtype`: fp32, bf16, fp16, or auto: that of the model from which the run started, else fp32.
    Memory: one shard. Raises ConfigError, Damaged, OSError; nothing is left at `out` then.
    """
    if out.exists():
        raise ConfigError(f"{out}: exists already; give another directory, or remove it")
    manifest = commit.read_manifest(checkpoint)
    cfg = ModelConfig(**manifest["fixed"]["model"])
    beside = run_of(checkpoint)
    carried = read_config(beside / FOLDER) if (beside / FOLDER / CONFIG).is_file() else None
    torch_dtype = DTYPES[_dtype(carried) if dtype == "auto" else dtype]
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        kind = _write_beside(partial, beside, cfg, carried, str(torch_dtype).removeprefix("torch."))
        names = tensor_names(cfg, kind)
        _write_tensors(partial, checkpoint, manifest, names, torch_dtype, shard_bytes)
        fsync(partial)
        partial.rename(out)
        fsync(out.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return out


def _dtype(carried: Config | None) -> str:
    named = (carried or {}).get("dtype") or (carried or {}).get("torch_dtype")
    return {"bfloat16": "bf16", "float16": "fp16"}.get(str(named), "fp32")


def _write_beside(
    out: Path, run: Path, cfg: ModelConfig, carried: Config | None, dtype: str
) -> str:
    """config.json, and the tokenizer: of the model from which the run started, else of its data.
    Returns the model_type."""
    eos = None
    if carried is not None:
        carry(run / FOLDER, out)
    elif (run / SIDECAR).is_file():
        sidecar = Sidecar.load(run / SIDECAR)
        eos = sidecar.eod
        if sidecar.tokenizer["kind"] != "bytes":
            shutil.copyfile(run / TOKENIZER, out / TOKENIZER)
            _write_json(out / "tokenizer_config.json", _tokenizer_config(out / TOKENIZER, eos))
    config = config_json(cfg, carried, dtype, eos)
    _write_json(out / CONFIG, config)
    return str(config["model_type"])


def _tokenizer_config(tokenizer: Path, eos: int) -> Config:
    """What transformers needs beside a tokenizer.json to know the end of a document."""
    added = json.loads(tokenizer.read_bytes()).get("added_tokens") or []
    names = {token["id"]: token["content"] for token in added}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": names.get(eos)}


def _write_json(path: Path, content: Config) -> None:
    write_atomic(path, json.dumps(content, indent=2) + "\n")


def _write_tensors(
    out: Path,
    checkpoint: Path,
    manifest: dict[str, Any],
    names: dict[str, str],
    dtype: torch.dtype,
    shard_bytes: int,
) -> None:
    """`names`: of the tensors, ours -> theirs."""
    table = read_table(checkpoint, manifest)
    sizes = {ours: table[f"model.{ours}"].shape.numel() * dtype.itemsize for ours in names}
    shards = list(_shards(sizes, shard_bytes))
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {
            names[ours]: torch.empty(table[f"model.{ours}"].shape, dtype=dtype) for ours in shard
        }
        wants = [
            Want(key := f"model.{ours}", key, tensors[names[ours]], table[key].whole)
            for ours in shard
        ]
        read_wanted(checkpoint, manifest, table, wants, near=0)
        save_file(tensors, out / file, metadata={"format": "pt"})
        (out / file).chmod((out / CONFIG).stat().st_mode)  # the library makes it private
        fsync(out / file)
        files |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
        _write_json(out / INDEX, index)


def _shards(sizes: dict[str, int], most: int) -> Iterator[list[str]]:
    """Names in order, in groups of at most so many bytes; a larger tensor is alone."""
    group: list[str] = []
    size = 0
    for name, nbytes in sizes.items():
        if group and size + nbytes > most:
            yield group
            group, size = [], 0
        group.append(name)
        size += nbytes
    yield group
