"""Faults of runs in containers: what a run leaves is on the host, wherever its directories are."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.conftest import losses, status
from tests.containers import container, image
from tests.trainer.fault.broken_run import FAULTY_TRAINER, STEPS, BrokenRun

pytestmark = pytest.mark.as_root(
    "an image here has this machine's Python, which may be in root's home"
)

SLOW = "slow ms=100 rank=0"


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A directory of the host that no image has."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="kempner-test-") as name:
        yield Path(name)


@pytest.mark.soak
@pytest.mark.parametrize(
    "runtime",
    [
        "pyxis",
        *(pytest.param(one, marks=pytest.mark.soak) for one in ("charliecloud", "apptainer")),
    ],
)
def test_a_run_outside_of_what_is_mounted(
    cluster: Cluster, unbroken: dict[int, float], tmp_path: Path, elsewhere: Path, runtime: str
) -> None:
    """Its environment comes from a site file alone (sbatch --export=NONE); kill -9 of a rank, then
    SIGTERM, a save and a requeue: it goes on, and its losses are those of the unbroken one."""
    run = BrokenRun(cluster, unbroken, elsewhere)
    checkpoints = elsewhere / "saved/here"
    of = image(tmp_path, run.dir, checkpoints, cluster.data)
    env = {**cluster.env, **container(runtime, tmp_path, of, writable=True)}
    env["KEMPNER_MOUNTS"] += f",{cluster.data}:{cluster.data}"
    env |= {
        "KEMPNER_CODE": "1",
        "KEMPNER_TRAIN": str(FAULTY_TRAINER),
        "FAULTS": "slow ms=100 rank=0",
    }
    del env["KEMPNER_SITE"]
    site = tmp_path / "site.env"
    site.write_text("".join(f"{name}={value!r}\n" for name, value in env.items() if wanted(name)))
    try:
        run.submit(f"--checkpoint.dir={checkpoints}", options=[f"--export=KEMPNER_SITE={site}"])
        run.wait_for_step(12)
        os.kill(run.pids(1)[0], 9)
        run.wait_for("restart: ")
        run.wait_for_step(22)
        cluster.ask("scancel", "--batch", "--signal=TERM", run.job)
        run.wait_for("requeue: ")
        assert run.wait() == 0, run.log
    finally:
        run.end()
    assert status(run.dir)["state"] == "done"
    assert run.decisions() == ["restart", "requeue", "end"]
    assert losses(run.dir) == pytest.approx(unbroken, rel=1e-5)
    assert all("container" in start["parts"] for start in run.events("start"))
    assert os.readlink(checkpoints / "latest").endswith(str(STEPS))


def wanted(name: str) -> bool:
    return name.startswith(("KEMPNER_", "FAULTS", "OMP_", "PATH"))
