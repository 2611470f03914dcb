"""Ranks that share the tokens of each row, in the real trainer: the numbers of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY, losses, start_train

RING = ("--train.max_steps=20", "--eval.interval=10")
PACKED = (
    "--train.max_steps=12",
    "--data.document_mask",
    "--model.sliding_window=9",
    "--schedule.name=constant",
)


def run(data: Path, run_dir: Path, *more: str, nproc: int = 1) -> str:
    """On two sources."""
    sources = [f"{{path = '{data}', name = '{name}', weight = {w}}}" for name, w in SHARES.items()]
    words = [*TINY, "--data.dataset_path=", f"--data.sources=[{', '.join(sources)}]"]
    process = start_train(*words, f"--run.dir={run_dir}", *more, nproc=nproc)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    return out


SHARES = {"one": 3, "two": 1}


def numbers(run_dir: Path) -> dict[tuple[int, str], float]:
    """Loss, norm of the gradients, loss of each source and validation loss, by step."""
    found: dict[tuple[int, str], float] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record: dict[str, Any] = json.loads(line)
        for name in ("loss", "grad_norm", "val_loss", "val_tokens"):
            if name in record:
                found[record["step"], name] = record[name]
        for name, source in record.get("sources", {}).items():
            found[record["step"], f"loss of {name}"] = source["loss"]
            found[record["step"], f"tokens of {name}"] = source["tokens"]
    return found


@pytest.fixture(scope="module")
def expected(
    data_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, str], float]:
    run_dir = tmp_path_factory.mktemp("one") / "run"
    run(data_dir, run_dir, *RING)
    return numbers(run_dir)


@pytest.mark.parametrize(
    "more",
    ["--train.recompute=full", pytest.param("--distributed.tp=2", marks=pytest.mark.soak)],
)
def test_a_ring_beside_another_axis_gives_the_numbers_of_one_process(
    data_dir: Path, tmp_path: Path, expected: dict[tuple[int, str], float], more: str
) -> None:
    """Two groups of two ranks that share rows; data parallelism and the ranks of tensor parallelism
    are two, too."""
    mesh = ("--distributed.cp=2", "--train.micro_batch=2", more)
    run(data_dir, tmp_path / "ring", *RING, *mesh, nproc=4)
    assert len(expected) == 20 * 6 + 2 * 2
    assert numbers(tmp_path / "ring") == pytest.approx(expected, rel=1e-5)


def test_ulysses_gives_the_losses_of_one_process(data_dir: Path, tmp_path: Path) -> None:
    """Of one group, without data parallelism, on packed documents and with a window; one process
    goes on where it stopped."""
    run(data_dir, tmp_path / "one", *PACKED)
    mesh = ("--distributed.cp=2", "--distributed.cp_method=ulysses")
    run(data_dir, tmp_path / "run", *PACKED, *mesh, "--train.max_steps=6", nproc=2)
    assert "continues after step 6" in run(data_dir, tmp_path / "run", *PACKED)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
