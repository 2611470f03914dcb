"""Replicas in processes that nobody starts together, through the real trainer."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT, TINY, Train, clean_env, losses, start_train, status

STREAM = (
    *("--train.max_steps=8", "--lowcomm.replicas=2", "--lowcomm.interval=4"),
    *("--lowcomm.fragments=2", "--lowcomm.tau=1", "--lowcomm.alpha=0.5"),
    *("--lowcomm.compress=linear", "--lowcomm.feedback=0.9", "--checkpoint.interval=4"),
)
NETWORK = {"GLOO_SOCKET_IFNAME": "lo"}


@contextlib.contextmanager
def judging(run: Path) -> Iterator[Path]:
    """The judge of docs/extensions/lowcomm.md; yields its address."""
    run.mkdir()
    words = ["-m", "kempner.extensions.lowcomm.judge", run / ".door", "127.0.0.1", "--log"]
    program = [sys.executable, *words, run / "replicas.jsonl"]
    process = subprocess.Popen(program, cwd=ROOT, env=clean_env(**NETWORK))
    try:
        yield run / ".door"
    finally:
        process.kill()
        process.wait()


def test_steps_equal_the_mesh_bit_for_bit(train: Train, data_dir: Path, tmp_path: Path) -> None:
    train(tmp_path / "mesh", *STREAM, nproc=2, **NETWORK)
    run = tmp_path / "steps"
    paths = (f"--data.dataset_path={data_dir}", f"--run.dir={run}", "--lowcomm.mode=steps")
    with judging(run) as door:
        processes = [
            start_train(
                *(*TINY, *STREAM, *paths),
                KEMPNER_DOOR=str(door),
                KEMPNER_REPLICA=str(replica),
                KEMPNER_REPLICAS="2",
                **NETWORK,
            )
            for replica in range(2)
        ]
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, out + err
    for ours, theirs in (
        (run, tmp_path / "mesh"),
        (run / "replicas/1", tmp_path / "mesh/replicas/1"),
    ):
        assert losses(ours) == losses(theirs) and len(losses(ours)) == 8
        assert status(ours)["state"] == "done"
    lines = map(json.loads, (run / "replicas.jsonl").read_text().splitlines())
    told = [(line["round"], line["weights"]) for line in lines if line["event"] == "round"]
    assert len(told) == 6 and len(set(told)) == 3


def test_a_replica_without_a_step_of_its_own_is_refused(train: Train, tmp_path: Path) -> None:
    words = ("--lowcomm.mode=steps", "--lowcomm.replicas=1", *STREAM[2:3], "--train.max_steps=8")
    done = train(tmp_path / "run", *words, code=2)
    assert "submit scripts/slurm/replicas.sh" in done.stderr
