"""The [resilience] section."""

from __future__ import annotations

from dataclasses import dataclass

from kempner.config.option import option


@dataclass(frozen=True)
class ResilienceConfig:
    hang_timeout: float | None = option(
        None,
        "seconds without a step, or a batch of a validation, after which the run is ended as hung; "
        "unset: from the step times",
        minimum=1.0,
        maximum=30 * 86400.0,
    )
    max_skipped: int = option(
        10,
        "consecutive non-finite steps (each is skipped) and spikes before the run returns to its "
        "last checkpoint and skips those batches; it does so once, then it stops",
        minimum=1,
    )
    spike_sigma: float | None = option(
        None,
        "skip a step whose loss or gradient norm is this many standard deviations above its mean "
        "over the last spike_window steps, such as 6; unset: skip none",
        minimum=3.0,
    )
    spike_window: int = option(
        128, "steps that a spike is compared with; none is detected before that many", minimum=8
    )
    replay_every: int | None = option(
        None,
        "steps between two that are computed twice, in turn by the same rank and by one of another "
        "host, to find devices that compute wrong numbers; unset: none",
        minimum=1,
    )
    checksum_every: int | None = option(
        None,
        "steps between two checks that weights and optimizer state have not changed in memory "
        "while a step was computed, and that replicas are equal; unset: none",
        minimum=1,
    )
    gpu_interval: float = option(
        30.0,
        "seconds between two checks of the GPUs of each node, by a process beside its first rank; "
        "0: never",
        minimum=0.0,
        maximum=3600.0,
    )
