"""Bytes that a rank sends in a step, by what they are for, and a rough time of the step. No torch.

The time ranks combinations; it predicts none. Products run at ACHIEVED of the GPU's peak, bytes at
the rate of the link that their ranks share: NVLink inside a node, the network between nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kempner.metrics import PEAK_BF16
from kempner.parallel.layout import Axes, sizes
from kempner.planner.memory import FP32, GIB, compute_bytes
from kempner.run import RunConfig, micro_batch

ACHIEVED = 0.6  # of the peak, by the model's products and attention
RESERVE_GIB = 4.0  # the CUDA context, NCCL's buffers, and what the allocator cannot use


class Gpu(NamedTuple):
    """One GPU and its links; bytes per second in one direction."""

    name: str
    gib: float
    link: float  # NVLink, of one GPU to the others of its node
    network: float = 50e9  # of one GPU to other nodes: 400 Gb/s

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
        Gpu("A100", 79.2, 300e9),
        Gpu("H100", 79.1, 450e9),
        Gpu("H200", 139.8, 450e9),
        Gpu("GH200", 94.5, 450e9),
        Gpu("B200", 178.4, 900e9),
        Gpu("L40S", 44.4, 32e9),
        Gpu("MI300X", 191.5, 448e9),
    )
}


@dataclass(frozen=True)
class Traffic:
    what: str
    size: float  # bytes that each rank sends in a step
    within: bool  # the node
    hidden: bool  # behind computation, as far as that lasts


def traffic(cfg: RunConfig, world_size: int, per_node: int) -> list[Traffic]:
    """A ring sends (n - 1) / n of what it gathers or scatters, and twice that to reduce it."""
    axes = sizes(cfg.distributed, world_size, per_node)
    micro = micro_batch(cfg.train, axes.data_ranks, cfg.train.sequences)
    passes = cfg.train.sequences // (micro * axes.data_ranks)
    compute = compute_bytes(cfg, gpu=True)
    model, ep, cuts = cfg.model, cfg.distributed.ep, axes.pp * axes.tp
    experts = model.n_layers * 3 * model.n_experts * model.dim * model.ffn_dim / cuts
    others = model.count_parameters() / cuts - experts
    n, found = axes.shard * axes.cp, []
    # An expert is cut over the ranks that have the same ones.
    sent = others * (n - 1) / n + experts / ep * (1 - ep / n)
    frozen, within = cfg.lora.rank > 0, n * axes.tp <= per_node
    if n > 1:
        gathers = 2 * passes * compute * sent
        found.append(Traffic("FSDP: weights, gathered twice a pass", gathers, within, True))
    if n > 1 and not frozen:
        found.append(Traffic("FSDP: gradients, scattered", passes * FP32 * sent, within, True))
    if (copies := axes.replicate) > 1 and not frozen:
        size = 2 * FP32 * (others + experts) / n * (copies - 1) / copies
        found.append(Traffic("replicas: gradients", size, world_size <= per_node, True))
    return found + passing(cfg, axes, passes * micro * cfg.train.seq_len, compute, per_node)


def passing(cfg: RunConfig, axes: Axes, tokens: int, compute: int, per_node: int) -> list[Traffic]:
    """Activations between the ranks of a sequence, a product or a pipeline, for `tokens` of a step:
    those of one data rank."""
    model, found = cfg.model, []
    stream = tokens / axes.cp * compute * model.dim
    layers = model.n_layers / axes.pp
    again = cfg.train.recompute != "none" and not cfg.train.recompute_modules
    often = 2 + again / cfg.train.recompute_every  # forward and backward passes
    if (n := axes.tp) > 1:
        # Gathered before attention and SwiGLU, scattered after them.
        size = 4 * often * layers * stream * (n - 1) / n
        found.append(Traffic("tensor parallel: activations", size, n <= per_node, False))
    if (n := axes.cp) > 1:
        keys = 2 * model.kv_heads * model.resolved_head_dim * tokens / axes.cp * compute / axes.tp
        size = (often + 1) * layers * keys * (n - 1)  # backward sends keys and their gradients
        found.append(Traffic("context parallel: keys", size, n * axes.tp <= per_node, True))
    if (n := cfg.distributed.ep) > 1:
        # To the experts and back, and the same for their gradients.
        size = 2 * often * layers * stream * model.experts_per_token * (n - 1) / n
        found.append(Traffic("expert parallel: tokens", size, n * axes.tp <= per_node, False))
    if axes.pp > 1:
        size = 2 * cfg.distributed.pp_stages_per_rank * stream / axes.tp
        found.append(Traffic("pipeline: activations", size, False, True))
    return found


class Time(NamedTuple):
    """Seconds of a step."""

    compute: float
    hidden: float  # communication behind it
    exposed: float  # communication beside it

    @property
    def step(self) -> float:
        return max(self.compute, self.hidden) + self.exposed


def time(cfg: RunConfig, world_size: int, per_node: int, gpu: Gpu) -> Time:
    flops = cfg.model.flops_per_token(cfg.train.seq_len, cfg.lora.rank > 0)
    if cfg.train.recompute == "full" and not cfg.train.recompute_modules:
        flops *= 1 + 1 / (3 * cfg.train.recompute_every)  # the forward pass once more
    tokens = cfg.train.sequences * cfg.train.seq_len
    spent = {True: 0.0, False: 0.0}
    for each in traffic(cfg, world_size, per_node):
        spent[each.hidden] += each.size / (gpu.link if each.within else gpu.network)
    compute = tokens * flops / (world_size * gpu.flops * ACHIEVED)
    axes = sizes(cfg.distributed, world_size, per_node)
    passes = cfg.train.sequences / (
        micro_batch(cfg.train, axes.data_ranks, cfg.train.sequences) * axes.data_ranks
    )
    # Ranks that wait for the first activations, and the last gradients.
    compute *= 1 + (axes.pp - 1) / (passes * cfg.distributed.pp_stages_per_rank)
    return Time(compute, spent[True], spent[False])
