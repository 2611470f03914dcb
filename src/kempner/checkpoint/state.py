"""Contents of a checkpoint: named providers of state.

A name on disk is the provider's name, a dot, and the tensor's name: model.NAME, optim.NAME.KEY,
rng.RANK.KIND. Only tensors are stored; everything else goes into the manifest as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from kempner.checkpoint.format.plan import StoredTensor
from kempner.optim.optimizer import Optimizer
from kempner.parallel.build import buffer_names, parameter_names

WEIGHT = "weight"


class StateProvider(Protocol):
    """One part of the state of a run. All ranks give the same names."""

    per_rank: bool
    """True if each rank has its own tensors; otherwise a plain tensor is equal on all ranks."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save now."""

    def restore(self, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        """Return tensors to fill, which may be DTensors on any mesh. `stored`: the
        tensors on disk."""

    def restored(self) -> None:
        """Finish the restore, once the tensors are filled."""


class ModelState:
    """The trained parameters, by their names without wrappers, and the buffers. Holds the published
    values if the optimizer trains other ones."""

    per_rank = False

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        parameters = parameter_names(model)
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.buffers = buffer_names(model)
        self.optimizer = optimizer

    def tensors(self) -> dict[str, Tensor]:
        averaging = averaging_of(self.optimizer)
        return self.buffers | {
            name: averaging[p]() if p in averaging else p.detach()
            for name, p in self.parameters.items()
        }

    def restore(self, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        return self.buffers | {name: p.detach() for name, p in self.parameters.items()}

    def restored(self) -> None:
        pass


class OptimizerState:
    """Tensors that an optimizer keeps for each parameter, NAME.KEY; and NAME.weight, the trained
    parameter itself, if the model's provider has the published one."""

    per_rank = False

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.parameters, self.optimizer = parameter_names(model), optimizer

    def tensors(self) -> dict[str, Tensor]:
        if isinstance(self.optimizer, Optimizer):
            # Offloaded state may still be on its way to the host.
            self.optimizer.wait()
        trained = averaging_of(self.optimizer)
        return {
            f"{name}.{key}": value
            for name, p in self.parameters.items()
            for key, value in (
                *self.optimizer.state.get(p, {}).items(),
                *([(WEIGHT, p.detach())] if p in trained else []),
            )
        }

    def restore(self, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        """Create state of the stored shapes; the optimizer would create it only at
        its first step."""
        self.optimizer.state.clear()
        targets = {}
        for full, entry in stored.items():
            name, _, key = full.rpartition(".")
            if (p := self.parameters.get(name)) is None:
                continue
            targets[full] = self.optimizer.state[p][key] = (
                self._like(p, entry.dtype)
                if entry.shape == p.shape
                else torch.empty(entry.shape, dtype=entry.dtype, device=p.device)
            )
        return targets

    def _like(self, p: Tensor, dtype: torch.dtype) -> Tensor:
        if isinstance(self.optimizer, Optimizer):
            return self.optimizer.new_state(p, dtype)
        return torch.empty_like(p, dtype=dtype, requires_grad=False)

    @torch.no_grad()
    def restored(self) -> None:
        """Continue from the published weights if the optimizer trains what it publishes."""
        # Popped, so that the optimizer does not treat it as its own state.
        trained = {p: state.pop(WEIGHT, None) for p, state in self.optimizer.state.items()}
        for p in averaging_of(self.optimizer):
            if (weight := trained.get(p)) is not None:
                p.copy_(weight)


def averaging_of(optimizer: torch.optim.Optimizer | None) -> Mapping[Tensor, Callable[[], Tensor]]:
    """Map each parameter whose published value is not the trained one to the function
    that computes it."""
    return optimizer.averaging() if isinstance(optimizer, Optimizer) else {}


class RandomState:
    """The states of this rank's random generators of torch."""

    per_rank = True

    def __init__(self) -> None:
        self._loaded: dict[str, Tensor] = {}

    def tensors(self) -> dict[str, Tensor]:
        state = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def restore(self, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        # A checkpoint from another kind of device may lack the state of this one.
        self._loaded = {kind: state for kind, state in self.tensors().items() if kind in stored}
        return self._loaded

    def restored(self) -> None:
        if "cpu" in self._loaded:
            torch.set_rng_state(self._loaded["cpu"])
        if "cuda" in self._loaded:
            torch.cuda.set_rng_state(self._loaded["cuda"])


def run_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, StateProvider]:
    """Return the providers of a plain training run."""
    spikes = getattr(optimizer, "spikes", None)
    return {
        "model": ModelState(model, optimizer),
        "optim": OptimizerState(model, optimizer),
        "rng": RandomState(),
        **({"spikes": spikes} if spikes is not None else {}),
    }


def collect_state(
    providers: Mapping[str, StateProvider],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Collect the tensors that all ranks share, and those of this rank alone, by key
    in the table."""
    shared: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    for prefix, provider in providers.items():
        for name, tensor in provider.tensors().items():
            if provider.per_rank:
                own[f"{prefix}.*.{name}"] = tensor
            else:
                shared[f"{prefix}.{name}"] = tensor
    return shared, own
