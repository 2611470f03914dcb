"""A program: two ranks over gloo, with a lever of speed and without.

    python -m tests.trainer.gpu_path.two_ranks DIR CASE ...

What has no kernel for the CPU has a plain one in its place. Rank 0 prints a line of JSON for each
case: the largest relative difference of a loss, a gradient or a weight from those without; and for
tensor parallelism, compiled up to the graphs that torch's compiler makes kernels of, how many of
which operators the graphs of a block have, forward and backward.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes import post_grad
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.library import _scoped_library

from kempner.checkpoint.format.plan import local_part
from kempner.checkpoint.state import collect_state, run_state
from kempner.config.loading import load_config_files
from kempner.optim.build import build_optimizer
from kempner.parallel import fp8
from kempner.parallel.build import build_model, parameter_names
from kempner.parallel.layout import build_layout
from kempner.parallel.shard import begin_micro_batch
from kempner.train.sections import RunConfig
from tests.trainer.gpu_path import kernels
from tests.trainer.gpu_path.kernels import registered

RANKS, T = 2, 32
COMPILE = torch.compile
WORDS = (
    f"--train.seq_len={T}", "--train.global_batch=4", f"--model.max_seq_len={T}",
    "--data.dataset_path=fake:", "--model.vocab_size=64", "--model.dim=32", "--model.n_layers=1",
    "--model.n_heads=4", "--model.n_kv_heads=2", "--model.ffn_dim=48",
)  # fmt: skip
NAMES = ("all_gather_into_tensor", "reduce_scatter_tensor")
FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
graphs: list[dict[str, int]] = []


def compiled(graph: Any, inputs: Any, **_: Any) -> Any:
    """In the place of what makes kernels: the passes before that, and the graph as it is."""
    mode = detect_fake_mode(inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    with V.set_fake_mode(mode):
        post_grad.view_to_reshape(graph)
        post_grad.post_grad_passes(graph, False)
    graph.recompile()
    names = [getattr(node.target, "_schema", None) for node in graph.graph.nodes]
    found = Counter(schema.name.split("::")[1] for schema in names if schema is not None)
    graphs.append({name: found[name] for name in (*NAMES, *FUSED) if found[name]})

    def run(arguments: list[Any]) -> Any:
        return graph(*arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def model_of(*words: str) -> tuple[RunConfig, Any]:
    cfg = load_config_files(RunConfig, [], [*WORDS, *words])
    layout = build_layout(cfg.distributed, RANKS, RANKS, "cpu")
    return cfg, build_model(cfg.model, layout, cfg.train, cfg.distributed)


def parts(model: Any, gradients: bool = False) -> list[Tensor]:
    found = parameter_names(model).values()
    return [local_part(p.grad if gradients and p.grad is not None else p) for p in found]


def difference(ours: list[Tensor], plain: list[Tensor]) -> float:
    pairs = zip(ours, plain, strict=True)
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)


def behind_products(rows: int, *more: str) -> dict[str, Any]:
    """distributed.overlap = ["tp"], compiled: one step, beside one that is not."""

    def passes(*words: str) -> list[Tensor]:
        _, model = model_of("--distributed.tp=2", *words)
        tokens = torch.arange(rows * T).view(rows, T) * 7 % 64
        loss = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        return [loss.detach(), *parts(model, gradients=True)]

    dist.is_nccl_available = lambda: True  # the pass asks
    backend: Any = functools.partial(compile_fx, inner_compile=compiled)
    torch.compile = functools.partial(COMPILE, backend=backend)  # type: ignore[assignment]
    with _scoped_library("symm_mem", "IMPL") as library, symmetric._test_mode():
        for name in FUSED:
            library.impl(name, getattr(symmetric, f"_{name}_fallback"), "CPU")
        plain = passes()
        ours = passes("--train.compile", "--distributed.overlap=['tp']", *more)
    # The graphs between are the loss's.
    worst = difference(ours, plain)
    return {"forward": graphs[0], "backward": graphs[-1], "worst": worst}


def four_steps(*words: str) -> tuple[list[Tensor], Any, Any]:
    """The losses of four steps of two micro-batches, and the weights after them; the model and its
    optimizer."""
    cfg, model = model_of("--train.micro_batch=1", *words)
    optimizer = build_optimizer(model, cfg.optimizer)
    losses = []
    for step in range(4):
        for half in range(2):
            tokens = torch.arange(T).view(1, T) * (step + half + dist.get_rank() + 3) % 64
            begin_micro_batch(model, last=half == 1, first=half == 0)
            loss = model(tokens, tokens.roll(-1, 1)) / (4 * T)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *parts(model)], model, optimizer


def gathers_in_fp8() -> dict[str, Any]:
    """train.fp8 = tensorwise_gather."""
    import torchao.float8

    sent: list[torch.dtype] = []
    computations: list[Any] = []  # of the scales
    late: list[Any] = []  # streams that have not waited for the scales
    unsafe: list[Any] = []  # of these, each that has rounded weights
    gather = FSDPParam.all_gather_inputs.fget  # type: ignore[attr-defined]
    scales = torchao.float8.precompute_float8_dynamic_scale_for_fsdp

    def watched(self: Any) -> Any:
        found = gather(self)
        sent.extend(x.dtype for x in found)
        if torch.float8_e4m3fn in sent[-len(found) :]:
            unsafe.extend(stream for stream in late if stream is torch.cpu.current_stream())
        return found

    def computed(model: Any) -> None:
        scales(model)
        computations.append(model)
        late[:] = [model._get_fsdp_state()._comm_ctx.all_gather_copy_in_stream]

    def waits(self: Any, other: Any) -> None:
        late[:] = [stream for stream in late if stream is not self or other in late]

    torchao.float8.precompute_float8_dynamic_scale_for_fsdp = computed
    torch.cpu.Stream.wait_stream = waits  # type: ignore[method-assign]
    FSDPParam.all_gather_inputs = property(watched)  # type: ignore[method-assign,assignment]
    fp8.need_fp8 = lambda *_: None
    with registered("aten", _scaled_mm=kernels.scaled_mm):
        plain, *other = four_steps("--train.fp8=tensorwise")
        sent.clear()
        ours, *mine = four_steps("--train.fp8=tensorwise_gather")
        # What a checkpoint stores, and fills, are the masters themselves, under the same names.
        stored = [collect_state(run_state(*each))[0] for each in (mine, other)]
        assert stored[0].keys() == stored[1].keys()
        with torch.no_grad():
            for name, tensor in stored[0].items():
                part, same = local_part(tensor), local_part(stored[1][name])
                assert type(part) is Tensor and part.dtype == same.dtype and torch.equal(part, same)
                if name.startswith("model."):
                    part.mul_(1.5)
                    same.mul_(1.5)
            tokens = torch.arange(T).view(1, T)
            found = [each[0](tokens, tokens) for each in (mine, other)]
        computations.clear()
        four_steps("--train.fp8=tensorwise_gather", "--distributed.dp_replicate=2")
    assert torch.equal(*found) and len(computations) == 4, len(computations)
    eight = sum(dtype is torch.float8_e4m3fn for dtype in sent) / len(sent)
    return {"worst": difference(ours, plain), "in_fp8": eight, "unsafe": len(unsafe)}


def reductions_apart() -> dict[str, Any]:
    """distributed.overlap = ["reduce"]."""
    plain, _, _ = four_steps()
    ours, model, _ = four_steps("--distributed.overlap=['reduce']")
    (part,) = model.blocks[0]._get_fsdp_state()._fsdp_param_groups
    apart = part._reduce_scatter_process_group is not part._all_gather_process_group
    return {"worst": difference(ours, plain), "apart": apart}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "one row": lambda: behind_products(1),
    "two rows": lambda: behind_products(2),
    "recompute": lambda: behind_products(1, "--train.recompute=full"),
    "fp8": gathers_in_fp8,
    "reduce": reductions_apart,
}


def rank_of(rank: int, folder: str, cases: list[str]) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS
    )
    for case in cases:
        found = CASES[case]()
        if rank == 0:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    child = os.fork()
    try:
        rank_of(1 if child == 0 else 0, sys.argv[1], sys.argv[2:])
        sys.stdout.flush()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if child:
        code = code or os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code)
