"""Bytes that a rank sends in a step, by purpose, and a rough time of the step. No torch.

The time ranks combinations; as a prediction it is a range that no GPU has confirmed. The
computation is in compute.py; bytes travel at the rate of the link that their ranks share: NVLink
inside a node, the network between nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from kempner.extensions.lowcomm.config import LowcommConfig
from kempner.extensions.planner.compute import compute_seconds
from kempner.extensions.planner.memory import (
    FP32,
    GIB,
    block_activation_bytes,
    compute_bytes,
    forward_rows,
    one_replica,
    raw_numbers,
    trained_parameters,
    weight_bytes,
)
from kempner.extensions.planner.recompute import with_choice
from kempner.parallel.layout import Axes, axis_sizes
from kempner.train.recording.peak import PEAK_BF16
from kempner.train.sections import RunConfig

ESTIMATE_SLACK = 1.25  # how much longer than the estimate a step may take by what is not in it
HOST_BYTES = 900 * GIB  # of a node of 1 TiB: what may be offloaded where nobody says
RESERVE_GIB = 4.0  # the CUDA context, NCCL's buffers, and what the allocator cannot use


class GpuSpec(NamedTuple):
    """One GPU, its memory and its links; bytes per second, of links in one direction."""

    name: str
    gib: float
    memory: float
    link: float  # NVLink, of one GPU to the others of its node
    network: float = 50e9  # of one GPU to other nodes: 400 Gb/s
    bus: float = 25e9  # of one GPU to its host
    fp8: bool = True  # multiplies 8-bit floats, at twice the peak of bf16 (NVIDIA's data sheets)

    @property
    def flops(self) -> float:
        return PEAK_BF16[self.name]

    @property
    def usable(self) -> float:
        """Bytes for tensors."""
        return (self.gib - RESERVE_GIB) * GIB


GPUS = {
    gpu.name: gpu
    for gpu in (
        GpuSpec("A100", 79.2, 2.04e12, 300e9, fp8=False),
        GpuSpec("H100", 79.1, 3.35e12, 450e9),
        GpuSpec("H200", 139.8, 4.8e12, 450e9),
        GpuSpec("GH200", 94.5, 4.0e12, 450e9),
        GpuSpec("B200", 178.4, 7.7e12, 900e9),
        GpuSpec("GB200", 184.0, 8.0e12, 900e9),
        GpuSpec("B300", 267.0, 7.7e12, 900e9),
        GpuSpec("GB300", 276.0, 8.0e12, 900e9),
        GpuSpec("L40S", 44.4, 0.864e12, 32e9),
    )
}


@dataclass(frozen=True)
class Traffic:
    what: str
    size: float  # bytes that each rank sends in a step
    within: bool  # the node
    hidden: bool  # behind computation, as far as that lasts
    bus: bool = False  # to the host and back


def network_bytes(cfg: RunConfig, world_size: int, per_node: int) -> list[Traffic]:
    """List the traffic within a replica, and between replicas if there are several (lowcomm/)."""
    own, ranks, near = one_replica(cfg, world_size, per_node)
    traffic = of_one_replica(own, ranks, near)
    if (replicas := world_size // ranks) > 1:
        axes = axis_sizes(cfg.distributed, ranks, near)
        numbers = trained_parameters(cfg) / math.prod(axes)  # copies share what they send
        size = of_a_round(cfg, replicas, numbers) / cfg.of(LowcommConfig).interval
        within, hidden = world_size <= per_node, cfg.of(LowcommConfig).tau > 0
        traffic.append(Traffic("lowcomm: changes of the weights", size, within, hidden))
    return traffic


def of_one_replica(cfg: RunConfig, world_size: int, per_node: int) -> list[Traffic]:
    """List the traffic of one replica. A ring sends (n - 1) / n of what it gathers or scatters, and
    twice that to reduce it."""
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
    frozen, within = cfg.lora.rank > 0, n * axes.tp <= per_node
    how = cfg.distributed
    if n > 1:
        once, keeps_weights = how.sync_once, how.sync_once or not how.reshard_after_forward
        gathers = (1 if once else passes) * compute * volume
        traffic.append(
            Traffic("FSDP: weights, gathered for the forward pass", gathers, within, True)
        )
        if (island := how.reshard_island) is not None:
            gathers = passes * compute * others * (island - 1) / island
            within_island = island * axes.tp <= per_node
            traffic.append(
                Traffic("FSDP: weights, gathered in an island", gathers, within_island, True)
            )
        elif not keeps_weights:
            traffic.append(Traffic("FSDP: weights, gathered again", gathers, within, True))
    reduced = 2 if how.reduce_dtype == "bf16" else FP32
    if n > 1 and not frozen:
        size = (1 if how.sync_once else passes) * reduced * volume
        traffic.append(Traffic("FSDP: gradients, scattered", size, within, True))
    if (copies := axes.replicate) > 1 and not frozen:
        often = passes if how.reduce_dtype == "bf16" else 1  # see begin_micro_batch
        size = often * 2 * reduced * (others + experts) / n * (copies - 1) / copies
        traffic.append(Traffic("replicas: gradients", size, world_size <= per_node, True))
    traffic += offload_bytes(cfg, axes, passes, compute)
    return traffic + activation_bytes(
        cfg, axes, passes * micro * cfg.train.seq_len, compute, per_node
    )


def of_a_round(cfg: RunConfig, replicas: int, numbers: float) -> float:
    """Bytes that a rank with `numbers` elements sends to other replicas in a round, without the
    ranges of the codes. Codes are gathered; fp32 is summed."""
    how, raw = cfg.of(LowcommConfig), raw_numbers(cfg) / trained_parameters(cfg)
    if how.compress == "none":
        return 2 * FP32 * numbers * (replicas - 1) / replicas
    code = 2 * FP32 * how.top_k if how.compress == "top-k" else how.bits / 8
    return (replicas - 1) * numbers * (FP32 * raw + code * (1 - raw))


def offload_bytes(cfg: RunConfig, axes: Axes, passes: int, compute: int) -> list[Traffic]:
    """Copies to the host and back."""
    weights, traffic = weight_bytes(cfg, axes, gpu=False), []
    if cfg.distributed.fsdp_cpu_offload:
        # Weights for the forward and the backward pass, and gradients back; the update waits.
        size = passes * (2 * weights["weights"] + weights["gradients"])
        traffic.append(Traffic("host: weights and gradients", size, True, True, bus=True))
    if cfg.distributed.fsdp_cpu_offload or cfg.optimizer.cpu_offload:
        # The update of the host reads and writes its memory not much faster than the bus.
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
    """Bytes of host memory that the ranks of a node offload to at once."""
    cfg, world_size, near = one_replica(cfg, world_size, per_node)
    axes = axis_sizes(cfg.distributed, world_size, near)
    weights, size = weight_bytes(cfg, axes, gpu=False), 0.0
    if cfg.distributed.fsdp_cpu_offload:
        size += sum(weights.values())
    elif cfg.optimizer.cpu_offload:
        size += weights["optimizer"]
    if cfg.train.offload_activations:
        passes = cfg.train.sequences // (forward_rows(cfg, axes.data_ranks) * axes.data_ranks)
        size += offloaded_activations(cfg, axes, passes, compute_bytes(cfg, gpu=True))
    return size * per_node


def activation_bytes(
    cfg: RunConfig, axes: Axes, tokens: int, compute: int, per_node: int
) -> list[Traffic]:
    """Activations between the ranks of a sequence, a product or a pipeline, for `tokens` of a step:
    those of one data rank."""
    model, traffic = cfg.model, []
    stream = tokens / axes.cp * compute * model.dim
    layers = model.n_layers / axes.pp
    again = cfg.train.recompute in ("selective", "full") and not cfg.train.recompute_modules
    often = 2 + again / cfg.train.recompute_every  # forward and backward passes
    if (n := axes.tp) > 1:
        # Gathered before attention and SwiGLU, scattered after them.
        size = 4 * often * layers * stream * (n - 1) / n
        traffic.append(Traffic("tensor parallel: activations", size, n <= per_node, False))
    if (n := axes.cp) > 1:
        keys = 2 * model.kv_heads * model.resolved_head_dim * tokens / axes.cp * compute / axes.tp
        size = (often + 1) * layers * keys * (n - 1)  # backward sends keys and their gradients
        traffic.append(Traffic("context parallel: keys", size, n * axes.tp <= per_node, True))
    if (n := cfg.distributed.ep) > 1:
        # To the experts and back, in the forward and in the backward pass.
        mixtures = len(model.mixtures) / axes.pp
        size = 2 * often * mixtures * stream * model.experts_per_token * (n - 1) / n
        traffic.append(Traffic("expert parallel: tokens", size, n * axes.tp <= per_node, False))
    if axes.pp > 1:
        size = 2 * cfg.distributed.pp_stages_per_rank * stream / axes.tp
        traffic.append(Traffic("pipeline: activations", size, False, True))
    return traffic


class Time(NamedTuple):
    """Seconds of a step."""

    parts: dict[str, float]  # of the computation
    hidden: float  # communication behind it
    exposed: float  # communication beside it

    @property
    def compute(self) -> float:
        return sum(self.parts.values())

    @property
    def step(self) -> float:
        return max(self.compute, self.hidden) + self.exposed

    @property
    def slowest(self) -> float:
        return ESTIMATE_SLACK * self.step


def step_seconds(cfg: RunConfig, world_size: int, per_node: int, gpu: GpuSpec) -> Time:
    seconds = {True: 0.0, False: 0.0}
    traffic = network_bytes(cfg, world_size, per_node)
    cfg, world_size, per_node = one_replica(cfg, world_size, per_node)
    cfg = with_choice(cfg, world_size, per_node, gpu.usable)
    for link in traffic:
        near = gpu.bus if link.bus else gpu.link
        seconds[link.hidden] += link.size / (near if link.within else gpu.network)
    axes = axis_sizes(cfg.distributed, world_size, per_node)
    parts = compute_seconds(cfg, axes, world_size, gpu.flops, gpu.memory)
    if axes.pp > 1:  # ranks that wait for the first activations, and the last gradients
        passes = cfg.train.sequences / (forward_rows(cfg, axes.data_ranks) * axes.data_ranks)
        waiting = (axes.pp - 1) / (passes * cfg.distributed.pp_stages_per_rank)
        parts["waiting"] = waiting * sum(parts.values())
    return Time(parts, seconds[True], seconds[False])


def model_flops_utilisation(cfg: RunConfig, world_size: int, step: float, gpu: GpuSpec) -> float:
    """MFU of a step that takes `step` seconds."""
    flops = cfg.model.flops_per_token(cfg.train.seq_len, cfg.lora.rank > 0)
    return flops * cfg.train.sequences * cfg.train.seq_len / (step * world_size * gpu.flops)
