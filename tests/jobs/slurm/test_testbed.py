"""The test bed itself: whose it is, and what it refuses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster import AS_USER, TESTBED, USER, Cluster, need_slurm
from tests.waiting import LIMIT_S, until

Bed = Callable[..., "subprocess.CompletedProcess[str]"]
NUMBER = str((os.getpid() + 125) % 249 + 1)  # far from those of tests.cluster
STATE = Path(f"/run/kempner-testbed-{NUMBER}")


@pytest.fixture
def bed() -> Iterator[Bed]:
    need_slurm()

    def call(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(TESTBED), *map(str, words)]
        variables = {**os.environ, "KEMPNER_TESTBED": NUMBER, **env}
        return subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=LIMIT_S
        )

    yield call
    call("down")


def test_a_cluster_goes_with_its_owner_and_with_no_other(bed: Bed) -> None:
    owners = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    try:
        for owner in owners:  # the number is used once more, before the first owner has gone
            bed("down")
            up = bed("up", 1, 0, KEMPNER_TESTBED_OWNER=str(owner.pid))
            assert up.returncode == 0, up.stderr
        owners[0].kill()
        owners[0].wait()
        time.sleep(1.5)  # a guard looks every 0.5 s
        assert "node1 idle" in bed("status").stdout
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()
    until(lambda: not STATE.exists())
    assert (
        f"kp{NUMBER}-" not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    )


def test_what_it_refuses(bed: Bed) -> None:
    """One message, exit code 2, and the cluster that is up stays as it is."""
    assert bed("up", 1, 0).returncode == 0
    for words, message in (
        (["up", 1, 0], f"cluster {NUMBER} is up"),
        (["up", "many"], "up [NODES 1..99] [GPUS PER NODE 0..99], not: up many"),
        (["crash", "node2"], "no host 'node2' in cluster"),
        (["bytes", "node1", "eth0"], "em4 or ib0, not 'eth0'"),
    ):
        done = bed(*words)
        assert done.returncode == 2 and message in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1
    assert "node1 idle" in bed("status").stdout


def test_another_slurm(bed: Bed, tmp_path: Path) -> None:
    """SLURM_BIN=DIR: the programs that lie there, and no others; a mixture is refused."""
    programs = ("slurmctld", "slurmd", "srun", "sbatch", "salloc", "scancel", "scontrol", "squeue")
    for name in programs:
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    missing = bed("up", 1, 0, SLURM_BIN=str(tmp_path))
    assert missing.returncode == 2
    assert f"SLURM_BIN={tmp_path} has no sinfo: name the directory" in missing.stderr
    called = tmp_path / "called"
    (tmp_path / "sinfo").write_text(
        f'#!/bin/sh\necho >>{called}\nexec {shutil.which("sinfo")} "$@"'
    )
    (tmp_path / "sinfo").chmod(0o755)
    up = bed("up", 1, 0, SLURM_BIN=str(tmp_path))
    assert up.returncode == 0, up.stderr
    assert f"export PATH={tmp_path}:" in up.stdout
    assert called.read_text().count("\n") > 1  # the boot itself asked it
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho slurm 21.08.1")
    assert "are of several versions: " in bed("status", SLURM_BIN=str(tmp_path)).stderr
    for name in programs:
        (tmp_path / name).unlink()
        (tmp_path / name).symlink_to(tmp_path / "sinfo")
    assert "Slurm 21.08.1 is too old: 22.05" in bed("status", SLURM_BIN=str(tmp_path)).stderr


def test_who_types(cluster: Cluster, tmp_path: Path) -> None:
    """Root, and with --as-user somebody without rights, on Slurm with accounting."""
    user = USER if AS_USER[0] else "root"
    words = ["--wrap=id -un; grep CapEff /proc/self/status; echo >made", "--output=log"]
    job = cluster.ask("sbatch", "--parsable", f"--chdir={tmp_path}", *words)
    assert cluster.wait(job) == 0
    name, rights = (tmp_path / "log").read_text().splitlines()
    assert name == user == cluster.ask("id", "-un") and cluster.field(job, "Account")
    assert (int(rights.split()[1], 16) == 0) == AS_USER[0]
    assert (tmp_path / "made").stat().st_uid == tmp_path.stat().st_uid
    enforced = re.search("AccountingStorageEnforce.*", cluster.ask("scontrol", "show", "config"))
    assert enforced and ("associations" in enforced[0]) == AS_USER[0]
