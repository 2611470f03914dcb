"""A cluster of the test bed with a site around it (scripts/slurm/testbed/), as its users see it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster import ROOT, TESTBED, Cluster, boot
from tests.waiting import LIMIT_S

KIT = "kit"  # the repository, where the users read it


class Site:
    """`alice` submits, `mallory` looks on; root, in `cluster`, sees what is true."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.state = Path(cluster.env["SLURM_CONF"]).parent
        self.kit, self.project = self.state / KIT, self.state / "project"
        self.parts = (self.state / "site").read_text().split()
        self.trainer = self.kit / "tests/jobs/slurm/fake_trainer.py"
        self.faulty_trainer = self.kit / "tests/trainer/fault/faulty_train.py"
        shutil.copytree(cluster.data, self.project / "data")

    def need(self, part: str) -> None:
        """Skip where this machine has not the part; testbed.sh has said why."""
        if part not in self.parts:
            pytest.skip(f"the site has no {part} here")

    def run(
        self,
        user: str,
        *command: object,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """A command of a user, from the login node."""
        words = ["env", "-C", cwd or self.project, *(f"{k}={v}" for k, v in (env or {}).items())]
        return self.cluster.root("bash", TESTBED, "as", user, *words, *command)

    def ask(self, user: str, *command: object, **more: object) -> str:
        done = self.run(user, *command, **more)  # type: ignore[arg-type]
        assert done.returncode == 0, f"{user}: {command}: {done.stderr}"
        return done.stdout.strip()

    def folder(self, name: str) -> Path:
        """A new directory of alice's, on every host."""
        folder = self.project / name
        self.ask("alice", "mkdir", folder)
        return folder

    def sbatch(
        self,
        script: str,
        *arguments: object,
        options: Sequence[object] = (),
        cwd: Path,
        env: dict[str, str] | None = None,
        user: str = "alice",
    ) -> str:
        """Submit a launch script (a name); returns the job's number. The variables go with it: what
        the site exports would keep them back."""
        path = self.kit / "scripts/slurm" / script
        words = ["sbatch", "--parsable", *options, path, *arguments]
        return self.ask(user, *words, cwd=cwd, env={"SBATCH_EXPORT": "ALL", **(env or {})})

    def wrap(self, command: str, *options: object, cwd: Path, user: str = "alice") -> str:
        words = ["sbatch", "--parsable", "--output=%j.out", *options, f"--wrap={command}"]
        return self.ask(user, *words, cwd=cwd)

    def debug_run(self, run_dir: Path, *overrides: object) -> list[object]:
        """train.py's arguments for a run of debug.toml that takes seconds."""
        config, _, *words = self.cluster.debug_run(run_dir, *overrides)
        path = self.kit / Path(str(config)).relative_to(ROOT)
        return [path, f"--data.dataset_path={self.project / 'data'}", *words]

    def shim(self, folder: Path, name: str, before: str) -> dict[str, str]:
        """A program of alice's in front of one of Slurm's; `before`: bash that runs first."""
        commands = folder / "bin"
        commands.mkdir(exist_ok=True)
        real = shutil.which(name)
        (commands / name).write_text(f'#!/bin/bash\n{before}\nexec {real} "$@"\n')
        (commands / name).chmod(0o755)
        return {"PATH": f"{commands}:{os.environ['PATH']}"}

    def on(self, node: str, *command: object) -> subprocess.CompletedProcess[str]:
        """A command on a host, as root."""
        return self.cluster.root("bash", TESTBED, "exec", node, *command)

    def until(self, job: str, state: str) -> None:
        end = time.monotonic() + LIMIT_S
        while (now := self.cluster.state(job)) != state:
            assert time.monotonic() < end, f"job {job} is {now}, not {state}, after {LIMIT_S} s"
            time.sleep(0.2)


@contextlib.contextmanager
def boot_site(
    nodes: int, gpus: int, factory: pytest.TempPathFactory, parts: str, **more: str
) -> Iterator[Site]:
    with boot(nodes, gpus, factory, KEMPNER_TESTBED_SITE=parts, **more) as cluster:
        yield Site(cluster)


def decisions(run_dir: Path) -> list[str]:
    path = run_dir / "attempts.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [e["decision"] for e in map(json.loads, lines) if e["event"] == "decision"]
