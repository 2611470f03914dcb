"""scripts/slurm/eval.sh on a real Slurm, beside the run that it evaluates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster import Cluster

pytest.importorskip("lm_eval")

TASK = """
task: choose
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    row = {"question": "2 squared", "choices": ["is 4", "was 5"], "answer": 0}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    (folder / "choose.yaml").write_text(TASK.format(file=folder / "rows.jsonl"))
    return folder


@pytest.mark.soak
def test_a_job_follows_the_run_through_its_own_requeue(
    cluster: Cluster, tmp_path: Path, tasks: Path
) -> None:
    """It is there before the run. Its figures come into metrics.jsonl while the run trains."""
    run = tmp_path / "the run"
    run.mkdir()
    words = [run, "--tasks", "choose", "--include-path", tasks, "--device", "cpu"]
    env = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    options = ["--nodelist=node2"]
    job = cluster.sbatch("eval.sh", *words, options=options, cwd=tmp_path, env=env)
    log = tmp_path / f"eval-{job}.out"
    train = cluster.debug_run(run, "--train.max_steps=100000", "--checkpoint.interval=5")
    options = ["--nodelist=node1", "--gpus-per-node=1"]
    training = cluster.sbatch("singlenode.sh", *train, options=options, cwd=tmp_path)
    metrics = run / "metrics.jsonl"
    cluster.wait_for("eval/choose/acc", metrics)  # added by the trainer
    cluster.ask("scancel", "--batch", "--signal=TERM", job)
    cluster.wait_for("requeue: interrupted", log)
    (run / "STOP").touch()
    assert cluster.wait(training) == 0
    assert cluster.wait(job) == 0, log.read_text()
    assert "end: the run is done" in log.read_text()
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    found = [line["step"] for line in lines if "eval/choose/acc" in line]
    last = json.loads((run / "status.json").read_text())["step"]
    assert len(found) >= 2 and found[-1] == last
    first = next(i for i, line in enumerate(lines) if "eval/choose/acc" in line)
    assert any("loss" in line for line in lines[first:])
    assert list((run / "eval").glob("step_*.json")) == []


def test_bad_input(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.sbatch("eval.sh", tmp_path / "none", "--tasks", "choose", cwd=tmp_path)
    assert cluster.wait(job) == 2
    assert "no run '" in (tmp_path / f"eval-{job}.out").read_text()
