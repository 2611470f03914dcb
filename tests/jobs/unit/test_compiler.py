"""A host that cannot compile for its GPUs, or CPUs, says so before it trains, and what to do."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest
import torch

from kempner.config.option import ConfigError
from kempner.jobs.gpu import affinity
from kempner.jobs.ranks import own_device, placement
from kempner.jobs.ranks.placement import World
from kempner.jobs.system import compiler
from tests.conftest import ROOT, clean_env, load_program


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its programs; what is installed here does not count."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.setenv("PATH", str(programs))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return programs


def add(program: Path) -> None:
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)


@pytest.mark.parametrize(("name", "device"), [("gcc", "cuda"), ("clang", "cuda"), ("g++", "cpu")])
def test_a_compiler_and_the_headers_are_enough(host: Path, name: str, device: str) -> None:
    add(host / name)
    assert compiler.missing_compiler(device) is None
    compiler.require_compiler(device)
    (host.parent / "Python.h").unlink()
    with pytest.raises(ConfigError, match=r"has no .*/Python\.h: install python3-dev"):
        compiler.require_compiler(device)


@pytest.mark.parametrize(
    ("device", "name", "other", "variable", "said"),
    [
        ("cuda", "gcc", "cc", "CC", "on a GPU needs a C compiler.* no gcc or clang"),
        ("cpu", "g++", "clang++", "CXX", r"on a CPU needs a C\+\+ compiler.* no g\+\+"),
    ],
)
def test_a_host_without_a_compiler(
    host: Path, monkeypatch: pytest.MonkeyPatch, device: str, name: str, other: str,
    variable: str, said: str,
) -> None:  # fmt: skip
    add(host / other)  # nobody looks for this name
    with pytest.raises(ConfigError, match=f"{said}: .*module load gcc.*compile=false"):
        compiler.require_compiler(device)
    monkeypatch.setenv(variable, "icc")
    with pytest.raises(ConfigError, match=f"{variable}=icc is not a program on"):
        compiler.require_compiler(device)
    add(host / name)
    with pytest.raises(ConfigError, match=f"{variable}=icc"):  # the name that is given is taken
        compiler.require_compiler(device)


def test_each_rank_looks_before_it_meets_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps near its GPU before it has memory."""
    program, world, done = load_program("train"), World(0, 0, 1, "single"), []
    cfg = types.SimpleNamespace(
        distributed=types.SimpleNamespace(device="cuda"), train=types.SimpleNamespace(compile=True)
    )

    def need(device: str) -> None:
        done.append(("compiler", device))
        raise ConfigError("no compiler")

    def near(device: torch.device, world: World) -> None:
        done.append(("near", str(device)))

    def refuse(error: ConfigError, stop: object, leave: object) -> None:
        raise SystemExit(str(error))

    monkeypatch.setattr(compiler, "require_compiler", need)
    monkeypatch.setattr(affinity, "bind_to_socket", near)
    monkeypatch.setattr(placement, "discover_world", lambda: world)
    monkeypatch.setattr(own_device, "pick_device", lambda kind, rank: torch.device(kind, rank))
    monkeypatch.setattr(program, "reject_input", refuse)
    with pytest.raises(SystemExit, match="no compiler"):
        program.main.args[0](cfg, None)
    assert done == [("near", "cuda:0"), ("compiler", "cuda")]


def test_the_check_of_a_job_finds_it_before_the_ranks_start(tmp_path: Path) -> None:
    card = tmp_path / "sys/bus/pci/devices/0000:17:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    command = [sys.executable, "scripts/train.py", "configs/train/debug.toml", "--check"]
    env = clean_env() | {"CC": "no-compiler", "CXX": "no-compiler"}
    env |= {"KEMPNER_SYS": str(tmp_path / "sys")}

    def check(*words: str, **more: str) -> tuple[int, str]:
        done = subprocess.run(
            [*command, "--data.dataset_path=fake:", f"--run.dir={tmp_path}/run", *words],
            env=env | more, cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stderr

    given = {"SLURM_GPUS_ON_NODE": "1", "SLURMD_NODENAME": "n1"}
    code, said = check("--train.compile", **given)
    assert code == 2 and "  - train.compile on a GPU needs a C compiler" in said
    code, said = check("--no-train.compile", **given)
    # A torch that is built with CUDA adds which driver it needs.
    assert code == 0 and all("needs driver" in line for line in said.splitlines()), said
    for words, node in (
        (["--distributed.device=cpu"], given),
        ([], {"SLURMD_NODENAME": "n1"}),  # a job without GPUs
    ):
        code, said = check("--train.compile", *words, **node)
        assert code == 2 and "  - train.compile on a CPU needs a C++ compiler" in said
    for words, what in (([], "GPU needs a C "), (["--distributed.device=cpu"], "CPU needs a C++")):
        code, said = check("--train.compile", *words)  # a login node
        assert code == 0 and f"warning: train.compile on a {what}" in said
        assert "of a job may have" in said
