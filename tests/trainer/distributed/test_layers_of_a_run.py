"""profile.layers_interval: numbers of each layer, which change nothing and are the same on any
mesh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kempner.jobs.records.run_history import load_history
from kempner.jobs.report.page.layers import layers_table
from kempner.train.recording.layers import largest_logit, layer_figures, layer_of
from tests.conftest import Train, losses

EVERY = "--profile.layers_interval=4"


def layers(run: Path) -> dict[int, dict[str, dict[str, float]]]:
    """Of each step that has them."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["layers"] for line in lines if "layers" in line}


def test_a_run_has_the_same_losses_with_them_and_the_same_numbers_on_each_mesh(
    train: Train, tmp_path: Path
) -> None:
    train(tmp_path / "plain")
    train(tmp_path / "one", EVERY, "--train.micro_batch=4")
    train(tmp_path / "tp", EVERY, "--distributed.tp=2", "--train.micro_batch=4", nproc=2)
    assert losses(tmp_path / "plain") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)
    one, tp = layers(tmp_path / "one"), layers(tmp_path / "tp")
    assert list(one) == list(range(1, 9))
    for step, figures in one.items():
        measured = {"update_rms", "activation_rms", "activation_max", "logit_max"}
        assert figures.keys() == {"grad_norm"} | (measured if step % 4 == 0 else set())
        for name, values in figures.items():
            places = ["embed", "0", "1", "output"]
            assert list(values) == (places if name in ("grad_norm", "update_rms") else places[1:3])
            assert tp[step][name] == pytest.approx(values, rel=1e-4), (step, name)
    table = layers_table(load_history(tmp_path / "one"))
    assert table.count("<tr>") == 5 and "attention logit" in table and "at step 8" in table
    lines = map(json.loads, (tmp_path / "one/metrics.jsonl").read_text().splitlines())
    for line in lines:
        if "grad_norm" in line:
            squares = sum(x**2 for x in line["layers"]["grad_norm"].values())
            assert squares**0.5 == pytest.approx(line["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    "words",
    [
        ["--model.n_experts=4", "--train.micro_batch=2"],
        pytest.param(["--train.compile"], marks=pytest.mark.soak),
    ],
    ids=["experts", "compiled"],
)
def test_sharded(train: Train, tmp_path: Path, words: list[str]) -> None:
    """Weights that were gathered for the measurement are gathered again after the update."""
    words = ["--train.max_steps=6", *words]
    train(tmp_path / "plain", *words, nproc=2)
    train(tmp_path / "run", EVERY, *words, nproc=2)
    assert losses(tmp_path / "plain") == losses(tmp_path / "run")
    loads = layers(tmp_path / "run")[4].get("load_max", {})
    assert list(loads) == (["0", "1"] if "--model.n_experts=4" in words else [])
    assert all(1 <= load <= 4 for load in loads.values())


def test_a_step_that_is_computed_twice(train: Train, tmp_path: Path) -> None:
    """Each step is measured, from the first of an attempt on. The loads are those of the step."""
    words = ["--profile.layers_interval=1", "--model.n_experts=4", "--train.max_steps=6"]
    train(tmp_path / "run", *words)
    train(tmp_path / "replayed", *words, "--resilience.replay_every=2")
    once, twice = layers(tmp_path / "run"), layers(tmp_path / "replayed")
    assert once == twice and list(once) == list(range(1, 7))
    assert "update_rms" not in once[1]  # there is no update before the first step
    assert all(value > 0 for step in range(2, 7) for value in once[step]["update_rms"].values())
    for line in map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines()):
        if "layers" in line:
            busiest = max(line["layers"]["load_max"].values())
            assert busiest == pytest.approx(line["experts"]["load_max"], rel=1e-6)


def test_a_step_that_is_skipped_says_where(train: Train, tmp_path: Path) -> None:
    """Its norms are recorded although none are due."""
    often = ["--profile.layers_interval=1000", "--metrics.log_interval=8"]
    far = ["--optimizer.lr=1e30", "--schedule.warmup_steps=0", "--resilience.max_skipped=99"]
    train(tmp_path / "run", *often, *far)
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    skipped = [line for line in lines if "sample_numbers" in line]
    assert set(skipped[0]["layers"]["grad_norm"]) == {"embed", "0", "1", "output"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([EVERY, "--metrics.log_interval=3"], "must be a multiple of metrics.log_interval = 3"),
        ([EVERY, "--distributed.pp=2"], "is not built for a pipeline"),
    ],
)
def test_what_cannot_be_is_refused(
    train: Train, tmp_path: Path, words: list[str], message: str
) -> None:
    done = train(tmp_path / "run", *words, "--check", code=2)
    assert f"profile.layers_interval = 4: {message}" in done.stderr


def test_parts() -> None:
    names = ["embed.weight", "blocks.11.attention.wq.weight", "norm.weight", "output.weight"]
    assert [layer_of(name) for name in names] == ["embed", "11", "output", "output"]
    q, k = torch.zeros(2, 4, 8, 16), torch.zeros(2, 2, 8, 16)
    q[0, 3, 5, 0], k[0, 1, 5, 0], k[0, 1, 7, 0] = 6.0, 2.0, 9.0  # the last key is not seen
    assert largest_logit(q, k) == 3.0
    values: dict[str, Any] = {"grad_norm": 1.0, "grad_norm_sq": 1.0, "loss": 2.0}
    assert layer_figures(values) == {}


def test_the_norms_say_which_layers_are_not_finite() -> None:
    nan = float("nan")
    values = {"grad_norm": nan, "grad_norm_sq": nan}
    values |= {f"layers grad_norm_sq {name}": x for name, x in (("embed", nan), ("0", 4.0))}
    assert layer_figures(values) == {"grad_norm": {"embed": None, "0": 2.0}}
