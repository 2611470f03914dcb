"""Fine-tuning and alignment through the front door, with the commands of their pages."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kempner.extensions.generate.load import load_model_and_tokenizer, words_of_directory
from kempner.extensions.rl.environments.protocol import Task
from kempner.extensions.rl.exchange import RolloutExchange
from kempner.extensions.rl.orchestrate.conversation import DialogueWriter, open_words
from tests import hf_models, zygote
from tests.conftest import ROOT, clean_env, load_program, losses, start_train
from tests.templates import GENERATION, write_tokenizer
from tests.trainer.distributed.test_bad_input import rejected

# What the pages' configurations are made small with; the rest of them stays as it is shipped.
SMALL = """
base = "{shipped}"
[train]
max_steps = 4
seq_len = 256
global_batch = {batch}
compile = false
dtype = "fp32"
[optimizer]
lr = 1e-3
[schedule]
name = "constant"
warmup_steps = 0
[checkpoint]
interval = 0
[eval]
interval = 4
[metrics]
log_interval = 1
"""


def commands(page: str) -> list[str]:
    return re.findall(r"^    (python .*)$", (ROOT / page).read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which all commands of both pages have run."""
    path = tmp_path_factory.mktemp("work")
    shape = {"vocab_size": 265, "max_position_embeddings": 256}
    with pytest.MonkeyPatch.context() as patch:
        for key, value in shape.items():
            patch.setitem(hf_models.COMMON, key, value)
        hf_models.make("llama2", path / "models/llama")
    write_tokenizer(path / "models/llama", GENERATION)
    chats, pairs = [], []
    for i in range(1, 61):
        asked, right, wrong = f"{i} plus {i}", f"It is {2 * i}.", "Sorry, no."
        turn = [{"role": "user", "content": asked}, {"role": "assistant", "content": right}]
        chats.append({"messages": turn})
        pairs.append({"prompt": asked, "chosen": right, "rejected": wrong})
    for name, rows in (("chats", chats), ("pairs", pairs)):
        (path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (path / "scripts").symlink_to(ROOT / "scripts")
    (path / "configs/train").mkdir(parents=True)
    for name, batch in (("sft", 2), ("dpo", 4)):
        text = SMALL.format(shipped=ROOT / f"configs/train/{name}.toml", batch=batch)
        if name == "dpo":
            text += '[model]\ninit_from = "runs/sft@4"\n'
        (path / f"configs/train/{name}.toml").write_text(text)
    script = ["set -e", f'PATH="{Path(sys.executable).parent}:$PATH"']
    script += [*commands("docs/guide/fine-tune.md"), *commands("docs/extensions/align.md")]
    assert len(script) == 7
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=path, env=clean_env(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_commands_of_the_pages(work: Path) -> None:
    sft = losses(work / "runs/sft")
    assert sft[4] < sft[1] - 0.5
    first, *_, last = lines(work / "runs/sft")
    assert 0 < first["loss_tokens"] < 512 and last["val_tokens"] > 0
    assert first["packing"]["chat"]["filled"] > 0.8 and not first["packing"]["chat"]["too_long"]
    first, *_, last = lines(work / "runs/dpo")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)  # the model is its reference
    assert first["pairs"] > 4 and first["margin"] == pytest.approx(0, abs=1e-6)
    assert losses(work / "runs/dpo")[4] < 0.68 and last["val_loss"] < 0.68
    rewards = losses(work / "runs/reward")
    assert rewards[4] < rewards[1]


def test_dpo_resumes_with_its_first_reference_on_other_ranks(work: Path) -> None:
    """Two ranks, and one that goes on, have the losses of one unbroken run."""

    def train(*words: str, nproc: int) -> str:
        process = start_train(*words, nproc=nproc, PYTHONPATH=str(ROOT / "src"))
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, out + err
        return out

    words = [f"{work}/configs/train/dpo.toml", f"--run.dir={work / 'runs/broken'}"]
    words += [f"--model.init_from={work / 'runs/sft'}@4", "--eval.interval=0"]
    words += [f"--data.dataset_path={work / 'data/preferences'}", "--train.micro_batch=1"]
    out = train(*words, "--train.max_steps=2", nproc=2)
    assert "the reference starts from the weights of" in out
    train(*words, nproc=1)
    broken, unbroken = losses(work / "runs/broken"), losses(work / "runs/dpo")
    assert broken == pytest.approx(unbroken, abs=1e-5)


@pytest.mark.soak
def test_a_mixture_of_experts_is_fine_tuned_with_its_experts_shared_out(
    work: Path, tmp_path: Path
) -> None:
    """The losses of one process, with packed conversations."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {"vocab_size": 265, "max_position_embeddings": 256}.items():
            patch.setitem(hf_models.COMMON, key, value)
        hf_models.make("qwen3_moe", tmp_path / "model")
    write_tokenizer(tmp_path / "model", GENERATION)
    text = SMALL.format(shipped=ROOT / "configs/train/sft-moe.toml", batch=4)
    (tmp_path / "moe.toml").write_text(text)
    for nproc in (1, 2):
        words = [f"{tmp_path}/moe.toml", f"--run.dir={tmp_path}/{nproc}", "--eval.interval=0"]
        words += [f"--model.init_from={tmp_path}/model", f"--data.dataset_path={work}/data/chat"]
        process = start_train(*words, f"--distributed.ep={nproc}", nproc=nproc)
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, out + err
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-4)
    assert losses(tmp_path / "2")[4] < losses(tmp_path / "2")[1] - 0.1


def test_dpo_does_not_go_on_with_another_reference(work: Path) -> None:
    """A directory whose files were replaced between two starts."""
    base = another_tokenizer(work, "reference", lambda content: content)
    words = [f"{work}/configs/train/dpo.toml", f"--run.dir={work / 'runs/moved'}"]
    words += [f"--model.init_from={work / base}", "--eval.interval=0"]
    words += [f"--data.dataset_path={work / 'data/preferences'}", "--train.max_steps=1"]
    process = start_train(*words)
    assert process.communicate(timeout=240) and process.returncode == 0
    file = work / base / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] *= 1.5
    save_file(weights, file, metadata={"format": "pt"})
    (problem,) = rejected(*words, "--train.max_steps=2")
    assert "model.init_from does not hold the reference weights" in problem


@pytest.mark.parametrize("loss", ["dpo", "reward"])
def test_a_spike_of_preferences_changes_nothing(work: Path, loss: str) -> None:
    """The loss of pairs has a level, as that of tokens has."""
    run = work / f"runs/spike-{loss}"
    words = [f"{work}/configs/train/dpo.toml", f"--run.dir={run}", f"--preference.loss={loss}"]
    words += [f"--model.init_from={work / 'runs/sft'}@4", "--eval.interval=0"]
    words += [f"--data.dataset_path={work / 'data/preferences'}", "--train.max_steps=12"]
    words += ["--resilience.spike_sigma=8", "--resilience.spike_window=8"]
    faults = f"loud from=36 to=40 by=1e4\ndigest to={run.parent}"  # step 10, of 4 rows
    process = start_train(*words, program="tests/trainer/fault/faulty_train.py", FAULTS=faults)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    (spike,) = [line for line in lines(run) if "spike" in line]
    assert spike["step"] == 10 and spike["spike"]["loss"] > 100 > spike["spike"]["loss_limit"]
    digests = run.parent / "rank-0.jsonl"
    *_, before, after, last = (found for _, found in map(json.loads, digests.open()))
    digests.unlink()
    assert before == after != last  # the weights before the updates of steps 10, 11 and 12


def test_an_export_ends_its_turns(work: Path) -> None:
    """The base model ends texts with another token than the chat template ends a turn with."""
    hf_models.convert("export", work / "runs/sft", work / "models/mine")
    before, after = (work / "models" / name for name in ("llama", "mine"))
    base = json.loads((before / "generation_config.json").read_text())["eos_token_id"]
    turn = json.loads((work / "runs/sft/dataset.json").read_text())["eod"]
    found = json.loads((after / "generation_config.json").read_text())["eos_token_id"]
    assert found == [base, turn] and base != turn
    model = hf_models.load_quietly(after)
    torch.testing.assert_close(hf_models.theirs(model), hf_models.ours(work / "runs/sft"))
    template = json.loads((after / "tokenizer_config.json").read_text())["chat_template"]
    assert template == GENERATION


def test_rl_goes_on_with_the_tokenizer_of_the_chats(work: Path) -> None:
    """And their template: the base model has none, and ends its texts with another token."""
    run, base = work / "runs/rl", f"{work}/runs/sft@4"
    words = [f"--model.init_from={base}", f"--run.dir={run}", "--data.dataset_path=fake:"]
    words += ['--rl.env=[{id="arithmetic"}]', "--rl.batch_samples=4", "--rl.group_size=2"]
    words += ["--train.max_steps=1", "--train.seq_len=128", "--rl.sampling.max_tokens=8"]
    process = start_train(*words, program="scripts/rl.py")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    prompts = open_words("", base)
    sft = load_model_and_tokenizer(base, "cpu").words
    talk = [{"role": "user", "content": "1 plus 1"}]
    for found in (
        words_of_directory(RolloutExchange(run).version(1)),
        load_model_and_tokenizer(str(run), "cpu").words,
    ):
        assert found.ends == prompts.ends == sft.ends and len(found.ends) == 2
        assert found.chat(talk) == DialogueWriter(prompts).prompt(Task(talk)) == sft.chat(talk)


def another_tokenizer(work: Path, name: str, act: Callable[[dict[str, Any]], object]) -> str:
    """models/llama with a tokenizer that `act` changes; returns the name of the directory."""
    shutil.copytree(work / "models/llama", work / "models" / name)
    file = work / "models" / name / "tokenizer.json"
    content = json.loads(file.read_bytes())
    act(content)
    file.write_text(json.dumps(content))
    return f"models/{name}"


def test_data_of_another_tokenizer_are_refused(work: Path) -> None:
    """Not those of the same one in another file, nor those with the tokens of a chat template."""

    def swap(content: dict[str, Any]) -> None:
        vocab = content["model"]["vocab"]
        vocab["A"], vocab["B"] = vocab["B"], vocab["A"]

    def check(model: str, *words: str) -> subprocess.CompletedProcess[str]:
        words = (*words, f"--model.init_from={model}", "--run.dir=runs/other")
        return zygote.run(
            [sys.executable, "scripts/train.py", *words, "--check"],
            cwd=work, env=clean_env(), capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    swapped = another_tokenizer(work, "swapped", swap)
    again = another_tokenizer(work, "again", lambda content: content)
    file = "models/llama/tokenizer.json"
    streamed = f"""[{{path = "pairs.jsonl", column = "prompt", tokenizer = "{file}"}}]"""
    of_texts = ("--train.seq_len=32", "--train.global_batch=2", f"--data.sources={streamed}")
    for words in (("configs/train/sft.toml",), of_texts):
        done = check(swapped, *words)
        assert done.returncode == 2, done.stderr
        assert "so that a token id means different text" in done.stderr
        done = check(again, *words)
        assert done.returncode == 0, done.stderr


def test_an_export_has_the_tokens_that_its_data_have(work: Path) -> None:
    """Also those of the chat template, which the base model lacks, and all from one place."""
    base = another_tokenizer(work, "base", lambda content: content["added_tokens"].pop())
    (work / base / "special_tokens_map.json").write_text("{}")
    (work / base / "chat_template.jinja").write_text("of the base model")
    words = [f"{work}/configs/train/sft.toml", f"--run.dir={work / 'runs/more'}"]
    words += [f"--model.init_from={work / base}", f"--data.dataset_path={work / 'data/chat'}"]
    process = start_train(*words, "--train.max_steps=1", "--eval.interval=0")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    hf_models.convert("export", work / "runs/more", work / "models/more")
    written, data = work / "models/more", work / "data/chat"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (written / name).read_bytes() == (data / name).read_bytes()
    assert {file.name for file in written.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{chosen}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 5}}
metric_list: [{{metric: {metric}}}]
"""


def test_a_run_of_chats_is_evaluated_as_its_export_is(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each text begins in the same way: not behind the end of a turn, where none was trained."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    file = str(tmp_path / "few.jsonl")
    rows = (work / "pairs.jsonl").read_text().splitlines()
    Path(file).write_text("\n".join(rows[:4]))
    kinds = {"loglikelihood": "perplexity", "loglikelihood_rolling": "byte_perplexity"}
    for kind, metric in kinds.items():
        text = TASK.format(name=kind, file=file, kind=kind, metric=metric)
        (tmp_path / f"{kind}.yaml").write_text(text)
    hf_models.convert("export", work / "runs/sft", tmp_path / "out")
    tables = []
    for name in (work / "runs/sft", tmp_path / "out"):
        words = [str(name), "--tasks", ",".join(kinds), "--include-path", str(tmp_path)]
        capsys.readouterr()
        assert load_program("eval").main(words) == 0
        tables.append([line for line in capsys.readouterr().out.splitlines() if line[:1] == "|"])
    assert tables[0] == tables[1] and "perplexity" in tables[0][2]
    sources = (work / "runs/sft", tmp_path / "out")
    of_run, of_export = (load_model_and_tokenizer(str(name), "cpu").words for name in sources)
    assert of_run.prompt("x") == of_export.prompt("x")  # generate.py and serve.py begin with these
    assert of_run.ends == of_export.ends and of_run.tokenizer.eod == of_export.tokenizer.eod


def test_what_does_not_fit_is_refused(work: Path) -> None:
    def problems(*words: str) -> str:
        done = zygote.run(
            [sys.executable, "scripts/train.py", *words, "--check"],
            cwd=work, env=clean_env(), capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 2, done.stdout + done.stderr
        return done.stderr

    dpo = ("configs/train/dpo.toml", "--run.dir=runs/other")
    text = problems(*dpo, "--model.init_from=runs/sft", "--data.dataset_path=data/chat")
    assert "every start reads these weights" in text and "runs/sft@4" in text
    assert "data/chat: holds data of the kind chat; preference.loss needs" in text
    text = problems("configs/train/sft.toml", "--data.dataset_path=data/preferences")
    assert "give --preference.loss=dpo or reward" in text
    assert "needs the model to start from" in problems(*dpo, "--model.init_from=none")
