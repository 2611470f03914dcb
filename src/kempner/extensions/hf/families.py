"""Families of Hugging Face models: config.json <-> the [model] section.

A family is a `model_type` that is mathematically our decoder. To add one, add its table of names
(tensors.py), what its config.json must say (`_refusals`), and how its keys map
(`model_values`, `config_json`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from kempner.config.option import ConfigError
from kempner.config.values import format_value
from kempner.model.config import OF_TRAINING, ModelConfig

Config = dict[str, Any]  # the content of a config.json


class Family(NamedTuple):
    architecture: str  # the class in transformers
    head_dim: int | None = None  # if config.json has none; None: hidden_size / heads
    rope_theta: float = 10000.0  # if config.json has none
    width: str = "intermediate_size"  # key of ffn_dim
    experts: str = ""  # key of their number, if it has experts
    rotary: float = 1.0  # fraction of a head that RoPE rotates, if config.json does not say


FAMILIES = {
    "llama": Family("LlamaForCausalLM"),  # also SmolLM, TinyLlama, Yi, ...
    "mistral": Family("MistralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM"),  # also Qwen2.5
    "qwen3": Family("Qwen3ForCausalLM", head_dim=128),
    "mixtral": Family("MixtralForCausalLM", rope_theta=1e6, experts="num_local_experts"),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", width="moe_intermediate_size", experts="num_experts"
    ),
    "glm4_moe": Family(  # DeepSeek-V3's experts behind a Llama's attention
        "Glm4MoeForCausalLM", width="moe_intermediate_size", experts="n_routed_experts", rotary=0.5
    ),
}
# Reasons why other families are unsupported, by prefix of model_type.
UNSUPPORTED = {
    "gemma": "its norms multiply by 1 + weight and its embeddings are scaled",
    "qwen2_moe": "its shared expert has its own gate",
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
# Required values of these keys, if a config.json has them.
FIXED: Config = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "quantization_config": None,
    "mlp_only_layers": [],
    "router_jitter_noise": 0.0,
}
# Required values of these keys of a glm4_moe, and its defaults for missing keys.
GLM_FIXED = {
    "n_group": (1, 1),
    "topk_group": (1, 1),
    "first_k_dense_replace": (0, 1),
    "num_nextn_predict_layers": (0, 1),
}
REQUIRED_FIELDS = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "norm_eps": "rms_norm_eps",
    "max_seq_len": "max_position_embeddings",
}
# Options of a model without experts, and those that only glm4_moe has.
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
# Other keys that are read from a config.json, and their types.
FIELD_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "rms_norm_eps": ("a number", (int, float)),
    "rope_theta": ("a number", (int, float)),
    "rope_parameters": ("an object", (dict,)),
    "rope_scaling": ("an object", (dict,)),
    "architectures": ("a list", (list,)),
    "layer_types": ("a list", (list,)),
    "max_window_layers": ("a whole number", (int,)),
    "routed_scaling_factor": ("a number", (int, float)),
    "n_shared_experts": ("a whole number", (int,)),
    "decoder_sparse_step": ("a whole number", (int,)),
    "tie_word_embeddings": ("true or false", (bool,)),
}
TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
NO_WINDOW = ("llama", "glm4_moe")
ROPE_SECTIONS = ("rope_parameters", "rope_scaling")
ROPE_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")  # outside the scaling
SIZES = ("num_key_value_heads", "head_dim", "sliding_window", "original_max_position_embeddings")


def model_values(config: Config, where: str) -> dict[str, Any]:
    """Map a config.json to values of the [model] section, by key.

    Raises ConfigError with every reason why our decoder cannot be this model. `where`: the file.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        why = next((text for name, text in UNSUPPORTED.items() if str(kind).startswith(name)), "")
        raise ConfigError(
            f"{where}: model_type {format_value(kind)} is not supported{why and f': {why}'}; "
            f"supported are {', '.join(FAMILIES)}"
        )
    if family.experts and "num_local_experts" in config:  # its name in transformers 5
        config = {family.experts: config["num_local_experts"], **config}
    # For these keys, null means the same as a missing key.
    config = {k: value for k, value in config.items() if value is not None or k not in FIELD_KINDS}
    if problems := _refusals(config, family):
        raise ConfigError([f"{where}: {problem}" for problem in problems])
    keys = _keys(family).items()
    values: dict[str, Any] = PLAIN | {own_key: config[hf_key] for own_key, hf_key in keys}
    heads = values["n_heads"]
    return values | {
        "norm_eps": float(values["norm_eps"]),
        "n_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or family.head_dim or values["dim"] // heads,
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "qk_norm": kind in ("qwen3", "qwen3_moe"),
        "qkv_bias": kind == "qwen2",
        # Only Qwen3-MoE can weigh the experts by their raw scores.
        "router_normalize": kind != "qwen3_moe" or config.get("norm_topk_prob", False),
        **(_dense_blocks(config) if kind == "qwen3_moe" else {}),
        "sliding_window": _window(config),
        **_rope(config),
        **(_glm_values(config) if kind == "glm4_moe" else {}),
    }


def _glm_values(config: Config) -> dict[str, Any]:
    return {
        "router": "sigmoid",
        "router_bias": True,
        "router_normalize": config.get("norm_topk_prob", True),
        "router_scale": float(config.get("routed_scaling_factor", 1.0)),
        "shared_experts": config.get("n_shared_experts", 1),
        "qk_norm": config.get("use_qk_norm", False),
        "qkv_bias": config.get("attention_bias", False),
    }


def _dense_blocks(config: Config) -> dict[str, Any]:
    """Return the options for a Qwen3-MoE's blocks without experts."""
    step = config.get("decoder_sparse_step") or 1
    width = config.get("intermediate_size") if step > 1 else None
    return {"moe_frequency": step, "dense_ffn_dim": width}


def _keys(family: Family) -> dict[str, str]:
    """Map keys of the [model] section to their names in config.json."""
    experts = {"n_experts": family.experts, "experts_per_token": "num_experts_per_tok"}
    return REQUIRED_FIELDS | {"ffn_dim": family.width} | (experts if family.experts else {})


def _refusals(config: Config, family: Family) -> list[str]:
    # First, because all other checks compute with these values.
    if type_problems := _wrong_types(config, family):
        return type_problems
    glm = family is FAMILIES["glm4_moe"]
    type_problems = [
        f"{key} = {format_value(config[key])}: only {format_value(value)} is supported"
        for key, value in FIXED.items()
        if config.get(key, value) not in (value, None)
        and not (glm and key == "attention_bias")  # covers queries, keys and values only
    ]
    type_problems += [
        f"{key} = {format_value(config.get(key, default))}: only {value} is supported"
        for key, (value, default) in GLM_FIXED.items()
        if glm and config.get(key, default) != value
    ]
    # Sizes have no defaults: those of transformers describe one model, such as Llama 7B.
    type_problems += [f"has no {key}" for key in _keys(family).values() if config.get(key) is None]
    # If missing, a Llama takes the number of heads; the others have constants, such as 8.
    if family.architecture != "LlamaForCausalLM" and "num_key_value_heads" not in config:
        type_problems.append("has no num_key_value_heads")
    if (architecture := (config.get("architectures") or [family.architecture])[0]) != (
        family.architecture
    ):
        type_problems.append(
            f"architecture {architecture}: only {family.architecture} is supported"
        )
    return type_problems + _rope_refusals(config) + _window_refusals(config)


def _wrong_types(config: Config, family: Family) -> list[str]:
    """List values that are not of the required type: number, list or object."""
    sizes = {*_keys(family).values(), *SIZES} - {"rms_norm_eps"}
    values = {key: value for key, value in config.items() if value is not None}
    problems = [
        f"{key} = {format_value(value)}: must be a whole number, at least 1"
        for key, value in values.items()
        # By type(), because True is an instance of int.
        if key in sizes and (type(value) is not int or value < 1)
    ]
    return problems + [
        f"{key} = {format_value(values[key])}: must be {name}"
        for key, (name, kinds) in FIELD_KINDS.items()
        if key in values and type(values[key]) not in kinds
    ]


def _rope_refusals(config: Config) -> list[str]:
    """List problems of RoPE, including values that differ between two places, of which
    transformers 4 and 5 choose different ones."""
    sections = [config[key] for key in ROPE_SECTIONS if config.get(key)]
    if any(isinstance(value, dict) for section in sections for value in section.values()):
        return [f"{' and '.join(ROPE_SECTIONS)} by kind of layer are not supported"]
    problems = []
    for key in ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor"):
        places = [place[key] for place in (config, *sections) if place.get(key) is not None]
        if wrong := [value for value in places if type(value) not in (int, float)]:
            return [f"{key} = {format_value(wrong[0])}: must be a number"]
        if len({*places}) > 1:
            problems.append(f"{key} is {' and '.join(map(format_value, places))}: give one value")
    scaling = _rope_section(config)
    kind, about = scaling["rope_type"], [_scaling(section) for section in sections]
    if about[1:] and about[0] != about[1]:
        problems.append(f"{' and '.join(ROPE_SECTIONS)} differ: remove the one that is not meant")
    elif kind not in ("default", "llama3"):
        problems.append(f"rope_type {format_value(kind)}: only default and llama3 are supported")
    elif kind == "llama3":
        problems += [
            f"rope_type {format_value(kind)} needs {key}, a number"
            for key in LLAMA3_ROPE.values()
            if type(scaling.get(key)) not in (int, float)
        ]
    part = [place.get("partial_rotary_factor") for place in (config, *sections)]
    part = [value for value in part if value is not None] or [FAMILIES[config["model_type"]].rotary]
    # Differing places have already been reported.
    if part[0] != 1.0 and len({*part}) == 1:
        problems.append(f"partial_rotary_factor = {part[0]}: only 1.0 is supported")
    return problems


def _scaling(section: Config) -> tuple[Any, ...]:
    """Return a section's scaling in a comparable form."""
    kind = section.get("rope_type", section.get("type", "default"))
    values = sorted((key, value) for key, value in section.items() if key not in ROPE_COMMON)
    # Plain RoPE reads no other key, even if a file still has keys of an earlier scaling.
    return (kind, *values) if kind != "default" else (kind,)


def _window_refusals(config: Config) -> list[str]:
    kind, types = config["model_type"], set(map(str, config.get("layer_types") or ()))
    # transformers takes 4096 if it is missing, and none if it is null.
    if kind == "mistral" and "sliding_window" not in config:
        return ["has no sliding_window (an int, or null)"]
    if (
        kind not in NO_WINDOW
        and config.get("use_sliding_window")
        and "sliding_window" not in config
    ):
        return ["use_sliding_window without sliding_window: give its size (transformers: 4096)"]
    if kind in ("qwen2", "qwen3"):
        if len(_layer_types(config)) > 1:
            return ["full and sliding attention in different layers are not supported"]
        types -= {"full_attention"}  # these families trust layer_types
    elif kind == "mistral" and types:
        return ["layer_types: with them, transformers reads a mistral as a ministral"]
    there = "sliding_attention" if _window(config) is not None else "full_attention"
    if types - {there}:
        return [f"layer_types are {', '.join(sorted(types))}; the other keys imply {there}"]
    return []


def _window(config: Config) -> int | None:
    """Return the sliding window in tokens, None without one."""
    if config["model_type"] == "mistral":
        return config["sliding_window"]  # type: ignore[no-any-return]
    if config["model_type"] == "mixtral":  # has no use_sliding_window
        return config.get("sliding_window")
    # Its max_window_layers has no effect there: all layers have the window, or none.
    if config["model_type"] == "qwen3_moe":
        return config.get("sliding_window") if config.get("use_sliding_window") else None
    has_window = config["model_type"] not in NO_WINDOW and config.get("use_sliding_window", False)
    everywhere = has_window and "full_attention" not in _layer_types(config)
    return config["sliding_window"] if everywhere else None


def _layer_types(config: Config) -> set[str]:
    """Return the kinds of attention in a Qwen: its first `max_window_layers` are always full."""
    if types := config.get("layer_types"):
        return set(map(str, types))
    layers = config.get("num_hidden_layers") or 0
    # 28 is transformers' default.
    full = min(config.get("max_window_layers", 28), layers)
    if not config.get("use_sliding_window", False) or config.get("sliding_window") is None:
        full = layers
    types_there = {"full_attention": full > 0, "sliding_attention": full < layers}
    return {kind for kind, there in types_there.items() if there}


def _rope_section(config: Config) -> Config:
    """Return RoPE's parameters: rope_parameters since transformers 5, several places before."""
    first, *rest = [config.get(key) or {} for key in ROPE_SECTIONS]
    section = {**first, **rest[0]}
    kind = section.get("rope_type", section.get("type", "default"))
    family = FAMILIES[config["model_type"]]
    theta = section.get("rope_theta") or config.get("rope_theta") or family.rope_theta
    beside = "original_max_position_embeddings"  # at the top level in some models
    return {beside: config.get(beside), **section, "rope_type": kind, "rope_theta": float(theta)}


def _rope(config: Config) -> dict[str, Any]:
    section = _rope_section(config)
    values = {"rope_theta": section["rope_theta"]}
    if section["rope_type"] == "llama3":
        values |= {own_key: float(section[hf_key]) for own_key, hf_key in LLAMA3_ROPE.items()}
        values["rope_original_len"] = int(values["rope_original_len"])
    return values


# --- From the [model] section ---


def family_of(cfg: ModelConfig) -> str:
    """Return the model_type that matches `cfg` mathematically. Raises ConfigError if there is
    none."""
    if cfg.attention_softcap is not None:
        raise ConfigError(
            f"model.attention_softcap = {cfg.attention_softcap}: no supported transformers "
            "model caps its attention scores; export a model without it"
        )
    if cfg.post_norms:
        raise ConfigError(
            "model.post_norms: no supported transformers model normalises the output of its "
            "layers; export a model without it"
        )
    # First, because no other family's config.json can express any of these.
    if any(getattr(cfg, name) != value for name, value in PLAIN.items() if name != "n_experts"):
        return _glm_of(cfg)
    if cfg.qkv_bias and cfg.qk_norm:
        raise ConfigError(
            "model.qkv_bias and model.qk_norm: no transformers model has both; export a model with "
            "one of them"
        )
    if cfg.n_experts:
        kind = _moe_family_of(cfg)
        if cfg.moe_frequency > 1 and kind != "qwen3_moe":
            raise ConfigError(
                f"model.moe_frequency = {cfg.moe_frequency}: of the supported "
                f"transformers models only Qwen3-MoE has it, and this model would be a {kind}; it "
                "must be 1 for an export"
            )
        return kind
    if cfg.qk_norm:
        return "qwen3"
    if cfg.qkv_bias:
        return "qwen2"
    return "llama" if cfg.sliding_window is None else "mistral"


def _moe_family_of(cfg: ModelConfig) -> str:
    if cfg.qkv_bias:
        raise ConfigError(
            "model.qkv_bias = true: of the transformers models with experts, Qwen3-MoE and Mixtral "
            "have no biases; it must be false for an export"
        )
    if not cfg.qk_norm and not cfg.router_normalize:
        raise ConfigError(
            "model.router_normalize = false: a Mixtral divides the weights of a token's experts by "
            "their sum; it must be true for an export, unless model.qk_norm makes it a Qwen3-MoE"
        )
    return "qwen3_moe" if cfg.qk_norm else "mixtral"


def _glm_of(cfg: ModelConfig) -> str:
    """Return the family that has all of these options: any one of them implies it."""
    needs = {
        "router": (cfg.router == "sigmoid", '"sigmoid"'),
        "router_bias": (cfg.router_bias, "true"),
        "shared_experts": (cfg.shared_experts > 0, "at least 1"),
        "n_experts": (cfg.n_experts > 1, "at least 2"),
        "sliding_window": (cfg.sliding_window is None, "none"),
        "moe_frequency": (cfg.moe_frequency == 1, "1"),
    }
    matches = [
        f"model.{name} = {format_value(getattr(cfg, name))}: the one transformers model with "
        f"such a router, Glm4Moe, differs; it must be {value} for an export"
        for name, (has, value) in needs.items()
        if not has
    ]
    if matches:
        raise ConfigError(matches)
    return "glm4_moe"


def config_json(cfg: ModelConfig, carried: Config | None, dtype: str, eos: int | None) -> Config:
    """Make the config.json of a model of this shape. `carried`: that of the model it came from,
    whose other keys stay; `dtype`: of the tensors, such as bfloat16; `eos`: the end of a
    document."""
    if carried is not None and _same_shape(cfg, carried):
        # transformers has renamed torch_dtype to dtype: keep the name in use.
        key = "dtype" if "dtype" in carried else "torch_dtype"
        return {**carried, key: dtype, "max_position_embeddings": cfg.max_seq_len}
    kind = family_of(cfg)
    config = {**_new_config(cfg, kind), "eos_token_id": eos, "torch_dtype": dtype}
    if carried is None:
        return config
    # Keys of one family may mean something else in another: only the token ids are kept.
    if kind != carried["model_type"]:
        return config | {key: carried[key] for key in TOKEN_FIELDS if key in carried}
    # Mostly a longer context. All other keys stay, above all the end of a text.
    places = ("layer_types", "original_max_position_embeddings", *ROPE_SECTIONS)
    carried_keys = {key: value for key, value in carried.items() if key not in places}
    if "dtype" in carried_keys:
        carried_keys["dtype"] = config.pop("torch_dtype")
    return carried_keys | {
        key: config[key] for key in config if key not in (*TOKEN_FIELDS, "initializer_range")
    }


def _new_config(cfg: ModelConfig, kind: str) -> Config:
    """Make a config.json from the shape alone, in a form that both transformers 4 and 5 read."""
    family = FAMILIES[kind]
    scaling = {own_key: getattr(cfg, own_key) for own_key in LLAMA3_ROPE}
    config = {
        "architectures": [family.architecture],
        "model_type": kind,
        **{hf_key: getattr(cfg, own_key) for own_key, hf_key in _keys(family).items()},
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.resolved_head_dim,
        "hidden_act": "silu",
        "initializer_range": cfg.init_std,
        "tie_word_embeddings": cfg.tie_embeddings,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": {"rope_type": "llama3"}
        | {hf_key: scaling[own_key] for own_key, hf_key in LLAMA3_ROPE.items()}
        if cfg.rope_factor > 1
        else None,
        # null, because a missing one gets the class's default, such as 1 and 2 for a Llama.
        **dict.fromkeys(TOKEN_FIELDS),
    }
    if kind in ("llama", "qwen3", "qwen3_moe"):
        config["attention_bias"] = False
    if kind not in NO_WINDOW:
        config["sliding_window"] = cfg.sliding_window
    if kind in ("qwen2", "qwen3"):
        # Always set: by default the first 28 layers, possibly all, have no window.
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
    if kind == "glm4_moe":
        config |= {
            "n_shared_experts": cfg.shared_experts,
            "routed_scaling_factor": cfg.router_scale,
            "norm_topk_prob": cfg.router_normalize,
            "use_qk_norm": cfg.qk_norm,
            "attention_bias": cfg.qkv_bias,
            # Its class rotates half of each head by default, our decoder all of it.
            "partial_rotary_factor": 1.0,
            "intermediate_size": cfg.ffn_dim,  # of layers without experts; there are none
            **{key: value for key, (value, _) in GLM_FIXED.items()},
        }
    return config


def _same_shape(cfg: ModelConfig, config: Config) -> bool:
    """Return whether the config.json describes the same model, ignoring keys that do not affect its
    mathematics."""

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
