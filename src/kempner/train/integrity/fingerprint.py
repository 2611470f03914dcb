"""Fingerprints of what a rank computes in a step: each block's output, the gradient with respect to
it, this rank's part of each gradient before reduction, and the final gradients.

Two computations of a batch with the same weights have bitwise equal fingerprints, unless a device
has made an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from kempner.checkpoint.format.plan import local_part
from kempner.train.integrity.messages import SUMMED_AT_ONCE, Messages

ROW = 1024  # elements, each weighed by its place
NO_PLACE = 1 << 40  # after all other places: nothing differs
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(values: Tensor) -> Tensor:
    """Return a checksum of the bits of a tensor, int64 []: the sum of its elements as integers,
    each times an odd number given by its place in a row of ROW elements. It changes with any single
    bit, and if two elements of a row change places."""
    flat = values.detach().contiguous().view(-1)
    flat = flat.view(torch.uint8) if flat.is_complex() else flat.view(INTEGERS[flat.itemsize])
    # Odd: an even factor would shift the top bits out of the 64-bit sum.
    places = torch.arange(1, 2 * ROW, 2, device=flat.device)
    # Add up the rows first and weigh once: the sum of products is the same.
    sums = torch.zeros_like(places)
    for piece in torch.split(flat, SUMMED_AT_ONCE):
        rows, rest = divmod(piece.numel(), ROW)
        sums += piece[: rows * ROW].view(rows, ROW).sum(0, dtype=torch.int64)
        sums[:rest] += piece[rows * ROW :]
    return (sums * places).sum()


def fingerprint(values: Tensor) -> Tensor:
    """Return the checksum of a tensor and the bits of its fp64 norm, int64 [2]. The norm serves if
    kernels are not bitwise deterministic."""
    values = local_part(values.detach())
    norms = [
        torch.linalg.vector_norm(piece, dtype=torch.float64)
        for piece in torch.split(values.contiguous().view(-1), SUMMED_AT_ONCE)
    ]
    # The norm of the pieces' norms is the norm of the whole.
    norm = torch.linalg.vector_norm(torch.stack(norms))
    return torch.stack((checksum(values), norm.view(torch.int64)))


class Places(NamedTuple):
    """Numbers of the compared tensors, in the order in which a fault spreads: forward through the
    blocks, backward through them, and last what other ranks do not see."""

    blocks: int

    def output(self, block: int) -> int:
        return block

    @property
    def loss(self) -> int:
        return self.blocks

    def returning(self, block: int) -> int:
        """The gradient of the block's output."""
        return 2 * self.blocks - block

    @property
    def own_gradient(self) -> int:
        return 2 * self.blocks + 1

    @property
    def summed_gradient(self) -> int:
        return 2 * self.blocks + 2

    def name(self, place: int) -> str:
        """Describe a place for people."""
        if place < self.blocks:
            return f"the output of block {place}"
        if place == self.loss:
            return "the loss"
        if place <= 2 * self.blocks:
            return f"the gradient of block {2 * self.blocks - place}'s output"
        if place == self.own_gradient:
            return "its own gradients of the weights"
        return "the gradients summed over ranks"


class Trace:
    """Fingerprints of one computation of a step, in order."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self._values: list[Tensor] = []

    def add(self, place: int, values: Tensor) -> None:
        self._places.append(place)
        self._values.append(fingerprint(values))

    def rows(self) -> Tensor:
        """Return the place, checksum and norm of each fingerprint, on the host, int64 [N, 3]."""
        if not self._values:
            return torch.zeros(0, 3, dtype=torch.int64)
        # One copy to the host for all; with fsdp_cpu_offload some are there already.
        device = self._values[0].device
        values = torch.stack([value.to(device, non_blocking=True) for value in self._values]).cpu()
        return torch.cat((torch.tensor(self._places).unsqueeze(1), values), 1)


class Witness:
    """Takes the fingerprints of a model's steps."""

    def __init__(self, model: Any, blocks: int) -> None:
        """`blocks`: of the whole model; a pipeline stage has some of them."""
        self.places = Places(blocks)
        self.messages = Messages()  # of the last computation
        self._trace: Trace | None = None
        self._model = model
        hook: Callable[..., Any] = self._block
        # In a model compiled as a whole, inner hooks would break the single graph.
        if model._compiled_call_impl is None:
            for name, block in model.blocks.named_children():
                if block._compiled_call_impl is not None:
                    # Module.compile() compiles a module's hooks too: this one must stay outside.
                    hook = torch.compiler.disable(self._block)  # type: ignore[no-untyped-call]
                block.register_forward_hook(partial(hook, int(name)))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(_WitnessedReduce(self))
        self._reduces = any(isinstance(module, FSDPModule) for module in model.modules())

    @contextlib.contextmanager
    def into(self, trace: Trace | None) -> Iterator[None]:
        """Record fingerprints into `trace` in this context; with None, record nothing."""
        self._trace = trace
        self.messages = Messages()
        try:
            yield
        finally:
            self._trace = None

    def finish(self, trace: Trace, sums: Iterable[Tensor]) -> None:
        """Add the loss sums and the gradients."""
        trace.add(self.places.loss, torch.stack([each.detach().float() for each in sums]))
        place = self.places.summed_gradient if self._reduces else self.places.own_gradient
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                trace.add(place, parameter.grad)

    def _block(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        trace = self._trace
        # A forward pass without gradients is a validation, not part of the step.
        if trace is None or not torch.is_grad_enabled():
            return
        x = output[0] if isinstance(output, tuple) else output
        trace.add(self.places.output(number), x)
        if x.requires_grad:
            x.register_hook(partial(self._returning, trace, number))

    def _returning(self, trace: Trace, number: int, gradient: Tensor) -> None:
        trace.add(self.places.returning(number), gradient)

    def reduces(self, gradient: Tensor) -> None:
        """Take this rank's part of a gradient, before the reduction."""
        if self._trace is not None:
            self._trace.add(self.places.own_gradient, gradient)

    def received(self, output: Tensor, given: Tensor, group: dist.ProcessGroup) -> None:
        """Take the reduced part on this rank, in a group of several ranks."""
        # A group of one rank sends nothing that could arrive wrong.
        if self._trace is not None and group.size() > 1:
            self.messages.add(output, given, group)


class _WitnessedReduce(DefaultReduceScatter):
    """FSDP2's reduce-scatter, whose input is shown to a witness. The first buffer of each reduction
    is the input; it is filled by the time the second, the output, is requested, also in a group of
    one rank, where nothing is sent."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness
        self._input: Tensor | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer: Tensor = super().allocate(size, dtype=dtype, device=device)
        if self._input is None:
            self._input = buffer
        else:
            self._witness.reduces(self._input)
            self._input = None
        return buffer

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        # An output still under way has nothing to look at.
        if not async_op:
            self._witness.received(output_tensor, input_tensor, group)
        return work
