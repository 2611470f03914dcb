"""config.json <-> the [model] section: what is the same model, and what is refused."""

from __future__ import annotations

import contextlib
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kempner.config.option import ConfigError
from kempner.extensions.hf.families import config_json, family_of, model_values
from kempner.extensions.hf.tensors import stored_parts, tensor_names
from kempner.model.config import OF_TRAINING, ModelConfig
from kempner.model.decoder import Decoder
from kempner.model.shapes import tensor_shapes

# As published, in the form of transformers 4.
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
QWEN_25_05B = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
    "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "use_cache": True, "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
MISTRAL_V01 = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32000,
}  # fmt: skip
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
    "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
# Parameters as published.
PUBLISHED = {
    "llama-3.1-8b": (LLAMA_31_8B, 8_030_261_248),
    "qwen2.5-0.5b": (QWEN_25_05B, 494_032_768),
    "mistral-7b-v0.1": (MISTRAL_V01, 7_241_732_096),
    "mixtral-8x7b": (MIXTRAL_8X7B, 46_702_792_704),
    "qwen3-30b-a3b": (QWEN3_30B_A3B, 30_532_122_624),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_configurations_give_the_published_parameters(model: str) -> None:
    config, parameters = PUBLISHED[model]
    cfg = ModelConfig(**model_values(config, "config.json"))
    assert cfg.problems() == [] and cfg.count_parameters() == parameters
    assert family_of(cfg) == config["model_type"]
    assert config_json(cfg, config, "bfloat16", None) == config  # every other key stays


def test_a_longer_context_changes_nothing_else() -> None:
    """The end of a text, above all, without which a base model talks on; in both forms of RoPE."""
    at_the_top = ("rope_theta", "rope_scaling")
    saved_by_5 = {key: value for key, value in LLAMA_31_8B.items() if key not in at_the_top}
    saved_by_5 |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    for carried in (LLAMA_31_8B, saved_by_5):
        before = ModelConfig(**model_values(carried, ""))
        longer = replace(before, rope_factor=16.0, max_seq_len=262144)
        found = config_json(longer, carried, "float32", None)
        assert ModelConfig(**model_values(found, "")) == replace(longer, max_seq_len=262144)
        changed = {key for key in found if found[key] != LLAMA_31_8B.get(key)}
        new = {"head_dim", "rope_scaling", "max_position_embeddings", "torch_dtype"}
        assert changed == new and found["eos_token_id"] == [128001, 128008, 128009]
    windowed = replace(before, sliding_window=64)  # now it is a Mistral
    assert config_json(windowed, carried, "float32", None)["bos_token_id"] == 128000


def test_what_follows_from_the_keys() -> None:
    values = model_values(LLAMA_31_8B, "config.json")
    assert values["rope_factor"] == 8.0 and values["rope_original_len"] == 8192
    assert values["rope_theta"] == 500000.0 and values["n_kv_heads"] == 8
    qwen = model_values(QWEN_25_05B, "config.json")
    assert qwen["qkv_bias"] and qwen["tie_embeddings"] and qwen["sliding_window"] is None
    sliding = QWEN_25_05B | {"use_sliding_window": True, "max_window_layers": 0}
    assert model_values(sliding, "config.json")["sliding_window"] == 32768
    assert model_values(MISTRAL_V01, "config.json")["sliding_window"] == 4096
    assert model_values(MISTRAL_V01 | {"sliding_window": None}, "")["sliding_window"] is None
    unknown = MIXTRAL_8X7B | {"sliding_window": 4096, "use_sliding_window": False}
    assert model_values(unknown, "")["sliding_window"] == 4096  # transformers has no such key


GLM: dict[str, Any] = {
    "n_experts": 4, "router": "sigmoid", "router_bias": True, "shared_experts": 1,
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gemma": ({"model_type": "gemma2"}, "its norms multiply by 1 + weight"),
    "gated-expert": ({"model_type": "qwen2_moe"}, "its shared expert has its own gate"),
    "dense-layers": (
        QWEN3_30B_A3B | {"mlp_only_layers": [0]},
        "mlp_only_layers = [0]: only [] is supported",
    ),
    "no-experts": (
        {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
        | {"num_experts_per_tok": 2},
        "has no num_local_experts",
    ),
    "unheard-of": ({"model_type": "mamba9"}, '"mamba9" is not supported; supported are llama, '),
    "no-type": ({"model_type": None}, "model_type"),
    "another-task": (
        {"architectures": ["LlamaForSequenceClassification"]},
        "architecture LlamaForSequenceClassification: only LlamaForCausalLM",
    ),
    "activation": ({"hidden_act": "gelu"}, 'hidden_act = "gelu": only "silu"'),
    "biases": ({"attention_bias": True}, "attention_bias = true: only false"),
    "rope": ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 'rope_type "yarn": only default'),
    "rope-with-a-list": (
        {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}},
        'rope_type "longrope": only default and llama3 are supported',
    ),
    "theta-as-text": ({"rope_scaling": {"rope_theta": "1e6"}}, 'rope_theta = "1e6": must be a nu'),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "mixed-layers": (
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
        | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        "full and sliding attention in different layers",
    ),
    # Two places that differ, of which versions of transformers choose another one.
    "rope-twice": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
        | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope_parameters and rope_scaling differ",
    ),
    "theta-twice": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_scaling": None},
        "rope_theta is 500000.0 and 10000.0: give one value",
    ),
    "original-length-twice": (
        {"original_max_position_embeddings": 4096},
        "original_max_position_embeddings is 4096 and 8192",
    ),
    "rope-by-layer": (
        {"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "by kind of layer are not supported",
    ),
    "part-of-a-head": (
        {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor = 0.5: only 1.0 is supported",
    ),
    "ministral": (
        MISTRAL_V01 | {"layer_types": ["full_attention", "sliding_attention"] * 16},
        "layer_types: with them, transformers reads a mistral as a ministral",
    ),
    "layers-of-a-llama": (
        {"layer_types": ["sliding_attention"] * 32, "sliding_window": 64},
        "layer_types are sliding_attention; the other keys imply full_attention",
    ),
    "layers-of-a-qwen": (
        QWEN_25_05B | {"rope_scaling": None, "layer_types": ["sliding_attention"] * 24},
        "layer_types are sliding_attention",
    ),
    "window-without-size": (
        {k: v for k, v in QWEN3_30B_A3B.items() if k != "sliding_window"}
        | {"use_sliding_window": True},
        "use_sliding_window without sliding_window: give its size",
    ),
    "glm": (
        config_json(ModelConfig(**GLM), None, "float32", None)
        | {"first_k_dense_replace": 1},
        "first_k_dense_replace = 1: only 0 is supported",
    ),
    "glm-of-half-a-head": (
        {key: value for key, value in config_json(ModelConfig(**GLM), None, "", None).items()
         if key != "partial_rotary_factor"},
        "partial_rotary_factor = 0.5: only 1.0 is supported",
    ),
    # What is missing or of another type.
    "no-low-factor": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}
         | {"original_max_position_embeddings": 8192}},
        'rope_type "llama3" needs low_freq_factor, a number',
    ),
    "no-original-length": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}
         | {"low_freq_factor": 1.0}},
        'rope_type "llama3" needs original_max_position_embeddings, a number',
    ),
    "rope-as-text": ({"rope_scaling": "llama3"}, 'rope_scaling = "llama3": must be an object'),
    "size-as-text": ({"hidden_size": "64"}, 'hidden_size = "64": must be a whole number, at'),
    "no-heads": ({"num_key_value_heads": 0}, "num_key_value_heads = 0: must be a whole number"),
    "no-layers": (QWEN_25_05B | {"num_hidden_layers": None}, "has no num_hidden_layers"),
    "null": ({"hidden_size": None}, "has no hidden_size"),
    "layers-as-text": ({"layer_types": "full"}, 'layer_types = "full": must be a list'),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_another_model_is_refused_with_the_reason(case: str) -> None:
    change, why = REFUSED[case]
    whole = change if "hidden_size" in change and len(change) > 2 else LLAMA_31_8B | change
    with pytest.raises(ConfigError) as error:
        model_values(whole, "config.json")
    assert len(error.value.problems) == 1 and why in str(error.value), error.value


def test_any_value_is_read_or_refused() -> None:
    """Never a traceback, whatever a file has under a key that is read."""
    glm = config_json(ModelConfig(**GLM), None, "float32", None)
    sliding = QWEN_25_05B | {"use_sliding_window": True, "max_window_layers": 0}
    ropes = ({"rope_type": ["x"]}, {"rope_type": "llama3", "factor": [1]}, {"rope_theta": [1]})
    keys = {"layer_types", "partial_rotary_factor", "original_max_position_embeddings"}
    for config in (LLAMA_31_8B, MISTRAL_V01, MIXTRAL_8X7B, QWEN3_30B_A3B, sliding, glm):
        for key in {*config, *keys, "rope_scaling", "rope_parameters", "num_key_value_heads"}:
            for value in (None, [], [[1]], {}, {"a": [1]}, "x", -1, 1.5, True, *ropes):
                with contextlib.suppress(ConfigError):
                    cfg = ModelConfig(**model_values({**config, key: value}, "config.json"))
                    assert cfg.problems() or cfg.count_parameters(), (key, value)


def test_null_is_as_if_the_key_were_missing() -> None:
    glm = config_json(ModelConfig(**GLM), None, "float32", None)
    for config, key in (
        (QWEN_25_05B, "max_window_layers"),
        (glm, "routed_scaling_factor"),
        (glm, "n_shared_experts"),
    ):
        missing = {name: value for name, value in config.items() if name != key}
        assert model_values({**config, key: None}, "") == model_values(missing, "")


def test_every_reason_is_named_at_once() -> None:
    config = {k: v for k, v in LLAMA_31_8B.items() if k != "hidden_size"} | {"mlp_bias": True}
    with pytest.raises(ConfigError) as error:
        model_values(config, "x/config.json")
    assert error.value.problems == [
        "x/config.json: mlp_bias = true: only false is supported",
        "x/config.json: has no hidden_size",
    ]


SMALL: dict[str, Any] = {
    "vocab_size": 99, "dim": 48, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 80,
    "max_seq_len": 64, "rope_theta": 5000.0, "norm_eps": 1e-4,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3": {"rope_factor": 8.0, "rope_original_len": 32, "head_dim": 16},
    "tied": {"tie_embeddings": True, "n_kv_heads": None},
    "qwen2": {"qkv_bias": True},
    "qwen2-window": {"qkv_bias": True, "sliding_window": 8},
    "qwen3": {"qk_norm": True, "head_dim": 24, "sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "mixtral": {"n_experts": 5},
    "qwen3-moe": {"n_experts": 6, "experts_per_token": 3, "qk_norm": True, "head_dim": 24},
    "qwen3-moe-every-second": {"n_experts": 6, "qk_norm": True, "n_layers": 3}
    | {"moe_frequency": 2, "dense_ffn_dim": 112},
    "qwen3-moe-window": {"n_experts": 4, "qk_norm": True, "sliding_window": 8}
    | {"router_normalize": False},
    "glm4-moe": GLM | {"router_scale": 2.5, "n_experts": 6, "experts_per_token": 3},
    "glm4-moe-norms": GLM | {"qk_norm": True, "qkv_bias": True, "shared_experts": 2},
    "glm4-moe-as-they-are": GLM
    | {"router_normalize": False, "rope_factor": 8.0}
    | {"rope_original_len": 32, "tie_embeddings": True},
}


@pytest.mark.parametrize("case", SHAPES)
def test_our_own_model_is_one_of_transformers(case: str, tmp_path: Path) -> None:
    """A run that began from nothing: its config.json, its names, and the logits."""
    import transformers

    cfg = ModelConfig(**SMALL | SHAPES[case])
    model = Decoder(cfg)
    biases = {name: b for name, b in model.named_buffers() if name in model.state_dict()}
    tensors = biases | dict(model.named_parameters())
    assert tensor_shapes(cfg) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert list(tensor_shapes(cfg)) == list(tensors)
    config = config_json(cfg, None, "float32", 7)
    again = model_values(config, "config.json")
    heads = {"n_kv_heads": cfg.kv_heads, "head_dim": cfg.resolved_head_dim}
    assert again == {key: value for key, value in (cfg.__dict__ | heads).items() if key in again}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = transformers.AutoConfig.from_pretrained(tmp_path)
    assert settings.eos_token_id == 7 and settings.bos_token_id is None
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.copy_(torch.randn(tensor.shape) * 0.1 + (tensor.dim() == 1) * 0.5)
        names = tensor_names(cfg, config["model_type"])
        state = {}
        for name, value in model.state_dict().items():
            theirs = stored_parts(names[name], tuple(value.shape))
            values = [value] if "*" not in names[name] else value
            state |= {part: one.clone() for part, one in zip(theirs, values, strict=True)}
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        reference, about = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, output_loading_info=True
        )
        assert not any(about.values()), about
        tokens = torch.randint(99, (2, 40))
        theirs_say = reference.eval()(tokens).logits
        torch.testing.assert_close(model(tokens), theirs_say, atol=1e-5, rtol=0)


REFUSED_OPTIONS = {"post_norms": True, "attention_softcap": 50.0}


def test_no_option_of_a_model_is_lost_in_an_export() -> None:
    """A new one is in config.json, or family_of() refuses it, or it is one of OF_TRAINING."""
    configs = [config_json(ModelConfig(**SMALL | case), None, "", 7) for case in SHAPES.values()]
    told = {key for config in configs for key in model_values(config, "")}
    apart = {"init_from", *OF_TRAINING, *REFUSED_OPTIONS}
    assert {field.name for field in fields(ModelConfig)} == told | apart
    for name, value in REFUSED_OPTIONS.items():
        with pytest.raises(ConfigError, match=f"model.{name}"):
            family_of(replace(ModelConfig(), **{name: value}))


def test_a_model_that_transformers_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="no transformers model has both"):
        family_of(ModelConfig(qkv_bias=True, qk_norm=True))
    with pytest.raises(ConfigError) as error:
        family_of(ModelConfig(n_experts=4, router_bias=True, sliding_window=8))
    router, shared, window = error.value.problems
    assert router.startswith('model.router = "softmax": the one transformers model with such a')
    assert "must be at least 1" in shared and "model.sliding_window = 8" in window
    with pytest.raises(ConfigError, match="Qwen3-MoE and Mixtral have no biases"):
        family_of(ModelConfig(n_experts=4, qkv_bias=True))
    with pytest.raises(ConfigError, match="divides the weights of a token's experts by their sum"):
        family_of(ModelConfig(n_experts=4, router_normalize=False))
    with pytest.raises(ConfigError, match="moe_frequency = 2: of the supported transformers"):
        family_of(ModelConfig(n_experts=4, moe_frequency=2))
    with pytest.raises(ConfigError, match="moe_frequency = 2: the one transformers model"):
        family_of(ModelConfig(**GLM, moe_frequency=2))
    with pytest.raises(ConfigError, match="post_norms: no supported transformers"):
        family_of(ModelConfig(post_norms=True))
    with pytest.raises(ConfigError, match="caps its attention scores"):
        family_of(ModelConfig(attention_softcap=50.0))
