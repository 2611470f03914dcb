"""The [metrics] and [profile] sections."""

from __future__ import annotations

from dataclasses import dataclass

from kempner.config.option import option


@dataclass(frozen=True)
class MetricsConfig:
    log_interval: int = option(10, "steps between logged lines", minimum=1)
    peak_tflops: float | None = option(
        None,
        "peak TFLOP/s of one device, for MFU; unset: looked up by its name",
        minimum=0.0,
    )


@dataclass(frozen=True)
class ProfileConfig:
    steps: int = option(3, "number of steps that a PROFILE file requests", minimum=1)
    ranks: tuple[int, ...] = option((0,), "ranks that write a trace of them", minimum=0)
    layers_interval: int = option(
        0,
        "steps between measurements of each layer: sizes of activations and updates, the largest "
        "attention logit, and the norms of the gradients, which are also recorded for a step that "
        "is skipped; 0: none",
        minimum=0,
    )
    allocations: bool = option(
        False,
        "GPU: keep the stacks of allocations from the start on, for the snapshot of a run that "
        "runs out of memory",
    )
