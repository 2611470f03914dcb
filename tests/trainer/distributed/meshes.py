"""A program for torchrun: saves weights and optimizer on each of several meshes, and loads each
save on each of them; and what engines get from each.

    torchrun ... tests/trainer/distributed/meshes.py DIR

Rank 0 prints a list in JSON, for each rank by model, mesh that loads, and mesh that saved: the
tensors of which its part differs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from kempner.checkpoint.checkpointer import Checkpointer
from kempner.checkpoint.config import CheckpointConfig
from kempner.checkpoint.format.plan import box_slices, local_part, make_table, own_box
from kempner.checkpoint.format.reader import read_tensors
from kempner.checkpoint.state import collect_state, run_state
from kempner.config.loading import load_config_files
from kempner.extensions.rl.trainer import transfer
from kempner.extensions.rl.trainer.transfer import (
    buckets_of,
    pack_buckets,
    pieces_of_rank,
    unpack_bucket,
)
from kempner.optim.build import build_optimizer, set_learning_rate
from kempner.parallel.build import build_model, parameter_names
from kempner.parallel.layout import build_layout
from kempner.train.sections import RunConfig

SHAPE = [
    "--model.vocab_size=61",  # the ranks' parts differ
    "--model.dim=32",
    "--model.n_layers=2",
    "--model.n_heads=4",
    "--model.n_kv_heads=2",
    "--model.ffn_dim=48",
    "--model.qk_norm",
    "--data.dataset_path=none",
]
REPLICAS, TP, CP = "--distributed.dp_replicate=2", "--distributed.tp=2", "--distributed.cp=2"
EP = "--distributed.ep=2"
DENSE = {
    "dp": [],
    "hsdp": [REPLICAS],
    "tp, dp": [TP],
    "tp, hsdp": [TP, REPLICAS],
    "cp, dp": [CP],
    "tp, cp": [TP, CP],
}
EXPERTS = {
    "tp, dp": [TP],
    "cp, dp": [CP],
    "ep, dp": [EP],
    "ep, hsdp": [EP, REPLICAS],
    "ep, tp": [EP, TP],
}
MOE = ["--model.n_experts=4", "--model.shared_experts=1", "--model.router_bias"]
MUON = "--optimizer.name=muon"
MODELS = {
    "adamw": ([], DENSE),
    "muon": ([MUON], DENSE),
    "experts, muon": ([*MOE, MUON], EXPERTS),
}


class Job:
    """A model and its optimizer on one mesh, with weights of its own."""

    def __init__(self, words: list[str], root: Path, seed: int) -> None:
        cfg = load_config_files(RunConfig, [], [*SHAPE, *words, f"--train.seed={seed}"])
        layout = build_layout(cfg.distributed, dist.get_world_size(), 1, "cpu")
        self.model = build_model(cfg.model, layout, cfg.train, cfg.distributed)
        self.optimizer = build_optimizer(self.model, cfg.optimizer)
        self.state = run_state(self.model, self.optimizer)
        contents = {}, {"run": "a", "fixed": {}}
        self.checkpointer = Checkpointer(CheckpointConfig(), root, self.state, contents, print)

    def step(self) -> None:
        """Gradients that differ from number to number, and are the same in all copies."""
        for p in self.model.parameters():
            p.grad = (50 * p.detach()).sin()
        self.optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        self.optimizer.grad_scale = torch.ones(())  # type: ignore[attr-defined]
        if self.model.cfg.n_experts:
            self.model.routings.step_load = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 2)
        set_learning_rate(self.optimizer, 1e-2)
        self.optimizer.step()

    def whole(self) -> dict[str, Tensor]:
        shared, _ = collect_state(self.state)
        return {
            name: (t.full_tensor() if isinstance(t, DTensor) else t).clone()
            for name, t in shared.items()
        }


def differ(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    wrong = sorted(found.keys() ^ expected.keys())
    return wrong or [name for name in found if not torch.equal(found[name], expected[name])]


def mine(of: Mapping[str, Tensor], wholes: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's parts of whole tensors. Where they are is what the reader of one process has
    relied on, too, whose tensors are compared with torch's own whole ones."""
    table = make_table(of, {}, dist.get_world_size())
    rank, parts = dist.get_rank(), dict(wholes)
    for name in of.keys() & wholes.keys():
        parts[name] = wholes[name][box_slices(own_box(table[name], rank))]
    return parts


def sent(job: Job) -> dict[str, Tensor]:
    """All tensors of the model, as an engine has them from what each rank sends; the others are
    not sent."""
    named = parameter_names(job.model)
    table = make_table(named, {}, dist.get_world_size())
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, pack_buckets(named, table, dist.get_rank(), torch.float32))
    found = {f"model.{name}": torch.full(p.shape, torch.nan) for name, p in named.items()}
    targets = {name: found[f"model.{name}"] for name in named}
    for rank, flats in enumerate(parts):
        buckets = buckets_of(pieces_of_rank(table, rank), 4)
        for flat, bucket in zip(flats, buckets, strict=True):
            assert len(flat) == sum(piece.elements for piece in bucket)
            unpack_bucket(flat, bucket, targets)
    assert sum(len(flat) for flats in parts for flat in flats) == sum(
        p.numel() for p in named.values()
    )
    return {**job.whole(), **found}


def check(root: Path, more: list[str], meshes: dict[str, list[str]]) -> dict[str, Any]:
    """Of this rank."""
    saved, jobs = {}, {}
    for seed, (name, words) in enumerate(meshes.items(), 1):
        job = jobs[name] = Job([*more, *words], root / name, seed)
        job.step()
        job.checkpointer.save(1, {})
        job.checkpointer.wait()
        saved[name] = job.whole()
    results: dict[str, Any] = {
        "one process": {
            name: differ(read_tensors(root / name / "latest"), whole)
            for name, whole in saved.items()
        }
    }
    results["engines"] = {name: differ(sent(job), saved[name]) for name, job in jobs.items()}
    for target, job in jobs.items():
        results[target] = {}
        for source in reversed(meshes):  # its own is not the first: it is there already
            job.checkpointer.root = root / source
            assert job.checkpointer.load() is not None
            shared, _ = collect_state(job.state)
            parts = {name: local_part(tensor) for name, tensor in shared.items()}
            results[target][source] = differ(parts, mine(shared, saved[source]))
    return results


def main() -> None:
    dist.init_process_group("gloo")
    root = Path(sys.argv[1])
    transfer.BUCKET = 1 << 12  # several for each rank, and matrices that are cut
    results = {name: check(root / name, *how) for name, how in MODELS.items()}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, results)
    if dist.get_rank() == 0:
        print(json.dumps(of_ranks), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
