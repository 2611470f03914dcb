"""scripts/rl.py with an orchestrator whose batches follow from the step: losses, weights and state
on several meshes, across a stop, and what it publishes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kempner.extensions.rl.exchange import RolloutExchange
from tests.conftest import ROOT, clean_env, start_train, status
from tests.scripted import arrays, lines, orchestrator, samples
from tests.trainer.distributed.runs import state
from tests.waiting import until

STEPS = 6
WORDS = ["--model.dim=32", "--model.n_layers=2", "--model.n_heads=4", "--model.n_kv_heads=2",
         "--model.ffn_dim=48", "--model.max_seq_len=32", "--model.vocab_size=257",
         "--train.seq_len=32", f"--train.max_steps={STEPS}", "--train.deterministic",
         '--rl.env=[{id="arithmetic"}]', "--rl.tokenizer=bytes", "--rl.batch_samples=8",
         "--rl.sampling.max_tokens=16", "--optimizer.lr=2e-3", "--rl.loss.kl=0.01",
         "--train.micro_batch=1", "--checkpoint.interval=3"]  # fmt: skip
MESHES = {"one": (1, ()), "fsdp": (2, ()), "tp": (2, ("--distributed.tp=2",))}


def train(run: Path, *words: str, nproc: int = 1, last: int = 0) -> list[object]:
    process = start_train(*WORDS, f"--run.dir={run}", *words, nproc=nproc, program="scripts/rl.py")
    with orchestrator(run, STEPS, last=last) as heard:
        if last:  # then it is told to leave, while it waits for a batch that does not come
            newest = RolloutExchange(run).version(last)
            until((newest / "manifest.json").exists, alive=(process,))
            (run / "STOP").touch()
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    return heard


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rl")
    for name, (nproc, words) in MESHES.items():
        train(path / name, *words, nproc=nproc)
    return path


@pytest.mark.parametrize("mesh", ["fsdp", "tp"])
def test_losses_and_weights_are_those_of_one_process(place: Path, mesh: str) -> None:
    one, other = lines(place / "one"), lines(place / mesh)
    for name in ("loss", "grad_norm", "mismatch", "drift", "ratio_clipped", "kl", "tokens"):
        expected = pytest.approx([line.get(name, 0) for line in one], rel=1e-5, abs=1e-6)
        assert [line.get(name, 0) for line in other] == expected, name
    assert len(one) == STEPS and one[-1]["samples"] == 8 * STEPS and one[2]["reward"] == 0.03
    expected, found = state(place / "one", STEPS), state(place / mesh, STEPS)
    for name in expected:
        if name.startswith("model."):
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


MOE = ("--model.n_experts=4", "--model.experts_per_token=2")
MORE = {
    "HSDP": (4, (), ("--distributed.dp_replicate=2",)),
    "experts": (2, MOE, ("--distributed.ep=2",)),
    "LoRA": (2, ("--lora.rank=4", f"--model.init_from={{base}}@{STEPS}"), ()),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", MORE)
def test_what_else_the_page_names(place: Path, tmp_path: Path, name: str) -> None:
    """The losses of one process, and the versions that it publishes."""
    nproc, model, mesh = MORE[name]
    model = tuple(word.format(base=place / "one") for word in model)
    train(tmp_path / "one", *model)
    train(tmp_path / "other", *model, *mesh, nproc=nproc)
    one, other = lines(tmp_path / "one"), lines(tmp_path / "other")
    for key in ("loss", "grad_norm", "mismatch", "drift", "kl"):
        expected = pytest.approx([line.get(key, 0) for line in one], rel=1e-4, abs=1e-5)
        assert [line.get(key, 0) for line in other] == expected, key
    published = [
        {k: v for file in version.glob("*.safetensors") for k, v in load_file(file).items()}
        for version in (RolloutExchange(tmp_path / run).version(STEPS) for run in ("one", "other"))
    ]
    assert published[0].keys() == published[1].keys() and one[-1]["loss"] != one[0]["loss"]
    for key, tensor in published[0].items():
        torch.testing.assert_close(published[1][key], tensor, rtol=1e-4, atol=1e-5)


def test_samples_of_older_weights_are_no_mismatch(place: Path) -> None:
    there = [("mismatch" in line, "drift" in line) for line in lines(place / "one")]
    assert there == [(True, False), (True, True), (False, True)] * 2
    both = [line for line in lines(place / "one") if "mismatch" in line and "drift" in line]
    assert all(line["mismatch"] < 0.7 < line["drift"] for line in both)


@pytest.mark.parametrize("mesh", MESHES)
def test_the_trainer_says_what_it_computes_for_the_first_row(place: Path, mesh: str) -> None:
    """Of the batches that ask for it, with the weights before the step."""
    from kempner.extensions.generate.load import load_model_and_tokenizer

    exchange = RolloutExchange(place / mesh)
    for step in (3, 6):
        found = exchange.handed_back(step)
        before = load_model_and_tokenizer(str(exchange.version(step - 1)), "cpu").model
        assert found is not None and len(found) == 32
        row = arrays([samples(step, 8)[:2]], 32)
        at = 0
        for tokens, _, _ in samples(step, 8)[:2]:
            logits = before(torch.tensor([tokens[:-1]]))[0, :, :257].float().log_softmax(-1)
            for place_of, token in enumerate(tokens[1:], at):
                if row["targets"][0, place_of] != -100:
                    expected = float(logits[place_of - at, token])
                    assert found[place_of] == pytest.approx(expected, abs=2e-5)
            at += len(tokens) - 1
    assert not list(exchange.scores.iterdir())


@pytest.mark.parametrize("mesh", ["one", "fsdp", "tp"])
def test_published_is_what_is_saved(place: Path, mesh: str) -> None:
    """The last version in transformers' names, whoever wrote its files; an engine loads it."""
    from kempner.extensions.generate.load import load_model_and_tokenizer

    version = RolloutExchange(place / mesh).version(STEPS)
    manifest = json.loads((version / "manifest.json").read_text())
    assert manifest["version"] == STEPS and manifest["transport"] == "directory"
    tensors = {k: v for file in version.glob("*.safetensors") for k, v in load_file(file).items()}
    assert sum(tensor.nbytes for tensor in tensors.values()) == manifest["bytes"]
    saved = {k.removeprefix("model."): v for k, v in state(place / mesh, STEPS).items()}
    loaded = load_model_and_tokenizer(str(version), "cpu")
    found = dict(loaded.model.named_parameters())
    assert len(found) == len(tensors)
    assert all(torch.equal(found[name], saved[name]) for name in found)
    assert loaded.words.tokenizer.vocab_size == 257


def test_stopped_while_it_waits_and_resumed_equals_unbroken(place: Path, tmp_path: Path) -> None:
    """Between two saves, on two ranks; the orchestrator's state is that of the same step."""
    run = tmp_path / "run"
    (first,) = train(run, nproc=2, last=4)
    assert status(run)["state"] == "stopped" and status(run)["step"] == 4
    shutil.rmtree(run / "rl")
    (again,) = train(run, nproc=2)
    assert first == (0, 2, None) and again == (4, 2, {"position": 4})
    assert [x["loss"] for x in lines(run)] == [x["loss"] for x in lines(place / "fsdp")]
    resumed, unbroken = state(run, STEPS), state(place / "fsdp", STEPS)
    assert all(torch.equal(resumed[name], unbroken[name]) for name in unbroken)


def test_a_wait_for_a_batch_has_a_limit(tmp_path: Path) -> None:
    """Given back, with the reason that the batch script repeats: engines or rewards do not answer.
    KEMPNER_IDLE_LIMIT is in minutes."""
    run = tmp_path / "run"
    words = [*WORDS, f"--run.dir={run}"]
    process = start_train(*words, nproc=2, program="scripts/rl.py", KEMPNER_IDLE_LIMIT="0.01")
    with orchestrator(run, STEPS, last=2):
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    told = status(run)
    assert (told["state"], told["step"]) == ("interrupted", 2), out
    assert told["reason"] == "idle for 0 min, without a batch (KEMPNER_IDLE_LIMIT)"


def test_a_full_disk_ends_the_attempt_with_nothing_published(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [*WORDS, f"--run.dir={run}", "--model.ffn_dim=480"]
    limited = ["bash", "-c", 'ulimit -f 100 && exec "$@"', "", sys.executable, "scripts/rl.py"]
    done = subprocess.run(
        [*limited, *words], cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "version 0 of the weights was not published: File too large" in done.stderr
    assert not list((run / "rl/0/weights").iterdir()) and RolloutExchange(run).started() is None


def test_bench_measures_the_trainer_alone(tmp_path: Path) -> None:
    process = start_train(
        *WORDS, f"--run.dir={tmp_path / 'run'}", "--bench", "--bench.steps=2", "--bench.warmup=1",
        program="scripts/rl.py",
    )  # fmt: skip
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    (result,) = json.loads((tmp_path / "run/bench.json").read_text())["results"]
    assert result["tokens_per_step"] == 8 * 32 and len(result["steps"]) == 2
    assert result["summary"]["publish, s"]["mean"] > 0 and "publish, s" in out
