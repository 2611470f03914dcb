"""Shapes of the decoder's tensors by name, from its configuration alone. No torch."""

from __future__ import annotations

from kempner.model.config import ModelConfig

ROUTER_BIAS = "ffn.router_bias"  # a buffer of the decoder


def tensor_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the decoder's tensors without building it (or torch): the biases of its
    routers, which are always fp32, then its parameters in order."""
    dim, head = cfg.dim, cfg.resolved_head_dim
    q, kv = cfg.n_heads * head, cfg.kv_heads * head
    block: dict[str, tuple[int, ...]] = {"attention_norm.weight": (dim,)}
    for name, width in (("wq", q), ("wk", kv), ("wv", kv)):
        block[f"attention.{name}.weight"] = (width, dim)
        if cfg.qkv_bias:
            block[f"attention.{name}.bias"] = (width,)
    block["attention.wo.weight"] = (dim, q)
    if cfg.qk_norm:
        block |= {"attention.q_norm.weight": (head,), "attention.k_norm.weight": (head,)}
    if cfg.post_norms:
        block["attention_post_norm.weight"] = (dim,)
    block["ffn_norm.weight"] = (dim,)
    mixtures = cfg.mixtures
    last = {"ffn_post_norm.weight": (dim,)} if cfg.post_norms else {}
    shapes: dict[str, tuple[int, ...]] = {}
    if cfg.router_bias:
        shapes = {f"blocks.{i}.{ROUTER_BIAS}": (cfg.n_experts,) for i in mixtures}
    shapes["embed.weight"] = (cfg.vocab_size, dim)
    for layer in range(cfg.n_layers):
        ffn = _experts_shapes(cfg) if layer in mixtures else _swiglu("ffn", dim, cfg.dense_width)
        whole = {**block, **ffn, **last}
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in whole.items()}
    shapes["norm.weight"] = (dim,)
    return shapes if cfg.tie_embeddings else shapes | {"output.weight": (cfg.vocab_size, dim)}


def _experts_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    experts, dim, width = cfg.n_experts, cfg.dim, cfg.ffn_dim
    inner, outer = (experts, width, dim), (experts, dim, width)
    shapes: dict[str, tuple[int, ...]] = {"ffn.router.weight": (experts, dim)}
    shapes |= {f"ffn.experts.{name}": inner for name in ("w1", "w3")} | {"ffn.experts.w2": outer}
    shared = cfg.shared_experts * width
    return shapes | (_swiglu("ffn.shared", dim, shared) if shared else {})


def _swiglu(prefix: str, dim: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.w1.weight": (width, dim),
        f"{prefix}.w3.weight": (width, dim),
        f"{prefix}.w2.weight": (dim, width),
    }
