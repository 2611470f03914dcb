"""Recomputation by need: budgets of the compiler, and train.recompute = auto."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kempner.config.loading import load_config_files
from kempner.config.option import ConfigError
from kempner.parallel.build import build_model
from kempner.parallel.layout import build_layout
from kempner.train.checks import combination_problems
from kempner.train.resilience import room
from kempner.train.sections import RunConfig

SHAPE = [
    "--model.vocab_size=64", "--model.dim=32", "--model.n_layers=1", "--model.n_heads=4",
    "--model.ffn_dim=96", "--model.max_seq_len=64", "--train.seq_len=64",
    "--data.dataset_path=fake:",
]  # fmt: skip


def kept_and_gradients(*words: str) -> tuple[int, dict[str, Tensor]]:
    """Elements that the backward pass keeps beside the weights, and all gradients."""
    torch.compiler.reset()
    cfg = load_config_files(RunConfig, [], [*SHAPE, *words])
    layout = build_layout(cfg.distributed, 1, 1, "cpu")
    model = build_model(cfg.model, layout, cfg.train, cfg.distributed)
    tokens = torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(1))
    kept: dict[int, int] = {}
    weights = {p.data_ptr() for p in model.parameters()}

    def keep(x: Tensor) -> Tensor:
        if x.data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model(tokens, tokens)
    loss.backward()
    return sum(kept.values()), {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None
    }


@pytest.fixture
def partitioned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's partition of forward and backward passes, without its code for them."""
    how = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", how)


@pytest.mark.soak  # two graphs of a model
@pytest.mark.usefixtures("one_process", "partitioned")
def test_a_budget_keeps_less_and_computes_the_same() -> None:
    whole = ["--train.compile", "--train.compile_scope=model"]  # one graph
    half, found = kept_and_gradients(*whole, "--train.recompute=budget-50")
    most, expected = kept_and_gradients(*whole)
    assert half < 0.8 * most
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--train.recompute=budget-50"], "add --train.compile"),
        (["--train.recompute=auto", "--train.recompute_every=2"], "auto chooses no blocks"),
        (["--train.recompute=full", "--train.recompute=maybe"], "budget-75"),
    ],
)
def test_what_does_not_fit_together(words: list[str], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        load_config_files(RunConfig, [], [*SHAPE, *words])


def test_extensions_that_need_more_memory_choose_by_hand() -> None:
    words = [*SHAPE, "--train.recompute=auto", "--lowcomm.replicas=2", "--lowcomm.interval=50"]
    cfg = load_config_files(RunConfig, [], words)
    assert any("[lowcomm] needs more memory" in text for text in combination_problems(cfg))
    assert not combination_problems(load_config_files(RunConfig, [], words[:-2]))


# --- the search ---

ESTIMATES = {"none": 10.0, "selective": 8.0, "full/4": 7.0, "full/2": 6.0, "full": 4.0}  # GiB


def choice_of(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    limit: str,
    peaks: dict[str, float],
    say: Callable[[str], None] = lambda _: None,
) -> tuple[str, list[str]]:
    """The choice, and the trials before it. `peaks`: GiB that a trial needs; without one, it is out
    of memory."""
    trials: list[str] = []

    def names(train: Any) -> str:
        every = train.recompute_every
        return f"{train.recompute}/{every}" if every > 1 else str(train.recompute)

    def try_steps(cfg: Any, train: Any, *_: Any) -> float:
        trials.append(names(train))
        if trials[-1] not in peaks:
            raise torch.OutOfMemoryError
        return peaks[trials[-1]] * 2**30

    def choices(*_: Any) -> Any:
        split = {name: name.partition("/") for name in ESTIMATES}
        return [
            ({"recompute": what, "recompute_every": int(every or 1)}, ESTIMATES[name] * 2**30)
            for name, (what, _, every) in split.items()
        ]

    monkeypatch.setattr(room, "try_steps", try_steps)
    monkeypatch.setattr(room, "release_memory", lambda *_: None)  # a second, in a large process
    monkeypatch.setattr(room.lookup, "recompute_choices", choices)
    monkeypatch.setenv(room.MEMORY_VARIABLE, limit)
    world = SimpleNamespace(rank=0, size=1, per_node=1)
    run: Any = SimpleNamespace(dir=folder, world=world, log=lambda _: None, announce=say)
    cfg = load_config_files(RunConfig, [], [*SHAPE, "--train.recompute=auto"])
    layout: Any = None
    return names(room.choose_recompute(cfg, run, layout, torch.device("cpu"))), trials


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("limit", "peaks", "expected", "trials"),
    [
        ("20", {"none": 10.0}, "none", ["none"]),
        ("9", {"selective": 8.5}, "selective", ["selective"]),
        # More than was planned, or no memory at all.
        ("10.5", {"none": 11.0, "selective": 9.0}, "selective", ["none", "selective"]),
        ("20", {"full/4": 9.0}, "full/4", ["none", "selective", "full/4"]),
        # The peak leaves room for less recomputation; what then fails is not tried again.
        ("9", {"selective": 6.0, "none": 8.0}, "none", ["selective", "none"]),
        ("9", {"selective": 6.0}, "selective", ["selective", "none"]),
        # Over the limit with all of it, but it runs.
        ("1", {"full": 4.0}, "full", ["full"]),
    ],
)
def test_what_is_tried_and_chosen(
    limit: str,
    peaks: dict[str, float],
    expected: str,
    trials: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    assert choice_of(monkeypatch, tmp_path, limit, peaks) == (expected, trials)
    assert json.loads((tmp_path / room.CHOICE_FILE).read_text())["gpu"] == "CPU"
    assert choice_of(monkeypatch, tmp_path, limit, {}) == (expected, []), "a later start"


@pytest.mark.usefixtures("one_process")
def test_each_trial_compiles_a_model_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With its own budget, as does the run's model after them."""
    from torch._functorch import config

    budgets: list[float] = []

    def backend(graph: Any, _: Any) -> Any:
        budgets.append(config.activation_memory_budget)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch.compiler.reset()
    words = ["--train.recompute=auto", "--train.compile", "--train.global_batch=1"]
    cfg = load_config_files(RunConfig, [], [*SHAPE, *words])
    layout, device = build_layout(cfg.distributed, 1, 1, "cpu"), torch.device("cpu")
    world = SimpleNamespace(rank=0, size=1, per_node=1)
    say = SimpleNamespace(dir=tmp_path, world=world, log=lambda _: None, announce=lambda _: None)
    run: Any = say
    choices = [
        room.RecomputeChoice({"recompute": f"budget-{n}", "recompute_every": 1}, 2.0**30)
        for n in (25, 75)
    ]
    trials = room._Trials(cfg, run, layout, device, choices, 2.0**40)
    for choice in choices:
        trials._measure(choice)
    whole = replace(cfg.train, recompute="none")
    model = build_model(cfg.model, layout, whole, cfg.distributed)
    tokens = torch.zeros(1, 64, dtype=torch.int64)
    model(tokens, tokens)
    assert list(dict.fromkeys(budgets)) == [0.25, 0.75, 1.0], budgets


@pytest.mark.usefixtures("one_process")
def test_a_trial_uses_the_experts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """As batches of a run do; equal tokens would all go to the same ones."""
    loads: list[Tensor] = []
    real = room.forward_backward

    def look(model: Any, *rest: Any, **named: Any) -> Any:
        found = real(model, *rest, **named)
        loads.append(model.routings.step_load)
        return found

    monkeypatch.setattr(room, "forward_backward", look)
    words = ["--model.n_experts=8", "--model.experts_per_token=2", "--train.global_batch=2"]
    cfg = load_config_files(RunConfig, [], [*SHAPE, *words])
    layout, run = build_layout(cfg.distributed, 1, 1, "cpu"), None
    room.try_steps(cfg, cfg.train, layout, torch.device("cpu"), run)  # type: ignore[arg-type]
    assert len(loads) == 2 and torch.equal(*loads)
    assert (loads[0] > 0).sum() > 5 and loads[0].max() < 3 * loads[0].mean()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("limit", "warned"), [("3.5", True), ("4.5", False)])
def test_what_cannot_fit_by_the_estimate_is_said_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, warned: bool
) -> None:
    said: list[str] = []
    choice_of(monkeypatch, tmp_path, limit, {"full": 3.0}, said.append)
    text = (
        "warning: train.recompute = auto: full needs 4.00 GiB by the estimate, and a rank has 3.50"
    )
    assert said[0].startswith(text) == warned
    assert ("--train.offload_activations=2 or more GPUs" in said[0]) == warned


@pytest.mark.usefixtures("one_process")
def test_nothing_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="even with full"):
        choice_of(monkeypatch, tmp_path, "20", {})
    assert not (tmp_path / room.CHOICE_FILE).exists()


@pytest.mark.usefixtures("one_process")
def test_a_limit_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for text in ("much", "-1", "0"):
        with pytest.raises(ConfigError, match="give a number of GiB"):
            choice_of(monkeypatch, tmp_path, text, {})
