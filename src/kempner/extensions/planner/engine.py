"""Memory of one GPU with an engine of a run, from the configuration alone. No torch."""

from __future__ import annotations

import os
from typing import NamedTuple

from kempner.config.option import ConfigError
from kempner.extensions.planner.memory import GIB
from kempner.extensions.rl.config import InferenceConfig
from kempner.model.config import ModelConfig


class EngineMemory(NamedTuple):
    """Bytes of one GPU. vLLM takes all free memory for keys and values, and needs room for one
    text; the kit's engine allocates them for all slots at its start, on one GPU."""

    weights: float
    cache: float
    texts: int  # that have these keys and values

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
    """Estimate an engine's memory. `window`: the most tokens of a text; `dtype`: the trainer's, in
    which it publishes; auto: on a GPU."""
    size, own = 4 if dtype == "fp32" else 2, inference.engine == "kit"
    texts, cut = (inference.resolved_slots, 1) if own else (1, inference.tp)
    token = 2 * model.n_layers * model.kv_heads * model.resolved_head_dim * size
    return EngineMemory(size * model.count_parameters() / cut, texts * window * token / cut, texts)


def check_room(cfg: ModelConfig, slots: int, window: int, device: str) -> None:
    """Raise ConfigError if the model, with keys and values of all texts, needs more than the memory
    of the GPU or, with `device` cpu, of the host."""
    need = engine_memory(
        cfg, InferenceConfig(slots=slots), window, "bf16" if device == "cuda" else "fp32"
    )
    if device == "cuda":
        import torch

        room = torch.cuda.get_device_properties(0).total_memory
    else:
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need.peak > room:
        where = "the GPU" if device == "cuda" else "this host"
        why = f"{need.cache / GIB:,.1f} GiB, the model {need.weights / GIB:,.1f}, and {where} has "
        raise ConfigError(no_room(slots, window, f"{why}{room / GIB:,.1f}"))


def no_room(slots: int, window: int, why: str) -> str:
    return (
        f"--slots {slots}: keys and values of {slots:,} texts of {window:,} tokens take {why}; "
        "give fewer --slots, or a smaller --window"
    )
