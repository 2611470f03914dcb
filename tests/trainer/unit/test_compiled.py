"""Where compiled kernels are kept between the starts of a run."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from kempner.jobs.ranks.placement import World
from kempner.jobs.system.compiler import CACHE, HEADERS, keep_private
from kempner.parallel import compiled
from kempner.parallel.compiled import keep_compiled

ALONE = World(0, 0, 1, "single")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.dist, "all_reduce", lambda tensor: None)
    for name in (CACHE, HEADERS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def place(host: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(CACHE, raising=False)
    monkeypatch.setattr(compiled, "host_name", lambda: host)
    keep_compiled(run, ALONE)
    return Path(os.environ[CACHE])


def test_each_host_keeps_its_own_and_a_new_one_begins_with_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = place("a", tmp_path, monkeypatch)
    (first / "kernel.so").write_text("1")
    assert place("a", tmp_path, monkeypatch) == first
    second = place("b", tmp_path, monkeypatch)
    assert second != first and (second / "kernel.so").read_text() == "1"
    monkeypatch.setattr(compiled, "kind_of_cpu", lambda: "other")
    assert not (place("c", tmp_path, monkeypatch) / "kernel.so").exists()


def test_the_users_place_and_one_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, "/mine")
    keep_compiled(tmp_path, ALONE)
    assert os.environ[CACHE] == "/mine" and list(tmp_path.iterdir()) == []
    monkeypatch.delenv(CACHE)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def no_locks(*_: object) -> None:
        raise OSError("Function not implemented")

    monkeypatch.setattr(compiled.fcntl, "flock", no_locks)
    keep_compiled(tmp_path, ALONE)
    assert os.environ[CACHE] == str(tmp_path / f"kempner-compiled-{os.getuid()}")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_nobody_else_can_hold_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever could read the run held its lock, and so sent the compiler to /tmp."""
    own = place("a", tmp_path, monkeypatch)
    assert mode(own) == 0o700 and mode(own / ".lock") == 0o600
    own.chmod(0o755)  # of an older version
    assert mode(place("a", tmp_path, monkeypatch)) == 0o700
    assert mode(place("b", tmp_path, monkeypatch)) == 0o700


@pytest.mark.parametrize(("rank", "makes"), [(4, True), (5, False)])
def test_a_replica_that_shares_a_host_makes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, makes: bool
) -> None:
    monkeypatch.setattr(compiled, "host_name", lambda: "a")
    world = World(rank, rank, 8, "slurm", per_node=8).split(2, dist.HashStore())
    keep_compiled(tmp_path, world)
    assert world.replica == 1 and Path(os.environ[CACHE]).is_dir() == makes


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_a_place_that_another_user_has_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = tmp_path / f"kempner-compiled-{os.getuid()}"
    first.mkdir(mode=0o755)
    os.chown(first, 64_202, 64_202)
    keep_private()
    found = Path(os.environ[CACHE])
    assert found != first and found.parent == tmp_path and mode(found) == 0o700


COMPILES = """
import sys, torch
from kempner.model import flex
from kempner.parallel.compiled import compile_model

class Model(torch.nn.Module):
    def forward(self, x):
        return x.sin()

    def loss(self, x, compiled=None):
        return x

model = Model()
if sys.argv[1] == "model":
    compile_model(model, "model")
else:
    flex.compiled_flex()
    model.compile()
model(torch.ones(2))
"""


@pytest.mark.soak
@pytest.mark.parametrize("what", ["model", pytest.param("attention", marks=pytest.mark.soak)])
def test_nothing_of_the_compiler_is_where_others_can_be_first(tmp_path: Path, what: str) -> None:
    """Precompiled headers too, for which torch asks no option where to put them."""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COMPILES, what], env=env, check=True, timeout=300)
    own = tmp_path / f"kempner-compiled-{os.getuid()}"
    assert list(own.rglob("*.so")) and not list(tmp_path.glob("torchinductor_*"))
