"""Export a checkpoint, written by any number of ranks, to a directory in Hugging Face format."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from fnmatch import fnmatch
from functools import partial
from io import RawIOBase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kempner.checkpoint import history
from kempner.checkpoint.format.reader import Want, read_table, read_wanted
from kempner.checkpoint.format.writer import allocate_pages
from kempner.config.option import ConfigError
from kempner.data.sidecar import SIDECAR, TOKENIZER_CONFIG, Sidecar
from kempner.data.text.vocabulary import read_vocabulary
from kempner.extensions.hf.adapter import merged_adapter
from kempner.extensions.hf.families import Config, config_json
from kempner.extensions.hf.source import (
    CONFIG_FILE,
    GENERATION,
    HF_FOLDER,
    TOKENIZER_FILE,
    copy_model_files,
    end_tokens,
    read_hf_config,
    run_of,
)
from kempner.extensions.hf.stored import INDEX_FILE, SINGLE
from kempner.extensions.hf.tensors import stored_parts, tensor_names
from kempner.jobs.system.directories import MARK_FILE, Kind, mark_directory, refuse_others
from kempner.jobs.system.files import fsync, write_atomic
from kempner.jobs.system.front_door import explain_os_error
from kempner.jobs.system.hub import CARRIED, TOKENIZER_FILES
from kempner.model.config import ModelConfig
from kempner.model.shapes import ROUTER_BIAS, tensor_shapes

EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEADER_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
READ_BYTES = 1 << 26  # read at once, into one of two such buffers; a larger tensor is one part


def export_checkpoint(checkpoint: Path, out: Path, dtype: str, shard_bytes: int) -> Path:
    """Write the model of a checkpoint, which the caller protects from retention, to a new or empty
    directory; returns it.

    `dtype`: fp32, bf16, fp16, or auto: that of the model the run started from, else fp32.
    Memory: two buffers of READ_BYTES, or of the largest tensor. Raises ConfigError, Damaged or
    OSError, and then leaves nothing at `out`.
    """
    refuse_others(out, "DIR", (), "give another directory, or remove it")
    manifest = history.read_manifest(checkpoint)
    cfg = ModelConfig(**manifest["fixed"]["model"])
    beside = run_of(checkpoint)
    carried = (
        read_hf_config(beside / HF_FOLDER) if (beside / HF_FOLDER / CONFIG_FILE).is_file() else None
    )
    torch_dtype = EXPORT_DTYPES[_dtype(carried) if dtype == "auto" else dtype]
    # An existing directory may be a link or a mount point, so it is filled rather than replaced.
    unfinished = out if out.is_dir() else out.with_name(f"{out.name}.partial")
    refuse_others(unfinished, "DIR.partial", (Kind.EXPORT,), "remove it, or give another DIR")
    if unfinished != out:
        # Remains of a killed export: refuse_others() has seen its mark.
        shutil.rmtree(unfinished, ignore_errors=True)
    try:
        mark_directory(unfinished, Kind.EXPORT)
        kind = write_beside(
            unfinished, beside, cfg, carried, str(torch_dtype).removeprefix("torch.")
        )
        names = tensor_names(cfg, kind)
        _write_tensors(unfinished, _Reader(checkpoint, names, torch_dtype), names, shard_bytes)
        # Last: a directory with the mark is unfinished, and a later export removes it.
        (unfinished / MARK_FILE).unlink()
        fsync(unfinished)
        if unfinished != out:
            unfinished.rename(out)
            # The new name is durable once the directory that holds it is.
            fsync(out.parent)
    except BaseException as error:
        _clear(unfinished, out)
        if isinstance(error, OSError):
            bytes_ = cfg.count_parameters() * torch_dtype.itemsize
            # The user knows the directory by its final name.
            error.filename = str(error.filename or out).replace(str(unfinished), str(out))
            raise ConfigError(
                f"{explain_os_error(error)}; the weights take {bytes_:,} bytes"
            ) from None
        raise
    return out


def _clear(unfinished: Path, out: Path) -> None:
    """Remove what this export has written, and the directory itself if the export made it."""
    if unfinished != out:
        shutil.rmtree(unfinished, ignore_errors=True)
        return
    # Only names that an export writes: the directory is the user's.
    for path in out.iterdir():
        if any(
            fnmatch(path.name, pattern) for pattern in (*CARRIED, "model*.safetensors*", MARK_FILE)
        ):
            with contextlib.suppress(OSError):
                path.unlink()


def _dtype(carried: Config | None) -> str:
    dtype_name = (carried or {}).get("dtype") or (carried or {}).get("torch_dtype")
    return {"bfloat16": "bf16", "float16": "fp16"}.get(str(dtype_name), "fp32")


def write_beside(out: Path, run: Path, cfg: ModelConfig, carried: Config | None, dtype: str) -> str:
    """Write config.json and the tokenizer: those of the model the run started from, unless its data
    have another tokenizer. Returns the model_type."""
    sidecar = Sidecar.load(run / SIDECAR) if (run / SIDECAR).is_file() else None
    # Without a config.json: rl.tokenizer's files, of a run that started from no such model.
    if beside := (run / HF_FOLDER).is_dir():
        copy_model_files(run / HF_FOLDER, out)
    if sidecar is not None:
        _write_tokenizer(out, run, sidecar)
        if beside:
            _write_end_of_turn(out, sidecar, carried or {})
    eos = None
    if carried is None:
        eos = next(iter(end_tokens(out)), None) if sidecar is None else sidecar.eod
    config = config_json(cfg, carried, dtype, eos)
    write_json(out / CONFIG_FILE, config)
    return str(config["model_type"])


def _write_tokenizer(out: Path, run: Path, sidecar: Sidecar) -> None:
    """Write the data's tokenizer in place of the model's, unless the model's knows all ids of a
    text; includes the chat template that a run on chat data was trained with."""
    file, texts = out / TOKENIZER_FILE, sidecar.kind == "text"
    if sidecar.tokenizer["kind"] == "bytes":
        return
    own = read_vocabulary(file) if texts and file.is_file() else {}
    if own and read_vocabulary(run / TOKENIZER_FILE).items() <= own.items():
        return
    same = file.is_file() and file.read_bytes() == (run / TOKENIZER_FILE).read_bytes()
    # Any file left of the model's tokenizer would be read together with this one.
    for pattern in ("chat_template*",) if same else TOKENIZER_FILES:
        for stale in out.glob(pattern):
            stale.unlink()
    shutil.copyfile(run / TOKENIZER_FILE, file)
    if texts:
        write_json(out / TOKENIZER_CONFIG, plain_tokenizer_config(file, sidecar.eod))
    else:
        shutil.copyfile(run / TOKENIZER_CONFIG, out / TOKENIZER_CONFIG)


def _write_end_of_turn(out: Path, sidecar: Sidecar, carried: Config) -> None:
    """Add the token that ends a turn of chat data, without which a base model's generation would
    run on past it."""
    if sidecar.kind == "text":
        return
    file = out / GENERATION
    config = read_hf_config(out, GENERATION) if file.is_file() else {}
    # If there is a generation_config.json, transformers does not read these ids from config.json,
    # so write them here, too.
    ends = config.get("eos_token_id", carried.get("eos_token_id"))
    ends = [ends] if isinstance(ends, int) else ends or []
    if sidecar.eod not in ends:
        write_json(file, {**config, "eos_token_id": [*ends, sidecar.eod]})


def plain_tokenizer_config(tokenizer: Path, eos: int) -> Config:
    """Make the config that tells transformers, besides a tokenizer.json, how a document ends."""
    added_tokens = json.loads(tokenizer.read_bytes()).get("added_tokens") or []
    # eos_token is a string; the sidecar has its id.
    names = {token["id"]: token["content"] for token in added_tokens}
    # Named explicitly, because transformers would otherwise use the class of the model_type, which
    # may have other rules, such as a BOS before each text.
    return {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": names.get(eos)}


def write_json(path: Path, content: Config) -> None:
    write_atomic(path, json.dumps(content, indent=2) + "\n")


def _write_tensors(out: Path, reader: _Reader, names: dict[str, str], shard_bytes: int) -> None:
    """Write the tensors in shards. `names`: ours -> theirs."""
    shards = list(_groups(reader.sizes, shard_bytes))
    files: dict[str, str] = {}
    # One thread: the parts of a file are written in order, without offsets.
    with ThreadPoolExecutor(1) as writer:
        # A future that is done at once: no write precedes the first part.
        pending: Future[object] = writer.submit(bool)
        for number, shard in enumerate(shards, 1):
            file = SINGLE
            if len(shards) > 1:
                file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            for own_name in shard:
                files |= dict.fromkeys(stored_parts(names[own_name], reader.shapes[own_name]), file)
            for act in _acts(out / file, reader, names, shard):
                # Write one part while reading the next into the other buffer.
                pending.result()
                pending = writer.submit(act)
        pending.result()
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(reader.sizes.values())}, "weight_map": files}
        # The index comes last, because readers take a directory that has one for complete.
        write_json(out / INDEX_FILE, index)


def _acts(
    path: Path, reader: _Reader, names: dict[str, str], shard: list[str]
) -> Iterator[Callable[[], object]]:
    """Yield the writes of a safetensors file: the header, then the tensors. The library can only
    write tensors that are all in memory."""
    shapes = {name: reader.shapes[name] for name in shard}
    with open(path, "wb", buffering=0) as file:
        yield partial(write_all, file, header_of(shapes, names, reader.dtype))
        for part in reader.parts(shard):
            yield partial(write_all, file, part.numpy().data)
        yield partial(os.fsync, file.fileno())
        # Does nothing, but begins only after the fsync, when the file can be closed.
        yield bool


def header_of(
    shapes: Mapping[str, tuple[int, ...]], names: Mapping[str, str], dtype: torch.dtype
) -> bytes:
    """Make the head of a safetensors file: the header's length and the header (the format's
    README). `shapes`: of its tensors, in order; `names`: ours -> theirs."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for own_name, whole in shapes.items():
        for name, shape in stored_parts(names[own_name], whole).items():
            own = published_dtype(own_name, dtype)
            header[name] = {
                "dtype": HEADER_DTYPES[own],
                "shape": shape,
                "data_offsets": [at, at := at + math.prod(shape) * own.itemsize],
            }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data are aligned
    return len(text).to_bytes(8, "little") + text


def published_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return a tensor's dtype in a model of `dtype`: fp32 for a router's bias, because 8 bits of
    precision would select other experts. These tensors come first in a file, for alignment."""
    return torch.float32 if name.endswith(ROUTER_BIAS) else dtype


def write_all(file: RawIOBase, data: bytes | memoryview) -> None:
    remaining = memoryview(data)
    while remaining:
        # A raw file may write only part: one write in Linux ends at 2 GiB - 4 KiB.
        remaining = remaining[file.write(remaining) or 0 :]


class _Reader:
    """The model's tensors in a checkpoint, as bytes of a dtype."""

    def __init__(self, checkpoint: Path, names: Iterable[str], dtype: torch.dtype) -> None:
        self.checkpoint, self.dtype = checkpoint, dtype
        self.manifest = history.read_manifest(checkpoint)
        self.table = read_table(checkpoint, self.manifest)
        shapes = tensor_shapes(ModelConfig(**self.manifest["fixed"]["model"]))
        # Otherwise a new kind of tensor would be left out and the model would differ.
        known = {f"model.{name}" for name in shapes}
        extra = [key for key in self.table if key.startswith("model.") and key not in known]
        if extra and "lora" not in self.manifest["fixed"]:
            raise ConfigError(
                f"{checkpoint}: has {extra[0]}, which an export would leave out; "
                "name it in model/shapes.py, and its option in family_of(), "
                "extensions/hf/families.py"
            )
        self.shapes = {name: torch.Size(shapes[name]) for name in names}
        self.sizes = {
            name: shape.numel() * published_dtype(name, dtype).itemsize
            for name, shape in self.shapes.items()
        }
        # A tensor is one part, however large; a small model needs only its own size.
        size = min(sum(self.sizes.values()), max(READ_BYTES, *self.sizes.values()))
        self.buffers = [torch.frombuffer(allocate_pages(size), dtype=torch.uint8) for _ in range(2)]

    def parts(self, names: list[str]) -> Iterator[Tensor]:
        """Yield the tensors of these names, one after the other, in pieces of uint8 [N]. A piece is
        valid until the second next one is requested."""
        for group in _groups({name: self.sizes[name] for name in names}, READ_BYTES):
            buffer, at, targets = self.buffers[0], 0, {}
            # Alternate: one buffer is filled while the other is written.
            self.buffers.reverse()
            for name in group:
                part = buffer[at : at + self.sizes[name]].view(published_dtype(name, self.dtype))
                targets[name] = part.view(self.shapes[name])
                at += self.sizes[name]
            self._fill(targets)
            yield buffer[:at]

    def _fill(self, targets: dict[str, Tensor]) -> None:
        if "lora" in self.manifest["fixed"]:
            with merged_adapter(self.checkpoint, self.manifest) as read_tensor:
                for name, target in targets.items():
                    target.copy_(read_tensor(name))
            return
        wants = [
            Want(key := f"model.{name}", key, target, self.table[key].whole)
            for name, target in targets.items()
        ]
        read_wanted(self.checkpoint, self.manifest, self.table, wants, near=0)


def _groups(sizes: dict[str, int], most: int) -> Iterator[list[str]]:
    """Group names in order, at most `most` bytes per group; a larger tensor forms its own group."""
    group: list[str] = []
    size = 0
    for name, nbytes in sizes.items():
        if group and size + nbytes > most:
            yield group
            group, size = [], 0
        group.append(name)
        size += nbytes
    yield group
