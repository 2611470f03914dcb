"""Small random models of every family, as transformers makes them, and the logits of both sides."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch

from kempner.extensions.hf.load import load_weights
from kempner.extensions.hf.source import find_weights
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder
from tests.conftest import load_program

ROOT = Path(__file__).parent.parent
COMMON = {
    "vocab_size": 260, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 256,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 50000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
# Class in transformers, and what its configuration has beside COMMON.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "smollm": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {"head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 3, "use_qk_norm": True}
        | {"moe_intermediate_size": 32, "first_k_dense_replace": 0, "num_mtp_layers": 0}
        | {"routed_scaling_factor": 2.5, "partial_rotary_factor": 1.0},
    ),
}
TOKENS = torch.arange(3 * 40).view(3, 40) * 7 % 257


def make(family: str, path: Path, dtype: torch.dtype = torch.float32, **save: Any) -> Any:
    """A model with random weights (all of them: biases and norms, too), saved at `path`."""
    import transformers

    name, more = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**COMMON | more)
    torch.manual_seed(sum(map(ord, family)))
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        biases = [b for name, b in model.named_buffers() if name.endswith("correction_bias")]
        for tensor in (*model.parameters(), *biases):
            tensor.copy_(torch.randn(tensor.shape) * 0.1 + (tensor.dim() == 1) * 0.5)
    model.save_pretrained(path, **save)
    return model


def load_quietly(path: Path) -> Any:
    """The model that transformers reads, which has nothing to complain about."""
    import transformers

    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model, about = transformers.AutoModelForCausalLM.from_pretrained(
                path, output_loading_info=True
            )
            model(TOKENS)
    finally:
        logger.removeHandler(handler)
    assert not heard and not any(about.values()), (heard, about)
    return model.eval()


def theirs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS).logits
    return logits


def ours(source: Path | str) -> torch.Tensor:
    """The logits of our model with the weights of a directory, or of RUN[@STEP]."""
    found = find_weights(str(source))
    cfg = ModelConfig(**found.model())
    model = Decoder(cfg)
    with torch.no_grad():
        biases = [b for name, b in model.named_buffers() if name in model.state_dict()]
        for tensor in (*model.parameters(), *biases):
            tensor.fill_(torch.nan)
        load_weights(model, cfg, found)
        return model(TOKENS)


def convert(*args: object, code: int = 0) -> None:
    """scripts/convert.py in this process."""
    assert load_program("convert").main([*map(str, args)]) == code
