"""Which build of torch a driver can run: said before the queue, by preflight, by the run, and
installed by make."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from kempner.config.option import ConfigError
from kempner.jobs.gpu import driver
from kempner.jobs.preflight import task
from kempner.jobs.preflight.verdict import NodeResult, Report
from kempner.jobs.ranks import own_device
from tests.conftest import ROOT, clean_env

KERNELS = {
    "535.104.05": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\n",
    "580.65.06": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n",
    "470.57.02": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 2021\n",
}
MAKE = "make .venv/train TORCH_INDEX=https://download.pytorch.org/whl/"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEMPNER_PROC", str(tmp_path / "proc"))
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    return tmp_path / "proc/driver/nvidia/version"


@pytest.mark.parametrize("version", KERNELS)
def test_the_version_of_the_driver(proc: Path, version: str) -> None:
    assert driver.driver_version() is None
    proc.write_text(KERNELS[version] + "GCC version:  gcc version 12.2.0 (Debian)\n")
    assert driver.driver_version() == version


def test_the_installed_torch_is_read_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    assert driver.cuda_of_torch() == torch.version.cuda
    code = """import sys, kempner.jobs.gpu.driver as d
d.cuda_of_torch()
assert 'torch' not in sys.modules"""
    subprocess.run([sys.executable, "-c", code], check=True, env=clean_env())


@pytest.mark.parametrize(
    ("version", "cuda", "fix"),
    [
        (None, "13.0", None),
        ("580.65.06", "13.0", None),
        ("535.104.05", "12.6", None),
        ("535.104.05", "14.0", None),  # nobody has said what that needs
        ("575.57.08", "13.0", f"580 or later, and the driver is 575.57.08: {MAKE}cu126"),
        ("535.104.05", None, f"built without CUDA, and the driver is 535.104.05: {MAKE}cu126"),
        ("580.65.06", None, f"built without CUDA, and the driver is 580.65.06: {MAKE}cu130"),
        ("470.57.02", "12.6", "ask for driver 525 or later"),
    ],
)  # fmt: skip
def test_what_fits(version: str | None, cuda: str | None, fix: str | None) -> None:
    told = driver.driver_problem(version, cuda)
    assert told is None if fix is None else fix in str(told)


def test_the_page_has_every_index() -> None:
    page = (ROOT / "docs/reference/slurm.md").read_text()
    for branch, index in driver.INDEXES.items():
        assert re.search(rf"\| {branch} .*`{driver.WHEEL_INDEX}{index}`", page), index


@pytest.mark.parametrize("cuda", ["13.0", None])
def test_the_check_before_the_queue_prints_both(
    proc: Path, tmp_path: Path, cuda: str | None
) -> None:
    fake = tmp_path / "packages/torch"  # --check imports no torch
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (fake / "version.py").write_text(
        f"from typing import Optional\ncuda: Optional[str] = {cuda!r}\n"
    )
    command = [sys.executable, "scripts/train.py", "configs/train/debug.toml", "--check"]
    command += ["--data.dataset_path=fake:", f"--run.dir={tmp_path}/run"]
    path = f"{ROOT / 'src'}:{fake.parent}"

    def said(*words: str) -> str:
        env = clean_env(KEMPNER_PROC=str(tmp_path / "proc"), PYTHONPATH=path)
        done = subprocess.run([*command, *words], cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert said() == (
        f"torch is built with CUDA {cuda}, which needs driver 580 or later on the nodes; this host "
        "has no driver to compare\n" if cuda else ""
    )  # fmt: skip
    proc.write_text(KERNELS["535.104.05"])
    text = said()
    assert ("driver 535.104.05, torch built with CUDA 13.0" in text) == (cuda is not None)
    assert f"warning: torch is built with{'' if cuda else 'out'} CUDA" in text and MAKE in text
    assert said("--distributed.device=cpu") == ""


@pytest.fixture
def gpu_on_the_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = tmp_path / "sys/bus/pci/devices/0000:17:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    monkeypatch.setenv("KEMPNER_SYS", str(tmp_path / "sys"))
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


@pytest.mark.usefixtures("gpu_on_the_bus")
def test_a_torch_that_the_driver_cannot_run(proc: Path) -> None:
    """The run says how to get one that fits, and preflight finds the node."""
    proc.write_text(KERNELS["535.104.05"])
    with pytest.raises(ConfigError, match=r"built with CUDA 13.0.* driver 535.104.05") as caught:
        own_device.pick_device("auto", 0)
    assert f"{MAKE}cu126" in str(caught.value)
    facts = task.describe_node(local_rank=0)
    (fault,) = facts["gpu_faults"]
    assert "needs driver 580 or later" in fault and f"{MAKE}cu126" in fault
    assert (facts["driver"], facts["cuda"], facts["real_gpus"]) == ("535.104.05", "13.0", True)


def test_the_table_of_preflight_has_both() -> None:
    nodes = [
        NodeResult(f"n{i}", [i], {"driver": version, "cuda": "13.0", "gpus": 1})
        for i, version in enumerate(("580.65.06", "580.65.06", "535.104.05"))
    ]
    text = Report(nodes).table()
    assert "driver 580.65.06, torch built with CUDA 13.0: n0, n1\n" in text
    assert "driver 535.104.05, torch built with CUDA 13.0: n2\n" in text
    assert "CUDA 13.0: all nodes" in Report(nodes[:2]).table()


# --- make ---

SHIM = """#!/bin/bash
if [[ $1 == -c ]]; then exit 0; fi
echo "$*" >>calls
[[ $* != *wrong* ]]
"""


def test_make_takes_torch_from_another_index(tmp_path: Path) -> None:
    """Once, and again when another one is named. One that has no torch leaves what is there."""
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("python", "pip"):
        (tmp_path / ".venv/bin" / name).write_text(SHIM)
        (tmp_path / ".venv/bin" / name).chmod(0o755)

    def calls(*words: str, code: int = 0) -> list[str]:
        (tmp_path / "calls").write_text("")
        command = ["make", "-f", str(ROOT / "Makefile"), ".venv/train", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == code, done
        lines = (tmp_path / "calls").read_text().splitlines()
        return [line for line in lines if "compileall" not in line]

    core, kit = calls()
    assert core.endswith("-c constraints.txt --no-compile -e .[plot]") and calls() == []
    assert kit.endswith("-c constraints.txt --no-compile -e .[plot,data]")
    for index in ("https://here/cu126", "https://here/cu130"):
        replaced, needs, *again = calls(f"TORCH_INDEX={index}")
        assert replaced.endswith(f"--index-url {index} --force-reinstall --no-deps torch")
        assert needs.endswith(f"-c constraints.txt --index-url {index} torch") and again == [
            core,
            kit,
        ]
        assert calls(f"TORCH_INDEX={index}") == calls() == []
    (tried,) = calls("TORCH_INDEX=https://wrong", code=2)
    assert tried.endswith("--index-url https://wrong --force-reinstall --no-deps torch")
    assert calls() == [core, kit]  # what may be half there is looked at again


def test_the_constraints_allow_another_build(tmp_path: Path) -> None:
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)[1]  # type: ignore[index]
    name = f"torch-{pinned}+cu126"
    wheel = tmp_path / f"index/torch/{name}-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    about = f"{name}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {pinned}+cu126\n"
        )
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
    (wheel.parent / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(tmp_path)]
    command += ["-c", "constraints.txt", "--index-url", f"file://{tmp_path}/index/", "torch"]
    env = clean_env(PIP_CONFIG_FILE="/dev/null", PIP_DISABLE_PIP_VERSION_CHECK="1")
    subprocess.run(command, cwd=ROOT, env=env, check=True)
    assert (tmp_path / wheel.name).is_file()
