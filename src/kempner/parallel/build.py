"""From a shape to a sharded model with weights: meta -> adapters -> recompute -> compile -> offload
-> shard -> memory -> weights."""

from __future__ import annotations

import zlib
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder, rope_table
from kempner.parallel.config import DistributedConfig, LoraConfig
from kempner.parallel.layout import Layout
from kempner.parallel.lora import add_adapters, init_std, is_adapter
from kempner.parallel.offload import Offload
from kempner.parallel.recompute import Settings as RecomputeSettings
from kempner.parallel.recompute import add_recompute
from kempner.parallel.shard import shard


class Settings(RecomputeSettings, Protocol):
    """What of the [train] section shapes the model."""

    @property
    def dtype(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def offload_activations(self) -> int: ...
    @property
    def compile(self) -> bool: ...


def build_model(
    cfg: ModelConfig,
    layout: Layout,
    train: Settings,
    distributed: DistributedConfig,
    lora: LoraConfig | None = None,
    frozen: bool = False,
) -> Decoder:
    """The model on this rank's device: fp32 master shards, train.dtype compute, fp32 gradient sums.
    A frozen one has no gradients, and the weights in the compute dtype.

    No rank ever holds more than one whole parameter. The initial weights depend on train.seed
    alone, not on the mesh.
    """
    with torch.device("meta"):
        model = Decoder(cfg)
    dtype = compute_dtype(train.dtype, layout.mesh.device_type)
    if frozen:
        for parameter in model.requires_grad_(False).parameters():
            parameter.data = parameter.data.to(dtype)
    if lora is not None and lora.rank:
        add_adapters(model, lora)
    add_recompute(model, train)
    if train.compile:
        for block in model.blocks:
            block.compile()
        model.loss = torch.compile(model.loss)
    if train.offload_activations:
        Offload(model, train.offload_activations)
    shard(model, layout, dtype, distributed, frozen)
    device_type = layout.mesh.device_type
    model.to_empty(device="cpu" if distributed.fsdp_cpu_offload else device_type)
    with torch.no_grad():
        model.rope = rope_table(cfg).to(device_type)
        init_weights(model, train.seed)
    return model


def compute_dtype(name: str, device_type: str) -> torch.dtype:
    """bf16, fp32, or auto: bf16 on a GPU, fp32 on a CPU."""
    if name == "auto":
        name = "bf16" if device_type == "cuda" else "fp32"
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[name]


def init_weights(model: Decoder, seed: int) -> None:
    """Initial values, each parameter from a generator of its own, whole, then cut: the same on
    every mesh. With init_from those of adapters alone: the others come from there, or from a
    checkpoint (hf/load.py, checkpoint/checkpointer.py)."""
    for name, param in parameter_names(model).items():
        adapter = is_adapter(name)
        if model.cfg.init_from is not None and not adapter:
            continue
        if (std := init_std(name, param) if adapter else model.init_std(name)) == 0.0:
            param.fill_(0.0 if name.endswith(("bias", "lora_b")) else 1.0)
            continue
        # Of the mesh: with fsdp_cpu_offload the parameter itself is on the host.
        device = param.device_mesh.device_type if isinstance(param, DTensor) else param.device
        generator = torch.Generator(device).manual_seed(seed ^ zlib.crc32(name.encode()))
        whole = torch.empty(param.shape, device=device, dtype=param.dtype)
        whole.normal_(std=std, generator=generator)
        if isinstance(param, DTensor):
            whole = distribute_tensor(
                whole, param.device_mesh, param.placements, src_data_rank=None
            )
        param.copy_(whole)


def parameter_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the names that they have without wrappers: what checkpoints use."""
    return {
        name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): param
        for name, param in model.named_parameters()
    }
