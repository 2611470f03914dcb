"""Activations of a model: the residual stream after some of its blocks, and the outputs of
attention and feed-forward layer, for the first samples of a data set, in shards on disk.

    OUT/activations.json                    what the shards hold, from which data and model
    OUT/step_00001000/00000.safetensors     the first samples, by the checkpoint of step 1000

A shard is written atomically, so a restart makes only the missing ones. The header of its file
names the weights that produced it.
Shapes: S samples of a shard, T tokens, D width.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kempner.config.option import ConfigError
from kempner.config.values import format_value
from kempner.data.formats.dataset import TokenDataset
from kempner.extensions.hf.adapter import weights_fingerprint
from kempner.extensions.hf.source import WeightsSource
from kempner.jobs.system.directories import Kind, mark_directory, refuse_others
from kempner.jobs.system.files import write_atomic

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kempner.model.attention import Documents
    from kempner.model.decoder import Decoder

RECORD = "activations.json"
SHARD_BYTES = 1 << 28  # of activations: a whole shard is held in host memory
# The outputs of attention and feed-forward layer pass through these before the residual sum.
ACTIVATION_PARTS = {"stream": "", "attention": "attention_post_norm", "ffn": "ffn_post_norm"}


class Wanted(NamedTuple):
    """Requested activations: these parts (ACTIVATION_PARTS) of these blocks."""

    layers: Sequence[int]
    parts: Sequence[str]

    @property
    def names(self) -> list[str]:
        return [f"blocks.{layer}.{part}" for layer in self.layers for part in self.parts]


@dataclass(frozen=True)
class ShardRecord:
    """Facts that all shards of a directory share; a later start must match them."""

    model: str  # id of the run, or the directory
    data: str
    split: str
    tokens: str  # digest of the data
    samples: int
    seq_len: int
    document_mask: bool  # documents of a sample do not attend to each other
    reset_positions: bool  # positions restart at 0 in each document
    layers: list[int]
    parts: list[str]
    dim: int
    dtype: str
    shard: int  # samples per shard

    @property
    def shards(self) -> list[tuple[int, int]]:
        """Return the first sample of each shard, and one past its last."""
        starts = range(0, self.samples, self.shard)
        return [(start, min(start + self.shard, self.samples)) for start in starts]


def start_output(out: Path, record: ShardRecord) -> None:
    """Make the directory, or check that its record is the same. Raises ConfigError."""
    refuse_others(out, "--out", (Kind.ACTIVATIONS,), "give another directory")
    try:
        before = json.loads((out / RECORD).read_text())
    except FileNotFoundError:
        # The mark comes first, so that the remains of a killed process are recognised as ours.
        mark_directory(out, Kind.ACTIVATIONS)
        write_atomic(out / RECORD, json.dumps(asdict(record), indent=1) + "\n")
        return
    differ = [
        f"{name} is {format_value(before.get(name))} there, {format_value(value)} here"
        for name, value in asdict(record).items()
        if before.get(name) != value
    ]
    if differ:
        raise ConfigError(
            f"--out = {out} has other activations: {'; '.join(differ)}. Use what is there, or give "
            "another directory"
        )


def identity_of(source: WeightsSource) -> str:
    """Return 16 hex digits that identify the weights and the config.json beside them."""
    weights = weights_fingerprint(source)
    if source.is_checkpoint:
        return weights
    # The same tensors with another RoPE or norm_eps give other activations.
    shape = json.dumps(source.model(), sort_keys=True)
    return hashlib.sha256(f"{weights} {shape}".encode()).hexdigest()[:16]


def check_weights(folder: Path, weights: str) -> None:
    """Check that the existing shards come from these weights. Raises ConfigError."""
    for path in sorted(folder.glob("*.safetensors")):
        if (metadata := read_whole(path)) is not None and metadata.get("weights") != weights:
            raise ConfigError(
                f"{path} was made with other weights than the present ones: delete {folder} and "
                "run this again, or give another --out"
            )


def read_whole(path: Path) -> dict[str, str] | None:
    """Read the metadata of a shard; None if it is not a complete safetensors file. Raises
    OSError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        # {} is the shortest header.
        if not 2 <= length <= size:
            return None
        try:
            tensors = dict(json.loads(file.read(length)))
            metadata = dict(tensors.pop("__metadata__", {}))
            end = max(int(tensor["data_offsets"][1]) for tensor in tensors.values())
        except (ValueError, TypeError, KeyError, IndexError):
            return None
    return metadata if size == 8 + length + end else None


def extract_shards(
    model: Decoder, data: TokenDataset, record: ShardRecord, folder: Path, weights: str, batch: int
) -> Iterator[tuple[int, bool]]:
    """Make the missing shards of one model; yields the number of each shard, and whether it
    already existed. `weights`: identity_of() the model. Raises ConfigError."""
    from safetensors.torch import save

    check_weights(folder, weights)
    folder.mkdir(exist_ok=True)
    for torn in folder.glob(".*.new"):  # of a killed process
        torn.unlink()
    wanted = Wanted(record.layers, record.parts)
    where = DocumentNumbers(data.sidecar.eod)
    for number, (start, end) in enumerate(record.shards):
        path = folder / f"{number:05d}.safetensors"
        if there := path.exists() and read_whole(path) is not None:
            for first in range(start, end, batch):  # the documents before the next shard
                where.follow(data.read(np.arange(first, min(first + batch, end))).inputs)
        else:
            reset = record.reset_positions
            shard = _shard(model, data, (start, end), wanted, where, batch, reset)
            write_atomic(path, save(shard, {"weights": weights}))  # a second key might come first
        yield number, there


def _shard(
    model: Decoder,
    data: TokenDataset,
    samples: tuple[int, int],
    wanted: Wanted,
    where: DocumentNumbers,
    batch: int,
    reset_positions: bool,
) -> dict[str, Tensor]:
    import torch

    from kempner.model.attention import Documents

    pieces: dict[str, list[Tensor]] = {}
    start, end = samples
    for first in range(start, end, batch):
        rows = data.read(np.arange(first, min(first + batch, end)))
        documents, positions = where.follow(rows.inputs)
        packed = None
        if rows.documents is not None:
            packed = Documents.of(torch.from_numpy(rows.documents), reset_positions)
        parts = {
            "tokens": torch.from_numpy(rows.inputs).int(),
            "document": torch.from_numpy(documents),
            "position": torch.from_numpy(positions),
            **run_blocks(model, rows.inputs, packed, wanted),
        }
        for name, part in parts.items():
            pieces.setdefault(name, []).append(part)
    whole = {name: torch.cat(parts).contiguous() for name, parts in pieces.items()}
    return {"sample": torch.arange(start, end), **whole}


class DocumentNumbers:
    """Document numbers of the tokens of a split, whose samples follow each other."""

    def __init__(self, eod: int) -> None:
        self._eod, self._document, self._position = eod, 0, 0

    def follow(self, inputs: Any) -> tuple[Any, Any]:
        """Return, for the next samples [S, T], each token's document number in the split and its
        position in the document: int64 [S, T]. A document includes the token that ends it."""
        flat = inputs.ravel()
        ends = np.flatnonzero(flat == self._eod)
        places = np.arange(len(flat))
        before = np.searchsorted(ends, places)  # documents that have ended
        # The first document may have begun in an earlier batch, before place 0 of this one.
        begins = np.concatenate(([-self._position], ends + 1))[before]
        documents, positions = self._document + before, places - begins
        at_end = bool(len(flat)) and flat[-1] == self._eod
        self._document += len(ends)
        self._position = 0 if at_end else int(positions[-1]) + 1
        return documents.reshape(inputs.shape), positions.reshape(inputs.shape)


def run_blocks(
    model: Decoder, inputs: Any, packed: Documents | None, wanted: Wanted
) -> dict[str, Tensor]:
    """Return the activations for inputs int64 [B, T], by the names of `wanted`, [B, T, D] each, on
    the CPU. Blocks after the last requested one do not run."""
    import torch

    from kempner.model.decoder import apply_blocks

    device = model.embed.weight.device
    tokens = torch.from_numpy(inputs).to(device)
    if packed is not None:
        packed = packed.map(lambda each: each.to(device))
    with torch.no_grad(), _watched(model, wanted) as activations:
        x = model.embed(tokens)
        rope, visible = model.place(tokens, packed, None, x.dtype)
        apply_blocks(model.blocks[: max(wanted.layers) + 1], x, rope, visible)
    return {name: activations[name].cpu() for name in wanted.names}


@contextmanager
def _watched(model: Decoder, wanted: Wanted) -> Iterator[dict[str, Tensor]]:
    activations: dict[str, Tensor] = {}

    def keep(name: str, _: torch.nn.Module, inputs: Any, output: Any) -> None:
        activations[name] = output[0] if isinstance(output, tuple) else output  # or with a routing

    with ExitStack() as hooks:
        for name in wanted.names:
            block, part = name.rsplit(".", 1)
            # `stream` is the output of the block itself: nothing follows the dot.
            module = model.get_submodule(f"{block}.{ACTIVATION_PARTS[part]}".rstrip("."))
            handle = module.register_forward_hook(partial(keep, name))
            hooks.callback(handle.remove)
        yield activations
