"""The bytes that the loss moves beside its products, as the compiler fuses it on this machine.

    python -m benchmarks.fused

For a chunk of logits in bf16 the compiler counts what its kernels read and write, before it runs
any of them: a number that a kernel reads twice counts once. docs/reference/benchmarks.md has
figures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config, metrics

from benchmarks.trainer import machine
from kempner.model.loss import chunk_loss

TOKENS, WORDS = 512, 8192


def main() -> None:
    logs = logging.getLogger("torch._inductor")
    # Only the counters are wanted: the lines themselves go nowhere.
    logs.propagate = False
    torch._logging.set_logs(inductor_metrics=True)  # it counts only for its log
    logs.handlers.clear()
    # A kernel from the cache is not counted again.
    config.force_disable_caches = True
    torch.manual_seed(0)
    logits = torch.randn(TOKENS, WORDS).bfloat16()
    labels = torch.randint(WORDS, (TOKENS,))
    print(f"$ python -m benchmarks.fused\n{machine()}\n\nbytes a logit, kernels", flush=True)
    for name, loss in {"kit": of_the_kit, "torch": of_torch}.items():
        size, kernels = counted(loss, logits.clone().requires_grad_(loss is of_torch), labels)
        print(f"{name:<8} {size / logits.numel():>6.1f} {kernels:>6}", flush=True)


def counted(loss: Callable[[Tensor, Tensor], object], *inputs: Tensor) -> tuple[int, int]:
    """Bytes and kernels of the loss and its gradient by the logits."""
    torch._dynamo.reset()
    metrics.reset()
    torch.compile(loss)(*inputs)
    return metrics.num_bytes_accessed, len(metrics.nodes_num_elem)


@torch.no_grad()
def of_the_kit(logits: Tensor, labels: Tensor) -> object:
    return chunk_loss(True, None, 1.0, None, 0.0, logits, labels, slice(0, len(labels)))


def of_torch(logits: Tensor, labels: Tensor) -> object:
    loss = F.cross_entropy(logits.float(), labels, reduction="sum")
    return torch.autograd.grad(loss, logits)


if __name__ == "__main__":
    main()
