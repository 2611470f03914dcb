"""What keeps a reward from the host's files, sockets and memory, whatever the kernel allows."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kempner.extensions.rl.config import EnvConfig
from kempner.extensions.rl.environments.opening import Tasks
from kempner.extensions.rl.environments.protocol import Score
from kempner.extensions.rl.environments.sandbox import landlock, limits
from kempner.extensions.rl.environments.sandbox.scorer import Scorer
from tests.conftest import ROOT, clean_env
from tests.rewards import score
from tests.waiting import LIMIT_S

HOSTILE = EnvConfig(f"{ROOT}/tests/hostile_environment.py:Hostile", timeout=30.0, memory=200)


def refused_calls(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.refused_calls", *words],
        cwd=ROOT,
        env=clean_env(),
        capture_output=True,
        text=True,
    )
    if "limits._check" in done.stderr:
        pytest.skip(f"this kernel allows no namespaces: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("refused", ["", "unshare", "mount", "mount_setattr"])
def test_files_of_the_host_stay_whatever_the_kernel_refuses(refused: str) -> None:
    found = refused_calls(*refused.split(), "--", "arithmetic")
    assert found["rewards"] == [1.0, 1.0]
    assert found["same"]
    lacks = refused in ("unshare", "mount")
    assert bool(found["said"]) == lacks and not found["refused"]


@pytest.mark.parametrize("refused", ["unshare", "mount"])
def test_programs_are_not_run_where_nothing_isolates_them(refused: str) -> None:
    found = refused_calls(refused, "--", "code")
    assert found["rewards"] == [None, None] and found["same"]
    for text in (found["refused"], found["why"]):
        assert 'rl.env "code": runs programs' in text and "`unsafe = true`" in text


def test_programs_are_run_there_when_the_user_says_so() -> None:
    found = refused_calls("unshare", "--", "code", "unsafe")
    assert found["rewards"] == [1.0, 1.0] and not found["refused"]
    assert not found["same"]  # the program has written: that is what unsafe means


@pytest.mark.parametrize("missing", ["mount_setattr", "landlock"])
def test_on_older_kernels_files_are_read_only_all_the_same(missing: str) -> None:
    found = refused_calls(missing, "--", "code")
    assert found["rewards"] == [0.0, 0.0]  # its write to /tmp was refused
    assert found["same"] and not found["said"]


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    said: list[str] = []
    with contextlib.closing(Scorer(1, said.append)) as made:
        score(made, Tasks(EnvConfig("copy"), 0), Tasks(EnvConfig("copy"), 0).task(0), "")
        if said:
            pytest.skip(f"this kernel does not isolate: {said}")
        yield made


def run(scorer: Scorer, code: str) -> Score:
    env = Tasks(HOSTILE, 0)
    return score(scorer, env, env.task(0), code)


def test_a_socket_of_the_user_cannot_be_reached(scorer: Scorer, tmp_path: Path) -> None:
    path = os.path.relpath(tmp_path / "agent")  # a path of a socket is short
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
        agent.bind(path)
        agent.listen()
        connect = f"import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect({path!r})"
        assert "PermissionError" in run(scorer, connect).why
        pair = "import socket\na, b = socket.socketpair()\na.send(b'x')\nresult = len(b.recv(1))"
        assert run(scorer, pair) == Score(1.0)  # as asyncio needs
        dgram = pair.replace("()", "(socket.AF_UNIX, socket.SOCK_DGRAM)", 1)
        assert "PermissionError" in run(scorer, dgram).why


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (
            # As a program may, it raises its own limit first.
            "import mmap, resource, time\n"
            "resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)\n"
            "held = mmap.mmap(-1, 300 << 20)\n"
            "for _ in range(300): held.write(bytes(1 << 20))\n"
            "time.sleep(60)",
            "used more than 200 MiB",
        ),
        ("import os; os.memfd_create('hidden')", "Function not implemented"),
        (
            "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
            "assert libc.shmget(0, 1 << 20, 0o1600) >= 0, ctypes.get_errno()",
            "AssertionError: 38",
        ),
    ],
    ids=["shared", "memfd", "System V"],
)
def test_memory_is_counted_whatever_holds_it(scorer: Scorer, code: str, why: str) -> None:
    assert why in run(scorer, code).why


@pytest.mark.parametrize(
    "code",
    [
        "import socket\nsocket.socket(40, socket.SOCK_STREAM)",  # AF_VSOCK
        "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_RAW)",
        "open('/dev/kmsg', 'wb', 0)",
        "open('/dev/ptmx', 'wb', 0)",
        "import fcntl, os\nfcntl.fcntl(os.open({file!r}, os.O_RDONLY), 1024, 0)",  # a lease
        "import os\nos.open({fifo!r}, os.O_RDWR)",
        "import os\nos.open({fifo!r}, os.O_WRONLY | os.O_NONBLOCK)",
        "import os\nos.truncate({file!r}, 0)",
        "import os\nos.chmod({file!r}, 0)",
        "import os\nos.setxattr({file!r}, 'user.x', b'')",
        "import os\nos.utime({file!r})",
        "open('/proc/self/oom_score_adj', 'w')",
        "open('/proc/sys/kernel/pid_max', 'w')",
        "import ctypes, platform\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "number = {{'x86_64': 248, 'aarch64': 217}}[platform.machine()]\n"
        "if libc.syscall(number, b'user', b'kempner', b'x', 1, -4) < 0:\n"  # of this user
        "    raise OSError(ctypes.get_errno(), '')",
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.msgget(7, 0o1600) < 0: raise OSError(ctypes.get_errno(), '')",
    ],
)
def test_nothing_of_the_host_is_opened_for_writing(
    scorer: Scorer, tmp_path: Path, code: str
) -> None:
    if "fifo" in code and not has_landlock():
        pytest.skip("this kernel has no Landlock")
    file, fifo = tmp_path / "file", tmp_path / "fifo"
    file.write_text("of the host")
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    found = run(scorer, code.format(file=str(file), fifo=str(fifo)))
    os.close(reader)
    assert found.reward is None and "Error" in found.why
    assert "SyntaxError" not in found.why and "NameError" not in found.why


def has_landlock() -> bool:
    create = landlock.CREATE_RULESET
    return limits._libc.syscall(create, None, 0, landlock.VERSION) >= landlock.FIRST_LANDLOCK_ABI  # type: ignore[no-any-return]


def test_locks_of_the_host_stay_free(scorer: Scorer, tmp_path: Path) -> None:
    """A program may lock files of its own; that costs nobody else a wait."""
    path = tmp_path / "lock"
    path.touch()
    go = tmp_path / "go"
    code = (
        "import fcntl, os, time\n"
        f"file = open({str(path)!r})\n"
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    )
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(run, scorer, code)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and not waits.done():
            with path.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(0.01)
        go.touch()
        assert waits.result() == Score(1.0)


def test_only_its_own_processes_and_devices_are_there(scorer: Scorer) -> None:
    code = (
        "import os\n"
        "pids = [int(name) for name in os.listdir('/proc') if name.isdigit()]\n"
        "result = float(pids == [os.getpid()])"
    )
    assert run(scorer, code) == Score(1.0)
    names = {*limits.DEVICES, *limits.LINKS, "shm"}
    code = f"import os\nassert set(os.listdir('/dev')) == {names}"
    assert run(scorer, code) == Score(1.0)
    code = (
        "assert open('/dev/zero', 'rb').read(2) == bytes(2)\nopen('/dev/urandom', 'rb').read(1)\n"
        "for name in ('null', 'zero'): open('/dev/' + name, 'w').write('x')"
    )
    assert run(scorer, code) == Score(1.0)


def test_gpus_are_not_seen(scorer: Scorer) -> None:
    code = "import os; result = float(os.environ['CUDA_VISIBLE_DEVICES'] == '')"
    assert run(scorer, code) == Score(1.0)


def without_namespaces(
    folder: Path, program: str, *more: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """A program of a run that scores code, on a host that does not allow them."""
    (folder / "rl.toml").write_text('[[rl.env]]\nid = "code"\n')
    words = [
        sys.executable, str(ROOT / "scripts" / program), str(folder / "rl.toml"),
        f"--run.dir={folder / 'run'}", "--rl.tokenizer=bytes", "--model.vocab_size=257",
        "--train.seq_len=512", *more,
    ]  # fmt: skip
    code = (
        "import os, sys\nfrom tests.refused_calls import *\n"
        "system_calls.install_filter({NUMBERS['unshare']: errno.EPERM})\n"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        env=clean_env(**env),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.parametrize("program", ["rl.py", "orchestrate.py"])
def test_a_check_finds_that_programs_cannot_be_isolated(tmp_path: Path, program: str) -> None:
    """On a node of a job, and where there is no Slurm; a login node may differ from the nodes."""
    slurm = tmp_path / "bin" / "sbatch"
    slurm.parent.mkdir()
    slurm.write_text("")
    slurm.chmod(0o755)
    path = f"{slurm.parent}:{os.environ['PATH']}"
    done = without_namespaces(tmp_path, program, "--check", PATH=path)
    assert done.returncode == 0 and done.stdout, done.stderr
    assert 'warning: rl.env "code": runs programs' in done.stderr
    assert "the nodes of a job may have what this host lacks" in done.stderr
    done = without_namespaces(tmp_path, program, "--check", PATH=path, SLURMD_NODENAME="node1")
    assert done.returncode == 2 and not done.stdout, done.stderr
    assert 'rl.env "code": runs programs' in done.stderr and "`unsafe = true`" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()


def test_the_orchestrator_ends_before_anything_is_sampled(tmp_path: Path) -> None:
    """As bad input, with the way out."""
    urls = "--rl.inference.urls=['http://127.0.0.1:9']"
    done = without_namespaces(tmp_path, "orchestrate.py", urls)
    assert done.returncode == 2, done.stderr
    assert 'rl.env "code": runs programs' in done.stderr and "`unsafe = true`" in done.stderr
