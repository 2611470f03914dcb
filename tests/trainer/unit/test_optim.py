"""The schedule, the groups, and the guarded update against plain PyTorch."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from kempner.data.config import DataConfig
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder
from kempner.optim.build import build_optimizer, set_learning_rate
from kempner.optim.config import OptimizerConfig, ScheduleConfig, learning_rate
from kempner.parallel.layout import Axes, Layout
from kempner.train.checks import combination_problems
from kempner.train.progress import Progress
from kempner.train.recording.metrics import Clock
from kempner.train.sections import RunConfig
from kempner.train.step import PendingStep, StepNumbers, guard_update, reduce_step

# --- The schedule -------------------------------------------------------------------------------

WARM = {"warmup_steps": 10, "min_lr_ratio": 0.1}


@pytest.mark.parametrize(
    ("cfg", "points"),
    [
        # 10 steps of warm-up, then 100; the peak is 2.
        (
            {"name": "cosine"},
            {10: 2.0, 35: 0.2 + 1.8 * (1 + math.sqrt(0.5)) / 2, 60: 1.1, 110: 0.2},
        ),
        ({"name": "linear"}, {10: 2.0, 35: 1.55, 60: 1.1, 110: 0.2}),
        ({"name": "rex"}, {10: 2.0, 60: 0.2 + 1.8 * 2 / 3, 110: 0.2}),
        ({"name": "constant"}, {10: 2.0, 60: 2.0, 109: 2.0}),
        ({"name": "wsd", "decay_steps": 20}, {10: 2.0, 89: 2.0, 99: 1.1, 109: 0.2}),
        ({"name": "wsd"}, {98: 2.0, 99: 2.0 - 1.8 / 11, 109: 0.2}),  # a tenth: 11 steps
        (
            {"name": "wsd", "decay_steps": 20, "decay_shape": "cosine"},
            {89: 2.0, 94: 0.2 + 1.8 * (1 + math.sqrt(0.5)) / 2, 99: 1.1, 109: 0.2},
        ),
        (
            {"name": "wsd", "decay_steps": 20, "decay_shape": "1-sqrt"},
            {89: 2.0, 94: 1.1, 109: 0.2},
        ),
    ],
)
def test_schedule(cfg: dict[str, object], points: dict[int, float]) -> None:
    schedule = ScheduleConfig(**WARM, **cfg)
    rates = [learning_rate(schedule, 2.0, step, 110) for step in range(200)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])  # never 0
    assert {step: rates[step] for step in points} == pytest.approx(points)
    assert all(after <= before for before, after in itertools.pairwise(rates[9:]))
    assert min(rates[10:]) == pytest.approx(2.0 if schedule.name == "constant" else 0.2)


def test_without_warm_up_the_first_update_has_the_peak() -> None:
    assert learning_rate(ScheduleConfig(name="cosine"), 3e-4, 0, 100) == pytest.approx(3e-4)


def test_no_schedule_is_the_peak_at_every_step() -> None:
    none = ScheduleConfig(name="none")
    assert {learning_rate(none, 3e-4, step, 100) for step in range(200)} == {3e-4}
    (problem,) = ScheduleConfig(name="none", warmup_steps=10).problems()
    assert "schedule.warmup_steps = 10" in problem and "name=constant" in problem


@pytest.mark.parametrize("schedule", ["cosine", "linear", "rex", "wsd", "constant", "none"])
def test_schedule_free_decays_nothing(schedule: str) -> None:
    optimizer = OptimizerConfig(name="schedule_free")
    data, decay = DataConfig("x"), ScheduleConfig(name=schedule)
    cfg = RunConfig(data=data, optimizer=optimizer, schedule=decay)
    assert bool(combination_problems(cfg)) == (schedule not in ("constant", "none"))
    assert OptimizerConfig(name="schedule_free", betas=(0.0, 0.9)).problems()


def test_moments_that_never_forget_are_refused() -> None:
    assert OptimizerConfig().problems() == []
    for betas in ((1.0, 0.9), (0.9, -0.1)):
        (problem,) = OptimizerConfig(betas=betas).problems()
        assert problem.startswith("optimizer.betas = [") and "under 1" in problem


# --- The groups ---------------------------------------------------------------------------------


def test_matrices_decay_norms_and_embeddings_do_not() -> None:
    model = Decoder(ModelConfig(dim=32, n_layers=2, n_heads=4, ffn_dim=48, qk_norm=True))
    cfg = OptimizerConfig(weight_decay=0.3, lr=7e-4, betas=(0.8, 0.9), eps=1e-6)
    decay, rest = build_optimizer(model, cfg).param_groups
    names = {p: name for name, p in model.named_parameters()}
    plain = {names[p] for p in rest["params"]}
    assert decay["weight_decay"] == 0.3 and rest["weight_decay"] == 0.0
    assert plain == {name for name in names.values() if "norm" in name or name == "embed.weight"}
    assert len(decay["params"]) + len(plain) == len(names)
    assert (decay["lr"], decay["betas"], decay["eps"]) == (7e-4, (0.8, 0.9), 1e-6)


# --- The guarded update -------------------------------------------------------------------------


pytestmark = pytest.mark.usefixtures("one_process")


def copies(count: int) -> Layout:
    """A layout of so many ranks that all hold the whole model: one process plays them."""
    return Layout(Axes(replicate=count), 0, mesh=None)  # type: ignore[arg-type]


BUDGET = 16  # tokens of a step, if every one counts


def guarded_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, losses: Tensor, clip: float
) -> StepNumbers:
    """As the trainer does it, with one loss per token that counts."""
    (losses.sum() / BUDGET).backward()
    parts = {
        "loss_sum": losses.detach().sum(),
        "tokens": torch.tensor(float(len(losses))),
        "grad_norm_sq": copies(1).norm_sq(model.parameters()),
        "asks_stop": 1.0,
        "work": 0.5,
    }
    numbers = guard_update(optimizer, reduce_step(parts, copies(1)), BUDGET, clip)
    optimizer.step()
    optimizer.zero_grad()
    return numbers


@pytest.mark.parametrize("clip", [0.0, 0.05, 100.0], ids=["none", "clipped", "far-away"])
def test_update_is_that_of_the_mean_clipped_then_adamw(clip: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    plain = copy.deepcopy(model)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2, weight_decay=0.1))
    matrices, rest = ([p for p in plain.parameters() if (p.ndim == 2) is m] for m in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for count in (16, 5, 1, 12):  # tokens that count: fewer than the step_tokens, and never as many
        x = torch.randn(count, 8)
        numbers = guarded_step(model, optimizer, model(x).square().flatten(), clip)
        loss = plain(x).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), clip or math.inf)
        reference.step()
        reference.zero_grad()
        told = PendingStep(Progress(1, 3, 2), 0.1, numbers, Clock()).read()
        assert (told.values["loss"], told.values["grad_norm"]) == pytest.approx(
            (loss.item(), norm.item())
        )
        assert not told.bad and told.values["asks_stop"] == 1.0 and told.values["work"] == 0.5
        assert told.step == 1 and told.after.samples == 3
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fault", ["loss", "gradient", "no-token"])
def test_a_bad_step_changes_nothing(fault: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
    guarded_step(model, optimizer, model(torch.randn(6, 4)).flatten(), 1.0)

    def everything() -> list[Tensor]:
        state = [value for p in model.parameters() for value in optimizer.state[p].values()]
        return [x.clone() for x in (*model.parameters(), *state)]

    before = everything()
    losses = model(torch.randn(6, 4)).flatten()
    if fault == "loss":  # infinite, although the gradient is not
        losses = losses + math.inf
    elif fault == "gradient":
        losses = losses * math.inf
    else:
        losses = losses[:0]
    assert guarded_step(model, optimizer, losses, 1.0)["bad"] == 1.0
    assert all(torch.equal(old, new) for old, new in zip(before, everything(), strict=True))
    guarded_step(model, optimizer, model(torch.randn(6, 4)).flatten(), 1.0)
    assert not torch.equal(before[0], model.weight)  # the next good one counts again


def test_a_gradient_that_several_ranks_hold_counts_once() -> None:
    """Every rank has the whole gradient; the sum over all ranks has it so many times."""
    model = nn.Linear(3, 1, bias=False)
    model.weight.grad = torch.tensor([[1.0, 2.0, 2.0]])
    assert copies(1).norm_sq(model.parameters()) == 9.0
    assert copies(4).norm_sq(model.parameters()) == 9.0 / 4


def test_norm_of_a_rank_with_empty_shards() -> None:
    """A small parameter over many ranks leaves some of them without a row."""
    full, empty = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(0, 2))
    full.grad, empty.grad = torch.full((2, 2), 3.0), torch.zeros(0, 2)
    unused = nn.Parameter(torch.zeros(5))
    assert copies(1).norm_sq([full, empty, unused]) == 36.0


def test_the_norm_of_gradients_in_bf16_is_not_rounded_to_bf16() -> None:
    weight = torch.nn.Parameter(torch.zeros(300, 300, dtype=torch.bfloat16))
    weight.grad = torch.randn(300, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = copies(1).norm_sq([weight])
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(weight.grad.double().square().sum().item(), rel=1e-5)


def test_a_group_keeps_its_multiple_of_the_learning_rate() -> None:
    optimizer = build_optimizer(nn.Linear(4, 4), OptimizerConfig(lr=1e-2))
    optimizer.param_groups[1]["lr_scale"] = 0.1
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, pytest.approx(0.05)]
