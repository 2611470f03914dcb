"""Which steps are far above the others, decided where the numbers are."""

from __future__ import annotations

import statistics

import pytest
import torch

from kempner.config.loading import load_config_files
from kempner.config.option import ConfigError
from kempner.optim.spikes import Spikes
from kempner.train.checks import combination_problems
from kempner.train.progress import Progress
from kempner.train.resilience.config import ResilienceConfig
from kempner.train.resilience.nonfinite import NonFinite
from kempner.train.sections import RunConfig
from kempner.train.step import StepResult

WINDOW, SIGMA = 8, 4.0


def judge(
    spikes: Spikes, loss: float, norm: float = 1.0, bad: bool = False, phase: int = 0
) -> dict[str, float]:
    numbers = torch.tensor([loss, norm], dtype=torch.float64)
    found = spikes.judge(numbers[0], numbers[1], torch.tensor(bad), (256, phase))
    return {name: value.item() for name, value in found.items()}


def filled() -> tuple[Spikes, list[float]]:
    """More steps than the window holds; the others are forgotten."""
    spikes, losses = Spikes(SIGMA, WINDOW), [2.0 + 0.1 * (i * 7 % 5) for i in range(WINDOW + 3)]
    for i, loss in enumerate([50.0, *losses]):
        limit = judge(spikes, loss, 1.0 + 0.01 * i)["loss_limit"]
        assert (limit == torch.inf) == (i < WINDOW)  # nothing is known of the first steps
    return spikes, losses[-WINDOW:]


def test_the_limit_is_that_of_the_window() -> None:
    spikes, losses = filled()
    limit = statistics.mean(losses) + SIGMA * statistics.stdev(losses)
    below = judge(spikes, limit - 1e-6)
    assert below["loss_limit"] == pytest.approx(limit, rel=1e-12) and not below["spike"]
    spikes, _ = filled()
    assert judge(spikes, limit + 1e-6)["spike"]
    assert not judge(spikes, -100.0, -100.0)["spike"]  # only upwards


def test_the_norm_alone_is_enough() -> None:
    spikes, _ = filled()
    assert judge(spikes, 2.0, 100.0)["spike"]


def test_what_is_skipped_does_not_enter() -> None:
    spikes, _ = filled()
    limits = {judge(spikes, 30.0)["loss_limit"] for _ in range(3)}
    for number in (float("nan"), float("inf")):
        told = judge(spikes, number, number, bad=True)
        assert not told["spike"]  # it is not finite, which is recorded as such
        limits.add(told["loss_limit"])
    assert len(limits) == 1
    assert judge(spikes, 2.0)["loss_limit"] in limits
    assert judge(spikes, 2.0)["loss_limit"] not in limits


def test_another_phase_has_another_level() -> None:
    spikes, _ = filled()
    for i in range(WINDOW):
        assert not judge(spikes, 30.0 + i, phase=1)["spike"]
    assert judge(spikes, 90.0, phase=1)["spike"]


def test_the_host_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads no number."""

    def read(*_: object) -> None:
        raise AssertionError("a number is read")

    spikes, number = Spikes(SIGMA, WINDOW), torch.ones((), dtype=torch.float64)
    bad = torch.tensor(False)
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, read)
    for _ in range(WINDOW + 1):
        spikes.judge(number, number, bad, (256, 0))


def test_another_window_begins_anew() -> None:
    spikes, _ = filled()
    other = Spikes(SIGMA, WINDOW + 1)
    assert other.restore(spikes.tensors()) == {} == spikes.restore({})  # type: ignore[arg-type]
    assert judge(spikes, 90.0)["loss_limit"] == torch.inf


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resilience.spike_sigma=1"], "--resilience.spike_sigma=1: must be at least 3"),
        (["--resilience.spike_sigma=6", "--resilience.spike_window=4"], "at least 8"),
        (["--resilience.spike_window=64"], "has no effect without resilience.spike_sigma"),
        (["--resilience.spike_sigma=6", "--train.max_steps=128"], "would not be full before"),
        (["--resilience.gpu_interval=-1"], "--resilience.gpu_interval=-1: must be"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        raise ConfigError(
            combination_problems(
                load_config_files(RunConfig, [], ["--data.dataset_path=x", *words])
            )
        )
    assert len(refused.value.problems) == 1 and said in str(refused.value)


def test_the_reason_to_go_back_names_spikes() -> None:
    def reason(*kinds: str) -> str:
        judge = NonFinite(ResilienceConfig(max_skipped=3))
        verdict = None
        for kind in ("spike", "", *kinds):
            values = {"bad": float(kind != ""), "spike": float(kind == "spike")}
            verdict = judge.judge(StepResult(Progress(), 0.0, values, {}), may_go_back=True)
        assert verdict is not None and verdict.go_back
        return verdict.reason.partition("were ")[2].partition(" (")[0]

    assert reason("spike", "spike", "spike") == "spikes"
    assert reason("nan", "spike", "spike") == "spikes or not finite"
    assert reason("nan", "nan", "nan") == "not finite"
