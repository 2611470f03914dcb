"""The mixture of experts against ten plain lines and against transformers; its balance; what its
numbers of parameters and operations are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kempner.data.config import DataConfig
from kempner.extensions.preference.config import PreferenceConfig
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder
from kempner.model.moe import (
    ExpertRouter,
    Experts,
    MixtureOfExperts,
    balance_loss,
    has_grouped_mm,
    one_by_one,
    through_experts,
)
from kempner.optim.build import build_optimizer
from kempner.optim.config import OptimizerConfig
from kempner.train.checks import combination_problems
from kempner.train.configure import print_warnings
from kempner.train.sections import RunConfig

SHAPE = ModelConfig(
    vocab_size=61, dim=32, n_layers=2, n_heads=4, ffn_dim=16, max_seq_len=32, n_experts=6
)
CASES: dict[str, dict[str, Any]] = {
    "softmax": {"experts_per_token": 3},
    "as they are": {"router_normalize": False, "experts_per_token": 1},
    "sigmoid": {"router": "sigmoid", "router_bias": True, "router_scale": 2.5},
    "shared": {"shared_experts": 2, "router_bias": True},
}


def layer(**changes: Any) -> MixtureOfExperts:
    """With random weights and biases, of order 1."""
    torch.manual_seed(0)
    moe = MixtureOfExperts(replace(SHAPE, **changes))
    with torch.no_grad():
        for tensor in (*moe.parameters(), *moe.buffers()):
            tensor.normal_(std=0.3)
    return moe


def plain(moe: MixtureOfExperts, x: Tensor) -> Tensor:
    """Token by token."""
    cfg, result = moe.cfg, []
    for token in x.flatten(0, 1):
        logits = moe.router.weight @ token
        scores = logits.sigmoid() if cfg.router == "sigmoid" else logits.softmax(0)
        ranked = scores if moe.router_bias is None else scores + moe.router_bias
        chosen = ranked.argsort(descending=True)[: cfg.experts_per_token]
        total = scores[chosen].sum() if cfg.router_normalize else 1.0
        y = torch.zeros_like(token) if moe.shared is None else moe.shared(token)
        for e in chosen:
            hidden = F.silu(moe.experts.w1[e] @ token) * (moe.experts.w3[e] @ token)
            y = y + cfg.router_scale * scores[e] / total * (moe.experts.w2[e] @ hidden)
        result.append(y)
    return torch.stack(result).view(x.shape)


@pytest.mark.parametrize("case", CASES)
def test_the_layer_is_the_weighted_sum_of_its_experts(case: str) -> None:
    moe = layer(**CASES[case])
    x = torch.randn(3, 8, 32, requires_grad=True)
    parts = (x, *moe.parameters())
    (y, routing), expected = moe(x), plain(moe, x)
    assert routing.load.sum() == 3 * 8 * moe.cfg.experts_per_token and routing.balance is None
    torch.testing.assert_close(y, expected)
    along = torch.randn(y.shape)
    for got, want in zip(
        torch.autograd.grad((y * along).sum(), parts),
        torch.autograd.grad((expected * along).sum(), parts),
        strict=True,
    ):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_the_grouped_kernel_is_the_loop_over_the_experts() -> None:
    """Also where an expert gets no token. Rows that the kernel does not take go through the
    loop."""
    moe = layer().bfloat16()
    w1, w2, w3 = moe.experts.w1, moe.experts.w2, moe.experts.w3
    x, load = torch.randn(20, 32).bfloat16().requires_grad_(), torch.tensor([7, 0, 5, 1, 0, 7])
    assert has_grouped_mm(x, w1) and not has_grouped_mm(x.float(), w1)
    assert not has_grouped_mm(x, torch.empty(6, 10, 32))
    along, found = torch.randn(20, 32).bfloat16(), []
    for way in (through_experts, one_by_one):
        y = way(x, load, w1, w2, w3)
        found.append((y, *torch.autograd.grad((y * along).sum(), (x, w1, w2, w3))))
    for grouped, looped in zip(*found, strict=True):
        torch.testing.assert_close(grouped, looped)
    assert not found[0][2][1].any() and found[0][2][0].any()  # of the weights of both experts


def test_a_router_multiplies_in_fp32() -> None:
    """Of numbers in bf16, too, with the gradients of that product; and in fp32 as any layer."""
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        router = ExpertRouter(64, 32, bias=False).to(dtype)
        x = torch.randn(3, 5, 64).to(dtype).requires_grad_()
        logits, along = router(x), torch.randn(3, 5, 32)
        exact = [tensor.detach().double().requires_grad_() for tensor in (x, router.weight)]
        expected = F.linear(*exact)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected.float())
        found = torch.autograd.grad((logits * along).sum(), (x, router.weight))
        theirs = torch.autograd.grad((expected * along).sum(), exact)
        for ours, reference in zip(found, theirs, strict=True):
            torch.testing.assert_close(ours, reference.to(dtype))


def test_no_token_is_dropped_when_all_want_the_same_expert() -> None:
    moe = layer(router_bias=True, experts_per_token=1)
    assert moe.router_bias is not None
    moe.router_bias[4] = 100.0
    x = torch.randn(2, 8, 32)
    y, routing = moe(x)
    assert routing.load.tolist() == [0, 0, 0, 0, 16, 0]
    torch.testing.assert_close(y, plain(moe, x))


def test_sigmoid_bias_and_shared_experts_are_those_of_deepseek() -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    settings = DeepseekV3Config(
        hidden_size=32, moe_intermediate_size=16, n_routed_experts=6, num_experts_per_tok=2,
        n_shared_experts=2, n_group=1, topk_group=1, norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    theirs = DeepseekV3MoE(settings)
    moe = layer(router="sigmoid", router_bias=True, shared_experts=2, router_scale=2.5)
    gate_up = torch.cat((moe.experts.w1, moe.experts.w3), 1)
    state = {
        "gate.weight": moe.router.weight, "gate.e_score_correction_bias": moe.router_bias,
        "experts.gate_up_proj": gate_up, "experts.down_proj": moe.experts.w2,
    }  # fmt: skip
    assert moe.shared is not None
    for ours, name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        state[f"shared_experts.{name}.weight"] = getattr(moe.shared, ours).weight
    theirs.load_state_dict(state)
    x = torch.randn(2, 16, 32)
    with torch.no_grad():
        torch.testing.assert_close(moe(x)[0], theirs(x))


def test_the_auxiliary_loss_is_that_of_the_paper() -> None:
    """Row by row, and 1 where every expert is used alike."""
    scores, chosen = torch.rand(2, 5, 6), torch.randint(6, (2, 5, 3))
    for row, value in enumerate(balance_loss(scores, chosen)):
        shares = scores[row] / scores[row].sum(-1, keepdim=True)
        used = torch.bincount(chosen[row].flatten(), minlength=6)
        expected = (6 / (3 * 5) * used * shares.mean(0)).sum()
        torch.testing.assert_close(value, expected)
    alike = torch.arange(6).view(1, 2, 3)
    torch.testing.assert_close(balance_loss(torch.ones(1, 2, 6), alike), torch.ones(1))
    logits = torch.full((1, 2, 6), -200.0, requires_grad=True)  # their sigmoids are 0 in fp32
    loss = balance_loss(logits.sigmoid(), alike)
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss == 0.0 and not grad.any()


def gradients(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    model.zero_grad()
    for tokens, targets in batches:
        model(tokens, targets).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_the_auxiliary_loss_has_a_gradient_and_no_part_in_the_loss() -> None:
    """The gradient is that of loss + coefficient * sum of the layers' auxiliary losses, each row
    weighted by its targets, and the same for any split into micro-batches."""
    torch.manual_seed(0)
    tokens, targets = torch.randint(61, (2, 4, 16))
    targets[1:3, :9] = -100
    plain_model, model = Decoder(SHAPE), Decoder(replace(SHAPE, aux_loss=0.5))
    model.load_state_dict(plain_model.state_dict())
    loss = model(tokens, targets)
    assert torch.equal(loss, plain_model(tokens, targets)) and loss.requires_grad
    model.routings.take()

    whole = gradients(model, [(tokens, targets)])
    load, losses = model.routings.take()
    assert load.tolist() == plain_model.routings.take()[0].tolist() and load.sum() == 2 * 64 * 2
    halves = [(tokens[i : i + 2], targets[i : i + 2]) for i in (0, 2)]
    for one, other in zip(whole, gradients(model, halves), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    again, losses_again = model.routings.take()
    assert torch.equal(load, again)
    torch.testing.assert_close(losses, losses_again)

    seen: list[Tensor] = []
    for block in plain_model.blocks:
        block.ffn.register_forward_hook(
            lambda moe, args, _: seen.append(balance_loss(*moe.route(args[0])[:2]))
        )
    plain_model.zero_grad()
    loss = plain_model(tokens, targets)
    total = (sum(seen) * (targets >= 0).sum(1)).sum()
    (loss + 0.5 * total).backward()
    torch.testing.assert_close(losses, {"aux_loss": total.detach() / 2})
    for one, parameter in zip(whole, plain_model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_the_z_loss_of_routers_is_that_of_the_plain_formula(router: str) -> None:
    """log^2 of the sum of the exponentials, in fp64, over the tokens that count; in any split into
    micro-batches; and no part of the loss that is recorded."""
    torch.manual_seed(0)
    tokens, targets = torch.randint(61, (2, 4, 16))
    targets[1:3, :9] = -100
    shape = replace(SHAPE, router=router, init_std=0.3)
    model, plain_model = Decoder(replace(shape, router_z_loss=0.2)), Decoder(shape)
    plain_model.load_state_dict(model.state_dict())
    plain_model.double()
    squares: list[Tensor] = []
    for block in plain_model.blocks:
        block.ffn.router.register_forward_hook(
            lambda _, args, logits: squares.append(logits.exp().sum(-1).log() ** 2)
        )
    loss = plain_model(tokens, targets)
    total = (sum(squares) * (targets >= 0)).sum()
    (loss + 0.2 * total).backward()
    assert model(tokens, targets).item() == pytest.approx(loss.item(), rel=1e-6)
    model.routings.take()
    found = gradients(model, [(tokens[:3], targets[:3]), (tokens[3:], targets[3:])])
    _, losses = model.routings.take()
    assert losses["router_z_loss"].item() == pytest.approx(total.item() / 2, rel=1e-6)
    assert len(losses) == 1
    for one, parameter in zip(found, plain_model.parameters(), strict=True):
        assert (one - parameter.grad).norm() < 1e-5 * parameter.grad.norm()


def test_a_step_moves_the_biases_towards_equal_load_unless_it_was_bad() -> None:
    cfg = replace(SHAPE, router_bias=True, router_bias_speed=0.5, n_experts=3)
    model = Decoder(cfg)
    optimizer = build_optimizer(model, OptimizerConfig())
    tokens = torch.randint(61, (2, 8))
    model(tokens, tokens).backward()
    load = torch.tensor([[9.0, 6.0, 3.0], [6.0, 6.0, 6.0]])
    expected = [[-0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]
    for bad, times in ((1.0, 0), (0.0, 1), (0.0, 2)):
        model.routings.step_load = load
        optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.tensor(bad)
        optimizer.step()
        biases = [block.ffn.router_bias for block in model.blocks]
        assert (torch.stack(biases) == times * torch.tensor(expected)).all()
    assert {name for name, _ in model.named_buffers()} - {"rope"} == {
        f"blocks.{i}.ffn.router_bias" for i in range(2)
    }
    assert model.cast(torch.bfloat16).blocks[0].ffn.router_bias.dtype == torch.float32


def test_validation_counts_no_load() -> None:
    model, tokens = Decoder(SHAPE), torch.randint(61, (2, 8))
    with torch.no_grad():
        model(tokens, tokens)
    assert not model.routings.take()[0].any()


@pytest.mark.parametrize("shared", [0, 2])
def test_parameters_and_operations_follow_from_the_shapes(shared: int) -> None:
    """A token goes through 2 of 6 experts, the shared ones and the router."""
    cfg = replace(SHAPE, shared_experts=shared)
    model = Decoder(cfg)
    assert sum(p.numel() for p in model.parameters()) == cfg.count_parameters()
    idle = sum(e.w1[2:].numel() * 3 for e in model.modules() if isinstance(e, Experts))
    assert cfg.count_active() == cfg.count_parameters() - idle
    used = sum(e.w1[:2].numel() * 3 for e in model.modules() if isinstance(e, Experts))
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    assert cfg.flops_per_token(32) == 6 * (used + matrices) + 6 * 2 * 32 * 32
    stds = {name: model.init_std(name) for name, _ in model.named_parameters()}
    assert stds["blocks.0.ffn.experts.w1"] == stds["blocks.0.ffn.router.weight"] == 0.02
    assert stds["blocks.0.ffn.experts.w2"] == 0.01


def test_every_second_block_has_experts() -> None:
    """As in a Qwen3-MoE the last of each two. The numbers of parameters and operations are those
    of the layers that are there; only layers with experts have a load."""
    cfg = replace(SHAPE, n_layers=5, moe_frequency=2, dense_ffn_dim=24, router_bias=True)
    model = Decoder(cfg)
    mixtures = [isinstance(block.ffn, MixtureOfExperts) for block in model.blocks]
    assert mixtures == [False, True, False, True, False] and cfg.mixtures == [1, 3]
    assert model.blocks[0].ffn.w1.weight.shape == (24, 32) and cfg.problems() == []
    assert cfg.count_parameters() == sum(p.numel() for p in model.parameters())
    idle = sum(e.w1[2:].numel() * 3 for e in model.modules() if isinstance(e, Experts))
    assert cfg.count_active() == cfg.count_parameters() - idle
    used = sum(e.w1[:2].numel() * 3 for e in model.modules() if isinstance(e, Experts))
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    assert cfg.flops_per_token(32) == 6 * (used + matrices) + 6 * 5 * 32 * 32
    tokens = torch.randint(61, (2, 8))
    model(tokens, tokens).backward()
    load, _ = model.routings.take()
    assert load.sum(1).tolist() == [32, 32]
    model.routings.step_load = load
    model.move_router_biases(unless=torch.zeros(()))
    for number, of in zip(cfg.mixtures, load, strict=True):
        bias = model.blocks[number].ffn.router_bias
        assert torch.equal(bias, (of.mean() - of).sign().float() * cfg.router_bias_speed)
    shown = [replace(cfg, n_layers=1).problems(), replace(cfg, moe_frequency=1).problems()]
    assert "no block would have experts" in shown[0][0] and "has no effect" in shown[1][0]


def test_options_without_effect_and_combinations_that_are_not_built_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert SHAPE.problems() == [] and ModelConfig().problems() == []
    (problem,) = replace(SHAPE, experts_per_token=7).problems()
    assert problem == "model.experts_per_token = 7: at most n_experts = 6"
    one = replace(SHAPE, experts_per_token=1)
    (problem,) = one.problems()
    assert "no gradient for the router; give --no-model.router_normalize" in problem
    assert not replace(one, router_normalize=False).problems()
    imported = replace(one, init_from="models/imported")  # is as it is; said at the start
    assert not imported.problems()
    print_warnings(RunConfig(model=imported))
    assert "the loss has no gradient for its routers" in capsys.readouterr().err
    (problem,) = ModelConfig(router_bias=True).problems()
    assert problem.startswith("model.router_bias = true: has no effect without experts")
    model = replace(SHAPE, init_from="x", aux_loss=0.1, router_bias=True)
    run = RunConfig(model=model, data=DataConfig("x"))
    lora = combination_problems(replace(run, lora=replace(run.lora, rank=4)))
    assert len(lora) == 3 and "w1, w2, w3 are matrices of experts" in lora[1]
    assert lora[2].startswith("model.router_bias: the biases move")
    (problem,) = combination_problems(run.with_section("preference", PreferenceConfig("dpo")))[-1:]
    assert "model.aux_loss = 0.1: is not built for preference.loss = dpo" in problem
    router = replace(run, model=replace(model, aux_loss=0.0, router_z_loss=0.1))
    (problem,) = combination_problems(router.with_section("preference", PreferenceConfig("dpo")))[
        -1:
    ]
    assert "model.router_z_loss = 0.1: is not built for preference.loss = dpo" in problem
    cut = combination_problems(replace(run, distributed=replace(run.distributed, cp=2)))
    assert any(each.startswith("model.aux_loss = 0.1: is computed over whole") for each in cut)
