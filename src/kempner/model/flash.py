"""FlashAttention 3 and 4: packages that torch 2.11 and later can run instead of the built-in
FlashAttention 2, for causal attention, variable-length attention, and so the ring's.

Loaded only if they may run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import attention

from kempner.config.option import ConfigError
from kempner.model.attention import Visible, attend, varlen_kernel
from kempner.model.config import ModelConfig

MAJORS = {"fa3": (9,), "fa4": (9, 10)}  # compute capabilities of their GPUs
OF_GPU = {9: "fa3", 10: "fa4"}  # auto's choice on Hopper and Blackwell
PROBE_TOKENS = 128
NOT_THERE = "its package is not installed; leave it at auto"


def use_newer_flash(
    kernel: str,
    cfg: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool,
    by_length: bool,
) -> str:
    """Let torch's flash operators run FlashAttention 3 or 4 in this whole process: `kernel`, or
    with auto the one for this GPU, if it is installed and takes this model's heads. `by_length`:
    rows are windows or several documents. Returns what the log adds to the kernel's name.

    Not used with `deterministic` kernels: the packages' backward passes sum in their own order.
    Raises ConfigError if the chosen one cannot run.
    """
    cuda = device.type == "cuda"
    major = torch.cuda.get_device_capability(device)[0] if cuda else 0
    chosen = kernel if kernel in MAJORS else OF_GPU.get(major, "")
    # With auto, an older torch keeps its own kernel; a named one raises an error below.
    if not chosen or (kernel != chosen and not hasattr(attention, "activate_flash_attention_impl")):
        return ""
    name = f"FlashAttention {chosen[-1]}"
    if deterministic:
        return f", without {name}: train.deterministic"
    if major in MAJORS[chosen]:
        why = _activate(chosen.upper(), cfg, dtype, device, by_length)
    else:
        found = torch.cuda.get_device_name(device) if cuda else "a CPU"
        why = f"{found} does not run it; leave it at auto"
    if why and kernel == chosen:
        raise ConfigError(f"train.attention = {kernel}: {why}")
    if why == NOT_THERE:
        return ""
    return f", without {name}: {why}" if why else f", {name}"


def _activate(
    name: str, cfg: ModelConfig, dtype: torch.dtype, device: torch.device, by_length: bool
) -> str | None:
    """Try the kernel on a few tokens, because the packages and torch's calls to them change
    independently. On failure, returns the error and restores torch's own kernel."""
    switch: Any = attention
    try:
        switch.activate_flash_attention_impl(name)
        _probe(cfg, dtype, device, by_length)
    except Exception as error:  # a package may raise anything
        # Not every torch that can switch can switch back.
        if hasattr(switch, "restore_flash_attention_impl"):
            switch.restore_flash_attention_impl()
        missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        # Any other missing module is a fault of the package, and reported as such.
        if missing.startswith("flash_attn"):
            return NOT_THERE
        return f"it does not run here ({type(error).__name__}: {error}); leave it at auto"
    return None


def _probe(cfg: ModelConfig, dtype: torch.dtype, device: torch.device, by_length: bool) -> None:
    """Run attention of one row forward and backward, with the operators that the model calls."""
    q, k = (
        torch.zeros(
            (1, heads, PROBE_TOKENS, cfg.resolved_head_dim),
            device=device,
            dtype=dtype,
            requires_grad=True,
        )
        for heads in (cfg.n_heads, cfg.kv_heads)
    )
    if by_length:
        starts = torch.tensor([0, PROBE_TOKENS // 2, PROBE_TOKENS], device=device).int()
        window = PROBE_TOKENS // 4 if cfg.sliding_window else None
        y = attend(q, k, k, Visible(window, starts=starts, kernel=varlen_kernel()))
    else:  # SDPA may choose another kernel than flash
        y = torch.ops.aten._scaled_dot_product_flash_attention(q, k, k, is_causal=True)[0]
    if not all(x.isfinite().all() for x in torch.autograd.grad(y.sum(), (q, k))):
        raise ArithmeticError("gradients of zeros are not finite")
