"""benchmarks/gpu_check.py on a machine without a GPU: everything that it can check there."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.gpu_check import Running, run_apart
from benchmarks.gpu_checks import CHECKS
from tests import zygote
from tests.conftest import ROOT, clean_env
from tests.waiting import LIMIT_S

GPU_ONLY = {
    "gpu faults",
    "hang",
    "synchronization",
    "patterns",
    "update",
    "loss",
    "compile",
    "recompute",
    "fp8",
    "flash",
    "fp8 gathers",
    "overlap",
    "exchange",
    "bench 125m",
    "bench 1b",
    "bench 7b",
}
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def gpu_check(
    out: Path, *words: str, **env: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, Any]]]:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(out), *words]
    done = zygote.run(
        command, cwd=ROOT, env=clean_env(**env), capture_output=True, text=True, timeout=580
    )
    report = out / "report.json"
    return done, json.loads(report.read_text())["checks"] if report.exists() else {}


class Report(NamedTuple):
    code: int
    said: str
    checks: dict[str, dict[str, Any]]
    text: str

    def figures(self, name: str) -> dict[str, Any]:
        assert self.checks[name]["status"] == "pass", self.checks[name]
        found: dict[str, Any] = self.checks[name]["figures"]
        return found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """On a bare Python: a GPU machine may have torch and little else, no tomli, no matplotlib, no
    Ray."""
    out, missing = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("missing")
    for package in ("matplotlib", "ray", *(["tomli"] if sys.version_info >= (3, 11) else [])):
        (missing / f"{package}.py").write_text(f"raise ModuleNotFoundError('{package}')\n")
    done, checks = gpu_check(out, "--device", "cpu", "--quick", PYTHONPATH=str(missing))
    text = (out / "report.md").read_text()
    return Report(done.returncode, done.stdout + done.stderr, checks, text)


@pytest.mark.soak
def test_all_that_needs_no_gpu_passes(report: Report) -> None:
    assert report.code == 0, report.said
    status = {name: result["status"] for name, result in report.checks.items()}
    assert status == {name: "skipped" if name in GPU_ONLY else "pass" for name in CHECKS}
    assert list(report.checks) == list(CHECKS)


@pytest.mark.soak
def test_what_needs_a_gpu_says_so(report: Report) -> None:
    assert all("no GPU" in report.checks[name]["why"] for name in GPU_ONLY)


@pytest.mark.soak
def test_the_report_has_every_check(report: Report) -> None:
    assert f"torch {torch.__version__}" in report.text
    for name, result in report.checks.items():
        assert f"\n| {name} | {result['status']} | " in report.text


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "figure", "most"), [("experts", "dw1", 0.02), ("ring", "dk", 1e-5)]
)
def test_kernels_are_near_their_plain_form(
    report: Report, name: str, figure: str, most: float
) -> None:
    assert report.figures(name)[figure] < most


@pytest.mark.soak
def test_a_resumed_run_has_the_losses_of_the_unbroken_one(report: Report) -> None:
    assert report.figures("resume")["equal_losses"] == 40


@pytest.mark.soak
def test_it_generates(report: Report) -> None:
    assert report.figures("generate")["tokens"] == 32


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
    running = Running()
    late = run_apart("environment", 0.05, tmp_path, options, running)
    assert late["status"] == "FAIL" and late["why"] == "still running after 0 s"
    broken = run_apart("preflight", 60, tmp_path / "nowhere", options, running)
    assert broken["status"] == "FAIL" and "FileNotFoundError" in broken["why"]
    failed = run_apart("resume", 60, tmp_path, options, running)  # its data were never made
    assert failed["status"] == "FAIL" and failed["why"] == "the run ended before it could be killed"
    assert not running.processes


@pytest.mark.soak
def test_one_check_and_what_it_needs(tmp_path: Path) -> None:
    words = ("--device", "cpu", "--quick", "--only")
    done, checks = gpu_check(tmp_path, *words, "generate, ring")
    assert done.returncode == 0
    assert list(checks) == ["environment", "data", "save", "generate", "ring"]
    done, _ = gpu_check(tmp_path, *words, "nothing")
    assert done.returncode == 2 and "--only: nothing: no such check" in done.stderr


def test_sigterm_ends_what_runs(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--quick", "--only", "ring", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.gpu_check", *words]
    process = subprocess.Popen(command, cwd=ROOT, env=clean_env(), stdout=subprocess.PIPE)
    while not (tmp_path / "environment.log").exists():
        time.sleep(0.05)
    process.terminate()
    assert process.wait(timeout=LIMIT_S) == 1
    assert not (tmp_path / "ring.log").exists()


def test_make_without_torch(tmp_path: Path) -> None:
    """A clone without .venv is told what to do."""
    command = ["make", "-f", str(ROOT / "Makefile"), "gpu-check", "PYTHON=false"]
    done = zygote.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 2
    assert "there is no .venv and false has no torch; run 'make .venv/train' first" in done.stderr
