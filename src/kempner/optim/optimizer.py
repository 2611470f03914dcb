"""A run's optimizer: rules over the parts of parameters that this rank holds.

It takes two tensors from the step, so that neither clipping nor a bad gradient makes the host wait:
`grad_scale` (gradients are divided by it) and `found_inf` (1: leave everything unchanged).

A rule sees plain fp32 tensors on the parameter's device. This module decides where the state is
kept, and its dtype: bf16 is rounded stochastically; state on the host is copied during updates.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from kempner.checkpoint.format import plan
from kempner.checkpoint.format.plan import StoredTensor, Table, local_part
from kempner.optim.rule import Guard, ParameterGroup, ParameterPart, ParameterState, Rule

if TYPE_CHECKING:
    from kempner.optim.kernels import Kernels
    from kempner.optim.spikes import Spikes


class Optimizer(torch.optim.Optimizer):
    """An optimizer over groups that each have a `rule` and the values it reads (lr,
    weight_decay, betas, ...)."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    spikes: Spikes | None = None  # judges each step before its update, through found_inf
    # Parameters whose published weights are not the trained ones, set from outside.
    published: Mapping[Tensor, Callable[[], Tensor]] = {}

    def __init__(
        self,
        groups: list[ParameterGroup],
        averages: torch.dtype = torch.float32,
        offload: bool = False,
    ) -> None:
        """`averages`: the dtype of moments, fp32 or bf16. `offload`: keep state in host memory."""
        super().__init__(groups, {})
        self._averages, self._offload = averages, offload
        self._group = holder_group([p for group in self.param_groups for p in group["params"]])
        for group in self.param_groups:
            group["rule"].ranks = self._group
        first = self.param_groups[0]["params"][0]
        # Around a rule, bf16 takes 37 to 65 operators in eager mode and, with AdamW, moves 228 to
        # 382 bytes per parameter; compiled, it is one kernel and 14 to 20 bytes.
        self.compiled = first.is_cuda and not offload and _can_compile()
        self._stream: torch.cuda.Stream | None = None
        if offload and first.is_cuda:
            self._stream = torch.cuda.Stream(first.device)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        place = local_part(self.param_groups[0]["params"][0]).device
        guard = Guard(
            torch.ones((), device=place) if self.grad_scale is None else self.grad_scale.to(place),
            torch.zeros((), device=place) if self.found_inf is None else self.found_inf.to(place),
        )
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        for group in self.param_groups:
            rule: Rule = group["rule"]
            # Frozen parameters have lost their gradient: see freezing.py.
            present = [p for p in group["params"] if p.grad is not None]
            if self.compiled and rule.pointwise:
                present = self._kernels.update(present, group, self._state, self._whole, guard)
            batches = rule.batches(present) or self._batches(present)
            coming = self._fetch(batches[0], rule) if batches else []
            # The state of the next batch is on its way while this one is updated.
            for batch, following in itertools.zip_longest(batches, batches[1:]):
                states = coming
                self._arrived(states)
                parts = [
                    ParameterPart(
                        as_fp32(local_part(p)), as_fp32(local_part(p.grad)), state, self._whole(p)
                    )
                    for p, state in zip(batch, states, strict=True)
                ]
                coming = self._fetch(following, rule) if following else []
                rule.update(group, parts, guard)
                self._put_back(batch, parts)

    @functools.cached_property
    def _kernels(self) -> Kernels:
        from kempner.optim.kernels import Kernels

        rank = dist.get_rank(self._group) if dist.is_initialized() else 0
        return Kernels(rank, self._table[0], self._averages)

    def _batches(self, parameters: list[Tensor]) -> list[list[Tensor]]:
        """Batch all parameters at once if nothing is copied; else one by one, which needs
        the least memory."""
        dtypes = {p.dtype for p in parameters} | {self._averages}
        if self._stream is not None or dtypes != {torch.float32}:
            return [[p] for p in parameters]
        return [parameters] if parameters else []

    # --- state ---

    def new_state(self, p: Tensor, dtype: torch.dtype) -> Tensor:
        """Make a tensor like `p`, distributed as `p`, on the device that holds the state."""
        part = local_part(p)
        place = torch.device("cpu") if self._offload else part.device
        pin = part.is_cuda and self._offload
        return as_part_of(p, torch.empty(part.shape, dtype=dtype, device=place, pin_memory=pin))

    def _state(self, p: Tensor, rule: Rule) -> ParameterState:
        """Return a parameter's state as the rule needs it. A checkpoint may hold the state of
        another optimizer, or of another dtype. It is kept if it has all averages of this rule."""
        state: ParameterState = self.state[p]
        # All averages or none: "step" counts the updates of each, for the bias correction.
        if not state.keys() >= {*rule.averages}:
            state.clear()
        dtypes = dict.fromkeys(rule.averages, self._averages)
        dtypes |= dict.fromkeys(rule.copies, torch.float32)
        for key in state.keys() - dtypes.keys() - set(rule.scalars):
            del state[key]
        for key, dtype in dtypes.items():
            old = state.get(key)
            if old is not None and old.dtype is dtype:
                continue
            state[key] = new = self.new_state(p, dtype)
            source = old if old is not None else p if key in rule.copies else None
            local_part(new).zero_() if source is None else local_part(new).copy_(local_part(source))
        for key in rule.scalars:
            if key not in state:
                state[key] = torch.zeros((), device=local_part(p).device)
        return state

    @functools.cached_property
    def _table(self) -> tuple[dict[Tensor, int], Table]:
        everything = [p for group in self.param_groups for p in group["params"]]
        world = dist.get_world_size() if dist.is_initialized() else 1
        table = plan.make_table({str(i): p for i, p in enumerate(everything)}, {}, world)
        for name, whole in table.items():  # keyed by their numbers in the group
            assert whole.layout is not None
            table[name] = whole._replace(layout=whole.layout._replace(first=0))
        return {p: i for i, p in enumerate(everything)}, table

    def _whole(self, p: Tensor) -> StoredTensor:
        numbers, table = self._table
        return table[str(numbers[p])]

    # --- copies, on a stream of their own where the state is on the host ---

    def _copying(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _fetch(self, batch: Sequence[Tensor], rule: Rule) -> list[ParameterState]:
        with self._copying():
            return [
                {
                    key: as_fp32(local_part(value).to(local_part(p).device, non_blocking=True))
                    for key, value in self._state(p, rule).items()
                }
                for p in batch
            ]

    def _arrived(self, states: Sequence[ParameterState]) -> None:
        """Make the current stream wait until the fetched state is usable."""
        if self._stream is not None:
            now = torch.cuda.current_stream()
            now.wait_stream(self._stream)
            for state in states:
                for value in state.values():
                    # Allocated on the copy stream: without this the allocator may hand the memory
                    # out again while the update reads it.
                    value.record_stream(now)

    def _put_back(self, batch: Sequence[Tensor], parts: Sequence[ParameterPart]) -> None:
        """Store what the rule has changed in a copy."""
        for p, part in zip(batch, parts, strict=True):
            pairs = [(p, part.weight)]  # a load creates the state in another order
            pairs += [(self.state[p][key], part.state[key]) for key in sorted(part.state)]
            bits = self._noise(p, part)
            for backup, new in pairs:
                home = local_part(backup)
                # The rule has already changed an fp32 tensor in place.
                if home.data_ptr() == new.data_ptr():
                    continue
                if home.dtype is torch.bfloat16:
                    from kempner.optim.rounding import to_bf16

                    new = to_bf16(new, next(bits))
                if self._stream is None or home.device == new.device:
                    home.copy_(new)
                    continue
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    home.copy_(new, non_blocking=True)
                # It may be freed after this returns, while the copy still reads it.
                new.record_stream(self._stream)

    def _noise(self, p: Tensor, part: ParameterPart) -> Iterator[Tensor]:
        """Yield random bits for one tensor of the parameter after another; each hash serves two."""
        from kempner.optim.rounding import SALTS, hashed_int32

        box = plan.own_box(part.whole, dist.get_rank(self._group) if dist.is_initialized() else 0)
        for salt in itertools.count(SALTS * self._table[0][p]):
            number = hashed_int32(part.whole.shape, box, part.state["step"], salt)
            yield number.bitwise_and(0xFFFF)
            yield number.bitwise_right_shift_(16).bitwise_and_(0xFFFF)

    # --- for checkpoints and evaluation ---

    def wait(self) -> None:
        """Block until all copies to the host have arrived."""
        if self._stream is not None:
            self._stream.synchronize()

    def averaging(self) -> dict[Tensor, Callable[[], Tensor]]:
        """Map each parameter whose published weights differ to the function that computes them."""
        self.wait()  # reads the state, which may still be on its way to the host
        return dict(self.published) | {
            p: functools.partial(self._average, p, group)
            for group in self.param_groups
            for p in group["params"]
            if group["rule"].publishes_average and "z" in self.state.get(p, {})
        }

    @torch.no_grad()
    def _average(self, p: Tensor, group: ParameterGroup) -> Tensor:
        state = {key: local_part(value) for key, value in self.state[p].items()}
        return as_part_of(p, group["rule"].average(group, local_part(p), state))


def _can_compile() -> bool:
    """Return whether all hosts can: copies of a shard must be updated in the same way, as nothing
    makes them equal again. All ranks must call it."""
    from kempner.jobs.system import compiler

    missing = torch.tensor(float(compiler.missing_compiler("cuda") is not None))
    if dist.is_initialized():
        dist.all_reduce(missing, op=dist.ReduceOp.MAX)
    return not missing


def holder_group(parameters: Sequence[Tensor]) -> dist.ProcessGroup | None:
    """Return the group of ranks that hold these parameters, if they form one of several pipeline
    stages; None if all ranks do. Every rank must call this."""
    if not dist.is_initialized():
        return None
    ranks = plan.ranks_of(parameters, dist.get_world_size())
    if len(ranks) == dist.get_world_size():
        return None
    # Subgroups are contiguous: the ranks of a stage are neighbours.
    group: dist.ProcessGroup = dist.new_subgroups(len(ranks))[0]  # type: ignore[no-untyped-call]
    return group


def as_part_of(whole: Tensor, part: Tensor) -> Tensor:
    """Wrap this rank's part as a tensor distributed as `whole`."""
    kind: Any = type(whole)
    spec = getattr(whole, "_spec", None)
    return part if spec is None else kind(part, spec, requires_grad=False)  # a DTensor


def as_fp32(tensor: Tensor) -> Tensor:
    """Convert to fp32; returns an fp32 tensor itself."""
    return tensor.float()
