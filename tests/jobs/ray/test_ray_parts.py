"""The parts of kempner.jobs.ray that need no cluster: ports, paths, sizes, missing nodes."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kempner.jobs.ray import logs, node, ports
from kempner.jobs.ray.ready import missing_nodes

HOSTS = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
SHARED = {"a": "10.0.0.1", "b": "10.0.0.1", "c": "10.0.0.2"}


def plan(index: int, addresses: dict[str, str] = SHARED, **more: object) -> node.NodePlan:
    base = ports.read_ports({}, addresses, 4).base
    base |= {k: int(str(v)) for k, v in more.items() if k.isupper()}
    given = {
        "job": 7, "index": index, "logs": "logs", "cpus": 4, "gpus": 1, "dedicated-head": 0,
        "object-store": 0, "memory": 0, "began": 0, "deadline": 0, "log-sync": 0,
        "ports": ports.Ports(base, len(addresses)),
        **{k.replace("_", "-"): v for k, v in more.items() if k.islower()},
    }  # fmt: skip
    nodes = [f"{name}={address}" for name, address in addresses.items()]
    return node.parse_node_plan(
        [*(f"--{name}={value}" for name, value in given.items()), "--nodes", *nodes]
    )


def test_each_node_of_a_shared_host_has_its_own_ports() -> None:
    """By default they are 20 apart there, and the worker ports are divided."""
    plans = [plan(k) for k in range(3)]
    used = [p for n in plans for p in n.ports.of_node(n.index).values()]
    used += [p for n in plans for p in n.ports.workers(n.index)]
    assert len(used) == len(set(used)) and len(plans[0].ports.workers(0)) == 171
    assert plans[0].ports.workers(0)[0] == 54001 and plans[0].ports.workers(2)[-1] == 54513
    words = node.ready_command(plans[2])
    assert "b=10.0.0.1:53021" in words and "c=10.0.0.2:53041" in words
    alone = plan(0, HOSTS).ports
    assert alone.of_node(1) == alone.of_node(2) and alone.workers(0) == alone.workers(2)
    assert alone.node_manager(2) == 53001 and len(alone.workers(2)) == 513


def test_ports_become_options_of_ray_start(tmp_path: Path) -> None:
    head, worker = (node.ray_start(plan(k, HOSTS, PORT=6379), tmp_path) for k in (0, 1))
    assert {"--port=6379", "--dashboard-port=8265", "--node-manager-port=53001"} <= set(head)
    assert "--include-dashboard=True" in head and "--address=10.0.0.1:6379" in worker
    assert not any(word.startswith(("--port", "--dashboard-port")) for word in worker)
    off = node.ray_start(plan(0, HOSTS, DASHBOARD_PORT=0), tmp_path)
    assert "--include-dashboard=False" in off
    assert not any(word.startswith("--dashboard-port") for word in off)


@pytest.mark.parametrize(
    ("variables", "addresses", "message"),
    [
        ({"PORT": "http"}, HOSTS, "PORT=http: give a whole number from 1024 to 65535"),
        ({"PORT": "0"}, HOSTS, "PORT=0: give"),  # only DASHBOARD_PORT may be
        ({"PORT": "080"}, HOSTS, "PORT=080: give"),
        ({"PORT": "65536"}, HOSTS, "PORT=65536: give"),
        ({"PORT_STRIDE": "-1"}, HOSTS, "PORT_STRIDE=-1: give a whole number from 0 to 10000"),
        (
            {"PORT_STRIDE": "0"},
            SHARED,
            "PORT_STRIDE=0: b and a are the same host (10.0.0.1): give 20",
        ),
        (
            {"PORT_STRIDE": "2"},
            HOSTS,
            "OBJECT_MANAGER_PORT=53003: port 53003 of node 0 is NODE_MANAGER_PORT's: give another,"
            " or another PORT_STRIDE (2)",
        ),
        (
            {"PORT_STRIDE": "10000"},
            HOSTS,
            "NODE_MANAGER_PORT=53001: node 2 would have 73001: give a smaller PORT_STRIDE (10000)",
        ),
        (
            {"METRICS_EXPORT_PORT": "54200"},
            HOSTS,
            "METRICS_EXPORT_PORT=54200: port 54200 of node 0 is a worker's",
        ),
        (
            {"RAY_CLIENT_SERVER_PORT": "54514"},
            HOSTS,
            "RAY_CLIENT_SERVER_PORT=54514: port 54514 of node 0 is PORT's",
        ),
        (
            {"MAX_WORKER_PORT": "54009", "PORT_STRIDE": "20"},
            HOSTS,
            "MIN_WORKER_PORT=54001 to MAX_WORKER_PORT=54009: 3 a node, too few for 4 workers",
        ),
        ({"MAX_WORKER_PORT": "53999"}, HOSTS, "0 a node, too few for 4 workers"),
    ],
)
def test_ports_that_cannot_work(
    variables: dict[str, str], addresses: dict[str, str], message: str
) -> None:
    with pytest.raises(ports.PortError, match=re.escape(message)):
        ports.read_ports(variables, addresses, 4)


def test_a_port_that_nothing_reads_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NeMo RL's documentation lists it, and its users export it."""
    monkeypatch.setattr(sys, "argv", ["ports", "4", "a=10.0.0.1"])
    monkeypatch.setenv("DASHBOARD_GRPC_PORT", "50100")
    assert ports.main() == 0
    told = capsys.readouterr()
    assert "note: DASHBOARD_GRPC_PORT is not read" in told.err and "PORT=54514 " in told.out
    assert "DASHBOARD_AGENT_GRPC_PORT" in told.err


def test_the_batch_host_needs_only_the_standard_library() -> None:
    """Its Python may be any python3, without Ray and without this project's packages."""
    source = Path(ports.__file__).parents[3]
    modules = "kempner.jobs.ray.node, kempner.jobs.ray.ready, kempner.jobs.ray.ports"
    code = f"import sys; sys.path.insert(0, {str(source)!r}); import {modules}"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


@pytest.mark.parametrize(("init", "code"), [(False, 75), (True, 2)])
def test_the_python_of_a_node_has_ray(tmp_path: Path, init: bool, code: int) -> None:
    """KEMPNER_PYTHON may be several words. A mere directory called ray is not Ray; the message says
    how to install it. With Ray the node starts: here without its options, which is exit code 2."""
    (tmp_path / "path/ray").mkdir(parents=True)
    if init:
        (tmp_path / "path/ray/__init__.py").touch()
    python = f"env WORDS=2 {sys.executable} -S"  # no site-packages
    env = {"PYTHONPATH": str(tmp_path / "path"), "SLURM_NODEID": "0", "KEMPNER_PYTHON": python}
    script = Path(__file__).parents[3] / "scripts/slurm/lib/ray_node.sh"
    done = subprocess.run(
        ["bash", script, tmp_path, ""], env={**os.environ, **env}, capture_output=True, text=True
    )
    log = (tmp_path / "ray-head.log").read_text()
    assert done.returncode == code, log
    if init:
        assert "the following arguments are required: --job" in log and not done.stdout
    else:
        assert done.stdout.startswith("FAULT 75 ")
        assert "no Python with Ray (KEMPNER_PYTHON=env WORDS=2" in done.stdout
        assert ".venv/bin/pip install -c constraints.txt -e '.[ray]'" in done.stdout


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_a_port_is_busy_on_whichever_address(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        assert ports.is_busy(port)
        found = plan(0, HOSTS, PORT=port).ports
        assert ports.busy_ports(found, 0) == [f"PORT={port}"]
        assert ports.busy_ports(found, 1) == []  # only the head has it
        # A connection that was closed here holds the port in TIME_WAIT, and Ray does not mind.
        client = socket.create_connection(("127.0.0.1", port))
        server.accept()[0].close()
        client.close()
    assert not ports.is_busy(port)


def test_a_worker_whose_head_was_not_up_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's GCS is up some time before its raylet; Ray waits 10 s for that, then gives up. The
    head may also have started again in the meantime."""
    started: list[list[str]] = []
    ended: int | None = 1

    class AllFail:
        def start(self, command: list[str], **_: str) -> int:
            started.append(command)
            return len(started)

        def exit_code(self, pid: int) -> int | None:
            return ended

    monkeypatch.setattr(node, "Processes", AllFail)
    with socket.socket() as head, socket.socket() as again:
        for listener in (head, again):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        head.bind(("127.0.0.1", 0))
        port = head.getsockname()[1]
        addresses = dict.fromkeys("abc", "127.0.0.1")
        worker = node.RayNode(plan(1, addresses, NODE_MANAGER_PORT=port))
        worker.temp.rmdir()
        worker.start_ray()
        worker.poll()
        assert len(started) == 2 and started[0] == started[1]
        head.listen()
        worker.poll()  # ours was started before the head's raylet
        head.close()
        ended = None
        worker.poll()
        again.bind(("127.0.0.1", port))
        again.listen()
        ended = 1
        worker.poll()  # the head has started again since
        with pytest.raises(node.RayFault, match="b: ray start has ended with exit code 1") as fault:
            worker.poll()
    assert len(started) == 4 and fault.value.code == node.NOT_UP_EXIT


def test_a_raylet_whose_agent_was_late_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each such end; another node may do so until the cluster is complete."""
    started: list[list[str]] = []

    class Gone:
        def start(self, command: list[str], *_: object, **__: str) -> int:
            started.append(command)
            return len(started)

        def exit_code(self, pid: int) -> None:
            pass

        def terminate(self, main: int) -> None:
            pass

    monkeypatch.setattr(node, "Processes", Gone)
    monkeypatch.setattr(ports.PortProbe, "fault", lambda probe: "gone" * probe.refusals)
    head = node.RayNode(plan(0, dict.fromkeys("ab", "127.0.0.1")))
    logs_of_ray = head.temp / "session_2026-11-28/logs"
    logs_of_ray.mkdir(parents=True)
    late = "Check failed: status.has_value() Timed out waiting for file metrics_agent_port_5\n"
    try:
        head.start_ray()
        head.ready = 7
        for times in (1, 2):
            (logs_of_ray / "raylet.err").write_text(late)
            head.probes[0].refusals = 1
            head.poll()
            assert len(started) == 1 + 2 * times and "kempner.jobs.ray.ready" in started[-2]
        assert "start" in started[-1] and not head.probes[0].refusals
        head.peers[0].refusals, head.peers_probed = 1, 0.0
        head.poll()
        head.ready, head.peers_probed = 0, 0.0  # complete
        with pytest.raises(node.RayFault, match="gone"):
            head.poll()
    finally:
        shutil.rmtree(head.temp)


def test_a_port_that_was_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused twice, Ray is gone; a silent host has 10 s; a port that never was open may open."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        probe = ports.PortProbe("b", "raylet", *server.getsockname())
        never = ports.PortProbe("b", "raylet", "127.0.0.1", 1)
        assert not probe.fault()
    assert not probe.fault()
    assert probe.fault() == f"b: Ray's raylet is gone: port {probe.port} refuses connections"
    assert not any(never.fault() for _ in range(5))

    def silent(address: tuple[str, int], timeout: float) -> socket.socket:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    probe.refusals = 0
    # One late answer says nothing: this process may have been suspended.
    probe.opened -= ports.HOST_SILENCE_S
    assert not probe.fault() and not probe.fault()
    assert probe.fault() == "b: no answer from 127.0.0.1 for 10 s: is it down?"


def test_copying_logs(tmp_path: Path) -> None:
    """An unchanged file is not copied again, and a pipe is skipped."""
    log, copy = tmp_path / "log", tmp_path / "far/off/log"
    log.write_text("one")
    logs.copy_if_newer(log, copy)
    copied = copy.stat().st_ino, copy.stat().st_ctime_ns
    logs.copy_if_newer(log, copy)
    assert copied == (copy.stat().st_ino, copy.stat().st_ctime_ns) and copy.read_text() == "one"
    log.write_text("one and two")
    logs.copy_if_newer(log, copy)
    assert copy.read_text() == "one and two"
    os.mkfifo(tmp_path / "pipe")
    logs.copy_if_newer(tmp_path / "pipe", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_file_system_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The node ends in time even if the logs cannot be copied."""

    class NoProcesses:
        def terminate(self, main: int) -> None:
            pass

    monkeypatch.setattr(node, "Processes", NoProcesses)
    monkeypatch.setattr(logs, "COPY_S", 0.2)
    monkeypatch.setattr(logs, "copy_if_newer", lambda *_: time.sleep(20))
    stuck = node.RayNode(plan(0, logs=tmp_path))
    (stuck.temp / "session_2026/logs").mkdir(parents=True)
    (stuck.temp / "session_2026/logs/raylet.out").touch()
    stuck.logs.start()  # a periodic copy, by RAY_LOG_SYNC_FREQUENCY
    began = time.monotonic()
    stuck.shut_down()
    assert time.monotonic() - began < 2 and not stuck.temp.exists()
    assert "copying takes longer than 0 s" in capsys.readouterr().out


def test_socket_paths_are_short_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 20)))
    temp = node.make_temp(plan(1))
    temp.rmdir()
    assert temp.parent == Path("/tmp") and temp.name.startswith("ray-7.1-")
    assert len(os.fsencode(temp)) + node.SOCKET_TAIL <= 107
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")  # a short one of the user's is kept
    temp = node.make_temp(plan(1))
    temp.rmdir()
    assert temp.parent == Path("/var/tmp")


def test_the_object_store_is_a_share_of_the_job_memory() -> None:
    assert node.object_store(plan(0)) == []
    assert node.object_store(plan(0, object_store=10**8)) == ["--object-store-memory=100000000"]
    assert node.object_store(plan(0, memory=1000)) == ["--object-store-memory=314572800"]
    assert node.object_store(plan(0, memory=100)) == ["--object-store-memory=78643200"]
    [word] = node.object_store(plan(0, memory=10**9))  # capped by /dev/shm
    assert int(word.split("=")[1]) < 10**9 * 2**20 * 3 // 10


def test_what_is_missing_from_a_cluster() -> None:
    nodes = {"a": "1:1", "b": "2:1"}
    wanted = {"1:1": (0.0, 0.0), "2:1": (4.0, 2.0)}
    assert list(missing_nodes(nodes, wanted, {})) == ["a", "b"]
    assert list(missing_nodes(nodes, wanted, {"1:1": (0, 0), "2:1": (4, 1)})) == [
        "GPUs of b (1 of 2)"
    ]
    assert list(missing_nodes(nodes, wanted, {"1:1": (0, 0), "2:1": (4, 2)})) == []
