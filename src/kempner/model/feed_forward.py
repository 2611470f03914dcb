"""The feed-forward layer of a block: SwiGLU (arXiv:2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, width, bias=False)  # gate
        self.w3 = nn.Linear(dim, width, bias=False)  # up
        self.w2 = nn.Linear(width, dim, bias=False)  # down

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]
