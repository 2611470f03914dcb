"""The loss of reinforcement learning: ten lines of reference, extremes, packing, and an engine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kempner.extensions.generate.config import Sampling
from kempner.extensions.generate.engine import Engine, GenerationRequest
from kempner.extensions.rl.config import LossConfig, SamplingConfig
from kempner.extensions.rl.trainer.batch import micro_batches
from kempner.extensions.rl.trainer.loss import Policy, policy_losses
from kempner.extensions.rl.trainer.publish import whole_tensors
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder
from kempner.model.loss import VocabularyPart
from kempner.parallel.config import LoraConfig
from kempner.parallel.lora import add_adapters
from kempner.train.sections import RunConfig, TrainConfig
from tests.scripted import Sample, arrays, samples

SHAPE = ModelConfig(
    vocab_size=257, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, max_seq_len=64
)
LOSSES = {
    "grpo": LossConfig(kl=0.1),
    "masked": LossConfig(name="masked", mask=0.003, kl=0.001),
}


def policy(loss: LossConfig, temperature: float = 1.0, chunk: int | None = None) -> Policy:
    cfg = RunConfig(
        more=(("rl.loss", loss), ("rl.sampling", SamplingConfig(temperature=temperature))),
        train=TrainConfig(loss_chunk=chunk),
    )
    return Policy(cfg, torch.device("cpu"))


def batch_of(rows: list[list[Sample]], seq_len: int = 32) -> Any:
    made = {name: torch.from_numpy(array) for name, array in arrays(rows, seq_len).items()}
    made["fresh"] = torch.ones_like(made["inputs"], dtype=torch.bool)
    (batch,) = micro_batches(made, None, pin=False)
    return batch


def reference(cfg: LossConfig, logits: Tensor, batch: Any, temperature: float) -> Tensor:
    """In fp64, of all logits at once."""
    counts = batch.targets != -100
    logp = F.log_softmax(logits.double() / temperature, -1)[counts]
    new = logp.gather(1, batch.targets[counts].unsqueeze(1)).squeeze(1)
    old, gain = batch.logprobs[counts].double(), batch.advantages[counts].double()
    ratio = (new - old).exp()
    if cfg.name == "masked":
        moved = new.exp() - old.exp()
        keep = ~(((gain > 0) & (moved > cfg.mask)) | ((gain < 0) & (moved < -cfg.mask)))
        cap, flat = cfg.is_cap, ratio.clip(max=cfg.is_cap)
        terms = -((flat + cap * (ratio / flat).log()) * gain)[keep].sum()
    else:
        clipped = torch.min(ratio * gain, ratio.clip(0.8, 1.28) * gain)
        terms = -torch.where(gain < 0, torch.max(clipped, cfg.dual_clip * gain), clipped).sum()
    return terms + cfg.kl * (new - old).square().sum()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_a_reference(name: str, temperature: float) -> None:
    """In chunks that do not divide the tokens, and over two parts of the vocabulary."""
    torch.manual_seed(0)
    batch = batch_of([samples(1, 4)[:2], samples(2, 4)[2:]])
    x = torch.randn(2, 32, 16, dtype=torch.float64).float().requires_grad_()
    weight = (0.3 * torch.randn(257, 16)).requires_grad_()
    expected = reference(LOSSES[name], F.linear(x, weight), batch, temperature)
    gradients = torch.autograd.grad(expected, (x, weight))
    objective = policy(LOSSES[name], temperature, chunk=7)
    objective._batch = batch
    loss, terms = objective.loss(x.flatten(0, 1), weight, batch.targets.flatten())
    torch.testing.assert_close(loss, expected.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(terms.sum(), loss)
    assert not terms[batch.targets.flatten() == -100].any()
    found = torch.autograd.grad(loss, (x, weight))
    for one, other in zip(found, gradients, strict=True):
        assert (one - other).norm() / other.norm() < 1e-5
    numbers = objective.numbers()
    assert 0 < numbers["held_back"] < (batch.targets != -100).sum()
    assert numbers["fresh_sum"] == numbers["mismatch_sum"] > 0 and numbers["kl_sum"] > 0
    assert not objective.numbers()["kl_sum"]  # it begins anew


def test_over_parts_of_the_vocabulary() -> None:
    """As the ranks of tensor parallelism have it: the gradient of x is a sum over them."""
    torch.manual_seed(0)
    batch = batch_of([samples(1, 2)])
    x, weight = torch.randn(32, 16), 0.3 * torch.randn(257, 16)
    logits = (x @ weight.t()) / 0.7
    known = logits.gather(1, batch.targets.flatten().clamp(min=0).unsqueeze(1))
    found: list[Tensor] = []
    for first, end in ((0, 257), (0, 129), (129, 257)):
        objective, mine = policy(LOSSES["grpo"], 0.7), x.clone().requires_grad_()
        objective._batch = batch

        def over_all(total: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
            return logits.logsumexp(1, keepdim=True), known

        part = VocabularyPart(first, 129, over_all) if end - first < 257 else None
        loss, _ = objective.loss(mine, weight[first:end], batch.targets.flatten(), part)
        loss.backward()
        assert mine.grad is not None
        found.append(mine.grad)
    torch.testing.assert_close(found[1] + found[2], found[0])


@pytest.mark.parametrize(
    ("cfg", "ratio", "advantage", "slope"),
    [
        # -min(r A, clip(r) A): arXiv:2503.14476; below, for A < 0, at most c: arXiv:1912.09729
        (LossConfig(), 1.2, 2.0, -1.2 * 2.0),
        (LossConfig(), 1.5, 2.0, 0.0),
        (LossConfig(), 0.5, -2.0, 0.0),
        (LossConfig(), 2.5, -2.0, 2.5 * 2.0),
        (LossConfig(), 3.5, -2.0, 0.0),
        (LossConfig(), 1e4, -2.0, 0.0),
        # min(r, C) A grad log p: arXiv:2506.13585
        (LossConfig(name="tis"), 0.5, 2.0, -0.5 * 2.0),
        (LossConfig(name="tis"), 1.5, -2.0, 1.5 * 2.0),
        (LossConfig(name="tis"), 1e4, -2.0, 2.0 * 2.0),
        (LossConfig(name="tis", is_cap=5.0), 10.0, 2.0, -5.0 * 2.0),
    ],
)
def test_slopes_by_hand(cfg: LossConfig, ratio: float, advantage: float, slope: float) -> None:
    """Of a token's loss by its log-probability; the sampler has drawn it with 1e-6."""
    old = torch.tensor([math.log(1e-6)], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    terms, _, held = policy_losses(cfg, new, old, torch.tensor([advantage], dtype=torch.float64))
    (found,) = torch.autograd.grad(terms.sum(), new)
    assert found.item() == pytest.approx(slope, rel=1e-6)
    assert held.item() == (slope == 0 or ratio > cfg.is_cap) or cfg.name == "grpo"


@pytest.mark.parametrize(
    ("before", "now", "advantage", "counts"),
    [
        (0.9, 0.5, 1.0, True),
        (0.5, 0.9, 1.0, False),
        (0.5, 0.9, -1.0, True),
        (0.9, 0.5, -1.0, False),
    ],
)
def test_the_mask_follows_the_sign_of_the_advantage(
    before: float, now: float, advantage: float, counts: bool
) -> None:
    """A good token that has become less likely is pushed back, and a bad one that has risen."""
    new = torch.tensor([math.log(now)], requires_grad=True)
    given = torch.tensor([math.log(before)]), torch.tensor([advantage])
    terms, _, held = policy_losses(LossConfig(name="masked"), new, *given)
    (slope,) = torch.autograd.grad(terms.sum(), new)
    assert bool(slope.item()) == counts == (not held.item())


NUMBERS = st.one_of(
    st.floats(max_value=0.0, allow_nan=False, width=32),
    st.sampled_from([0.0, -0.0, -1e-45, -1e-7, -20.0, -1e4, -3e38, -math.inf]),
)


@settings(max_examples=300, deadline=None)
@given(NUMBERS, NUMBERS, st.sampled_from([0.0, 1e-30, 1.0, -1.0, 1e3, -1e3]), st.booleans())
def test_no_pair_of_log_probabilities_gives_infinity_or_nan(
    new: float, old: float, advantage: float, half: bool
) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    for cfg in (replace(LOSSES["grpo"], kl=1.0), replace(LOSSES["masked"], kl=1.0)):
        value = torch.tensor([new], dtype=dtype).requires_grad_()
        given = torch.tensor([old], dtype=dtype), torch.tensor([advantage], dtype=dtype)
        terms, log_ratio, _ = policy_losses(cfg, value, *given)
        (slope,) = torch.autograd.grad(terms.sum(), value)
        for number in (terms, log_ratio.expm1(), slope):
            assert torch.isfinite(number).all(), (cfg.name, number)


def test_what_is_not_a_number_is_not_hidden() -> None:
    """A model that has become one is found by the step, which skips its update."""
    for cfg in LOSSES.values():
        terms, *_ = policy_losses(cfg, torch.tensor([math.nan]), torch.zeros(1), torch.ones(1))
        assert terms.isnan()


def gradients(model: Decoder, objective: Policy, batches: list[Any]) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = torch.zeros(())
    for batch in batches:
        part = objective(model, batch)[0]
        part.backward()
        loss += part.detach()
    return loss, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(SHAPE)
    for name, p in decoder.named_parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.1 if "embed" not in name else 1.0)
    return decoder


def test_packing_changes_nothing(model: Decoder) -> None:
    objective, drawn = policy(LOSSES["grpo"]), samples(3, 6)
    model.loss = objective.loss
    packed, expected = gradients(model, objective, [batch_of([drawn[:3], drawn[3:]], 64)])
    alone, found = gradients(model, objective, [batch_of([[sample]], 16) for sample in drawn])
    torch.testing.assert_close(alone, packed, rtol=1e-5, atol=1e-5)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() / other.norm() < 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_engine_and_the_trainer_agree(model: Decoder, temperature: float) -> None:
    """Log-probabilities of what the kit's engine has sampled: mean distance under 1e-4."""
    engine = Engine[GenerationRequest](model, SHAPE.vocab_size, 64, 8)
    sampling = Sampling(temperature=temperature, max_tokens=12, seed=1)
    requests = [GenerationRequest(i, list(range(5 + i)), sampling) for i in range(6)]
    engine.join(requests)
    while len(requests[-1].new) < 12:
        engine.step()
    drawn = [([*r.prompt, *r.new[:12]], r.logprobs[:12], 1.0) for r in requests]
    objective = policy(LOSSES["grpo"], temperature)
    model.loss = objective.loss
    objective(model, batch_of([drawn[:3], drawn[3:]], 64))
    numbers = objective.numbers()
    assert numbers["mismatch_sum"] / (6 * 12) < 1e-4
    assert not numbers["held_back"]


def test_adapters_are_published_within_their_matrices() -> None:
    torch.manual_seed(0)
    model, merged = Decoder(SHAPE), Decoder(SHAPE)
    add_adapters(model, LoraConfig(rank=3, alpha=12.0))
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, mean=float("norm" in name), std=0.1)
    tensors = dict(whole_tensors(model, 12.0 / 3))
    merged.load_state_dict(tensors)
    tokens = torch.randint(257, (2, 9))
    plain = model.cast(torch.float32)
    torch.testing.assert_close(merged(tokens), plain(tokens), rtol=1e-4, atol=1e-5)
