"""Compression of pseudo-gradients, which replicas exchange, to few bits.

A codec turns a matrix [R, C] into bytes, whose number depends on the shape alone, and back.
The codes span the range of each row or of the whole matrix; if FSDP has sharded the matrix, of
this rank's rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kempner.extensions.lowcomm.config import LowcommConfig

SIGMAS = 6.0  # width of the range of the statistical codes


class Codec(Protocol):
    def encode(self, x: Tensor) -> Tensor:
        """Encode fp32 [R, C] as uint8 [size(R, C)]."""

    def decode(self, data: Tensor, rows: int, columns: int) -> Tensor:
        """Decode to fp32 [rows, columns]; bit-identical on every replica."""

    def size(self, rows: int, columns: int) -> int:
        """Return the number of bytes."""


class Raw:
    """No compression: fp32."""

    def encode(self, x: Tensor) -> Tensor:
        return as_bytes(x)

    def decode(self, data: Tensor, rows: int, columns: int) -> Tensor:
        return fp32_rows(data, rows, columns)

    def size(self, rows: int, columns: int) -> int:
        return 4 * rows * columns


class Linear:
    """Uniform quantization: 2^bits equidistant values from the least to the greatest. Sends two
    fp32 per range."""

    def __init__(self, bits: int, per_row: bool) -> None:
        self.bits, self.per_row = bits, per_row

    def _shape(self, rows: int, columns: int) -> tuple[int, int]:
        return (rows, columns) if self.per_row else (1, rows * columns)

    def _head(self) -> int:
        """Return the number of fp32 values that precede the codes of a range."""
        return 2

    def encode(self, x: Tensor) -> Tensor:
        x = x.reshape(self._shape(*x.shape))
        # FSDP and copies may leave this rank without rows, and amin() over no elements raises.
        if not x.numel():
            return x.new_empty(0, dtype=torch.uint8)
        low = x.amin(1, keepdim=True)
        step = (x.amax(1, keepdim=True) - low) / (2**self.bits - 1)
        # A constant row has step 0: all its codes are 0.
        codes = ((x - low) / torch.where(step > 0, step, 1.0)).round()
        return torch.cat(
            (as_bytes(torch.cat((low, step), 1)), pack_bits(codes, self.bits).flatten())
        )

    def _split(self, data: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Split into the heads [r, head] and the codes [r, c], int64."""
        r, c = self._shape(rows, columns)
        head = 4 * r * self._head()
        codes = data[head:].view(r, -(-c * self.bits // 8))
        return fp32_rows(data[:head], r, self._head()), unpack_bits(codes, self.bits)[:, :c].long()

    def decode(self, data: Tensor, rows: int, columns: int) -> Tensor:
        if not len(data):
            return torch.empty(rows, columns, device=data.device)
        head, codes = self._split(data, rows, columns)
        low, step = head.unsqueeze(2).unbind(1)
        return (low + step * codes).reshape(rows, columns)

    def size(self, rows: int, columns: int) -> int:
        r, c = self._shape(rows, columns)
        return r * (4 * self._head() + -(-c * self.bits // 8)) if rows * columns else 0


class Statistical(Linear):
    """Quantization into 2^bits bins of equal width, centred on the mean, over 6 standard
    deviations; outliers go into the outermost bins. A bin stands for the mean of its members; these
    means, 2^bits fp32 per range, are sent.

    The centre is an edge between two bins. With a bin around it, as rounding gives, 2 bits leave
    two bins on one side and one on the other: relative error .42 instead of .40 (normal numbers).
    """

    def _head(self) -> int:
        return int(2**self.bits)

    def encode(self, x: Tensor) -> Tensor:
        x = x.reshape(self._shape(*x.shape))
        if not x.numel():
            return x.new_empty(0, dtype=torch.uint8)
        bins = 2**self.bits
        mean = x.mean(1, keepdim=True)
        # Not std(): its unbiased form is NaN for a row of one column.
        width = (x - mean).square().mean(1, keepdim=True).sqrt() * (SIGMAS / bins)
        place = (x - mean) / torch.where(width > 0, width, 1.0)
        codes = (place.floor() + bins // 2).clamp(0, bins - 1)
        # One bin after another: on a GPU, a scatter adds in a different order every time.
        means = []
        for number in range(bins):
            here = codes == number
            # The mean of an empty bin is sent, too: make it 0, not NaN.
            count = here.sum(1).clamp(min=1)
            means.append(torch.where(here, x, 0.0).sum(1) / count)
        return torch.cat((as_bytes(torch.stack(means, 1)), pack_bits(codes, self.bits).flatten()))

    def decode(self, data: Tensor, rows: int, columns: int) -> Tensor:
        if not len(data):
            return torch.empty(rows, columns, device=data.device)
        means, codes = self._split(data, rows, columns)
        return means.gather(1, codes).reshape(rows, columns)


class TopK:
    """The numbers of greatest magnitude of a matrix, in fp32, and their positions, in int32."""

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction

    def _count(self, rows: int, columns: int) -> int:
        return max(1, round(self.fraction * rows * columns)) if rows * columns else 0

    def encode(self, x: Tensor) -> Tensor:
        flat = x.flatten()
        places = flat.abs().topk(self._count(*x.shape)).indices
        return torch.cat((as_bytes(flat[places]), as_bytes(places.int())))

    def decode(self, data: Tensor, rows: int, columns: int) -> Tensor:
        # View all bytes as both types, of four bytes each: values come first, then positions.
        values, places = data.clone().view(torch.float32), data.clone().view(torch.int32)
        count = self._count(rows, columns)
        output = torch.zeros(rows * columns, device=data.device)
        return output.index_copy_(0, places[count:].long(), values[:count]).view(rows, columns)

    def size(self, rows: int, columns: int) -> int:
        return 8 * self._count(rows, columns)


def codec_of(cfg: LowcommConfig) -> Codec:
    if cfg.compress == "top-k":
        return TopK(cfg.top_k)
    if cfg.compress == "none":
        return Raw()
    return {"linear": Linear, "statistical": Statistical}[cfg.compress](
        cfg.bits, cfg.scale == "row"
    )


def is_raw(name: str, ndim: int, cfg: LowcommConfig) -> bool:
    """Return whether a parameter is sent in fp32; one-dimensional parameters are the norms."""
    kind = "norms" if ndim < 2 else "embeddings" if "embed" in name else ""
    return cfg.compress == "none" or (kind or ("output" if "output" in name else "")) in cfg.raw


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes under 2^bits [R, C] into uint8 [R, ceil(C * bits / 8)]; the first code takes the
    lowest bits of a byte."""
    each = 8 // bits
    # Each row fills whole bytes, so that a decoder can split the rows before unpacking them.
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, -codes.shape[1] % each))
    parts = codes.view(len(codes), -1, each)
    output: Tensor = parts[..., 0].clone()
    for i in range(1, each):
        output |= parts[..., i] << (i * bits)
    return output


def unpack_bits(data: Tensor, bits: int) -> Tensor:
    """Unpack to uint8 [R, C], with C a multiple of the codes per byte."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    codes: Tensor = (data.unsqueeze(2) >> shifts) & (2**bits - 1)
    return codes.flatten(1)


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def fp32_rows(data: Tensor, rows: int, columns: int) -> Tensor:
    """View a copy of the bytes as fp32: a direct view needs an offset divisible by four."""
    return data.clone().view(torch.float32).view(rows, columns)
