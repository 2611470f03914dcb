"""Which nodes train and which have engines, without Slurm; and what is said of such a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kempner.config.option import ConfigError
from kempner.history import loop_bench
from kempner.rl.config import DeploymentConfig, InferenceConfig
from kempner.rl.placement import Placement, describe, place
from tests.unit.test_report import report, rows, step_line, write_run

URLS = ("http://10.0.0.1:8000",)


@pytest.mark.parametrize(
    ("deployment", "inference", "job", "expected"),
    [
        ({}, {}, (1, 1, 0), (1, 1, 1, 1, 0, 2)),
        ({"num_infer_gpus": 4, "num_train_gpus": 4}, {"tp": 2}, (1, 8, 8), (1, 4, 2, 2, 0, 8)),
        ({"num_train_nodes": 2, "num_infer_nodes": 2}, {}, (4, 8, 8), (2, 8, 16, 8, 2, 8)),
        ({"num_infer_nodes": 2, "gpus_per_node": 4}, {"tp": 4}, (3, 8, 8), (1, 4, 2, 1, 1, 4)),
        ({"num_infer_nodes": 1, "gpus_per_node": 2}, {}, (2, 1, 0), (1, 2, 2, 2, 1, 2)),
        ({"num_train_gpus": 8}, {"urls": URLS}, (1, 8, 8), (1, 8, 0, 0, 0, 8)),
        ({"num_train_nodes": 2}, {"urls": URLS}, (2, 8, 8), (2, 8, 0, 0, 2, 8)),
    ],
)
def test_place(
    deployment: dict[str, int],
    inference: dict[str, object],
    job: tuple[int, int, int],
    expected: tuple[int, ...],
) -> None:
    asked = DeploymentConfig(**deployment)
    found = place(asked, InferenceConfig(**inference), *job)  # type: ignore[arg-type]
    assert found == Placement(*expected)


@pytest.mark.parametrize(
    ("deployment", "inference", "job", "problem"),
    [
        ({"num_infer_nodes": 2}, {}, (4, 8, 8), "asks for 3"),
        ({"num_train_nodes": 2}, {}, (2, 8, 8), "no node is left for engines"),
        ({"num_infer_nodes": 1}, {"urls": URLS}, (2, 8, 8), "the job has no engines"),
        ({"num_infer_nodes": 1, "gpus_per_node": 9}, {}, (2, 8, 8), "has 8 GPU(s)"),
        ({"num_infer_gpus": 8}, {}, (1, 8, 8), "more than the 8 GPU(s) of the node"),
        ({"num_infer_gpus": 0}, {}, (1, 8, 8), "0 cannot be shared"),
        ({"num_infer_nodes": 1}, {"tp": 3}, (2, 8, 8), "8 cannot be shared"),
    ],
)
def test_what_does_not_fit(
    deployment: dict[str, int],
    inference: dict[str, object],
    job: tuple[int, int, int],
    problem: str,
) -> None:
    asked = DeploymentConfig(**deployment)
    with pytest.raises(ConfigError, match=re.escape(problem)):
        place(asked, InferenceConfig(**inference), *job)  # type: ignore[arg-type]


def test_describe() -> None:
    inference = InferenceConfig(tp=4)
    placement = place(DeploymentConfig(num_train_nodes=2, num_infer_nodes=2), inference, 4, 8, 8)
    assert describe(placement, inference, 8, ["a", "b", "c", "d"]) == [
        "trainer: 8 task(s) on a, b each",
        "orchestrator: on a",
        "engines 0 to 1 (kit, 4 GPU(s) each): on c",
        "engines 2 to 3 (kit, 4 GPU(s) each): on d",
    ]


@pytest.fixture
def rewarded(tmp_path: Path) -> Path:
    def line(step: int) -> str:
        return step_line(
            step, loss=0.01, reward=step / 10, length=3.0, truncated=0.25, staleness=0.5,
            mismatch=1e-5, wait=0.1, engine_idle=0.2, engines=2, engine_tokens_per_s=100.0,
            dropped_stale=1, failed_rewards=0, samples=8 * step,
        )  # fmt: skip

    return write_run(tmp_path / "run", "".join(map(line, range(1, 7))))


def test_the_report_has_rewards(rewarded: Path) -> None:
    done = report(rewarded)
    table = rows(done.stdout)
    assert table["reward, first"] == "0.1000 at step 1"
    assert table["reward, best"] == "0.6000 at step 6"
    assert table["sampled tokens, mean"] == "3.0; 25.0% cut"
    assert table["versions behind, mean"] == "0.50; 6 groups dropped"
    assert (table["the trainer waits"], table["the engines are idle"]) == ("10.0%", "20.0%")
    assert (rewarded / "report.png").exists()


def test_the_figures_of_the_whole_loop(rewarded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert loop_bench.main(rewarded) == 0
    found = json.loads((rewarded / "bench.json").read_text())
    assert found["steps"] == 4 and found["trainer_waits"] == pytest.approx(0.1)
    assert "engines idle" in capsys.readouterr().out
