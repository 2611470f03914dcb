"""What the tests of whole programs under run.sh (tests/slurm/test_run.py) do not come by: requests
before all ranks are there, and signals without a name."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kempner.config.option import ConfigError
from kempner.program.channel import Channel, serve
from kempner.program.coordinator import Coordinator
from kempner.program.copy import Copy, check_code
from kempner.program.options import parse
from kempner.program.verdict import Ending, judge

Meet = Callable[..., Coordinator]


@pytest.fixture
def meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Meet:
    """The coordinator of two ranks, once it has ended; only rank 0 has come, and acts."""
    monkeypatch.setenv("KEMPNER_ATTEMPT_ID", "7.0")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    def run(act: Callable[[Channel], object]) -> Coordinator:
        options = parse([f"--run-dir={tmp_path / 'run'}", "--", "true"])
        with serve() as server:
            coordinator = Coordinator(options, 2, server, "127.0.0.1")
            thread = threading.Thread(target=coordinator.run)
            thread.start()
            rank = Channel.connect("127.0.0.1", server.getsockname()[1], 10.0)
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
    assert "did not come" not in capfd.readouterr().err


def test_a_rank_that_leaves_before_the_start(meet: Meet, capfd: pytest.CaptureFixture[str]) -> None:
    assert meet(Channel.close).code == 1
    assert "ranks [0] of 2 left before the start: see srun's messages" in capfd.readouterr().err


def test_a_signal_without_a_name() -> None:
    outcome = judge([Ending(0, "n1", -40, "")], "", False, False, False)
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
    copy = Copy(origin, root)
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
    monkeypatch.setattr("kempner.program.coordinator.START_S", 1.0)  # for the other rank
    monkeypatch.setenv("KEMPNER_COPY", "/nowhere/code/0123456789ab")
    assert meet(lambda rank: None).code == 2
    assert "the copy of the program's code is gone: " in capfd.readouterr().err
