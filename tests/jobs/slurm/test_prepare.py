"""scripts/slurm/prepare.sh on a real Slurm: what comes out is byte for byte that of one machine."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.cluster import ROOT, Cluster
from tests.waiting import until


@pytest.fixture
def corpus(tmp_path: Path) -> list[object]:
    """Input and options: 301 units of text and JSON lines, and a line that is broken; long enough
    that two interruptions find work left."""
    folder = tmp_path / "a corpus"
    folder.mkdir()
    for i in range(300):
        (folder / f"{i:03d}.txt").write_text(f"{i} größe \n" * 3000)
    lines = [json.dumps({"text": f"line {i} " * 30}) for i in range(4000)]
    lines[3000] = "broken"
    (folder / "rows.jsonl").write_text("\n".join(lines))
    options = ["--train-bpe=300", "--shard-tokens=10000", "--workers=1", "--skip-bad-lines"]
    return [folder, *options]


def everything(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in out.iterdir()}


def task_of(job: str) -> int:
    """A task of this job that encodes units, not the first."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"units" in words and {b"SLURM_PROCID=1", f"SLURM_JOB_ID={job}".encode()} <= {
            *environment
        }:
            return int(folder.name)
    return 0


def wait_for_units(out: Path, more_than: int) -> int:
    """Until more units are encoded; returns how many."""

    def count() -> int:
        return len(list(out.glob("units/*.npz")))

    until(lambda: count() > more_than, lambda: f"{count()} units")
    return count()


@pytest.mark.soak
def test_two_nodes_write_what_one_machine_writes_also_after_a_kill_and_a_warning(
    cluster: Cluster, tmp_path: Path, corpus: list[object]
) -> None:
    out, alone = tmp_path / "the 'out'", tmp_path / "alone"
    job = cluster.sbatch("prepare.sh", *corpus, "--out", out, cwd=tmp_path)
    log = tmp_path / f"prepare-{job}.out"
    count = wait_for_units(out, 20)
    os.kill(task_of(job), signal.SIGKILL)
    cluster.wait_for("requeue: ", log)
    assert not (out / "dataset.json").exists()
    cluster.start_again(job)
    cluster.wait_for("restart count 1", log)
    wait_for_units(out, count + 10)
    cluster.ask("scancel", "--batch", "--signal=TERM", job)
    assert cluster.wait(job) == 0, log.read_text()
    said = log.read_text()
    assert said.count("requeue: interrupted and saved (work done:") == 2
    found = [int(n) for n in re.findall(r"(\d+) of 301 units of input are encoded already", said)]
    assert len(found) == 3 and found[1] >= count and found[2] >= count + 10
    assert "end: the data are complete" in said and "skipped 1 bad lines of JSON" in said
    program = [sys.executable, ROOT / "scripts/prepare_data.py"]
    cluster.ask(*program, *corpus, "--out", alone)
    assert len(everything(alone)) > 20 and everything(out) == everything(alone)
    again = cluster.sbatch("prepare.sh", *corpus, "--out", out, cwd=tmp_path)
    assert cluster.wait(again) == 0
    assert "complete, nothing to do" in (tmp_path / f"prepare-{again}.out").read_text()
    assert everything(out) == everything(alone)


def test_bad_input_ends_before_srun(cluster: Cluster, tmp_path: Path, corpus: list[object]) -> None:
    job = cluster.sbatch("prepare.sh", tmp_path / "none", "--out", tmp_path / "out", cwd=tmp_path)
    assert cluster.wait(job) == 2 and cluster.steps(job) == 0
    assert "none: no such file or directory" in (tmp_path / f"prepare-{job}.out").read_text()
    assert not (tmp_path / "out").exists()
    bad = [word for word in corpus if word != "--skip-bad-lines"]
    job = cluster.sbatch("prepare.sh", *bad, f"--out={tmp_path}/out", cwd=tmp_path)
    assert cluster.wait(job) == 2
    said = (tmp_path / f"prepare-{job}.out").read_text()
    assert "rows.jsonl:3001: not JSON" in said and "end: bad input" in said
