"""The [resilience] section."""

from __future__ import annotations

from dataclasses import dataclass

from kempner.config.option import option


@dataclass(frozen=True)
class ResilienceConfig:
    hang_timeout: float | None = option(
        None,
        "seconds without a step after which the run is ended as hung; unset: from the step times",
        minimum=1.0,
        maximum=30 * 86400.0,
    )
    max_skipped: int = option(
        10,
        "consecutive non-finite steps (each is skipped) before the run returns to its last "
        "checkpoint and leaves those batches out; it does so once, then it stops",
        minimum=1,
    )
