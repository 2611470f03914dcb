"""Bytes of a checkpoint, from the configuration alone. No torch."""

from __future__ import annotations

from kempner.checkpoint.config import SPREAD
from kempner.model.config import ModelConfig
from kempner.optim.config import STATE, OptimizerConfig
from kempner.parallel.config import LoraConfig
from kempner.parallel.layout import Axes

_FP32 = 4  # bytes


def checkpoint_bytes(
    model: ModelConfig, lora: LoraConfig, optimizer: OptimizerConfig, weights: str
) -> float:
    """Return the bytes of the trained weights and the optimizer's
    state. `weights`: train.weights."""
    # Adapters are always fp32.
    width = 2 if weights == "bf16" and not lora.rank else _FP32
    return width * trained_parameters(model, lora) + optimizer_bytes(model, lora, optimizer)


def host_bytes_of_node(checkpoint: float, axes: Axes, per_node: int) -> float:
    """Return the bytes of host memory that the saves of a node's ranks hold: each rank has the
    image of its file. `checkpoint`: bytes of the whole."""
    # Replicas hold the same parts, and up to SPREAD of them share the writing.
    cuts = axes.pp * axes.shard * axes.cp * axes.tp
    return checkpoint / cuts / min(axes.replicate, SPREAD) * per_node


def trained_parameters(model: ModelConfig, lora: LoraConfig) -> float:
    """Return the number of trained elements of the whole model."""
    return lora_parameters(model, lora) if lora.rank else float(model.count_parameters())


def optimizer_bytes(model: ModelConfig, lora: LoraConfig, optimizer: OptimizerConfig) -> float:
    """Return the bytes of optimizer state for all trained elements; with Muon, embedding and
    output have AdamW's."""
    tables = model.vocab_size * model.dim * (2 - model.tie_embeddings)
    by_adamw = tables if optimizer.name == "muon" and not lora.rank else 0
    others = trained_parameters(model, lora) - by_adamw
    own, adamw = (_state_bytes(optimizer, rule) for rule in (optimizer.name, "adamw"))
    return others * own + by_adamw * adamw


def _state_bytes(optimizer: OptimizerConfig, rule: str) -> int:
    """Return the bytes of state per element that this rule trains."""
    state, average = STATE[rule], 2 if optimizer.moments == "bf16" else _FP32
    return average * len(state.averages) + _FP32 * len(state.copies)


def lora_parameters(model: ModelConfig, lora: LoraConfig) -> float:
    shapes = lora_shapes(model)
    return float(model.n_layers * lora.rank * sum(sum(shapes[t]) for t in lora.targets))


def lora_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the input and output widths of a block's matrices that may have adapters."""
    q, kv = (heads * model.resolved_head_dim for heads in (model.n_heads, model.kv_heads))
    return {
        "wq": (model.dim, q), "wk": (model.dim, kv), "wv": (model.dim, kv), "wo": (q, model.dim),
        "w1": (model.dim, model.ffn_dim), "w3": (model.dim, model.ffn_dim),
        "w2": (model.ffn_dim, model.dim),
    }  # fmt: skip
