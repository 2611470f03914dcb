"""A job of ray.sh in a test, and what it must not leave behind."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster import ENDED, Cluster

DRIVER = Path(__file__).parent / "ray_driver.py"
SECRET = "hf_" + "neverseenanywhere"
# As little as Ray takes, on hosts that share the cores and the memory of one machine.
SMALL = {"OBJECT_STORE_MEMORY": "78643200", "DASHBOARD_PORT": "0", "CPUS_PER_WORKER": "2"}


class RayJob:
    """One job of ray.sh, submitted from a directory of its own."""

    def __init__(self, cluster: Cluster, folder: Path, nodes: int, command: str, **env: str):
        self.cluster, self.folder = cluster, folder
        folder.mkdir(exist_ok=True)
        self.before = traces(cluster)
        options = [f"--nodes={nodes}", *env.pop("options", "").split()]
        given = {**SMALL, "COMMAND": command, "HOME": str(folder), **env}
        self.job = cluster.sbatch("ray.sh", options=options, cwd=folder, env=given)
        self.log, self.logs = folder / f"ray-{self.job}.out", folder / f"{self.job}-logs"
        self.attach = folder / f"{self.job}-attach.sh"

    def end(self, timeout: float = 120) -> int:
        """The exit code of the job; whatever it was, nothing is left."""
        code = self.cluster.wait(self.job, timeout)
        self.nothing_is_left()
        return code

    def nothing_is_left(self) -> None:
        end = time.monotonic() + 5  # the job's state is known before its last process has gone
        while (left := traces(self.cluster) - self.before) and time.monotonic() < end:
            time.sleep(0.2)
        assert not left, f"left behind: {left}\n{self.text()}"
        assert not self.attach.exists()
        assert not list(self.folder.rglob("*token*")), list(self.folder.rglob("*token*"))

    def until(self, what: str, timeout: float = 90) -> str:
        """Wait for some words in the batch log; fails at once when the job has ended without."""
        end = time.monotonic() + timeout
        while what not in self.text():
            assert self.cluster.state(self.job) not in ENDED and time.monotonic() < end, self.all()
            time.sleep(0.2)
        return self.text()

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def all(self) -> str:
        """The batch log and what Ray and the driver have said, for a test that fails."""
        return self.text() + "".join(
            f"\n--- {file.name}\n{file.read_text()[-3000:]}" for file in self.logs.glob("ray-*.log")
        )

    def run(self, *arguments: object, **more: Any) -> Any:
        """Its attach script, as the user calls it."""
        return self.cluster.run("bash", self.attach, *arguments, cwd=self.folder, **more)


Submit = Callable[..., RayJob]


def traces(cluster: Cluster) -> set[str]:
    """What a Ray job may leave on this machine: processes on the cluster's hosts, and files."""
    state = Path(cluster.env["SLURM_CONF"]).parent
    spaces = set()
    for pid in (state / "pid").glob("node*[0-9]"):
        outer = pid.read_text().strip()
        first = Path(f"/proc/{outer}/task/{outer}/children").read_text().strip()
        spaces.add(os.readlink(f"/proc/{first}/ns/pid"))
    places = {Path("/tmp"), Path(tempfile.gettempdir())}
    found = {str(f) for place in places for f in place.glob("ray*")}
    found |= {str(f) for f in Path("/dev/shm").iterdir()}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "ns/pid") in spaces:
                words = (process / "cmdline").read_bytes().split(b"\0")
                if b"slurm" not in words[0] and b"testbed.sh" not in b" ".join(words):
                    found.add(f"{process.name} {b' '.join(words).decode()[:200]}")
        except OSError:
            continue
    return found


def report(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())  # type: ignore[no-any-return]
