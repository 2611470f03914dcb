"""Tensor parallelism in the real trainer: the losses, gradients and weights of one process, on
every mesh and from one to another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kempner.data.config import DataConfig
from kempner.extensions.preference.config import PreferenceConfig
from kempner.model.config import ModelConfig
from kempner.model.loss import VocabularyPart, cross_entropy
from kempner.parallel.config import DistributedConfig
from kempner.train.checks import combination_problems
from kempner.train.sections import RunConfig, TrainConfig
from tests.conftest import TINY, losses, start_train
from tests.trainer.distributed.runs import begun, numbers, state

SHAPE = ["--model.qk_norm", "--model.qkv_bias", "--model.post_norms", "--train.max_steps=20",
         "--eval.interval=20", "--schedule.name=constant", "--optimizer.name=muon"]  # fmt: skip
STATE = ["--checkpoint.interval=1", "--checkpoint.keep_last_n=99"]
# 257 rows of the vocabulary: two ranks have 129 and 128 of them.
TP = "--distributed.tp=2"


def train(data_dir: Path, run: Path, *args: str, nproc: int = 1) -> None:
    words = [*TINY, *SHAPE, *STATE, f"--data.dataset_path={data_dir}", f"--run.dir={run}", *args]
    process = start_train(*words, nproc=nproc)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    assert "FutureWarning" not in err, err  # of torch, about our code


@pytest.fixture(scope="module")
def place(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, and that of 2 x 2, with micro-batches and recomputation."""
    path = tmp_path_factory.mktemp("tensor")
    train(data_dir, path / "one")
    train(data_dir, path / "four", TP, "--train.micro_batch=2", "--train.recompute=full", nproc=4)
    return path


def test_losses_are_those_of_one_process(place: Path) -> None:
    one, four = place / "one", place / "four"
    assert len(losses(one)) == 20
    for name in ("loss", "grad_norm", "val_loss"):
        assert numbers(four, name) == pytest.approx(numbers(one, name), rel=1e-5), name
    assert numbers(four, "val_tokens") == numbers(one, "val_tokens")


def test_every_gradient_is_that_of_one_process(place: Path) -> None:
    """After one step Muon's momentum, and AdamW's first moment, are a fraction of the gradient."""
    one, four = state(place / "one", 1), state(place / "four", 1)
    gradients = [name for name in one if name.endswith(("momentum", "exp_avg"))]
    assert len(gradients) == 2 * 16 + 3 and one.keys() == four.keys()
    for name in gradients:
        error = (one[name] - four[name]).norm() / one[name].norm()
        assert error < 1e-5, (name, error)


def test_a_checkpoint_of_one_mesh_continues_on_another(
    place: Path, data_dir: Path, tmp_path: Path
) -> None:
    """One process -> two copies of the model, each on two ranks -> one process."""
    run = begun(place, "one", tmp_path / "run", 5)
    copies = ("--distributed.dp_replicate=2", TP)
    for steps, nproc, mesh in ((10, 4, copies), (20, 1, ())):
        train(data_dir, run, f"--train.max_steps={steps}", *mesh, nproc=nproc)
    assert losses(run) == pytest.approx(losses(place / "one"), rel=1e-5)


def test_resumed_equals_unbroken_bit_for_bit(place: Path, data_dir: Path, tmp_path: Path) -> None:
    run = begun(place, "four", tmp_path / "run", 15)
    train(data_dir, run, TP, "--train.micro_batch=2", "--train.recompute=full", nproc=4)
    assert losses(run) == losses(place / "four")
    resumed, unbroken = state(run, 20), state(place / "four", 20)
    assert all(torch.equal(resumed[name], unbroken[name]) for name in unbroken)


def test_a_loss_over_parts_of_the_vocabulary() -> None:
    """Each rank has some rows of it; of the gradient of x, its part of the sum."""
    torch.manual_seed(0)
    x, weight = torch.randn(300, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    targets = torch.randint(11, (300,)).index_fill(0, torch.arange(0, 300, 7), -100)
    loss, terms = cross_entropy(x, weight, targets)
    (loss / 300).backward()
    logits = (x @ weight.t()).detach()
    whole = torch.stack((logits.logsumexp(1), logits[range(300), targets.clamp(min=0)]), 1)

    def over_all(total: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        assert total.shape == known.shape == (300, 1)
        return whole[:, :1], whole[:, 1:]

    dx, dw = torch.zeros_like(x), []
    for first, end in ((0, 6), (6, 11)):
        ours, part = x.detach().requires_grad_(), weight[first:end].detach().requires_grad_()
        place = VocabularyPart(first, 6, over_all)
        mine, its_terms = cross_entropy(ours, part, targets, part=place)
        torch.testing.assert_close((mine, its_terms), (loss, terms))
        (mine / 300).backward()
        assert ours.grad is not None and part.grad is not None
        dx, dw = dx + ours.grad, [*dw, part.grad]
    torch.testing.assert_close((dx, torch.cat(dw)), (x.grad, weight.grad))


SMALL = ModelConfig(dim=64, n_heads=8, n_kv_heads=4, ffn_dim=96, head_dim=8)
REFUSED = {
    "heads": (replace(SMALL, n_heads=6, n_kv_heads=1), {}, "must divide model.n_heads = 6"),
    "key-value heads": (replace(SMALL, n_kv_heads=2), {}, "must divide model.n_kv_heads = 2"),
    "hidden units": (replace(SMALL, ffn_dim=98), {}, "must divide model.ffn_dim = 98"),
    "tokens": (SMALL, {"train": TrainConfig(seq_len=30)}, "must divide train.seq_len = 30"),
    "one graph": (
        SMALL,
        {"train": TrainConfig(compile=True, compile_scope="model")},
        "give --train.compile_scope=block",
    ),
    "preferences": (
        SMALL,
        {"more": (("preference", PreferenceConfig(loss="reward")),)},
        "loss = reward",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_tensor_parallelism_cannot_do_is_refused(name: str) -> None:
    model, more, words = REFUSED[name]
    cfg = RunConfig(model=model, distributed=DistributedConfig(tp=4), **more)  # type: ignore[arg-type]
    found = [each for each in combination_problems(cfg) if each.startswith("distributed.tp = 4: ")]
    assert any(words in each for each in found), combination_problems(cfg)
    whole = RunConfig(model=model, distributed=DistributedConfig(tp=1), **more)  # type: ignore[arg-type]
    assert not any("distributed.tp" in each for each in combination_problems(whole))
    fine = RunConfig(model=SMALL, data=DataConfig("x"), distributed=DistributedConfig(tp=4))
    assert not combination_problems(fine)
