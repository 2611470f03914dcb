"""What studies of the training itself ask of a run."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch

from kempner.files import step_of
from tests.conftest import TINY, Train, losses, start_train
from tests.distributed.runs import numbers, state
from tests.distributed.test_train import same_tensors

POWERS = ("--checkpoint.powers_of_two", "--checkpoint.interval=3", "--checkpoint.keep_last_n=1")
CONSTANT = ("--schedule.name=constant", "--schedule.warmup_steps=0")


def saved(run: Path) -> list[int]:
    return sorted(
        step for path in (run / "checkpoints").iterdir() if (step := step_of(path.name)) is not None
    )


@pytest.fixture(scope="module")
def powers(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("powers") / "run"
    words = (*TINY, *POWERS, *CONSTANT, "--train.max_steps=9", f"--data.dataset_path={data_dir}")
    process = start_train(*words, f"--run.dir={run}")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    return run


def test_powers_of_two_are_saved_and_stay(powers: Path) -> None:
    assert saved(powers) == [0, 1, 2, 4, 8, 9]
    before = state(powers, 0)
    assert not any(name.startswith("optim.") for name in before)
    norms = [tensor for name, tensor in before.items() if name.endswith("norm.weight")]
    assert norms and all(torch.equal(norm, torch.ones_like(norm)) for norm in norms)


def test_a_fork_of_step_0_is_the_run_again(powers: Path, train: Train, tmp_path: Path) -> None:
    train(tmp_path / "fork", f"--run.fork={powers}@0", *POWERS, *CONSTANT, "--train.max_steps=4")
    assert losses(tmp_path / "fork") == {k: x for k, x in losses(powers).items() if k <= 4}
    assert saved(tmp_path / "fork") == [0, 1, 2, 4]


@pytest.mark.parametrize("step", [0, 4])
def test_a_run_with_powers_of_two_resumes_bit_for_bit(
    powers: Path, train: Train, tmp_path: Path, step: int
) -> None:
    """Also from step 0, whose weights another seed would not make; and saves within the step give
    the same bytes."""
    run = Path(shutil.copytree(powers, tmp_path / "run", symlinks=True))
    for other in saved(run):
        if other > step:
            shutil.rmtree(run / f"checkpoints/step_{other:08d}")
    (run / "metrics.jsonl").unlink()
    words = (*POWERS, *CONSTANT, "--train.max_steps=9", "--no-checkpoint.async_save")
    train(run, *words, "--train.seed=7")
    assert saved(run) == [0, 1, 2, 4, 8, 9]
    assert losses(run) == {k: x for k, x in losses(powers).items() if k > step}
    assert same_tensors(*(at / "checkpoints/latest" for at in (run, powers)))


def test_powers_of_two_without_checkpoints_are_refused(train: Train, tmp_path: Path) -> None:
    done = train(tmp_path / "run", *POWERS, "--no-checkpoint.save", code=2)
    assert "checkpoint.powers_of_two: checkpoint.save = false writes no checkpoints" in done.stderr


# --- z-loss -------------------------------------------------------------------------------------


def test_z_losses_are_recorded_and_no_part_of_any_loss(train: Train, tmp_path: Path) -> None:
    """With a learning rate of 0 the losses are those of a run without them, to the last bit."""
    words = ("--model.n_experts=4", "--train.max_steps=2", "--eval.interval=1", "--optimizer.lr=0")
    train(tmp_path / "plain", *words)
    train(tmp_path / "both", *words, "--train.z_loss=1", "--model.router_z_loss=1")
    both, plain = tmp_path / "both", tmp_path / "plain"
    for name in ("loss", "val_loss"):
        assert numbers(both, name) == numbers(plain, name), name
    assert numbers(both, "grad_norm")[1] > 1.5 * numbers(plain, "grad_norm")[1]
    # Z of logits near 0 is the number of them.
    assert numbers(both, "z_loss")[1] == pytest.approx(math.log(257) ** 2, rel=0.02)
    assert numbers(both, "experts")[1]["z_loss"] == pytest.approx(math.log(4) ** 2, rel=0.05)
    assert numbers(plain, "z_loss") == {} and "z_loss" not in numbers(plain, "experts")[1]
    done = train(tmp_path / "dpo", "--train.z_loss=1", "--preference.loss=reward", code=2)
    assert "train.z_loss = 1.0: is not built for preference.loss = reward" in done.stderr
