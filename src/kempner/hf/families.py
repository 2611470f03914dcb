"""Families of Hugging Face models: config.json <-> the [model] section.

A family is a `model_type` whose mathematics is that of our decoder. To add one, add its table of
names (tensors.py), what its config.json must say (`_refusals`), and how its keys map
(`model_values`, `config_json`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from kempner.config.option import ConfigError
from kempner.config.values import shown
from kempner.model.config import OF_TRAINING, ModelConfig

Config = dict[str, Any]  # the content of a config.json


class Family(NamedTuple):
    architecture: str  # the class in transformers
    head_dim: int | None = None  # where config.json gives none; None: hidden_size / heads
    rope_theta: float = 10000.0  # where config.json gives none
    width: str = "intermediate_size"  # key of ffn_dim
    experts: str = ""  # key of their number, where there are any


FAMILIES = {
    "llama": Family("LlamaForCausalLM"),  # also SmolLM, TinyLlama, Yi, ...
    "mistral": Family("MistralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM"),  # also Qwen2.5
    "qwen3": Family("Qwen3ForCausalLM", head_dim=128),
    "mixtral": Family("MixtralForCausalLM", rope_theta=1e6, experts="num_local_experts"),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", width="moe_intermediate_size", experts="num_experts"
    ),
}
# Why not the others: by the beginning of model_type.
UNSUPPORTED = {
    "gemma": "its norms multiply by 1 + weight and its embeddings are scaled",
    "qwen2_moe": "its shared expert has a gate of its own",
    "qwen3_next": "its linear attention is not built",
    "deepseek": "its latent attention is not built",
    "gpt_oss": "its attention has sinks and its experts have biases",
    "phi3": "its projections are fused into one matrix",
    "smollm3": "some of its layers have no rotary positions",
    "gpt2": "it has learned positions and LayerNorm",
    "gpt_neox": "it has LayerNorm and parallel blocks",
    "olmo": "it normalises in other places",
    "cohere": "it has LayerNorm, parallel blocks and scaled logits",
    "llama4": "its layers differ from each other",
}
# What these keys must be, where a config.json has them.
FIXED: Config = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "attention_dropout": 0.0,
    "quantization_config": None,
    "mlp_only_layers": [],
    "router_jitter_noise": 0.0,
}
REQUIRED = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "norm_eps": "rms_norm_eps",
    "max_seq_len": "max_position_embeddings",
}
# Without experts, and what no family has.
PLAIN = {
    "n_experts": 0,
    "shared_experts": 0,
    "router": "softmax",
    "router_scale": 1.0,
    "router_bias": False,
}
LLAMA3_ROPE = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_len": "original_max_position_embeddings",
}


def model_values(config: Config, where: str) -> dict[str, Any]:
    """What a config.json says of the [model] section: values by key.

    Raises ConfigError with every reason why our decoder is not this model. `where` is the file.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        why = next((text for name, text in UNSUPPORTED.items() if str(kind).startswith(name)), "")
        raise ConfigError(
            f"{where}: model_type {shown(kind)} is not supported{why and f': {why}'}; supported "
            f"are {', '.join(FAMILIES)}"
        )
    if family.experts and "num_local_experts" in config:  # its name in transformers 5
        config = {family.experts: config["num_local_experts"], **config}
    if problems := _refusals(config, family):
        raise ConfigError([f"{where}: {problem}" for problem in problems])
    keys = _keys(family).items()
    values: dict[str, Any] = PLAIN | {ours: config[theirs] for ours, theirs in keys}
    heads = values["n_heads"]
    return values | {
        "norm_eps": float(values["norm_eps"]),
        "n_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or family.head_dim or values["dim"] // heads,
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "qk_norm": kind in ("qwen3", "qwen3_moe"),
        "qkv_bias": kind == "qwen2",
        # Qwen3-MoE alone can weigh the experts by their scores as they are.
        "router_normalize": kind != "qwen3_moe" or config.get("norm_topk_prob", False),
        **(_dense_blocks(config) if kind == "qwen3_moe" else {}),
        "sliding_window": _window(config),
        **_rope(config),
    }


def _dense_blocks(config: Config) -> dict[str, Any]:
    """Of a Qwen3-MoE: which blocks have no experts, and how wide their feed-forward layers are."""
    step = config.get("decoder_sparse_step") or 1
    width = config.get("intermediate_size") if step > 1 else None
    return {"moe_frequency": step, "dense_ffn_dim": width}


def _keys(family: Family) -> dict[str, str]:
    """Keys of the [model] section, and what config.json calls them."""
    experts = {"n_experts": family.experts, "experts_per_token": "num_experts_per_tok"}
    return REQUIRED | {"ffn_dim": family.width} | (experts if family.experts else {})


def _refusals(config: Config, family: Family) -> list[str]:
    found = [
        f"{key} = {shown(config[key])}: only {shown(value)} is supported"
        for key, value in FIXED.items()
        if config.get(key, value) not in (value, None)
    ]
    found += [f"has no {theirs}" for theirs in _keys(family).values() if theirs not in config]
    if family.architecture != "LlamaForCausalLM" and "num_key_value_heads" not in config:
        found.append("has no num_key_value_heads")
    if (architecture := (config.get("architectures") or [family.architecture])[0]) != (
        family.architecture
    ):
        found.append(f"architecture {architecture}: only {family.architecture} is supported")
    kind = (_rope_section(config)).get("rope_type", "default")
    if kind not in ("default", "llama3"):
        found.append(f"rope_type {shown(kind)}: only default and llama3 are supported")
    if config.get("model_type") in ("qwen2", "qwen3") and len(_layer_types(config)) > 1:
        found.append("full and sliding attention in different layers are not supported")
    if config.get("model_type") == "mistral" and "sliding_window" not in config:
        found.append("has no sliding_window (an int, or null)")
    return found


def _window(config: Config) -> int | None:
    """Tokens of the sliding window, None without one."""
    if config["model_type"] == "mistral":
        return config["sliding_window"]  # type: ignore[no-any-return]
    if config["model_type"] in ("mixtral", "qwen3_moe"):
        used = config.get("use_sliding_window", config["model_type"] == "mixtral")
        return config.get("sliding_window") if used else None
    sliding = config["model_type"] != "llama" and _layer_types(config) == {"sliding_attention"}
    return config["sliding_window"] if sliding else None


def _layer_types(config: Config) -> set[str]:
    """Which kinds of attention a Qwen has: its first `max_window_layers` are full in any case."""
    if types := config.get("layer_types"):
        return set(types)
    layers = config.get("num_hidden_layers", 0)
    full = min(config.get("max_window_layers", 28), layers)
    if not config.get("use_sliding_window", False) or config.get("sliding_window") is None:
        full = layers
    found = {"full_attention": full > 0, "sliding_attention": full < layers}
    return {kind for kind, there in found.items() if there}


def _rope_section(config: Config) -> Config:
    """RoPE's parameters: under rope_parameters since transformers 5, in two places before."""
    section = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = section.get("rope_type", section.get("type", "default"))
    family = FAMILIES[config["model_type"]]
    theta = section.get("rope_theta") or config.get("rope_theta") or family.rope_theta
    return {**section, "rope_type": kind, "rope_theta": float(theta)}


def _rope(config: Config) -> dict[str, Any]:
    section = _rope_section(config)
    values = {"rope_theta": section["rope_theta"]}
    if section["rope_type"] == "llama3":
        values |= {ours: float(section[theirs]) for ours, theirs in LLAMA3_ROPE.items()}
        values["rope_original_len"] = int(values["rope_original_len"])
    return values


# --- From the [model] section ---


def family_of(cfg: ModelConfig) -> str:
    """The model_type whose mathematics is that of `cfg`. Raises ConfigError when there is none."""
    if cfg.attention_softcap is not None:
        raise ConfigError(
            f"model.attention_softcap = {cfg.attention_softcap}: no model of transformers that is "
            "supported here caps its attention scores; export a model without it"
        )
    if cfg.post_norms:
        raise ConfigError(
            "model.post_norms: no model of transformers that is supported here normalises what "
            "its layers return; export a model without it"
        )
    if cfg.qkv_bias and cfg.qk_norm:
        raise ConfigError(
            "model.qkv_bias and model.qk_norm: no model of transformers has both; export a model "
            "with one of them"
        )
    if cfg.n_experts:
        kind = _moe_family_of(cfg)
        if cfg.moe_frequency > 1 and kind != "qwen3_moe":
            raise ConfigError(
                f"model.moe_frequency = {cfg.moe_frequency}: of the supported models of "
                f"transformers Qwen3-MoE alone has it, and this model would be a {kind}; it must "
                "be 1 for an export"
            )
        return kind
    if cfg.qk_norm:
        return "qwen3"
    if cfg.qkv_bias:
        return "qwen2"
    return "llama" if cfg.sliding_window is None else "mistral"


def _moe_family_of(cfg: ModelConfig) -> str:
    values = {name: (getattr(cfg, name), value) for name, value in PLAIN.items()}
    values["qkv_bias"] = cfg.qkv_bias, False
    if not cfg.qk_norm:
        values["router_normalize"] = cfg.router_normalize, True
    found = [
        f"model.{name} = {shown(has)}: no model of transformers with experts has it; it must be "
        f"{shown(needs)} for an export"
        for name, (has, needs) in values.items()
        if has != needs and name != "n_experts"
    ]
    if found:
        raise ConfigError(found)
    return "qwen3_moe" if cfg.qk_norm else "mixtral"


def config_json(cfg: ModelConfig, carried: Config | None, dtype: str, eos: int | None) -> Config:
    """The config.json of a model of this shape. `carried`: of the model from which it came, whose
    other keys stay; `dtype`: of the tensors, such as bfloat16; `eos`: the end of a document."""
    if carried is not None and _same_shape(cfg, carried):
        key = "dtype" if "dtype" in carried else "torch_dtype"
        return {**carried, key: dtype, "max_position_embeddings": cfg.max_seq_len}
    kind = family_of(cfg)
    family = FAMILIES[kind]
    scaling = {ours: getattr(cfg, ours) for ours in LLAMA3_ROPE}
    config = {
        "architectures": [family.architecture],
        "model_type": kind,
        **{theirs: getattr(cfg, ours) for ours, theirs in _keys(family).items()},
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.resolved_head_dim,
        "hidden_act": "silu",
        "initializer_range": cfg.init_std,
        "tie_word_embeddings": cfg.tie_embeddings,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": {"rope_type": "llama3"}
        | {theirs: scaling[ours] for ours, theirs in LLAMA3_ROPE.items()}
        if cfg.rope_factor > 1
        else None,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": None,
        "torch_dtype": dtype,  # transformers 4 knows this name alone, 5 takes both
    }
    if kind in ("llama", "qwen3", "qwen3_moe"):
        config["attention_bias"] = False
    if kind != "llama":
        config["sliding_window"] = cfg.sliding_window
    if kind in ("qwen2", "qwen3"):
        full = cfg.n_layers if cfg.sliding_window is None else 0
        config |= {"use_sliding_window": full == 0, "max_window_layers": full}
    if kind == "qwen3_moe":
        config |= {
            "use_sliding_window": cfg.sliding_window is not None,
            "norm_topk_prob": cfg.router_normalize,
            "decoder_sparse_step": cfg.moe_frequency,
            "intermediate_size": cfg.dense_width,
            "mlp_only_layers": [],
        }
    return config


def _same_shape(cfg: ModelConfig, config: Config) -> bool:
    """Is it the model of that config.json, apart from what has no part in its mathematics?"""

    of_training: dict[str, Any] = dict.fromkeys(OF_TRAINING, 0.0)

    def mathematics(model: ModelConfig) -> ModelConfig:
        return replace(
            model,
            n_kv_heads=model.kv_heads,
            head_dim=model.resolved_head_dim,
            dense_ffn_dim=model.dense_width,
            max_seq_len=0,
            init_from=None,
            **of_training,
        )

    return mathematics(cfg) == mathematics(ModelConfig(**model_values(config, "config.json")))
