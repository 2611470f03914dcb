"""The ring itself, forward and backward, with the kernel of a GPU as a stand-in: each rank is a
thread of this process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.gpu_job import Job
from benchmarks.gpu_parts import ring
from kempner.parallel import context
from tests.trainer.gpu_path import kernels
from tests.trainer.gpu_path.kernels import registered


@pytest.mark.parametrize("on_gpus", [False, True])
def test_the_ring_is_plain_attention(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_gpus: bool
) -> None:
    """In fp32, within 1e-5. What the kernel returned stays as it is, for selective recomputation
    keeps it; and what goes back to it is in the order that it reads."""
    kept: list[tuple[Tensor, Tensor]] = []
    kernel = context.attention_kernel

    def watched(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, ...]:
        found = kernel(q, k, v, causal)
        kept.extend((x, x.clone()) for x in found[:2])
        return found

    monkeypatch.setattr(context, "attention_kernel", watched)
    parts = {"": kernels.flash, "_backward": kernels.flash_backward}
    names = {f"_scaled_dot_product_flash_attention{end}": part for end, part in parts.items()}
    with registered("aten", **(names if on_gpus else {})):
        if on_gpus:
            monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        figures = ring(Job(tmp_path, "cpu", quick=True, ranks=1))
    assert figures.keys() == {"output", "dq", "dk", "dv"}
    assert len(kept) == 4 * 4 * 2
    for found, before in kept:
        assert torch.equal(found, before)
