"""Low-rank adapters (LoRA, arXiv:2106.09685): each target W of the frozen model becomes
W + alpha / rank * B A, and only A [rank, in] and B [out, rank] are trained.

An adapter is part of its matrix's module, `...wq.lora_a` beside `...wq.weight`: the names of the
model's own weights stay unchanged, and the adapter is sharded with its block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kempner.model.decoder import Decoder
from kempner.parallel.config import LoraConfig

FROZEN = torch.bfloat16  # of the model's own weights


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. Reuses the parameters of `base`."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        # Not nn.Linear.__init__, which would allocate and initialise another weight.
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.scale = scale
        device = base.weight.device
        self.lora_a = nn.Parameter(torch.empty(rank, self.in_features, device=device))
        self.lora_b = nn.Parameter(torch.empty(self.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        change = F.linear(F.linear(x, self.lora_a), self.lora_b)
        return super().forward(x) + self.scale * change


def add_adapters(model: Decoder, cfg: LoraConfig) -> None:
    """Freeze the model, in bf16, and give its targets adapters, in fp32. Call
    it before sharding."""
    model.cast(FROZEN).requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in cfg.targets:
            model.set_submodule(name, LoraLinear(module, cfg.rank, cfg.alpha / cfg.rank))
