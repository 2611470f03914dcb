"""The [resilience] section."""

from __future__ import annotations

from dataclasses import dataclass

from kempner.config.option import option


@dataclass(frozen=True)
class ResilienceConfig:
    hang_timeout: float | None = option(
        None, "seconds without a step that end the run; unset: from the step times", minimum=1.0
    )
    max_skipped: int = option(
        10,
        "non-finite steps in a row (each is skipped) until the run goes back to its last "
        "checkpoint, once, and leaves those batches out; the next time it stops",
        minimum=1,
    )
