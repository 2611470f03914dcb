"""A job of ray.sh in a test, and what it must not leave behind."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cluster import ENDED, Cluster
from tests.waiting import LIMIT_S

DRIVER = Path(__file__).parent / "ray_driver.py"
SECRET = "hf_" + "neverseenanywhere"
# As little as Ray accepts, on hosts that share the cores and the memory of one machine.
SMALL = {"OBJECT_STORE_MEMORY": "78643200", "DASHBOARD_PORT": "0", "CPUS_PER_WORKER": "2"}


class RayJob:
    """One job of ray.sh, submitted from a directory of its own."""

    def __init__(self, cluster: Cluster, folder: Path, nodes: int, command: str, **env: str):
        self.cluster, self.folder = cluster, folder
        folder.mkdir(exist_ok=True)
        # With one time limit for all, Slurm's backfill keeps them in order: a later interactive job
        # would wait for its test, and that one for a job that waits for those hosts.
        options = [f"--nodes={nodes}", "--time=10", *env.pop("options", "").split()]
        given = {**SMALL, "COMMAND": command, "HOME": str(folder), **env}
        self.before = set(files(r"\d+"))
        self.job = cluster.sbatch("ray.sh", options=options, cwd=folder, env=given)
        self.log, self.logs = folder / f"ray-{self.job}.out", folder / f"{self.job}-logs"
        self.attach = folder / f"{self.job}-attach.sh"

    @property
    def nodes(self) -> list[str]:
        """The names of its nodes; those that it had, when it has ended."""
        listed = self.cluster.field(self.job, "NodeList")
        return self.cluster.ask("scontrol", "show", "hostnames", listed).splitlines()

    def end(self) -> int:
        """The exit code of the job; whatever it was, nothing is left behind."""
        code = self.cluster.wait(self.job)
        self.nothing_is_left()
        return code

    def nothing_is_left(self) -> None:
        end = time.monotonic() + 5  # the job's state is known before its last process has gone
        while (left := self.traces() - self.before) and time.monotonic() < end:
            time.sleep(0.2)
        assert not left, f"left behind: {left}\n{self.all()}"
        assert not self.attach.exists()
        assert not list(self.folder.rglob("*token*")), list(self.folder.rglob("*token*"))

    def traces(self) -> set[str]:
        return {*processes(self.cluster, self.job), *files(self.job)}

    def until(self, what: str, file: Path | None = None) -> str:
        """Wait for some text in the batch log, or in another file; fails at once when the job ends
        without it."""
        end = time.monotonic() + LIMIT_S
        while what not in self.text(file):
            assert self.cluster.state(self.job) not in ENDED and time.monotonic() < end, self.all()
            time.sleep(0.1)
        return self.text(file)

    def text(self, file: Path | None = None) -> str:
        file = file or self.log
        return file.read_text() if file.exists() else ""

    def all(self) -> str:
        """The batch log and the logs of Ray and of the driver, for a test that fails."""
        return self.text() + "".join(
            f"\n--- {file.name}\n{file.read_text()[-3000:]}" for file in self.logs.glob("ray-*.log")
        )

    def run(self, *arguments: object, **more: Any) -> Any:
        """Its attach script, as the user calls it."""
        return self.cluster.run("bash", self.attach, *arguments, cwd=self.folder, **more)


class Submit:
    """Submits jobs: submit(nodes, command, VARIABLE=..., options="..."); without a command it is an
    interactive one."""

    def __init__(self, cluster: Cluster, base: Path) -> None:
        """`base`: of the jobs' directories."""
        self.cluster, self.base = cluster, base
        self.jobs: list[RayJob] = []

    def __call__(self, nodes: int, command: str = "", folder: str = "work", **env: str) -> RayJob:
        self.jobs.append(RayJob(self.cluster, self.base / folder, nodes, command, **env))
        return self.jobs[-1]

    def cancel(self) -> None:
        """End what is still running."""
        for job in self.jobs:
            # Slurm soon forgets one that has ended.
            if job.job in self.cluster.ask("squeue", "-h", "-o", "%A").split():
                self.cluster.ask("scancel", job.job)
                self.cluster.wait(job.job)


def processes(cluster: Cluster, job: str = "") -> Iterator[str]:
    """The processes on the cluster's hosts but Slurm's; of one job: its number is in their
    environment."""
    state = Path(cluster.env["SLURM_CONF"]).parent
    spaces = set()
    for pid in (state / "pid").glob("node*[0-9]"):
        outer = pid.read_text().strip()
        first = Path(f"/proc/{outer}/task/{outer}/children").read_text().strip()
        spaces.add(os.readlink(f"/proc/{first}/ns/pid"))
    own = re.compile(rf"\bSLURM_JOB_ID={job}\0|/{job}-logs\b".encode() if job else b"")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "ns/pid") in spaces:
                words = (process / "cmdline").read_bytes().split(b"\0")
                slurms = re.search(b"slurm|munged$", words[0]) or b"testbed.sh" in b" ".join(words)
                if not slurms and own.search((process / "environ").read_bytes()):
                    yield f"{process.name} {b' '.join(words).decode()[:200]}"
        except OSError:
            continue


def files(job: str) -> Iterator[str]:
    """Files that a Ray job may leave on this machine, but not those of other jobs; `job` is a
    regular expression."""
    for place in {Path("/tmp"), Path(tempfile.gettempdir())}:
        for file in place.glob("ray*"):
            if re.match(rf"ray($|_|-{job}\.)", file.name):
                yield str(file)
    for file in Path("/dev/shm").iterdir():
        # Any Python on this machine makes those: multiprocessing's, PyTorch's and joblib's.
        if not file.name.startswith(("sem.", "psm_", "torch_", "joblib_")):
            yield str(file)


def report(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())  # type: ignore[no-any-return]
