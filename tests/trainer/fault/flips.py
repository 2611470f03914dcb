"""A flipped bit in what a rank computes, for faulty_train.py: in each computation of a step.

activation   the output of a block
returning    the gradient of a block's output
product      the gradient of a weight, by this rank alone
gradient     the sum of a gradient over the ranks, in this rank's memory
message      the same, as it arrives
weight       in memory, once the step is computed: the bit is set, and stays
moment       of the optimizer, so too
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

from kempner.checkpoint.format.plan import local_part
from kempner.data.loader import TrainLoader
from kempner.model.decoder import Block
from kempner.optim.optimizer import Optimizer
from kempner.train import step

BIT = 21  # of fp32: in the mantissa


def flip_bit(values: Tensor) -> Tensor:
    """Change the first number that is not 0."""
    place = int(values.view(-1).ne(0).float().argmax())
    values.view(-1)[place : place + 1].view(torch.int32).bitwise_xor_(1 << BIT)
    return values


class Flips:
    def __init__(self, what: str, is_due: Callable[[int], bool]) -> None:
        """`is_due(samples read so far)`."""
        self.what, self._is_due, self._samples = what, is_due, 0
        self._optimizer: Any = None
        self._stuck: int | None = None
        self._watch()
        place = {"activation": self._in_block, "returning": self._in_block}
        place |= {"product": self._in_block, "message": self._in_message}
        place.get(what, self._in_memory)()

    def due(self) -> bool:
        return self._is_due(self._samples)

    def changed(self, values: Tensor) -> Tensor:
        return flip_bit(values.clone()) if self.due() else values

    def _watch(self) -> None:
        following, made, flips = TrainLoader.__next__, Optimizer.__init__, self

        def read(self: Any) -> Any:
            result = following(self)
            flips._samples = self.position
            return result

        def make(self: Any, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **kwargs)
            flips._optimizer = self

        TrainLoader.__next__ = read  # type: ignore[method-assign]
        Optimizer.__init__ = make  # type: ignore[method-assign]

    def _in_block(self) -> None:
        block_forward, flips = Block.forward, self

        def forward(self: Any, *args: Any) -> Any:
            if flips.what == "product" and torch.is_grad_enabled():
                weight = self.attention.wo.weight
                if not hasattr(weight, "flips"):  # it stays from one computation to the next
                    weight.flips = weight.register_hook(flips.changed)
            result = block_forward(self, *args)
            x = result[0] if isinstance(result, tuple) else result
            if torch.is_grad_enabled() and flips.what == "returning":
                x.register_hook(flips.changed)  # type: ignore[no-untyped-call]
            elif torch.is_grad_enabled() and flips.what == "activation" and flips.due():
                flip_bit(x.data)
            return result

        Block.forward = forward  # type: ignore

    def _in_message(self) -> None:
        reduce, flips = collectives.DefaultReduceScatter.__call__, self

        def reduced(self: Any, output_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            work = reduce(self, output_tensor, *args, **kwargs)
            if flips.due():
                flip_bit(output_tensor)
            return work

        collectives.DefaultReduceScatter.__call__ = reduced  # type: ignore[method-assign]

    def _in_memory(self) -> None:
        compute = step.forward_backward

        def forward_backward(model: Any, *args: Any) -> Any:
            result = compute(model, *args)
            if self.due():
                first = next(p for p in model.parameters() if local_part(p).numel())
                values = {"weight": first.data, "gradient": first.grad}
                if self.what == "moment":
                    values["moment"] = self._optimizer.state[first]["exp_avg"]
                local = local_part(values[self.what])
                flip_bit(local) if self.what == "gradient" else self._set_bit(local)
            return result

        step.forward_backward = forward_backward  # type: ignore

    def _set_bit(self, values: Tensor) -> None:
        """Set the bit of a number that did not have it at the first time: a cell that is stuck."""
        bits = values.view(-1).view(torch.int32)
        if self._stuck is None:
            self._stuck = int((bits & (1 << BIT)).eq(0).float().argmax())
        bits[self._stuck] |= 1 << BIT
