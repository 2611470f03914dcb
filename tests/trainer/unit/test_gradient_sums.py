"""The gradients of a step of many micro-batches: summed in fp32, whatever the weights are in."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from kempner.config.loading import load_config_files
from kempner.data.batch import MicroBatch
from kempner.parallel.build import build_model, parameter_names
from kempner.parallel.layout import build_layout
from kempner.train.objective import NextToken
from kempner.train.sections import RunConfig
from kempner.train.step import StepSums, forward_backward
from tests.ranks import told_by_ranks

WORLD, PASSES, LENGTH, CPU = 2, 64, 16, torch.device("cpu")
SHAPE = [
    "--model.vocab_size=64", "--model.dim=32", "--model.n_layers=1", "--model.n_heads=4",
    "--model.ffn_dim=48", "--model.max_seq_len=16", "--train.seq_len=16",
    "--data.dataset_path=none", "--train.dtype=bf16",
]  # fmt: skip
REPLICAS = "--distributed.dp_replicate=2"
WEIGHTS, REDUCE = "--train.weights=bf16", "--distributed.reduce_dtype=bf16"
# Beside the rounding of a gradient itself, some 0.2 %.
CASES = {
    "weights": [WEIGHTS],
    "weights-offloaded": [WEIGHTS, "--distributed.fsdp_cpu_offload"],
    "weights-replicas": [WEIGHTS, REPLICAS],
    "weights-once": [WEIGHTS, "--distributed.sync_once"],
    "reduce": [REDUCE],
    "reduce-replicas": [REDUCE, REPLICAS],
    "both-replicas": [WEIGHTS, REDUCE, REPLICAS],
}


def gradients(words: list[str]) -> dict[str, Tensor]:
    """Of PASSES micro-batches of one row on each rank."""
    cfg = load_config_files(RunConfig, [], [*SHAPE, *words])
    layout = build_layout(cfg.distributed, WORLD, 1, "cpu")
    model = build_model(cfg.model, layout, cfg.train, cfg.distributed)
    with torch.no_grad():
        for parameter in model.parameters():  # the same numbers in all cases
            parameter.copy_(parameter.bfloat16())
    first = torch.randint(0, 64, (WORLD * PASSES, 1), generator=torch.Generator().manual_seed(1))
    rows = ((first + torch.arange(LENGTH + 1) * 3) % 64)[dist.get_rank() :: WORLD]
    parts = [
        MicroBatch(row[:, :-1].contiguous(), row[:, 1:].contiguous(), None) for row in rows.split(1)
    ]
    for _ in range(2):  # what one step leaves behind must not reach the next
        model.zero_grad()
        tokens = WORLD * PASSES * LENGTH
        forward_backward(model, NextToken(), parts, StepSums([], CPU), tokens, leave=None)
    found = {}
    for name, parameter in parameter_names(model).items():
        assert isinstance(parameter.grad, DTensor) and parameter.grad.dtype == parameter.dtype
        found[name] = parameter.grad.full_tensor().float()
    return found


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Relative, of all gradients together."""
    wrong = sum((found[name] - exact[name]).square().sum() for name in exact)
    return float((wrong / sum(value.square().sum() for value in exact.values())) ** 0.5)


def one_of_two(rank: int, store: str, said: Any) -> None:
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=wait
    )
    exact = gradients([])
    said.put({name: error(gradients(words), exact) for name, words in CASES.items()})
    dist.barrier()


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    told = told_by_ranks(one_of_two, WORLD, tmp_path_factory.mktemp("sums") / "store")
    assert told[0] == told[1]
    return dict(told[0])


@pytest.mark.parametrize("case", CASES)
def test_many_micro_batches_are_summed_in_fp32(errors: dict[str, float], case: str) -> None:
    assert 0 < errors[case] < 0.0025, errors
