"""Stochastic rounding to bf16, the same on every mesh.

Rounded to nearest, a slow average in bf16 stands still: with a decay rate of 0.999 a step moves it
by less than half of the distance to its neighbour, 2^-8. Rounded up or down at random, it moves by
the right amount on average (arXiv:2010.06192).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kempner.checkpoint.format.plan import Box

SALTS = 8  # hashes per parameter; each serves two tensors


def to_bf16(value: Tensor, noise: Tensor) -> Tensor:
    """Round `value`, fp32, to bf16 stochastically: up with a probability equal to the
    distance to the number below. `noise`: int32, uniform in 0 to 2^16 - 1. A value that bf16
    can represent stays."""
    # bf16 is the upper half of fp32's bits: the noise carries into it with the probability given by
    # the lower half, and the rest is cut off.
    return (value.view(torch.int32) + noise).bitwise_and_(-(1 << 16)).view(torch.float32).bfloat16()


def hashed_int32(shape: torch.Size, box: Box, step: Tensor, salt: int) -> Tensor:
    """Return uniform int32, of any sign, for the part `box` of a tensor of this shape.

    Each value hashes the element's place in the whole tensor; it is not a rank's random
    generator: ranks that hold copies of a part must round alike, or the copies drift apart, and a
    run resumed on other ranks should round as if uninterrupted. The hash is lowbias32 (Chris
    Wellons, "Prospecting for Hash Functions", 2018); int32 products wrap around. `step` [];
    `salt`: one per tensor.
    """
    stride, places = 1, torch.zeros((), dtype=torch.int32, device=step.device)
    for dim, (start, length) in reversed(list(enumerate(box))):
        along = torch.arange(length, dtype=torch.int32, device=step.device)
        along = along.mul_(as_int32(stride)).add_(as_int32(start * stride))
        places = places + along.view(-1, *[1] * (len(box) - 1 - dim))
        stride *= shape[dim]
    return hashed_at(
        places, step, torch.full((), as_int32(salt), dtype=torch.int32, device=step.device)
    )


def hashed_at(places: Tensor, step: Tensor, salt: Tensor) -> Tensor:
    """Hash elements at these places of the whole tensor, counted along its rows. `places` and
    `salt` [] are int32."""
    # Factors with scattered bits (2^32 over the golden ratio, and one of MurmurHash3): with small
    # ones the noise of the next step would be this one's, moved by a few places.
    x = step.to(torch.int32) * as_int32(0x9E3779B9) + salt * as_int32(0x85EBCA6B) + places
    x = _mixed(x, 16, 0x7FEB352D)
    x = _mixed(x, 15, 0x846CA68B)
    return x.bitwise_xor_(x.bitwise_right_shift(16).bitwise_and_(0xFFFF))


def _mixed(x: Tensor, shift: int, factor: int) -> Tensor:
    # A shift of int32 repeats the sign bit; the hash is of unsigned numbers, with zeros there.
    high = x.bitwise_right_shift(shift).bitwise_and_((1 << (32 - shift)) - 1)
    return x.bitwise_xor_(high).mul_(as_int32(factor))


def as_int32(number: int) -> int:
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
