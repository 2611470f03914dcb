"""KEMPNER_PORTS: the range that a site's firewall opens."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from kempner.extensions.lowcomm.judge import JudgeServer
from kempner.extensions.serve.http import Server
from kempner.jobs.preflight.channel import Driver
from kempner.jobs.ranks import peers, port_range, rendezvous
from kempner.jobs.ranks.placement import World
from kempner.jobs.ranks.port_range import ReservedPort, allowed_ports, listen_in_range
from kempner.jobs.ray import ports as ray_ports
from kempner.jobs.system.front_door import BadPortRange, NoFreePort
from tests.conftest import ROOT, TINY, clean_env
from tests.waiting import LIMIT_S


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> range:
    """Eight ports of which at least four are free."""
    for first in range(21000, 30000, 8):
        monkeypatch.setenv("KEMPNER_PORTS", f"{first}-{first + 7}")
        with ExitStack() as held:
            try:
                for _ in range(8):
                    held.enter_context(listen_in_range())
            except OSError:
                continue
        return range(first, first + 8)
    raise AssertionError("no ports are free")


BAD = [
    "15000",
    "15000-",
    "20000-15000",
    "15000:20000",
    "80-2000",
    "15000-70000",
    "a-b",
    " ",
    "0-1",
    "15000-15000",
]


@pytest.mark.parametrize("text", BAD)
def test_a_bad_range_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEMPNER_PORTS", text)
    with pytest.raises(BadPortRange, match=r"must be the first and the last port.*15000-20000"):
        allowed_ports()


def test_ports_are_taken_in_turn_and_the_range_may_be_used_up(opened: range) -> None:
    """Also those that are bound and do not listen yet, as run.sh's for its program."""
    with ExitStack() as held:
        holders = [held.enter_context(ReservedPort()) for _ in range(3)]
        servers = [held.enter_context(listen_in_range()) for _ in range(5)]
        found = [each.port for each in holders] + [each.getsockname()[1] for each in servers]
        assert sorted(found) == [*opened]
        with pytest.raises(
            NoFreePort, match=r"none of these 8 ports is free on .*give a wider range"
        ):
            listen_in_range()


def waits_in_the_kernel(server: socket.socket) -> None:
    """A connection that this side closes first: its port is in TIME_WAIT for a minute."""
    with socket.create_connection(("127.0.0.1", server.getsockname()[1])) as client:
        server.accept()[0].close()
        assert client.recv(1) == b""


def test_a_port_is_free_again_while_old_connections_wait(opened: range, monkeypatch: Any) -> None:
    """Each start of run.sh takes two: here five starts have three."""
    monkeypatch.setenv("KEMPNER_PORTS", f"{opened[0]}-{opened[2]}")
    for _ in range(5):
        with listen_in_range() as server, ReservedPort() as holder:
            limit = timedelta(seconds=20)
            store = dist.TCPStore("127.0.0.1", holder.port, None, True, limit, False)
            waits_in_the_kernel(server)
            with socket.create_connection(("127.0.0.1", store.port)):
                store.set("a", "b")
            del store
    with ExitStack() as held:
        for _ in range(3):
            waits_in_the_kernel(held.enter_context(listen_in_range()))


def test_a_port_that_is_raced_for_has_one_owner(opened: range) -> None:
    """Those that listen, and those that keep a port for a program that will."""
    gate, found = threading.Barrier(8), list[int]()
    with ExitStack() as held:

        def take(k: int) -> None:
            gate.wait(20)
            if k % 2:
                found.append(held.enter_context(ReservedPort()).port)
            else:
                found.append(held.enter_context(listen_in_range()).getsockname()[1])

        for _ in range(20):
            threads = [threading.Thread(target=take, args=(k,)) for k in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(found) == [*opened]
            held.close()
            found.clear()


def test_a_program_gets_the_port_that_is_reserved_for_it(opened: range) -> None:
    with ReservedPort() as holder:
        port = holder.port
        limit = timedelta(seconds=20)
        store = dist.TCPStore("127.0.0.1", port, None, True, limit, wait_for_workers=False)
        assert store.port == port in opened


def test_all_that_listens_does_so_in_the_range(
    opened: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(peers.PEER_KEY_VARIABLE, peers.new_key())
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    store = rendezvous.open_store(World(0, 0, 2, "slurm"), tmp_path, 20.0)
    assert store.port in opened and rendezvous.find_address(tmp_path, 0, 20.0)[1] == store.port
    judge = JudgeServer(["127.0.0.1"], 60.0, None)
    note = json.loads(judge.note)
    assert {note["store"], note["beats"]} <= {*opened}
    judge._entrance.close()
    del store, judge
    driver = Driver()
    assert {driver.port, driver.store.port} <= {*opened}
    with Server("127.0.0.1", 0, "model", "token") as server:
        assert server.port in opened


def test_without_a_range_the_kernel_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEMPNER_PORTS", raising=False)
    assert port_range.store_server() == (0, None)
    with listen_in_range("127.0.0.1") as server, ReservedPort() as holder:
        assert server.getsockname()[1] != holder.port > 0


@pytest.mark.parametrize("hosts", [("a", "b"), ("a", "a")])
def test_ports_of_ray(hosts: tuple[str, str]) -> None:
    """All of them are in the range; two jobs on one host have others."""
    addresses = dict(zip("xy", hosts, strict=True))
    seen: list[set[int]] = []
    for job in ("100", "101"):
        env = {"KEMPNER_PORTS": "15000-16000", "SLURM_JOB_ID": job, "METRICS_EXPORT_PORT": "2000"}
        ports = ray_ports.read_ports(env, addresses, cpus=4)
        assert ports.of_node(0)["METRICS_EXPORT_PORT"] == 2000
        used = [p for k in range(ports.shares) for p in (*ports.of_node(k).values(),)]
        used += [p for k in range(ports.shares) for p in ports.workers(k)]
        seen.append({port for port in used if port >= 10000})
        assert seen[-1] <= {*range(15000, 16001)}
    assert not seen[0] & seen[1]
    with pytest.raises(ray_ports.PortError, match="give a wider range"):
        ray_ports.read_ports({"KEMPNER_PORTS": "15000-15010"}, addresses, cpus=4)
    with pytest.raises(ray_ports.PortError, match="must be the first and the last"):
        ray_ports.read_ports({"KEMPNER_PORTS": "15000"}, addresses, cpus=4)


@pytest.mark.parametrize("program", ["run", "train", "serve"])
@pytest.mark.parametrize("taken", [True, False])
def test_a_range_without_a_free_port_is_one_error(
    program: str, taken: bool, opened: range, data_dir: Path, tmp_path: Path
) -> None:
    """Exit code 1 if others have them all, as they may leave one to the next start; a range that is
    too small for any job is bad input."""
    first = opened[0]
    commands: dict[str, list[object]] = {
        "run": ["bash", ROOT / "scripts/slurm/run.sh", f"--run-dir={tmp_path}/run", "--", "true"],
        "train": ["train.py", *TINY, f"--data.dataset_path={data_dir}", f"--run.dir={tmp_path}/r"],
        "serve": ["serve.py", f"--weights={tmp_path}", "--port=0"],
    }
    words = commands[program]
    if program != "run":
        words[:1] = [sys.executable, ROOT / "scripts" / str(words[0])]
    env = {"KEMPNER_SITE": os.devnull, "KEMPNER_PYTHON": sys.executable, "KEMPNER_NPROC": "2"}
    if program == "train":  # the first of two tasks
        env |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    env["KEMPNER_PORTS"] = f"{first}-{first + 1}" if taken else f"{first}-{first}"
    with ExitStack() as held:
        for port in (first, first + 1):
            server = held.enter_context(socket.socket())
            server.bind(("", port))
            server.listen()
        done = subprocess.run(
            [*map(str, words)],
            env=clean_env(**env),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    said = done.stdout + done.stderr
    assert done.returncode == (1 if taken else 2), said
    assert said.count("error: ") == 1 and "Traceback" not in said, said
    assert ("none of these 2 ports is free on" if taken else "of a range of at least 2") in said
