"""Memory of one GPU by part, from the configuration alone. No torch.

Counts what the trainer holds at the moments of greatest use; benchmarks/planner.py compares it with
measured peaks. D width, F SwiGLU width, V vocabulary, tokens: of one forward pass of a rank. Axes
are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kempner.checkpoint import size
from kempner.extensions.lowcomm.config import LowcommConfig
from kempner.parallel.layout import Axes, axis_sizes, is_alone
from kempner.train import lookup
from kempner.train.levers import fp8_tile
from kempner.train.sections import BUDGETS, RunConfig, micro_batch

GIB = 2.0**30
FP32 = 4


@dataclass(frozen=True)
class Memory:
    """Bytes by part, at the moment when their sum is largest."""

    moment: str
    parts: dict[str, float]

    @property
    def peak(self) -> float:
        return sum(self.parts.values())


def estimate_memory(cfg: RunConfig, world_size: int, per_node: int, gpu: bool = True) -> Memory:
    """Estimate the memory of the rank that needs most. `gpu`: on a GPU, where auto means bf16.
    Raises ConfigError if axes or batch do not fit the world."""
    cfg, world_size, per_node = one_replica(cfg, world_size, per_node)
    return max(memory_peaks(cfg, world_size, per_node, gpu), key=lambda moment: moment.peak)


def one_replica(cfg: RunConfig, world_size: int, per_node: int) -> tuple[RunConfig, int, int]:
    """Return the configuration, ranks and ranks per node of one replica (lowcomm/): its share of
    the batch and of the ranks. Raises ConfigError if they cannot be shared equally."""
    replicas = cfg.of(LowcommConfig).count(world_size, per_node)
    if replicas == 1:
        return cfg, world_size, per_node
    share, ranks = cfg.train.sequences // replicas, world_size // replicas
    train = replace(cfg.train, global_batch=share, global_batch_tokens=None)
    return replace(cfg, train=train), ranks, min(per_node, ranks)


def forward_rows(cfg: RunConfig, data_ranks: int) -> int:
    """Sequences in one forward pass of a rank; an upper bound if an extension brings the batches.
    Raises ConfigError: see micro_batch."""
    if lookup.bringer(cfg):
        return cfg.train.micro_batch or -(-cfg.train.sequences // data_ranks)
    return micro_batch(cfg.train, data_ranks, cfg.train.sequences)


def memory_peaks(cfg: RunConfig, world_size: int, per_node: int, gpu: bool) -> list[Memory]:
    """Peaks: the loss (all activations, no gradient of this forward pass yet), the backward pass of
    the last block, that of the first parameters, the update, and the outer step of replicas."""
    axes = axis_sizes(cfg.distributed, world_size, per_node)
    micro = forward_rows(cfg, axes.data_ranks)
    tokens = micro * cfg.train.seq_len // axes.cp
    often = cfg.train.sequences > micro * axes.data_ranks  # gradients of earlier forward passes
    weights = weight_bytes(cfg, axes, gpu)
    compute = compute_bytes(cfg, gpu)
    gathered = Gathered.of(cfg, axes, compute)
    saved, working = block_activation_bytes(cfg, axes, tokens, compute, gpu)
    loss = loss_memory(cfg, axes, tokens, compute, gpu)
    # Each moment below has its own gradients, and all of the remaining parts.
    gradients = weights.pop("gradients")
    so_far = gradients if often else 0.0
    if often and cfg.train.weights == "bf16":  # then summed in fp32
        so_far *= FP32 / 2
    alone = is_alone(axes, cfg.distributed)
    if often and cfg.distributed.sync_once and not cfg.lora.rank and not alone:
        # Gradients are reduced after the last pass; until then each rank holds them whole.
        so_far = FP32 * whole_model(cfg, axes)
    stream = cfg.model.dim * tokens * compute / axes.tp
    ends = 2 * stream  # the input of the last norm, and its output
    if axes.pp > 1:
        weights["pipeline buffers"] = pipeline_buffers(cfg, axes, micro, stream)
    at_rest = dict(weights)
    if in_flight := changes_in_flight(cfg, axes, world_size, per_node):
        weights["changes in flight"] = in_flight
    return [
        Memory("loss", {
            **weights, "gradients": so_far, "gathered weights": gathered.root + gathered.stays,
            "activations": saved + ends, "loss": loss,
        }),
        Memory("backward pass of the last block", {
            **weights, "gradients": so_far or gathered.head_gradient,
            "gathered weights": gathered.tied + max(gathered.blocks, gathered.stays),
            "activations": saved + 2 * stream, "backward pass": working + gathered.reduced,
        }),
        Memory("end of the backward pass", {
            **weights, "gradients": gradients + gathered.root_gradients,
            "gathered weights": gathered.tied, "backward pass": stream,
        }),
        Memory("update", {**weights, "gradients": gradients}),
        Memory("outer step", {**at_rest, "changes on their way": changes_on_their_way(cfg, axes)}),
    ]  # fmt: skip


def compute_bytes(cfg: RunConfig, gpu: bool) -> int:
    return 2 if cfg.train.dtype == "bf16" or (cfg.train.dtype == "auto" and gpu) else FP32


def weight_bytes(cfg: RunConfig, axes: Axes, gpu: bool) -> dict[str, float]:
    """Bytes of the model that a rank keeps between steps. Offloaded parts are not counted for a
    GPU; on a CPU they stay in the same memory."""
    count = float(cfg.model.count_parameters())
    width = 2 if cfg.train.weights == "bf16" else FP32
    if cfg.lora.rank:
        adapters = FP32 * trained_elements(cfg)
        # The base is frozen in bf16 (parallel/lora.py).
        state = {"weights": 2 * count + adapters, "gradients": adapters}
    else:
        state = {"weights": width * count, "gradients": width * count}
    state["optimizer"] = optimizer_state(cfg)
    if cfg.of(LowcommConfig).on:
        state["anchors, outer momentum"] = outer_state(cfg)
    if gpu and cfg.distributed.fsdp_cpu_offload:
        return dict.fromkeys(state, 0.0)
    if gpu and cfg.optimizer.cpu_offload:
        state["optimizer"] = 0.0
    if is_alone(axes, cfg.distributed):
        state["compute copies"] = copy_bytes(cfg, compute_bytes(cfg, gpu))
    cuts = axes.pp * axes.shard * axes.cp * axes.tp
    return {name: whole / cuts for name, whole in state.items()}


def copy_bytes(cfg: RunConfig, compute: int) -> float:
    """Bytes of the copies that a single rank keeps in the compute dtype if its weights have
    another dtype (parallel/single.py)."""
    everything, trained = float(cfg.model.count_parameters()), trained_elements(cfg)
    in_bf16 = everything if cfg.lora.rank or cfg.train.weights == "bf16" else 0.0
    in_fp32 = trained if cfg.lora.rank or not in_bf16 else 0.0
    return compute * (in_bf16 if compute == FP32 else in_fp32)


def trained_elements(cfg: RunConfig) -> float:
    """Number of trained elements of the whole model."""
    return size.trained_parameters(cfg.model, cfg.lora)


def optimizer_state(cfg: RunConfig) -> float:
    """Bytes of the rule's state for all trained elements."""
    return size.optimizer_bytes(cfg.model, cfg.lora, cfg.optimizer)


def outer_state(cfg: RunConfig) -> float:
    """fp32 copies of trained elements: anchors, momentum, and the errors of coded elements."""
    how = cfg.of(LowcommConfig)
    coded = trained_elements(cfg) - raw_numbers(cfg) if how.feedback else 0.0
    return FP32 * ((2 if how.momentum else 1) * trained_elements(cfg) + coded)


def changes_on_their_way(cfg: RunConfig, axes: Axes) -> float:
    """Bytes of a fragment in exchange: the data sent, and what they come from or become."""
    if not cfg.of(LowcommConfig).on:
        return 0.0
    return (
        2
        * FP32
        * trained_elements(cfg)
        / (axes.shard * axes.cp * axes.tp)
        / cfg.of(LowcommConfig).fragments
    )


def changes_in_flight(cfg: RunConfig, axes: Axes, world_size: int, per_node: int) -> float:
    """Bytes of a fragment that is in exchange while the replicas train on (lowcomm.tau): its
    changes, or this replica's codes, and in mode = mesh a buffer for those of each."""
    how = cfg.of(LowcommConfig)
    if not how.on or not how.tau:
        return 0.0
    numbers = trained_elements(cfg) / (axes.shard * axes.cp * axes.tp) / how.fragments
    codes = how.compress != "none" and how.mode == "mesh"
    buffers = 1 + how.count(world_size, per_node) if codes else 1
    return buffers * sent_bytes(cfg) * numbers


def sent_bytes(cfg: RunConfig) -> float:
    """Bytes that replicas send for each element, on average, without the ranges of the codes."""
    how, raw = cfg.of(LowcommConfig), raw_numbers(cfg) / trained_elements(cfg)
    if how.compress == "none":
        return FP32
    # Each of the largest numbers is sent with its position, in int32.
    code = 2 * FP32 * how.top_k if how.compress == "top-k" else how.bits / 8
    return FP32 * raw + code * (1 - raw)


def raw_numbers(cfg: RunConfig) -> float:
    """Number of elements that replicas exchange in fp32 even if the others are coded;
    norms are few."""
    table, raw = cfg.model.vocab_size * cfg.model.dim, cfg.of(LowcommConfig).raw
    output = "output" in raw and not cfg.model.tie_embeddings
    return 0.0 if cfg.lora.rank else float(table * (("embeddings" in raw) + output))


@dataclass(frozen=True)
class Gathered:
    """Memory that fully_shard adds: whole weights in the compute dtype, and gradients in reduction.
    For a single rank, which gathers nothing: the gradients in flight."""

    root: float  # last norm and output layer; if tied, whole from the first block on
    tied: float  # the part that stays through the backward pass: a tied embedding
    blocks: float  # the active block and the next one
    stays: float  # of all blocks, between forward and backward pass
    head_gradient: float  # of the output layer, which is reduced first
    root_gradients: float
    reduced: float  # gradients of a block, and the fp32 buffers for their sums

    @classmethod
    def of(cls, cfg: RunConfig, axes: Axes, compute: int) -> Gathered:
        model, how = cfg.model, cfg.distributed
        table = model.vocab_size * model.dim / axes.tp
        if is_alone(axes, how):
            return cls.of_one(cfg, compute)
        root = table  # an untied embedding is freed before the output layer is gathered
        block = max(kept_of_blocks(cfg, axes))
        reduce = 0 if cfg.lora.rank else compute + FP32
        # In elements of the compute dtype: an 8-bit float is a fraction of one.
        less = (1 - 1 / compute) * fp8_gathered(cfg, axes)
        at_work = block - less * axes.pp / model.n_layers
        blocks = at_work * (1 if axes.shard * axes.cp == 1 else 2)
        stays = 0.0
        if how.sync_once or not how.reshard_after_forward:
            stays = whole_model(cfg, axes) - less - table  # also the embedding, if untied
        elif how.reshard_island is not None:
            stays = (whole_model(cfg, axes) - less) / how.reshard_island
        return cls(
            root=compute * root,
            tied=compute * root * model.tie_embeddings,
            blocks=compute * blocks,
            stays=compute * stays,
            head_gradient=0.0 if cfg.lora.rank else compute * table,
            root_gradients=reduce * root,
            # One block's gradients are reduced over the ranks while the next block's are computed.
            reduced=reduce * block * (1 if axes.shard * axes.cp * axes.replicate == 1 else 2),
        )

    @classmethod
    def of_one(cls, cfg: RunConfig, compute: int) -> Gathered:
        """A gradient is added to those of earlier passes as soon as it is computed."""
        table = 0.0 if cfg.lora.rank else float(cfg.model.vocab_size * cfg.model.dim)
        # Among a block's transient gradients, those of SwiGLU's matrices are the largest.
        matrix = 0.0 if cfg.lora.rank else float(cfg.model.dim * cfg.model.ffn_dim)
        own = 2 if cfg.train.weights == "bf16" else FP32
        passing = compute * table if compute != own else 0.0
        return cls(0.0, 0.0, 0.0, 0.0, own * table, passing, compute * matrix)


def whole_model(cfg: RunConfig, axes: Axes) -> float:
    """Parameters of a stage that FSDP would gather on a rank, with embedding and output."""
    model = cfg.model
    tables = model.vocab_size * model.dim / axes.tp * (2 - model.tie_embeddings)
    with_experts, without = kept_of_blocks(cfg, axes)
    mixtures = len(model.mixtures)
    blocks = mixtures * with_experts + (model.n_layers - mixtures) * without
    return tables + blocks / axes.pp


def fp8_matrices(cfg: RunConfig, axes: Axes) -> list[tuple[int, int, int]]:
    """Width in, width out and number of the matrices that train.fp8 multiplies in 8-bit floats:
    those of the blocks, except experts, routers, and any with a part whose sizes are not multiples
    of its tile (parallel/fp8.py)."""
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
    tile = fp8_tile(cfg.train.fp8)
    return [shape for shape in shapes if shape[0] % tile == 0 and shape[1] // axes.tp % tile == 0]


def fp8_gathered(cfg: RunConfig, axes: Axes) -> float:
    """Number of a stage's elements that FSDP gathers as 8-bit floats."""
    if not cfg.train.fp8.endswith("gather") or cfg.lora.rank or axes.shard * axes.cp == 1:
        return 0.0
    return sum(n * k * often for n, k, often in fp8_matrices(cfg, axes)) / axes.pp


def kept_of_blocks(cfg: RunConfig, axes: Axes) -> tuple[float, float]:
    """Parameters of a block that FSDP gathers on a rank, with experts (only the rank's own) and
    without; 0 if the model has no such block."""
    model, mixtures = cfg.model, len(cfg.model.mixtures)
    experts = model.n_experts * 3 * model.dim * model.ffn_dim
    with_experts = model.count_block(True) - experts * (1 - 1 / cfg.distributed.ep)
    without = model.count_block(False) / axes.tp
    return (
        with_experts / axes.tp if mixtures else 0.0,
        without if mixtures < model.n_layers else 0.0,
    )


def block_activation_bytes(
    cfg: RunConfig, axes: Axes, tokens: int, compute: int, gpu: bool
) -> tuple[float, float]:
    """Return the bytes that the backward pass of all blocks needs, and the extra bytes of one block
    while its backward runs.

    Kept per block, eager: the stream before attention and SwiGLU, and after each norm (4 D); q, k,
    v and the output of attention; four of SwiGLU's inner width (both products, the gate, and their
    product). Compiled, only the gate is recomputed: inputs of products are kept, because they would
    have to be written again (torch/_functorch/partitioners.py, of ban_recompute_*). A product in
    8-bit floats with one scale per tensor reads a cast, so the norms and SwiGLU's product are
    recomputed, too. A CPU has no fused RMSNorm, and keeps its input. With post_norms the outputs of
    attention and SwiGLU are kept, too. Tensor parallelism divides everything except the whole
    inputs of attention, SwiGLU and experts. A pipeline stage has only its layers, for as many
    passes as there are stages. Each of a token's experts needs what SwiGLU needs, and its input and
    output once more, in expert order.
    """
    model, width = cfg.model, cfg.model.resolved_head_dim
    heads = 2 * (model.n_heads + model.kv_heads) * width
    share = len(model.mixtures) / model.n_layers  # for the mean of blocks with and without experts
    chosen = model.experts_per_token * buffer_share(cfg)
    experts = share * chosen
    inner = model.ffn_dim * (experts + share * model.shared_experts)
    inner += (1 - share) * model.dense_width
    moved = 2 * experts * model.dim
    norms = 4 if model.post_norms else 2
    fused = gpu or cfg.train.compile
    gates = 3 if cfg.train.compile else 4  # of SwiGLU's inner width
    swiglu = gates * inner
    block: float = (2 + norms * (1 if fused else 2)) * model.dim
    if cfg.train.compile and cfg.train.fp8.startswith("tensorwise"):
        block -= 2 * model.dim
        swiglu -= (1 - share) * model.dense_width  # experts stay in bf16
    block += heads + swiglu + moved
    whole = (2 * model.dim + moved) * (1 - 1 / axes.tp)
    per_block = tokens * compute * (block / axes.tp + whole)
    most = 2 * inner + moved
    # If blocks with and without experts alternate, the block that needs most decides.
    if share:
        widest = model.ffn_dim * (chosen + model.shared_experts)
        most = 2 * max(widest + chosen * model.dim, (share < 1) * model.dense_width)
    working = tokens * compute * (most + 2 * model.dim) / axes.tp
    blocks = model.n_layers / axes.pp * passes_under_way(cfg, axes)
    train, again = cfg.train, blocks / cfg.train.recompute_every
    dropped = 0.0  # of a block that is recomputed
    if train.recompute_modules:  # the inside of these; their inputs are outputs of others
        within = {"attention": heads, "ffn": swiglu + moved}
        if train.recompute == "selective":
            within = {"ffn": swiglu - 2 * inner}
        dropped = sum(within.get(name, 0) for name in train.recompute_modules) / axes.tp
        dropped *= tokens * compute
    elif train.recompute in BUDGETS:
        dropped = (1 - budget_share(train.recompute)) * (per_block - tokens * compute * model.dim)
    elif train.recompute != "none":  # auto: at most everything
        products = 2 * model.dim + heads + 2 * inner if train.recompute == "selective" else 0
        dropped = max(0.0, per_block - tokens * compute * (model.dim + products) / axes.tp)
    saved = per_block * blocks - dropped * again
    return on_device(cfg, saved, blocks, gpu), working + dropped


def passes_under_way(cfg: RunConfig, axes: Axes) -> float:
    """Passes whose activations the first rank of a pipeline keeps at once; 1 without a pipeline."""
    passes = float(min(axes.pp, cfg.train.sequences // axes.data_ranks))
    if (stages := cfg.distributed.pp_stages_per_rank) > 1:  # arXiv:2205.05198, section 4.3
        passes *= 1 + (axes.pp - 1) / (axes.pp * stages)
    return passes


def pipeline_buffers(cfg: RunConfig, axes: Axes, micro: int, stream: float) -> float:
    """Bytes of the buffers in which torch receives activations and gradients, `stream` each. They
    stay from step to step: for all micro-batches, not only for those under way.

    The first stage receives no activations, and the last one no gradients. Until its backward pass
    torch also keeps the output of each stage; as much is counted twice, as the inputs of stages are
    also those of blocks.
    """
    passes = cfg.train.sequences // (micro * axes.data_ranks)
    both = 2 * cfg.distributed.pp_stages_per_rank
    first = (both - 1) * passes + passes_under_way(cfg, axes)
    middle = both * passes if axes.pp > 2 else 0.0
    return stream * max(first, middle)


def buffer_share(cfg: RunConfig) -> float:
    """Places in the buffers of experts.spare, per row that travels in them; 1 without."""
    ranks, spare = cfg.distributed.ep, cfg.experts.spare
    return 1.0 if ranks == 1 or spare is None else min(1 + spare, ranks)


def budget_share(recompute: str) -> float:
    """Share of a block's activations that train.recompute = budget-N keeps."""
    return int(recompute.partition("-")[2]) / 100


def on_device(cfg: RunConfig, saved: float, blocks: float, gpu: bool) -> float:
    """Return the part of the activations kept by `blocks` that stays on the device while the rest
    waits on the host: the active block, and blocks being copied. On a CPU both count."""
    if not cfg.train.offload_activations:
        return saved
    here = saved * min(1.0, (1 + cfg.train.offload_activations) / blocks)
    return here if gpu else saved + here


def loss_memory(cfg: RunConfig, axes: Axes, tokens: int, compute: int, gpu: bool) -> float:
    """Logits of a chunk in fp32, which become their gradient in place, and a copy in the compute
    dtype; if compiled for a GPU, only in the compute dtype. Also the fp32 gradient of the output's
    weight, a chunk's part of it, and the gradient of its input."""
    model = cfg.model
    words = model.vocab_size / axes.tp
    rows = min(tokens, loss_rows(cfg, axes, gpu))
    logit = FP32 + (compute if compute < FP32 else 0)
    if gpu and cfg.train.compile:
        logit = compute
    weight = 0 if cfg.lora.rank else (FP32 + compute) * words * model.dim
    return rows * words * logit + weight + tokens * model.dim * compute


def loss_rows(cfg: RunConfig, axes: Axes, gpu: bool) -> int:
    """Tokens whose logits exist at once, at most."""
    # This imports torch, which most callers of this module avoid.
    from kempner.model.loss import chunk_rows

    large = gpu and cfg.train.compile and not cfg.lora.rank
    return cfg.train.loss_chunk or chunk_rows(-(-cfg.model.vocab_size // axes.tp), large)
