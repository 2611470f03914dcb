"""A model of another program, fine-tuned through an interruption, evaluated meanwhile, exported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import hf_models
from tests.cluster import Cluster, boot
from tests.conftest import ROOT, clean_env, status
from tests.extensions.slurm.test_eval_job import TASK
from tests.templates import GENERATION, write_tokenizer

pytest.importorskip("lm_eval")

ANSWERS = {"one": "a cat", "two": "some dogs", "three": "no bird"}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three of them: two for the training, one for the evaluation."""
    with boot(3, 2, tmp_path_factory) as cluster:
        yield cluster


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base model, conversations, and a task that asks for their answers."""
    for key, value in {"vocab_size": 265, "max_position_embeddings": 256}.items():
        monkeypatch.setitem(hf_models.COMMON, key, value)
    hf_models.make("llama2", tmp_path / "base")
    write_tokenizer(tmp_path / "base", GENERATION)
    rows, questions = [], []
    for asked, right in ANSWERS.items():
        user, assistant = {"role": "user", "content": asked}, {"role": "assistant"}
        rows += [{"messages": [user, assistant | {"content": right}]}] * 20
        turn = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        choices = sorted(ANSWERS.values())
        questions.append({"question": turn, "choices": choices, "answer": choices.index(right)})
    (tmp_path / "tasks").mkdir()
    for file, lines in (("chats", rows), ("tasks/rows", questions)):
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (tmp_path / f"{file}.jsonl").write_text(text)
    # An answer follows the template's newline without a blank.
    task = TASK.format(file=tmp_path / "tasks/rows.jsonl") + 'target_delimiter: ""\n'
    (tmp_path / "tasks/choose.yaml").write_text(task)
    return tmp_path


def script(work: Path, *words: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=work, env=clean_env(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.soak
def test_an_imported_model_learns_to_answer(hosts: Cluster, work: Path) -> None:
    """Over two hosts, interrupted by Slurm, with nobody at the keyboard."""
    prepare = ["--kind", "chat", "--tokenizer", work / "base", "--workers", 1]
    prepare += ["--out", work / "chat", "--val-fraction", 0]
    script(work, ROOT / "scripts/prepare_data.py", work / "chats.jsonl", *prepare)
    run = work / "run"
    run.mkdir()
    words = [run, "--tasks", "choose", "--include-path", work / "tasks", "--device", "cpu"]
    env = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(work / "cache")}
    options = ["--nodelist=node3", "--gpus-per-node=1"]
    judge = hosts.sbatch("eval.sh", *words, options=options, cwd=work, env=env)
    words = [
        ROOT / "configs/train/sft.toml", f"--run.dir={run}", f"--data.dataset_path={work / 'chat'}",
        f"--model.init_from={work / 'base'}", "--train.seq_len=128", "--train.global_batch=4",
        "--train.micro_batch=1", "--train.max_steps=240", "--no-train.compile",
        "--train.recompute=none", "--train.dtype=fp32", "--optimizer.lr=3e-3",
        "--distributed.device=cpu", "--eval.interval=0", "--checkpoint.interval=60",
        "--metrics.log_interval=10",
    ]  # fmt: skip
    options = ["--nodelist=node1,node2", "--nodes=2", "--gpus-per-node=2"]
    job = hosts.sbatch("multinode.sh", *words, options=options, cwd=work)
    hosts.wait_for("step  90/", work / f"kempner-{job}.out")
    hosts.ask("scancel", "--batch", "--signal=TERM", job)  # as for a preemption
    assert hosts.wait(job) == 0, (work / f"kempner-{job}.out").read_text()
    assert status(run)["state"] == "done" and status(run)["attempt"] != 0
    events = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    assert [e["state"] for e in events if e["event"] == "end"][-2:] == ["interrupted", "done"]
    assert hosts.wait(judge) == 0, (work / f"eval-{judge}.out").read_text()
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found = {line["step"]: line["eval/choose/acc"] for line in lines if "eval/choose/acc" in line}
    assert len(found) > 1 and found[240] == 1.0, found
    script(work, ROOT / "scripts/convert.py", "export", run, work / "mine")
    for source in (run, work / "mine"):
        asked = ["--chat", "--prompt", "two", "--temperature", 0, "--device", "cpu"]
        said = script(work, ROOT / "scripts/generate.py", source, *asked)
        assert said == f"two\n{ANSWERS['two']}\n"
