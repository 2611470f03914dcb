"""Compute time of a step on a GPU, from the configuration alone. No torch.

A roofline: products run at a share of the peak that grows with their size, attention at a share of
its own, and all else at the rate of the GPU's memory. The constants are estimates for Hopper, from
what cuBLAS, cuDNN and compiled kernels reach there; no GPU has confirmed them. D width, F SwiGLU
width, V vocabulary, E head width, T tokens of a sequence.
"""

from __future__ import annotations

import math

from kempner.extensions.planner.memory import (
    FP32,
    budget_share,
    forward_rows,
    loss_rows,
    weight_bytes,
    whole_model,
)
from kempner.parallel.layout import Axes, is_alone
from kempner.train.checks import FP8_TILE
from kempner.train.sections import BUDGETS, RunConfig

PRODUCT_EFFICIENCY = (0.69, 500.0)  # of the peak, as the sides grow; half of it at this side
ATTENTION_EFFICIENCY = (
    0.62,
    1700.0,
    0.52,
)  # of the peak, as T grows; half of it at this T; the most
FP8_PEAK = 2.0  # of that of bf16; a product must be as much larger for the same share of it
FP8_CAST = 5.0  # bytes that scaling and rounding a number move: read twice in bf16, written once
BY_LENGTH = 0.6  # of that, for the kernel that skips what documents and windows hide
MEMORY_EFFICIENCY = 0.73  # of the rate of the data sheet
EAGER = 4.0  # bytes that kernels move without torch.compile, for one with it
LOGIT = 22.0  # bytes that the compiled loss moves for each logit, beside its products
GAP = 2.5e-4  # seconds for each block of a pass: launches, hooks, gaps between kernels
COMMUNICATION_SLOWDOWN = (
    1.08  # NCCL takes multiprocessors, and the first gathers hide behind nothing
)


def compute_seconds(
    cfg: RunConfig, axes: Axes, world_size: int, peak: float, rate: float
) -> dict[str, float]:
    """Seconds of a step by part, on the average rank. `peak`: operations per second in bf16;
    `rate`: bytes per second of the memory, both of the data sheet."""
    tokens = cfg.train.sequences * cfg.train.seq_len / world_size
    casts = 0.0 if cfg.train.fp8 == "none" else fp8_casts(cfg, axes, tokens)
    passes = cfg.train.sequences / (forward_rows(cfg, axes.data_ranks) * axes.data_ranks)
    by_part = {
        "products": product_flops(cfg, axes, tokens) / peak,
        "attention": attention_flops(cfg, tokens) / peak,
        "other kernels": pointwise_bytes(cfg, axes, tokens) / (MEMORY_EFFICIENCY * rate),
        **({"fp8's casts": casts / (MEMORY_EFFICIENCY * rate)} if casts else {}),
        "loss": loss_bytes(cfg, axes, tokens, passes) / (MEMORY_EFFICIENCY * rate),
        "copies": weight_copy_bytes(cfg, axes, passes) / (MEMORY_EFFICIENCY * rate),
        "update": update_bytes(cfg, axes) / (MEMORY_EFFICIENCY * rate),
        "gaps": GAP * cfg.model.n_layers / axes.pp * passes,
    }
    shared = COMMUNICATION_SLOWDOWN if world_size > 1 else 1.0
    return {name: seconds * shared for name, seconds in by_part.items()}


def product_flops(cfg: RunConfig, axes: Axes, tokens: float) -> float:
    """Operations for `tokens`, as if all ran at the peak of bf16."""
    model, frozen = cfg.model, cfg.lora.rank > 0
    flops_per_token = model.flops_per_token(cfg.train.seq_len, frozen, keys=0.0)
    output = (4.0 if frozen else 6.0) * model.vocab_size * model.dim
    again = (flops_per_token - output) / (2 if frozen else 3) * recomputed_share(cfg, "products")
    pass_tokens = forward_rows(cfg, axes.data_ranks) * cfg.train.seq_len / axes.cp
    side = min(model.dim / math.sqrt(axes.tp), pass_tokens)
    in_fp8 = (
        6.0
        * sum(n * k * often for n, k, often in fp8_matrices(cfg, axes))
        / (flops_per_token - output)
    )
    eight = in_fp8 * (flops_per_token - output + again)
    most, half = PRODUCT_EFFICIENCY
    fast = FP8_PEAK * rising_efficiency(most, FP8_PEAK * half, side)
    return tokens * (
        (flops_per_token + again - eight) / rising_efficiency(most, half, side) + eight / fast
    )


def fp8_matrices(cfg: RunConfig, axes: Axes) -> list[tuple[int, int, int]]:
    """Width in, width out and number of the matrices that train.fp8 multiplies in 8-bit floats:
    those of the blocks, but experts, routers, and what has a part with sizes that are not multiples
    of 16 (parallel/fp8.py)."""
    if cfg.train.fp8 == "none":
        return []
    model, mixtures = cfg.model, len(cfg.model.mixtures)
    head, dense = model.resolved_head_dim, model.n_layers - mixtures
    shapes = [
        (model.dim, model.n_heads * head, 2 * model.n_layers),
        (model.dim, model.kv_heads * head, 2 * model.n_layers),
        (model.dim, model.dense_width, 3 * dense),
        (model.dim, model.ffn_dim * model.shared_experts, 3 * mixtures),
    ]
    tile = FP8_TILE
    return [shape for shape in shapes if shape[0] % tile == 0 and shape[1] // axes.tp % tile == 0]


def fp8_casts(cfg: RunConfig, axes: Axes, tokens: float) -> float:
    """Bytes moved by fp8 casts: a product's input and the gradient of its output, twice each, along
    their rows and their columns. The weights' are negligible."""
    widths = sum((n * axes.tp + k) * often for n, k, often in fp8_matrices(cfg, axes))
    return FP8_CAST * 2 * tokens * widths * (1 if cfg.train.compile else EAGER)


def attention_flops(cfg: RunConfig, tokens: float) -> float:
    """Operations of attention for `tokens`, as if all ran at the peak of bf16. The backward pass
    counts as twice the forward pass in the usual formula, but takes 2.5 times its operations at a
    lower rate."""
    model, length = cfg.model, cfg.train.seq_len
    flops_per_token = model.flops_per_token(length) - model.flops_per_token(length, keys=0.0)
    most, half, limit = ATTENTION_EFFICIENCY
    share = min(rising_efficiency(most, half, length), limit) * math.sqrt(
        model.resolved_head_dim / 128
    )
    if cfg.data.document_mask or model.sliding_window is not None:
        share *= BY_LENGTH
    return tokens * flops_per_token * (1 + recomputed_share(cfg, "attention") / 4) / share


def rising_efficiency(most: float, half: float, size: float) -> float:
    return most * size / (size + half)


def recomputed_share(cfg: RunConfig, what: str) -> float:
    """Return the share of the forward pass that runs again: of products, attention, or the other
    kernels."""
    train = cfg.train
    if train.recompute in BUDGETS:  # at most: the compiler begins with what is cheapest
        return 1 - budget_share(train.recompute)
    if train.recompute == "none" or (train.recompute == "selective" and what != "other kernels"):
        return 0.0
    if not (modules := train.recompute_modules):
        return 1 / train.recompute_every
    model = cfg.model
    ffn = 3 * model.ffn_dim * model.dim
    projections = 2 * model.dim * model.resolved_head_dim * (model.n_heads + model.kv_heads)
    shares = {"ffn": ffn, "attention": projections}
    if what == "attention":
        return float("attention" in modules)
    return sum(shares.get(name, 0) for name in modules) / sum(shares.values())


def pointwise_bytes(cfg: RunConfig, axes: Axes, tokens: float) -> float:
    """Bytes that norms, rotation, SwiGLU and residuals move: forward, twice as many backward, and
    again where they are computed again. Forward a token reads and writes D for each norm, six times
    D for the residuals, queries and keys for the rotation, and three times F for SwiGLU; an expert
    has its input and output in another order."""
    model = cfg.model
    experts = model.experts_per_token if model.n_experts else 0
    inner = model.ffn_dim * (experts + model.shared_experts if experts else 1)
    norms = 4 if model.post_norms else 2
    rotated = (model.n_heads + model.kv_heads) * model.resolved_head_dim
    width = (2 * norms + 6 + 4 * experts) * model.dim + 2 * rotated + 3 * inner
    moved = 2.0 * tokens * model.n_layers * width * (3 + recomputed_share(cfg, "other kernels"))
    return moved if cfg.train.compile else EAGER * moved


def loss_bytes(cfg: RunConfig, axes: Axes, tokens: float, passes: float) -> float:
    """Bytes moved by the loss: the logits, and the weight's gradient in fp32, which each chunk adds
    to."""
    model = cfg.model
    rows = forward_rows(cfg, axes.data_ranks) * cfg.train.seq_len / axes.cp
    chunks = passes * math.ceil(rows / loss_rows(cfg))
    table = model.vocab_size * model.dim / (axes.tp * axes.pp)
    logits = LOGIT * tokens * model.vocab_size * (1 if cfg.train.compile else EAGER)
    return logits + (0 if cfg.lora.rank else 2 * FP32 * chunks * table)


def weight_copy_bytes(cfg: RunConfig, axes: Axes, passes: float) -> float:
    """Bytes that FSDP moves on this GPU besides what it sends: to gather, this rank's part is cast,
    and the whole is copied from the buffer; to reduce, gradients are cast into a buffer, and the
    sum of this part is added in fp32. One rank alone copies its weights once a step, 6 bytes a
    parameter, and each gradient to its sum, 6 and then 10 bytes."""
    how, n = cfg.distributed, axes.shard * axes.cp
    if is_alone(axes, how):
        copies = 0.0 if cfg.train.weights == "bf16" else 6.0
        each = 0.0 if cfg.lora.rank else copies + 10 * passes - 4
        return each * whole_model(cfg, axes)
    gather, reduce = 4 + 6 / n, 6 + 20 / n
    often = 1.0 if how.sync_once or not how.reshard_after_forward else 2.0
    gathers = passes * often * gather
    if how.sync_once:
        gathers, reduce = gather, 10 * passes + reduce  # added where they are, and reduced once
    else:
        reduce *= passes
    return (gathers + (0 if cfg.lora.rank else reduce)) * whole_model(cfg, axes)


def update_bytes(cfg: RunConfig, axes: Axes) -> float:
    """Bytes moved by the update: weights and state are read and written, gradients read for the
    norm and the update."""
    weights = weight_bytes(cfg, axes, gpu=True)
    return 2 * (2 * weights["gradients"] + weights["optimizer"])
