"""Matrix products in 8-bit floats by torchao: the activations, weights and gradients are scaled and
rounded for each product, and everything else stays what it was (arXiv:2209.05433)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from kempner.checkpoint.format.plan import local_part
from kempner.config.option import ConfigError
from kempner.model.decoder import Decoder

LEAST_CAPABILITY = (8, 9)  # of a GPU: Ada, Hopper and later multiply 8-bit floats
FP8_MATRIX_TILE = 16  # both sizes of a matrix are multiples of this, or its kernels refuse it


def use_fp8(model: Decoder, recipe: str, device: torch.device, gathers: bool = False) -> None:
    """Make the projections of all blocks multiply in fp8; embedding and output stay. Call it before
    any other wrapper. `recipe`: torchao's tensorwise or rowwise, the unit of a scale. `gathers`:
    FSDP sends the weights as they are multiplied, which takes one scale a tensor, the same on all
    ranks; each rank keeps its part in fp32.

    Raises ConfigError if the device cannot, or no matrix has a size that its kernels take.
    """
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
    )

    need_fp8(device, recipe)

    def fits(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or name.endswith("router"):  # it compares its scores
            return False
        return not any(n % FP8_MATRIX_TILE for n in local_part(module.weight).shape)

    linear = [module for module in model.blocks.modules() if isinstance(module, nn.Linear)]
    if not any(fits(module, "") for module in linear):
        raise ConfigError(
            f"train.fp8 = {recipe}: no projection has both sizes a multiple of {FP8_MATRIX_TILE}, "
            "which the kernels need; give such a model.dim and model.ffn_dim, or --train.fp8=none"
        )
    config: Any = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, enable_fsdp_float8_all_gather=gathers)
    for block in model.blocks:
        convert_to_float8_training(block, config=config, module_filter_fn=fits)
    if gathers:
        model.register_forward_pre_hook(_compute_scales)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _compute_scales(model: nn.Module, _: Any) -> None:
    """Compute the scales of all weights with one all-reduce, before the first micro-batch of a step
    and outside of steps; otherwise each gather would compute its own. While gradients are summed
    the weights stay as they are."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    within_step = any(parameter.grad is not None for parameter in model.parameters())
    if not (within_step and torch.is_grad_enabled()):
        precompute_float8_dynamic_scale_for_fsdp(model)


def need_fp8(device: torch.device, recipe: str) -> None:
    """Raise ConfigError if the device has no product of 8-bit floats."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY:
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    raise ConfigError(
        f"train.fp8 = {recipe}: {name} does not multiply 8-bit floats; use a GPU of compute "
        f"capability {'.'.join(map(str, LEAST_CAPABILITY))} or higher (Ada, Hopper, Blackwell), or "
        "--train.fp8=none"
    )
