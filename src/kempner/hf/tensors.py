"""Names and shapes of the decoder's tensors, ours and those of each family of Hugging Face models.

Each family has one table, ours -> theirs. The first `*` stands for the number of a layer, the
second for that of an expert: experts are separate tensors there, and one tensor here. No torch.
"""

from __future__ import annotations

from kempner.model.config import ModelConfig

ROUTER_BIAS = "ffn.router_bias"  # a buffer of the decoder
LLAMA = {
    "embed.weight": "model.embed_tokens.weight",
    "blocks.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "blocks.*.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "blocks.*.attention.wk.weight": "model.layers.*.self_attn.k_proj.weight",
    "blocks.*.attention.wv.weight": "model.layers.*.self_attn.v_proj.weight",
    "blocks.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
    "blocks.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "blocks.*.ffn.w1.weight": "model.layers.*.mlp.gate_proj.weight",
    "blocks.*.ffn.w2.weight": "model.layers.*.mlp.down_proj.weight",
    "blocks.*.ffn.w3.weight": "model.layers.*.mlp.up_proj.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
QWEN2 = LLAMA | {
    "blocks.*.attention.wq.bias": "model.layers.*.self_attn.q_proj.bias",
    "blocks.*.attention.wk.bias": "model.layers.*.self_attn.k_proj.bias",
    "blocks.*.attention.wv.bias": "model.layers.*.self_attn.v_proj.bias",
}
QWEN3 = LLAMA | {
    "blocks.*.attention.q_norm.weight": "model.layers.*.self_attn.q_norm.weight",
    "blocks.*.attention.k_norm.weight": "model.layers.*.self_attn.k_norm.weight",
}
DENSE = {name: theirs for name, theirs in LLAMA.items() if ".ffn.w" not in name}
MIXTRAL = DENSE | {
    "blocks.*.ffn.router.weight": "model.layers.*.block_sparse_moe.gate.weight",
    "blocks.*.ffn.experts.w1": "model.layers.*.block_sparse_moe.experts.*.w1.weight",
    "blocks.*.ffn.experts.w2": "model.layers.*.block_sparse_moe.experts.*.w2.weight",
    "blocks.*.ffn.experts.w3": "model.layers.*.block_sparse_moe.experts.*.w3.weight",
}
QWEN3_MOE = QWEN3 | {  # not every block of it has experts
    "blocks.*.ffn.router.weight": "model.layers.*.mlp.gate.weight",
    "blocks.*.ffn.experts.w1": "model.layers.*.mlp.experts.*.gate_proj.weight",
    "blocks.*.ffn.experts.w2": "model.layers.*.mlp.experts.*.down_proj.weight",
    "blocks.*.ffn.experts.w3": "model.layers.*.mlp.experts.*.up_proj.weight",
}
GLM4_MOE = {name: theirs for name, theirs in (QWEN2 | QWEN3_MOE).items() if ".ffn.w" not in name}
GLM4_MOE |= {
    "blocks.*.ffn.router_bias": "model.layers.*.mlp.gate.e_score_correction_bias",
    "blocks.*.ffn.shared.w1.weight": "model.layers.*.mlp.shared_experts.gate_proj.weight",
    "blocks.*.ffn.shared.w2.weight": "model.layers.*.mlp.shared_experts.down_proj.weight",
    "blocks.*.ffn.shared.w3.weight": "model.layers.*.mlp.shared_experts.up_proj.weight",
}
TABLES = {  # by model_type
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "glm4_moe": GLM4_MOE,
}


def tensor_names(cfg: ModelConfig, kind: str) -> dict[str, str]:
    """Map the decoder's tensors, in its order, to their names in a family; see parts() for names
    with a `*` left."""
    table = TABLES[kind]
    names = {}
    for ours in tensor_shapes(cfg):
        if ours.startswith("blocks."):
            _, layer, rest = ours.split(".", 2)
            names[ours] = table[f"blocks.*.{rest}"].replace("*", layer, 1)
        else:
            names[ours] = table[ours]
    return names


def parts(theirs: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Map the tensors that a family stores for one of ours to their shapes: the one, or one for
    each expert; ours has them one after another."""
    if "*" not in theirs:
        return {theirs: shape}
    return {theirs.replace("*", str(expert)): shape[1:] for expert in range(shape[0])}


def tensor_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the decoder's tensors without building it (or torch): the biases of its
    routers, which are fp32 whatever the others are, then its parameters in their order."""
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
