"""scripts/slurm/preflight.sh, alone and before a training, on three real hosts."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kempner.jobs.records.node_speed import load_speeds
from tests.cluster import SCRIPTS, Cluster, boot
from tests.gpus import Shim, gpu

BRIEF = {"KEMPNER_PREFLIGHT_SECONDS": "0.1"}  # for each measurement of a device or of files
TRACES = re.compile("Traceback|recvVector|frame #|srun: error")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with boot(3, 2, tmp_path_factory) as cluster:
        yield cluster


def preflight(
    hosts: Cluster,
    cwd: Path,
    *arguments: object,
    nodes: int = 3,
    tasks: int = 1,
    env: dict[str, str] | None = None,
) -> tuple[int, str, dict[str, Any]]:
    """Run it as a job of its own; returns the exit code, the log and the JSON file."""
    options = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}"]
    job = hosts.sbatch(
        "preflight.sh", *arguments, options=options, cwd=cwd, env=BRIEF | (env or {})
    )
    code = hosts.wait(job)
    log = (cwd / f"preflight-{job}.out").read_text()
    file = cwd / f"runs/preflight-{job}.json"
    return code, log, json.loads(file.read_text()) if file.exists() else {}


@contextlib.contextmanager
def shaped(hosts: Cluster, node: str, rate: str) -> Iterator[None]:
    """The host's fast network sends no faster than that."""
    port = ["dev", "ib0", "root"]
    shape = ["tbf", "rate", rate, "burst", "16kb", "latency", "400ms"]
    hosts.testbed("exec", node, "tc", "qdisc", "add", *port, *shape)
    try:
        yield
    finally:
        hosts.testbed("exec", node, "tc", "qdisc", "del", *port)


def test_healthy_nodes(hosts: Cluster, tmp_path: Path) -> None:
    code, log, told = preflight(hosts, tmp_path, tasks=2)
    assert code == 0, log
    assert told["bad"] == "" and told["seconds"] < 60
    assert told["device"] == "cpu"  # the GPUs of the test bed are only numbers to Slurm
    for name in ("node1", "node2", "node3"):
        node = told["nodes"][name]
        assert node["host"] == name and node["interface"] == "ib0"
        assert abs(node["clock_s"]) < 0.5 and node["memory_free"] > 1e8
        assert node["packages"]["torch"] and node["inside"]["bus_bytes_per_s"] > 0
        assert len(node["pairs"]) == 2  # it has met both others
        assert all(pair["bus_bytes_per_s"] > 0 for pair in node["pairs"].values())
        assert [each["flops_per_s"] > 0 for each in node["devices"].values()] == [True, True]
        assert node["storage"]["write_bytes_per_s"] > 0 and node["storage"]["read_bytes_per_s"] > 0
    assert told["whole"]["bus_bytes_per_s"] > 0 and told["whole"]["latency_s"] > 0
    assert "all-reduce of all 6 tasks (cpu):" in log
    assert "run directory, one node alone: writes " in log and "3 nodes at once: writes " in log
    assert not list((tmp_path / "runs").glob(".preflight*"))
    kept = load_speeds(tmp_path / "runs/node-speeds")
    assert [line["tasks"] for lines in kept.values() for line in lines] == [2, 2, 2]
    assert not TRACES.search(log), log


@pytest.mark.soak
def test_no_traces_on_a_busy_machine(hosts: Cluster, tmp_path: Path) -> None:
    """The driver and the tasks leave in any order."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        for _ in range(20):
            code, log, _ = preflight(hosts, tmp_path, "--device", "cpu", nodes=2, tasks=2)
            assert code == 0 and not TRACES.search(log), log
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.soak
def test_a_slow_network_is_named(hosts: Cluster, tmp_path: Path) -> None:
    with shaped(hosts, "node2", "1mbit"):
        code, log, told = preflight(hosts, tmp_path)
    assert code == 1 and told["bad"] == "node2", log
    assert "node2: all-reduce between nodes: with node1" in log
    assert "exclude: node2 (sbatch --exclude=node2)" in log
    assert told["seconds"] < 60


@pytest.mark.soak
def test_a_slow_network_of_two_nodes(hosts: Cluster, tmp_path: Path) -> None:
    """Neither can be blamed."""
    with shaped(hosts, "node1", "1mbit"):
        code, log, told = preflight(hosts, tmp_path, nodes=2)
    assert code == 1 and told["bad"] == "", log
    assert "under 12.5 MB/s; with three or more nodes preflight finds the slow one" in log


def test_an_unplugged_network_is_named(hosts: Cluster, tmp_path: Path) -> None:
    """It has no link: the node would train over the slow one."""
    hosts.testbed("cut", "node3")
    try:
        code, log, told = preflight(hosts, tmp_path)
    finally:
        hosts.testbed("join", "node3")
    assert code == 1 and told["bad"] == "node3", log
    assert "node3: network: Ethernet; the other nodes have InfiniBand" in log


@pytest.mark.soak
def test_another_version_is_named(hosts: Cluster, tmp_path: Path) -> None:
    python = tmp_path / "python"
    other = tmp_path / "other/numpy-9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 9.9\n")
    python.write_text(
        f'#!/bin/sh\n[ "$(uname -n)" != node2 ] || export PYTHONPATH={other.parent}:$PYTHONPATH\n'
        f'exec {hosts.env["KEMPNER_PYTHON"]} "$@"\n'
    )
    python.chmod(0o755)
    code, log, told = preflight(hosts, tmp_path, env={"KEMPNER_PYTHON": str(python)})
    assert code == 1 and told["bad"] == "node2", log
    assert "node2: numpy: 9.9; the other nodes have " in log


FLAWED = """
import time, torch
real = torch.mm
def flawed(a, b, out=None):
    time.sleep(1.0)
    return real(a, b, out=out).neg_()
torch.mm = flawed
"""


@pytest.mark.soak
def test_a_slow_device_with_other_bits_is_named(hosts: Cluster, tmp_path: Path) -> None:
    """Of CPUs only the bits are a fault."""
    flawed, python = tmp_path / "flawed", tmp_path / "python"
    flawed.mkdir()
    (flawed / "sitecustomize.py").write_text(FLAWED)
    python.write_text(
        '#!/bin/sh\n[ "$(uname -n)" != node2 ] || case "$*" in *preflight.task*)'
        f" export PYTHONPATH={flawed}:$PYTHONPATH;; esac\n"
        f'exec {hosts.env["KEMPNER_PYTHON"]} "$@"\n'
    )
    python.chmod(0o755)
    code, log, told = preflight(hosts, tmp_path, env={"KEMPNER_PYTHON": str(python)})
    assert code == 1 and told["bad"] == "node2", log
    assert "node2: CPU of task 1: its product differs in bits from that of 2 of the 3" in log
    assert "note: node2: CPU of task 1: matrix product" in log


@pytest.mark.soak
def test_a_node_whose_python_does_not_start_is_named(hosts: Cluster, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\n[ "$(uname -n)" != node2 ] || exit 3\n'
        f'exec {hosts.env["KEMPNER_PYTHON"]} "$@"\n'
    )
    python.chmod(0o755)
    code, log, told = preflight(hosts, tmp_path, env={"KEMPNER_PYTHON": str(python)})
    assert code == 1 and told["bad"] == "node2", log
    assert "node2: 1 of 1 task(s) did not answer" in log
    assert told["whole"]["bus_bytes_per_s"] > 0  # the other two have been measured


@pytest.mark.soak
def test_a_directory_that_is_not_shared_is_named(hosts: Cluster, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    hosts.testbed("exec", "node3", "mount", "-t", "tmpfs", "none", shared)
    try:
        code, log, told = preflight(hosts, tmp_path, "--dir", shared)
    finally:
        hosts.testbed("exec", "node3", "umount", shared)
    assert code == 1 and told["bad"] == "node3", log
    assert f"what the first node wrote to {shared} is not visible on this node" in log


@pytest.mark.soak
def test_missing_gpus_are_named(hosts: Cluster, tmp_path: Path) -> None:
    """A shim stands for nvidia-smi: node2 has lost a GPU, and one of node3 has a fault."""
    shim = Shim(tmp_path / "gpus")
    shim.say(gpu(0), host="node2")
    shim.say(gpu(0), gpu(1, ecc__errors__uncorrected__volatile__total="3"), host="node3")
    options = ["--nodes=3", "--gpus-per-node=2"]
    job = hosts.sbatch("preflight.sh", options=options, cwd=tmp_path, env=BRIEF | shim.env)
    code = hosts.wait(job)
    log = (tmp_path / f"preflight-{job}.out").read_text()
    assert code == 1
    assert "node2: 1 GPU(s) seen, 2 expected" in log
    assert "node3: GPU 1: ecc.errors.uncorrected.volatile.total = 3" in log


def test_outside_a_job(tmp_path: Path, hosts: Cluster) -> None:
    done = hosts.run("bash", SCRIPTS / "preflight.sh", cwd=tmp_path)
    assert done.returncode == 2 and "sbatch --nodes=N" in done.stderr


def train_without_a_network(
    hosts: Cluster, tmp_path: Path, nodes: int, *overrides: str
) -> tuple[int, str]:
    """A training with KEMPNER_PREFLIGHT=1 while node2 has its cable out; its exit code and log.
    Two nodes cannot tell who is slow; a node without its fast network can be told."""
    arguments = hosts.debug_run(tmp_path / "run", "--train.max_steps=5", *overrides)
    options = [f"--nodes={nodes}", "--ntasks-per-node=1"]
    env = BRIEF | {"KEMPNER_PREFLIGHT": "1"}
    hosts.testbed("cut", "node2")
    try:
        job = hosts.sbatch("multinode.sh", *arguments, options=options, cwd=tmp_path, env=env)
        code = hosts.wait(job)
    finally:
        hosts.testbed("join", "node2")
    return code, (tmp_path / f"kempner-{job}.out").read_text()


@pytest.mark.soak
def test_a_training_leaves_the_bad_node_out(hosts: Cluster, tmp_path: Path) -> None:
    """Requeued without the node, it trains to its end on the others."""
    code, log = train_without_a_network(hosts, tmp_path, 2)
    assert code == 0, log
    run_dir = tmp_path / "run"
    events = [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]
    decisions = [event for event in events if event["event"] == "decision"]
    assert [(e["decision"], e["excluded"]) for e in decisions] == [
        ("requeue", "node2"),
        ("end", ""),
    ]
    assert json.loads((run_dir / "status.json").read_text())["state"] == "done"
    assert "node2: failed the preflight, excluded" in log
    assert len(load_speeds(tmp_path / "node-speeds")) == 3  # beside the run


@pytest.mark.soak
def test_no_spare_nodes(hosts: Cluster, tmp_path: Path) -> None:
    """All three are needed: the job ends, and says why."""
    code, log = train_without_a_network(hosts, tmp_path, 3, "--train.global_batch=12")
    assert code == 1, log
    assert "no other nodes are available" in log and "too few" in log


def test_driver_refuses_bad_options(hosts: Cluster, tmp_path: Path) -> None:
    code, log, _ = preflight(hosts, tmp_path, "--device", "tpu")
    assert code == 2 and "invalid choice: 'tpu'" in log
    code, log, _ = preflight(hosts, tmp_path, env={"KEMPNER_PREFLIGHT_SLOW": "15,5"})
    assert code == 2 and "argument --slow: '15,5': must be two percentages" in log
    code, log, _ = preflight(hosts, tmp_path, env={"KEMPNER_PREFLIGHT_LEAST": "fast"})
    assert code == 2 and "KEMPNER_PREFLIGHT_LEAST=fast: must be a number from 0" in log
    code, log, _ = preflight(hosts, tmp_path, "--dir", tmp_path / "none")
    assert code == 2 and "none: No such file or directory: give an existing" in log
