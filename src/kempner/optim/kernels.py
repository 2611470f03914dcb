"""An update in bf16 as one kernel: reading, rule, rounding and writing are compiled together.

The kernel gives the same numbers as the eager update if both use the same operators; AdamW's differ
within rounding. A run uses one of the two from its first step to its last, across restarts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kempner.checkpoint.format.plan import Box, StoredTensor, local_part, own_box
from kempner.jobs.system.compiler import keep_private
from kempner.optim.rounding import SALTS, as_int32, hashed_at, to_bf16
from kempner.optim.rule import Guard, ParameterGroup, ParameterPart, ParameterState, Rule

MOST_ELEMENTS = 1 << 31  # elements of a part: places are int32


class Kernels:
    """Compiled kernels, one per rule and dtype for all sizes and hyperparameters: torch.compile
    recompiles a function only a few times."""

    def __init__(self, rank: int, numbers: Mapping[Tensor, int], averages: torch.dtype) -> None:
        """`numbers`: a number for each parameter, which seeds the hashes that round it; `averages`:
        the dtype of moments."""
        keep_private()
        self._rank, self._numbers, self._averages = rank, numbers, averages
        self._compiled: dict[type[Rule], Callable[..., None]] = {}
        self._integers: dict[Tensor, Tensor] = {}

    def update(
        self,
        parameters: Sequence[Tensor],
        group: ParameterGroup,
        state_of: Callable[[Tensor, Rule], ParameterState],
        whole_of: Callable[[Tensor], StoredTensor],
        guard: Guard,
    ) -> list[Tensor]:
        """Update the group's parameters that a kernel supports, and their state, by the group's
        rule. Returns the others."""
        rule: Rule = group["rule"]
        device = guard.found_inf.device
        values = [*(group[key] for key in rule.numbers), *group["betas"]]
        # Tensors, not Python floats: a float that changes with the schedule would recompile the
        # kernel. Once for all parameters, because each costs a launch, as does a parameter.
        floats = [torch.full((), value, device=device) for value in values]
        others = []
        for p in parameters:
            if self._takes(p, whole := whole_of(p)):
                self._update_one(p, rule, state_of(p, rule), whole, floats, guard)
            else:
                others.append(p)
        return others

    def _takes(self, p: Tensor, whole: StoredTensor) -> bool:
        """Return whether a kernel updates the parameter. In fp32, torch's own kernels update all
        parameters at once."""
        rounds = torch.bfloat16 in (p.dtype, self._averages)
        # A kernel sees a part as one line of elements; see in_lines().
        flat = local_part(p).is_contiguous() and local_part(p.grad).is_contiguous()  # type: ignore[arg-type]
        return rounds and flat and in_lines(whole.shape, own_box(whole, self._rank))

    def _update_one(
        self,
        p: Tensor,
        rule: Rule,
        state: ParameterState,
        whole: StoredTensor,
        floats: list[Tensor],
        guard: Guard,
    ) -> None:
        if (kernel := self._compiled.get(type(rule))) is None:
            kernel = self._compiled[type(rule)] = compile_rule(rule)
        weight, grad = local_part(p), local_part(p.grad)  # type: ignore[arg-type]
        if not weight.numel():
            return
        if (integers := self._integers.get(p)) is None:
            rows = line_places(whole.shape, own_box(whole, self._rank))
            integers = torch.tensor([SALTS * self._numbers[p], *rows], dtype=torch.int32)
            integers = self._integers[p] = integers.to(weight.device)
        parts = {key: local_part(value) for key, value in state.items()}
        flat = {key: x.view(-1) if x.ndim else x for key, x in parts.items()}
        kernel(weight.view(-1), grad.view(-1), flat, floats, integers, *guard)


def line_places(shape: torch.Size, box: Box) -> tuple[int, int, int]:
    """Return (length, gap, first), which place a part in the whole tensor, whose lines are cut at
    most once: element i is at first + i + i // length * gap, as int32, which may wrap around."""
    inner = len(box) - 1  # the last dim that is cut; later ones are whole
    while inner > 0 and box[inner] == (0, shape[inner]):
        inner -= 1
    length = math.prod(size for _, size in box[inner:])
    gap = math.prod(shape[inner:]) - length
    first, step = 0, 1
    for size, (start, _) in reversed(list(zip(shape, box, strict=True))):
        first, step = first + start * step, step * size
    return max(length, 1), gap, as_int32(first)


def in_lines(shape: torch.Size, box: Box) -> bool:
    """Return whether line_places() can describe the part: of the dims before the last cut one, only
    the first may be cut."""
    cut = [dim for dim, part in enumerate(box) if part != (0, shape[dim])]
    small = math.prod(length for _, length in box) < MOST_ELEMENTS
    return small and (len(cut) < 2 or (len(cut) == 2 and cut[0] == 0))


def compile_rule(rule: Rule) -> Callable[..., None]:
    def update(
        weight: Tensor, grad: Tensor, state: ParameterState, floats: list[Tensor], integers: Tensor,
        grad_scale: Tensor, found_inf: Tensor,
    ) -> None:  # fmt: skip
        """Update one part. weight, grad and the large tensors in `state`: [N]."""
        salt, length, gap, first = integers.unbind()
        group: dict[str, Any] = {name: floats[i] for i, name in enumerate(rule.numbers)}
        group["betas"] = floats[len(rule.numbers) :]
        copies = {key: x.float() for key, x in state.items()}
        # clone(): float() of an fp32 gradient is the gradient itself, which a rule may change.
        part = ParameterPart(weight.float(), grad.float().clone(), copies, None)  # type: ignore[arg-type]
        rule.update(group, [part], Guard(grad_scale, found_inf))
        # Places in the whole tensor, so that an element rounds alike on every mesh.
        at = torch.arange(weight.shape[0], device=weight.device, dtype=torch.int32)
        places = first + at + torch.div(at, length, rounding_mode="trunc") * gap
        # Sorted as in Optimizer._put_back: the k-th tensor gets the same bits both ways.
        pairs = [(weight, part.weight), *((state[key], copies[key]) for key in sorted(state))]
        rounded = [(home, new) for home, new in pairs if home.dtype is torch.bfloat16]
        # One hash has bits for two tensors, half for each, as in Optimizer._noise().
        for k, (home, new) in enumerate(rounded):
            bits = hashed_at(places, copies["step"], salt + k // 2)
            home.copy_(to_bf16(new, (bits >> (16 * (k % 2))) & 0xFFFF))

    # fullgraph: a graph break would silently cut the kernel in two.
    return torch.compile(update, dynamic=True, fullgraph=True)
