"""Bytes that a rank sends in a step, by purpose, and the time of the step. No torch.

The computation is in compute.py, the rates of links in gpus.py. The time is an estimate; spread.py
has its deviation from published figures.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from kempner.checkpoint import size
from kempner.extensions.lowcomm.config import LowcommConfig
from kempner.extensions.planner.compute import compute_seconds
from kempner.extensions.planner.gpus import FABRICS, Fabric, GpuSpec, far_seconds, near_seconds
from kempner.extensions.planner.memory import (
    FP32,
    GIB,
    block_activation_bytes,
    buffer_share,
    compute_bytes,
    forward_rows,
    fp8_gathered,
    one_replica,
    outer_state,
    sent_bytes,
    trained_elements,
    weight_bytes,
)
from kempner.extensions.planner.recompute import with_choice
from kempner.extensions.planner.spread import ESTIMATE_SPREAD, Spread, kind_of_run
from kempner.parallel.layout import Axes, axis_sizes
from kempner.train.sections import RunConfig

TENSOR_PARALLEL = "tensor parallel: activations"
TP_HIDDEN = 0.5  # of it, if products run at the same time
INTERFERENCE = 0.2  # seconds that a second of hidden communication adds to the computation
HOST_BYTES = 900 * GIB  # of a 1 TiB node: may be offloaded, unless specified otherwise


class Traffic(NamedTuple):
    what: str
    size: float  # bytes that each rank sends in a step
    within: bool  # the node
    hidden: bool  # behind computation, as long as that lasts
    bus: bool = False  # to the host and back
    messages: float = 0.0  # collectives per step
    nodes: int = 1  # that the group spans
    ways: int = 1  # ranks of the group per node, which share their links for incoming data


class Group(NamedTuple):
    """Number of nodes that the ranks of a group are in, and number of its ranks in each."""

    nodes: int
    ways: int

    @classmethod
    def of(cls, ranks: int, stride: int, per_node: int) -> Group:
        """Place ranks with numbers `stride` apart."""
        ways = max(1, min(ranks, per_node // stride))
        return cls(-(-ranks // ways), ways)

    def traffic(self, what: str, size: float, hidden: bool, messages: float) -> Traffic:
        within = self.nodes == 1
        return Traffic(what, size, within, hidden, False, messages, self.nodes, self.ways)


def network_bytes(cfg: RunConfig, world_size: int, per_node: int) -> list[Traffic]:
    """List the traffic within a replica, and between replicas if there are several (lowcomm/)."""
    own, ranks, near = one_replica(cfg, world_size, per_node)
    traffic = of_one_replica(own, ranks, near)
    if (replicas := world_size // ranks) > 1:
        axes = axis_sizes(cfg.distributed, ranks, near)
        numbers = trained_elements(cfg) / math.prod(axes)  # copies share the elements to send
        size = of_a_round(cfg, replicas, numbers) / cfg.of(LowcommConfig).interval
        within, hidden = world_size <= per_node, cfg.of(LowcommConfig).tau > 0
        traffic.append(Traffic("lowcomm: changes of the weights", size, within, hidden))
    return traffic


def of_one_replica(cfg: RunConfig, world_size: int, per_node: int) -> list[Traffic]:
    """List the traffic of one replica. A ring sends (n - 1) / n of the data that it gathers or
    scatters, and twice that to reduce them."""
    axes = axis_sizes(cfg.distributed, world_size, per_node)
    micro = forward_rows(cfg, axes.data_ranks)
    passes = cfg.train.sequences // (micro * axes.data_ranks)
    compute = compute_bytes(cfg, gpu=True)
    model, ep, cuts = cfg.model, cfg.distributed.ep, axes.pp * axes.tp
    experts = len(model.mixtures) * 3 * model.n_experts * model.dim * model.ffn_dim / cuts
    others = model.count_parameters() / cuts - experts
    n, traffic = axes.shard * axes.cp, []
    # FSDP shards an expert over the ranks that have the same experts.
    volume = others * (n - 1) / n + experts / ep * (1 - ep / n)
    less = (1 - 1 / compute) * fp8_gathered(cfg, axes)  # in elements: 8-bit floats are sent
    # One unit per block, and one for everything outside the blocks.
    group, units = Group.of(n, axes.tp, per_node), model.n_layers / axes.pp + 1
    how, frozen = cfg.distributed, cfg.lora.rank > 0
    if n > 1:
        once, keeps_weights = how.sync_once, how.sync_once or not how.reshard_after_forward
        often = 1 if once else passes
        gathers = (often * compute * (volume - less * (n - 1) / n), True, often * units)
        traffic.append(group.traffic("FSDP: weights, gathered for the forward pass", *gathers))
        if (island := how.reshard_island) is not None:
            size = passes * compute * (others - less) * (island - 1) / island
            near = Group.of(island, axes.tp, per_node)
            again = near.traffic("FSDP: weights, gathered in an island", size, True, passes * units)
            traffic.append(again)
        elif not keeps_weights:
            traffic.append(group.traffic("FSDP: weights, gathered again", *gathers))
    reduced = 2 if how.reduce_dtype == "bf16" else FP32
    if n > 1 and not frozen:
        often = 1 if how.sync_once else passes
        size = often * reduced * volume
        traffic.append(group.traffic("FSDP: gradients, scattered", size, True, often * units))
    if (copies := axes.replicate) > 1 and not frozen:
        often = passes if how.reduce_dtype == "bf16" else 1  # see begin_micro_batch
        size = often * 2 * reduced * (others + experts) / n * (copies - 1) / copies
        far = Group.of(copies, n * axes.tp, per_node)
        traffic.append(far.traffic("replicas: gradients", size, True, often * units))
    traffic += offload_bytes(cfg, axes, passes, compute)
    tokens = passes * micro * cfg.train.seq_len
    return traffic + activation_bytes(cfg, axes, tokens, passes, compute, per_node)


def of_a_round(cfg: RunConfig, replicas: int, numbers: float) -> float:
    """Bytes that a rank with `numbers` elements sends to other replicas in a round. Codes are
    gathered; fp32 is summed."""
    gathered = (replicas - 1) * numbers * sent_bytes(cfg)
    return gathered if cfg.of(LowcommConfig).compress != "none" else 2 * gathered / replicas


def offload_bytes(cfg: RunConfig, axes: Axes, passes: int, compute: int) -> list[Traffic]:
    """List the copies to the host and back."""
    weights, traffic = weight_bytes(cfg, axes, gpu=False), []
    if cfg.distributed.fsdp_cpu_offload:
        # Weights for the forward and the backward pass, and gradients back; the update waits.
        size = passes * (2 * weights["weights"] + weights["gradients"])
        traffic.append(Traffic("host: weights and gradients", size, True, True, bus=True))
    if cfg.distributed.fsdp_cpu_offload or cfg.optimizer.cpu_offload:
        # The host's update accesses its memory not much faster than the bus.
        traffic.append(
            Traffic("host: state, in the update", 2 * weights["optimizer"], True, False, bus=True)
        )
    if cfg.train.offload_activations:
        size = 2 * passes * offloaded_activations(cfg, axes, passes, compute)
        traffic.append(Traffic("host: activations", size, True, True, bus=True))
    return traffic


def offloaded_activations(cfg: RunConfig, axes: Axes, passes: int, compute: int) -> float:
    """Bytes of one forward pass of a rank."""
    tokens = cfg.train.sequences // (passes * axes.data_ranks) * cfg.train.seq_len // axes.cp
    everything = replace(cfg, train=replace(cfg.train, offload_activations=0))
    return block_activation_bytes(everything, axes, tokens, compute, gpu=True)[0]


def host_offload_bytes(cfg: RunConfig, world_size: int, per_node: int) -> float:
    """Bytes of host memory to which the ranks of a node offload at once."""
    cfg, world_size, near = one_replica(cfg, world_size, per_node)
    axes = axis_sizes(cfg.distributed, world_size, near)
    weights, needed = weight_bytes(cfg, axes, gpu=False), 0.0
    if cfg.distributed.fsdp_cpu_offload:
        needed += sum(weights.values())
    # FSDP's offload already keeps the optimizer's state on the host.
    elif cfg.optimizer.cpu_offload:
        needed += weights["optimizer"]
    if cfg.train.offload_activations:
        passes = cfg.train.sequences // (forward_rows(cfg, axes.data_ranks) * axes.data_ranks)
        needed += offloaded_activations(cfg, axes, passes, compute_bytes(cfg, gpu=True))
    return needed * per_node


def host_save_bytes(cfg: RunConfig, world_size: int, per_node: int) -> float:
    """Bytes of host memory that the saves of a node's ranks hold."""
    cfg, world_size, near = one_replica(cfg, world_size, per_node)
    axes = axis_sizes(cfg.distributed, world_size, near)
    whole = size.checkpoint_bytes(cfg.model, cfg.lora, cfg.optimizer, cfg.train.weights)
    if cfg.of(LowcommConfig).on:
        whole += outer_state(cfg)
    return size.host_bytes_of_node(whole, axes, per_node)


def activation_bytes(
    cfg: RunConfig, axes: Axes, tokens: int, passes: int, compute: int, per_node: int
) -> list[Traffic]:
    """List the traffic of activations between the ranks of a sequence, a product or a pipeline, for
    `tokens` of a step: those of one data rank."""
    model, traffic = cfg.model, []
    stream = tokens / axes.cp * compute * model.dim
    layers = model.n_layers / axes.pp
    again = cfg.train.recompute in ("selective", "full") and not cfg.train.recompute_modules
    often = 2 + again / cfg.train.recompute_every  # forward and backward passes
    if (n := axes.tp) > 1:
        # Gathered before attention and SwiGLU, scattered after them.
        count = 4 * often * layers
        group = Group.of(n, 1, per_node)
        size = count * stream * (n - 1) / n
        traffic.append(group.traffic(TENSOR_PARALLEL, size, False, count * passes))
    if axes.cp > 1:
        traffic.append(context_traffic(cfg, axes, stream, often * layers, passes, per_node))
    if (n := cfg.distributed.ep) > 1:
        # To the experts and back, in both the forward and the backward pass.
        count = 2 * often * len(model.mixtures) / axes.pp
        group = Group.of(n, axes.tp, per_node)
        # Rows for experts of the same node do not leave it.
        far = (n - group.ways) / n if group.nodes > 1 else (n - 1) / n  # of the tokens
        size = count * stream * model.experts_per_token * buffer_share(cfg) * far
        group = group._replace(ways=1)  # each token uses its own rank's link
        traffic.append(group.traffic("expert parallel: tokens", size, False, count * passes))
    if axes.pp > 1:
        stages = cfg.distributed.pp_stages_per_rank
        group = Group.of(axes.pp, math.prod(axes) // axes.pp, per_node)._replace(ways=1)
        sent = group.traffic(
            "pipeline: activations", 2 * stages * stream / axes.tp, True, 2 * stages * passes
        )
        # A stage sends only to the next one.
        traffic.append(sent._replace(nodes=min(2, group.nodes)))
    return traffic


def context_traffic(
    cfg: RunConfig, axes: Axes, stream: float, calls: float, passes: int, per_node: int
) -> Traffic:
    """Traffic of the ranks that share a sequence (parallel/context.py). `stream`: bytes of a rank's
    activations between two blocks, in all passes; `calls`: of attention, per pass."""
    model, n = cfg.model, axes.cp
    head = stream * model.resolved_head_dim / model.dim  # bytes of one head, for all tokens
    kv_heads, group = model.kv_heads // axes.tp, Group.of(n, axes.tp, per_node)
    if cfg.distributed.cp_method == "ring":
        # The backward pass sends keys and their gradients.
        count = (calls + model.n_layers / axes.pp) * (n - 1)
        group = group._replace(ways=1)  # one link between nodes
        size = count * 2 * kv_heads * head
        return group.traffic("context parallel: keys", size, True, count * passes)
    kv_heads *= n // math.gcd(n, kv_heads)  # copies, so that each rank has equally many
    size = calls * 2 * (model.n_heads / axes.tp + kv_heads) * head * (n - 1) / n
    return group.traffic("context parallel: heads", size, False, 2 * calls * passes)


class Time(NamedTuple):
    """Seconds of a step."""

    parts: dict[str, float]  # of the computation
    hidden: float  # communication behind it
    exposed: float  # communication in addition to it
    spread: Spread  # of published times of similar runs

    @property
    def compute(self) -> float:
        return sum(self.parts.values())

    @property
    def step(self) -> float:
        # They slow each other only while both run.
        slowed = self.compute + INTERFERENCE * min(self.hidden, self.compute)
        return max(slowed, self.hidden) + self.exposed

    @property
    def fastest(self) -> float:
        return self.spread.least * self.step

    @property
    def slowest(self) -> float:
        return self.spread.most * self.step


def step_seconds(cfg: RunConfig, world_size: int, per_node: int, gpu: GpuSpec) -> Time:
    traffic = network_bytes(cfg, world_size, per_node)
    # Of the whole run: below, world and configuration become those of one replica.
    kind = kind_of_run(cfg, world_size, per_node)
    cfg, world_size, per_node = one_replica(cfg, world_size, per_node)
    cfg = with_choice(cfg, world_size, per_node, gpu.usable)
    axes = axis_sizes(cfg.distributed, world_size, per_node)
    parts = compute_seconds(cfg, axes, gpu)
    hidden = exposed = 0.0
    for each in traffic:
        seconds = link_seconds(each, gpu, FABRICS[gpu.fabric])
        beside = 0.0 if each.hidden else 1.0
        if each.what.startswith("FSDP"):  # nothing hides the first one or the last
            beside = axes.pp / cfg.model.n_layers
        elif each.what == TENSOR_PARALLEL and "tp" in cfg.distributed.overlap:
            beside = 1 - TP_HIDDEN
        hidden += (1 - beside) * seconds
        exposed += beside * seconds
    if axes.pp > 1:
        parts["waiting"] = waiting_share(cfg, axes) * sum(parts.values())
    return Time(parts, hidden, exposed, ESTIMATE_SPREAD[kind])


def waiting_share(cfg: RunConfig, axes: Axes) -> float:
    """Return the ratio of a pipeline rank's waiting time to its computing time: for the first
    activations, the last gradients, and the rank with most blocks. The last stage has fewer blocks,
    because of its output layer (split_blocks in parallel/pipeline.py)."""
    passes = cfg.train.sequences / (forward_rows(cfg, axes.data_ranks) * axes.data_ranks)
    model, each = cfg.model, cfg.distributed.pp_stages_per_rank
    table, stages = model.vocab_size * model.dim, axes.pp * each
    output = model.n_layers * table / (model.count_active() - 2 * table)  # in blocks
    mean = (model.n_layers + output) / stages
    last = max(1, round(mean - output))
    most = max(math.ceil((model.n_layers - last) / (stages - 1)), last + output)
    return (axes.pp - 1) / (passes * each) + (most / mean - 1) / each


def link_seconds(each: Traffic, gpu: GpuSpec, fabric: Fabric) -> float:
    if each.bus:
        return each.size / gpu.bus
    if each.within:
        return near_seconds(gpu, each.size, each.messages)
    return far_seconds(gpu, fabric, each.size, each.messages, each.nodes, each.ways)


def model_flops_utilisation(cfg: RunConfig, world_size: int, step: float, gpu: GpuSpec) -> float:
    """MFU of a step that takes `step` seconds."""
    flops = cfg.model.flops_per_token(cfg.train.seq_len, cfg.lora.rank > 0)
    return flops * cfg.train.sequences * cfg.train.seq_len / (step * world_size * gpu.flops)
