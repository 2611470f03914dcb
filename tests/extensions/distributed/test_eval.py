"""scripts/eval.py: lm-evaluation-harness on our checkpoints, with tasks made on the spot."""

from __future__ import annotations

import functools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kempner import load_model
from kempner.config.option import ConfigError
from kempner.data.text.tokenizer import FileTokenizer
from kempner.jobs.records import results
from kempner.jobs.records.run_history import load_history
from tests import zygote
from tests.conftest import ROOT, TINY, clean_env, start_train
from tests.templates import write_tokenizer

pytest.importorskip("lm_eval")
import lm_eval.tasks

from kempner.extensions.generate import harness

QUESTIONS = [
    {"question": "def f(", "choices": ["self", "\u2014\u2014"], "answer": 0},
    {"question": "import ", "choices": ["%%%", "numpy as np"], "answer": 1},
    {"question": "return ", "choices": ["None", "x y z"], "answer": 0},
]
TEXTS = ["from __future__ import annotations\n" * 3, "def main() -> None:\n    pass\n", "x"]
DOCUMENT = (ROOT / "docs/extensions/evaluate.md").read_text()
TASKS = {  # beside `mine`, which is the document's
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}]
""",
    "answer": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 5}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("here") / "tasks"
    folder.mkdir()
    (mine,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)
    (folder / "mine.yaml").write_text(mine)
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    for name, text in TASKS.items():
        file = folder / ("texts.jsonl" if name == "texts" else "questions.jsonl")
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\n"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}test_split: test\n{text}")
    return folder


@pytest.fixture(scope="module")
def run_dir(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    words = [f"--data.dataset_path={data_dir}", f"--run.dir={folder}", "--checkpoint.interval=4"]
    process = start_train(*TINY, *words)
    assert process.wait(120) == 0
    return folder


def evaluate(folder: Path, *words: object, code: int = 0, **env: str) -> str:
    command = [sys.executable, ROOT / "scripts/eval.py", *map(str, words)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", **env}
    done = zygote.run(
        command, cwd=folder, env=clean_env(**offline), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def score(model: torch.nn.Module, ids: list[int], count: int) -> float:
    """log p of the last `count` tokens: the reference, one text at a time."""
    logits = model(torch.tensor([ids[:-1]]))[0, :, :257].log_softmax(-1)
    return sum(float(logits[i - 1, ids[i]]) for i in range(len(ids) - count, len(ids)))


def test_the_figures_are_those_of_ten_plain_lines_and_reach_the_metrics(
    run_dir: Path, tasks: Path, tmp_path: Path
) -> None:
    (words,) = re.findall(
        r"^    python scripts/eval.py runs/7b (.*tasks/)$", DOCUMENT, re.MULTILINE
    )
    words = words.replace("mine", "mine,texts,answer").split()
    said = evaluate(tasks.parent, run_dir, *words, "--batch=2", HF_DATASETS_CACHE=str(tmp_path))
    assert "recorded as step 8" in said and "byte_perplexity" in said
    line = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    model, tokenizer = load_model(run_dir)
    with torch.inference_mode():
        best = [
            max(range(2), key=lambda k: pair(model, tokenizer.encode, question, k))
            for question in QUESTIONS
        ]
        right = sum(b == q["answer"] for b, q in zip(best, QUESTIONS, strict=True))
        whole = [[256, *tokenizer.encode(text)] for text in TEXTS]
        total = sum(score(model, w[:33], len(w[:33]) - 1) for w in whole)  # one window of 32
        total += sum(score_rest(model, w) for w in whole)
    assert line["step"] == 8 and line["eval/mine/acc"] == pytest.approx(right / 3)
    count = sum(len(text.encode()) for text in TEXTS)
    assert line["eval/texts/byte_perplexity"] == pytest.approx(math.exp(-total / count), rel=1e-4)
    assert line["eval/answer/exact_match"] == 0.0
    history = load_history(run_dir)
    assert [r["step"] for r in history.results] == [8]
    assert results.evaluated_steps(run_dir, words[1]) == {8}
    assert not any("eval/mine/acc" in r for r in history.lines)  # no sign of life of the trainer
    assert history.state.word == "done" and history.attempts[-1].ended < line["time"]
    report = [sys.executable, "scripts/report.py", str(run_dir)]
    shown = subprocess.run(report, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"{right / 3:.4f} at step 8" in shown and "mine/acc" in shown


def pair(
    model: torch.nn.Module, encode: Callable[[str], list[int]], question: dict, k: int
) -> float:
    context, rest = question["question"], " " + question["choices"][k]
    spaces = len(context) - len(context.rstrip())  # the harness moves them to the answer
    both = encode(context + rest)
    return score(model, [256, *both], len(both) - len(encode(context[: len(context) - spaces])))


def score_rest(model: torch.nn.Module, ids: list[int]) -> float:
    """The windows after the first: 32 tokens each, the last one reaching back for its context."""
    total = 0.0
    for start in range(33, len(ids), 32):
        count = min(32, len(ids) - start)
        total += score(model, ids[start + count - 33 : start + count], count)
    return total


def test_results_wait_for_the_trainer_that_writes_the_file(tmp_path: Path) -> None:
    """One writer: while a trainer holds the lock, the file is its own."""
    (tmp_path / "lock").write_text("not to be read: somebody holds it")
    results.record_result(tmp_path, 4, "choose", {"choose/acc": 0.5})
    results.record_result(tmp_path, 4, "other", {"other/acc": 0.25})  # by another job
    (tmp_path / "eval/step_00000002.json").write_text('{"step": 2}')  # by an earlier version
    assert not (tmp_path / "metrics.jsonl").exists()
    taken: list[str] = []

    def take(text: str) -> None:
        taken.append(text)
        if len(taken) == 1:  # a second job adds them at the same time
            results.add_results(tmp_path, take)

    for _ in range(2):
        assert results.evaluated_steps(tmp_path, "choose") == {2, 4}
        assert results.evaluated_steps(tmp_path, "third") == {2}
        results.add_results(tmp_path, take)
    figures = {name: value for text in taken for name, value in json.loads(text).items()}
    assert (figures["eval/choose/acc"], figures["eval/other/acc"]) == (0.5, 0.25)
    assert sorted(json.loads(text)["step"] for text in set(taken)) == [2, 4, 4]
    (tmp_path / "eval/step_x.json").touch()  # none of ours
    assert results.evaluated_steps(tmp_path, "choose") == {2, 4}


def test_jobs_with_other_tasks_follow_the_same_run(run_dir: Path, tasks: Path) -> None:
    """What one has evaluated is not done for the other."""
    results.record_result(run_dir, 8, "mine", {"mine/acc": 1.0})
    words = [run_dir, "--follow", "--tasks=answer", "--include-path=tasks/"]
    assert "recorded as step 8" in evaluate(tasks.parent, *words)
    assert evaluate(tasks.parent, *words) == ""
    assert load_history(run_dir).results[-1].keys() >= {"eval/mine/acc", "eval/answer/exact_match"}


def test_special_tokens_of_a_text_are_those_of_transformers(tmp_path: Path) -> None:
    """A task on a chat model spells its template out."""
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path)
    model = harness.HarnessModel.__new__(harness.HarnessModel)
    model.text = FileTokenizer(tmp_path / "tokenizer.json", eod="<|im_end|>")
    text = "<|im_start|>user\nhow many?<|im_end|>\n<|im_start|>assistant\n"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert model.tok_encode(text) == theirs.encode(text, add_special_tokens=False)
    assert len(model.tok_encode("<|im_start|>")) == 1 and len(model.text.encode("<|im_start|>")) > 1


def test_a_task_that_there_is_not(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = functools.partial(lm_eval.tasks.TaskManager, include_path=[str(tasks)])
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: own(include_defaults=False))
    with pytest.raises(ConfigError, match="--tasks nothing: lm-eval has no such task"):
        harness.run_harness(None, ["mine", "nothing"], [], None, None)  # type: ignore[arg-type]


def test_an_absent_package_is_named_with_its_extra(
    run_dir: Path, tasks: Path, tmp_path: Path
) -> None:
    words = ["--include-path", tasks, "--device", "cpu"]
    (tmp_path / "lm_eval.py").write_text("raise ModuleNotFoundError(name='lm_eval')")
    path = f"{tmp_path}:{ROOT / 'src'}"
    said = evaluate(ROOT, run_dir, "--tasks=mine", *words, code=2, PYTHONPATH=path)
    assert "lm-eval is not installed" in said and ".[eval]" in said
