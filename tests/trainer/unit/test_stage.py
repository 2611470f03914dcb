"""kempner.data.prepare.stage: copies that are whole, or not there."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kempner.data.prepare.stage import stage_data, staged_dir
from tests.conftest import ROOT


def run(*words: object, most: int = -1) -> subprocess.CompletedProcess[str]:
    """`most`: bytes that a file may have."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    command = [sys.executable, "-m", "kempner.data.prepare.stage", *map(str, words)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, capture_output=True, text=True, env=env, preexec_fn=limit)


def test_a_disk_that_fills_up_in_the_middle_leaves_nothing_and_one_warning(
    data_dir: Path, tmp_path: Path
) -> None:
    root = tmp_path / "kempner-17"
    done = run("--jobs", "17", root, data_dir, most=100_000)
    assert done.returncode == 0 and done.stderr.count("\n") == 1
    assert f"{data_dir} is not copied to {root} (File too large)" in done.stderr
    assert os.listdir(root) == [".kempner"]
    assert "copied to" in run("--jobs", "17", root, data_dir).stdout
    assert "is kept" in run("--jobs", "17", root, data_dir).stdout


def test_a_copy_is_used_while_it_is_that_of_these_data(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, root = tmp_path / "data", tmp_path / "kempner-1"
    data.mkdir()
    for file in data_dir.iterdir():
        (data / file.name).write_bytes(file.read_bytes())
    assert staged_dir(data) == data
    stage_data(data, root)
    monkeypatch.setenv("KEMPNER_STAGED", str(root))
    copy = staged_dir(data)
    assert copy.parent == root
    assert {f.name: f.read_bytes() for f in copy.iterdir()} == {
        f.name: f.read_bytes() for f in data.iterdir()
    }
    (copy / "train_00000.npy").write_bytes(b"cut off")  # by whatever
    assert "copied to" in stage_data(data, root)
    sidecar = json.loads((data / "dataset.json").read_text())
    (data / "dataset.json").write_text(json.dumps(sidecar))  # the data were prepared again
    assert staged_dir(data) == data


def test_a_disk_that_gives_back_other_bytes_is_not_used(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(path: Path) -> None:
        with open(path, "rb+") as file:
            file.write(b"?")

    monkeypatch.setattr("kempner.data.prepare.stage.fsync", spoil)
    with pytest.raises(OSError, match="differs from what was written"):
        stage_data(data_dir, tmp_path / "kempner-1")
    assert os.listdir(tmp_path / "kempner-1") == [".kempner"]


def test_what_this_kit_has_not_put_on_the_disk_stays_there(data_dir: Path, tmp_path: Path) -> None:
    """Another program's directory may have the name of a job: it is neither used nor removed."""
    for name in ("kempner-3", "kempner-17"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    stage_data(data_dir, tmp_path / "kempner-5")  # of a job that is no longer there
    done = run("--jobs", "17", tmp_path / "kempner-17", data_dir)
    assert done.returncode == 0 and "a directory of other files (notes.txt)" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["kempner-17", "kempner-3"]
    stage_data(data_dir, tmp_path / "kempner-8")
    script = Path(__file__).parents[3] / "scripts/slurm/lib/stage_node.sh"
    for name in ("kempner-8", "kempner-17"):
        subprocess.run(["bash", script, "--remove", tmp_path / name], check=True)
    assert not (tmp_path / "kempner-8").exists()
    assert (tmp_path / "kempner-17" / "notes.txt").read_text() == "mine"
