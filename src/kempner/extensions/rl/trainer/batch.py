"""Micro-batches from the rank files of a batch. B rows, T tokens, R rows per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kempner.data.batch import MicroBatch
from kempner.model.attention import Documents

ARRAYS = {
    "inputs": torch.int32,
    "targets": torch.int32,
    "documents": torch.int32,
    "logprobs": torch.float32,
    "advantages": torch.float32,
    "versions": torch.int32,
}


@dataclass(frozen=True)
class Rollouts(MicroBatch):
    """Samples, packed into rows."""

    logprobs: Tensor = field(kw_only=True)  # fp32 [B, T], of the targets, by the sampler
    advantages: Tensor = field(kw_only=True)  # fp32 [B, T]
    fresh: Tensor = field(kw_only=True)  # bool [B, T]: sampled with the newest weights
    own: list[Tensor] | None = field(default=None, kw_only=True)
    """The loss appends the model's own log-probabilities of the first row's targets, fp32 [T];
    None: not requested."""

    def _map(self, change: Callable[[Tensor], Tensor]) -> Rollouts:
        return Rollouts(
            change(self.inputs),
            change(self.targets),
            None if self.documents is None else self.documents.map(change),
            logprobs=change(self.logprobs),
            advantages=change(self.advantages),
            fresh=change(self.fresh),
            own=self.own,
        )


def read_batch(path: Path, seq_len: int, newest: int) -> dict[str, Tensor]:
    """Read the arrays of a rank file, [R, T] each, and `fresh`. `newest`: the version of the
    weights before this step. Raises ValueError if the file does not conform to exchange.Batch."""
    from safetensors.torch import load_file

    arrays: dict[str, Tensor] = load_file(path)
    shape = arrays["inputs"].shape if "inputs" in arrays else None
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in arrays.items()}
    if shape is None or len(shape) != 2 or shape[1] != seq_len or not shape[0]:
        raise ValueError(f"{path}: inputs are {shape}, not rows of {seq_len} tokens")
    if found != {name: (dtype, shape) for name, dtype in ARRAYS.items()}:
        raise ValueError(f"{path}: has {found}; expected {ARRAYS}, all of {shape}")
    return {**arrays, "fresh": arrays["versions"] == newest}


def micro_batches(
    arrays: dict[str, Tensor], rows: int | None, pin: bool, own: list[Tensor] | None = None
) -> Iterator[Rollouts]:
    """Yield micro-batches of at most `rows` rows; None: all rows in one. `own`: for
    the first micro-batch."""
    count = len(arrays["inputs"])
    for at in range(0, count, rows or count):
        part = {name: tensor[at : at + (rows or count)] for name, tensor in arrays.items()}
        batch = Rollouts(
            # The files store int32, half the bytes; an embedding requires int64.
            part["inputs"].long(),
            part["targets"].long(),
            Documents.of(part["documents"], reset_positions=True),
            logprobs=part["logprobs"],
            advantages=part["advantages"],
            fresh=part["fresh"],
            # The probe is a sample of the first row, so it is in the first micro-batch.
            own=None if at else own,
        )
        yield batch._map(lambda tensor: tensor.pin_memory()) if pin else batch
