"""Publish the weights as a directory in Hugging Face format, from all ranks of the trainer.

Each tensor is gathered separately and written by one rank, into that rank's own file: no rank ever
holds more than one whole tensor, and no two ranks write to one file, which not every shared file
system handles well. While one tensor is written, the next is gathered.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from kempner.checkpoint.format.plan import local_part
from kempner.checkpoint.ranks import Ranks
from kempner.extensions.hf.exporting import header_of, write_all, write_beside, write_json
from kempner.extensions.hf.source import CONFIG_FILE, HF_FOLDER, read_hf_config
from kempner.extensions.hf.stored import INDEX_FILE, SINGLE
from kempner.extensions.hf.tensors import stored_parts, tensor_names
from kempner.extensions.rl.config import RlConfig
from kempner.extensions.rl.engines.words import keep_words
from kempner.extensions.rl.exchange import RolloutExchange
from kempner.extensions.rl.trainer.transfer import DirectPublisher
from kempner.model.decoder import Decoder
from kempner.model.shapes import tensor_shapes
from kempner.parallel.build import compute_dtype, parameter_names
from kempner.parallel.config import is_adapter

if TYPE_CHECKING:
    from kempner.train.sections import RunConfig

WRITERS = 8  # most ranks that write, one file each
WRITE_BYTES = 1 << 24  # bytes written while more are gathered
BESIDE = "beside"  # in the attempt's directory: files that accompany the tensors of each version


def writers_of(sizes: dict[str, int], writers: list[int]) -> dict[str, int]:
    """Assign tensors to the ranks that write them: each to the rank with the fewest bytes. They are
    gathered in this order, so all ranks write at once; with a contiguous part of the model each,
    one would write while the others wait."""
    bytes_of, writer_of = dict.fromkeys(writers, 0), {}
    for name, size in sizes.items():
        writer_of[name] = min(bytes_of, key=lambda rank: bytes_of[rank])
        bytes_of[writer_of[name]] += size
    return writer_of


class Publisher(Protocol):
    def publish(self, version: int) -> None:
        """Give the engines the current weights. All ranks must call it."""


class DirectoryPublisher:
    """A publisher by files. Its tensors have the trainer's compute dtype: an engine computes with
    the same numbers, from half the bytes if that is bf16."""

    def __init__(
        self, cfg: RunConfig, model: Decoder, exchange: RolloutExchange, device: torch.device
    ) -> None:
        """Raises ConfigError if the tokenizer cannot be read, OSError on a full disk."""
        self._model, self._exchange = model, exchange
        self.dtype = compute_dtype(cfg.train.dtype, device.type)
        self._scale = cfg.lora.alpha / cfg.lora.rank if cfg.lora.rank else 0.0
        self._ranks = Ranks(dist.new_group(backend="gloo"))
        kind = self._ranks.on_first(lambda: self._write_beside(cfg))
        self._names = tensor_names(cfg.model, kind)
        self._shapes = tensor_shapes(cfg.model)
        sizes = {n: math.prod(shape) * self.dtype.itemsize for n, shape in self._shapes.items()}
        self._bytes = sum(sizes.values())
        count = min(WRITERS, self._ranks.size, len(sizes))
        # Spread over the ranks, and thus over the nodes, each with its own network link.
        writers = [i * self._ranks.size // count for i in range(count)]
        self._writer = writers_of(sizes, writers)
        used = sorted(set(self._writer.values()))
        files = [f"model-{i:05d}-of-{len(used):05d}.safetensors" for i in range(1, len(used) + 1)]
        self._files = dict(zip(used, [SINGLE] if len(used) == 1 else files, strict=True))

    def _write_beside(self, cfg: RunConfig) -> str:
        """Write the config and the tokenizer; returns the model_type."""
        run, place = Path(cfg.run.dir), self._exchange.root / BESIDE
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        keep_words(cfg, run)
        carried = (
            read_hf_config(run / HF_FOLDER) if (run / HF_FOLDER / CONFIG_FILE).is_file() else None
        )
        dtype = str(self.dtype).removeprefix("torch.")
        return write_beside(place, run, cfg.model, carried, dtype)

    def publish(self, version: int) -> None:
        """Publish a version; an existing one stays. Raises on all ranks if one has failed, for
        example on a full disk, and then leaves nothing of the version."""
        began, folder = time.monotonic(), self._exchange.version(version)
        try:
            if self._ranks.on_first(lambda: self._begin(folder)):
                return
            self._ranks.on_all(lambda: self._write(folder))
            # Here every rank's file is complete: on_all() returns when all have written theirs.
            facts = {"version": version, "bytes": self._bytes, "transport": "directory"}
            facts["seconds"] = round(time.monotonic() - began, 3)
            self._ranks.on_first(lambda: self._exchange.publish(version, facts))
        except Exception as error:
            if self._ranks.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise OSError(
                    error.errno,
                    f"version {version} of the weights was not published: {error.strerror}; a "
                    f"few versions of {self._bytes / 2**30:.2f} GiB each must fit into run.dir",
                    str(folder),
                ) from None
            raise

    def _begin(self, folder: Path) -> bool:
        """Prepare the directory; returns whether the version already exists."""
        # The manifest is written last: a directory without it remains from an earlier try.
        if (folder / "manifest.json").exists():
            return True
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        # Not copytree(), whose error has no errno to identify a full disk.
        for path in (self._exchange.root / BESIDE).iterdir():
            shutil.copyfile(path, folder / path.name)
        if len(self._files) > 1:
            where = {
                name: self._files[self._writer[ours]]
                for ours, shape in self._shapes.items()
                for name in stored_parts(self._names[ours], shape)
            }
            index = {"metadata": {"total_size": self._bytes}, "weight_map": where}
            write_json(folder / INDEX_FILE, index)
        return False

    def _write(self, folder: Path) -> None:
        """Take part in gathering every tensor, and write this rank's. Without fsync, because an
        attempt that dies leaves no version."""
        mine = [name for name, rank in self._writer.items() if rank == self._ranks.rank]
        path = folder / self._files[self._ranks.rank] if mine else None
        with contextlib.ExitStack() as opened:
            failed: OSError | None = None
            waiting: list[memoryview] = []
            writer = opened.enter_context(ThreadPoolExecutor(1))
            # A future that is done at once: no write precedes the first lot.
            written: Future[object] = writer.submit(bool)
            try:
                if path is not None:
                    # Unbuffered: a buffer would only copy tensors of many MB once more.
                    file = opened.enter_context(open(path, "wb", buffering=0))
                    shapes = {name: self._shapes[name] for name in mine}
                    write_all(file, header_of(shapes, self._names, self.dtype))
            except OSError as error:
                # Kept, not raised: the other ranks still wait for this rank's part of each tensor.
                failed = error
            for name, tensor in whole_tensors(self._model, self._scale):
                # A rank that cannot write still takes part in the gathering, a collective.
                if self._writer[name] != self._ranks.rank or failed is not None:
                    continue
                data = tensor.to("cpu", self.dtype).contiguous().view(torch.uint8).flatten()
                waiting.append(data.numpy().data)
                if sum(map(len, waiting)) < WRITE_BYTES:
                    continue
                # Waits for the previous write, so that at most two lots are in memory.
                failed = _error_of(written)
                written, waiting = writer.submit(_write_each, file, waiting), []
            failed = failed or _error_of(written)
            if waiting and failed is None:
                _write_each(file, waiting)
        if failed is not None:
            raise failed


def open_publisher(
    cfg: RunConfig, model: Decoder, exchange: RolloutExchange, device: torch.device
) -> Publisher:
    files = DirectoryPublisher(cfg, model, exchange, device)
    if cfg.of(RlConfig).weights == "directory":
        return files

    return DirectPublisher(files.publish, model, exchange, files.dtype, cfg.train.max_steps)


def _write_each(file: RawIOBase, parts: list[memoryview]) -> None:
    for part in parts:
        write_all(file, part)


def _error_of(written: Future[object]) -> OSError | None:
    error = written.exception()
    if error is None or isinstance(error, OSError):
        return error
    raise error


def whole_tensors(model: Decoder, scale: float = 0.0) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of the model, by our name, whole on every rank, in the same order. An
    adapter is merged into its matrix: W + scale * B A, fp32."""
    parameters = parameter_names(model)
    for name, parameter in parameters.items():
        if is_adapter(name):
            continue
        tensor = full_tensor(parameter)
        a = name.removesuffix("weight") + "lora_a"
        if a in parameters:
            b = full_tensor(parameters[a.removesuffix("lora_a") + "lora_b"])
            tensor = tensor.float() + scale * (b @ full_tensor(parameters[a]))
        yield name, tensor


def full_tensor(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    own = local_part(tensor)  # in a world of one rank, all of it
    return own if tensor.device_mesh.size() == 1 else tensor.full_tensor()
