"""What the tests of whole programs under run.sh (tests/jobs/slurm/test_run.py) do not come by:
requests before all ranks are there, and signals without a name."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kempner.config.option import ConfigError
from kempner.jobs.program import coordinator
from kempner.jobs.program import watch as watch_module
from kempner.jobs.program.book import Book
from kempner.jobs.program.channel import Channel
from kempner.jobs.program.child import RankPlace, rank_variables
from kempner.jobs.program.coordinator import Coordinator
from kempner.jobs.program.copy import CodeCopy, check_code
from kempner.jobs.program.launchers import check_launcher, uses_torchrun
from kempner.jobs.program.options import Options, check_command, parse_options
from kempner.jobs.program.output import ROOT_CAUSE, OutputReader, steps_after
from kempner.jobs.program.verdict import Ending, crash_faults, judge_endings
from kempner.jobs.program.watch import CheckpointWatch, SeenCheckpoint, number_in
from kempner.jobs.ranks.peers import PEER_KEY_VARIABLE, Entrance, new_key
from kempner.jobs.ranks.placement import World
from kempner.jobs.ranks.port_range import listen_in_range
from kempner.jobs.ranks.process_group import allow_open_files
from kempner.jobs.records.event_reader import read_kind
from kempner.jobs.records.events import DecisionEvent, FaultEvent, FirstStep, append_event
from kempner.jobs.records.facts import run_facts
from kempner.jobs.records.run_history import load_history
from kempner.jobs.report import summary
from tests.conftest import ROOT, clean_env
from tests.waiting import LIMIT_S, until

Meet = Callable[..., Coordinator]


@pytest.fixture
def meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Meet:
    """The coordinator of two ranks, once it has ended; only rank 0 has come, and acts."""
    monkeypatch.setenv("KEMPNER_ATTEMPT_ID", "7.0")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv(PEER_KEY_VARIABLE, key := new_key())

    def run(act: Callable[[Channel], object]) -> Coordinator:
        options = parse_options([f"--run-dir={tmp_path / 'run'}", "--", "true"])
        with Entrance(listen_in_range("127.0.0.1"), key) as entrance:
            coordinator = Coordinator(options, 2, entrance, "127.0.0.1")
            thread = threading.Thread(target=coordinator.run)
            thread.start()
            rank = Channel.connect("127.0.0.1", entrance.port, 10.0)
            rank.send(rank=0, host="n1", attempt_id="7.0")
            act(rank)
            while rank.open and not rank.receive():
                pass
            rank.close()
            thread.join(30)
            assert not thread.is_alive()
        return coordinator

    return run


@pytest.mark.parametrize(("kind", "state"), [("stop", "stopped"), ("interrupt", "interrupted")])
def test_asked_to_leave_before_all_ranks_are_there(
    meet: Meet, tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str, state: str
) -> None:
    """Who stops a job while it starts does not want it back."""
    coordinator = meet(lambda rank: rank.send(say="asked", kind=kind, why="SIGINT"))
    assert coordinator.code == 0
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == state
    assert "did not arrive" not in capfd.readouterr().err


def test_a_rank_that_leaves_before_the_start(meet: Meet, capfd: pytest.CaptureFixture[str]) -> None:
    assert meet(Channel.close).code == 1
    assert "ranks [0] of 2 exited before the start: see srun's messages" in capfd.readouterr().err


def test_a_stranger_ends_no_run(meet: Meet, tmp_path: Path) -> None:
    """The attempt id is the name of the step, which squeue shows to everybody: with it, two lines
    made status.json say "done"."""

    def act(rank: Channel) -> None:
        port = rank.socket.getpeername()[1]
        for number in (0, 1):
            stranger = Channel(socket.create_connection(("127.0.0.1", port), 30))
            stranger.send(rank=number, host="n1", attempt_id="7.0")
            stranger.send(say="ended", code=0, words="", lost_peer=False, torn=False, ago=0.0)
            stranger.send(say="asked", kind="stop", why="SIGINT")
            stranger.close()
        # Nor does one of ours that is not understood.
        rank.send(say="ended")
        rank.send(say="asked", kind=7)
        rank.send(say="asked", kind="interrupt", why="SIGTERM")

    assert meet(act).code == 0
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "interrupted"


def test_a_rank_that_is_there_is_not_replaced(meet: Meet, tmp_path: Path) -> None:
    def act(rank: Channel) -> None:
        other = Channel.connect("127.0.0.1", rank.socket.getpeername()[1], 10.0)
        other.send(rank=0, host="n2", attempt_id="7.0")
        other.send(say="asked", kind="stop", why="SIGINT")
        other.socket.settimeout(60)
        assert other.socket.recv(1) == b""
        rank.send(say="asked", kind="interrupt", why="SIGTERM")

    assert meet(act).code == 0
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "interrupted"


def test_a_rank_that_hangs_and_ends_counts_once(
    meet: Meet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three that had to answer it was two: the other one was blamed before it could."""
    monkeypatch.setattr(coordinator, "RANK_ANSWER_S", LIMIT_S)
    heard: list[Any] = []

    def act(rank: Channel) -> None:
        other = Channel.connect("127.0.0.1", rank.socket.getpeername()[1], 10.0)

        def hear(what: str) -> None:
            while what not in heard:
                heard.extend(message["do"] for message in other.receive())

        other.send(rank=1, host="n2", attempt_id="7.0")
        hear("start")
        rank.send(say="hung", condition="S", step=7, silence=9.0)
        rank.send(say="ended", code=1, words="", lost_peer=False, torn=False, ago=0.0)
        hear("report")
        while select.select([other.socket], [], [], 1.0)[0]:  # several turns of the coordinator
            heard.extend(message["do"] for message in other.receive())
        other.send(say="condition", condition="S", step=7, silence=9.0)
        hear("end")
        other.send(say="ended", code=-15, words="", lost_peer=False, torn=True, ago=0.0)

    meet(act)
    assert heard == ["start", "report", "end"]
    [fault] = read_kind(tmp_path / "run/attempts.jsonl", FaultEvent)
    assert (fault.kind, fault.ranks, fault.hosts, fault.step) == ("hang", (), (), 7)


def test_words_in_another_encoding(tmp_path: Path) -> None:
    """Of the command, and the name of its process and of one that it leaves behind."""
    sleeper = tmp_path / os.fsdecode(b"sl\xe9eper")
    shutil.copy("/bin/sleep", sleeper)
    script = tmp_path / os.fsdecode(b"caf\xe9")
    script.write_bytes(b"#!/bin/sh\necho ran\n./sl\xe9eper 1000 &\n")
    script.chmod(0o755)
    # A true start: the zygote takes UTF-8 alone.
    words = ["env", sys.executable, ROOT / "scripts/program.py", "--here", "1", "--run-dir=run"]
    done = subprocess.run(
        [*words, "--", f"./{script.name}", os.fsdecode(b"\xff")],
        cwd=tmp_path, env=clean_env(), capture_output=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done
    assert b": './caf?' '?': 1 process(es) on " in done.stdout
    assert "left behind: sl\ufffdeper (" in done.stdout.decode()
    assert load_history(tmp_path / "run").state.word == "done"


def test_a_stranger_is_no_rank(tmp_path: Path) -> None:
    """Two tasks of a step, as srun starts them, and somebody who is faster than the second one: he
    knows the port and the attempt, and does not have the key."""
    run, ran = tmp_path / "run", tmp_path / "ran"
    words = [sys.executable, ROOT / "scripts/program.py", f"--run-dir={run}", "--"]
    step = {
        "SLURM_STEP_NUM_TASKS": "2",
        "KEMPNER_ATTEMPT_ID": "7.0.1",
        PEER_KEY_VARIABLE: new_key(),
    }

    def task(rank: int) -> subprocess.Popen[bytes]:
        place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "TMPDIR": str(tmp_path)}
        command = [*words, "sh", "-c", f"echo rank {rank} >>{ran}"]
        return subprocess.Popen(command, env=clean_env() | step | place)

    tasks = [task(0)]
    try:
        until(lambda: list(run.glob(".rendezvous-*")), alive=(tasks[0],))
        (found,) = run.glob(".rendezvous-*")
        host, port = found.read_text().split()
        stranger = Channel(socket.create_connection((host, int(port)), 30))
        stranger.send(rank=1, host="n2", attempt_id="7.0.1")
        stranger.send(say="ended", code=0, words="", lost_peer=False, torn=False, ago=0.0)
        while stranger.open:
            stranger.receive()
        tasks.append(task(1))
        assert [each.wait(LIMIT_S) for each in tasks] == [0, 0]
    finally:
        for each in tasks:
            each.kill()
            each.wait()
    assert sorted(ran.read_text().splitlines()) == ["rank 0", "rank 1"]
    assert json.loads((run / "status.json").read_text())["state"] == "done"


@pytest.mark.parametrize(
    ("visible", "given"),
    [
        ("MIG-a,MIG-b", ["MIG-b", 0, 1, 3]),  # CUDA uses the first alone
        ("GPU-1", [None, 0, 1, 3]),  # Slurm has bound one to each task
        ("0,1", [None, 1, 2, 1]),
    ],
)
def test_a_rank_that_sees_one_gpu_is_a_node_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, given: list[object]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    start, options = {"address": "n1", "port": 1, "attempt": 0}, parse_options(["--", "true"])
    place = RankPlace(3)
    found = rank_variables(World(3, 1, 4, "slurm", 2), start, options, place)
    place.remove()
    names = ["CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
    assert [found.get(name) for name in names] == [None if x is None else str(x) for x in given]
    assert int(found["GROUP_WORLD_SIZE"]) * int(found["LOCAL_WORLD_SIZE"]) == 4
    assert found["NODE_RANK"] == found["GROUP_RANK"]
    assert found[PEER_KEY_VARIABLE] == ""  # the key of the job is not the program's
    # A launcher sees all of them, for its own ranks.
    whole = rank_variables(World(1, 0, 2, "slurm", 1), start, options, place)
    assert "CUDA_VISIBLE_DEVICES" not in whole and whole["PET_NODE_RANK"] == "1"


def test_a_rank_without_an_instance_of_mig(tmp_path: Path) -> None:
    """It says so, rather than share that of another rank."""
    words = [ROOT / "scripts/program.py", f"--run-dir={tmp_path}/run", "--", "true"]
    step = {
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_TASKS_PER_NODE": "3",
        PEER_KEY_VARIABLE: new_key(),
    }
    step |= {"KEMPNER_ATTEMPT_ID": "7.0.1", "CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}
    tasks = [
        subprocess.Popen(
            [sys.executable, *words],
            env=clean_env() | step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    said = "".join(task.communicate(timeout=LIMIT_S)[0] for task in tasks)
    assert "[2] kempner: error: local rank 2" in said
    assert "no MIG instance: 2 are visible" in said
    assert tasks[0].returncode


def test_a_signal_without_a_name() -> None:
    outcome = judge_endings([Ending(0, "n1", -40, "")], "", False, False, False)
    assert (outcome.code, outcome.reason) == (168, "rank 0 on n1: killed by signal 40")


def test_the_command_names_the_copies_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not files that are not copied, or of the same name elsewhere; a directory may be where
    the results go."""
    origin, root = tmp_path / "project", tmp_path / "code/0123456789ab"
    for folder in (origin, root):
        (folder / "src/out").mkdir(parents=True)
        (folder / "src/train.py").touch()
    (origin / "data.bin").touch()
    monkeypatch.chdir(origin)
    copy = CodeCopy(origin, root)
    words = ["python", "-u", "./src/train.py", "--a=src/train.py", f"--b={origin}/src/train.py"]
    here = str(root / "src/train.py")
    assert copy.command(words) == ("python", "-u", here, f"--a={here}", f"--b={here}")
    for word in ("data.bin", "src/out", "--x=", "", "x=src/train.py", "../src/train.py"):
        assert copy.command([word]) == (word,)
    found = copy.python_path(f"{origin}/lib:/elsewhere::{origin}/src")
    assert found.split(":") == [f"{root}/src", str(root), f"{root}/lib", "/elsewhere"]

    check_code(origin, ["python", "-m", "torch.distributed.run", "src/train.py"])
    (origin / "torch.py").touch()
    with pytest.raises(ConfigError, match=r"'-m torch.distributed.run' from the working"):
        check_code(origin, ["python", "-m", "torch.distributed.run", "src/train.py"])
    with pytest.raises(ConfigError, match="no word of the command names a file"):
        check_code(origin, ["python", "src"])


def test_a_copy_that_is_gone(meet: Meet, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr("kempner.jobs.program.coordinator.RANKS_START_S", 1.0)  # for the other rank
    monkeypatch.setenv("KEMPNER_COPY", "/nowhere/code/0123456789ab")
    assert meet(lambda rank: None).code == 2
    assert "the copy of the program's code is gone: " in capfd.readouterr().err


# --- whose fault it was ---------------------------------------------------------------------------

HEAD = {"time": 1.0}


@pytest.mark.parametrize("code", [1, 2])
def test_ranks_that_were_ended_are_not_blamed(code: int) -> None:
    """Those that catch SIGTERM and wait for a collective are killed by their supervisors."""
    ended = [
        Ending(2, "n2", code, "ValueError: no"),
        Ending(3, "n2", -9, "", torn=True),
        Ending(0, "n1", 0, "", torn=True),
        Ending(1, "n1", -9, "", torn=True),
    ]
    outcome = judge_endings(ended, "", False, False, False)
    assert (outcome.code, outcome.final) == (code, code == 2)
    assert outcome.reason == f"rank 2 on n2: exit code {code}: ValueError: no"
    (fault,) = crash_faults(ended, outcome, "", HEAD)
    assert fault.ranks == (2,) and fault.hosts == ("n2",)


def test_a_host_that_is_gone_is_blamed_not_those_that_lost_it() -> None:
    ended = [Ending(0, "n1", 1, "JaxRuntimeError: peer"), Ending(3, "n2", 1, "", gone=True)]
    outcome = judge_endings(ended, "", False, False, True)
    assert outcome.state == "" and outcome.reason == "rank 3 on n2: its supervisor is gone"
    faults = crash_faults(ended, outcome, "", HEAD)
    assert [(f.hosts, f.lost_peer) for f in faults] == [(("n2",), False), (("n1",), True)]
    # Slurm ends the step of a lost host: nobody wanted room.
    asked = judge_endings(ended, "interrupt", False, False, True)
    assert asked.state == "" and [
        f.hosts for f in crash_faults(ended, asked, "interrupt", HEAD)
    ] == [("n1",)]


def test_the_rank_that_failed_first_is_named_not_the_one_that_exited_first() -> None:
    """And no host is counted for an error that may only be the loss of another rank."""
    slow = Ending(1, "n2", 1, "ValueError: no", failed_at=1.0)
    peer = Ending(0, "n1", 1, "EOFError", failed_at=2.0)
    same = Ending(2, "n1", 1, "ValueError: no", failed_at=3.0)
    ended = [peer, slow, same]
    outcome = judge_endings(ended, "", False, False, False)
    assert outcome.reason == "rank 1 on n2: exit code 1: ValueError: no"
    faults = crash_faults(ended, outcome, "", HEAD)
    assert [(f.ranks, f.lost_peer) for f in faults] == [((1,), False), ((0,), True), ((2,), False)]
    # A crash in its exit handlers, once it has lost the other; and a kill that nobody else caused.
    for when, rank in ((5.0, 1), (1.5, 0)):
        killed = replace(peer, code=-11, lost_peer=True, failed_at=when)
        assert f"rank {rank} on" in judge_endings([killed, slow], "", False, False, False).reason
    lost = [replace(peer, lost_peer=True), replace(slow, torn=True)]
    unknown = judge_endings(lost, "", False, False, False)
    assert unknown.reason.startswith("which rank failed is unknown; one that has lost it: rank 0")
    assert [f.lost_peer for f in crash_faults(lost, unknown, "", HEAD)] == [True]


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "names", "number"),
    [
        ("out/ckpt-*", ["ckpt-400"], 400),
        ("out/ckpt.pt", ["ckpt.pt"], None),
        ("out/*.pt", ["ep1-ba190-rank0.pt", "ep1-ba200-rank0.pt"], 200),
        ("out/*.pt", ["ba10-rank0.pt", "ba20-rank0.pt"], 20),
        ("out/*.pt", [f"x1-{n}00-rank0.pt" for n in (1, 2, 3, 4)], 400),
        ("out/iter_*/mp_rank_*", ["iter_0000200/mp_rank_00"], 200),
        ("out/*.ckpt", ["epoch=1-val_loss=0.35.ckpt"], None),
        ("out/*.ckpt", ["epoch=1-step=400-val_loss=0.35.ckpt"], 400),
        ("out/*.ckpt", [f"epoch={n}-x{n}00.ckpt" for n in (1, 2, 3, 4)], 400),
        ("out/model_*", ["model_00400_lr0.0003.pt"], 400),
        ("out/ckpt_*", ["ckpt_400_fp16.pt"], 400),
        ("out/checkpoint-*", ["checkpoint-100", "checkpoint-50"], 50),  # started over
        ("out/model-*", ["model-7b-400", "model-7b-500"], None),
        ("out/*", ["ckpt-400.pt", "best.pt"], 400),
        ("out/*", [str(n * 7919 % 50000) for n in range(50)], None),  # in any order
        ("out/part-*", [f"part-{n * 7919 % 50000}" for n in range(50)], None),
        ("out/batch-*", [f"batch-{n * 7919 % 50000}" for n in range(50)], None),
        ("out/*", [f"{n * 7919**5 % 16**8:08x}.bin" for n in range(50)], None),
        ("out/ckpt-*", ["ckpt-20261123-181500"], None),
        ("out/*.pt", ["20261123-step-40.pt"], 40),
        ("out/checkpoint-*", ["checkpoint-40"], 40),
    ],
)
def test_the_number_of_a_checkpoint(pattern: str, names: list[str], number: int | None) -> None:
    assert number_in([f"out/{name}" for name in names], pattern) == number


@pytest.fixture
def looked(tmp_path: Path) -> Callable[[str], CheckpointWatch]:
    """A watch that looks when it is told to."""

    def make(pattern: str) -> CheckpointWatch:
        return CheckpointWatch(tmp_path / "run", str(tmp_path / pattern))

    return make


class RoundOver(Exception):
    pass


def look_once(watch: CheckpointWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """One round of the watching thread."""

    def stop(seconds: float) -> None:
        raise RoundOver

    with monkeypatch.context() as patch, pytest.raises(RoundOver):
        patch.setattr(time, "sleep", stop)
        watch.run()


def test_requests_are_seen_at_once_over_nfs(
    tmp_path: Path, looked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client keeps for a minute that a file does not exist, unless the directory is listed."""
    monkeypatch.setenv("KEMPNER_ATTEMPT_ID", "7.0.1")
    run, cached, list_directory = tmp_path / "run", [True], os.listdir
    run.mkdir()
    read, exists = Path.read_text, Path.exists

    def listed(path: Any = ".") -> list[str]:
        cached.clear()
        return list_directory(path)

    def cached_read(path: Path, *args: Any) -> str:
        if cached:
            raise FileNotFoundError(path)
        return read(path, *args)

    monkeypatch.setattr(os, "listdir", listed)
    monkeypatch.setattr(Path, "read_text", cached_read)
    monkeypatch.setattr(Path, "exists", lambda path: not cached and exists(path))
    watch = looked("")
    (run / ".ask-7.0.1").write_text("TERM\nUSR2\n")
    (run / ".ask-8.0.1").write_text("INT\n")
    (run / "STOP").touch()
    look_once(watch, monkeypatch)
    assert watch.asked == ["STOP file", "TERM", "USR2"]
    assert list_directory(run) == [".ask-8.0.1"]


def test_a_time_limit_that_is_removed(
    tmp_path: Path, looked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`scontrol update TimeLimit=UNLIMITED`: nothing ends at the old one. Silence tells nothing."""
    said: dict[str, str] = {}
    monkeypatch.setattr(watch_module.this_job, "job_name", lambda: "7")
    monkeypatch.setattr(watch_module.slurm, "job_fields", lambda job: said)
    watch, ends = looked(""), []
    for answer in ({"EndTime": "2026-11-28T12:00:00"}, {}, {"EndTime": "Unknown"}, {}):
        said.clear()
        said.update(answer)
        look_once(watch, monkeypatch)
        ends.append(watch.end is not None)
    assert ends == [True, True, False, False]
    told: list[dict[str, Any]] = []
    book = SimpleNamespace(at_checkpoint=lambda watch: None, write_line=lambda alive: False)
    rank_0 = object.__new__(Coordinator)
    facts = {"_watch": watch, "_told_end": 5.0, "_asked": "", "_book": book, "_alive": False}
    vars(rank_0).update(facts, _tell=lambda **message: told.append(message))
    rank_0._look()
    assert told == [{"do": "job_end", "time": None}]  # the supervisors write None to the file
    (tmp_path / "end").write_text("None")
    monkeypatch.setenv("KEMPNER_STOP_FILE", str(tmp_path / "stop"))
    assert watch_module.slurm.end_time() is None


def test_what_counts_as_a_new_checkpoint(tmp_path: Path, looked: Any) -> None:
    (tmp_path / "ckpt-800").write_text("old")
    watch = looked("ckpt-*")
    assert watch.number == 800
    for name in (
        "ckpt-900.tmp",
        "ckpt-900.orbax-checkpoint-tmp-1795437228",
        "tmp-ckpt-900",
        "ckpt-900.partial",
    ):
        (tmp_path / name).write_text("half")
        watch._look()
        watch._look()
    assert watch.count == 0
    (tmp_path / "ckpt-800").unlink()  # started over
    for step in (100, 200):
        (tmp_path / f"ckpt-{step}").write_text("new")
        watch._look()
        watch._look()
    assert (watch.count, watch.completed, watch.number) == (2, 2, 200)


def test_a_file_that_is_always_written_anew(tmp_path: Path, looked: Any) -> None:
    """Renamed into its place; or written there again, just as long, when a program must not be
    ended: it may be half of it; but not a file that only grows."""
    watch = looked("state")
    for turn in range(4):
        fresh = tmp_path / f"fresh-{turn}"
        fresh.write_text("0")
        os.utime(fresh, (turn, turn))
        fresh.rename(tmp_path / "state")
        watch._look()
    assert watch.count == watch.completed == 3
    for turn in range(4):
        (tmp_path / "state").write_text("1")
        os.utime(tmp_path / "state", (turn + 10, turn + 10))
        watch._look()
    assert watch.count == 7 and watch.completed == 3
    grows = looked("log")
    for _ in range(4):
        with open(tmp_path / "log", "a") as file:
            file.write("more")
        grows._look()
    assert grows.count == 0


def test_a_look_at_a_complete_checkpoint_does_not_open_its_files(
    tmp_path: Path, looked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "c-1"
    folder.mkdir()
    for i in range(300):
        (folder / str(i)).touch()
    old = looked("c-*")
    fresh = looked("c-*")
    fresh._first = fresh.complete = fresh._last = SeenCheckpoint()
    fresh._look()
    fresh._look()
    assert fresh.completed == 1
    monkeypatch.setattr("kempner.jobs.program.watch.stat_checkpoint", pytest.fail)
    old._look()
    fresh._look()


def test_the_last_look_takes_what_was_whole(tmp_path: Path, looked: Any) -> None:
    """A program that crashes while it saves has made no progress."""
    whole, torn, left = looked("c-*"), looked("d-*"), looked("d-*")
    (tmp_path / "c-1").write_text("whole")
    whole._look()
    whole.look_at_last(False, time.monotonic() + 2)
    (tmp_path / "d-1").write_text("torn")
    torn._look()
    torn.look_at_last(False, time.monotonic())
    left.look_at_last(True, time.monotonic())
    assert (whole.count, torn.count, left.count) == (1, 0, 1)


def test_the_last_look_counts_what_was_saved_just_before_a_crash(
    tmp_path: Path, looked: Any
) -> None:
    """Where its size is that of a complete one: a rank may fail a moment after a save. A log that
    has grown is none, nor is half a checkpoint."""

    def save(name: str, size: int, at: float) -> None:
        fresh = tmp_path / f"{name}.tmp"
        fresh.write_bytes(b"x" * size)
        os.utime(fresh, (at, at))
        fresh.rename(tmp_path / name)

    save("my ckpt 5.pt", 1000, 5)
    save("state", 1000, 5)
    (tmp_path / "log").write_text("line\n")
    watch, same, grows, torn = looked("my ckpt *"), looked("state"), looked("log"), looked("state")
    save("my ckpt 10.pt", 1001, 10)
    save("my ckpt 15.pt", 999, 15)
    save("my ckpt 20.pt", 500, 20)  # torn
    with open(tmp_path / "log", "a") as log:
        log.write("line\n" * 9)
    (tmp_path / "state").write_bytes(b"x" * 500)
    torn.look_at_last(False, time.monotonic())
    save("state", 1000, 20)
    for each in (watch, same, grows):
        each.look_at_last(False, time.monotonic())
    assert (same.count, grows.count, torn.count) == (1, 0, 0)
    assert (watch.count, watch.number) == (1, 15)


# --- steps ----------------------------------------------------------------------------------------


def attempt(run_dir: Path, printed: Sequence[int], number: int | None, *words: str) -> None:
    """One that prints these steps and crashes. `number`: in the name of the newest checkpoint."""
    book = Book(parse_options([f"--run-dir={run_dir}", *words, "--", "true"]))
    book.start(["n1"], number)
    steps = None
    for step in printed:
        steps = steps_after(steps, step)
        book.at_steps(steps)
    book.event(FaultEvent(**book.head(), ranks=(0,), hosts=("n1",), reason="ValueError: no"))
    book.end("", "")
    book.close()


STEPS = "--steps=step (\\d+)"


@pytest.mark.parametrize(
    ("printed", "number", "began"),
    [
        ([41, 42], None, 40),
        ([185, 190], None, 180),
        ([1], None, 0),
        ([50], 40, None),  # it may print each step, or each 50th one
        ([350, 360], 200, 340),  # the number is none of a step, or the program ignores the file
        ([45, 50], 43, 43),
        ([0, 10], None, 0),
    ],
)
def test_where_an_attempt_began(
    tmp_path: Path, printed: list[int], number: int | None, began: int | None
) -> None:
    """From the distance of the steps that it prints."""
    attempt(tmp_path / "run", printed, number, STEPS)
    (first,) = read_kind(tmp_path / "run/attempts.jsonl", FirstStep)
    assert (first.began, first.printed) == (began, printed[0])
    (found,) = load_history(tmp_path / "run").attempts
    assert found.first_step == (began or 0) and found.counted == (began is not None)


def test_a_program_that_counts_from_0(tmp_path: Path) -> None:
    """`iter 40` is then the first one after 40."""
    for printed in ((0, 10), (40, 50)):
        attempt(tmp_path / "run", printed, None, STEPS)
    assert [a.first_step for a in load_history(tmp_path / "run").attempts] == [0, 40]


@pytest.mark.parametrize("number", [None, 40])
def test_the_step_after_an_attempt_that_died_before_it_began(
    tmp_path: Path, number: int | None
) -> None:
    """In its imports, or before its supervisors were there. Nobody knows yet what will be done
    again."""
    run_dir = tmp_path / "run"

    def told() -> list[object]:
        run = load_history(run_dir)
        recomputed = re.search(r"steps recomputed +(.*)", summary.summary_table([run]))
        return [run.step_text, run_facts(run, time.time())["step"], recomputed and recomputed[1]]

    attempt(run_dir, range(1, 91), None, STEPS)
    assert told() == ["90", 90, None]
    attempt(run_dir, [], number, STEPS)
    assert told() == ["90", 90, "-"]
    append_event(
        run_dir / "attempts.jsonl", DecisionEvent(time=time.time(), job="7", decision="restart")
    )
    assert told() == ["90", 90, "-"]
    attempt(run_dir, [41, 42, 43], number, STEPS)
    assert told() == ["43", 43, "50 or more"]
    assert [a.steps for a in load_history(run_dir).attempts] == ["0 to 90", "-", "-", "40 to 43"]


def test_a_line_that_says_where_it_resumes() -> None:
    assert steps_after(None, 40, b"resuming at step 40").every == 0
    assert steps_after(None, 40, b"step 40").every is None


def test_steps_that_are_not_known_are_not_zero(tmp_path: Path) -> None:
    """With checkpoints alone, and with nothing: neither 0 steps recomputed nor 0 % of training."""
    for name, number in (("a", 40), ("b", None)):
        for _ in range(2):
            book = Book(parse_options([f"--run-dir={tmp_path / name}", "--", "true"]))
            book.start(["n1"], number)
            time.sleep(0.05)
            book.end("interrupted", "asked to make room")
            book.close()
        status = tmp_path / name / "status.json"  # of somebody else's, with a field that is ours
        status.write_text(json.dumps({**json.loads(status.read_text()), "max_steps": 9}))
    numbered, silent = load_history(tmp_path / "a"), load_history(tmp_path / "b")
    assert (numbered.step_text, silent.step_text) == ("40", "-")
    for run in (numbered, silent):
        table = summary.summary_table([run])
        assert re.search(r"effective training time ratio +-\n", table), table
        assert re.search(r"steps recomputed +-\n", table) and "  running" in table
        assert run_facts(run, time.time())["step"] == (40 if run is numbered else None)
    assert "- to 40" in summary.attempt_table(numbered)


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "torchrun"),
    [
        ("torchrun --nproc-per-node=2 train.py", True),
        ("python -m torch.distributed.run train.py", True),
        ("python -u -m torch.distributed.launch train.py", True),
        ("apptainer exec image.sif torchrun train.py", True),
        ("torchrun -m package.train", True),
        ("env A=1 torchrun -m package.train", True),
        ("python train.py --launcher torchrun", False),
        ("./program torchrun", False),
        ("accelerate config", False),
        ("accelerate env --config_file a.py", False),
    ],
)
def test_torchrun_is_known(command: str, torchrun: bool) -> None:
    assert uses_torchrun(command.split()) == torchrun
    check_launcher(command.split(), 2)


@pytest.mark.parametrize(
    ("text", "torchrun"),
    [
        ("cd x && exec torchrun train.py", True),
        ("source env.sh; torchrun train.py | tee log", True),
        ("python train.py torchrun", False),
        ("pip install accelerate && python train.py --launcher accelerate", False),
        ("echo 'open", False),
        ("", False),
    ],
)
def test_commands_in_a_shell(text: str, torchrun: bool) -> None:
    for words in (["bash", "-c"], ["env", "A=1", "bash", "-l", "-o", "pipefail", "-ec"]):
        assert uses_torchrun([*words, text]) == torchrun
        check_launcher([*words, text], 2)
    check_launcher(["bash", "my.sh", "-c", "mpirun x"], 2)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("source env; accelerate launch train.py", "source env; python train.py"),
        (
            "accelerate env; timeout 5 accelerate-launch t.py $A",
            "accelerate env; timeout 5 python t.py $A",
        ),
        ("source e.sh && accelerate launch -n 8 t.py $A", "source e.sh && python t.py $A"),
        ("python -m accelerate.commands.launch -m a.b --c", "python -m a.b --c"),
        (
            'conda activate deepspeed; deepspeed "$D"/t.py',
            'conda activate deepspeed; python "$D"/t.py',
        ),
        ("if a; then srun -m block -n 4 python t.py; fi", "if a; then python t.py; fi"),
        ("mpirun -np 4 --host a,b x 'c d'", "x 'c d'"),
        ("mpirun", "COMMAND"),
    ],
)
def test_a_launcher_in_a_shell_is_refused_with_the_line_to_write(text: str, line: str) -> None:
    for words in (["bash", "-lc"], ["apptainer", "exec", "a.sif", "bash", "-l", "-c"]):
        with pytest.raises(ConfigError) as error:
            check_launcher([*words, text], 1)
        assert f"write -- {shlex.join([*words, line])}; " in str(error.value)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("torchrun --standalone train.py", "torchrun --standalone on 2 nodes"),
        ("torchrun --nnodes=1 train.py", "torchrun --nnodes=1 on 2 nodes"),
        ("torchrun --standalone -m pkg.train --lr 3", "torchrun --standalone on 2 nodes"),
        ("torchrun --nnodes=2 --node_rank 0 train.py", "torchrun --node_rank 0 on 2 nodes"),
        ("accelerate launch --num_processes 8 train.py --lr 3", "write -- python train.py --lr 3;"),
        ("python -m accelerate.commands.launch train.py", "write -- python train.py;"),
        (
            "deepspeed --num_gpus 8 train.py --deepspeed d.json",
            "python train.py --deepspeed d.json",
        ),
        ("mpirun -np 4 ls -l", "write -- ls -l;"),
        ("uv run srun -n 4 python train.py", "write -- uv run python train.py;"),
        ("accelerate-launch --num_processes 8 t.py --lr 3", "write -- python t.py --lr 3;"),
        ("nohup python -m accelerate.commands.accelerate_cli launch t.py", "-- nohup python t.py;"),
        ("python -u -m deepspeed.launcher.runner --module a.b", "write -- python -m a.b;"),
        ("ds t.py", "write -- python t.py;"),
        ("env FOO=1 accelerate launch t.py", "write -- env FOO=1 python t.py;"),
        ("timeout -k 5 100 accelerate launch -m a.b", "write -- timeout -k 5 100 python -m a.b;"),
        ("conda run -n accelerate accelerate launch t.py", "conda run -n accelerate python t.py;"),
        ("python none.py", "no file 'none.py' in "),
        ("python -u -m torch.distributed.run --max-restarts 1 none.py", "no file 'none.py' in "),
    ],
)
def test_commands_that_are_refused(command: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_launcher(command.split(), 2)
        check_command(command.split())
    assert len(error.value.problems) == 1 and message in error.value.problems[0]


@pytest.mark.parametrize(
    "command",
    [
        "python -m torch.distributed.run -m pkg.train new.py",
        "python -m torch.distributed.run --no-python sh -c new.py",
        "python -m pkg.train new.py",
        "python -c pass new.py",
    ],
)
def test_a_file_that_the_program_may_make_is_no_script(command: str) -> None:
    check_command(command.split())


@pytest.mark.parametrize(
    "command",
    [
        "torchrun train.py --standalone --nnodes=1",
        "torchrun --nnodes=2 --rdzv-backend c10d -m pkg.train --standalone",
        "uv run torchrun --no-python ./train --node_rank 0",
        "bash -c 'torchrun train.py --standalone'",
    ],
)
def test_what_torchrun_passes_on_is_the_programs_own(command: str) -> None:
    check_launcher(shlex.split(command), 2)


def test_an_option_given_twice() -> None:
    with pytest.raises(ConfigError, match=r"--steps=b\(.\): given twice; leave one out"):
        parse_options(["--steps=a(.)", "--steps=b(.)", "--", "true"])


def test_a_command_without_dashes_is_one_problem() -> None:
    with pytest.raises(ConfigError) as error:
        parse_options(["python", "train.py", "--lr=3", "x"])
    assert len(error.value.problems) == 1 and str(error.value).count("COMMAND") == 1


# --- what it has printed --------------------------------------------------------------------------

LOST_IT = "RuntimeError: Connection closed by peer\n"
TORCHRUN = f"""torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=====
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 7)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 7
-----
{ROOT_CAUSE}:
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : """


@pytest.mark.parametrize(
    ("printed", "killed", "words"),
    [
        ("step 1\n=====\n", False, "step 1"),
        ("using fused AdamW: True\n", True, ""),
        ("Traceback\n  x\nValueError: no\nwandb: bye\n", False, "ValueError: no"),
        (
            "torch.OutOfMemoryError: CUDA\nE.ChildFailedError: \n====\n",
            False,
            "torch.OutOfMemoryError: CUDA",
        ),
        ("loop: fatal: no room\n", True, "loop: fatal: no room"),
        # torchrun has ended the other ranks by SIGTERM.
        (f"ValueError: bad apple\n{LOST_IT}{TORCHRUN}1 (pid: 8)", False, "ValueError: bad apple"),
        (f"{TORCHRUN}3 (pid: 8)", False, f"{ROOT_CAUSE}: rank 1: exit code 3"),
        (
            f"ValueError: no\n{TORCHRUN}-9 (pid: 8)\n"
            "  traceback : Signal 9 (SIGKILL) received by PID 8",
            False,
            "Signal 9 (SIGKILL) received by PID 8",
        ),
    ],
)
def test_the_reason_of_a_crash(tmp_path: Path, printed: str, killed: bool, words: str) -> None:
    source, target = os.pipe()
    output = OutputReader(source, 0, tmp_path / "log", parse_options(["--", "true"]))
    output.start()
    os.write(target, printed.encode())
    os.close(target)
    output.join(10)
    assert output.last_words(killed) == words


def test_the_batch_log_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """The rank's own log has all."""
    monkeypatch.setattr("kempner.jobs.program.output.BATCH_LOG", 1 << 20)
    source, target = os.pipe()
    output = OutputReader(source, 0, tmp_path / "log", parse_options(["--", "true"]))
    output.start()
    for _ in range(64):
        os.write(target, b"x" * 65535 + b"\n")
    os.close(target)
    output.join(10)
    shown = capfd.readouterr().out
    assert len(shown) < 2 << 20 and shown.count("is only in ") == 1
    assert (tmp_path / "log").stat().st_size == 64 << 16


def test_output_is_read_where_each_rank_has_a_connection(tmp_path: Path) -> None:
    """Above about 1,000 ranks rank 0's descriptors do not fit select(): its program waited for
    ever for somebody to read its output."""
    allow_open_files()
    low, target = os.pipe()
    source = fcntl.fcntl(low, fcntl.F_DUPFD, 1024)
    os.close(low)
    output = OutputReader(source, 0, tmp_path / "log", parse_options(["--", "true"]))
    output.start()
    os.write(target, b"step 1\n")
    os.close(target)
    output.join(LIMIT_S)
    assert (tmp_path / "log").read_text() == "step 1\n"


def test_exit_code_2_after_progress_is_a_crash() -> None:
    """The batch script takes 2 for bad input, which ends the job."""
    ended = [Ending(0, "node1", 2, "error: bad file handle")]
    for progressed, code in ((False, 2), (True, 1)):
        outcome = judge_endings(ended, "", unheard=False, hung=False, progressed=progressed)
        assert (outcome.code, outcome.final) == (code, not progressed)


@pytest.mark.parametrize(
    ("pattern", "directory"),
    [("/a/b/ck-*", "/a/b"), ("/a/step_*/model.pt", "/a"), ("/a/ck.pt", "/a"), ("", None)],
)
def test_the_directory_of_the_checkpoints(pattern: str, directory: str | None) -> None:
    found = Options(("true",), Path("run"), pattern).checkpoint_dir
    assert found == (Path(directory) if directory else None)


def test_whoever_reads_the_output_has_left(tmp_path: Path) -> None:
    """The program goes on, and its end is recorded."""
    words = ["--run-dir=run", "--", "sh", "-c", "sleep 1; echo last"]
    command = shlex.join(["bash", str(ROOT / "scripts/slurm/run.sh"), *words])
    env = clean_env(KEMPNER_SITE=os.devnull)
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -1"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr, done
    assert (tmp_path / "run/logs/latest/rank-0.log").read_text() == "last\n"
    assert load_history(tmp_path / "run").state.word == "done"
