"""What a checkpoint holds, how a save that fails is answered, and that no file runs code."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import re
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kempner.checkpoint import commit, history
from kempner.checkpoint.checkpointer import Checkpointer
from kempner.checkpoint.config import CheckpointConfig
from kempner.checkpoint.format.reader import DataFile
from kempner.checkpoint.state import ModelState, run_state
from kempner.config.option import ConfigError
from kempner.jobs.lock import RunLock
from kempner.train.resilience.inquiry import recorded_calls

DATA = "ranks-000/__0_0.distcp"
DOCS = Path(__file__).parents[3] / "docs/reference/checkpoints.md"


pytestmark = pytest.mark.usefixtures("one_process")


class Job:
    """A model, its optimizer, and their Checkpointer: what one start of a run has."""

    def __init__(
        self, root: Path, seed: int = 0, dim: int = 64, run: str = "a", **cfg: Any
    ) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.RMSNorm(64))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.log: list[str] = []
        contents = {"config.toml": "[model]\n"}, {"run": run, "fixed": {"model": {"dim": dim}}}
        state = run_state(self.model, self.optimizer)
        self.checkpointer = Checkpointer(
            CheckpointConfig(**cfg), root, state, contents, self.log.append
        )

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.model(torch.randn(8, 64)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, step: int) -> None:
        self.checkpointer.save(step, {"samples": 8 * step, "tokens": 80 * step})
        self.checkpointer.wait()

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that must come back, cloned."""
        state = {f"model.{name}": p.detach().clone() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            for key, value in self.optimizer.state[p].items():
                state[f"{name}.{key}"] = value.clone()
        return state | {"rng": torch.get_rng_state()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


@pytest.mark.parametrize("async_save", [True, False], ids=["async", "sync"])
def test_everything_comes_back(tmp_path: Path, async_save: bool) -> None:
    job = Job(tmp_path, async_save=async_save)
    assert job.checkpointer.load() is None
    job.train(3)
    job.save(3)
    expected = job.state()
    assert "0.weight.exp_avg" in expected and "1.weight.step" in expected
    other = Job(tmp_path, seed=1)
    manifest = other.checkpointer.load()
    assert manifest is not None and manifest["step"] == 3 and manifest["tokens"] == 240
    assert same(other.state(), expected)
    assert other.checkpointer.saved_step == 3
    for each in (job, other):  # the optimizer works with the loaded state
        torch.set_rng_state(expected["rng"])
        each.train()
    assert same(other.state(), job.state())


def test_async_equals_sync_although_the_steps_go_on(tmp_path: Path) -> None:
    sums = []
    for name in ("async", "sync"):
        job = Job(tmp_path / name, async_save=name == "async")
        job.train(2)
        job.checkpointer.save(2, {"samples": 16})
        job.train(5)  # while the file is written
        job.checkpointer.close()
        latest = tmp_path / name / "latest"
        with DataFile(latest, history.read_manifest(latest), 0) as file:
            sums.append(file.index["crc32"])
    assert sums[0] == sums[1]


def test_the_position_is_that_of_the_save_although_the_steps_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer counts on in the very dict that it has given."""
    job, may_write = Job(tmp_path), threading.Event()
    job.train()
    real = commit.commit_save

    def late(*args: Any) -> Path:
        assert may_write.wait(10)
        return real(*args)

    monkeypatch.setattr(commit, "commit_save", late)
    at: dict[str, Any] = {"step": 1, "samples": 8, "tokens": 80, "skip": [[1, 2]]}
    job.checkpointer.save(1, at)
    at |= {"step": 2, "samples": 16, "tokens": 160}
    at["skip"].append([3, 4])
    may_write.set()
    job.checkpointer.wait()
    manifest = history.read_manifest(tmp_path / "step_00000001")
    expected = {"step": 1, "samples": 8, "tokens": 80, "skip": [[1, 2]]}
    assert {key: manifest[key] for key in expected} == expected


def saved(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if not name.startswith("."))


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train()
    job.save(1)
    before = (tmp_path / "step_00000001").stat().st_mtime_ns
    job.save(1)
    assert (tmp_path / "step_00000001").stat().st_mtime_ns == before
    again = Job(tmp_path)
    again.checkpointer.load()
    again.save(1)  # nor by the start that has loaded it
    assert (tmp_path / "step_00000001").stat().st_mtime_ns == before
    assert saved(tmp_path) == ["latest", "step_00000001"]


def test_a_load_in_the_middle_takes_the_save_in_flight(tmp_path: Path) -> None:
    """A run that goes back must not sweep away what is being written."""
    job = Job(tmp_path)
    job.train()
    job.checkpointer.save(1, {"samples": 8, "tokens": 80})
    manifest = job.checkpointer.load()
    assert manifest is not None and manifest["step"] == 1


def test_a_save_in_the_background_is_no_wait_of_a_step(tmp_path: Path) -> None:
    """A rank that is slow to write would be the only one that waits for nobody."""
    before = recorded_calls(saves=False)[1]
    job = Job(tmp_path)
    job.train()
    job.save(1)
    assert recorded_calls(saves=False)[1] == before
    # Where a rank waits for its save it does count.
    assert "all_reduce" in {call.name for call in recorded_calls(saves=True)[1] or ()}


# --- A disk that does not take it ---------------------------------------------------------------


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Longer files fail to be written, by the kernel, with an OSError as a full disk has it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("async_save", [True, False], ids=["async", "sync"])
def test_a_save_that_fails_is_counted_and_latest_stays(tmp_path: Path, async_save: bool) -> None:
    job = Job(tmp_path, async_save=async_save)
    job.train()
    job.save(1)
    for step in (2, 3):
        with files_of_at_most(8192):
            job.save(step)
        assert job.checkpointer.failed_saves == step - 1 and job.checkpointer.saved_step == 1
        assert f"WARNING: the checkpoint of step {step} failed: rank 0:" in job.log[-1]
        assert "File too large" in job.log[-1]
        assert history.latest_checkpoint(tmp_path) == tmp_path / "step_00000001"
        assert f"step_{step:08d}." in job.log[-1] and ".partial/ranks-000/" in job.log[-1]
        assert not list(tmp_path.glob("*.partial"))  # it must not keep the disk full
    job.save(4)
    assert job.checkpointer.failed_saves == 0 and job.checkpointer.saved_step == 4
    assert history.latest_checkpoint(tmp_path) == tmp_path / "step_00000004"
    assert not list(tmp_path.glob("*.partial"))


# --- Checkpoints that do not hold ---------------------------------------------------------------


def two_saves(root: Path) -> Path:
    """Steps 1 and 2; returns the directory of step 2."""
    job = Job(root)
    for step in (1, 2):
        job.train()
        job.save(step)
    return root / "step_00000002"


def test_one_without_a_manifest_gives_way_to_the_one_before(tmp_path: Path) -> None:
    (two_saves(tmp_path) / "manifest.json").unlink()
    job = Job(tmp_path)
    manifest = job.checkpointer.load()
    assert manifest is not None and manifest["step"] == 1
    assert "step_00000002 is damaged" in job.log[0]
    names = ["latest", "step_00000001", "step_00000002.corrupt"]
    assert saved(tmp_path) == names
    assert history.latest_checkpoint(tmp_path) == tmp_path / "step_00000001"


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "other-step"])
def test_a_damaged_data_file_gives_way_to_the_one_before(tmp_path: Path, damage: str) -> None:
    file = two_saves(tmp_path) / DATA
    content = bytearray(file.read_bytes())
    content[20_000] ^= 1
    if damage == "remove":
        file.unlink()
    elif damage == "other-step":
        file.write_bytes((tmp_path / "step_00000001" / DATA).read_bytes())
    else:
        file.write_bytes(content if damage == "flip" else content[:-1])
    job = Job(tmp_path)
    manifest = job.checkpointer.load()
    assert manifest is not None and manifest["step"] == 1
    assert f"step_00000002 is damaged ({file}" in job.log[0]
    assert (tmp_path / "step_00000002.corrupt").is_dir()


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), OSError(errno.EIO, "Input/output error")],
    ids=["memory", "disk"],
)
def test_what_does_not_prove_damage_leaves_checkpoints_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    two_saves(tmp_path)

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(DataFile, "read", fail)
    with pytest.raises(type(error)):
        Job(tmp_path).checkpointer.load()
    assert saved(tmp_path) == ["latest", "step_00000001", "step_00000002"]


@pytest.mark.parametrize("version", [1, 3])
def test_another_format_is_refused_and_stays(tmp_path: Path, version: int) -> None:
    manifest = two_saves(tmp_path) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": version}))
    with pytest.raises(ConfigError, match=f"format {version}, this version reads format 2"):
        Job(tmp_path).checkpointer.load()
    assert saved(tmp_path) == ["latest", "step_00000001", "step_00000002"]


def test_a_tensor_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_saves(tmp_path)
    new = {"new": torch.ones(1)}
    restore = ModelState.restore
    monkeypatch.setattr(ModelState, "restore", lambda self, stored: new | restore(self, stored))
    with pytest.raises(ConfigError, match=r"has no model\.new of"):
        Job(tmp_path).checkpointer.load()
    assert saved(tmp_path) == ["latest", "step_00000001", "step_00000002"]


def test_when_none_holds_no_start_begins_from_nothing(tmp_path: Path) -> None:
    path = two_saves(tmp_path)
    for name in ("step_00000001", "step_00000002"):
        (tmp_path / name / DATA).write_bytes(b"")
    for _ in range(2):  # the first start has set them aside; the second must not overlook that
        with pytest.raises(RuntimeError, match=r"(?s)step_00000001.*run\.dir|step_00000002"):
            Job(tmp_path).checkpointer.load()
    aside = tmp_path / f"{path.name}.corrupt"
    assert sorted(p.name for p in tmp_path.glob("step_*")) == [
        "step_00000001.corrupt",
        "step_00000002.corrupt",
    ]
    aside.rename(path)  # repaired and renamed back, as the message says
    (path / DATA).write_bytes(b"")
    with pytest.raises(RuntimeError):
        Job(tmp_path).checkpointer.load()


def test_one_of_another_model_is_refused_and_stays(tmp_path: Path) -> None:
    two_saves(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.dim is 64 there, 128 here"):
        Job(tmp_path, dim=128).checkpointer.load()
    assert saved(tmp_path) == ["latest", "step_00000001", "step_00000002"]


def test_another_runs_checkpoints_are_refused(tmp_path: Path) -> None:
    two_saves(tmp_path)
    with pytest.raises(ConfigError, match=r"id a, this run has id b\).*checkpoint\.dir"):
        Job(tmp_path, run="b").checkpointer.load()
    assert saved(tmp_path) == ["latest", "step_00000001", "step_00000002"]


def test_two_live_runs_cannot_share_a_directory(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    held = Job(root, dir=str(root))
    with pytest.raises(ConfigError, match=r"is in use by .*--checkpoint\.dir=DIR"):
        Job(root, dir=str(root))
    held.checkpointer.close()
    Job(root, dir=str(root)).checkpointer.close()


@pytest.mark.parametrize("lost", ["run", "checkpoints"])
def test_nothing_is_committed_once_the_run_is_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """This process believes that it lives. Both locks are looked at before `latest` moves: that of
    the run, and that of --checkpoint.dir."""

    def leave(code: int) -> None:
        raise RuntimeError(f"exit code {code}")

    root = tmp_path / "checkpoints"
    (tmp_path / "run").mkdir()
    job = Job(root, dir=str(root))
    job.checkpointer._run_lock = RunLock(tmp_path / "run")
    job.train()
    job.save(1)
    monkeypatch.setattr(os, "_exit", leave)
    (tmp_path / lost / "lock").write_text('{"host": "n7", "pid": 7}')
    job.save(2)
    assert "failed: rank 0: RuntimeError: exit code 77;" in job.log[-1]
    assert history.latest_checkpoint(root) == root / "step_00000001"
    assert not (root / "step_00000002").exists()
    job.checkpointer._run_lock.release()
    job.checkpointer.close()


def test_no_file_can_run_code(tmp_path: Path) -> None:
    """`.metadata`, the one pickle, is for other programs: loading does not read it."""
    root, marker = tmp_path / "checkpoints", tmp_path / "was-run"
    path = two_saves(root)
    (path / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    job = Job(root)
    manifest = job.checkpointer.load()
    assert manifest is not None and manifest["step"] == 2 and not marker.exists()
    pickle.loads((path / ".metadata").read_bytes())  # the attack works where nobody guards
    assert marker.exists()


class Evil:
    """Unpickled without care, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


# --- Going back ---------------------------------------------------------------------------------


def test_a_restart_knows_what_to_leave_out(tmp_path: Path) -> None:
    """The run goes back, dies before its next save, and starts again."""
    two_saves(tmp_path)
    job = Job(tmp_path)
    job.checkpointer.load()
    job.checkpointer.remember_skip([[16, 24]])
    again = Job(tmp_path)
    manifest = again.checkpointer.load()
    assert manifest is not None and manifest["skip"] == [[16, 24]]
    again.save(3)
    manifest = Job(tmp_path).checkpointer.load()  # from here on it is in the manifest itself
    assert manifest is not None and manifest["step"] == 3 and "skip" not in manifest


# --- Retention ----------------------------------------------------------------------------------


def test_deleting_is_not_part_of_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the next save wait for it, nor a job that has to leave."""
    may_delete, began = threading.Event(), threading.Event()
    real = commit.prune_checkpoints

    def slow(*args: Any) -> None:
        began.set()
        assert may_delete.wait(60)
        real(*args)

    monkeypatch.setattr(commit, "prune_checkpoints", slow)
    job = Job(tmp_path, keep_last_n=1)
    job.save(1)
    job.checkpointer.poll()
    assert began.wait(60)
    job.save(2)
    assert job.checkpointer.saved_step == 2
    job.checkpointer.close(prune=False)
    assert saved(tmp_path) == ["latest", "step_00000001", "step_00000002"]
    may_delete.set()


# --- The page -----------------------------------------------------------------------------------


def test_the_example_of_the_docs_loads_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    job = Job(tmp_path / "runs/debug/checkpoints")
    job.train(40)
    job.save(40)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block, names)
    assert "step 40" in capsys.readouterr().out
    expected = {f"model.{name}": p for name, p in job.model.named_parameters()}
    assert names["state"].keys() == expected.keys()
    assert all(torch.equal(names["state"][name], expected[name]) for name in expected)
