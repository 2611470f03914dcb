"""The levers of [train] that change how the decoder computes, each against the plain one: chunks of
the loss, compilation of blocks or of the whole model, bf16 weights, fp8 products."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kempner.config.option import ConfigError
from kempner.data.source import IGNORE
from kempner.extensions.planner.memory import loss_rows
from kempner.extensions.preference.config import PreferenceConfig
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder
from kempner.model.loss import chunk_loss, chunk_rows, cross_entropy
from kempner.optim.build import build_optimizer
from kempner.optim.config import OptimizerConfig
from kempner.parallel import fp8
from kempner.parallel.build import build_model
from kempner.parallel.config import DistributedConfig, LoraConfig
from kempner.parallel.layout import Axes, build_layout
from kempner.train.checks import combination_problems
from kempner.train.levers import package_problems
from kempner.train.resilience.straggler import BlockClock
from kempner.train.sections import RunConfig, TrainConfig
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.usefixtures("one_process")
SHAPE = ModelConfig(vocab_size=64, dim=32, n_layers=3, n_heads=4, ffn_dim=48)
PLAIN = TrainConfig()


def build(**changes: Any) -> Decoder:
    layout = build_layout(DistributedConfig(), 1, 1, "cpu")
    return build_model(SHAPE, layout, replace(PLAIN, **changes), DistributedConfig())


def gradients(model: Decoder) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of fixed tokens, and its gradients by name."""
    tokens = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(1))
    loss, _ = model(tokens, tokens, token_losses=True)
    loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name.replace("_checkpoint_wrapped_module.", "")] = parameter.grad
    return loss.detach(), found


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of the graphs that were compiled, by a backend that runs them as they are."""
    found: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        found.append(len(graph.graph.nodes))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    yield found
    torch._dynamo.reset()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_blocks_share_one_graph_and_a_whole_model_is_one(graphs: list[int], recompute: str) -> None:
    """With the clock of the stragglers on it, as in a run."""
    expected, plain = gradients(build())
    largest: dict[str, int] = {}
    for scope in ("block", "model"):
        graphs.clear()
        torch._dynamo.reset()
        model = build(compile=True, compile_scope=scope, recompute=recompute)
        clock = BlockClock(model, torch.device("cpu"))
        loss, found = gradients(model)
        assert clock.take() > 0.0
        assert len(graphs) == 2 or scope == "model"  # a block, and a chunk of the loss
        largest[scope] = max(graphs)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(found, plain)
    assert largest["model"] > largest["block"]


def test_the_compiler_is_imported_when_something_is_compiled() -> None:
    code = """if True:
        import sys, torch
        from kempner.jobs.system.uncompiled import leave_compiler_out
        leave_compiler_out()
        late = sys.modules["torch._dynamo"]
        parameter = torch.nn.Parameter(torch.ones(3))
        torch.optim.AdamW([parameter], fused=True).step()
        assert torch._dynamo is late and "torch._dynamo.symbolic_convert" not in sys.modules
        graphs = []
        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward
        assert torch.compile(lambda x: x + 1, backend=backend)(parameter).sum() == 6
        assert torch._dynamo.config.cache_size_limit and torch._dynamo is not late
        assert len(graphs) == 1
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr


def test_the_loss_has_chunks_of_the_given_size(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, plain = gradients(build())
    rows: list[int] = []
    real = F.linear

    def counted(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        if weight.shape[0] == SHAPE.vocab_size:
            rows.append(x.shape[0])
        return real(x, weight, *bias)

    monkeypatch.setattr(F, "linear", counted)
    loss, found = gradients(build(loss_chunk=24))
    assert rows == [24, 24, 16]
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, plain)


def test_the_compiled_loss_is_the_eager_one_without_a_scatter() -> None:
    """Which would not fuse with what is around it. Bit for bit, with rows that do not count."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[list[str]] = []

    def compiler(graph: Any, _: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    torch.manual_seed(0)
    x, weight = torch.randn(24, 16).bfloat16(), torch.randn(11, 16).bfloat16()
    targets = torch.randint(11, (24,))
    targets[5:9] = IGNORE
    compiled = torch.compile(chunk_loss, backend=aot_autograd(fw_compiler=compiler))
    found = []
    for how in (None, compiled):
        inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        total, *rest = cross_entropy(*inputs, targets, chunk=8, z_loss=0.3, compiled=how)
        found.append((*rest, total.detach(), *torch.autograd.grad(total, inputs)))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    (operators,) = graphs  # one for all chunks: the products and the loop stay outside of it
    assert not any(word in name for name in operators for word in ("scatter", "gather", "mm"))
    torch._dynamo.reset()


def test_larger_chunks_where_a_gpu_has_the_loss_compiled() -> None:
    """The planner counts them as the loss does, whose weight is a rank's part of the vocabulary."""
    cfg = RunConfig(train=replace(PLAIN, compile=True), model=ModelConfig(vocab_size=1 << 17))
    assert chunk_rows(1 << 17, large=True) == 4 * chunk_rows(1 << 17, large=False) == 1 << 12
    assert loss_rows(cfg, Axes(), gpu=True) == 1 << 12
    assert loss_rows(cfg, Axes(tp=4), gpu=True) == 1 << 14
    assert loss_rows(cfg, Axes(), gpu=False) == 1 << 10
    assert loss_rows(replace(cfg, lora=LoraConfig(4)), Axes(), gpu=True) == 1 << 10


def test_pure_bf16_has_the_rounded_weights_and_bf16_moments() -> None:
    plain, model = build(), build(weights="bf16", dtype="bf16")
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert q.dtype == torch.bfloat16, name
        assert torch.equal(p.bfloat16(), q)
    assert model.rope.dtype == torch.float32
    expected, reference = gradients(plain)
    loss, found = gradients(model)
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    for name, grad in found.items():
        assert torch.cosine_similarity(grad.flatten().float(), reference[name].flatten(), 0) > 0.99
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2, moments="bf16"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    changed = [not torch.equal(before[name], p) for name, p in model.named_parameters()]
    moments = {v.dtype for state in optimizer.state.values() for v in state.values() if v.ndim}
    assert all(changed) and moments == {torch.bfloat16}


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_projections_multiply_in_fp8(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    """torchao's kernels run on a CPU, too, slowly."""
    if recipe == "rowwise" and TORCH < (2, 10):
        pytest.skip("torch 2.9 multiplies by rows on a GPU alone")
    torchao = pytest.importorskip("torchao.float8.float8_linear")
    monkeypatch.setattr(fp8, "need_fp8", lambda *_: None)
    expected, plain = gradients(build(dtype="bf16"))
    model = build(dtype="bf16", fp8=recipe)
    converted = [name for name, m in model.named_modules() if isinstance(m, torchao.Float8Linear)]
    assert len(converted) == 3 * 7  # every projection, and nothing else
    loss, found = gradients(model)
    assert found.keys() == plain.keys()  # checkpoints know these names
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    assert loss != expected
    for name, grad in found.items():
        cosine = torch.cosine_similarity(grad.flatten(), plain[name].flatten(), 0)
        assert cosine > 0.98, (name, cosine)


def test_projections_multiply_in_mxfp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao emulates its kernels on a CPU; a matrix with another size than 32s stays in bf16."""
    pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear")
    monkeypatch.setattr(fp8, "need_fp8", lambda *_: None)
    expected, plain = gradients(build(dtype="bf16"))
    model = build(dtype="bf16", fp8="mxfp8")
    converted = {name for name, m in model.named_modules() if isinstance(m, fp8.MxLinear)}
    large = {
        name
        for name, m in model.blocks.named_modules(prefix="blocks")
        if isinstance(m, torch.nn.Linear) and not any(n % 32 for n in m.weight.shape)
    }
    assert converted == large and len(large) > 3
    loss, found = gradients(model)
    assert found.keys() == plain.keys()
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    assert loss != expected
    for name, grad in found.items():
        cosine = torch.cosine_similarity(grad.flatten(), plain[name].flatten(), 0)
        assert cosine > 0.98, (name, cosine)


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_a_router_is_not_rounded(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    torchao = pytest.importorskip("torchao.float8.float8_linear")
    monkeypatch.setattr(fp8, "need_fp8", lambda *_: None)
    with torch.device("meta"):
        model = Decoder(replace(SHAPE, n_experts=32, experts_per_token=2))
    if recipe == "mxfp8":
        pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear")
    fp8.use_fp8(model, recipe, torch.device("cpu"))
    kind = fp8.MxLinear if recipe == "mxfp8" else torchao.Float8Linear
    converted = {name for name, m in model.named_modules() if isinstance(m, kind)}
    assert {name.rpartition(".")[2] for name in converted} == {"wq", "wk", "wv", "wo"}


def test_fp8_is_refused_where_nothing_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    with pytest.raises(ConfigError, match="a CPU does not multiply 8-bit floats"):
        build(fp8="rowwise")
    gpu = SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(
        ConfigError, match=r"NVIDIA A100 does not .* capability 8\.9 or higher"
    ) as no:
        fp8.need_fp8(gpu, "tensorwise_gather")  # type: ignore[arg-type]
    assert str(no.value).startswith("train.fp8 = tensorwise_gather: ")  # as the user wrote it
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    fp8.need_fp8(gpu, "rowwise")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"mxfp8: NVIDIA A100 .* capability 10\.0 or higher"):
        fp8.need_fp8(gpu, "mxfp8")  # type: ignore[arg-type]
    with torch.device("meta"):
        odd = Decoder(replace(SHAPE, dim=40, n_heads=5, ffn_dim=56))
    with pytest.raises(ConfigError, match="no projection has both sizes a multiple of 16"):
        fp8.use_fp8(odd, "rowwise", gpu)  # type: ignore[arg-type]


TRAIN_WEIGHTS = replace(PLAIN, weights="bf16", dtype="bf16")


@pytest.mark.parametrize(
    ("cfg", "word"),
    [
        (replace(PLAIN, weights="bf16"), "add --train.dtype=bf16"),
        (replace(PLAIN, compile_scope="model"), "add --train.compile"),
        (RunConfig(train=TRAIN_WEIGHTS, lora=LoraConfig(4)), "not built for train.weights = bf16"),
        (
            RunConfig(train=replace(PLAIN, fp8="rowwise"), lora=LoraConfig(4)),
            "not built for train.fp8 = rowwise",
        ),
        (
            RunConfig(
                train=replace(PLAIN, attention="flash"), model=ModelConfig(attention_softcap=50.0)
            ),
            "does not cap scores",
        ),
        (
            RunConfig(
                more=(("preference", PreferenceConfig(loss="reward")),),
                train=replace(PLAIN, loss_chunk=8),
            ),
            "has no effect on preference.loss",
        ),
        (
            RunConfig(
                train=replace(PLAIN, fp8="rowwise"), distributed=DistributedConfig(device="cpu")
            ),
            "not supported on distributed.device = cpu",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused(cfg: Any, word: str) -> None:
    found = cfg.problems() if isinstance(cfg, TrainConfig) else combination_problems(cfg)
    assert any(word in problem for problem in found), found


def test_fp8_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kempner.train.levers.find_spec", lambda _: None)
    cfg = RunConfig(train=replace(PLAIN, fp8="rowwise"))
    assert not cfg.train.problems()  # it may be planned without
    (problem,) = package_problems(cfg)
    assert "torchao is not installed; run" in problem and "[fp8]" in problem


def test_a_chunk_may_be_larger_than_all_tokens() -> None:
    x, weight, targets = torch.randn(4, 8), torch.randn(5, 8), torch.arange(4)
    assert cross_entropy(x, weight, targets, chunk=99)[0] == cross_entropy(x, weight, targets)[0]


def test_fp32_on_a_gpu_is_said() -> None:
    from kempner.train.parts import slow_products

    assert "without TF32" in str(slow_products("cuda", str(torch.float32)))
    assert (
        slow_products("cuda", str(torch.bfloat16)) is slow_products("cpu", "torch.float32") is None
    )
