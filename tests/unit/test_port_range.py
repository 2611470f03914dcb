"""KEMPNER_PORTS: the range that a site's firewall opens."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from kempner import peers, port_range, rendezvous
from kempner.lowcomm.judge import Judge
from kempner.port_range import (
    BadPortRange,
    allowed_ports,
    bind_allowed,
    free_port,
    new_server,
)
from kempner.preflight.channel import Driver
from kempner.process_group import World
from kempner.program.channel import reserve_port
from kempner.ray import ports as ray_ports
from kempner.serve.http import Server


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> range:
    """Eight ports of which at least four are free."""
    for first in range(21000, 30000, 8):
        monkeypatch.setenv("KEMPNER_PORTS", f"{first}-{first + 7}")
        with ExitStack() as held:
            try:
                for _ in range(8):
                    held.enter_context(new_server())
            except OSError:
                continue
        return range(first, first + 8)
    raise AssertionError("no ports are free")


BAD = ["15000", "15000-", "20000-15000", "15000:20000", "80-2000", "15000-70000", "a-b", " ", "0-1"]


@pytest.mark.parametrize("text", BAD)
def test_a_bad_range_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEMPNER_PORTS", text)
    with pytest.raises(BadPortRange, match=r"must be the first and the last port.*15000-20000"):
        allowed_ports()


def test_ports_are_taken_in_turn_and_the_range_may_be_used_up(opened: range) -> None:
    """Also those that are bound and do not listen yet, as run.sh's for its program."""
    with ExitStack() as held:
        holders = [held.enter_context(reserve_port()) for _ in range(3)]
        servers = [held.enter_context(peers.listen()) for _ in range(5)]
        found = [server.getsockname()[1] for server in (*holders, *servers)]
        assert sorted(found) == [*opened]
        with pytest.raises(OSError, match=r"none of these ports is free on .*give a wider range"):
            new_server()


def test_a_program_gets_the_port_that_is_reserved_for_it(opened: range) -> None:
    import torch.distributed as dist

    with reserve_port() as holder:
        port = holder.getsockname()[1]
        limit = timedelta(seconds=20)
        store = dist.TCPStore("127.0.0.1", port, None, True, limit, wait_for_workers=False)
        assert store.port == port in opened


def test_all_that_listens_does_so_in_the_range(
    opened: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(peers.VARIABLE, peers.new_key())
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    store = rendezvous.open_store(World(0, 0, 2, "slurm"), tmp_path, 20.0)
    assert store.port in opened and rendezvous.find(tmp_path, 0, 20.0)[1] == store.port
    judge = Judge(["127.0.0.1"], 60.0, None)
    note = json.loads(judge.note)
    assert {note["store"], note["beats"]} <= {*opened}
    judge._entrance.close()
    del store, judge
    driver = Driver()
    assert {driver.port, driver.store.port} <= {*opened}
    with Server("127.0.0.1", 0, "model", "token") as server:
        assert server.port in opened
    assert free_port() in opened


def test_without_a_range_the_kernel_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEMPNER_PORTS", raising=False)
    assert port_range.store_server() == (0, None)
    with socket.socket() as server:
        assert bind_allowed(server, "127.0.0.1") == server.getsockname()[1]


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
