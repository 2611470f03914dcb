"""The parts of kempner.ray that need no cluster: ports, paths, sizes, and what a cluster lacks."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path

import pytest

from kempner.ray import node
from kempner.ray.ready import missing


def plan(index: int, **more: object) -> node.Plan:
    given = {
        "job": 7, "index": index, "nodes": "a,b,c", "addresses": "10.0.0.1,10.0.0.1,10.0.0.2",
        "logs": "logs", "cpus": 4, "gpus": 1, "object-store": 0, "memory": 0,
        "dedicated-ray-head": 0, "port": 54514, "port-stride": 0, "min-worker-port": 54001,
        "max-worker-port": 54512, "began": 0, "deadline": 0, "log-sync": 0,
        **{name: 53001 + 2 * k for k, name in enumerate((*node.NODE_PORTS, *node.HEAD_PORTS))},
        **{name.replace("_", "-"): value for name, value in more.items()},
    }  # fmt: skip
    return node.parse([f"--{name}={value}" for name, value in given.items()])


def test_each_node_of_a_host_has_ports_of_its_own() -> None:
    plans = [plan(k, port_stride=20) for k in range(3)]
    used = [port for p in plans for port in (*p.node_ports.values(), *p.worker_ports)]
    assert len(used) == len(set(used)) and len(plans[0].worker_ports) == 170
    assert plans[0].worker_ports[0] == 54001
    words = node.ready_command(plans[2])
    assert "b=10.0.0.1:53021" in words and "c=10.0.0.2:53041" in words
    assert plan(0).node_ports == plan(2).node_ports
    assert plan(0).worker_ports == plan(2).worker_ports


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_a_port_is_busy_on_whichever_address(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        assert node.is_busy(port)
        assert node.busy_ports(plan(0, port=port)) == [f"PORT={port}"]
        assert node.busy_ports(plan(1, port=port)) == []  # the head's alone
        # A connection that has ended here holds the port for a minute, and Ray does not mind.
        client = socket.create_connection(("127.0.0.1", port))
        server.accept()[0].close()
        client.close()
    assert not node.is_busy(port)


def test_a_worker_looks_for_the_head_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's GCS is there some time before its raylet; Ray waits 10 s for it, and gives up."""
    started: list[list[str]] = []

    class AllFail:
        def start(self, command: list[str], **_: str) -> int:
            started.append(command)
            return len(started)

        def code(self, pid: int) -> int:
            return 1

    monkeypatch.setattr(node, "Processes", AllFail)
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        port = head.getsockname()[1]
        addresses = "127.0.0.1,127.0.0.1,127.0.0.1"
        worker = node.Node(plan(1, addresses=addresses, node_manager_port=port))
        worker.temp.rmdir()
        worker.start_ray()
        worker.look()
        assert len(started) == 2 and started[0] == started[1]
        head.listen()
        worker.look()  # it was started before the head's raylet was there
        with pytest.raises(node.Fault, match="b: ray start has ended with exit code 1") as fault:
            worker.look()
    assert len(started) == 3 and fault.value.code == node.NOT_UP


def test_a_door_that_was_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused twice, it is shut; without any answer it has 10 s; never opened, it may yet open."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        door = node.Door("b", "raylet", *server.getsockname())
        never = node.Door("b", "raylet", "127.0.0.1", 1)
        assert not door.fault()
    assert not door.fault()
    assert door.fault() == f"b: Ray's raylet is gone: port {door.port} refuses connections"
    assert not any(never.fault() for _ in range(5))

    def silent(address: tuple[str, int], patience: float) -> socket.socket:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    door.refusals = 0
    door.opened -= node.SILENCE_S  # we have been asleep, perhaps: that says nothing of the host
    assert not door.fault() and not door.fault()
    assert door.fault() == "b: no answer from 127.0.0.1 for 10 s: is it down?"


def test_the_copies_of_logs(tmp_path: Path) -> None:
    """What has not changed is not copied again; a pipe, or a full disk, stops nothing."""
    log, copy = tmp_path / "log", tmp_path / "far/off/log"
    log.write_text("one")
    node.copy_if_newer(log, copy)
    copied = copy.stat().st_ino, copy.stat().st_ctime_ns
    node.copy_if_newer(log, copy)
    assert copied == (copy.stat().st_ino, copy.stat().st_ctime_ns) and copy.read_text() == "one"
    log.write_text("one and two")
    node.copy_if_newer(log, copy)
    assert copy.read_text() == "one and two"
    os.mkfifo(tmp_path / "pipe")
    node.copy_if_newer(tmp_path / "pipe", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_file_system_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node ends in time, whatever becomes of the logs."""

    class NoProcesses:
        def end(self, main: int) -> None:
            pass

    monkeypatch.setattr(node, "Processes", NoProcesses)
    monkeypatch.setattr(node, "COPY_S", 0.2)
    monkeypatch.setattr(node, "copy_if_newer", lambda *_: time.sleep(20))
    stuck = node.Node(plan(0, logs=tmp_path))
    (stuck.temp / "session_2026/logs").mkdir(parents=True)
    (stuck.temp / "session_2026/logs/raylet.out").touch()
    stuck.start_copying()  # as RAY_LOG_SYNC_FREQUENCY has it
    began = time.monotonic()
    stuck.leave()
    assert time.monotonic() - began < 2 and not stuck.temp.exists()
    assert "copying takes over" in capsys.readouterr().out


def test_the_paths_of_sockets_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 20)))
    temp = node.make_temp(plan(1))
    temp.rmdir()
    assert temp.parent == Path("/tmp") and temp.name.startswith("ray-7.1-")
    assert len(os.fsencode(temp)) + node.SOCKET_TAIL <= 107
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")  # a short one is the user's
    temp = node.make_temp(plan(1))
    temp.rmdir()
    assert temp.parent == Path("/var/tmp")


def test_the_object_store_is_a_share_of_the_jobs_memory() -> None:
    assert node.object_store(plan(0)) == []
    assert node.object_store(plan(0, object_store=10**8)) == ["--object-store-memory=100000000"]
    assert node.object_store(plan(0, memory=1000)) == ["--object-store-memory=314572800"]
    assert node.object_store(plan(0, memory=100)) == ["--object-store-memory=78643200"]
    [word] = node.object_store(plan(0, memory=10**9))  # no more than /dev/shm has
    assert int(word.split("=")[1]) < 10**9 * 2**20 * 3 // 10


def test_what_a_cluster_lacks() -> None:
    nodes = {"a": "1:1", "b": "2:1"}
    wanted = {"1:1": (0.0, 0.0), "2:1": (4.0, 2.0)}
    assert list(missing(nodes, wanted, {})) == ["a", "b"]
    assert list(missing(nodes, wanted, {"1:1": (0, 0), "2:1": (4, 1)})) == ["GPUs of b (1 of 2)"]
    assert list(missing(nodes, wanted, {"1:1": (0, 0), "2:1": (4, 2)})) == []
