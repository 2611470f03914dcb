"""Many starts of scripts/*.py for the price of one: a process that has imported torch and this
kit, and forks for each of them.

    with Forks() as forks:
        done = forks.run("plan", "runs/gone", cwd=folder)
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, NamedTuple

if __name__ != "__main__":
    from tests.conftest import clean_env

ROOT = Path(__file__).parent.parent
PATIENCE_S = 120  # for one program


class Done(NamedTuple):
    code: int
    out: str
    err: str


class Forks:
    """`run` is as subprocess.run of a program of scripts/, or of `-m MODULE`."""

    def __enter__(self) -> Forks:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=clean_env(),
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run(self, program: str, *words: object, cwd: Path, stdin: str | None = "") -> Done:
        """`stdin`: its text; None: it is closed."""
        request = {"words": [program, *map(str, words)], "cwd": str(cwd), "stdin": stdin}
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return Done(*json.loads(self._process.stdout.readline()))


def serve() -> None:
    import torch

    import kempner.checkpoint.checkpointer
    import kempner.extensions.hf.exporting
    import kempner.parallel.build
    import kempner.train.configure
    import kempner.train.recording.recorder  # noqa: F401

    torch.set_num_threads(1)  # a fork has none of its threads
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            if not (pid := os.fork()):
                start(request, out, err)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            texts = [file.seek(0) or file.read() for file in (out, err)]
        print(json.dumps([code, *texts]), flush=True)


def start(request: dict[str, Any], out: IO[str], err: IO[str]) -> None:
    """In the fork: become that program."""
    code = 1
    try:
        os.chdir(request["cwd"])
        os.close(0)
        sys.stdin = None  # type: ignore[assignment]
        if request["stdin"] is not None:
            given = os.memfd_create("stdin")  # it is descriptor 0, the lowest
            os.write(given, request["stdin"].encode())
            os.lseek(given, 0, os.SEEK_SET)
            sys.stdin = os.fdopen(given)
        for number, file in enumerate((out, err), 1):
            os.dup2(file.fileno(), number)
        program, *words = request["words"]
        script = ROOT / f"scripts/{program}.py"
        sys.argv = [str(script), *words]
        sys.path[0] = str(ROOT if program == "-m" else script.parent)
        signal.alarm(PATIENCE_S)
        if program == "-m":
            sys.argv = words
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
