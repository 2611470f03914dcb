"""The [preference] section."""

from __future__ import annotations

from dataclasses import dataclass

from kempner.config.option import option


@dataclass(frozen=True)
class PreferenceConfig:
    loss: str = option(
        "none",
        "loss on preference data: dpo trains a model against its reference, model.init_from; "
        "reward trains a reward model; none: next tokens",
        choices=("none", "dpo", "reward"),
    )
    beta: float = option(
        0.1, "of dpo: how much a step away from the reference costs", minimum=1e-6, maximum=1e3
    )
