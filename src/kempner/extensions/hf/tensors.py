"""Names and shapes of the decoder's tensors, ours and those of each family of Hugging Face models.

Each family has one table, ours -> theirs. The first `*` stands for the number of a layer, the
second for that of an expert: experts are separate tensors there, but one tensor here. No torch.
"""

from __future__ import annotations

from kempner.model.config import ModelConfig
from kempner.model.shapes import tensor_shapes

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
QWEN3_MOE = QWEN3 | {  # only some blocks have experts
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
    """Map the decoder's tensors, in its order, to their names in a family; names that keep a `*`
    go to stored_parts()."""
    table = TABLES[kind]
    names = {}
    for own_name in tensor_shapes(cfg):
        if own_name.startswith("blocks."):
            _, layer, rest = own_name.split(".", 2)
            names[own_name] = table[f"blocks.*.{rest}"].replace("*", layer, 1)
        else:
            names[own_name] = table[own_name]
    return names


def stored_parts(hf_name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Map the tensors that a family stores for one of ours to their shapes: a single one, or one
    per expert, which ours concatenates."""
    if "*" not in hf_name:
        return {hf_name: shape}
    return {hf_name.replace("*", str(expert)): shape[1:] for expert in range(shape[0])}
