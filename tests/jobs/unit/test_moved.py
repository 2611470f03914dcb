"""Modules under their names of before version 0.2.0 are those of today."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

from kempner import MOVED
from tests.conftest import ROOT, clean_env

BELOW = {
    "kempner.rl.environments.protocol": "kempner.extensions.rl.environments.protocol",
    "kempner.history.events": "kempner.jobs.records.events",
}


@pytest.mark.parametrize(("old", "today"), [*MOVED.items(), *BELOW.items()])
def test_an_old_name_is_the_module_of_today(old: str, today: str) -> None:
    module = importlib.import_module(old)
    assert module is importlib.import_module(today)
    assert (
        module.__name__ == today and module.__spec__ is not None and module.__spec__.name == today
    )


def test_a_program_of_before() -> None:
    """The four lines of a program under run.sh, an environment of RL, and a module as a program."""
    lines = (
        "from kempner import slurm; assert slurm.stop_requested() is False",
        "from kempner.rl.environments.protocol import Environment, Task",
        "import kempner.extensions.rl.environments.protocol as now; assert now.Task is Task",
    )
    words = (["-c", "\n".join(lines)], ["-m", "kempner.lowcomm.judge", "--help"])
    for each in words:
        done = subprocess.run(
            [sys.executable, *each],
            cwd=ROOT / "src",
            env=clean_env(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


def test_what_is_in_no_version() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"kempner\.rl\.nothing"):
        importlib.import_module("kempner.rl.nothing")
    assert importlib.util.find_spec("kempner.slurms") is None
