"""One run of rl.sh on the test bed, with its programs or with those of
tests/extensions/slurm/fake_rl."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.cluster import Cluster
from tests.conftest import ROOT
from tests.trainer.fault.broken_run import BrokenRun
from tests.waiting import until

FAKE = ROOT / "tests/extensions/slurm/fake_rl"
ROLES = {
    "trainer": ("KEMPNER_TRAIN", "rl.py"),
    "orchestrator": ("KEMPNER_ORCHESTRATE", "orchestrate.py"),
    "engine": ("KEMPNER_SERVE", "serve.py"),
}
THREE = ("--nodes=3",)
TINY = """
model = {vocab_size = 257, dim = 32, n_layers = 1, n_heads = 2, ffn_dim = 64, max_seq_len = 64}
train = {max_steps = 40, seq_len = 64, micro_batch = 16}
metrics = {log_interval = 1}

[rl]
tokenizer = "bytes"
sampling = {max_tokens = 4}
env = [{id = "arithmetic"}]
"""


class RlRun(BrokenRun):
    """Three hosts unless `options` say otherwise: one trains, two have engines, two tasks each."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        super().__init__(cluster, {}, folder)

    def start(
        self, *words: object, options: tuple[str, ...] = THREE, fake: bool = True, **env: str
    ) -> str:
        if fake:
            env |= {name: str(FAKE / file) for name, file in ROLES.values()}
            words = (self.tiny(), *words)
        if "--nodes=3" in options:
            words += ("--rl.deployment.num_infer_nodes=2",)
        words += (f"--run.dir={self.dir}", "--distributed.device=cpu")
        self.job = self.cluster.sbatch(
            "rl.sh",
            *words,
            options=["--gpus-per-node=2", f"--output={self.folder}/job-%j.out", *options],
            cwd=ROOT,
            env=env,
        )
        return self.job

    def tiny(self) -> Path:
        (self.folder / "tiny.toml").write_text(TINY)
        return self.folder / "tiny.toml"

    def processes(self, role: str, engine: int | None = None) -> list[int]:
        """Those of a role in this job, as this machine counts, without srun and the shells."""
        found = []
        file = f"/{ROLES[role][1]}\0".encode()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes()
                env = (path / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if (
                file in words
                and b"python" in words.split(b"\0")[0]
                and str(self.dir).encode() in words
                and f"SLURM_JOB_ID={self.job}".encode() in env
                and (engine is None or f"KEMPNER_ENGINE={engine}".encode() in env)
            ):
                found.append(int(path.name))
        return sorted(found)

    def strike(
        self, role: str, engine: int | None = None, number: int = signal.SIGKILL
    ) -> list[int]:
        """kill -9, or another signal, to the first process of a role that is there."""
        until(lambda: bool(self.processes(role, engine)))
        struck = self.processes(role, engine)[:1]
        os.kill(struck[0], number)
        return struck

    def lines(self) -> list[dict[str, Any]]:
        path = self.dir / "metrics.jsonl"
        found = map(json.loads, path.read_text().splitlines() if path.exists() else [])
        return [line for line in found if "tasks" in line or "reward" in line]

    def wait_for_step(self, step: int) -> None:
        until(lambda: any(line["step"] >= step for line in self.lines()))

    def assert_nothing_left(self) -> None:
        """No process on any host, no token, nothing of the exchange."""
        until(lambda: not any(self.processes(role) for role in ROLES))
        assert not (self.dir / "rl").exists(), list(self.dir.glob("rl/*/*"))
        steps = self.cluster.ask("squeue", "-h", "-s", "-j", self.job)
        assert all("extern" in line for line in steps.splitlines()), steps
