"""Spikes: a step whose loss or gradient norm is far above the preceding ones skips its update.

Both numbers are compared with their mean and standard deviation over the last `window` steps that
changed the weights, as in OLMo's SkipStepOptimizer (arXiv:2501.00656, section 3.1) and levanter's
skip_bad_steps. After too many skipped steps in a row the run does what PaLM (arXiv:2204.02311,
section 5.1) did by hand: it goes back and leaves the samples out (nonfinite.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kempner.checkpoint.format.plan import StoredTensor


class Spikes:
    """The numbers of the last steps, on the device, so that decisions do not make the host wait.

    All ranks decide alike, because they see the same sums of the step's all-reduce. A spike does
    not enter the window, so that a second one right after it is found, too. A level that stays high
    is not a spike: after `resilience.max_skipped` steps the run goes back, and then stops.

    A state provider (checkpoint/state.py), so that a resumed run decides like an uninterrupted one.
    """

    per_rank = False

    def __init__(self, sigma: float, window: int) -> None:
        self.sigma, self.window = sigma, window
        self._state = {  # on the host until the first step shows the device
            "values": torch.zeros(2, window, dtype=torch.float64),  # loss and norm
            "count": torch.zeros((), dtype=torch.float64),  # of the steps that have entered
            "regime": torch.zeros(2, dtype=torch.float64),
        }

    def judge(
        self, loss: Tensor, grad_norm: Tensor, bad: Tensor, regime: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Return whether a step is a spike, and the limits that it was compared with (infinite
        until the window is full), by name, fp64 [] each. `bad`: the step is not finite, which does
        not count as a spike. `regime`: tokens of the step and phase of the data; when they change,
        another level is expected, and the window restarts."""
        if self._state["count"].device != loss.device:
            self._state = {name: tensor.to(loss.device) for name, tensor in self._state.items()}
        values, count, last_regime = self._state.values()
        same = torch.ones_like(bad)
        for before, now in zip(last_regime.unbind(), regime, strict=True):
            same = same & (before == now)
            # In place: unbind() gives views of the state.
            before.fill_(now)
        count.mul_(same)
        # Computed before this step enters the window: a spike must not raise its own limit.
        spread, mean = torch.std_mean(values, dim=1)
        limits = torch.where(count >= self.window, mean + self.sigma * spread, torch.inf)  # [2]
        numbers = torch.stack((loss, grad_norm))
        spike = ~bad & (numbers > limits).any()
        places = torch.arange(self.window, device=loss.device)
        enters = (places == count % self.window) & ~bad & ~spike  # [window]
        values.copy_(torch.where(enters, numbers.unsqueeze(1), values))
        count.add_(enters.any())
        return {"spike": spike.double(), "loss_limit": limits[0], "grad_norm_limit": limits[1]}

    @staticmethod
    def record(values: Mapping[str, float]) -> tuple[dict[str, Any], str]:
        """Return the record of a spike for metrics.jsonl, and its message for the log."""
        names = {"loss": "loss", "grad_norm": "gradient norm"}
        limits = {name: values[f"{name}_limit"] for name in names}
        figures = {name: values[name] for name in names}
        text = ", ".join(f"{names[n]} {figures[n]:.4g} (limit {limits[n]:.4g})" for n in names)
        limits = {f"{name}_limit": value for name, value in limits.items()}
        return {"spike": figures | limits}, f"is a spike: {text}"

    # --- as a part of a checkpoint ---

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._state)

    def restore(self, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        """Return the state to fill. If the checkpoint lacks it or has another window,
        it starts anew."""
        for tensor in self._state.values():
            tensor.zero_()
        same = "values" in stored and stored["values"].shape == self._state["values"].shape
        return dict(self._state) if same else {}

    def restored(self) -> None:
        pass
