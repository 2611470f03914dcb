"""Where compiled kernels are kept between the starts of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kempner.parallel import compiled
from kempner.parallel.compiled import CACHE, keep_compiled
from kempner.process_group import World

ALONE = World(0, 0, 1, "single")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.dist, "all_reduce", lambda tensor: None)
    monkeypatch.setenv(CACHE, "")
    monkeypatch.delenv(CACHE)


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
    monkeypatch.setattr(compiled, "_kind_of_cpu", lambda: "other")
    assert not (place("c", tmp_path, monkeypatch) / "kernel.so").exists()


def test_the_users_place_and_one_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, "/mine")
    keep_compiled(tmp_path, ALONE)
    assert os.environ[CACHE] == "/mine" and list(tmp_path.iterdir()) == []
    monkeypatch.delenv(CACHE)

    def no_locks(*_: object) -> None:
        raise OSError("Function not implemented")

    monkeypatch.setattr(compiled.fcntl, "flock", no_locks)
    keep_compiled(tmp_path, ALONE)
    assert CACHE not in os.environ
