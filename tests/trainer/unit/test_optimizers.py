"""The rules of the optimizer against ten plain lines each, or the published package; what a bad
step, bf16 and another mesh do to them."""

from __future__ import annotations

import copy
import itertools
import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import schedulefree
import torch
from torch import Tensor, nn

from kempner.checkpoint.format.plan import CheckpointLayout, StoredTensor, own_box
from kempner.checkpoint.state import run_state
from kempner.config.option import ConfigError
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder
from kempner.optim import muon
from kempner.optim.build import (
    build_optimizer,
    published_weights,
    set_learning_rate,
)
from kempner.optim.config import STATE, GroupConfig, OptimizerConfig
from kempner.optim.muon import orthogonal_parts, orthogonalise
from kempner.optim.optimizer import Optimizer
from kempner.optim.rounding import hashed_int32, to_bf16

pytestmark = pytest.mark.usefixtures("one_process")
RULES = tuple(STATE)


class Net(nn.Module):
    """Two matrices that Muon takes, and biases that it does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    lrs: list[float],
    set_lr: Callable[[torch.optim.Optimizer, float], None] = set_learning_rate,
    seed: int = 1,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for lr in lrs:
        model(torch.randn(16, 12, generator=generator)).square().mean().backward()
        set_lr(optimizer, lr)
        optimizer.step()
        optimizer.zero_grad()


def everything(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    state = [
        optimizer.state[p][key] for p in model.parameters() for key in sorted(optimizer.state[p])
    ]
    return [x.detach().clone() for x in (*model.parameters(), *state)]


def same_bits(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# --- Muon ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(128, 512), (96, 24), (3, 24, 96)])
def test_orthogonalised_is_nearly_that_of_an_svd(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    found = orthogonalise(matrix.to(dtype))
    assert found.dtype is dtype and found.shape == matrix.shape
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    singular = torch.linalg.svdvals(found.float())
    assert singular.min() > 0.96 and singular.max() < 1.045
    assert torch.cosine_similarity(found.float().flatten(), (u @ vt).flatten(), dim=0) > 0.9995


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["adamw", "spectral"])
def test_muon_is_momentum_made_orthogonal_by_an_svd(nesterov: bool, scale: str) -> None:
    model, lr = Net(), 0.01
    cfg = OptimizerConfig(name="muon", lr=lr, momentum=0.9, nesterov=nesterov, muon_scale=scale)
    optimizer = build_optimizer(model, cfg)
    plain, momentum = copy.deepcopy(model), torch.zeros(8, 12)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        x = torch.randn(16, 12, generator=generator)
        for each in (model, plain):
            each(x).square().mean().backward()
        gradient = plain.first.weight.grad
        assert gradient is not None
        momentum = 0.9 * momentum + gradient
        u, _, vt = torch.linalg.svd(
            gradient + 0.9 * momentum if nesterov else momentum, full_matrices=False
        )
        factor = 0.2 * math.sqrt(12) if scale == "adamw" else math.sqrt(8 / 12)
        before = model.first.weight.detach().clone()
        optimizer.step()
        change = (model.first.weight - before * (1 - lr * 0.1)) / -(lr * factor)
        torch.testing.assert_close(change, u @ vt, rtol=0, atol=0.03)
        plain.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        plain.zero_grad()


def test_muon_takes_the_matrices_of_the_blocks() -> None:
    model = Decoder(ModelConfig(dim=32, n_layers=2, n_heads=4, ffn_dim=48, vocab_size=64))
    optimizer = build_optimizer(model, OptimizerConfig(name="muon"))
    names = {p: name for name, p in model.named_parameters()}
    taken = {
        names[p]
        for group in optimizer.param_groups
        if isinstance(group["rule"], muon.Muon)
        for p in group["params"]
    }
    assert taken == {name for name in names.values() if "blocks" in name and "norm" not in name}
    decays = {names[p]: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decays["output.weight"] == 0.1 and decays["embed.weight"] == 0.0


MESHES = {
    "fsdp": ((4,), (0,)),
    "hsdp": ((2, 2), (None, 0)),
    "copies": ((3,), (None,)),
    "rows and columns": ((2, 2), (0, 1)),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_each_matrix_is_orthogonalised_once_on_any_mesh(
    mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads play the ranks. The large matrix is written by one of its copies, small ones by all;
    the last has fewer rows than there are ranks."""
    layout, world = CheckpointLayout(*MESHES[mesh]), math.prod(MESHES[mesh][0])
    shapes = [(160, 120), (24, 40), (3, 8)][:world]
    torch.manual_seed(0)
    matrices = [torch.randn(shape) for shape in shapes]
    wholes = [
        StoredTensor(torch.Size(shape), torch.float32, layout, turn)
        for turn, shape in enumerate(shapes)
    ]
    me, meet = threading.local(), threading.Barrier(world)
    posted: dict[int, Any] = {}
    ranks = SimpleNamespace(
        is_initialized=lambda: True, get_rank=lambda _: me.rank, get_world_size=lambda _: world
    )

    def all_to_all(outgoing: list[Tensor], sizes: list[int], _: None) -> list[Tensor]:
        posted[me.rank] = outgoing
        meet.wait(30)
        received = [posted[rank][me.rank] for rank in range(world)]
        meet.wait(30)
        assert [len(part) for part in received] == list(sizes)
        return received

    done: list[torch.Size] = []
    monkeypatch.setattr(muon, "dist", ranks)
    monkeypatch.setattr(muon, "_all_to_all", all_to_all)
    monkeypatch.setattr(
        muon, "orthogonalise", lambda x: (done.append(x.shape), orthogonalise(x))[1]
    )
    found: dict[int, list[Tensor]] = {}

    def rank(number: int) -> None:
        me.rank = number
        found[number] = orthogonal_parts(
            [cut(x, own_box(w, number)) for x, w in zip(matrices, wholes, strict=True)], wholes
        )

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == sorted(torch.Size(shape) for shape in shapes)
    for number in range(world):
        for x, whole, part in zip(matrices, wholes, found[number], strict=True):
            assert torch.equal(part, cut(orthogonalise(x), own_box(whole, number)))


def cut(x: Tensor, box: tuple[tuple[int, int], ...]) -> Tensor:
    return x[tuple(slice(start, start + length) for start, length in box)]


# --- Lion, schedule-free ------------------------------------------------------------------------


def test_lion_is_that_of_the_paper() -> None:
    model = Net()
    plain = copy.deepcopy(model)
    optimizer = build_optimizer(model, OptimizerConfig(name="lion", betas=(0.9, 0.99)))
    train(model, optimizer, [1e-2, 2e-2, 1e-2])
    averages = {p: torch.zeros_like(p) for p in plain.parameters()}

    class Plain:
        def step(self) -> None:
            with torch.no_grad():
                for p, m in averages.items():
                    assert p.grad is not None
                    decay = 0.1 if p.ndim == 2 else 0.0
                    c = 0.9 * m + 0.1 * p.grad
                    p -= self.lr * (c.sign() + decay * p)
                    m.copy_(0.99 * m + 0.01 * p.grad)

        def zero_grad(self) -> None:
            plain.zero_grad()

    train(plain, Plain(), [1e-2, 2e-2, 1e-2], lambda o, lr: setattr(o, "lr", lr))  # type: ignore[arg-type]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_schedule_free_is_that_of_the_published_package() -> None:
    """Also over a warm-up, and also the averaged weights that are published."""
    model = Net()
    plain = copy.deepcopy(model)
    cfg = OptimizerConfig(name="schedule_free", betas=(0.9, 0.99), weight_decay=0.1)
    optimizer = build_optimizer(model, cfg)
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    reference = schedulefree.AdamWScheduleFree(
        groups, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, warmup_steps=5
    )
    reference.train()
    lrs = [1e-2 * min(1.0, (step + 1) / 5) for step in range(20)]
    train(model, optimizer, lrs)
    train(plain, reference, lrs, lambda *_: None)

    def same() -> None:
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)

    same()
    trained = copy.deepcopy(model.state_dict())
    reference.eval()
    with published_weights(model, optimizer):
        same()
        assert not torch.equal(trained["first.weight"], model.first.weight)
    assert all(torch.equal(x, trained[name]) for name, x in model.state_dict().items())


def test_a_checkpoint_has_the_published_weights_and_the_way_back() -> None:
    """Loaded by the same optimizer it goes on bit for bit; by another, from what is published."""
    model = Net()
    cfg = OptimizerConfig(name="schedule_free", betas=(0.9, 0.99))
    optimizer = build_optimizer(model, cfg)
    train(model, optimizer, [1e-2] * 5)
    saved = {
        name: {key: x.clone() for key, x in provider.tensors().items()}
        for name, provider in run_state(model, optimizer).items()
        if name != "rng"
    }
    x, y = saved["model"]["first.weight"], saved["optim"]["first.weight.weight"]
    assert torch.equal(y, model.first.weight) and not torch.equal(x, y)

    def loaded(name: str) -> tuple[Net, Optimizer]:
        other = Net()
        fresh = build_optimizer(other, OptimizerConfig(name=name, betas=(0.9, 0.99)))
        providers = run_state(other, fresh)
        for part, tensors in saved.items():
            stored = {k: StoredTensor(x.shape, x.dtype, None, 0) for k, x in tensors.items()}
            for key, target in providers[part].restore(stored).items():
                target.copy_(tensors[key])
        for provider in providers.values():
            provider.restored()
        return other, fresh

    train(model, optimizer, [1e-2] * 3, seed=2)
    again = loaded("schedule_free")
    train(*again, [1e-2] * 3, seed=2)
    assert same_bits(everything(model, optimizer), everything(*again))
    other, adamw = loaded("adamw")
    assert torch.equal(other.first.weight, x)
    train(other, adamw, [1e-2])
    assert set(adamw.state[other.first.weight]) == {"step", "exp_avg", "exp_avg_sq"}


def test_an_average_is_made_of_state_that_has_arrived() -> None:
    """With cpu_offload the state of the last update may still be on its way to the host."""
    model = Net()
    cfg = OptimizerConfig(name="schedule_free", betas=(0.9, 0.99), cpu_offload=True)
    optimizer = build_optimizer(model, cfg)
    train(model, optimizer, [1e-2] * 5)
    weight = model.first.weight
    expected, z = optimizer.averaging()[weight](), optimizer.state[weight]["z"]
    arriving = z.clone()
    z.zero_()
    stream: Any = SimpleNamespace(synchronize=lambda: z.copy_(arriving))
    optimizer._stream = stream
    with published_weights(model, optimizer):
        assert torch.equal(weight, expected)


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(RULES, 2)])
def test_the_state_of_another_optimizer_is_kept_as_a_whole(before: str, after: str) -> None:
    """One count corrects all averages of a parameter. With an average that began later than the
    count the first updates were up to 13 times too large, or too small."""
    model = Net()
    old = build_optimizer(model, OptimizerConfig(name=before))
    train(model, old, [1e-3] * 20)
    twin = copy.deepcopy(model)
    new, fresh = (build_optimizer(each, OptimizerConfig(name=after)) for each in (model, twin))
    for p, state in old.state.items():
        new.state[p] = dict(state)
    train(model, new, [1e-3], seed=2)
    train(twin, fresh, [1e-3], seed=2)
    weight = model.first.weight  # Muon's, too
    kept = (before, after) in {("adamw", "lion"), ("adamw", "schedule_free")}
    assert new.state[weight]["step"] == (21 if kept else 1)
    assert kept != torch.equal(weight, twin.first.weight)


# --- What holds for all -------------------------------------------------------------------------


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("name", RULES)
def test_a_bad_step_changes_nothing_and_scale_divides(name: str, moments: str) -> None:
    model = Net()
    optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=1e-2, moments=moments))
    set_learning_rate(optimizer, 1e-2)
    assert isinstance(optimizer, Optimizer)
    twin = copy.deepcopy(model)
    for bad in (1.0, 0.0, 1.0, 1.0, 0.0):  # also as the very first
        before = everything(model, optimizer)
        for p in model.parameters():
            p.grad = torch.full_like(p, math.nan if bad else 0.5) * 3
        optimizer.found_inf = torch.tensor(bad)
        optimizer.grad_scale = torch.tensor(math.nan if bad else 3.0)
        optimizer.step()
        after = everything(model, optimizer)
        if bad:  # the first has no state before
            assert same_bits(before, after[: len(before)])
    plain = build_optimizer(twin, OptimizerConfig(name=name, lr=1e-2, moments=moments))
    for _ in range(2):
        for p in twin.parameters():
            p.grad = torch.full_like(p, 0.5)
        plain.step()
    for ours, theirs in zip(everything(model, optimizer), everything(twin, plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", RULES)
def test_bf16_halves_the_averages_and_nothing_else(name: str) -> None:
    model = Net()
    optimizer = build_optimizer(model, OptimizerConfig(name=name, moments="bf16"))
    train(model, optimizer, [1e-3])
    dtypes = {
        key: value.dtype for p in model.parameters() for key, value in optimizer.state[p].items()
    }
    averages = {key for state in STATE.values() for key in state.averages}
    for key, dtype in dtypes.items():
        half = key in averages
        assert dtype is (torch.bfloat16 if half else torch.float32), key


def test_a_slow_average_in_bf16_still_moves() -> None:
    """0.999 of the old value and 0.001 of the new one: the nearest bf16 is always the old one."""
    model = nn.Linear(64, 64, bias=False)
    cfg = OptimizerConfig(betas=(0.999, 0.999), moments="bf16", lr=0.0)
    optimizer = build_optimizer(model, cfg)
    optimizer.state[model.weight] = {
        "exp_avg": torch.ones(64, 64, dtype=torch.bfloat16),
        "exp_avg_sq": torch.ones(64, 64, dtype=torch.bfloat16),
        "step": torch.zeros(()),
    }
    for _ in range(100):
        model.weight.grad = torch.full((64, 64), 2.0)
        optimizer.step()
    mean = optimizer.state[model.weight]["exp_avg"].float().mean().item()
    assert mean == pytest.approx(2 - 0.999**100, abs=0.005)


def test_rounding_is_the_same_whatever_cuts_the_tensor() -> None:
    step, shape = torch.tensor(7.0), torch.Size((6, 10))
    whole = hashed_int32(shape, ((0, 6), (0, 10)), step, salt=3)
    for box in (((2, 3), (0, 10)), ((4, 2), (5, 5)), ((0, 0), (0, 10))):
        assert torch.equal(hashed_int32(shape, box, step, salt=3), cut(whole, box))
    many = hashed_int32(torch.Size((1 << 16,)), ((0, 1 << 16),), step, salt=3)
    halves = torch.stack((many & 0xFFFF, (many >> 16) & 0xFFFF)).double()
    assert halves.mean(1).tolist() == pytest.approx([1 << 15] * 2, rel=0.01)
    assert abs(torch.corrcoef(halves)[0, 1]) < 0.02
    for at, salt in ((step + 1, 3), (step, 4)):
        other = hashed_int32(shape, ((0, 6), (0, 10)), at, salt)
        assert (other != whole).float().mean() > 0.9
    values = torch.tensor([1.0, -3.0, 0.0, 1e-30]).bfloat16()
    assert torch.equal(to_bf16(values.float(), torch.full((4,), 0xFFFF, dtype=torch.int32)), values)


def test_state_that_was_loaded_in_another_order_is_rounded_alike() -> None:
    runs = []
    for reverse in (False, True):
        model = Net()
        optimizer = build_optimizer(model, OptimizerConfig(moments="bf16"))
        train(model, optimizer, [1e-2] * 2)
        for p, state in optimizer.state.items():
            optimizer.state[p] = dict(sorted(state.items(), reverse=reverse))
        train(model, optimizer, [1e-2] * 2, seed=2)
        runs.append(everything(model, optimizer))
    assert same_bits(*runs)


def test_weights_in_bf16_are_rounded_stochastically() -> None:
    """Updates far smaller than the distance of two bf16 numbers still add up."""
    model = nn.Linear(64, 64, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    optimizer = build_optimizer(model, OptimizerConfig(name="lion", lr=1e-5, weight_decay=0.0))
    for _ in range(100):
        model.weight.grad = torch.ones(64, 64, dtype=torch.bfloat16)
        optimizer.step()
    assert model.weight.dtype is torch.bfloat16
    assert model.weight.float().mean().item() == pytest.approx(1 - 1e-3, abs=2e-4)


def test_offloaded_state_is_on_the_host() -> None:
    model = Net()
    optimizer = build_optimizer(model, OptimizerConfig(cpu_offload=True))
    assert optimizer.new_state(torch.empty(3, device="meta"), torch.float32).device.type == "cpu"
    plain = copy.deepcopy(model)
    train(model, optimizer, [1e-2] * 3)
    train(plain, build_optimizer(plain, OptimizerConfig()), [1e-2] * 3)
    assert same_bits(list(model.parameters()), list(plain.parameters()))


def test_the_first_group_that_matches_sets_rate_and_decay() -> None:
    model = Decoder(ModelConfig(dim=32, n_layers=2, n_heads=4, ffn_dim=48, vocab_size=64))
    groups = (
        GroupConfig(("embed.*", "output.*"), lr_scale=0.5),
        GroupConfig(("blocks.0.*",), weight_decay=0.0),
        GroupConfig(("*.wq.weight",), lr_scale=3.0),
    )
    optimizer = build_optimizer(model, OptimizerConfig(groups=groups))
    set_learning_rate(optimizer, 2.0)
    names = {p: name for name, p in model.named_parameters()}
    found = {
        names[p]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert found["embed.weight"] == (1.0, 0.0) and found["output.weight"] == (1.0, 0.1)
    assert found["blocks.0.attention.wq.weight"] == (2.0, 0.0)
    assert found["blocks.1.attention.wq.weight"] == (6.0, 0.1)
    assert found["blocks.1.ffn.w1.weight"] == (2.0, 0.1)
    assert found["blocks.1.ffn_norm.weight"] == found["norm.weight"] == (2.0, 0.0)
    unused = (*groups, GroupConfig(("blocks.0.attention.*",)))
    with pytest.raises(ConfigError, match=r"groups\[3\].*no trained parameter matches this"):
        build_optimizer(model, OptimizerConfig(groups=unused))
