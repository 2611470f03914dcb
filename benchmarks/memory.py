"""What activations cost, and what each way to keep fewer of them saves and costs, as ratios.

    python -m benchmarks.memory
    python -m benchmarks.memory --dim 512 --layers 12

One process without FSDP. The peak is counted, not measured: a tracker adds up the storages of all
tensors that exist, without weights, their gradients, and the copies on the host. Workspace inside
of a kernel is not seen. The time is that of a step, forward and backward, all levers by turns.
docs/reference/benchmarks.md has figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.trainer import machine
from kempner.model import loss
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder
from kempner.parallel.memory import offload
from kempner.parallel.memory.recompute import add_recompute
from kempner.train.sections import TrainConfig

LEVERS: dict[str, dict[str, Any]] = {
    "none": {},
    "plain loss": {},  # the logits of all tokens at once
    "recompute=selective": {"recompute": "selective"},
    "recompute=full": {"recompute": "full"},
    "recompute=full, every 2nd": {"recompute": "full", "recompute_every": 2},
    "recompute=full, ffn": {"recompute": "full", "recompute_modules": ("ffn",)},
    "offload=1": {"offload_activations": 1},
    "recompute=selective, offload=1": {"recompute": "selective", "offload_activations": 1},
    "recompute=full, offload=1": {"recompute": "full", "offload_activations": 1},
}


class Peak(TorchDispatchMode):
    """The most bytes of tensors that exist at once, of those made under it."""

    def __init__(self, elsewhere: set[int]) -> None:
        """`elsewhere`: addresses that are not counted."""
        super().__init__()
        self.most = self._now = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        self._elsewhere = elsewhere

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        # The address of the storage itself: views share it, and data may be freed and used again.
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or storage.data_ptr() in self._elsewhere:
            return
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key, size))
        self._now += size
        self.most = max(self.most, self._now)

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self._now -= size


def plain_loss(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    losses = F.cross_entropy(F.linear(x, weight).float(), targets, reduction="none")
    return losses.sum(), losses.detach()


def build(cfg: ModelConfig, name: str) -> Decoder:
    torch.manual_seed(0)
    model, train = Decoder(cfg), dataclasses.replace(TrainConfig(), **LEVERS[name])
    add_recompute(model, train)
    if train.offload_activations:
        offload.Offload(model, train.offload_activations)
    if name == "plain loss":
        model.loss = plain_loss
    for parameter in model.parameters():
        # Before the count: gradients of weights are no activations.
        parameter.grad = torch.zeros_like(parameter)
    return model


def peak(step: Callable[[], object], model: Decoder) -> int:
    counted = {p.data_ptr() for p in model.parameters()} | {model.rope.data_ptr()}
    host: list[Tensor] = []
    real = offload.allocate_host_memory

    def on_the_host(size: int, pin: bool) -> Tensor:
        # Otherwise Peak would count it before its address is known to be the host's.
        with torch.utils._python_dispatch._disable_current_modes():
            host.append(real(size, pin))
        counted.add(host[-1].data_ptr())
        return host[-1]

    offload.allocate_host_memory = on_the_host
    with Peak(counted) as found:
        step()
    offload.allocate_host_memory = real
    return found.most


def main(argv: list[str]) -> int:
    about, _, more = (__doc__ or "").partition("\n")
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "benchmarks.memory", None, about, more, formatter_class=as_it_is
    )
    for name, default in (("dim", 256), ("layers", 8), ("length", 1024), ("vocab", 16384)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--chunks", type=int, default=8, help="of the loss (default: 8)")
    parser.add_argument("--repeats", type=int, default=7, help="default: 7")
    options = parser.parse_args(argv)
    print(f"$ python -m benchmarks.memory {shlex.join(argv)}\n{machine()}\n", flush=True)
    dim, length = options.dim, options.length
    cfg = ModelConfig(
        options.vocab, dim, options.layers, dim // 64, None, None, dim * 11 // 4 // 64 * 64, length
    )
    tokens = torch.randint(0, options.vocab, (1, length))
    loss.CHUNK_LOGITS = length * options.vocab // options.chunks
    models = {name: build(cfg, name) for name in LEVERS}
    steps = {
        name: lambda model=model: model(tokens, tokens).backward() for name, model in models.items()
    }
    peaks = {name: peak(step, models[name]) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in LEVERS}
    for turn in range(options.repeats + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    print(f"{'':<32} peak, MiB   of none's   time, of none's")
    for name, found in peaks.items():
        pairs = zip(seconds[name], seconds["none"], strict=True)
        slower = statistics.median(mine / none for mine, none in pairs)
        print(f"{name:<32} {found / 2**20:>9.1f}   {found / peaks['none']:>9.2f}   {slower:>15.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
