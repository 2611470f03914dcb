"""vLLM as the engine of a run: it starts, answers, takes weights, and a run learns with it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kempner.extensions.generate.config import Sampling
from kempner.extensions.generate.load import load_model_and_tokenizer
from kempner.extensions.rl.engines.client import Completion, Lost, VllmEngine
from tests import hf_models
from tests.conftest import ROOT, clean_env
from tests.served import make_model
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.vllm
PROMPT = [40, 69, 76, 76, 79]
START_S = 300.0


def publish(weights: Path, number: int, model: Path) -> Path:
    place = weights / f"v{number:08d}"
    shutil.copytree(model, place)
    facts = {"version": number, "transport": "directory"}
    (place / "manifest.json").write_text(json.dumps(facts))
    return place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its attention on CPUs knows heads of 32 and more, not of 12."""
    place = tmp_path_factory.mktemp("vllm")
    for seed in range(2):
        make_model(place / f"model-{seed}", seed=seed, hidden_size=128)
    return place


@pytest.fixture(scope="module")
def engine(place: Path) -> Iterator[VllmEngine]:
    weights, engines = place / "weights", place / "engines"
    (place / "token").write_text("secret")
    (place / "token").chmod(0o600)
    publish(weights, 3, place / "model-0")
    words = ["--weights", weights, "--publish", engines, "--token-file", place / "token"]
    words += ["--slots", "8", "--max-model-len", "128"]
    with open(place / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kempner.extensions.rl.engines.vllm_engine", *map(str, words)],
            env=clean_env(**vllm()), stdout=log, stderr=log,
        )  # fmt: skip
    end = time.monotonic() + START_S
    while not (engines / "engine-0").exists():
        assert process.poll() is None and time.monotonic() < end, (place / "log").read_text()
        time.sleep(0.2)
    url = (engines / "engine-0").read_text().strip()
    yield VllmEngine(url, "secret", {256})
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0 and not list(engines.iterdir())


def vllm() -> dict[str, str]:
    return {"KEMPNER_VLLM": os.environ["KEMPNER_VLLM"]}


def check(found: list[Completion], model: Path, temperature: float) -> None:
    """Its log-probabilities are those of the kit's full forward pass."""
    decoder = load_model_and_tokenizer(str(model), "cpu").model
    for text in found:
        ids = torch.tensor([PROMPT + text.token_ids])
        logits = decoder(ids)[0, len(PROMPT) - 1 : -1] / temperature
        expected = logits.log_softmax(-1).gather(1, ids[0, len(PROMPT) :, None]).squeeze(1)
        assert text.logprobs == pytest.approx(expected.tolist(), abs=1e-3)


def test_it_answers_and_takes_weights(engine: VllmEngine, place: Path) -> None:
    assert engine.version() == 3
    sampling = Sampling(temperature=0.7, seed=5, max_tokens=12)
    (before,) = engine.complete([PROMPT], 4, sampling)
    check(before, place / "model-0", 0.7)
    assert len({tuple(text.token_ids) for text in before}) == 4
    assert {(*text.versions, text.finish) for text in before} == {(3, "length")}
    assert engine.complete([PROMPT], 4, sampling) == [before]
    path = publish(place / "weights", 4, place / "model-1")
    assert engine.update({"path": str(path), "version": 4}) == engine.version() == 4
    (after,) = engine.complete([PROMPT], 4, sampling)
    check(after, place / "model-1", 0.7)
    assert all(text.versions == [4] for text in after)


def test_strangers_are_refused(engine: VllmEngine) -> None:
    """Also by the routes that change weights, which vLLM's own key leaves open."""
    stranger = VllmEngine(engine.url, "wrong", {256})
    with pytest.raises(Lost, match="401 give the token"):
        stranger.version()
    with pytest.raises(Lost, match="401"):
        stranger.update({"path": "/tmp", "version": 9})
    assert engine.version() == 4
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert b"\0secret" not in path.read_bytes()


def rl(run: Path, *words: str) -> list[dict[str, float]]:
    """The lines of the steps of a run of the shipped configuration."""
    more = [f"--run.dir={run}", "--rl.inference.engine=vllm", "--distributed.device=cpu", *words]
    more += ["--model.n_heads=2", "--rl.eval_interval=0"]  # heads of 32
    done = subprocess.run(
        ["bash", "scripts/slurm/rl.sh", "configs/rl/arithmetic.toml", *more],
        cwd=ROOT, env=clean_env(**vllm()), capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "reward" in line]


def test_a_synchronous_run(place: Path) -> None:
    """With the trainer's own log-probabilities beside vLLM's."""
    words = ["--train.max_steps=3", "--rl.batch_samples=16", "--rl.group_size=4"]
    words += ["--schedule.warmup_steps=0"]
    steps = rl(place / "synchronous", *words, "--rl.max_async=0")
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(line["mismatch"] < 1e-4 and line["staleness"] == 0 for line in steps)


@pytest.mark.timeout(1300)
def test_a_run_learns_and_transformers_loads_it(place: Path) -> None:
    run = place / "learns"
    rewards = [line["reward"] for line in rl(run, "--train.max_steps=80")]
    first, last = statistics.mean(rewards[:5]), statistics.mean(rewards[-5:])
    assert len(rewards) == 80 and first < 0.1 and last > 0.5, rewards
    hf_models.convert("export", run, place / "mine")
    model = hf_models.load_quietly(place / "mine")
    torch.testing.assert_close(hf_models.theirs(model), hf_models.ours(run), atol=1e-5, rtol=0)
