"""A fork of the zygote is what a true start is, and a test that fails leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import zygote
from tests.conftest import ROOT, clean_env
from tests.waiting import LIMIT_S

PROBE = """\
import atexit, json, os, pickle, random, signal, sys, threading
class Mine: pass
about = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "name": __name__,
    "file": __file__, "spec": __spec__ and __spec__.name, "package": __package__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "pickled": type(pickle.loads(pickle.dumps(Mine()))) is Mine,
    "cwd": os.getcwd(), "env": {k: v for k, v in os.environ.items()},
    "signals": {s.name: str(signal.getsignal(s)).split(" at ")[0] for s in signal.Signals},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "leads": os.getsid(0) == os.getpid(), "group": os.getpgid(0) == os.getpid(),
    "descriptors": [n for n in range(3, 64) if os.path.exists(f"/proc/self/fd/{n}")],
    "threads": threading.active_count(), "tasks": len(os.listdir("/proc/self/task")),
    "stdin": sys.stdin.read(), "flags": sys.flags.dont_write_bytecode,
    "streams": [
        (x.name, x.mode, x.encoding, x.errors, x.line_buffering, x.write_through, x.isatty(),
         type(x.buffer).__name__)
        for x in (sys.stdout, sys.stderr)
    ],
}
print(json.dumps(about))
late = lambda: (print("late"), sys.stdout.flush())
atexit.register(late)
thread = threading.Thread(target=lambda: __import__("time").sleep(0.1) or print("thread"))
thread.start()
how = sys.argv[1]
if how == "raise": raise ValueError("wrong")
if how == "text": sys.exit("a text")
if how == "kill": sys.stdout.flush() or os.kill(os.getpid(), 9)
sys.exit(int(how))
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    script = tmp_path_factory.mktemp("probe") / "probe.py"
    script.write_text(PROBE)
    return script


def ends(start: Any, words: list[str], **more: Any) -> tuple[Any, ...]:
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = start([sys.executable, *words], **streams, text=True, **more)
    out, err = process.communicate("a\nb", timeout=LIMIT_S)
    first, *rest = out.splitlines()
    about = json.loads(first)
    about["env"].pop(zygote.OWNER, None)
    # Not of a trace: it begins in tests/zygote.py
    return about, rest, err.splitlines()[-1:], process.returncode


@pytest.mark.parametrize("how", ["0", "3", "text", "raise", "kill"])
@pytest.mark.parametrize("form", ["script", "-u", "-m"])
def test_a_fork_is_a_true_start(probe: Path, tmp_path: Path, form: str, how: str) -> None:
    words = {"script": [str(probe)], "-u": ["-u", str(probe)], "-m": ["-m", "probe"]}[form]
    cwd = probe.parent if form == "-m" else tmp_path
    more = {"cwd": cwd, "env": clean_env(GIVEN="this"), "start_new_session": how == "3"}
    forked, true = (ends(x, [*words, how], **more) for x in (zygote.Popen, subprocess.Popen))
    assert forked == true
    assert true[0]["env"]["GIVEN"] == "this" and true[3] == {
        "0": 0, "3": 3, "text": 1, "raise": 1, "kill": -9
    }[how]  # fmt: skip


def test_what_a_fork_cannot_have_starts_truly(probe: Path) -> None:
    def start(words: list[Any], **more: Any) -> bool:
        more = {
            "env": clean_env(),
            "stdout": subprocess.DEVNULL,
            "stdin": subprocess.DEVNULL,
        } | more
        with zygote.Popen(words, **more) as process:
            assert process.wait(LIMIT_S) == 0
        return process.forked

    script = [sys.executable, probe, "0"]
    assert start(script)
    assert not start([sys.executable, "-c", "pass"])
    assert not start([sys.executable, "-I", "-S", "-c", "pass"])
    assert not start(["true"])
    for name, value in (("OMP_NUM_THREADS", "2"), ("PYTHONHASHSEED", "0"), ("LC_ALL", "C")):
        assert not start(script, env=clean_env() | {name: value}), name
    assert not start(script, preexec_fn=lambda: None)


WAITS = "import os, signal, time\nprint(os.getpid(), flush=True)\n"


def test_signals_and_waits(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS + "time.sleep(600)\n")
    words = [sys.executable, str(script)]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        process = zygote.Popen(
            words, env=clean_env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and int(process.stdout.readline()) == process.pid
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(number)
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == -number and process.poll() == -number
        assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)


def test_forks_do_not_share_their_dice(tmp_path: Path) -> None:
    script = tmp_path / "dice.py"
    script.write_text("import numpy, random\nprint(random.random(), numpy.random.random())\n")
    more = {"env": clean_env(), "capture_output": True, "text": True}
    draw = [zygote.run([sys.executable, str(script)], **more) for _ in (1, 2)]
    first, second = (done.stdout.split() for done in draw)
    assert len(first) == 2 and not set(first) & set(second)


def test_ranks_of_torchrun_are_forks(tmp_path: Path) -> None:
    """The interpreter of each has torch before the first line."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys\nknown = 'torch' in sys.modules\n"
        "print(os.environ['RANK'], known, os.getsid(0) == os.getpid())\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\n"
    )
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = zygote.run(
        [sys.executable, *words], env=clean_env(), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert sorted(done.stdout.splitlines()) == ["0 True True", "1 True True"]
    assert done.returncode == 1 and "exitcode  : -9" in done.stderr, done.stderr


FAILS = """
import os, subprocess, sys, time
from pathlib import Path
import pytest
from tests import zygote
from tests.conftest import start_train
from tests.trainer.unit.test_zygote import words_of

HERE = Path(__file__).parent
(HERE / "waits.py").write_text('''
import os, subprocess, sys, time
from pathlib import Path
beside = subprocess.Popen(["sleep", "600"], start_new_session=True)
name = Path(__file__).parent / f"pids-{os.getpid()}"
name.with_suffix(".new").write_text(f"{os.getpid()} {beside.pid}")
name.with_suffix(".new").rename(name)
time.sleep(600)
''')

def start(nproc, **env):
    process = start_train(program=str(HERE / "waits.py"), nproc=nproc, **env)
    (HERE / f"pids-launcher-{process.pid}").write_text(str(process.pid))

def started(count):
    while len(list(HERE.glob("pids-*[0-9]"))) < count:
        time.sleep(0.05)

@pytest.fixture(scope="module")
def broken():
    start(1)
    started(2)
    assert False

def test_in_a_fixture(broken): pass

def test_in_the_body():
    start(2)
    start(1, OMP_NUM_THREADS="2")
    started(2 + 3 + 2)
    assert False

def test_nothing_is_left_of_those():
    pids = [int(pid) for file in HERE.glob("pids-*[0-9]") for pid in file.read_text().split()]
    assert len(pids) == 3 + 5 + 3 and not list(filter(words_of, pids))

def test_at_a_kill():
    start(1)
    started(2 + 3 + 2 + 2)
    os.kill(os.getpid(), 9)
"""


def test_a_test_that_fails_leaves_no_process_behind(tmp_path: Path) -> None:
    test = tmp_path / "test_fails.py"
    test.write_text(FAILS)
    words = ["-p", "tests.conftest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-v"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(test)],
        cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    said = [line for line in done.stdout.splitlines() if "::" in line]
    assert done.returncode == -9, done.stdout + done.stderr
    for name, how in (("fixture", "ERROR"), ("body", "FAILED"), ("those", "PASSED")):
        assert any(how in line for line in said if name in line), done.stdout + done.stderr
    pids = [int(x) for file in tmp_path.glob("pids-*[0-9]") for x in file.read_text().split()]
    end = time.monotonic() + 30
    while left := [pid for pid in pids if b"zygote.py" in words_of(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.05)
    for pid in filter(words_of, pids):  # what a fork has started outlives a pytest that is killed
        zygote.kill(pid)


def words_of(pid: int) -> bytes:
    """Empty when there is no such process, or one that only waits to be reaped."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
