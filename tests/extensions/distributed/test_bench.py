"""trainer.py, side_by_side.py, decoder.py, scale.py and tune.py of benchmarks/ run; their figures
are not tested."""

from __future__ import annotations

import subprocess
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


@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=[pytest.mark.soak] * (name != "data")) for name in LAST],
)
def test_quick(command: str, data_dir: Path) -> None:
    words = [] if command == "data" else ["--", f"--data.dataset_path={data_dir}"]
    done = zygote.run(
        [sys.executable, "-m", "benchmarks.trainer", command, "--quick", *words],
        cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(LAST[command]), done.stdout


def side_by_side(*words: str) -> subprocess.CompletedProcess[str]:
    return zygote.run(
        [sys.executable, "-m", "benchmarks.side_by_side", *words],
        cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_side_by_side_quick(data_dir: Path) -> None:
    """The trainer computes what the bare loop does."""
    words = ["--turns=1", "--steps=2", "--config=configs/train/debug.toml", "--only", "kempner"]
    small = ("--model.dim=64", "--model.n_layers=2", "--train.seq_len=32")
    done = side_by_side(*words, "--", f"--data.dataset_path={data_dir}", *small)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[-2:]]
    assert [row[0] for row in rows] == ["bare loop, kempner's model", "kempner"], done.stdout
    losses = [float(row[-1]) for row in rows]
    assert 2.0 < losses[0] < 5.6 and losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_side_by_side_unknown() -> None:
    done = side_by_side("--only", "torchtitan")
    assert done.returncode == 2 and "lightning" in done.stderr.splitlines()[-1], done.stderr


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
    assert "\n| hang: asking all ranks, s" in done.stdout, done.stdout


@pytest.mark.soak
def test_tune_quick() -> None:
    done = zygote.run(
        [sys.executable, "-m", "benchmarks.tune", "--quick", "--cpu-time"],
        cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exhaustive: 2 candidates" in done.stdout and "\ntune: " in done.stdout, done.stdout
