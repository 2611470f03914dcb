"""Memory of one GPU that an engine of a run has, from the configuration alone. No torch."""

from __future__ import annotations

from typing import NamedTuple

from kempner.model.config import ModelConfig
from kempner.planner.memory import GIB
from kempner.rl.config import InferenceConfig


class EngineMemory(NamedTuple):
    """Bytes of one GPU. vLLM takes what it finds for keys and values, and needs room for one
    text; the kit's engine takes them for all slots at its start, on one GPU."""

    weights: float
    cache: float
    texts: int  # whose keys and values these are

    @property
    def peak(self) -> float:
        return self.weights + self.cache

    def describe(self, window: int) -> str:
        return (
            f"memory of an engine: {self.peak / GIB:.1f} GiB of a GPU at least: weights "
            f"{self.weights / GIB:.1f}, keys and values of {self.texts} text(s) of {window:,} "
            f"tokens {self.cache / GIB:.1f}"
        )


def engine_memory(
    model: ModelConfig, inference: InferenceConfig, window: int, dtype: str
) -> EngineMemory:
    """`window`: the most tokens of a text; `dtype`: the trainer's, which versions have."""
    size, own = 2 if dtype == "bf16" else 4, inference.engine == "kit"
    texts, cut = (inference.resolved_slots, 1) if own else (1, inference.tp)
    token = 2 * model.n_layers * model.kv_heads * model.resolved_head_dim * size
    return EngineMemory(size * model.count_parameters() / cut, texts * window * token / cut, texts)
