"""kempner.data.stage: copies that are whole, or not there."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from kempner.data.stage import stage, staged
from tests.conftest import ROOT


def run(*words: object, most: int = -1) -> subprocess.CompletedProcess[str]:
    """`most`: bytes that a file may have."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    command = [sys.executable, "-m", "kempner.data.stage", *map(str, words)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, capture_output=True, text=True, env=env, preexec_fn=limit)


def test_a_disk_that_fills_up_in_the_middle_leaves_nothing_and_one_warning(
    data_dir: Path, tmp_path: Path
) -> None:
    root = tmp_path / "kempner-17"
    done = run("--jobs", "17", root, data_dir, most=100_000)
    assert done.returncode == 0 and done.stderr.count("\n") == 1
    assert f"{data_dir} is not copied to {root} (File too large)" in done.stderr
    assert list(root.iterdir()) == []
    assert "copied to" in run("--jobs", "17", root, data_dir).stdout
    assert "is kept" in run("--jobs", "17", root, data_dir).stdout


def test_a_copy_is_used_while_it_is_that_of_these_data(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, root = tmp_path / "data", tmp_path / "kempner-1"
    data.mkdir()
    for file in data_dir.iterdir():
        (data / file.name).write_bytes(file.read_bytes())
    assert staged(data) == data
    stage(data, root)
    monkeypatch.setenv("KEMPNER_STAGED", str(root))
    copy = staged(data)
    assert copy.parent == root
    assert {f.name: f.read_bytes() for f in copy.iterdir()} == {
        f.name: f.read_bytes() for f in data.iterdir()
    }
    (copy / "train_00000.npy").write_bytes(b"cut off")  # by whatever
    assert "copied to" in stage(data, root)
    sidecar = json.loads((data / "dataset.json").read_text())
    (data / "dataset.json").write_text(json.dumps(sidecar))  # the data were prepared again
    assert staged(data) == data


def test_a_disk_that_gives_back_other_bytes_is_not_used(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(path: Path) -> None:
        with open(path, "rb+") as file:
            file.write(b"?")

    monkeypatch.setattr("kempner.data.stage.fsync", spoil)
    with pytest.raises(OSError, match="is not what was written"):
        stage(data_dir, tmp_path / "kempner-1")
    assert list((tmp_path / "kempner-1").iterdir()) == []


def test_tasks_use_the_copied_environment(tmp_path: Path) -> None:
    """A small one; its copy runs from the other place, also when the first is gone."""
    first, root = tmp_path / "first", tmp_path / "kempner-1"
    venv.create(first, symlinks=True, with_pip=False)
    (package,) = first.glob("lib/python3*/site-packages")
    (package / "only_here.py").write_text("print(__file__)")
    python = first / "bin/python"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}

    def stage_it() -> str:
        command = [python, "-m", "kempner.data.stage", "--environment", root]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 0 and not done.stderr, done.stderr
        return done.stdout

    assert "copied to" in stage_it() and "is kept" in stage_it()
    package.rename(package.with_name("away"))
    staged_env = {"KEMPNER_STAGED": str(root), "KEMPNER_STAGED_PYTHON": str(python)}
    command = ["bash", ROOT / "scripts/slurm/lib/task.sh", python, "-c", "import only_here"]
    done = subprocess.run(command, capture_output=True, text=True, env=env | staged_env)
    assert f"{root}/environment/lib/python3" in done.stdout, done.stderr
