"""What studies of the training itself ask of a run."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch

from kempner.jobs.system.files import step_of_name
from tests.conftest import TINY, Train, losses, start_train
from tests.trainer.distributed.runs import begun, numbers, state
from tests.trainer.distributed.test_train import same_tensors

POWERS = ("--checkpoint.powers_of_two", "--checkpoint.interval=3", "--checkpoint.keep_last_n=1")
CONSTANT = ("--schedule.name=constant", "--schedule.warmup_steps=0")


def saved(run: Path) -> list[int]:
    return sorted(
        step
        for path in (run / "checkpoints").iterdir()
        if (step := step_of_name(path.name)) is not None
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


def test_powers_of_two_stay_when_the_run_is_resumed_without_the_option(
    powers: Path, train: Train, tmp_path: Path
) -> None:
    """Those that were saved with it; 16 comes after it."""
    run = Path(shutil.copytree(powers, tmp_path / "run", symlinks=True))
    train(run, *POWERS[1:], *CONSTANT, "--train.max_steps=17", "--checkpoint.interval=1")
    assert saved(run) == [0, 1, 2, 4, 8, 17]


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


# --- Freezing -----------------------------------------------------------------------------------

FROZEN = (
    '--freeze.stages=[{patterns = ["blocks.[0-3].attention", "embed"], until_step = 3}, '
    '{patterns = ["blocks.1.ffn.w?.weight"], from_step = 4}]',
    "--train.max_steps=6",
    "--checkpoint.interval=1",
    "--checkpoint.keep_last_n=9",
    *CONSTANT,
)


def is_frozen(name: str, step: int) -> bool:
    """By hand: in the update number `step`, from 1 on."""
    early = ".attention." in name or name.startswith("model.embed")
    return (early and step <= 3) or (name.startswith("model.blocks.1.ffn.") and step > 4)


@pytest.fixture(scope="module")
def frozen(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("frozen") / "run"
    words = (*TINY, *FROZEN, "--checkpoint.powers_of_two", f"--data.dataset_path={data_dir}")
    process = start_train(*words, f"--run.dir={run}")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    return run


def test_frozen_parameters_stay_with_their_state_and_the_others_move(frozen: Path) -> None:
    """Neither updated nor decayed; no moments before they are trained, and no step after."""
    before = state(frozen, 0)
    for step in range(1, 7):
        after = state(frozen, step)
        for name in (name for name in after if name.startswith("model.")):
            assert torch.equal(before[name], after[name]) == is_frozen(name, step), (name, step)
            own = f"optim.{name.removeprefix('model.')}."
            moments = {key: x for key, x in after.items() if key.startswith(own)}
            trained = [n for n in range(1, step + 1) if not is_frozen(name, n)]
            assert len(moments) == (3 if trained else 0), (name, step)
            assert not trained or moments[f"{own}step"] == len(trained), (name, step)
        before = after


@pytest.mark.parametrize("step", [2, 4])
def test_a_frozen_run_resumes_bit_for_bit_across_the_border(
    frozen: Path, train: Train, tmp_path: Path, step: int
) -> None:
    run = begun(frozen.parent, "run", tmp_path / "resumed", step)
    assert f"continues after step {step}" in train(run, *FROZEN).stdout
    assert losses(run) == losses(frozen)
    assert same_tensors(*(at / "checkpoints/latest" for at in (run, frozen)))


def test_the_gradient_norm_is_that_of_what_is_trained(frozen: Path) -> None:
    """AdamW's first moment after one step is a tenth of the clipped gradient."""
    moments = [x for name, x in state(frozen, 1).items() if name.endswith("exp_avg")]
    norm = torch.stack([x.norm() for x in moments]).norm().item() / (1 - 0.9)
    assert norm == pytest.approx(min(1.0, numbers(frozen, "grad_norm")[1]), rel=1e-3)
    assert numbers(frozen, "grad_norm")[1] < numbers(frozen, "grad_norm")[4]


MESHES = {
    "shards": (2, ("--train.micro_batch=2", "--train.recompute=full")),
    "a pipeline, one stage of it frozen": (2, ("--distributed.pp=2", "--train.micro_batch=2")),
    "compiled": (2, ("--train.compile",)),
}
COMPILES = pytest.mark.soak


@pytest.mark.parametrize(
    "mesh", [pytest.param(name, marks=COMPILES if name == "compiled" else ()) for name in MESHES]
)
def test_a_mesh_freezes_as_one_process(
    data_dir: Path, train: Train, tmp_path: Path, mesh: str
) -> None:
    nproc, words = MESHES[mesh]
    freeze = '--freeze.stages=[{patterns = ["blocks.0", "embed"], until_step = 3}]'
    more = (freeze, "--train.max_steps=5", "--optimizer.name=muon")
    train(tmp_path / "one", *more)
    train(tmp_path / "mesh", *more, *words, nproc=nproc)
    for name in ("loss", "grad_norm"):
        expected = numbers(tmp_path / "one", name)
        assert numbers(tmp_path / "mesh", name) == pytest.approx(expected, rel=1e-4), name


def test_a_pattern_that_fits_nothing_is_refused_with_near_names(
    train: Train, tmp_path: Path
) -> None:
    wrong = (
        '--freeze.stages=[{patterns = ["embedding", "blocks.7.*"], from_step = 4, until_step = 4}]'
    )
    done = train(tmp_path / "run", wrong, "--optimizer.name=schedule_free", code=2)
    assert "must exceed from_step = 4" in done.stderr
    right = wrong.replace("from_step = 4, until_step = 4", "from_step = 4")
    done = train(tmp_path / "run", right, "--optimizer.name=schedule_free", code=2)
    assert "embedding matches no parameter of this model; did you mean embed?" in done.stderr
    assert "blocks.7.* matches no parameter" in done.stderr and "blocks.0." in done.stderr
    assert "freeze.stages: not built for optimizer.name = schedule_free" in done.stderr
    assert not (tmp_path / "run").exists()
