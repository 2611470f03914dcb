"""Adapters: trained by the real trainer, resumed, generated from, merged, and loaded by peft."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kempner import load_model
from kempner.checkpoint.format.reader import read_tensors, stored_tensors
from kempner.data.text.tokenizer import train_bpe
from kempner.extensions.hf.adapter import weights_fingerprint
from kempner.extensions.hf.source import find_weights
from kempner.model.decoder import Decoder
from kempner.model.loss import cross_entropy
from kempner.parallel.config import LoraConfig, is_adapter
from kempner.parallel.lora import add_adapters
from tests.conftest import ROOT, clean_env, losses, start_train
from tests.hf_models import TOKENS, convert, load_quietly, make, theirs
from tests.trainer.distributed.test_bad_input import rejected
from tests.trainer.unit.test_model import SHAPE

CONFIG = """
[train]
max_steps = 6
seq_len = 32
global_batch = 8
deterministic = true
[lora]
rank = 3
alpha = 12
[optimizer]
lr = 1e-2
[schedule]
name = "constant"
[metrics]
log_interval = 1
"""
PER_BLOCK = {
    f"{folder}.{name}.lora_{x}"
    for folder, names in (("attention", ("wq", "wk", "wv", "wo")), ("ffn", ("w1", "w2", "w3")))
    for name in names
    for x in "ab"
}


@pytest.fixture(scope="module")
def place(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with biases and tied embeddings in bf16, a configuration, and a run of six steps."""
    path = tmp_path_factory.mktemp("lora")
    make("qwen2", path / "model", torch.bfloat16)
    (path / "lora.toml").write_text(CONFIG)
    train(words(path, data_dir, "run"))
    return path


def words(place: Path, data_dir: Path, run: str) -> list[str]:
    return [
        f"{place}/lora.toml",
        f"--data.dataset_path={data_dir}",
        f"--model.init_from={place / 'model'}",
        f"--run.dir={place / run}",
    ]


def train(words: list[str], nproc: int = 1) -> str:
    process = start_train(*words, nproc=nproc)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    return out


def test_checkpoints_hold_the_adapter_alone(place: Path) -> None:
    loss = losses(place / "run")
    assert loss[6] < loss[1] - 0.1, loss
    path = place / "run/checkpoints/latest"
    stored = stored_tensors(path)
    wanted = {f"blocks.{i}.{name}" for i in range(2) for name in PER_BLOCK}
    assert {name for name in stored if name.startswith("model.")} == {f"model.{n}" for n in wanted}
    moments = {name for name in stored if name.startswith("optim.")}
    keys = ("step", "exp_avg", "exp_avg_sq")
    assert moments == {f"optim.{name}.{key}" for name in wanted for key in keys}
    assert all(tensor.any() for tensor in read_tensors(path).values())  # each one has learned


def test_resumed_equals_unbroken_bit_for_bit(place: Path, data_dir: Path) -> None:
    resumed = words(place, data_dir, "resumed")
    train([*resumed, "--train.max_steps=3"])
    assert "continues after step 3" in train(resumed)
    assert losses(place / "resumed") == losses(place / "run")
    paths = [place / name / "checkpoints/latest" for name in ("run", "resumed")]
    first, second = (read_tensors(path) for path in paths)
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
    # A fork begins with the adapters, and reads the base, too.
    fork = words(place, data_dir, "fork")
    train([*fork, f"--run.fork={place / 'run'}@6", "--train.max_steps=1"])
    begun = read_tensors(place / "fork/checkpoints/step_00000000")
    assert all(torch.equal(first[name], begun[name]) for name in first if "model." in name)
    assert losses(place / "fork")[1] < losses(place / "run")[1] - 0.1


def test_two_ranks_give_the_losses_of_one(place: Path, data_dir: Path) -> None:
    """Rank 3 does not divide by two, rank 1 leaves one of them without a row."""
    for name, more in {"sharded": "--train.recompute=full", "cut": "--distributed.tp=2"}.items():
        train([*words(place, data_dir, name), more], nproc=2)
        assert losses(place / name) == pytest.approx(losses(place / "run"), rel=1e-5)
    two = [*words(place, data_dir, "two"), "--lora.rank=1", '--lora.targets=["wq", "w2"]']
    train([*two, "--train.max_steps=1", "--distributed.tp=2"], nproc=2)
    train([*two, "--train.max_steps=2"])
    names = [name for name in stored_tensors(place / "two/checkpoints/latest") if "model." in name]
    assert len(names) == 8


def test_peft_and_transformers_give_our_logits(place: Path) -> None:
    import peft
    import transformers

    model, _ = load_model(place / "run")
    with torch.no_grad():
        ours = model(TOKENS)
    base = transformers.AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    assert (theirs(base.eval()) - ours).abs().max() > 0.05  # the adapter counts
    convert("export", place / "run", place / "adapter", "--adapter")
    adapted = peft.PeftModel.from_pretrained(base, place / "adapter").eval()
    torch.testing.assert_close(theirs(adapted), ours, atol=1e-5, rtol=0)
    convert("export", place / "run", place / "merged", "--dtype=fp32")
    torch.testing.assert_close(theirs(load_quietly(place / "merged")), ours, atol=1e-5, rtol=0)


def test_the_base_is_frozen_in_bf16_and_costs_no_gradient() -> None:
    model = Decoder(SHAPE)
    add_adapters(model, LoraConfig(rank=4))
    for name, parameter in model.named_parameters():
        trained = is_adapter(name)
        assert parameter.requires_grad == trained
        assert parameter.dtype == (torch.float32 if trained else torch.bfloat16)
    x, targets = torch.randn(24, 16, requires_grad=True), torch.randint(0, 11, (24,))
    weight = torch.randn(11, 16)
    grads = []
    for learns in (True, False):
        loss, _ = cross_entropy(x, weight.requires_grad_(learns), targets)
        needs_weight = loss.grad_fn.saved_tensors[1] is not None  # type: ignore[attr-defined]
        assert needs_weight == learns
        grads += torch.autograd.grad(loss, x)
    assert torch.equal(*grads)


def test_the_commands_of_the_document(data_dir: Path, tmp_path: Path) -> None:
    import peft

    document = (ROOT / "docs/guide/lora.md").read_text()
    make("smollm", tmp_path / "models/llama", torch.bfloat16)
    text = (ROOT / "docs/reference/slurm.md").read_text() * 3
    (tmp_path / "models/llama/tokenizer.json").write_bytes(train_bpe([text], 260))
    (tmp_path / "text.md").write_text(text)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    config, code = re.findall(r"```(?:toml|python)\n(.*?)```", document, re.DOTALL)
    (tmp_path / "lora.toml").write_text(config)
    commands = re.findall(r"^    (python .*)$", document, re.MULTILINE)
    assert len(commands) == 4
    prepare = "python scripts/prepare_data.py text.md --out data/corpus --tokenizer models/llama"
    path = f'PATH="{Path(sys.executable).parent}:$PATH"'
    done = subprocess.run(
        ["bash", "-c", "\n".join(["set -e", path, prepare, *commands])],
        cwd=tmp_path, env=clean_env(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    names: dict[str, peft.PeftModel] = {}
    exec(code.replace("models/", f"{tmp_path}/models/"), names)
    merged = theirs(load_quietly(tmp_path / "models/merged").float())
    torch.testing.assert_close(theirs(names["model"].float().eval()), merged, atol=0.05, rtol=0)


def test_wrong_combinations_are_refused(place: Path, data_dir: Path) -> None:
    good = words(place, data_dir, "refused")
    (problem,) = rejected(*good, "--model.init_from=none")
    assert "lora.rank = 3: adapters need weights to adapt" in problem
    (problem,) = rejected(*good, '--lora.targets=["wq", "q_proj"]')
    assert 'must be one of "wq", "wk", "wv", "wo", "w1", "w2", "w3"' in problem
    (problem,) = rejected(*good, "--lora.targets=[]")
    assert "nothing is trained" in problem
    (problem,) = rejected(*good, f"--model.init_from={place}/run@6")
    assert "holds only adapters; merge them" in problem
    convert("import", place / "model", place / "imported")
    (problem,) = rejected(*good, f"--model.init_from={place / 'imported'}")
    assert f"name a step, such as {place / 'imported'}@0" in problem
    (problem,) = rejected(*good, "--preference.loss=reward")
    assert "adapters are not built for preference.loss = reward" in problem
    assert not (place / "refused").exists()


def test_a_run_keeps_its_kind_and_its_base(place: Path, data_dir: Path) -> None:
    shutil.copytree(place / "run", place / "kept", symlinks=True)
    kept = [*words(place, data_dir, "kept"), "--train.max_steps=7"]
    for change, problem in {
        "--lora.rank=0": "lora.rank is 3 there, 0 here",
        "--lora.rank=4": "lora.rank is 3 there, 4 here",
        "--lora.alpha=1": "lora.alpha is 12.0 there, 1.0 here",
    }.items():
        process = start_train(*kept, change)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2 and problem in err, err
    config = place / "model/config.json"
    text = config.read_text()
    try:
        config.write_text(json.dumps(json.loads(text) | {"rms_norm_eps": 0.5}))
        _, err = start_train(*kept).communicate(timeout=120)
        assert f"{config} has changed since the run began (norm_eps is " in err, err
        config.write_text(json.dumps(json.loads(text) | {"eos_token_id": 3}))
        train(kept)
        assert (place / "kept/hf/config.json").read_text() == text
    finally:
        config.write_text(text)
    model, aside = place / "model", place / "aside"
    before = weights_fingerprint(find_weights(str(model)))
    model.rename(aside)
    try:
        make("qwen2", model, torch.bfloat16)
        file = model / "model.safetensors"
        assert weights_fingerprint(find_weights(str(model))) == before
        content = bytearray(file.read_bytes())
        content[-1000] ^= 1
        file.write_bytes(content)
        process = start_train(*kept)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2 and f"lora.base is {before} there" in err, err
        convert("export", place / "kept", place / "none", code=2)
    finally:
        shutil.rmtree(model)
        aside.rename(model)
