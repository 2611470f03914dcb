"""What planning, files and metadata of a 70B checkpoint cost, by 64 ranks and by more.

    python -m benchmarks.save_70b
    python -m benchmarks.save_70b --throttle 100 --dir /scratch

Needs no GPU and no second machine. Plans are those of configs/train/70b.toml with AdamW, for rank
0 of as many as stated, under a fake process group and on the meta device. The files are those of 64
ranks, one after the other: with all tensors of the 70B model, each of its matrices 1,024 times
smaller. --throttle makes the disk slow, in MB/s.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.async_save import throttle
from benchmarks.scale import ROOT, fake_world, first_shard
from benchmarks.trainer import machine
from kempner.checkpoint import commit, ownership
from kempner.checkpoint.format import dcp, plan
from kempner.checkpoint.format.metadata import write_metadata
from kempner.checkpoint.format.reader import read_table, verify_checkpoint
from kempner.checkpoint.format.writer import Image, plan_file, torch_save_frame, write_file
from kempner.config import toml
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder

RANKS = 64
SMALLER = 32  # each of the sizes of a matrix
MORE = (64, 512, 4096)


def seconds(act: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = act()
    return time.perf_counter() - began, result


def shape_of(smaller: int) -> ModelConfig:
    shape = toml.loads((ROOT / "configs/train/70b.toml").read_text())["model"]
    for key in ("vocab_size", "dim", "ffn_dim"):
        shape[key] //= smaller
    return ModelConfig(**{**shape, "n_heads": 8, "n_kv_heads": 8} if smaller > 1 else shape)


def state_of(shape: ModelConfig, ranks: int) -> dict[str, Tensor]:
    """Rank 0's part of weights and AdamW's state, on the meta device. Needs fake_world()."""
    with torch.device("meta"):
        model = Decoder(shape)
    mesh, state = init_device_mesh("cpu", (ranks,)), dict[str, Tensor]()
    for name, whole in model.named_parameters():
        parameter = first_shard(whole.detach(), mesh, ranks)
        state |= {f"optim.{name}.{key}": parameter for key in ("exp_avg", "exp_avg_sq")}
        state |= {f"model.{name}": parameter, f"optim.{name}.step": torch.zeros(())}
    return state


def print_plans() -> None:
    print(f"{'70B on':>12} {'table, s':>9} {'plan, s':>9} {'tensors.json, MB':>17} "
          f"{'DCP parts':>10} {'.metadata, s':>13}")  # fmt: skip
    shape = shape_of(1)
    for ranks in MORE:
        # Each number of ranks pays for it, as a process that starts does.
        torch_save_frame.cache_clear()
        with fake_world(ranks):
            state, own = state_of(shape, ranks), {"rng.*.cpu": torch.get_rng_state()}
            table_s, table = seconds(lambda s=state, o=own, r=ranks: plan.make_table(s, o, r))
        plan_s, _ = seconds(lambda t=table: plan_file(t, 0))
        size = len(json.dumps(plan.to_json(table))) / 1e6
        dcp_s, made = seconds(lambda t=table, r=ranks: dcp.dcp_metadata(t, r))
        shown = f"{dcp_s:.2f}" if made else "afterwards"
        print(f"{ranks:>6} ranks {table_s:>9.3f} {plan_s:>9.3f} {size:>17.2f} "
              f"{ranks * len(table):>10,} {shown:>13}", flush=True)  # fmt: skip


def print_files(root: Path) -> None:
    shape, times = shape_of(SMALLER), dict.fromkeys(("plan", "image", "copy", "write"), 0.0)
    with fake_world(RANKS):
        own = {"rng.*.cpu": torch.get_rng_state()}
        table = plan.make_table(state_of(shape, RANKS), own, RANKS)
    commit.begin_save(root, 1)
    partial = commit.partial_of(root, 1)
    (partial / plan.file_of(0)).parent.mkdir()
    for rank in range(RANKS):
        took, slots = seconds(lambda r=rank: plan_file(table, r))
        times["plan"] += took
        took, image = seconds(lambda s=slots: Image(s, None, print))
        times["image"] += took
        parts = {slot.key: torch.zeros(slot.local_shape, dtype=slot.dtype) for slot in slots}
        times["copy"] += seconds(lambda i=image, p=parts: i.stage(p))[0]
        index = {"step": 1, "rank": rank, "tensors": image.entries}
        path = partial / plan.file_of(rank)
        times["write"] += seconds(lambda i=image, x=index, p=path: write_file(p, i.pieces(), x))[0]
    texts = {plan.TENSORS: json.dumps(plan.to_json(table)).encode()}
    facts = {"world_size": RANKS, "parent": -1, "fixed": {}}
    committed, final = seconds(lambda: commit.commit_save(root, 1, texts, facts))
    files = [path for path in final.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    print(f"\nfiles of {RANKS} ranks: {len(table):,} tensors, {len(files)} files, "
          f"{size / 1e6:,.0f} MB")  # fmt: skip
    for name, took in times.items():
        print(f"  {name:<28} {took / RANKS * 1e3:>9,.1f} ms a rank")
    acts: dict[str, Callable[[], Any]] = {
        "commit": lambda: None,
        "read manifest and tensors": lambda: read_table(final, commit.read_manifest(final)),
        ".metadata, by its command": lambda: write_metadata(final),
        "verify all": lambda: verify_checkpoint(final),
        "delete": lambda: ownership.remove_directory(final),
    }
    for name, act in acts.items():
        took = seconds(act)[0] if name != "commit" else committed
        about = ""
        if name.startswith(".metadata"):
            about = f", {(final / '.metadata').stat().st_size / 1e6:.1f} MB"
        print(f"  {name:<28} {took * 1e3:>9,.1f} ms{about}", flush=True)
    print(f"  most memory of the process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}"
          " MiB")  # fmt: skip


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("benchmarks.save_70b", description=__doc__.splitlines()[0])
    parser.add_argument("--throttle", type=float, default=0.0, help="MB/s of the disk; 0: no limit")
    parser.add_argument("--dir", default=None, help="file system to write to (default: /tmp)")
    options = parser.parse_args(argv)
    print(f"$ python -m benchmarks.save_70b {' '.join(argv)}\n{machine()}, "
          f"load {os.getloadavg()[0]:.1f}\n", flush=True)  # fmt: skip
    print_plans()
    if options.throttle:
        throttle(1e6 * options.throttle)
    with tempfile.TemporaryDirectory(dir=options.dir) as work:
        root = Path(work) / "checkpoints"
        ownership.claim_directory(root, "a")
        print_files(root)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
