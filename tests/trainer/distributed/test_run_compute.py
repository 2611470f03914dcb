"""The levers of [train] that change how the decoder computes, through the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Train, losses

CAPPED = "--model.attention_softcap=5.0"
BF16 = ("--train.weights=bf16", "--train.dtype=bf16", "--schedule.name=constant")


def test_capped_scores_and_a_chunked_loss_on_two_ranks(train: Train, tmp_path: Path) -> None:
    one = train(tmp_path / "one", CAPPED, PYTHONPROFILEIMPORTTIME="1")
    assert "attention: math (train.attention = auto)" in one.stdout
    assert "torch._dynamo.symbolic_convert" not in one.stderr  # a second of every start
    train(tmp_path / "two", CAPPED, "--train.loss_chunk=24", nproc=2)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_bf16_weights_learn_and_resume_bit_for_bit(train: Train, tmp_path: Path) -> None:
    out = train(tmp_path / "whole", *BF16, "--train.attention=math").stdout
    assert "attention: math (train.attention = math)" in out
    expected = losses(tmp_path / "whole")
    assert expected[8] < expected[1] - 0.1
    parts = (*BF16, "--train.attention=math", "--checkpoint.interval=4")
    train(tmp_path / "parts", *parts, "--train.max_steps=4")
    train(tmp_path / "parts", *parts)
    assert losses(tmp_path / "parts") == expected


def test_a_kernel_that_this_device_lacks_is_bad_input(train: Train, tmp_path: Path) -> None:
    out = train(tmp_path / "run", "--train.attention=cudnn", code=2)
    assert (
        "train.attention = cudnn: torch" in out.stderr
        and not (tmp_path / "run/status.json").exists()
    )
