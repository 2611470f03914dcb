"""benchmarks/trainer.py, decoder.py, scale.py and tune.py run; their figures are not tested."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import zygote
from tests.conftest import ROOT, clean_env

LAST = {
    "overhead": "fp32 eager, ranks: 1",
    "startup": "step 1",
    "data": "target, plain shards",
    "checkpoint": "async / synchronous",
}


@pytest.mark.parametrize("command", LAST)
def test_quick(command: str, data_dir: Path) -> None:
    words = [] if command == "data" else ["--", f"--data.dataset_path={data_dir}"]
    done = zygote.run(
        [sys.executable, "-m", "benchmarks.trainer", command, "--quick", *words],
        cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(LAST[command]), done.stdout


def test_decoder_quick() -> None:
    """It also compares the gradients of both decoders."""
    done = zygote.run(
        [sys.executable, "-m", "benchmarks.decoder", "--quick"],
        cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("loss in chunks of 32"), done.stdout


def test_scale_quick() -> None:
    before = "docs/pictures/scale-before.json"
    done = zygote.run(
        [sys.executable, "-m", "benchmarks.scale", "--quick", "--before", before],
        cwd=ROOT,
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("| hang: asking all ranks, s"), done.stdout


@pytest.mark.soak
def test_tune_quick() -> None:
    done = zygote.run(
        [sys.executable, "-m", "benchmarks.tune", "--quick", "--cpu-time"],
        cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exhaustive: 2 candidates" in done.stdout and "\ntune: " in done.stdout, done.stdout
