"""A Llama-family decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU; QK-norm,
norms of the layers' outputs, biases of q, k and v, a sliding window, capped attention scores, tied
weights, and experts (moe.py) optional.

Shapes: B batch, T tokens, D width, H query heads, K key-value heads, E head width, F SwiGLU width,
V vocabulary. Parameter names and the order of rotary pairs are those of the Hugging Face Llama and
Qwen3 checkpoints' halves convention, so that weights convert by renaming.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kempner.model.attention import Documents, Visible, attend, attention_pattern
from kempner.model.config import ModelConfig
from kempner.model.feed_forward import FeedForward
from kempner.model.loss import cross_entropy

if TYPE_CHECKING:
    from kempner.model.cache import CacheRows, LayerCache
    from kempner.model.moe import Routing, Routings

Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def rope_frequencies(cfg: ModelConfig) -> Tensor:
    """Angular frequencies [E/2], fp32, with Llama-3's stretching of long wavelengths
    (arXiv:2407.21783, and Meta's code)."""
    freqs = 1.0 / cfg.rope_theta ** (
        torch.arange(0, cfg.resolved_head_dim, 2, dtype=torch.float32) / cfg.resolved_head_dim
    )
    if cfg.rope_factor == 1.0:
        return freqs
    wavelength = 2 * math.pi / freqs
    low, high = cfg.rope_low_freq_factor, cfg.rope_high_freq_factor
    # 1: keep, 0: stretch
    keep = ((cfg.rope_original_len / wavelength - low) / (high - low)).clamp(0, 1)
    return keep * freqs + (1 - keep) * freqs / cfg.rope_factor


def rope_table(cfg: ModelConfig) -> Tensor:
    """Cosines and sines of every position, [2, max_seq_len, E], fp32."""
    angles = torch.outer(torch.arange(cfg.max_seq_len, dtype=torch.float32), rope_frequencies(cfg))
    angles = torch.cat((angles, angles), dim=-1)  # [T, E]: the halves convention
    return torch.stack((angles.cos(), angles.sin()))


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """Turn the pairs (i, i + E/2) of x [B, H, T, E] by the angles of rope [2, T, E], or
    [2, B, 1, T, E] where rows differ, in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    return (x * rope[0] + torch.cat((-second, first), dim=-1) * rope[1]).type_as(x)


class Attention(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.resolved_head_dim = cfg.resolved_head_dim
        self.wq = nn.Linear(cfg.dim, cfg.n_heads * cfg.resolved_head_dim, bias=cfg.qkv_bias)
        self.wk = nn.Linear(cfg.dim, cfg.kv_heads * cfg.resolved_head_dim, bias=cfg.qkv_bias)
        self.wv = nn.Linear(cfg.dim, cfg.kv_heads * cfg.resolved_head_dim, bias=cfg.qkv_bias)
        self.wo = nn.Linear(cfg.n_heads * cfg.resolved_head_dim, cfg.dim, bias=False)
        self.q_norm = (
            nn.RMSNorm(cfg.resolved_head_dim, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        )
        self.k_norm = (
            nn.RMSNorm(cfg.resolved_head_dim, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        )
        # An attribute, so that ranks that share a row can replace it (parallel/context.py).
        self.attend: Callable[[Tensor, Tensor, Tensor, Visible], Tensor] = attend

    def forward(
        self, x: Tensor, rope: Tensor, visible: Visible, cache: LayerCache | None = None
    ) -> Tensor:
        heads = (*x.shape[:2], -1, self.resolved_head_dim)
        q = self.q_norm(self.wq(x).view(heads)).transpose(1, 2)  # [B, H, T, E]
        k = self.k_norm(self.wk(x).view(heads)).transpose(1, 2)  # [B, K, T, E]
        v = self.wv(x).view(heads).transpose(1, 2)  # [B, K, T, E]
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        y = self.attend(q, k, v, visible) if cache is None else cache.attend(q, k, v, visible)
        return self.wo(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig, mixture: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(cfg.dim, cfg.norm_eps)
        self.attention = Attention(cfg)
        self.attention_post_norm = self._post_norm(cfg)
        self.ffn_norm = nn.RMSNorm(cfg.dim, cfg.norm_eps)
        self.ffn: nn.Module
        if mixture:
            from kempner.model.moe import MixtureOfExperts

            self.ffn = MixtureOfExperts(cfg)
        else:
            self.ffn = FeedForward(cfg.dim, cfg.dense_width)
        self.ffn_post_norm = self._post_norm(cfg)

    @staticmethod
    def _post_norm(cfg: ModelConfig) -> nn.Module:
        return nn.RMSNorm(cfg.dim, cfg.norm_eps) if cfg.post_norms else nn.Identity()

    def forward(
        self, x: Tensor, rope: Tensor, visible: Visible, cache: LayerCache | None = None
    ) -> Tensor | tuple[Tensor, Routing]:
        """Return x [B, T, D] for the next block, and the Routing if this block has experts. The
        Routing is returned, not stored, so that recomputation in the backward pass does not
        count it twice."""
        y = self.attention(self.attention_norm(x), rope, visible, cache)
        x = x + self.attention_post_norm(y)
        y = self.ffn(self.ffn_norm(x))
        if isinstance(y, tuple):
            return x + self.ffn_post_norm(y[0]), y[1]
        return x + self.ffn_post_norm(y)  # type: ignore[no-any-return]


class OutputLayer(nn.Linear):
    """The output layer, called even if the loss computes the logits, a chunk of tokens at a time,
    so that hooks that gather a module's weights for its forward (FSDP) gather these."""

    def forward(  # type: ignore[override]
        self, x: Tensor, loss: Loss | None = None, targets: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        return logits_or_loss(self.weight, x, loss, targets)


def logits_or_loss(
    weight: Tensor, x: Tensor, loss: Loss | None, targets: Tensor | None
) -> Tensor | tuple[Tensor, ...]:
    """Return the logits [..., V] of x [..., D]; with `loss`, its result for x [N, D]
    and targets [N]."""
    if loss is None or targets is None:
        return F.linear(x, weight)
    return loss(x, weight, targets)


def apply_blocks(
    blocks: Iterable[nn.Module],
    x: Tensor,
    rope: Tensor,
    visible: Visible,
    cache: CacheRows | None = None,
) -> tuple[Tensor, list[Routing]]:
    """Run x [B, T, D] through these blocks; return it with the Routings of those with experts."""
    routings: list[Routing] = []
    for i, block in enumerate(blocks):
        x = block(x, rope, visible) if cache is None else block(x, rope, visible, cache.layer(i))
        if isinstance(x, tuple):
            x, routing = x
            routings.append(routing)
    return x, routings


class Decoder(nn.Module):
    """A decoder: `Decoder(cfg)(tokens)` returns logits [B, T, V]; with targets, the summed loss of
    the tokens that count."""

    rope: Tensor
    routings: Routings  # of a model with experts

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        # Draw and compute nothing on the meta device: that would import sympy, 0.2 s.
        rope = torch.empty(2, cfg.max_seq_len, cfg.resolved_head_dim)
        weight = torch.empty(cfg.vocab_size, cfg.dim) if rope.is_meta else None
        self.embed = nn.Embedding(cfg.vocab_size, cfg.dim, _weight=weight)
        mixtures = cfg.mixtures
        self.blocks = nn.ModuleList(Block(cfg, i in mixtures) for i in range(cfg.n_layers))
        self.norm = nn.RMSNorm(cfg.dim, cfg.norm_eps)
        self.output = (
            None if cfg.tie_embeddings else OutputLayer(cfg.dim, cfg.vocab_size, bias=False)
        )
        # Not persistent: it follows from the configuration, so checkpoints omit it.
        self.register_buffer("rope", rope if rope.is_meta else rope_table(cfg), persistent=False)
        if cfg.n_experts:
            from kempner.model.moe import Routings

            self.routings = Routings(cfg)
        self.loss: Loss = cross_entropy
        # With a z-loss: the sum of log^2 Z of each micro-batch so far, fp32 [].
        self.log_z_squares: list[Tensor] = []
        self.kernel = "auto"  # the attention kernel: see attention.choose_kernel
        # Set by parallel/shard.py or single.py; called before each micro-batch of a step.
        self.begin_micro_batch: Any = None
        self.unchanged = False  # by parallel/shard.py: the weights, since the last pass
        self.fp32_sums: Any = None  # parallel/shard.py: of gradients of bf16 weights
        self.pipeline: Any = None  # parallel/pipeline.py: runs the passes of a stage
        self.elsewhere: Sequence[str] = ()  # trained parameters on other ranks

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Documents | None = None,
        token_losses: bool = False,
        cache: CacheRows | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits [B, T, V] or, with targets, the fp32 loss sum [] and, with `token_losses`,
        its terms [B, T], without a gradient. tokens, targets: int64 [B, T]; a target of -100 does
        not count. `documents`: those packed into each row. `cache`: the rows whose keys are cached;
        the logits are then those of each row's last token only, [B, 1, V]."""
        x = self.embed(tokens)  # [B, T, D]
        rope, visible = self.place(tokens, documents, cache, x.dtype)
        x, routings = apply_blocks(self.blocks, x, rope, visible, cache)
        if cache is not None:
            x = cache.last_tokens(x)
        result = self.predict(x, targets)
        if targets is None:
            return result
        loss, terms = result
        if routings and torch.is_grad_enabled():
            loss = loss + self.routings.add(routings, targets)
        return (loss, terms) if token_losses else loss

    def predict(self, x: Tensor, targets: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        """Map the last block's output [B, T, D] to logits, or to the loss sum and its terms."""
        x = self.norm(x)
        last = (
            (x, None, None) if targets is None else (x.flatten(0, 1), self.loss, targets.flatten())
        )
        # A tied output layer has no parameter of its own: FSDP would shard a shared one
        # once per module.
        output = partial(logits_or_loss, self.embed.weight) if self.output is None else self.output
        result: Any = output(*last)
        if targets is None:
            return result  # type: ignore[no-any-return]
        loss, terms, *squares = result
        if torch.is_grad_enabled():  # not in a validation
            self.log_z_squares += squares
        return loss, terms.view(targets.shape)

    def place(
        self,
        tokens: Tensor,
        documents: Documents | None,
        cache: CacheRows | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Visible]:
        """Return the rotary angles of tokens [B, T], [2, T, E], or [2, B, 1, T, E] if rows differ,
        and the keys that they see. `dtype`: of the activations."""
        # Rows without their own positions share one slice of the table, without a gather.
        rope = self.rope[:, : tokens.shape[1]]
        if documents is not None and documents.positions is not None:
            rope = self.rope[:, documents.positions].unsqueeze(2)
        window, softcap = self.cfg.sliding_window, self.cfg.attention_softcap
        kernel = self.kernel if cache is None else "flash"  # flex would compile for every length
        return rope, attention_pattern(tokens, window, documents, dtype, softcap, kernel)

    def cast(self, dtype: torch.dtype) -> Decoder:
        """Convert the parameters to `dtype`. Buffers stay fp32: RoPE's angles, routers' biases."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    @torch.no_grad()
    def move_router_biases(self, unless: Tensor) -> None:
        """Move each bias, after an update, towards experts with less than the step's mean load.
        `unless` []: 1 leaves the biases unchanged (arXiv:2408.15664)."""
        load = self.routings.step_load
        steps = (load.mean(1, keepdim=True) - load).sign() * self.cfg.router_bias_speed  # [L, E]
        steps = torch.where(unless > 0, 0.0, steps)
        for number, block in self.blocks.named_children():  # the number in the whole model
            for layer in block.modules():
                bias = getattr(layer, "router_bias", None)
                if isinstance(bias, Tensor):
                    bias += steps[self.cfg.mixtures.index(int(number))]

    def init_std(self, name: str) -> float:
        """Return the standard deviation of a parameter's initial values; 0 for norms, which start
        as ones, and for biases, which start as zeros.

        Weights that write into the residual stream are scaled by 1/sqrt(2 n_layers), as in GPT-2.
        """
        if "norm" in name or name.endswith("bias"):
            return 0.0
        writes = name.endswith(
            ("attention.wo.weight", "ffn.w2.weight", "experts.w2", "shared.w2.weight")
        )
        return self.cfg.init_std / math.sqrt(2 * self.cfg.n_layers) if writes else self.cfg.init_std
