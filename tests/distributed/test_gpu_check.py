"""benchmarks/gpu_check.py on a machine without a GPU: everything that it can check there."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check import run_apart
from benchmarks.gpu_checks import CHECKS
from tests.conftest import ROOT, clean_env

GPU_ONLY = {
    "gpu faults",
    "synchronization",
    "patterns",
    "update",
    "compile",
    "fp8",
    "bench 125m",
    "bench 1b",
    "bench 7b",
}
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def gpu_check(
    out: Path, *words: str, **env: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, object]]]:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(out), *words]
    done = subprocess.run(
        command, cwd=ROOT, env=clean_env(**env), capture_output=True, text=True, timeout=580
    )
    report = out / "report.json"
    return done, json.loads(report.read_text())["checks"] if report.exists() else {}


def test_on_a_bare_python(tmp_path: Path) -> None:
    """A GPU machine may have torch and little else: no tomli, no matplotlib, no Ray."""
    missing = tmp_path / "missing"
    missing.mkdir()
    for package in ("matplotlib", "ray", *(["tomli"] if sys.version_info >= (3, 11) else [])):
        (missing / f"{package}.py").write_text(f"raise ModuleNotFoundError('{package}')\n")
    out = tmp_path / "out"
    done, checks = gpu_check(out, "--device", "cpu", "--quick", PYTHONPATH=str(missing))
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(checks) == list(CHECKS)
    status = {name: result["status"] for name, result in checks.items()}
    assert status == {name: "skipped" if name in GPU_ONLY else "pass" for name in CHECKS}
    assert all("no GPU" in str(checks[name]["why"]) for name in GPU_ONLY)
    assert checks["experts"]["figures"]["dw1"] < 0.02 and checks["ring"]["figures"]["dk"] < 1e-5  # type: ignore[index]
    assert checks["generate"]["figures"]["tokens"] == 32  # type: ignore[index]
    figures = checks["resume"]["figures"]
    assert isinstance(figures, dict) and figures["equal_losses"] == 40
    report = (out / "report.md").read_text()
    assert f"torch {torch.__version__}" in report
    assert all(f"\n| {name} | {status[name]} | " in report for name in CHECKS)


def test_out_of_time(tmp_path: Path) -> None:
    done, checks = gpu_check(tmp_path, "--device", "cpu", "--quick", "--seconds", "0")
    assert done.returncode == 1
    assert "not checked for want of time (--seconds): environment, data, save," in done.stdout
    for name, check in CHECKS.items():
        assert checks[name]["why"] == ("no GPU" if check.needs_gpu else "out of time")


def test_without_a_gpu(tmp_path: Path) -> None:
    done, checks = gpu_check(tmp_path / "out")
    assert done.returncode == 2 and not checks
    assert "torch sees no GPU on this machine; --device cpu --quick" in done.stderr


def test_a_check_that_hangs_or_breaks_does_not_stop_the_others(tmp_path: Path) -> None:
    options = argparse.Namespace(device="cpu", quick=True, ranks=2, out=tmp_path)
    late = run_apart("environment", 0.05, tmp_path, options)
    assert late["status"] == "FAIL" and late["why"] == "not over after 0 s"
    broken = run_apart("preflight", 60, tmp_path / "nowhere", options)
    assert broken["status"] == "FAIL" and "FileNotFoundError" in broken["why"]
    failed = run_apart("resume", 60, tmp_path, options)  # its data were never made
    assert failed["status"] == "FAIL" and failed["why"] == "the run ended before it could be killed"


def test_make_without_torch(tmp_path: Path) -> None:
    """A clone without .venv is told what to do."""
    command = ["make", "-f", str(ROOT / "Makefile"), "gpu-check", "PYTHON=false"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 2
    assert "there is no .venv and false has no torch; run 'make .venv/train' first" in done.stderr
