"""The lock of a run: who may take it from whom, and what one that has lost it does."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kempner.config.option import ConfigError
from kempner.jobs import lock, lock_takeover
from kempner.jobs.lock import LOST_LOCK_EXIT, RunLock
from kempner.jobs.lock_takeover import Takeover
from kempner.jobs.system.process import pid_namespace
from kempner.jobs.this_job import host_name

BEAT_S, LIMIT_S = 0.2, 120.0
SLURM = {"SLURM_CLUSTER_NAME": "a", "SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "0"}
OTHER_JOB = {**SLURM, "SLURM_JOB_ID": "13"}
TIMED_OUT = "slurm_load_jobs error: Socket timed out on send/recv operation"
FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
Hold = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Hold]:
    """Starts a process that holds the lock of tmp_path."""
    held = []

    def start(*words: str, **env: str) -> subprocess.Popen[str]:
        command = [sys.executable, Path(__file__).with_name("holder.py"), tmp_path, *words]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = subprocess.Popen(command, env={**os.environ, **env}, text=True, **pipes)
        held.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield start
    for process in held:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A beat takes 0.2 s here, and is missed after 15 s even on the busiest machine."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "KEMPNER_ATTEMPT"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(lock, "LOCK_HEARTBEAT_S", BEAT_S)
    for name, seconds in (("MISSED_S", 15.0), ("DEAD_S", 30.0), ("LOCK_POLL_S", 0.1)):
        monkeypatch.setattr(lock_takeover, name, seconds)


def be(monkeypatch: pytest.MonkeyPatch, **env: str) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)


def squeue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "bin/squeue").write_text(f"#!/bin/bash\n{script}\n")
    (tmp_path / "bin/squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


def lost_by(holder: subprocess.Popen[str]) -> str:
    """What a holder that has lost its lock says when it leaves."""
    assert holder.wait(LIMIT_S) == LOST_LOCK_EXIT
    assert holder.stderr is not None
    return holder.stderr.read()


# --- a job that lives ---


@pytest.mark.parametrize(
    ("holder", "newcomer", "told"),
    [
        # One question of two goes unanswered. The two were taken for "Slurm has forgotten it".
        (SLURM, OTHER_JOB, f"[[ $* == *--me* ]] || {{ echo '{TIMED_OUT}' >&2; exit 1; }}"),
        # Slurm hides the jobs of others, and says no word of it.
        (SLURM, OTHER_JOB, "true"),
        # Even where it swears that the job is gone: it lives.
        (SLURM, OTHER_JOB, FORGOTTEN),
        # On another cluster that uses this file system, on a host of the same name.
        ({**SLURM, "SLURM_CLUSTER_NAME": "b"}, OTHER_JOB, "exit 1"),
        # The same job number there, and a later start of it here.
        ({**SLURM, "SLURM_CLUSTER_NAME": "b"}, {**SLURM, "SLURM_RESTART_COUNT": "1"}, "exit 1"),
        # Beside a running job: interactive.sh, which is no later start of that one.
        (
            {**SLURM, "SLURM_STEP_ID": "0", "KEMPNER_ATTEMPT_ID": "12.0.77"},
            {**SLURM, "SLURM_STEP_ID": "1", "KEMPNER_ATTEMPT_ID": "12.0.99"},
            "echo 12.0",
        ),
    ],
)
def test_a_job_that_lives_keeps_its_lock(
    hold: Hold,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    holder: dict[str, str],
    newcomer: dict[str, str],
    told: str,
) -> None:
    squeue(monkeypatch, tmp_path, told)
    elsewhere = ["kernel=another/1", "born=1"] if holder["SLURM_CLUSTER_NAME"] == "b" else []
    held = hold(*elsewhere, **holder)
    be(monkeypatch, **newcomer)
    with pytest.raises(ConfigError, match=r"is in use by job 12 on .*--run\.dir=runs/NAME"):
        RunLock(tmp_path)
    assert held.poll() is None
    assert json.loads((tmp_path / "lock").read_text())["pid"] == held.pid


# --- one that makes room ---


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        # Slurm has started the job again, because it believes the host to be lost.
        (SLURM, {**SLURM, "SLURM_RESTART_COUNT": "1"}),
        # A restart in place, while rank 0 of the step before is not gone yet.
        (
            {**SLURM, "SLURM_STEP_ID": "0", "KEMPNER_ATTEMPT_ID": "12.0.77"},
            {**SLURM, "SLURM_STEP_ID": "3", "KEMPNER_ATTEMPT_ID": "12.0.77.1"},
        ),
    ],
)
def test_an_earlier_start_of_the_job_leaves_before_the_later_one_begins(
    hold: Hold,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    earlier: dict[str, str],
    later: dict[str, str],
) -> None:
    held = hold(**earlier)
    be(monkeypatch, **later)
    taken = RunLock(tmp_path)
    assert held.poll() == LOST_LOCK_EXIT  # before it is ours, not after
    assert "is in use by job 12" in lost_by(held)
    taken.check()
    taken.release()
    assert not [path.name for path in tmp_path.iterdir()], "no file is left"


def test_a_start_that_was_killed_while_it_claimed_the_lock(
    hold: Hold, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has left its claim, and the earlier start of the job beats still: each later start waited
    for something to come of the claim, for ever and without a word."""
    held = hold(**SLURM)
    text = (tmp_path / "lock").read_bytes()
    (tmp_path / f".lock.{hashlib.sha256(text).hexdigest()[:16]}.0").touch()
    be(monkeypatch, **{**SLURM, "SLURM_RESTART_COUNT": "2"})
    monkeypatch.setattr(lock_takeover, "MISSED_S", 2.0)
    taken: list[RunLock] = []
    start = threading.Thread(target=lambda: taken.append(RunLock(tmp_path)), daemon=True)
    start.start()
    assert "is in use by job 12" in lost_by(held)
    start.join(LIMIT_S)
    taken[0].release()
    assert not [path.name for path in tmp_path.iterdir()], "no file is left"


def test_who_has_lost_the_lock_leaves_though_the_file_system_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = RunLock(tmp_path)
    mine._stop.set()
    (tmp_path / "lock").write_text(record())
    left, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(lock_takeover, "look", lambda path: left.wait(LIMIT_S) and None)
    monkeypatch.setattr(lock, "LOST_LOCK_WORDS_S", 0.1)
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    threading.Thread(target=mine.check, daemon=True).start()
    try:
        assert ended.wait(LIMIT_S / 2)
    finally:
        left.set()


def test_whoever_has_lost_the_lock_leaves_before_it_commits(hold: Hold, tmp_path: Path) -> None:
    held = hold("beat=1000")
    assert held.stdin is not None and held.stdout is not None
    print("once", file=held.stdin, flush=True)
    assert held.stdout.readline() == "checked once\n"
    record = json.loads((tmp_path / "lock").read_text())
    (tmp_path / "lock").write_text(json.dumps({**record, "job": "99", "host": "n7"}))
    print("again", file=held.stdin, flush=True)
    assert "is in use by job 99 on n7" in lost_by(held)
    assert held.stdout.read() == ""


def test_at_its_next_beat(hold: Hold, tmp_path: Path) -> None:
    held = hold()
    other = json.dumps({"host": "n7", "pid": 7, "job": None, "born": "1"})
    (tmp_path / "new").write_text(other)
    (tmp_path / "new").replace(tmp_path / "lock")
    assert "is in use by process 7 on n7" in lost_by(held)
    assert (tmp_path / "lock").read_text() == other, "it touches no other's lock"


def test_a_lock_that_somebody_has_removed_is_made_again(hold: Hold, tmp_path: Path) -> None:
    held = hold()
    (tmp_path / "lock").unlink()
    with pytest.raises(ConfigError, match=f"is in use by process {held.pid}"):
        for _ in range(100):  # it may be first: then the holder leaves
            RunLock(tmp_path).release()
            (tmp_path / "lock").unlink(missing_ok=True)
            assert held.poll() is None
            threading.Event().wait(2 * BEAT_S)


# --- a dead one's ---


def record(**values: object) -> str:
    """The lock of a process of another host that is gone."""
    return json.dumps({**lock._self(), "host": "other", "pid": 7, "born": "1", **values})


@pytest.mark.parametrize(
    ("values", "told", "waits"),
    [
        ({"slurm_id": "11"}, FORGOTTEN, "MISSED_S"),
        ({"slurm_id": "11"}, f"echo '{TIMED_OUT}' >&2; exit 1", "DEAD_S"),
        ({"slurm_id": "11"}, "echo COMPLETED", "MISSED_S"),
        ({"slurm_id": "11"}, "echo RUNNING", "DEAD_S"),
        ({"slurm_id": "11"}, "true", "DEAD_S"),
        ({"slurm_id": "11", "uid": 4242}, "touch asked; exit 1", "DEAD_S"),
        ({"slurm_id": "11", "cluster": "b"}, "touch asked; exit 1", "DEAD_S"),
        ({"slurm_id": "11", "uid": None, "cluster": None}, "touch asked; exit 1", "DEAD_S"),
        ({"step": "1"}, "printf '12.0\\n12.1\\n'", "DEAD_S"),
        ({"step": "1"}, "printf '12.batch\\n12.0\\n'", "MISSED_S"),
        ({"step": "4294967290"}, "printf '12.interactive\\n12.0\\n'", "DEAD_S"),
        ({"step": None}, "printf '12.batch\\n12.0\\n'", "DEAD_S"),
        ({"step": "1x"}, "printf '12.batch\\n12.0\\n'", "DEAD_S"),  # damaged
        ({"step": [1]}, "printf '12.batch\\n12.0\\n'", "DEAD_S"),
        ({"slurm_id": 11}, "touch asked; exit 1", "DEAD_S"),
    ],
)
def test_how_long_a_lock_must_be_still(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, object],
    told: str,
    waits: str,
) -> None:
    """Whatever Slurm says: beats must be missing. It is asked about jobs that it shows us alone."""
    monkeypatch.chdir(tmp_path)
    squeue(monkeypatch, tmp_path, told)
    be(monkeypatch, **SLURM, SLURM_STEP_ID="2")
    (tmp_path / "lock").write_text(record(**{"slurm_id": "12", **values}))
    waited = []
    monkeypatch.setattr(Takeover, "_stays", lambda self, seen, limit: not waited.append(limit))
    RunLock(tmp_path).release()
    assert waited == [getattr(lock_takeover, waits)]
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("values", "free"),
    [
        ({}, True),
        ({"kernel": "another/1"}, False),  # the host was booted again, or it is another's process
        ({"cluster": "b"}, False),
        ({"host": "other"}, False),  # of the same kernel: perhaps its processes are not seen here
        ({"kernel": None}, False),  # of a version that did not say
        ({"born": lock.birth_ticks(os.getpid()), "pid": os.getpid()}, False),
    ],
)
def test_only_its_own_kernel_knows_at_once_that_a_process_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, object], free: bool
) -> None:
    be(monkeypatch, SLURM_CLUSTER_NAME="a")
    (tmp_path / "lock").write_text(record(**{"host": host_name(), **values}))
    waited = []
    monkeypatch.setattr(Takeover, "_stays", lambda self, seen, limit: not waited.append(limit))
    RunLock(tmp_path).release()
    assert (not waited) == free


@pytest.mark.parametrize("text", ["", "{", '{"pid": 7}', "[]"])
def test_the_age_decides_over_a_lock_that_cannot_be_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    path = tmp_path / "lock"
    path.write_text(text)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(BEAT_S):
            os.utime(path)

    beating = threading.Thread(target=beat)
    beating.start()
    with pytest.raises(ConfigError, match="is in use by another process: wait for it"):
        RunLock(tmp_path)
    stop.set()
    beating.join()
    monkeypatch.setattr(lock_takeover, "DEAD_S", BEAT_S)
    RunLock(tmp_path).release()


def test_what_cannot_be_read_for_a_moment_is_not_dead(
    hold: Hold, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO, ESTALE of a shared file system."""
    held, looks, look = hold(), iter([lock_takeover.SeenLock()] * 3), lock_takeover.look
    monkeypatch.setattr(lock_takeover, "look", lambda path: next(looks, None) or look(path))
    with pytest.raises(ConfigError, match=f"is in use by process {held.pid}"):
        RunLock(tmp_path)


# --- several at once ---

NEWCOMERS = 3


def _take_overs(folder: Path, trials: int, ready: object, over: object) -> None:
    """A newcomer to each of these directories, whose lock a dead process has left."""
    lock.LOCK_HEARTBEAT_S, lock_takeover.LOCK_POLL_S = 0.02, 0.01
    lock_takeover.MISSED_S, lock_takeover.DEAD_S = 30.0, 60.0
    for trial in range(trials):
        ready.wait(LIMIT_S)  # type: ignore[attr-defined]
        directory, held = folder / str(trial), None
        try:
            held = RunLock(directory)
            with open(directory / "holders", "a") as file:
                file.write(f"{os.getpid()}\n")
        except ConfigError:
            pass
        over.wait(LIMIT_S)  # type: ignore[attr-defined]
        if held is not None:
            held.release()


def test_the_second_one_waits_for_the_first_one_at_its_most_delicate_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen the dead one's lock, and the first one is about to replace it."""
    (tmp_path / "lock").write_text(record(kernel=pid_namespace(), host=host_name()))
    about_to, went_on = threading.Event(), threading.Event()
    replace, stays, held = Path.replace, Takeover._stays, []

    def slowly(self: Path, target: Path) -> Path:
        if about_to.is_set():
            went_on.set()
        else:
            about_to.set()
            assert went_on.wait(LIMIT_S)
        return replace(self, target)

    def seen_waiting(self: Takeover, *about: Any) -> bool:
        went_on.set()
        return stays(self, *about)

    def come() -> None:
        with contextlib.suppress(ConfigError):
            held.append(RunLock(tmp_path))

    monkeypatch.setattr(os, "_exit", lambda code: None)  # of one that has lost it
    monkeypatch.setattr(Path, "replace", slowly)
    monkeypatch.setattr(Takeover, "_stays", seen_waiting)
    newcomers = [threading.Thread(target=come) for _ in range(2)]
    newcomers[0].start()
    assert about_to.wait(LIMIT_S)
    newcomers[1].start()
    for thread in newcomers:
        thread.join(LIMIT_S)
    for each in held:
        each.release()
    assert len(held) == 1


@pytest.mark.parametrize("trials", [30, pytest.param(1000, marks=pytest.mark.soak)])
def test_one_of_several_newcomers_takes_a_dead_lock(tmp_path: Path, trials: int) -> None:
    dead = {"kernel": pid_namespace(), "host": host_name()}
    for trial in range(trials):
        (tmp_path / str(trial)).mkdir()
        if trial % 5:  # else there is none yet
            (tmp_path / str(trial) / "lock").write_text(record(**dead))
    context = multiprocessing.get_context("fork")
    meet = [context.Barrier(NEWCOMERS) for _ in range(2)]
    newcomers = [
        context.Process(target=_take_overs, args=(tmp_path, trials, *meet))
        for _ in range(NEWCOMERS)
    ]
    for process in newcomers:
        process.start()
    for process in newcomers:
        process.join()
    assert [process.exitcode for process in newcomers] == [0] * NEWCOMERS
    holders = [(tmp_path / str(k) / "holders").read_text().split() for k in range(trials)]
    assert [len(found) for found in holders] == [1] * trials
    left = {path.name for k in range(trials) for path in (tmp_path / str(k)).iterdir()}
    assert left == {"holders"}
