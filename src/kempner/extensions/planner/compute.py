"""Compute time of a step on a GPU, from the configuration alone. No torch.

A roofline: products reach a share of the peak that grows with their size, attention a share of its
own peak, and everything else the rate of the GPU's memory, unless the host launches it more slowly.
The constants are fitted to published throughput (benchmarks/published.toml); bytes that kernels
move are counted. D width, F SwiGLU width, V vocabulary, T tokens of a sequence.
"""

from __future__ import annotations

import math

from kempner.checkpoint.size import lora_shapes
from kempner.extensions.planner.gpus import GpuSpec
from kempner.extensions.planner.launches import GAP, host_seconds, kernels_of_step
from kempner.extensions.planner.memory import (
    FP32,
    budget_share,
    buffer_share,
    forward_rows,
    fp8_gathered,
    fp8_matrices,
    loss_rows,
    weight_bytes,
    whole_model,
)
from kempner.parallel.layout import Axes, is_alone
from kempner.train.sections import BUDGETS, RunConfig

PRODUCT_HALF = 400.0  # side of a product that reaches half the share of the largest
ATTENTION_HALF = 1700.0  # keys at which attention reaches 0.6 of its share; all of it at 8,500
RING = 0.8  # share of a kernel's speed that is left if keys circulate among the ranks
FP8_PEAK = 2.0  # times bf16's; a product must be as much larger for the same share of it
ROWWISE = (
    0.75  # of the speed of products with a scale per tensor, for finer ones: a row, or 32 numbers
)
FP8_CAST = 5.0  # bytes moved to scale and round a number: read twice in bf16, written once
MEMORY_EFFICIENCY = 0.73  # of the data-sheet rate
EAGER = 3.7  # bytes that kernels move without torch.compile, per byte with it
LOGIT = 4.0  # bytes that the compiled loss moves per logit, besides its products
EAGER_LOGIT = 52.0  # the same without torch.compile


def compute_seconds(cfg: RunConfig, axes: Axes, gpu: GpuSpec) -> dict[str, float]:
    """Seconds of a step by part, for the average rank."""
    tokens = cfg.train.sequences * cfg.train.seq_len / math.prod(axes)
    casts = 0.0 if cfg.train.fp8 == "none" else fp8_casts(cfg, axes, tokens)
    passes = cfg.train.sequences / (forward_rows(cfg, axes.data_ranks) * axes.data_ranks)
    flops, rate = gpu.clock * gpu.flops, MEMORY_EFFICIENCY * gpu.memory
    by_part = {
        "products": product_flops(cfg, axes, tokens, gpu.products) / flops,
        "output layer": output_flops(cfg, axes, tokens, gpu.products) / flops,
        "attention": attention_flops(cfg, axes, tokens, gpu) / flops,
        "other kernels": pointwise_bytes(cfg, axes, tokens) / rate,
        **({"fp8's casts": casts / rate} if casts else {}),
        **({"adapters": adapter_bytes(cfg, axes, tokens) / rate} if cfg.lora.rank else {}),
        "loss": loss_bytes(cfg, axes, tokens, passes) / rate,
        "copies": weight_copy_bytes(cfg, axes, passes) / rate,
        "update": update_bytes(cfg, axes) / rate,
        "gaps": GAP * kernels_of_step(cfg, axes),
    }
    # The host launches kernels ahead of the GPU: only its excess time is a wait.
    waits = host_seconds(cfg, axes) - sum(by_part.values())
    return by_part | ({"launches": waits} if waits > 0 else {})


def product_flops(cfg: RunConfig, axes: Axes, tokens: float, share: float) -> float:
    """Operations of the blocks for `tokens`, as if all ran at the bf16 peak. `share`: of the peak
    that the largest products reach."""
    model, frozen, each = cfg.model, cfg.lora.rank > 0, flops_per_weight(cfg)
    blocks = model.flops_per_token(cfg.train.seq_len, frozen, keys=0.0)
    # This is the output layer: see output_flops().
    blocks -= each * model.vocab_size * model.dim
    # The forward pass has 2 of 6 operations, or of 4 if the weights are frozen.
    again = 1 + recomputed_share(cfg, "products") / (2 if frozen else 3)
    experts = each * expert_weights(cfg) * again
    side, pass_tokens = product_side(cfg, axes), tokens_of_pass(cfg, axes)
    eight = each * again * sum(n * k * often for n, k, often in fp8_matrices(cfg, axes))
    plain = blocks * again - experts - eight
    peak = FP8_PEAK * (ROWWISE if cfg.train.fp8 in ("rowwise", "mxfp8") else 1.0)
    fast = peak * rising_efficiency(share, FP8_PEAK * PRODUCT_HALF, side)
    flops = plain / rising_efficiency(share, PRODUCT_HALF, side) + eight / fast
    if experts:
        # Of one expert: with many experts, so few rows that they limit its products' speed.
        rows = pass_tokens * cfg.distributed.ep * model.experts_per_token / model.n_experts
        inner = min(model.dim, model.ffn_dim / axes.tp, rows)
        flops += experts / rising_efficiency(share, PRODUCT_HALF, inner)
    return tokens * flops


def output_flops(cfg: RunConfig, axes: Axes, tokens: float, share: float) -> float:
    """Operations of the output layer, counted as in product_flops()."""
    efficiency = rising_efficiency(share, PRODUCT_HALF, product_side(cfg, axes))
    return tokens * flops_per_weight(cfg) * cfg.model.vocab_size * cfg.model.dim / efficiency


def flops_per_weight(cfg: RunConfig) -> float:
    """Return 6 per token, or 4 for a frozen weight, which has no gradient."""
    return 4.0 if cfg.lora.rank else 6.0


def product_side(cfg: RunConfig, axes: Axes) -> float:
    """Return the side that limits a product's speed: tensor parallelism cuts one side."""
    return min(cfg.model.dim / math.sqrt(axes.tp), tokens_of_pass(cfg, axes))


def tokens_of_pass(cfg: RunConfig, axes: Axes) -> float:
    return forward_rows(cfg, axes.data_ranks) * cfg.train.seq_len / axes.cp


def expert_weights(cfg: RunConfig) -> float:
    """Number of weights of the chosen experts that a token passes through, in all blocks."""
    model = cfg.model
    if not model.n_experts:
        return 0.0
    return len(model.mixtures) * model.experts_per_token * 3.0 * model.dim * model.ffn_dim


def fp8_casts(cfg: RunConfig, axes: Axes, tokens: float) -> float:
    """Bytes moved by fp8 casts: of a product's input and of the gradient of its output, each along
    rows and along columns. The weights' are negligible."""
    # `tokens` are divided by tp, too, but each tp rank has the whole input of a product.
    widths = sum((n * axes.tp + k) * often for n, k, often in fp8_matrices(cfg, axes))
    return FP8_CAST * 2 * tokens * widths * (1 if cfg.train.compile else EAGER)


def attention_flops(cfg: RunConfig, axes: Axes, tokens: float, gpu: GpuSpec) -> float:
    """Operations of attention for `tokens`, as if all ran at the bf16 peak. The usual formula
    counts the backward pass as twice the forward pass, but it takes 2.5 times the operations at a
    lower rate. Rings, documents, windows and `train.attention = "flash"` use FlashAttention 2."""
    model, length = cfg.model, cfg.train.seq_len
    # Products do not depend on the number of keys, so the difference is attention's.
    flops_per_token = model.flops_per_token(length) - model.flops_per_token(length, keys=0.0)
    ring = axes.cp > 1 and cfg.distributed.cp_method == "ring"
    masked = cfg.data.document_mask or model.sliding_window is not None
    second = ring or masked or cfg.train.attention not in ("auto", "cudnn")
    most = gpu.flash if second else gpu.attention
    share = min(rising_efficiency(1.2 * most, ATTENTION_HALF, length), most)
    share *= math.sqrt(model.resolved_head_dim / 128) * (RING if ring else 1.0)
    # The forward pass takes about a quarter of the time: the backward is over twice as slow.
    return tokens * flops_per_token * (1 + recomputed_share(cfg, "attention") / 4) / share


def rising_efficiency(most: float, half: float, size: float) -> float:
    return most * size / (size + half)


def recomputed_share(cfg: RunConfig, what: str) -> float:
    """Return the share of the forward pass that runs again: of products, attention, or
    the other kernels."""
    train = cfg.train
    if train.recompute in BUDGETS:  # an upper bound: the compiler begins with the cheapest
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
    again if recomputed. Forward, a token reads and writes D for each norm, six times D for the
    residuals, queries and keys for the rotation, and three times F for SwiGLU; experts have their
    inputs and outputs in another order."""
    model = cfg.model
    share = len(model.mixtures) / model.n_layers  # of blocks with experts
    experts = share * model.experts_per_token * buffer_share(cfg)
    inner = model.ffn_dim * (experts + share * model.shared_experts)
    inner += (1 - share) * model.dense_width
    norms = 4 if model.post_norms else 2
    rotated = (model.n_heads + model.kv_heads) * model.resolved_head_dim
    width = (2 * norms + 6 + 4 * experts) * model.dim + 2 * rotated + 3 * inner
    moved = 2.0 * tokens * model.n_layers * width * (3 + recomputed_share(cfg, "other kernels"))
    return moved if cfg.train.compile else EAGER * moved


def adapter_bytes(cfg: RunConfig, axes: Axes, tokens: float) -> float:
    """Bytes that LoRA's narrow products move: each reads its input, adds to its output, and does
    twice as much in the backward pass."""
    shapes, model = lora_shapes(cfg.model), cfg.model
    width = sum(shapes[name][0] + 2 * shapes[name][1] for name in cfg.lora.targets)
    return 2.0 * tokens * model.n_layers * width * (3 + recomputed_share(cfg, "other kernels"))


def loss_bytes(cfg: RunConfig, axes: Axes, tokens: float, passes: float) -> float:
    """Bytes moved by the loss: the logits, and the fp32 gradient of the weight, to which each chunk
    adds a bf16 product."""
    model = cfg.model
    rows = forward_rows(cfg, axes.data_ranks) * cfg.train.seq_len / axes.cp
    chunks = passes * math.ceil(rows / loss_rows(cfg, axes, gpu=True))
    table = model.vocab_size * model.dim / (axes.tp * axes.pp)
    logits = (LOGIT if cfg.train.compile else EAGER_LOGIT) * tokens * model.vocab_size
    return logits + (0 if cfg.lora.rank else (2 * FP32 + 2 * 2) * chunks * table)


def weight_copy_bytes(cfg: RunConfig, axes: Axes, passes: float) -> float:
    """Bytes that FSDP moves on this GPU besides its traffic: a gather casts this rank's part, and
    copies the whole from the buffer; a reduction casts gradients into a buffer, and adds this
    part's sum in fp32. A single rank copies its weights once per step, 6 bytes per parameter, and
    each gradient to its sum, 6 and then 10 bytes."""
    how, n = cfg.distributed, axes.shard * axes.cp
    if is_alone(axes, how):
        copies = 0.0 if cfg.train.weights == "bf16" else 6.0
        # A gradient moves 6 bytes to its sum in the first pass, and 10 in every other pass.
        each = 0.0 if cfg.lora.rank else copies + 10 * passes - 4
        return each * whole_model(cfg, axes)
    # Gather: reads 2 and writes 2 bytes of the whole, 4 and 2 of this part.
    gather, reduce = 4 + 6 / n, 6 + 20 / n
    gather -= (2 + 1 / n) * fp8_gathered(cfg, axes) / whole_model(cfg, axes)  # half the bytes
    often = 1.0 if how.sync_once or not how.reshard_after_forward else 2.0
    gathers = passes * often * gather
    if how.sync_once:
        gathers, reduce = gather, 10 * passes + reduce  # added in place, and reduced once
    else:
        reduce *= passes
    return (gathers + (0 if cfg.lora.rank else reduce)) * whole_model(cfg, axes)


def update_bytes(cfg: RunConfig, axes: Axes) -> float:
    """Bytes moved by the update: weights and state are read and written, gradients are read for the
    norm and for the update."""
    weights = weight_bytes(cfg, axes, gpu=True)
    return 2 * (2 * weights["gradients"] + weights["optimizer"])
