"""The [distributed] section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kempner.config.option import option

if TYPE_CHECKING:
    from torch import Tensor

LONGEST_TIMEOUT_S = 30 * 86400.0  # timers overflow only far above that


@dataclass(frozen=True)
class DistributedConfig:
    dp_shard: int = option(
        -1, "ranks that shard one copy of the weights (FSDP); -1: all remaining ranks"
    )
    dp_replicate: int = option(
        1,
        "replicas of the weights (HSDP; with dp_shard=1 plain data parallelism); -1: as many as "
        "fit",
    )
    nodes_per_fsdp_group: int | None = option(
        None,
        "whole nodes that shard one copy of the weights, instead of dp_shard and dp_replicate",
        minimum=1,
    )
    pp: int = option(
        1,
        "ranks, or groups of ranks, that hold successive layers (pipeline parallelism)",
        minimum=1,
    )
    pp_stages_per_rank: int = option(
        1,
        "pipeline stages on each rank; 1: the schedule is 1F1B; more: interleaved 1F1B",
        minimum=1,
    )
    cp: int = option(
        1, "ranks that share the tokens of each sequence (context parallelism)", minimum=1
    )
    cp_method: str = option(
        "ring",
        "attention over cp ranks: keys and values travel around them, or (ulysses) tokens are "
        "exchanged for heads",
        choices=("ring", "ulysses"),
    )
    tp: int = option(
        1,
        "ranks that share each matrix product and each sequence between them (tensor and sequence "
        "parallelism); keep them on one node",
        minimum=1,
    )
    ep: int = option(
        1,
        "ranks that share the experts of each layer, out of dp_shard x cp; tokens travel to them",
        minimum=1,
    )
    device: str = option("auto", "device to train on", choices=("auto", "cuda", "cpu"))
    start_timeout: float = option(
        600.0,
        "seconds allowed for all ranks to start, for the first step, and in between "
        "with no rank reading or writing anything",
        minimum=1.0,
        maximum=LONGEST_TIMEOUT_S,
    )
    reshard_after_forward: bool = option(
        True,
        "free a block's gathered weights after its forward, and gather them again for its backward",
    )
    reshard_island: int | None = option(
        None,
        "ranks that share a block's weights between its forward and its backward, such as those of "
        "a host; unset: all of dp_shard",
        minimum=2,
    )
    sync_once: bool = option(
        False,
        "gather the weights and reduce the gradients once in a step, not in each of its "
        "micro-batches; costs the memory of all weights, and of all gradients in fp32",
    )
    prefetch_blocks: int = option(
        0,
        "blocks whose weights are gathered ahead of their use; 0: as many as FSDP itself chooses",
        minimum=0,
        maximum=4096,
    )
    overlap: tuple[str, ...] = option(
        (),
        "messages to overlap better: tp, those of tp in pieces, with their products "
        "(train.compile); reduce, FSDP's reductions, with its gathers; symm_mem, FSDP's, in "
        "symmetric memory; shared, tokens sent to their experts, with model.shared_experts",
        choices=("tp", "reduce", "symm_mem", "shared"),
    )
    reduce_dtype: str = option(
        "fp32", "dtype in which gradients are summed over ranks", choices=("fp32", "bf16")
    )
    fsdp_cpu_offload: bool = option(
        False,
        "keep weights, gradients and optimizer state in host memory, and update them there",
    )

    def problems(self) -> list[str]:
        problems = self._contradictions()
        if self.pp_stages_per_rank > 1 and self.pp == 1:
            problems.append(
                f"distributed.pp_stages_per_rank = {self.pp_stages_per_rank}: has no effect "
                "without a pipeline; give --distributed.pp, or leave it out"
            )
        for axis in ("dp_shard", "dp_replicate"):
            size = getattr(self, axis)
            if size == 0 or size < -1:
                problems.append(
                    f"distributed.{axis} = {size}: give a size of at least 1, or -1 for all "
                    "remaining ranks"
                )
        if self.dp_shard == -1 and self.dp_replicate == -1:
            problems.append(
                "distributed.dp_shard and distributed.dp_replicate are both -1: only one of them "
                "can take the remaining ranks; give the size of the other"
            )
        if self.nodes_per_fsdp_group is not None and (self.dp_shard, self.dp_replicate) != (-1, 1):
            problems.append(
                f"distributed.nodes_per_fsdp_group = {self.nodes_per_fsdp_group}: it sets dp_shard "
                "and dp_replicate itself; leave both out"
            )
        return problems

    def _contradictions(self) -> list[str]:
        """List contradictions between options for what FSDP keeps and when it communicates."""
        problems = []
        if self.reshard_island is not None and (self.sync_once or not self.reshard_after_forward):
            problems.append(
                f"distributed.reshard_island = {self.reshard_island}: each rank keeps whole "
                "weights after a forward, with sync_once or reshard_after_forward = false; leave "
                "reshard_island out"
            )
        if self.reshard_island is not None and (self.tp > 1 or self.pp > 1):
            problems.append(
                f"distributed.reshard_island = {self.reshard_island}: not built for tp or pp over "
                "1; leave reshard_island out"
            )
        if self.sync_once and self.fsdp_cpu_offload:
            problems.append(
                "distributed.fsdp_cpu_offload with sync_once: all weights and gradients would stay "
                "on the GPU through the step; choose one of the two"
            )
        if self.sync_once and self.reduce_dtype == "bf16":
            problems.append(
                "distributed.reduce_dtype = bf16 with sync_once: the gradients of the "
                "micro-batches would be summed in bf16, too; leave reduce_dtype at fp32"
            )
        return problems

    def island_problems(self, shard: int) -> list[str]:
        """List problems of reshard_island. `shard`: ranks that share one copy of the weights."""
        if self.reshard_island is None or shard % self.reshard_island == 0:
            return []
        return [
            f"distributed.reshard_island = {self.reshard_island}: must divide dp_shard x cp = "
            f"{shard}, the ranks that share one copy of the weights"
        ]


@dataclass(frozen=True)
class ExpertsConfig:
    spare: float | None = option(
        None,
        "send rows to the experts of distributed.ep in buffers with this share of room above the "
        "mean, such as 0.25, so that the host waits for no layer's counts; unset: it waits",
        minimum=0.0,
        maximum=100.0,
    )


MATRICES = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")  # of a block


@dataclass(frozen=True)
class LoraConfig:
    rank: int = option(
        0,
        "rank of the adapters that are trained in place of the weights; 0: train the weights",
        minimum=0,
        maximum=2**14,
    )
    alpha: float = option(16.0, "adapters are scaled by alpha / rank", minimum=0.0)
    targets: tuple[str, ...] = option(
        MATRICES, "matrices of each block that get an adapter", choices=MATRICES
    )

    def problems(self) -> list[str]:
        if self.rank and not self.targets:
            return ["lora.targets = []: nothing is trained; name at least one matrix"]
        return []


def is_adapter(name: str) -> bool:
    return name.endswith(("lora_a", "lora_b"))


def adapter_std(name: str, adapter: Tensor) -> float:
    """Return the standard deviation of an adapter's initial values. B starts as zeros, so that the
    model starts unchanged; A with peft's variance, 1 / (3 in)."""
    return 0.0 if name.endswith("lora_b") else (3 * adapter.shape[1]) ** -0.5
