"""Ranks that share the tokens of each row compute what one rank does with whole rows: attention,
the loss, and every gradient; and each has the same work."""

from __future__ import annotations

import datetime
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from kempner.config.option import ConfigError
from kempner.data.batch import MicroBatch
from kempner.data.source import IGNORE
from kempner.model.attention import Documents, attend, attention_pattern
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder
from kempner.parallel import context
from kempner.parallel.context import (
    own_tokens,
    rank_columns,
    ring_attention,
    split_context,
    ulysses_attention,
)
from kempner.train.configure import check_world, load_config
from kempner.train.objective import NextToken
from tests.ranks import told_by_ranks

ROOT = Path(__file__).parents[3]
WORLD, ROWS, LENGTH = 4, 2, 48
ULYSSES = "--distributed.cp_method=ulysses"


@dataclass(frozen=True)
class Case:
    method: str
    ranks: int
    kv_heads: int = 2
    window: int | None = None
    packed: bool = False
    recompute: bool = False


ATTENTION = {
    "ring-2": Case("ring", 2),
    "ring-4": Case("ring", 4, kv_heads=1),
    "ulysses-2": Case("ulysses", 2),
    "ulysses-4": Case("ulysses", 4),  # more ranks than key-value heads
    "ulysses-4-window": Case("ulysses", 4, kv_heads=4, window=7),
    "ulysses-2-documents": Case("ulysses", 2, packed=True),
}
MODELS = {
    "ring-4": Case("ring", 4),
    "ring-2-recompute": Case("ring", 2, recompute=True),
    "ulysses-4": Case("ulysses", 4, packed=True, window=9),
}


def documents() -> Documents:
    """Two rows of three documents, one of which a part of the row ends in."""
    index = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    index[0, 10:] += 1
    index[0, 31:] += 1
    index[1, 24:] += 1
    index[1, 25:] += 1
    return Documents.of(index, reset_positions=True)


def attention_error(case: Case, group: dist.ProcessGroup) -> float:
    """The largest error of the output and the gradients, relative to their largest value."""
    torch.manual_seed(1)
    heads = (4, case.kv_heads, case.kv_heads)
    whole = [torch.randn(ROWS, n, LENGTH, 8, requires_grad=True) for n in heads]
    seen = attention_pattern(
        torch.zeros(ROWS, LENGTH), case.window, documents() if case.packed else None, torch.float32
    )
    expected = attend(*whole, seen)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    mine = rank_columns(LENGTH, group.rank(), group.size(), case.method, torch.device("cpu"))
    parts = [x.detach()[:, :, mine].requires_grad_() for x in whole]
    found = (
        ring_attention(*parts, group)
        if case.method == "ring"
        else ulysses_attention(*parts, seen, group)
    )
    (found * weights[:, :, mine]).sum().backward()
    pairs = [(found, expected), *((a.grad, b.grad) for a, b in zip(parts, whole, strict=True))]
    return max(error(a, b[:, :, mine], of=b) for a, b in pairs if a is not None and b is not None)


def error(found: Tensor, expected: Tensor, of: Tensor) -> float:
    return ((found - expected).abs().max() / of.abs().max()).item()


def model_error(case: Case, group: dist.ProcessGroup) -> float:
    """The largest error of the loss, its terms, and all gradients."""
    shape = ModelConfig(
        vocab_size=31,
        dim=32,
        n_heads=4,
        n_kv_heads=2,
        n_layers=2,
        ffn_dim=48,
        max_seq_len=64,
        qk_norm=True,
        sliding_window=case.window,
    )
    torch.manual_seed(2)
    plain, split = Decoder(shape), Decoder(shape)
    split.load_state_dict(plain.state_dict())
    mesh = DeviceMesh.from_group(group, "cpu")
    split_context(split, mesh, case.method, torch.float32)
    for i, block in enumerate(split.blocks):
        if case.recompute:
            split.blocks[i] = checkpoint_wrapper(block, preserve_rng_state=False)
    tokens = torch.randint(31, (ROWS, LENGTH + 1))
    targets = torch.where(torch.rand(ROWS, LENGTH) < 0.2, IGNORE, tokens[:, 1:])
    batch = MicroBatch(tokens[:, :-1], targets, documents() if case.packed else None)
    expected, expected_terms, _ = NextToken()(plain, batch)
    expected.backward()
    loss, terms, part = NextToken(own_tokens(mesh, case.method))(split, batch)
    loss.backward()
    mine = rank_columns(LENGTH, group.rank(), group.size(), case.method, torch.device("cpu"))
    assert torch.equal(part.targets, targets[:, mine])
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    errors = [
        error(total, expected, of=expected),
        error(terms, expected_terms[:, mine], of=expected_terms),
    ]
    for theirs, ours in zip(plain.parameters(), split.parameters(), strict=True):
        assert theirs.grad is not None and ours.grad is not None
        dist.all_reduce(ours.grad, group=group)
        errors.append(error(ours.grad, theirs.grad, of=theirs.grad))
    return max(errors)


def one_of_four(rank: int, store: str, said: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=60),
    )
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {2: pairs[rank // 2], 4: dist.group.WORLD}
    errors = {}
    for kind, cases, measure in (
        ("attention", ATTENTION, attention_error),
        ("model", MODELS, model_error),
    ):
        for name, case in cases.items():
            group = groups[case.ranks]
            assert group is not None
            errors[f"{kind} {name}"] = measure(case, group)
    said.put(errors)
    dist.barrier()


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The largest error of any of four ranks, by case."""
    told = told_by_ranks(one_of_four, WORLD, tmp_path_factory.mktemp("context") / "store")
    return {name: max(each[name] for each in told) for name in told[0]}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_of_the_parts_is_that_of_whole_rows(errors: dict[str, float], name: str) -> None:
    assert errors[f"attention {name}"] < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient_are_those_of_whole_rows(
    errors: dict[str, float], name: str
) -> None:
    assert errors[f"model {name}"] < 1e-5


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_each_token_has_one_rank(method: str) -> None:
    parts = [rank_columns(48, rank, 4, method, torch.device("cpu")) for rank in range(4)]
    assert sorted(torch.cat(parts).tolist()) == list(range(48))
    assert all((part.diff() > 0).all() for part in parts)


@pytest.fixture
def rank_of() -> Iterator[Callable[[int, int], dist.ProcessGroup]]:
    """One rank of any world, in this process, whose messages go nowhere."""

    def start(rank: int, world: int) -> dist.ProcessGroup:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    yield start
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_no_rank_of_the_ring_has_more_work(
    ranks: int, rank_of: Callable[[int, int], dist.ProcessGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted: the pairs of a query and a key that each rank's kernels compute, forward and
    backward. In all, they are those of causal attention over the row, none twice."""
    length, head = 128, (1, 1)
    work = {"attention_kernel": 0, "kernel_backward": 0}

    def counting(name: str, query: int) -> Callable[..., Any]:
        compute = getattr(context, name)

        def counted(*args: Any, causal: bool = False) -> Any:
            queries, keys = (args[i].shape[2] for i in (query, query + 1))
            work[name] += queries * (queries + 1) // 2 if causal else queries * keys
            return compute(*args, causal=causal)

        return counted

    monkeypatch.setattr(context, "attention_kernel", counting("attention_kernel", 0))
    monkeypatch.setattr(context, "kernel_backward", counting("kernel_backward", 1))
    by_rank: dict[str, list[int]] = {name: [] for name in work}
    for rank in range(ranks):
        work.update(dict.fromkeys(work, 0))
        part = torch.randn(*head, length // ranks, 8, requires_grad=True)
        ring_attention(part, part, part, rank_of(rank, ranks)).sum().backward()
        for name, pairs in work.items():
            by_rank[name].append(pairs)
    for pairs in by_rank.values():
        assert sum(pairs) == length * (length + 1) // 2
        assert max(pairs) <= 1.05 * sum(pairs) / ranks


REFUSED = {
    "the ring's chunks": ("--train.seq_len=36 --distributed.cp=8", "into 16 parts"),
    "a ramp's shortest": ("--train.seq_len_ramp=[4,9] --distributed.cp=4", "at first = 4"),
    "ulysses' parts": (f"--train.seq_len=30 {ULYSSES} --distributed.cp=4", "into 4 parts"),
    "heads": (f"--train.seq_len=30 {ULYSSES} --distributed.cp=3", "must divide the 4 query heads"),
    "documents": ("--distributed.cp=2 --data.document_mask", "does not support document masks"),
    "window": ("--distributed.cp=2 --model.sliding_window=8", "no windows"),
    "capped scores": ("--distributed.cp=2 --model.attention_softcap=50", "does not cap scores"),
    "another kernel": ("--distributed.cp=2 --train.attention=math", "kernel is flash"),
    "tokens of tensor parallelism": (
        f"--train.seq_len=30 {ULYSSES} --distributed.cp=2 --distributed.tp=2",
        "the 15 tokens",
    ),
    "the auxiliary loss": (
        "--distributed.cp=2 --model.n_experts=4 --model.experts_per_token=2 --model.aux_loss=0.1",
        "whole sequences",
    ),
    "one graph": (
        "--distributed.cp=2 --train.compile --train.compile_scope=model",
        "breaks the whole graph",
    ),
    "preferences": ("--distributed.cp=2 --preference.loss=reward", "preference.loss = reward"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_combined_is_refused(what: str) -> None:
    words, problem = REFUSED[what]
    with pytest.raises(ConfigError) as refused:
        load_config(["configs/train/debug.toml"], words.split())
    assert [problem in each for each in refused.value.problems] == [True]


@pytest.mark.parametrize(
    "words",
    [
        "--distributed.cp=8",
        "--distributed.cp=2 --model.sliding_window=128",
        f"{ULYSSES} --distributed.cp=4 --model.sliding_window=8 --data.document_mask",
    ],
)
def test_what_can_be_combined_is_taken(words: str) -> None:
    load_config(["configs/train/debug.toml"], words.split())


def test_the_command_of_the_page_fits_its_world() -> None:
    page = (ROOT / "docs/guide/long-sequences.md").read_text()
    command = page.partition("multinode.sh ")[2].partition("\n\n")[0].replace("\\\n", " ")
    file, *words = command.split()
    assert check_world(load_config([file], words), 16, 8) == []


def test_the_ring_on_a_gpu_needs_bf16() -> None:
    mesh = types.SimpleNamespace(device_type="cuda")  # there is none here
    with pytest.raises(ConfigError, match=r"train\.dtype=bf16"):
        split_context(Decoder(ModelConfig()), mesh, "ring", torch.float32)
