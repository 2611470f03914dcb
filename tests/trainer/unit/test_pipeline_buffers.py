"""What a pipeline's ranks keep from step to step: buffers for each micro-batch of this one's."""

from __future__ import annotations

import datetime
import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from kempner.config.loading import load_config_files
from kempner.data.batch import MicroBatch
from kempner.parallel.build import build_model
from kempner.parallel.layout import build_layout
from kempner.train.objective import NextToken
from kempner.train.sections import RunConfig
from kempner.train.step import StepSums, forward_backward
from tests.ranks import told_by_ranks

WORLD, T, CPU = 2, 16, torch.device("cpu")
SHAPE = [
    "--model.vocab_size=64", "--model.dim=32", "--model.n_layers=4", "--model.n_heads=4",
    "--model.ffn_dim=48", "--model.max_seq_len=16", "--train.seq_len=16",
    "--data.dataset_path=none", "--distributed.pp=2", "--distributed.pp_stages_per_rank=2",
]  # fmt: skip
STEPS = (2, 4, 6)  # micro-batches of each


def kept() -> list[int]:
    """The stages that are alive, and the buffers in which they receive."""
    stages = [x for x in gc.get_objects() if isinstance(x, PipelineStage)]
    infos = [
        info
        for stage in stages
        for received in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
        for info in received
    ]
    buffers = {id(found) for x in infos if (found := getattr(x, "buffer", None)) is not None}
    return [len(stages), len(buffers)]


def one_of_two(rank: int, store: str, said: Any) -> None:
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=wait
    )
    cfg = load_config_files(RunConfig, [], SHAPE)
    layout = build_layout(cfg.distributed, WORLD, 1, "cpu")
    model = build_model(cfg.model, layout, cfg.train, cfg.distributed)
    tokens, found = torch.arange(T).view(1, T), []
    gc.collect()
    gc.disable()  # as in steps
    for count in STEPS:
        batches = [MicroBatch(tokens, tokens, None)] * count
        forward_backward(model, NextToken(), batches, StepSums([], CPU), T * count, leave=None)
        model.zero_grad()
        found.append(kept())
    said.put(found)
    dist.barrier()


def test_a_larger_batch_gets_buffers_in_place_of_those_before(tmp_path: Path) -> None:
    """One for each micro-batch, stage and direction; here an end of the pipeline has one kind."""
    told = told_by_ranks(one_of_two, WORLD, tmp_path / "store")
    assert told == [[[2, 3 * count] for count in STEPS]] * WORLD
