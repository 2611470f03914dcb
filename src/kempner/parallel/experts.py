"""Expert parallelism: each of ep ranks holds E / ep experts of every layer, and the tokens travel
to their experts and back (arXiv:2006.16668). The ranks still read different samples.

Each layer takes two exchanges of all tokens, and two in the backward pass, instead of gathering the
experts' weights. Shapes: M rows, D width, E experts of the layer, L = E / ep experts of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from kempner.model.decoder import Decoder
from kempner.model.moe import (
    Experts,
    MixtureOfExperts,
    has_grouped_mm,
    take_rows,
    through_experts,
)
from kempner.parallel.config import DistributedConfig, ExpertsConfig
from kempner.parallel.layout import EP, Layout

FIRST_PAUSE = 8  # steps without buffers, after one whose rows had no place in them
_Rows = TypeVar("_Rows", int, Tensor)


class ExchangeBuffers:
    """The size of the buffers in which all layers of a model send rows, so that the host need
    not know their number. `spare`: room above the mean of a rank's rows, relative to that mean;
    None: no buffers."""

    def __init__(self, spare: float | None, ranks: int) -> None:
        self.ranks = ranks
        # In whole percent, so that places() rounds alike on the host and the device. At most all
        # rows of a rank: more never come.
        self._percent = 0 if spare is None else min(round(100 * (1 + spare)), 100 * ranks)
        self._pause, self._exact_steps = FIRST_PAUSE, 0

    @property
    def fixed(self) -> bool:
        return self._percent > 0

    @property
    def in_use(self) -> bool:
        """True if the next pass uses buffers. A pass without gradients does not: only steps
        can be repeated."""
        return self.fixed and self._exact_steps == 0 and torch.is_grad_enabled()

    def places(self, rows: _Rows) -> _Rows:
        """Return the rows of the buffer for one rank, given all rows that a rank sends."""
        return -(-rows * self._percent // (100 * self.ranks))

    def rows_over(self, load: Tensor) -> Tensor:
        """Count the rows without a place, int64 []. `load` [layers, E]: this rank's."""
        sent = load.view(len(load), self.ranks, -1).sum(2)
        over: Tensor = (sent - self.places(load.sum(1, keepdim=True))).clamp(min=0).sum()
        return over * self.in_use

    def pause(self) -> int:
        """Send rows without buffers for some steps, twice as many each time, so that the share of
        steps that a persistently uneven router costs vanishes. Returns their number."""
        self._exact_steps, self._pause = self._pause, 2 * self._pause
        return self._exact_steps

    def after_step(self) -> None:
        self._exact_steps = max(0, self._exact_steps - 1)


class ParallelExperts(nn.Module):
    """The parameters of `base`, cut along the experts; their names stay. `mesh`: of ep, and of tp
    if that has cut each expert."""

    w1: nn.Parameter
    w2: nn.Parameter
    w3: nn.Parameter

    def __init__(self, base: Experts, mesh: DeviceMesh, buffers: ExchangeBuffers) -> None:
        super().__init__()
        self.exchange, self.mesh = buffers, mesh[EP]
        for name, p in base.named_parameters():
            cuts = [Shard(0), *(p.placements if isinstance(p, DTensor) else ())]
            whole = torch.empty(p.shape, dtype=p.dtype, device="meta")
            # None: every rank cuts for itself; on the meta device there is nothing to send.
            part = distribute_tensor(whole, mesh, cuts, src_data_rank=None)
            self.register_parameter(name, nn.Parameter(part, requires_grad=p.requires_grad))

    def forward(
        self, x: Tensor, load: Tensor, beside: Callable[[], Tensor] | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply the experts to x [M, D], sorted by expert, with load [E], as Experts does. Also
        returns the result of `beside`, if given, computed while the rows are on their way."""
        if not self.exchange.in_use:
            return self._exactly(x, load, beside)  # type: ignore[no-any-return]
        sent = load.view(self.exchange.ranks, -1)  # [ep, L]: by the rank of the expert
        places = self.exchange.places(len(x))
        way = FixedWay(sent, places, len(x), self.mesh.get_group().group_name)
        return self._exchange(x, way, beside)  # type: ignore[no-any-return]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _exactly(self, x: Tensor, load: Tensor, beside: Any) -> Any:
        # Its sizes are read on the host and vary: compiled code would recompile each time.
        return self._exchange(
            x, ExactWay(load.view(self.exchange.ranks, -1), self.mesh.get_group()), beside
        )

    def _exchange(
        self, x: Tensor, way: ExactWay | FixedWay, beside: Callable[[], Tensor] | None
    ) -> Any:
        x = way.send(x)
        other = beside() if beside is not None else None
        x, arrived = way.receive(x)
        # Rows arrive by rank; the grouped product takes them by expert.
        order = by_expert(arrived, len(x), way.places)
        place = order.argsort()
        weights = [_local(w) for w in (self.w1, self.w2, self.w3)]
        y = through_experts(take_rows(x, order, place), arrived.sum(0), *weights)
        y = way.give_back(take_rows(y, place, order))
        return y if beside is None else (y, other)


class ExactWay:
    """The exchange of exactly the rows of each expert, there and back: the host waits for their
    numbers. `sent` [ep, L]: the load of all experts, by the rank that has them."""

    places: int | None = None  # rows of a buffer

    def __init__(self, sent: Tensor, group: dist.ProcessGroup) -> None:
        self._group = group
        self._arrived = all_to_all_single(sent, None, None, group)  # [ep, L]: by the sender
        # The host must know the message sizes: wait once for both directions.
        there, here = torch.stack((sent.sum(1), self._arrived.sum(1))).tolist()
        self._there, self._here = there, here

    def send(self, x: Tensor) -> Tensor:
        """Begin to send x [M, D]; the result is the argument of receive()."""
        return all_to_all_single_autograd(x, self._here, self._there, self._group)

    def receive(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the received rows and their number per expert, [ep, L], by the sender."""
        return x, self._arrived

    def give_back(self, y: Tensor) -> Tensor:
        """Return the results for the rows that this rank has sent, in order."""
        return all_to_all_single_autograd(y, self._there, self._here, self._group)


class FixedWay:
    """The exchange through buffers of `places` rows per rank, a number that the host knows. A row
    without a place stays here, and its result is 0. `rows`: M."""

    def __init__(self, sent: Tensor, places: int, rows: int, group: str) -> None:
        self.places, self._group, self._each = places, group, [places] * len(sent)
        ends = sent.sum(1).cumsum(0)
        begins = ends - sent.sum(1)
        place = torch.arange(places, device=sent.device)
        # For each place of a buffer, the row that fills it, if any: send() gathers by it.
        row_in = (begins.unsqueeze(1) + place).flatten().clamp(max=rows - 1)  # [ep x places]
        # Places beyond their rank's rows, clamped above, are empty.
        has_row = (place < sent.sum(1, keepdim=True)).flatten()
        row = torch.arange(rows, device=sent.device)
        # The inverse: for each row its place, if any. The way back and the gradients gather by it.
        rank = torch.searchsorted(ends, row, right=True)
        at = row - begins[rank]
        place_of = rank * places + at.clamp(max=places - 1)  # [M]
        self._fill = row_in, has_row, place_of, at < places
        # The last rows for a rank are those without a place.
        fits = sent.cumsum(1).clamp(max=places)
        self._fits = torch.cat((fits[:, :1], fits.diff(dim=1)), 1)

    def send(self, x: Tensor) -> Tensor:
        return self._begin(_move(x, *self._fill))

    def receive(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # The rows in the places for each expert of the receiver; stays on the device.
        arrived = _wait(_begin(self._fits, [1] * len(self._fits), self._group))
        return self._end(x), arrived

    def give_back(self, y: Tensor) -> Tensor:
        # The maps of send(), reversed.
        return _move(self._end(self._begin(y)), *self._fill[2:], *self._fill[:2])

    def _begin(self, x: Tensor) -> Tensor:
        sent: Tensor = _Begin.apply(x, self._each, self._group)  # type: ignore[no-untyped-call]
        return sent

    def _end(self, x: Tensor) -> Tensor:
        arrived: Tensor = _End.apply(x, self._each, self._group)  # type: ignore[no-untyped-call]
        return arrived


def by_expert(arrived: Tensor, rows: int, places: int | None) -> Tensor:
    """Return the order that sorts `rows` rows by expert, int64 [rows], empty places last. They
    arrive rank by rank, each rank's rows sorted: `arrived` [ep, L]; in buffers of `places`."""
    if places is not None:
        # Each sender's buffer ends with empty places: count them as one more expert, the last.
        arrived = torch.cat((arrived, places - arrived.sum(1, keepdim=True)), 1)
    expert = torch.arange(arrived.numel(), device=arrived.device) % arrived.shape[1]
    # With output_size the host need not wait for the sum of the repeats.
    return expert.repeat_interleave(arrived.flatten(), output_size=rows).argsort(stable=True)


class _Move(torch.autograd.Function):
    """A gather of rows, 0 where there is none, whose gradient is a gather, too. The contents of
    empty places, perhaps NaN, go nowhere."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, there: Tensor, inverse: Tensor, back: Tensor
    ) -> Tensor:
        ctx.save_for_backward(inverse, back)
        return torch.where(there.unsqueeze(1), x[index], 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        inverse, back = ctx.saved_tensors
        return torch.where(back.unsqueeze(1), grad[inverse], 0.0), None, None, None, None


def _move(x: Tensor, *maps: Tensor) -> Tensor:
    rows: Tensor = _Move.apply(x, *maps)  # type: ignore[no-untyped-call]
    return rows


class _Begin(torch.autograd.Function):
    """Begin to exchange equally many rows with each rank. Only _End may use the result. Backward
    waits for the gradient, whose exchange _End has begun: computation between the two overlaps the
    exchange in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, each: list[int], group: str) -> Tensor:
        return _begin(x, each, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _wait(grad), None, None


class _End(torch.autograd.Function):
    """Wait for the exchange that _Begin has begun. Backward begins to exchange the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, each: list[int], group: str) -> Tensor:
        ctx.way = each, group
        return _wait(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _begin(grad, *ctx.way), None, None


def _begin(x: Tensor, each: list[int], group: str) -> Tensor:
    y: Tensor = torch.ops._c10d_functional.all_to_all_single(x.contiguous(), each, each, group)
    return y


def _wait(x: Tensor) -> Tensor:
    y: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return y


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def split_experts(
    model: Decoder, layout: Layout, distributed: DistributedConfig, how: ExpertsConfig
) -> None:
    """Cut the experts of every layer over the ep ranks. Call it before sharding."""
    mesh = layout.expert_mesh
    buffers = ExchangeBuffers(how.spare, mesh[EP].size())
    if buffers.fixed:
        model.routings.buffers = buffers
    for name, module in list(model.named_modules()):
        if isinstance(module, Experts):
            model.set_submodule(name, ParallelExperts(module, mesh, buffers))
        if isinstance(module, MixtureOfExperts):
            module.hides_shared = "shared" in distributed.overlap


def keep_from_compiler(model: Decoder, dtype: torch.dtype) -> None:
    """Exclude experts from compilation if they read each expert's load on the host: it varies, and
    each value would cause a recompilation. torch's grouped kernel reads it on the device."""
    for module in model.modules():
        if not isinstance(module, Experts | ParallelExperts):
            continue
        w1 = _local(module.w1)
        exact = isinstance(module, ParallelExperts) and not module.exchange.fixed
        if exact or not has_grouped_mm(w1.to(dtype), w1):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign, no-untyped-call]


def shard_experts(model: Decoder, layout: Layout, **options: Any) -> None:
    """Apply fully_shard, with these options, over the ranks that have the same experts. An
    expert's gradient already sums the tokens of all ep ranks: summed over these again, it would be
    ep times too large."""
    for module in model.modules():
        if isinstance(module, ParallelExperts):
            fully_shard(
                module,
                mesh=layout.expert_parameter_mesh,
                **options,
                shard_placement_fn=lambda _: Shard(1),  # the experts' dimension is already cut
            )
