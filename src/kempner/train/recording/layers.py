"""Per-layer numbers for profile.layers_interval: norms of gradients, sizes of updates and
activations, the largest attention logit, and the load of the busiest expert.

The gradients' norms are recorded in each step, even if it is skipped; the others come from a
separate forward pass without gradients, every profile.layers_interval steps. All travel in the
step's all-reduce, and the host waits for none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from kempner.data.batch import MicroBatch
from kempner.model.attention import Visible
from kempner.model.decoder import Attention, Decoder
from kempner.parallel.build import parameter_names
from kempner.parallel.layout import Layout
from kempner.train.objective import Objective

SAMPLED_WEIGHTS = 1 << 16  # of each parameter on each rank: the updates measured
SAMPLED_QUERIES = 128  # of a row: the logits computed
LAYER_FIGURES = (  # in metrics.jsonl, under "layers"
    "grad_norm",
    "update_rms",
    "activation_rms",
    "activation_max",
    "logit_max",
    "load_max",
)
_PREFIX = "layers"  # prefixes the names of a step's sums


class WithLayers:
    """A wrapper of any objective that also records per-layer numbers: of the embedding, the blocks,
    and the layers after them."""

    def __init__(
        self,
        objective: Objective,
        model: Decoder,
        layout: Layout,
        interval: int,
        step: Callable[[], int],
    ) -> None:
        """`step`: returns the number of completed steps."""
        self.objective, self.counted = objective, objective.counted
        self._model, self._layout, self._interval, self._step = model, layout, interval, step
        self._layers: dict[str, list[nn.Parameter]] = {}
        for name, parameter in parameter_names(model).items():
            self._layers.setdefault(layer_of(name), []).append(parameter)
        self._batch: MicroBatch | None = None
        self._seen = -1  # the step of the last numbers()
        self._before: dict[str, list[Tensor]] = {}  # samples of the weights one step ago
        self._kept: dict[str, list[Tensor]] = {}  # samples of this step, for the next one

    def __call__(self, model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor, MicroBatch]:
        loss, terms, batch = self.objective(model, batch)
        # Skip validation: numbers() passes the step's own batch through the model again.
        if torch.is_grad_enabled():
            self._batch = batch
        return loss, terms, batch

    def numbers(self) -> dict[str, Tensor]:
        """Return this rank's sums, after the backward pass and before the update. A step that is
        computed twice calls this twice."""
        step, theirs = self._step(), self.objective.numbers()  # first: sets this step's load
        if step != self._seen:
            self._before = self._kept if step == self._seen + 1 else {}
            self._kept, self._seen = {}, step
        found = {
            _name("grad_norm_sq", layer): self._layout.norm_sq(parameters)
            for layer, parameters in self._layers.items()
        }
        # numbers() runs before the update: weights kept in one step show its update in the next.
        if (step + 1) % self._interval == 0:
            found |= self._updates() | self._loads() | self._activations()
        # The next measurement is of the coming update: keep the weights before it.
        if (step + 2) % self._interval == 0:
            self._kept = {
                layer: [sample(parameter).clone() for parameter in parameters]
                for layer, parameters in self._layers.items()
            }
        # Only one of the ranks along tp counts in the step's sum (Layout.once()).
        if self._layout.tp is not None:
            # Sums of offloaded tensors are on the host.
            device = self._layout.mesh.device_type
            sums = torch.stack([value.to(device, torch.float32) for value in found.values()])
            dist.all_reduce(sums, group=self._layout.tp.get_group())
            found = dict(zip(found, sums.unbind(), strict=True))
        return theirs | found

    def _updates(self) -> dict[str, Tensor]:
        found = {}
        for layer, before in self._before.items():
            parameters = self._layers[layer]
            changes = [
                (sample(parameter) - old).float()
                for parameter, old in zip(parameters, before, strict=True)
            ]
            # A parameter that several ranks hold counts once in total, as in grad_norm.
            shares = [1.0 / self._layout.copies(parameter) for parameter in parameters]
            squares = [x.square().sum() * share for x, share in zip(changes, shares, strict=True)]
            count = sum(x.numel() * share for x, share in zip(changes, shares, strict=True))
            # Sums and counts add up over ranks; a mean of means would not.
            found[_name("update_sq", layer)] = torch.stack(squares).sum()
            found[_name("update_count", layer)] = torch.tensor(count, device=changes[0].device)
        return found

    def _loads(self) -> dict[str, Tensor]:
        """Return the load of each layer's busiest expert, as a multiple of the mean, on one rank
        only: it already is that of the whole step."""
        if not self._model.cfg.n_experts:
            return {}
        load, one = self._model.routings.step_load, float(dist.get_rank() == 0)
        shares = load.amax(1) / load.mean(1).clamp(min=1.0) * one
        layers = self._model.cfg.mixtures
        return {_name("load_max", str(n)): x for n, x in zip(layers, shares.unbind(), strict=True)}

    @torch.no_grad()
    def _activations(self) -> dict[str, Tensor]:
        """Pass the last micro-batch through the model again and measure each block's inputs and
        outputs. A maximum over all ranks needs a separate all-reduce; each rank then contributes
        its share to the sum."""
        batch, model = self._batch, self._model
        assert batch is not None
        squares: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        largest: dict[str, Tensor] = {}
        with watch_blocks(model, squares, counts, largest):
            model(batch.inputs, batch.targets, batch.documents)
        for module in model.modules():
            # Weights that stay gathered would be those from before the update.
            if isinstance(module, FSDPModule):
                module.reshard()
        # All ranks have the same blocks in the same order: pipelines are not allowed here.
        top = torch.stack([*largest.values()])
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        shares = (top / dist.get_world_size()).unbind()
        return squares | counts | dict(zip(largest, shares, strict=True))

    def record(self, values: Mapping[str, float]) -> dict[str, Any]:
        found = layer_figures(values)
        return {**self.objective.record(values), **({"layers": found} if found else {})}


def layer_of(name: str) -> str:
    """Return the layer that a parameter belongs to: embed, the number of its block, or output."""
    first, _, rest = name.partition(".")
    return (
        rest.partition(".")[0] if first == "blocks" else "embed" if first == "embed" else "output"
    )


def sample(parameter: nn.Parameter) -> Tensor:
    """Return a view of some of this rank's weights of a parameter."""
    weights = parameter.detach()
    local = weights.to_local() if isinstance(weights, DTensor) else weights
    return local.flatten()[:SAMPLED_WEIGHTS]


@contextmanager
def watch_blocks(
    model: Decoder,
    squares: dict[str, Tensor],
    counts: dict[str, Tensor],
    largest: dict[str, Tensor],
) -> Iterator[None]:
    """Add to the dicts, during a forward pass: the sum of squares and the number of a block's
    outputs, their largest magnitude, and the largest attention logit, fp32 [] each. Compiled
    modules run uncompiled meanwhile, with these hooks, and stay compiled."""

    def after(layer: str, _: nn.Module, args: Any, output: Any) -> None:
        x = (output[0] if isinstance(output, tuple) else output).float()
        squares[_name("activation_sq", layer)] = x.square().sum()
        counts[_name("activation_count", layer)] = torch.tensor(float(x.numel()), device=x.device)
        largest[_name("activation_max", layer)] = x.abs().max()

    with ExitStack() as stack:
        if compiled := any(module._compiled_call_impl is not None for module in model.modules()):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for layer, block in model.blocks.named_children():
            stack.callback(block.register_forward_hook(partial(after, layer)).remove)
            for attention in block.modules():
                if isinstance(attention, Attention):
                    stack.callback(setattr, attention, "attend", attention.attend)
                    name = _name("logit_max", layer)
                    attention.attend = _with_logits(attention.attend, largest, name, compiled)
        yield


def _with_logits(
    attend: Callable[..., Tensor], largest: dict[str, Tensor], name: str, compiled: bool
) -> Callable[..., Tensor]:
    def wrapped(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
        # Computed separately: fused attention kernels hold no scores.
        largest[name] = largest_logit(q, k)
        # flex_attention is a fused kernel only if compiled.
        with torch.compiler.set_stance("default") if compiled else nullcontext():
            return attend(q, k, v, visible)

    return wrapped


def largest_logit(q: Tensor, k: Tensor) -> Tensor:
    """Return the largest scaled score of q [B, H, T, E] and k [B, K, T, E] in the first row, fp32
    []: for at most SAMPLED_QUERIES queries over all keys up to their own."""
    length = q.shape[2]
    at = torch.arange(0, length, -(-length // SAMPLED_QUERIES), device=q.device)
    # One row and a few queries: all scores would take T x T numbers per head.
    queries = q[0, :, at].view(k.shape[1], -1, len(at), q.shape[-1]).float()  # [K, H / K, Q, E]
    scores = queries @ k[0].float().unsqueeze(1).transpose(-2, -1) / q.shape[-1] ** 0.5
    seen = torch.arange(length, device=q.device) <= at.unsqueeze(1)  # [Q, T]
    largest: Tensor = scores.masked_fill(~seen, -torch.inf).max()
    return largest


def layer_figures(values: Mapping[str, float]) -> dict[str, dict[str, float | None]]:
    """Return LAYER_FIGURES by layer, as far as a step's `values` have them; None for non-finite
    numbers. The gradients are those of grad_norm, of the mean over the tokens and before clipping;
    if that is not finite, of the mean over all tokens, whether their targets count or not."""
    layers: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        if name.startswith(_PREFIX):
            _, figure, layer = name.split()
            layers.setdefault(figure, {})[layer] = value
    if not layers:
        return {}
    total = values.get("grad_norm_sq", 0.0) ** 0.5
    # The sums are those of (sum of losses) / step_tokens; grad_norm is that of the mean loss.
    scale = values["grad_norm"] / total if total and math.isfinite(total) else 1.0
    found = {"grad_norm": {k: x**0.5 * scale for k, x in layers["grad_norm_sq"].items()}}
    for figure in ("update", "activation"):
        sums, numbers = layers.get(f"{figure}_sq"), layers.get(f"{figure}_count", {})
        if sums:
            found[f"{figure}_rms"] = {k: (x / max(1.0, numbers[k])) ** 0.5 for k, x in sums.items()}
    found |= {figure: layers[figure] for figure in LAYER_FIGURES if figure in layers}
    return {
        figure: {k: x if math.isfinite(x) else None for k, x in by_layer.items()}
        for figure, by_layer in found.items()
    }


def _name(figure: str, layer: str) -> str:
    return f"{_PREFIX} {figure} {layer}"
