"""One run on the test bed: submitted through the real script, broken, and looked at afterwards."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kempner.jobs.records.event_reader import read_records
from tests.cluster import ENDED, Cluster
from tests.conftest import losses, status
from tests.waiting import LIMIT_S, until

STEPS = 40
FAULTY_TRAINER = Path(__file__).with_name("faulty_train.py")


def words(cluster: Cluster, run_dir: Path) -> list[str]:
    """Arguments of train.py for a run whose steps leave time to break it."""
    return [
        "configs/train/debug.toml",
        f"--data.dataset_path={cluster.data}",
        f"--run.dir={run_dir}",
        "--model.dim=64",
        "--model.n_layers=2",
        "--model.ffn_dim=96",
        "--train.seq_len=32",
        "--train.global_batch=8",
        f"--train.max_steps={STEPS}",
        "--train.deterministic",
        "--checkpoint.interval=10",
        "--eval.interval=0",
        "--metrics.log_interval=1",
    ]


class BrokenRun:
    """A run on two hosts, in one task each unless `tasks` says otherwise. A step takes at least
    0.1 s, so that faults strike where they are meant to."""

    def __init__(self, cluster: Cluster, unbroken: dict[int, float], folder: Path) -> None:
        self.cluster, self.unbroken, self.folder = cluster, unbroken, folder
        self.dir = folder / "run"
        self.job = ""

    def submit(
        self,
        *overrides: str,
        options: Sequence[str] = (),
        faults: str = "",
        script: str = "multinode.sh",
        tasks: int = 1,
        **env: str,
    ) -> str:
        """Start a job for this run; it becomes the run's job. `faults`: see faulty_train.py."""
        self.job = self.cluster.sbatch(
            script,
            *words(self.cluster, self.dir),
            *overrides,
            options=[f"--gpus-per-node={tasks}", f"--output={self.folder}/job-%j.out", *options],
            cwd=Path(__file__).parents[3],
            env={
                "KEMPNER_TRAIN": str(FAULTY_TRAINER),
                "FAULTS": f"slow ms=100 rank=0\n{faults}",
                **env,
            },
        )
        return self.job

    # --- while it runs ---

    @property
    def log(self) -> str:
        path = self.folder / f"job-{self.job}.out"
        return path.read_text() if path.exists() else ""

    def wait_for(self, pattern: str) -> None:
        """Until the batch log has a match."""
        end = time.monotonic() + LIMIT_S
        while not re.search(pattern, self.log):
            assert time.monotonic() < end, f"no {pattern!r} after {LIMIT_S} s:\n{self.log}"
            state = self.cluster.state(self.job)
            assert state not in ENDED or re.search(pattern, self.log), f"{state}:\n{self.log}"
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(rf"step +{step}/")

    def pids(self, rank: int, replica: int | None = None) -> list[int]:
        """The process of a rank, as this machine counts; `replica`: where each has a step."""
        found = []
        place = [f"SLURM_PROCID={rank}", f"SLURM_JOB_ID={self.job}"]
        if replica is not None:
            place.append(f"KEMPNER_REPLICA={replica}")
        for path in Path("/proc").glob("[0-9]*"):
            try:
                command = (path / "cmdline").read_bytes()
                environment = (path / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if (
                str(self.dir).encode() in command
                and all(word.encode() in environment for word in place)
                and any(word.startswith(b"SLURM_STEP_NUM_TASKS=") for word in environment)
            ):
                found.append(int(path.name))
        return found

    def wait(self) -> int:
        return self.cluster.wait(self.job)

    def end(self) -> None:
        """Leave nothing behind for the next test."""
        if self.job:
            # Again and again: one that meets the script's own requeue is overruled by it.
            until(lambda: self._cancel() in ENDED)

    def _cancel(self) -> str:
        self.cluster.run("scancel", self.job)
        return self.cluster.state(self.job)

    # --- afterwards ---

    def events(self, kind: str) -> list[dict[str, Any]]:
        records = read_records(self.dir / "attempts.jsonl")
        return [record for record in records if record["event"] == kind]

    def decisions(self) -> list[str]:
        return [event["decision"] for event in self.events("decision")]

    def recomputed(self) -> int:
        """Steps that were done more than once."""
        lines = map(json.loads, (self.dir / "metrics.jsonl").read_text().splitlines())
        steps = [line["step"] for line in lines if "loss" in line]
        return len(steps) - len(set(steps))

    def assert_complete(self, attempts: int | None = None, recomputed: int = 0) -> None:
        """It has reached its last step, with the losses of the unbroken run, each on record."""
        found = dict(sorted(losses(self.dir).items()))
        text = f"{self.log}\n{self.events('decision')}"
        assert status(self.dir)["state"] == "done", text
        assert list(found) == list(self.unbroken), text
        assert list(found.values()) == pytest.approx(list(self.unbroken.values()), rel=1e-5)
        assert self.recomputed() <= recomputed, text
        if attempts is not None:
            assert len(self.events("start")) == attempts, text
        left = [path.name for path in (self.dir / "checkpoints").iterdir()]
        assert not [name for name in left if ".partial" in name], left
        assert not list(self.dir.glob(".rendezvous*")), list(self.dir.iterdir())
        assert not (self.dir / "lock").exists()
