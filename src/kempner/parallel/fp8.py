"""Matrix products in 8-bit floats by torchao: activations, weights and gradients are scaled and
rounded for each product, and everything else is unchanged (arXiv:2209.05433). mxfp8: with a scale
for each 32 numbers of a row or column (arXiv:2310.10537)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kempner.checkpoint.format.plan import local_part
from kempner.config.option import ConfigError
from kempner.model.decoder import Decoder
from kempner.model.moe import ExpertRouter

LEAST_CAPABILITY = (8, 9)  # of a GPU: Ada, Hopper and later multiply 8-bit floats
FP8_MATRIX_TILE = 16  # the kernels need both sizes of a matrix to be multiples of this
MX_BLOCK = 32  # numbers with one scale; both sizes are multiples of this
LEAST_MXFP8 = (10, 0)  # Blackwell has scales within a row


def use_fp8(model: Decoder, fp8: str, device: torch.device, gathers: bool = False) -> None:
    """Make the projections of all blocks multiply in fp8; embedding and output stay. Call it before
    any other wrapper. `fp8`: the option's value, which begins with torchao's recipe. `gathers`:
    FSDP sends the weights as 8-bit floats, which needs one scale per tensor, the same on all ranks;
    each rank keeps its part in fp32.

    Raises ConfigError if the device cannot, or no matrix has a size that the kernels take.
    """
    need_fp8(device, fp8)
    tile = MX_BLOCK if fp8 == "mxfp8" else FP8_MATRIX_TILE

    def fits(module: nn.Module, name: str = "") -> bool:
        # A router compares its scores in fp32.
        if not isinstance(module, nn.Linear) or isinstance(module, ExpertRouter):
            return False
        return not any(n % tile for n in local_part(module.weight).shape)

    linear = [module for module in model.blocks.modules() if isinstance(module, nn.Linear)]
    if not any(fits(module) for module in linear):
        raise ConfigError(
            f"train.fp8 = {fp8}: no projection has both sizes a multiple of {tile}, "
            "which the kernels need; give suitable model.dim and model.ffn_dim, or --train.fp8=none"
        )
    if fp8 == "mxfp8":
        use_mxfp8([module for module in linear if fits(module)], device)
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config: Any = Float8LinearConfig.from_recipe_name(fp8.split("_")[0])
    config = replace(config, enable_fsdp_float8_all_gather=gathers)
    for block in model.blocks:
        convert_to_float8_training(block, config=config, module_filter_fn=fits)
    if gathers:
        model.register_forward_pre_hook(_compute_scales)


class MxLinear(nn.Linear):
    """A linear layer whose three products are those of mxfp8."""

    product: Callable[[Tensor, Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x, self.weight)
        return y if self.bias is None else y + self.bias


def use_mxfp8(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Make linear layers multiply in mxfp8, emulated on devices other than GPUs. Raises ConfigError
    if the installed torchao cannot."""
    try:
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm
        from torchao.prototype.mx_formats.config import (
            MXFP8Dim0CastKernelChoice as Rows,
        )
        from torchao.prototype.mx_formats.config import (
            MXFP8Dim1CastKernelChoice as Columns,
        )
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.quantization.quantize_.common import KernelPreference
    except ImportError as error:
        raise ConfigError(
            f"train.fp8 = mxfp8: this torchao has no mxfp8 products ({error}); install torchao "
            "0.18, as .venv/bin/pip install -c constraints.txt -e '.[fp8]' does"
        ) from error
    kernels = KernelPreference.AUTO if device.type == "cuda" else KernelPreference.EMULATED
    # Columns by Triton: torchao's own kernel is compiled for a single version of Python.
    how = kernels, Rows.TRITON, Columns.TRITON, ScaleCalculationMode.RCEIL, False
    kind = torch.float8_e4m3fn

    def product(x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = mx_mm.apply(x, weight, kind, kind, kind, MX_BLOCK, *how)
        return y

    for module in modules:
        # Only the class changes: parameters, their names and hooks stay.
        module.__class__ = MxLinear
        module.product = product  # type: ignore[assignment]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _compute_scales(model: Any, _: Any) -> None:
    """Compute the scales of all weights with one all-reduce, before the first micro-batch of a step
    and outside of steps; otherwise each gather would compute its own."""
    from torch.distributed.fsdp import FSDPModule
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    # Gradients do not tell: between replicas FSDP holds a step's sums back until its last pass.
    unchanged, model.unchanged = model.unchanged, False
    if unchanged and torch.is_grad_enabled():
        return
    precompute_float8_dynamic_scale_for_fsdp(model)
    if isinstance(model, FSDPModule):
        # FSDP's hook ran before this one: its stream, which rounds the first block's weights, has
        # not waited for the scales.
        state = model._get_fsdp_state()
        state._comm_ctx.all_gather_copy_in_stream.wait_stream(state._device_handle.current_stream())


def need_fp8(device: torch.device, fp8: str) -> None:
    """Raise ConfigError if the device has no product of 8-bit floats, or none with the
    scales of mxfp8."""
    mx = fp8 == "mxfp8"
    least = LEAST_MXFP8 if mx else LEAST_CAPABILITY
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= least:
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    scaled = " with a scale for each 32 numbers" if mx else ""
    families = "Blackwell" if mx else "Ada, Hopper, Blackwell"
    raise ConfigError(
        f"train.fp8 = {fp8}: {name} does not multiply 8-bit floats{scaled}; use a GPU of "
        f"compute capability {'.'.join(map(str, least))} or higher ({families}), or "
        "--train.fp8=none"
    )
