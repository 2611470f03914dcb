"""How a preflight goes on and ends: the driver asks, its tasks come, answer and leave."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from kempner.jobs.preflight import __main__ as program
from kempner.jobs.preflight.channel import Driver, TaskChannel
from kempner.jobs.ranks import peers
from tests.jobs.unit.test_preflight_verdict import node
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[3]
DRIVER = """
import os, sys, time
from kempner.jobs.preflight.channel import Driver
driver = Driver()
keys = driver.ask([0], {"what": "time"})
print(driver.port, flush=True)
if sys.argv[1] == "wait":
    driver.answers(keys, time.monotonic() + 60)
os._exit(0)
"""


def task_of(driver: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """A task that srun starts; what it says, and how it ends."""
    assert driver.stdout is not None
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    env = os.environ | names | {"KEMPNER_PREFLIGHT_PORT": driver.stdout.readline().strip()}
    if driver.args[-1] == "leave":  # type: ignore[index]
        driver.wait()
    return subprocess.run(
        [sys.executable, "-m", "kempner.jobs.preflight.task"],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip


def test_a_task_whose_driver_ends_is_quiet() -> None:
    """It waits for a question, or has not even begun to, while its node was busy."""
    for how in ("wait", "leave"):
        command = [sys.executable, "-c", DRIVER, how]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
            done = task_of(driver)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), how


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peers.PEER_KEY_VARIABLE, peers.new_key())


def test_the_driver_leaves_after_its_tasks() -> None:
    driver, left = Driver(), []

    def answer() -> None:
        task = TaskChannel("localhost", driver.port, 3)
        question = task.question()
        time.sleep(0.3)
        left.append(question)
        task.answer({})

    thread = threading.Thread(target=answer)
    thread.start()
    driver.end([3])
    assert left == [{"what": "end"}]
    thread.join()


def test_a_driver_that_is_gone_is_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    """Quietly: a table with all ok is not followed by the stack of a store's client."""
    driver = Driver()
    task = TaskChannel("localhost", driver.port, 0)
    asked: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: asked.append(task.question()))
    thread.start()
    end = time.monotonic() + LIMIT_S
    while not driver._tasks and time.monotonic() < end:
        driver.answers({0: "none"}, time.monotonic() + 0.1)
    for link in driver._tasks.values():
        link.socket.close()
    thread.join(timeout=60)
    assert asked == [{"what": "end"}]
    for _ in range(10):  # of the first one TCP does not know yet
        task.answer({})
        time.sleep(0.01)
    assert capfd.readouterr() == ("", "")


def test_a_task_may_come_late_and_twice() -> None:
    """It gets what was asked before it came; another that calls itself the same is not heard."""
    driver = Driver()
    keys = driver.ask([1], {"what": "time"})
    assert driver.answers(keys, time.monotonic() + 0.01) == {}
    first = TaskChannel("localhost", driver.port, 1)
    first.answer({"time": 7.0})
    assert driver.answers(keys, time.monotonic() + LIMIT_S) == {1: {"time": 7.0}}
    second = TaskChannel("localhost", driver.port, 1)
    second.answer({"time": 8.0})
    keys = driver.ask([1], {"what": "time"})
    assert driver.answers(keys, time.monotonic() + 1) == {}
    assert second.question() == {"what": "end"}
    assert first.question() == first.question() == {"what": "time"}


def test_a_question_to_all_tasks_is_kept_once() -> None:
    """It names them all: one text for each of 8,000 tasks took 376 MB."""
    driver, everyone = Driver(), list(range(2000))
    tracemalloc.start()
    driver.ask(everyone, {"what": "measure", "ranks": everyone})
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2 << 20


@pytest.mark.parametrize(
    "says", [b"{x\n", b"[1]\n", b"\xff\n", b'{"rank": "1"}\n', b"[" * 9999 + b"\n"]
)
def test_what_is_not_understood_is_not_heard(says: bytes) -> None:
    """Also of one with the key of this job: the driver goes on with the others."""
    driver = Driver()
    keys = driver.ask([1], {"what": "time"})
    with peers.connect_peer("localhost", driver.port, peers.job_key(), 60) as odd:
        odd.sendall(says)
        odd.settimeout(0.05)
        closed = time.monotonic() + 60
        while time.monotonic() < closed:
            driver.answers(keys, time.monotonic() + 0.01)
            with contextlib.suppress(TimeoutError):
                assert odd.recv(100) == b""
                break
    TaskChannel("localhost", driver.port, 1).answer({"time": 7.0})
    assert driver.answers(keys, time.monotonic() + LIMIT_S) == {1: {"time": 7.0}}


def test_only_a_full_disk_is_told_to_make_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--nodes=a --tasks=1 --gpus=0 --dir={tmp_path} --json={tmp_path}/told"
    assert program.main([*words.split(), f"--meet={tmp_path}/none"]) == program.NOTHING_PROVED
    said = capsys.readouterr().err
    assert "No such file or directory" in said and "make room" not in said


def test_the_run_starts_where_most_nodes_are_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also though srun has ended by the time of the verdict: the tasks that came have left."""
    monkeypatch.setattr(program, "CHECK_IN_S", 3.0)

    def answer() -> None:
        while not (tmp_path / "port").exists():
            time.sleep(0.01)
        task = TaskChannel("localhost", int((tmp_path / "port").read_text().split()[0]), 0)
        while (what := task.question()["what"]) != "end":
            task.answer(
                node("a").facts | {"local_rank": 0} if what == "node" else {"time": time.time()}
            )
        (tmp_path / "ended").touch()
        task.answer({})

    thread = threading.Thread(target=answer)
    thread.start()
    words = f"--nodes=a,b,c,d --tasks=1 --gpus=0 --dir={tmp_path} --json={tmp_path}/told"
    code = program.main([*words.split(), f"--meet={tmp_path}"])
    thread.join()
    said = capsys.readouterr().out
    assert "note: 3 of 4 nodes did not answer in time" in said and ": b, c, d\n" in said
    assert code == 0, said
