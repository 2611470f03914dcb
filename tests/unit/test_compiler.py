"""A host that cannot compile for its GPUs says so before it trains, and what to do."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest
import torch

from kempner import compiler, process_group
from kempner.config.option import ConfigError
from kempner.process_group import World
from tests.conftest import ROOT, clean_env, load_program


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its programs; what is installed here does not count."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("CC", raising=False)
    return programs


def add(program: Path) -> None:
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_a_compiler_and_the_headers_are_enough(host: Path, name: str) -> None:
    add(host / name)
    assert compiler.lacking() is None
    compiler.need(True)
    (host.parent / "Python.h").unlink()
    with pytest.raises(ConfigError, match=r"has no .*/Python\.h: install python3-dev"):
        compiler.need(True)
    compiler.need(False)  # nothing is compiled, or there is no GPU


def test_a_host_without_a_compiler(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(host / "cc")  # Triton does not look for this name
    with pytest.raises(ConfigError, match=r"no gcc or clang: .*module load gcc.*compile=false"):
        compiler.need(True)
    monkeypatch.setenv("CC", "icc")
    with pytest.raises(ConfigError, match="CC=icc is no program on"):
        compiler.need(True)
    add(host / "gcc")
    with pytest.raises(ConfigError, match="CC=icc"):  # it takes the name that it is given
        compiler.need(True)


@pytest.mark.parametrize("name", ["train", "rl"])
def test_each_rank_looks_before_it_meets_the_others(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """And keeps near its GPU before it has memory."""
    program, world, done = load_program(name), World(0, 0, 1, "single"), []
    cfg = types.SimpleNamespace(
        distributed=types.SimpleNamespace(device="cuda"), train=types.SimpleNamespace(compile=True)
    )

    def need(compiles: bool) -> None:
        done.append(("compiler", compiles))
        raise ConfigError("no compiler")

    def near(device: torch.device, world: World) -> None:
        done.append(("near", str(device)))

    def refuse(error: ConfigError, stop: object) -> None:
        raise SystemExit(str(error))

    monkeypatch.setattr(compiler, "need", need)
    monkeypatch.setattr(process_group, "stay_near", near)
    monkeypatch.setattr(process_group, "discover", lambda: world)
    monkeypatch.setattr(process_group, "pick_device", lambda kind, rank: torch.device(kind, rank))
    monkeypatch.setattr(program, "reject", refuse)
    with pytest.raises(SystemExit, match="no compiler"):
        program.main.args[0](cfg, None)
    assert done == [("near", "cuda:0"), ("compiler", True)]


def test_the_check_of_a_job_on_gpus_finds_it_before_the_ranks_start(tmp_path: Path) -> None:
    card = tmp_path / "sys/bus/pci/devices/0000:17:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    command = [sys.executable, "scripts/train.py", "configs/train/debug.toml", "--check"]
    env = clean_env() | {"CC": "no-compiler", "KEMPNER_SYS": str(tmp_path / "sys")}

    def check(*words: str, **more: str) -> tuple[int, str]:
        done = subprocess.run(
            [*command, "--data.dataset_path=fake:", f"--run.dir={tmp_path}/run", *words],
            env=env | more, cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stderr

    given = {"SLURM_GPUS_ON_NODE": "1"}
    code, said = check("--train.compile", **given)
    assert code == 2 and "  - train.compile on a GPU needs a C compiler" in said
    assert check("--no-train.compile", **given) == (0, "")
    assert check("--train.compile", "--distributed.device=cpu", **given) == (0, "")
    code, said = check("--train.compile")  # a login node
    assert code == 0 and "warning: train.compile" in said and "of a job may have" in said
