"""Parts of a step: gradients; one small all-reduce, judged on the device and read by the host one
step later; and the update."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kempner.data.batch import MicroBatch
from kempner.data.source import IGNORE
from kempner.model.decoder import Decoder
from kempner.optim.build import set_learning_rate
from kempner.parallel.layout import Layout
from kempner.parallel.passes import backward_passes
from kempner.train.objective import Objective
from kempner.train.progress import Progress
from kempner.train.recording.metrics import Clock
from kempner.train.resilience.requests import Meanwhile, StopRequests, Verdict

GC_STEPS = 100

StepNumbers = dict[str, Tensor]  # fp64 [] each, on the device


def reduce_step(parts: Mapping[str, Tensor | float], layout: Layout) -> StepNumbers:
    """Return the sums over all ranks, by name: one all-reduce, whatever it carries and
    however many ranks.

    Host floats cost a single copy, from pinned memory: a pageable one would make the host wait
    for the device.
    """
    device = next(part.device for part in parts.values() if isinstance(part, Tensor))
    ours = [part for part in parts.values() if not isinstance(part, Tensor)]
    # fp64, because all ranks together may have more tokens than fp32 counts exactly, 2^24.
    host = torch.tensor(ours, dtype=torch.float64, pin_memory=device.type == "cuda")
    floats = iter(host.to(device, non_blocking=True).unbind())
    values = [  # with fsdp_cpu_offload the gradients and their norm are on the host
        part.to(device, torch.float64) if isinstance(part, Tensor) else next(floats)
        for part in parts.values()
    ]
    return dict(zip(parts, layout.sum(torch.stack(values)).unbind(), strict=True))


class StepSums:
    """Sums of loss and tokens over the micro-batches of a step, on the device: in total, and by
    source if there are several."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        """`names`: of the sources."""
        self.device = device
        self._loss, self._tokens = torch.zeros((), device=device), torch.zeros((), device=device)
        self._names = names if len(names) > 1 else ()
        self._numbers = torch.arange(len(self._names), device=device)  # [S]
        self._sums = torch.zeros(2, len(self._names), device=device)  # loss and tokens, [2, S]

    def add(self, batch: MicroBatch, loss: Tensor, terms: Tensor) -> None:
        """Add a micro-batch. `loss` []: the sum of `terms` [B, T], which are 0 where the target
        does not count."""
        counts = batch.targets != IGNORE
        self._loss += loss.detach()
        self._tokens += counts.sum()
        if batch.sources is None:
            return
        rows = torch.stack((terms.sum(1), counts.sum(1)))  # [2, B]
        # Not index_add: on a GPU its order of additions, and so the sum, varies.
        mine = batch.sources == self._numbers  # [B, S]
        self._sums += torch.where(mine, rows.unsqueeze(2), 0.0).sum(1)

    def fresh(self) -> StepSums:
        """Return sums of the same sources, from 0."""
        return StepSums(self._names, self.device)

    def numbers(self) -> dict[str, Tensor]:
        """Return the sums, fp32 [] each."""
        losses, tokens = self._sums.unbind()
        rows = zip(self._names, losses, tokens, strict=True)
        return {"loss_sum": self._loss, "tokens": self._tokens} | {
            f"{what} of {name}": part
            for name, *parts in rows
            for what, part in zip(("loss_sum", "tokens"), parts, strict=True)
        }


def forward_backward(
    model: Decoder,
    objective: Objective,
    micro_batches: list[MicroBatch],
    sums: StepSums,
    step_tokens: int,
    leave: StopRequests | None,
) -> dict[str, Tensor | float] | Verdict:
    """Accumulate this rank's gradients of (sum of losses) / step_tokens; returns the sums by name,
    fp32 [] each. With `leave`, the requests of this rank, all ranks may abandon the step: then it
    returns their verdict."""

    def micro_batch_loss(model: nn.Module, batch: MicroBatch) -> Tensor:
        loss, terms, batch = objective(model, batch)
        sums.add(batch, loss, terms)
        return loss / step_tokens

    interrupt: Callable[[], Verdict | None] = lambda: None  # noqa: E731
    if leave is not None:
        interrupt = Meanwhile(leave, sums.device)
    if model.cfg.n_experts:
        model.routings.scale = 1 / step_tokens
    verdict = backward_passes(model, micro_batch_loss, micro_batches, sums.device, interrupt)
    return verdict or {**sums.numbers(), **objective.numbers()}


def guard_update(
    optimizer: torch.optim.Optimizer,
    sums: StepNumbers,
    step_tokens: int,
    clip: float,
    phase: int = 0,
) -> StepNumbers:
    """Pass clipping and the verdict on this step to the optimizer, as tensors; returns `sums` with
    loss (the mean over the real tokens), grad_norm and bad in place of their parts and, if spikes
    are detected, whether the step is one.

    The gradients are those of (sum of losses) / step_tokens. Dividing them by
    `grad_scale` makes them those of the mean over the real tokens, clipped to norm
    `clip`. A loss or norm that is not finite, no real token at all, a spike, or a row
    that did not reach its expert sets `found_inf`: weights, moments and step count stay,
    on all ranks alike. The fused kernels of torch.optim read both attributes, as they do
    for torch.amp.GradScaler (torch/amp/grad_scaler.py, _maybe_opt_step).
    """
    loss_sum, tokens = sums["loss_sum"], sums["tokens"]
    grad_norm = sums["grad_norm_sq"].sqrt() * step_tokens / tokens
    bad = ~(torch.isfinite(grad_norm) & torch.isfinite(loss_sum) & (tokens > 0))
    bad = bad | (sums["rows_over"] > 0) if "rows_over" in sums else bad
    # A NaN is harmless here: with found_inf no update uses it.
    shrink = (grad_norm / clip).clamp(min=1.0) if clip else torch.ones_like(grad_norm)
    numbers = {**sums, "loss": loss_sum / tokens, "grad_norm": grad_norm}
    if (spikes := getattr(optimizer, "spikes", None)) is not None:
        numbers |= spikes.judge(numbers["loss"], grad_norm, bad, (step_tokens, phase))
        bad = bad | (numbers["spike"] > 0)
    optimizer.grad_scale = (shrink * tokens / step_tokens).float()  # type: ignore[attr-defined]
    optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
    return {**numbers, "bad": bad.double()}


def update_weights(
    optimizer: torch.optim.Optimizer,
    sums: StepNumbers,
    step_tokens: int,
    lr: float,
    grad_clip: float,
    phase: int = 0,
) -> StepNumbers:
    """Update the weights, unless this step was not finite on some rank, or a spike; returns the
    numbers of the step for the host. `phase`: of the data, and of freezing."""
    numbers = guard_update(optimizer, sums, step_tokens, grad_clip, phase)
    set_learning_rate(optimizer, lr)
    optimizer.step()
    optimizer.zero_grad()
    return numbers


@dataclass(frozen=True)
class StepResult:
    """Numbers of a step on the host, one step later. `after`: the progress after it."""

    after: Progress
    lr: float
    values: dict[str, float] = field(repr=False)  # what guard_update returned, by name
    spent: dict[str, float]  # seconds of this rank until the step was done: Clock.spent

    @property
    def step(self) -> int:
        return self.after.step

    @property
    def bad(self) -> bool:
        """True if its update is skipped."""
        return self.values["bad"] > 0

    @property
    def spike(self) -> bool:
        return self.values.get("spike", 0.0) > 0


class PendingStep:
    """A step's numbers on their way to the host; read() waits only for that step."""

    def __init__(self, after: Progress, lr: float, numbers: StepNumbers, clock: Clock) -> None:
        self._after, self._lr, self._names = after, lr, list(numbers)
        self._clock, self._spent = clock, clock.spent()
        values = torch.stack(list(numbers.values()))
        # Pinned: otherwise the copy would wait for the device.
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self._host.copy_(values, non_blocking=True)
        self._mark = clock.mark()

    def read(self) -> StepResult:
        self._spent["total"] = self._clock.reach(self._mark)
        values = dict(zip(self._names, self._host.tolist(), strict=True))
        return StepResult(self._after, self._lr, values, self._spent)


def collect_garbage(step: int) -> None:
    """Collect Python's garbage at the same steps on all ranks. By default each rank collects at a
    different step, and all others wait for it."""
    gc.disable()
    if step % GC_STEPS == 0:
        gc.collect(1)
