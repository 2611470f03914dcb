"""NCCL's RAS, in whose place a server of the test speaks its protocol."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kempner.train.resilience import nccl_ras
from kempner.train.resilience.nccl_ras import RasCounts, ask_ras


def status(*counts: int, missing: tuple[int, ...] = ()) -> dict[str, Any]:
    """As NCCL 2.29 writes it (userguide, troubleshooting/ras.rst), without what nobody reads."""
    ranks = [
        {"rank": rank, "collective_counts": {"AllGather": count, "AllReduce": 5}}
        for rank, count in enumerate(counts)
        if rank not in missing
    ]
    gone = [
        {"rank": rank, "status": {"unresponsive": True, "considered_dead": False}}
        for rank in missing
    ]
    comm = {"hash": "0xae94", "size": len(counts), "ranks": ranks, "missing_ranks": gone}
    other = {"hash": "0x1", "size": 1, "ranks": [{"rank": 0, "collective_counts": {}}]}
    return {"nccl_version": "2.29.1", "communicators": [other, comm], "ras": {}}


class Server(socketserver.ThreadingTCPServer):
    """`answers`: to lines, by how they begin."""

    daemon_threads = allow_reuse_address = True
    answers: dict[str, str]

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Talk)
        self.lines: list[str] = []
        self.answers = {"CLIENT": "SERVER PROTOCOL 2\n", "TIMEOUT": "OK\n", "SET": "OK\n"}

    @property
    def address(self) -> str:
        return f"localhost:{self.server_address[1]}"


class Talk(socketserver.StreamRequestHandler):
    server: Server

    def handle(self) -> None:
        for line in self.rfile:
            words = line.decode().strip()
            self.server.lines.append(words)
            self.wfile.write(self.server.answers[words.split()[0]].encode())
            if words == "STATUS":
                return  # NCCL closes the connection


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def test_the_status_is_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answers["STATUS"] = json.dumps(status(7, 7))
    monkeypatch.setenv("NCCL_RAS_ADDR", server.address)
    assert ask_ras() == status(7, 7)
    assert server.lines == ["CLIENT PROTOCOL 2", "TIMEOUT 3", "SET FORMAT json", "STATUS"]


def test_no_answer_is_none(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NCCL before 2.28.7, half an answer, a server that says nothing, and none at all."""
    monkeypatch.setattr(nccl_ras, "ASK_S", 0.1)
    monkeypatch.setattr(nccl_ras, "CONNECT_S", 0.1)
    server.answers["STATUS"] = '{"communicators": ['
    assert ask_ras(server.address) is None
    server.answers["SET"] = "ERROR: Unknown command SET FORMAT json\n"
    assert ask_ras(server.address) is None
    server.answers["CLIENT"] = ""
    assert ask_ras(server.address) is None
    assert ask_ras("localhost:1") is None and ask_ras("no address") is None


def test_a_rank_is_behind_when_its_count_stands_still() -> None:
    """Counts differ also while all is well. A rank that does not respond is behind at once."""
    counts = RasCounts(4)
    assert not counts.behind(status(7, 6, 7, 7))
    assert not counts.behind(status(9, 8, 9, 9))
    assert counts.behind(status(9, 8, 9, 9)) == {1}
    assert counts.behind(status(9, 8, 9, 9, missing=(2,))) == {1, 2}
    assert not counts.behind(None)
    assert not counts.behind(status(9, 8, 9, 9))


def test_most_ranks_are_never_behind() -> None:
    counts = RasCounts(4)
    for _ in range(2):
        assert not counts.behind(status(9, 8, 8, 8))
