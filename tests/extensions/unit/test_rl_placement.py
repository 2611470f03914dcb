"""Which nodes train and which have engines, without Slurm; and what is said of such a run."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kempner.config.option import ConfigError
from kempner.config.toml import loads
from kempner.extensions.hf.families import model_values
from kempner.extensions.planner.engine import engine_memory
from kempner.extensions.planner.gpus import GPUS
from kempner.extensions.planner.placement import (
    Placement,
    describe_placement,
    engine_words,
    main,
    place_processes,
)
from kempner.extensions.rl.config import DeploymentConfig, InferenceConfig
from kempner.jobs.report import loop_bench
from kempner.model.config import ModelConfig
from tests.conftest import ROOT
from tests.jobs.unit.test_report import report, rows, step_line, write_run

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
    found = place_processes(asked, InferenceConfig(**inference), *job)  # type: ignore[arg-type]
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
        place_processes(asked, InferenceConfig(**inference), *job)  # type: ignore[arg-type]


def test_describe() -> None:
    inference = InferenceConfig(tp=4)
    placement = place_processes(
        DeploymentConfig(num_train_nodes=2, num_infer_nodes=2), inference, 4, 8, 8
    )
    assert describe_placement(placement, inference, 8, ["a", "b", "c", "d"]) == [
        "trainer: 8 task(s) on a, b each",
        "orchestrator: on a",
        "engines 0 to 1 (kit, 16 slots, 4 GPU(s) each): on c",
        "engines 2 to 3 (kit, 16 slots, 4 GPU(s) each): on d",
    ]


LLAMA = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "intermediate_size": 11008, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096, "hidden_act": "silu",
}  # fmt: skip
# Of their config.json on Hugging Face: what differs; then GiB of keys and values with 16 slots of
# 4,096 tokens by hand: 2 x layers x key-value heads x head width x 2 bytes x 65,536.
PUBLISHED = {
    "Llama-2-7B": ({"num_key_value_heads": 32}, 6.74e9, 32.0),
    "Llama-3.1-8B": (
        {"vocab_size": 128256, "num_key_value_heads": 8, "intermediate_size": 14336}, 8.03e9, 8.0
    ),
    "Qwen3-8B": (
        {
            "model_type": "qwen3", "vocab_size": 151936, "num_hidden_layers": 36,
            "num_key_value_heads": 8, "intermediate_size": 12288, "head_dim": 128,
        },
        8.19e9, 9.0,
    ),
    "Qwen2.5-7B": (
        {
            "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584,
            "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
            "intermediate_size": 18944,
        },
        7.62e9, 3.5,
    ),
    "Mistral-7B-v0.3": (
        {
            "model_type": "mistral", "vocab_size": 32768, "num_key_value_heads": 8,
            "intermediate_size": 14336, "sliding_window": None,
        },
        7.25e9, 8.0,
    ),
    "Qwen3-0.6B": (
        {
            "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
            "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
            "intermediate_size": 3072, "head_dim": 128, "tie_word_embeddings": True,
        },
        0.596e9, 7.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_7b_toml_fits_the_usual_models(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 80 GB, whatever window the model has: an engine's is that of the trainer."""
    more, parameters, gib = PUBLISHED[name]
    model = replace(ModelConfig(**model_values(LLAMA | more, name)), max_seq_len=131072)
    assert model.count_parameters() == pytest.approx(parameters, rel=0.01)
    config = loads((ROOT / "configs/rl/7b.toml").read_text())
    assert config["rl"]["inference"]["engine"] == "vllm"
    window, size = config["train"]["seq_len"], 2**30
    for inference, texts in ((InferenceConfig(), 16), (InferenceConfig("vllm"), 1)):
        found = engine_memory(model, inference, window, "bf16")
        assert found.cache / size == pytest.approx(gib * texts / 16)
        assert found.weights == pytest.approx(2 * parameters, rel=0.01)
        assert found.peak < GPUS["H100"].usable
    deployment = {"num_train_nodes": 2, "num_infer_nodes": 2}
    values = {
        "rl": {"deployment": deployment, "inference": config["rl"]["inference"]},
        "train": config["train"] | {"deterministic": False}, "model": asdict(model),
    }  # fmt: skip
    monkeypatch.setattr("kempner.extensions.planner.placement.loads", lambda text: values)
    words = ["--nodes=4", "--tasks=8", "--gpus=8", "--names=a,b,c,d"]
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "engines 8 to 15 (vllm, 256 slots, 1 GPU(s) each): on d" in said
    assert "--max-model-len=4096" in said and "memory of an engine" in said
    values["train"]["dtype"] = "auto"  # bf16 on a GPU
    assert main(words) == 0 and capsys.readouterr().out == said
    values["rl"]["inference"] = {"engine": "vllm", "slots": "none"}
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "(vllm, 128 slots, 1 GPU(s) each): on d" in said
    assert "\n1 128 3 " in said  # for the batch script
    values["rl"]["inference"] = {"slots": 2000}
    assert main(words) == 2
    said = capsys.readouterr().err
    assert re.search(r"no GPU has that much .*--rl.inference.slots=\d+ or less", said)


def test_the_window_of_an_engine_is_that_of_the_trainer() -> None:
    assert engine_words(InferenceConfig(), 64, True) == ["--window=64", "--deterministic"]
    other = InferenceConfig("vllm", args=("--max-model-len=128",))
    assert engine_words(other, 64) == ["--max-model-len=64", "--max-model-len=128"]


@pytest.fixture
def rewarded(tmp_path: Path) -> Path:
    def line(step: int) -> str:
        return step_line(
            step, loss=0.01, reward=step / 10, length=3.0, truncated=0.25, staleness=0.5,
            mismatch=1e-5, wait=0.1, engine_idle=0.2, engines=2, engine_tokens_per_s=100.0,
            dropped_stale=1, cancelled=2, failed_rewards=0, samples=8 * step,
        )  # fmt: skip

    return write_run(tmp_path / "run", "".join(map(line, range(1, 7))))


def test_the_report_has_rewards(rewarded: Path) -> None:
    done = report(rewarded)
    table = rows(done.stdout)
    assert table["reward, first"] == "0.1000 at step 1"
    assert table["reward, best"] == "0.6000 at step 6"
    assert table["sampled tokens, mean"] == "3.0; 25.0% cut"
    assert table["versions behind, mean"] == "0.50; 18 groups dropped, 12 of them unfinished"
    assert (table["the trainer waits"], table["the engines are idle"]) == ("10.0%", "20.0%")
    assert (rewarded / "report.png").exists()


def test_the_figures_of_the_whole_loop(rewarded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert loop_bench.main(rewarded) == 0
    found = json.loads((rewarded / "bench.json").read_text())
    assert found["steps"] == 4 and found["trainer_waits"] == pytest.approx(0.1)
    assert found["samples_per_s"] == pytest.approx(8 / found["step_seconds"])
    assert "engines idle" in capsys.readouterr().out
    metrics = rewarded / "metrics.jsonl"
    *head, line, last = metrics.read_text().splitlines()
    nulls = {**json.loads(line), "step_time": None, "wait": None}
    metrics.write_text("\n".join([*head, json.dumps(nulls), last, ""]))
    assert loop_bench.main(rewarded) == 0
    again = json.loads((rewarded / "bench.json").read_text())
    assert again == pytest.approx({**found, "steps": 3})
