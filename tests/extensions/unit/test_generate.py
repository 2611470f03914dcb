"""scripts/generate.py on the checkpoints of a real run of the trainer."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import kempner.extensions.generate.load
from kempner import load_model
from kempner.checkpoint import commit
from kempner.config.loading import load_config_files
from kempner.config.option import ConfigError
from kempner.data.formats.dataset import TokenDataset
from kempner.data.loader import val_batches
from kempner.data.sidecar import SIDECAR
from kempner.data.text.tokenizer import train_bpe
from kempner.extensions.generate.config import Sampling
from kempner.extensions.generate.dialogue import run_dialogue
from kempner.jobs.system.files import name_of_step
from kempner.train.parts import open_data
from kempner.train.sections import RunConfig
from tests import hf_models, zygote
from tests.conftest import ROOT, TINY, clean_env, load_program, start_train
from tests.hf_models import make
from tests.served import Client, make_model
from tests.templates import GENERATION, write_tokenizer
from tests.waiting import LIMIT_S

SCRIPT = ROOT / "scripts/generate.py"
SEQ_LEN = 32  # of TINY
NEWLINE = "\n"


@pytest.fixture(scope="module")
def other_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "docs"
    command = ["scripts/prepare_data.py", "docs", "--out", str(out), "--val-fraction", "0.3"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def run(data_dir: Path, other_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 30 steps with the checkpoints 15 and 30, and the validation loss of both."""
    path = tmp_path_factory.mktemp("runs") / "tiny run"
    words = [
        f"--data.dataset_path={data_dir}",
        f"--run.dir={path}",
        "--train.max_steps=30",
        "--train.deterministic",
        "--optimizer.lr=1e-2",
        "--checkpoint.interval=15",
        "--eval.interval=15",
        f'--eval.sets=[{{path = "{data_dir}", name = "code"}}, {{path = "{other_data}"}}]',
    ]
    process = start_train(*TINY, *words)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    return path


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return load_program("generate")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make a busy machine slow."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture
def text(generate: ModuleType, capsys: pytest.CaptureFixture[str]) -> Any:
    """Call the program in this process: what it prints on standard output."""

    def call(*args: object) -> str:
        assert generate.main([*map(str, args), "--device=cpu"]) == 0
        return capsys.readouterr().out

    return call


def test_as_a_user_calls_it(run: Path) -> None:
    command = [sys.executable, SCRIPT, run, "--prompt", "def main(", "--max-tokens", "40"]
    done = zygote.run(command, capture_output=True, text=True, timeout=120, env=clean_env())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def main(") and len(done.stdout) > 20
    assert "Warning" not in done.stderr and "step 30 of" in done.stderr


def test_the_model_is_that_of_the_run(run: Path, data_dir: Path, other_data: Path) -> None:
    """It has the validation losses of the run, on both sets."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found = {line["step"]: line for line in lines if "val_loss" in line}
    assert list(found) == [15, 30]
    for step, line in found.items():
        model, _ = load_model(run / "checkpoints" / name_of_step(step))
        sets = line["val_sets"]
        assert list(sets) == ["code", "docs"] and line["val_loss"] == sets["code"]["loss"]
        for name, path in (("code", data_dir), ("docs", other_data)):
            data = TokenDataset.open(path, "val", SEQ_LEN, 257)
            total = count = 0.0
            for batch in val_batches(data, samples=32, micro=8, rank=0, world=1):
                total += float(model(batch.inputs, batch.targets))
                count += float((batch.targets != -100).sum())
            assert sets[name]["loss"] == pytest.approx(total / count, rel=1e-5)
            assert sets[name]["tokens"] == count


def test_wrong_validation_sets_are_refused(data_dir: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(data_dir, tmp_path / "other"))
    sidecar = json.loads((other / SIDECAR).read_text())
    sidecar["tokenizer"] |= {"name": "words", "hash": "sha256:1"}
    (other / SIDECAR).write_text(json.dumps(sidecar))
    for sets, problem in {
        f'{{path = "{other}"}}': f"{other}: its tokenizer is words, that of {data_dir} is bytes",
        f'{{path = "{data_dir}"}}, {{path = "{data_dir}"}}': "2 have the name own; give each its",
        '{path = "/gone"}': "/gone: no such directory",
        '{name = "x"}': "eval.sets[0].path: is required",
    }.items():
        words = [f"--data.dataset_path={data_dir}", "--eval.interval=1", f"--eval.sets=[{sets}]"]
        with pytest.raises(ConfigError) as raised:
            open_data(load_config_files(RunConfig, [], words), check=True)
        assert problem in str(raised.value)


def test_the_seed_decides(text: Any, run: Path) -> None:
    first = text(run, "--prompt=import", "--seed=1")
    assert text(run, "--prompt=import", "--seed=1") == first
    assert text(run, "--prompt=import", "--seed=2") != first


def test_the_likeliest_token(text: Any, run: Path) -> None:
    cold = text(run, "--temperature=0", "--max-tokens=30")
    assert text(run, "--top-k=1", "--temperature=2", "--seed=5", "--max-tokens=30") == cold
    assert text(run, "--temperature=2", "--seed=5", "--max-tokens=30") != cold


def test_latest_and_a_named_step(text: Any, run: Path) -> None:
    newest = text(run, "--temperature=1")
    for same in ("checkpoints", "checkpoints/latest", "checkpoints/step_00000030"):
        assert text(run / same, "--temperature=1") == newest
    assert text(run / "checkpoints/step_00000015", "--temperature=1") != newest


def test_the_model_sees_the_end_of_a_long_prompt(text: Any, run: Path) -> None:
    end = "def f(self, name: str) -> int:  # "
    assert len(end) > SEQ_LEN
    args = ("--max-tokens=20", "--temperature=0")
    short, long = text(run, "--prompt", end, *args), text(run, "--prompt", "x" * 500 + end, *args)
    assert long == "x" * 500 + short


def test_it_ends_with_the_document(text: Any, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = text(run, "--prompt=A", "--temperature=0", "--max-tokens=1")[1]
    monkeypatch.setattr(
        "kempner.extensions.generate.load.end_tokens", lambda directory: [ord(first)]
    )
    assert text(run, "--prompt=A", "--temperature=0", "--max-tokens=9") == "A\n"


def test_a_run_that_was_moved(text: Any, run: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(run, tmp_path / "moved", symlinks=True)
    config = moved / "checkpoints/step_00000030/config.toml"
    config.write_text(config.read_text().replace(str(run.parent), "/gone/from/here"))
    for path in (moved, moved / "checkpoints/latest"):
        assert text(path, "--seed=3") == text(run, "--seed=3")


def test_retention_leaves_what_is_being_read(
    text: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []
    read_base = kempner.extensions.generate.load.read_base

    def read(source: Any, *args: Any) -> Any:
        held.append(commit.is_read(source.path))
        return read_base(source, *args)

    monkeypatch.setattr(kempner.extensions.generate.load, "read_base", read)
    text(run, "--max-tokens=1")
    assert held == [True]


def test_several_prompts(text: Any, run: Path, tmp_path: Path) -> None:
    """Each gets the text that it gets alone, whatever shares its batch, and waits for room."""
    prompts = ["def f(", "import", "class Reader(Protocol):", "# ", "x"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    args = ("--temperature=0", "--max-tokens=40")
    alone = [text(run, "--prompt", prompt, *args) for prompt in prompts]
    lines = [f"{one.removesuffix(NEWLINE)}\n--- {n} of 5\n" for n, one in enumerate(alone, 1)]
    for batch in (1, 2, 16):
        given = text(run, "--prompts", tmp_path / "prompts.txt", f"--batch={batch}", *args)
        assert given == "".join(lines)
    # Few tokens: another batch adds in another order, which decides a draw now and then.
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    words += ["--seed=3", "--max-tokens=40"]
    assert text(run, *words, "--batch=2") == text(run, *words)


def test_a_text_ends_before_a_stop_string(text: Any, run: Path) -> None:
    args = ("--prompt=def ", "--temperature=0", "--max-tokens=60")
    whole = text(run, *args)
    stop = whole[14:17]
    assert text(run, *args, "--stop", stop) == whole[: whole.index(stop, 4)] + "\n"
    assert text(run, *args, "--stop", "\x00", "--stop", stop + "\x00") == whole


def test_a_text_is_printed_as_it_comes(run: Path) -> None:
    """The first piece is out while a long text is generated."""
    command = [sys.executable, "-u", SCRIPT, run, "--prompt", "def ", "--max-tokens", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=clean_env()) as process:
        assert process.stdout is not None
        assert len(process.stdout.read(8)) == 8 and process.poll() is None
        process.kill()


def test_the_commands_of_the_document(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what a directory in Hugging Face format continues: the texts of transformers."""
    import transformers

    document = (ROOT / "docs/extensions/generate.md").read_text()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/quickstart").symlink_to(run)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    directory = tmp_path / "models/llama"
    reference = make("llama3", directory)
    tokenizer = json.loads(train_bpe([document], 259))
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 259, "content": "<s>"})
    sequences = [{"Sequence": {"id": id_, "type_id": n}} for n, id_ in enumerate("AB")]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, *sequences[:1]],
        "pair": sequences,
        "special_tokens": {"<s>": {"id": "<s>", "ids": [259], "tokens": ["<s>"]}},
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    prompts = ["What is it?", "Why?", "Who has written that long text?"]
    (tmp_path / "questions.txt").write_text("\n".join(prompts))
    commands = re.findall(r"^    (python .*)$", document, re.MULTILINE)
    assert len(commands) == 3
    commands[1] = commands[1].replace("@250", "@15")
    commands.append(
        "python scripts/generate.py models/llama --prompts questions.txt --temperature 0 "
        "--max-tokens 30"
    )
    script = "\n".join(["set -e", f'PATH="{Path(sys.executable).parent}:$PATH"', *commands])
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=clean_env(), capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    for number, prompt in enumerate(prompts, 1):
        ids = fast(prompt, return_tensors="pt")
        assert ids["input_ids"][0, 0] == 259
        expected = reference.generate(**ids, max_new_tokens=30, do_sample=False)[0]
        text = fast.decode(expected, skip_special_tokens=True)
        assert f"{text}\n--- {number} of 3\n" in done.stdout
    (code,) = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, found := {})
    assert found["logits"].shape == (1, 9, 257) and not found["logits"].requires_grad


def test_a_dialogue(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal. Each answer follows the whole dialogue; Ctrl-D ends it."""
    monkeypatch.setitem(hf_models.COMMON, "vocab_size", 265)
    monkeypatch.setitem(hf_models.COMMON, "max_position_embeddings", 256)
    make("llama2", tmp_path / "m")
    write_tokenizer(tmp_path / "m", GENERATION)
    command = f"{sys.executable} {SCRIPT} {tmp_path / 'm'} --chat --temperature 0 --max-tokens 9"
    terminal = ["script", "--quiet", "--return", "--command", command, "/dev/null"]
    done = subprocess.run(
        terminal, input="one\n\ntwo\n\x04", cwd=ROOT, env=clean_env(), capture_output=True,
        text=True, timeout=120, errors="replace",
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stdout, done.stdout
    assert "Ctrl-D or Ctrl-C ends the dialogue" in done.stdout and done.stdout.count("> ") == 4

    asked: list[list[str]] = []
    lines = ["two", "one"]

    def type_line(_: str) -> str:
        if not lines:
            raise EOFError
        return lines.pop()

    monkeypatch.setattr("builtins.input", type_line)
    loaded = kempner.extensions.generate.load.load_model_and_tokenizer(str(tmp_path / "m"), "cpu")
    chat = type(loaded.words).chat

    def record(words: Any, messages: Any) -> list[int]:
        asked.append([f"{m['role']}: {m['content']}" for m in messages])
        return chat(words, messages)

    monkeypatch.setattr(type(loaded.words), "chat", record)
    run_dialogue(loaded, Sampling(max_tokens=9))
    assert [len(messages) for messages in asked] == [1, 3]
    assert asked[1][0] == "user: one" and asked[1][1].startswith("assistant: ")

    done = subprocess.run(
        [sys.executable, SCRIPT, run, "--chat", "--prompt", "x"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "has no chat template" in done.stderr


def test_a_message_that_a_template_refuses(
    tmp_path: Path, generate: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It is taken back. The first one need not be empty, which this template refuses, too."""
    template = "{% for m in messages %}{% if 'a' not in m.content and m.role == 'user' %}" \
        "{{ raise_exception('say a') }}{% endif %}{{ m.content }}{% endfor %}"  # fmt: skip
    about = {"eos_token": "<|endoftext|>", "chat_template": template}
    (make_model(tmp_path) / "tokenizer_config.json").write_text(json.dumps(about))
    lines = ["a few", "no", "a word"]

    def type_line(_: str) -> str:
        if not lines:
            raise EOFError
        return lines.pop()

    monkeypatch.setattr("builtins.input", type_line)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    words = [str(tmp_path), "--chat", "--device=cpu", "--max-tokens=4"]
    assert generate.main(words) == 0 and not lines
    assert capsys.readouterr().err.count("the chat template refuses it: say a") == 1
    assert generate.main([*words, "--prompt=no"]) == 2
    assert f"--chat: {tmp_path}: the chat template refuses it: say a" in capsys.readouterr().err


def test_the_server_of_its_document(text: Any, run: Path, tmp_path: Path) -> None:
    """Its commands work; greedy texts are those of this program; SIGTERM answers what waits."""
    document = (ROOT / "docs/extensions/serve.md").read_text()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/quickstart").symlink_to(run)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (program,) = re.findall(r"^    (python .*)$", document, re.MULTILINE)
    curls = re.findall(r"^    (curl .*127.*)$", document, re.MULTILINE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, *program.split()[1:], f"--port={port}"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=clean_env(), stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert f"at http://127.0.0.1:{port}\n" in process.stdout.readline().decode()
            lines = "\n".join(curls).replace(":8000", f":{port}").replace("@250", "@15")
            script = ["bash", "-ec", lines.replace(": 40}", ": 20}").replace("\n", "\necho\n")]
            done = subprocess.run(
                script, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
            )
            first, second, *stream = done.stdout.splitlines()
            assert len(json.loads(first)["choices"]) == 1 and '"def main("' in lines
            assert [0 < len(c["token_ids"]) <= 16 for c in json.loads(second)["choices"]] == [
                True
            ] * 4
            assert "data: [DONE]" in stream and '{"weight_version": 1}' in stream
            assert "kempner_weight_version 1" in stream
            engine = Client(port)
            (choice,) = engine.complete("import", temperature=0, max_tokens=20)
            assert choice["weight_versions"] == [1]
            with ThreadPoolExecutor(1) as pool:
                engine.ask("/pause", {})
                waits = pool.submit(engine.ask, "/v1/completions", {"prompt": "a"}, 503)
                while engine.busy() != 1:
                    time.sleep(0.01)
                process.send_signal(signal.SIGTERM)
                assert waits.result()["error"]["message"] == "the engine is ending"
            assert process.wait(LIMIT_S) == 0
        finally:
            process.kill()
    step = run / "checkpoints/step_00000015"
    assert text(step, "--prompt=import", "--temperature=0", "--max-tokens=20") == (
        f"import{choice['text']}\n"
    )


def damage(path: Path) -> None:
    with next(path.glob("*/*.distcp")).open("r+b") as file:
        file.truncate(5000)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (shutil.rmtree, "no such directory"),
        (lambda run: shutil.rmtree(run / "checkpoints"), "no complete checkpoint"),
        (lambda run: damage(run / "checkpoints/step_00000030"), "name an older checkpoint"),
        (
            lambda run: (run / "checkpoints/latest/tensors.json").unlink(),
            "tensors.json: FileNotFound",
        ),
        (lambda run: (run / "checkpoints/latest/manifest.json").write_text("{"), "manifest.json"),
    ],
)
def test_bad_input(
    generate: ModuleType,
    run: Path,
    tmp_path: Path,
    change: Any,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = shutil.copytree(run, tmp_path / "broken", symlinks=True)
    change(broken)
    assert generate.main([str(broken)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and words in err, err


@pytest.mark.parametrize(
    "word",
    [
        "--max-tokens=0",
        "--temperature=-1",
        "--temperature=nan",
        "--top-k=0",
        "--top-p=0",
        "--min-p=2",
        "--stop=",
        "--batch=0",
        "--prompts=x --prompt=y",
    ],
)
def test_bad_values(generate: ModuleType, run: Path, word: str) -> None:
    assert generate.main([str(run), *word.split()]) == 2
