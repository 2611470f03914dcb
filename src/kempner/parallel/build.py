"""Building of a sharded model with weights from its shape, in this order: meta -> adapters ->
tensor -> fp8 -> experts -> context -> stages -> recompute -> compile -> offload -> shard -> memory
-> weights. A single rank is not sharded."""

from __future__ import annotations

import contextlib
import math
import zlib
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from kempner.checkpoint.format.plan import box_slices, local_part, make_table, own_box
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder, rope_table
from kempner.model.loss import cross_entropy
from kempner.parallel.config import (
    DistributedConfig,
    ExpertsConfig,
    LoraConfig,
    adapter_std,
    is_adapter,
)
from kempner.parallel.layout import Layout, is_alone
from kempner.parallel.single import AddUp, add_up, keep_whole


class ModelSettings(Protocol):
    """Fields of the [train] section that shape the model."""

    @property
    def dtype(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def offload_activations(self) -> int: ...
    @property
    def compile(self) -> bool: ...
    @property
    def compile_scope(self) -> str: ...
    @property
    def weights(self) -> str: ...
    @property
    def fp8(self) -> str: ...
    @property
    def attention(self) -> str: ...
    @property
    def recompute(self) -> str: ...
    @property
    def recompute_every(self) -> int: ...
    @property
    def recompute_modules(self) -> tuple[str, ...]: ...
    @property
    def loss_chunk(self) -> int | None: ...
    @property
    def z_loss(self) -> float: ...


def build_model(
    cfg: ModelConfig,
    layout: Layout,
    train: ModelSettings,
    distributed: DistributedConfig,
    lora: LoraConfig | None = None,
    frozen: bool = False,
    experts: ExpertsConfig | None = None,
) -> Decoder:
    """Build the model on this rank's device: master shards in train.weights, compute in
    train.dtype, fp32 gradient sums. A frozen model has no gradients, and its weights are in
    the compute dtype.

    No rank ever holds more than one whole parameter. The initial weights depend only on train.seed
    and the model of device, not on the mesh.
    """
    model = plan_model(cfg, layout, train, distributed, lora, frozen, experts)
    device_type = layout.mesh.device_type
    if distributed.fsdp_cpu_offload:
        model._apply(partial(_empty, device="cpu"))  # type: ignore[no-untyped-call]
        for module in model.modules():  # only weights stay on the host
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device_type))
    else:
        model._apply(partial(_empty, device=device_type))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        # Buffers are uninitialised, too.
        model.rope.copy_(rope_table(cfg))
        init_weights(model, train.seed, layout)
    alone = is_alone(layout.sizes, distributed)
    add: AddUp = add_up
    if alone and train.compile and device_type == "cuda":
        from kempner.parallel.compiled import compile_sum

        add = compile_sum()
    if train.weights == "bf16" and not frozen:
        from kempner.parallel.shard import GradientSums

        model.fp32_sums = GradientSums(model, add)
    if alone:
        keep_whole(model, compute_dtype(train.dtype, device_type), add)
    return model


def _empty(x: Tensor, device: str) -> Tensor:
    """Allocate like to_empty(), whose empty_like() of a plain tensor imports sympy, 0.2 s."""
    plain = type(x) in (Tensor, nn.Parameter)
    return x.new_empty(x.shape, device=device) if plain else torch.empty_like(x, device=device)


def plan_model(
    cfg: ModelConfig,
    layout: Layout,
    train: ModelSettings,
    distributed: DistributedConfig,
    lora: LoraConfig | None = None,
    frozen: bool = False,
    experts: ExpertsConfig | None = None,
) -> Decoder:
    """Build the same model on the meta device, with all plans applied but without values."""
    # On the meta device, even a model larger than any rank's memory can be planned.
    with torch.device("meta"):
        model = Decoder(cfg)
    device_type = layout.mesh.device_type
    dtype = compute_dtype(train.dtype, device_type)
    model.kernel = train.attention
    model.loss = partial(cross_entropy, chunk=train.loss_chunk, z_loss=train.z_loss)
    if frozen or train.weights == "bf16":
        model.cast(dtype).requires_grad_(not frozen)
    # Before the matrices are cut: an adapter is cut with its matrix.
    if lora is not None and lora.rank:
        from kempner.parallel.lora import add_adapters

        add_adapters(model, lora)
    if layout.tp is not None:
        from kempner.parallel.tensor import compute_on_parts, split_matrices

        split_matrices(model, layout.tp, overlap="tp" in distributed.overlap)
    # After that: kernels have requirements on the sizes of the parts.
    if train.fp8 != "none":
        from kempner.parallel.fp8 import use_fp8

        gathers = not frozen and train.fp8.endswith("gather")
        use_fp8(model, train.fp8, torch.device(device_type), gathers)
    if layout.ep is not None:
        from kempner.parallel.experts import split_experts

        split_experts(model, layout, distributed, experts or ExpertsConfig())
    if layout.cp is not None:
        from kempner.parallel.context import split_context

        split_context(model, layout.cp, distributed.cp_method, dtype)
    if layout.pp is not None:
        from kempner.parallel.pipeline import keep_own_stages

        keep_own_stages(model, layout, distributed, dtype)
    # Innermost first: recomputation, then compilation around it, then FSDP's hooks outside both.
    if train.recompute in ("selective", "full"):
        from kempner.parallel.memory.recompute import add_recompute

        add_recompute(model, train)
    if layout.tp is not None:
        compute_on_parts(model)
    if train.compile:
        _compile(model, train, dtype)
    if train.offload_activations:
        from kempner.parallel.memory.offload import Offload

        Offload(model, train.offload_activations)
    _shard(model, layout, train, distributed, frozen)
    return model


def _shard(
    model: Decoder,
    layout: Layout,
    train: ModelSettings,
    distributed: DistributedConfig,
    frozen: bool,
) -> None:
    if is_alone(layout.sizes, distributed):
        return
    from kempner.parallel.shard import one_island, shard_model

    dtype = compute_dtype(train.dtype, layout.mesh.device_type)
    with one_island(layout) if distributed.reshard_island else contextlib.nullcontext():
        shard_model(model, layout, dtype, distributed, frozen, whole=train.compile_scope == "model")


def _compile(model: Decoder, train: ModelSettings, dtype: torch.dtype) -> None:
    from kempner.parallel.compiled import compile_model

    if model.cfg.n_experts:
        from kempner.parallel.experts import keep_from_compiler

        keep_from_compiler(model, dtype)
    _, is_set, percent = train.recompute.partition("budget-")
    compile_model(model, train.compile_scope, int(percent) / 100 if is_set else 1.0)


def compute_dtype(name: str, device_type: str) -> torch.dtype:
    """Resolve the compute dtype: bf16, fp32, or auto: bf16 on a GPU, fp32 on a CPU."""
    if name == "auto":
        name = "bf16" if device_type == "cuda" else "fp32"
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[name]


def init_weights(model: Decoder, seed: int, layout: Layout) -> None:
    """Set initial values. Each parameter is drawn whole, from its own generator, then cut, so that
    it is the same on every mesh. With init_from only adapters are drawn; the rest is loaded from
    there or from a checkpoint. Buffers start as zeros."""
    for buffer in buffer_names(model).values():
        buffer.zero_()
    parameters = parameter_names(model)
    table = make_table(parameters, {}, math.prod(layout.sizes))
    for name, param in parameters.items():
        adapter = is_adapter(name)
        if model.cfg.init_from is not None and not adapter:
            continue
        if (std := adapter_std(name, param) if adapter else model.init_std(name)) == 0.0:
            param.fill_(0.0 if name.endswith(("bias", "lora_b")) else 1.0)
            continue
        device = layout.mesh.device_type  # with fsdp_cpu_offload the parameter is on the host
        # Seeded by the name: adding or removing a parameter does not change the others.
        generator = torch.Generator(device).manual_seed(seed ^ zlib.crc32(name.encode()))
        whole = torch.empty(param.shape, device=device)  # rounded only by copy_
        whole.normal_(std=std, generator=generator)
        local_part(param).copy_(whole[box_slices(own_box(table[name], layout.rank))])


def parameter_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Map names to parameters, without the names of wrappers, as in checkpoints."""
    return {_plain(name): param for name, param in model.named_parameters()}


def buffer_names(model: nn.Module) -> dict[str, Tensor]:
    """Map names to the buffers that checkpoints hold, the biases of routers, equal on all ranks."""
    state_keys = model.state_dict().keys()
    return {_plain(name): b for name, b in model.named_buffers() if _plain(name) in state_keys}


def _plain(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
