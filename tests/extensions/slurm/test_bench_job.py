"""`sbatch multinode.sh CONFIG --bench`, and `--tune`: variants one after the other in one job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.conftest import status

HUGE = "--model.vocab_size=16777216 --model.dim=65536"  # 4 TB of embeddings


@pytest.mark.soak
def test_a_variant_without_memory_ends_alone(cluster: Cluster, tmp_path: Path) -> None:
    """It is listed last, with its reason; the job has the other's figures, and is not requeued."""
    run = tmp_path / "run"
    words = ["--train.seq_len=32", "--bench.warmup=1", "--bench.steps=2"]
    job = cluster.sbatch(
        "multinode.sh",
        *cluster.debug_run(run, *words, f"--bench.compare={json.dumps([HUGE, ''])}", "--bench"),
        options=["--gpus-per-node=1", f"--output={tmp_path}/job.out"],
        cwd=tmp_path,
    )
    code, log = cluster.wait(job), (tmp_path / "job.out").read_text()
    assert code == 0 and log.count("kempner: end: the run is done") == 1, log
    assert status(run)["state"] == "done" and not list(run.rglob("lock"))
    record = json.loads((run / "bench.json").read_text())
    huge, plain = record["results"]
    assert "can't allocate memory" in huge["failed"] and not huge["summary"]
    assert plain["ranks"] == 2 and len(plain["steps"]) == 2
    table = log[log.index("of the best") :].splitlines()
    assert table[1].split()[1:2] == ["1.000"] and table[1].endswith("as configured")
    assert HUGE in table[2] and "can't allocate memory" in table[2]


@pytest.mark.soak
def test_a_tune_follows_the_first_rank_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    """Two ranks on two nodes measure the same; submitted again, the job has what it had."""
    run = tmp_path / "run"
    words = ["--train.seq_len=32", "--tune", "--minutes=0.1"]
    for again in (False, True):
        job = cluster.sbatch(
            "multinode.sh",
            *cluster.debug_run(run, *words),
            options=["--gpus-per-node=1", f"--output={tmp_path}/job-{again}.out"],
            cwd=tmp_path,
        )
        code, log = cluster.wait(job), (tmp_path / f"job-{again}.out").read_text()
        assert code == 0 and log.count("kempner: end: the run is done") == 1, log
        assert "world size 2" in log and "sbatch --nodes=2 scripts/slurm/multinode.sh" in log
        assert ("runs of an earlier start count" in log) == again
    assert status(run)["state"] == "done" and (run / "tuned.toml").exists()
    record = json.loads((run / "tune/record.json").read_text())
    assert record["ranks"] == 2 and record["trials"][0]["tokens_per_s"] > 0
