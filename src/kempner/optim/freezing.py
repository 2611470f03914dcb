"""Parameters that some steps leave unchanged, by name.

Their gradients are dropped before the gradient norm is computed, so that they do not count in it or
in clipping; and an optimizer changes neither a parameter without a gradient nor its state. So the
model, its sharding and its compilation are the same in every step, and a resumed run depends only
on its step number.
"""

from __future__ import annotations

from torch import nn

from kempner.optim.config import FreezeConfig
from kempner.parallel.build import parameter_names


class Freezer:
    """Freezes the parameters of a model, or of a pipeline stage, by step."""

    def __init__(self, model: nn.Module, cfg: FreezeConfig) -> None:
        self._model, stages, parameters = model, cfg.stages, parameter_names(model)
        self._stages = [
            (stage, [p for name, p in parameters.items() if stage.matches(name)])
            for stage in stages
        ]
        borders = {stage.from_step for stage in stages} | {stage.until_step for stage in stages}
        self._borders = borders - {None}

    def trained(self, step: int) -> list[nn.Parameter]:
        """Return all parameters after a backward pass; those frozen in the update after `step`
        others have lost their gradient."""
        for stage, parameters in self._stages:
            if stage.covers(step):
                for parameter in parameters:
                    parameter.grad = None
        return list(self._model.parameters())

    def phase(self, step: int) -> int:
        """Return a number that grows whenever the set of trained parameters changes, and the
        gradient norm with it."""
        return sum(border is not None and border <= step for border in self._borders)
