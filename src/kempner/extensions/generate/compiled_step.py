"""The small kernels of a one-token step, fused by torch.compile: for a single text, many kernels
between the matrix products take no longer than their launch.

The compiled functions take the weights as arguments, so all blocks share one graph per number of
rows. Shapes: as in token_step.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from kempner.extensions.generate.weights_of_step import join_weights, turn_heads
from kempner.jobs.system.compiler import keep_private
from kempner.model.decoder import Block
from kempner.model.feed_forward import FeedForward

MOST_SHAPES = 256  # numbers of rows and lengths of the cache that are compiled


def compile_part(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Compile a function for each shape that it meets."""
    keep_private()
    # Beyond its limits, torch would run the remaining shapes uncompiled.
    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, MOST_SHAPES)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 8 * MOST_SHAPES)
    # With tuning, a one-row product becomes a reduction, fused with its neighbours.
    tuned: Any = {"coordinate_descent_tuning": True} if device.type == "cuda" else None
    return torch.compile(function, dynamic=False, options=tuned)


class CompiledBlocks:
    """The functions that all compiled blocks of a model share."""

    def __init__(self, device: torch.device) -> None:
        self.heads = compile_part(project_heads, device)
        self.gate = compile_part(add_and_gate, device)

    def of(self, block: nn.Module) -> CompiledBlock | None:
        """Return the compiled block; None if the block has adapters, experts or more norms."""
        assert isinstance(block, Block)
        attention, ffn = block.attention, block.ffn
        if type(ffn) is not FeedForward or not isinstance(block.ffn_post_norm, nn.Identity):
            return None
        layers = (attention.wq, attention.wk, attention.wv, attention.wo, ffn.w1, ffn.w3, ffn.w2)
        plain = all(type(layer) is nn.Linear for layer in layers)
        return CompiledBlock(block, self) if plain else None


class CompiledBlock:
    """A block of the decoder for one token of each row; replaces a PlainBlock."""

    def __init__(self, block: Block, shared: CompiledBlocks) -> None:
        attention, ffn = block.attention, block.ffn
        assert isinstance(ffn, FeedForward)
        self._block, self._shared = block, shared
        projections = (attention.wq, attention.wk, attention.wv)
        self._qkv = join_weights([layer.weight for layer in projections])
        has_bias = attention.wq.bias is not None
        self._bias = join_weights([layer.bias for layer in projections]) if has_bias else None
        self._gate_up = join_weights([ffn.w1.weight, ffn.w3.weight])
        self._output, self._down = (join_weights([w.weight]) for w in (attention.wo, ffn.w2))

    def heads(self, x: Tensor, rope: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, H, E], k and v [B, K, E] of x [B, D]."""
        norm, attention = self._block.attention_norm, self._block.attention
        q_norm = getattr(attention.q_norm, "weight", None)
        k_norm = getattr(attention.k_norm, "weight", None)
        norms = (norm.weight, norm.eps, q_norm, k_norm)
        found: tuple[Tensor, Tensor, Tensor] = self._shared.heads(
            x, *norms, self._qkv, self._bias, rope, kv_heads
        )
        return found

    def rest(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x [B, D] for the next block, given attention's y [B, H E]."""
        norm = self._block.ffn_norm
        x, y = self._shared.gate(x, y, self._output, norm.weight, norm.eps, self._gate_up)
        # Not compiled: on an H200, torch's reduction over a width of 11,008 takes 46 µs, cuBLAS 27.
        return torch.addmm(x, y, self._down.t())


def project_heads(
    x: Tensor,
    norm: Tensor,
    eps: float | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    rope: Tensor,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [B, H, E], k and v [B, K, E] of x [B, D]."""
    width = rope.shape[-1:]
    heads = F.linear(F.rms_norm(x, x.shape[-1:], norm, eps), weight, bias)
    if q_norm is None or k_norm is None:
        norms = None
    else:
        norms = (
            lambda q: F.rms_norm(q, width, q_norm, eps),
            lambda k: F.rms_norm(k, width, k_norm, eps),
        )
    return turn_heads(heads.view(len(x), -1, *width), rope, kv_heads, norms)


def add_and_gate(
    x: Tensor, y: Tensor, output: Tensor, norm: Tensor, eps: float | None, gate_up: Tensor
) -> tuple[Tensor, Tensor]:
    """Add attention's output y [B, H E] to x [B, D]; returns this, and SwiGLU's product [B, F]."""
    x = x + F.linear(y, output)
    gate, up = F.linear(F.rms_norm(x, x.shape[-1:], norm, eps), gate_up).chunk(2, -1)
    return x, F.silu(gate) * up
