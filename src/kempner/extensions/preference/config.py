"""The [preference] section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kempner.config.option import option

if TYPE_CHECKING:
    from kempner.train.sections import RunConfig


@dataclass(frozen=True)
class PreferenceConfig:
    loss: str = option(
        "none",
        "loss on preference data: dpo trains a model against its reference, model.init_from; "
        "reward trains a reward model; none: next tokens",
        choices=("none", "dpo", "reward"),
    )
    beta: float = option(
        0.1, "of dpo: the cost of moving away from the reference", minimum=1e-6, maximum=1e3
    )


def preference_problems(cfg: RunConfig) -> list[str]:
    """List options that a loss on preferences does not support, one message each, with a remedy."""
    loss, axes, problems = cfg.of(PreferenceConfig).loss, cfg.distributed, []
    if loss == "none":
        return []
    if loss == "dpo" and cfg.model.init_from is None:
        problems.append(
            "preference.loss = dpo: needs the model to start from, which is also its "
            "reference; give model.init_from"
        )
    if cfg.lora.rank:
        problems.append(
            f"lora.rank = {cfg.lora.rank}: adapters are not built for preference.loss = "
            f"{loss}; train all weights, --lora.rank=0"
        )
    if cfg.train.loss_chunk is not None:
        problems.append(
            f"train.loss_chunk = {cfg.train.loss_chunk}: has no effect on preference.loss = "
            f"{loss}; leave it out"
        )
    if cfg.train.z_loss:
        problems.append(
            f"train.z_loss = {cfg.train.z_loss}: is not built for preference.loss = {loss}; "
            "leave it out"
        )
    problems += [
        f"distributed.{axis} = {size}: not built for preference.loss = {loss}; leave that out, or "
        f"give --distributed.{axis}=1"
        for axis in ("tp", "pp")
        if (size := getattr(axes, axis)) > 1
    ]
    problems += [
        f"model.{name} = {value}: is not built for preference.loss = {loss}; "
        "leave it at 0; the experts stay as balanced as they are"
        for name in ("aux_loss", "router_z_loss")
        if (value := getattr(cfg.model, name))
    ]
    if axes.cp > 1:
        problems.append(
            f"preference.loss = {loss}: does not work with distributed.cp = "
            f"{axes.cp}: an answer would be on several ranks; give --distributed.cp=1"
        )
    return problems
