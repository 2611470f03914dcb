"""Objectives that also record the use of experts, or the z-loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kempner.data.batch import MicroBatch
from kempner.model.decoder import Decoder
from kempner.parallel.layout import Layout
from kempner.train.objective import Objective


class WithExperts:
    """A wrapper of any objective, for a model with experts, that also records their use."""

    def __init__(
        self, objective: Objective, model: Decoder, layout: Layout, device: torch.device
    ) -> None:
        self.objective, self.routings, self.layout = objective, model.routings, layout
        self._device, self.counted = device, objective.counted

    def __call__(self, model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor, MicroBatch]:
        return self.objective(model, batch)

    def numbers(self) -> dict[str, Tensor]:
        """Return the numbers. The loads of the busiest and the idlest expert of any layer, as
        multiples of the mean, are those of the whole step: one rank contributes them to the
        sum over ranks."""
        load, losses = self.routings.take(self._device)
        # Sum over ranks first: a rank's busiest expert need not be that of the step.
        ours = self.layout.once({"load": load})["load"]
        self.routings.step_load = load = self.layout.sum(ours)  # [L, E]
        over = torch.zeros((), device=self._device) + self.routings.rows_over
        shares = load / load.mean(1, keepdim=True)
        one = float(dist.get_rank() == 0)
        return {
            **self.objective.numbers(),
            **{f"{name}_sum": loss for name, loss in losses.items()},
            **({} if self.routings.buffers is None else {"rows_over": over}),
            "load_max": shares.max() * one,
            "load_min": shares.min() * one,
        }

    def record(self, values: Mapping[str, float]) -> dict[str, Any]:
        """Return the record. The auxiliary loss is 0 if there is none, and 1 at equal load; it and
        the z-loss are means over the layers."""
        tokens = max(1.0, values["tokens"])
        found = {name: values[name] for name in ("load_max", "load_min")}
        found["aux_loss"] = values.get("aux_loss_sum", 0.0) / tokens
        if "router_z_loss_sum" in values:
            found["z_loss"] = values["router_z_loss_sum"] / tokens
        return {**self.objective.record(values), "experts": found}


class WithZLoss:
    """A wrapper of any objective, for a model with a z-loss, that also records that."""

    def __init__(self, objective: Objective, model: Decoder, device: torch.device) -> None:
        self.objective, self._squares, self._device = objective, model.log_z_squares, device
        self.counted = objective.counted

    def __call__(self, model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor, MicroBatch]:
        return self.objective(model, batch)

    def numbers(self) -> dict[str, Tensor]:
        """Return the sum of log^2 Z over the tokens; a rank without the output layer adds 0."""
        # A zero on the device if there is none: all ranks need the same names in their sums.
        total = sum(self._squares, torch.zeros((), device=self._device))
        self._squares.clear()
        return {**self.objective.numbers(), "z_loss_sum": total}

    def record(self, values: Mapping[str, float]) -> dict[str, Any]:
        z_loss = values["z_loss_sum"] / max(1.0, values["tokens"])
        return {**self.objective.record(values), "z_loss": z_loss}
