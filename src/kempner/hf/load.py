"""Weights from a source into a model, sharded or not: each rank reads its own part alone."""

from __future__ import annotations

import contextlib
import ctypes
from mmap import MADV_WILLNEED, PAGESIZE
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kempner.checkpoint import commit
from kempner.checkpoint.commit import Damaged
from kempner.checkpoint.layout import Box, make_table, own_box
from kempner.checkpoint.ranks import Ranks
from kempner.checkpoint.reader import Want, read_table, read_wanted
from kempner.checkpoint.writer import local
from kempner.config.option import ConfigError
from kempner.hf.source import FOLDER, Source, carry, held, read_config
from kempner.hf.stored import Stored, check_directory
from kempner.hf.tensors import tensor_names
from kempner.model.config import ModelConfig
from kempner.parallel.build import buffer_names, parameter_names
from kempner.parallel.lora import is_adapter

madvise = ctypes.CDLL(None).madvise


def start_from(model: nn.Module, cfg: ModelConfig, run_dir: Path) -> str:
    """Fill the model, on all ranks, with the weights of cfg.init_from, and keep in the run what
    they have beside them. Returns one line for the log.

    Raises ConfigError on all ranks when they are not the weights of this model.
    """
    ranks = Ranks(dist.new_group(backend="gloo"))
    with contextlib.ExitStack() as reading:

        def choose() -> Source:  # another run's newest checkpoint is another one a minute later
            source = reading.enter_context(held(cfg.init_from or ""))
            if source.carried.is_dir():
                carry(source.carried, run_dir / FOLDER)
            return source

        source = ranks.on_first(choose)
        try:
            ranks.on_all(lambda: load_weights(model, cfg, source, ranks.rank, ranks.size))
        except Damaged as error:
            raise ConfigError(f"{error}; name an older checkpoint") from None
    return f"starts from the weights of {source.name} ({source.path})"


@torch.no_grad()
def load_weights(
    model: nn.Module, cfg: ModelConfig, source: Source, rank: int = 0, world: int = 1
) -> None:
    """Fill this rank's part of every parameter but adapters, cast to its dtype; from a checkpoint
    the buffers, too.

    Raises ConfigError when a tensor is missing, superfluous or of another shape, Damaged when a
    checkpoint is damaged.
    """
    named = parameter_names(model).items()
    parameters: dict[str, Tensor] = {name: p for name, p in named if not is_adapter(name)}
    if source.is_checkpoint:
        parameters |= buffer_names(model)
    here = make_table(parameters, {}, world)
    boxes = {name: own_box(here[name], rank) for name in parameters}
    if source.is_checkpoint:
        manifest = commit.read_manifest(source.path)
        table = read_table(source.path, manifest)
        wants = []
        for name, parameter in parameters.items():
            key = f"model.{name}"
            if key not in table or table[key].shape != parameter.shape:
                raise ConfigError(f"{source.path}: has no {key} of shape {[*parameter.shape]}")
            wants.append(Want(key, key, local(parameter), boxes[name]))
        read_wanted(source.path, manifest, table, wants, near=rank % manifest["world_size"])
        return
    if rank == 0:
        check_directory(source.path, cfg)
    names = tensor_names(cfg, read_config(source.path)["model_type"])
    with Stored(source.path, "pt") as stored:
        for name, parameter in parameters.items():
            fill(local(parameter), stored, names[name], boxes[name])


def fill(target: Tensor, stored: Stored, name: str, box: Box) -> None:
    """Copy a box of a stored tensor, and read no more than that; cast to the target's dtype. With a
    `*` in its name: of the tensors of the experts that the box holds."""
    if not target.numel():
        return
    if "*" in name:
        (first, count), *rest = box
        for i in range(count):
            fill(target[i], stored, name.replace("*", str(first + i)), tuple(rest))
        return
    part = stored.slice(name)[tuple(slice(at, at + length) for at, length in box)]
    # The slice is a view of the mapped file: without a word the kernel would read it page fault by
    # page fault, three times as slowly.
    page = part.data_ptr() // PAGESIZE * PAGESIZE
    rows = part.stride(0) * (len(part) - 1) * part.itemsize + part[0].nbytes
    madvise(ctypes.c_void_p(page), ctypes.c_size_t(part.data_ptr() - page + rows), MADV_WILLNEED)
    target.copy_(part)
