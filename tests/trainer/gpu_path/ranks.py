"""A program: ranks that make their groups as on GPUs, in all products of axes.

    python -m tests.trainer.gpu_path.ranks DIR

It imports torch once and forks the ranks of each world. Prints a line of JSON for each world: its
size, the exit codes of its ranks, what rank 0 has made, and the groups that each rank has asked
for. NCCL needs the same ones in the same order on all ranks; gloo connects late, and may work
without.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import kempner.optim.build
import kempner.train.recording.run_directory  # noqa: F401  # before the forks
from kempner.config.loading import load_config_files
from kempner.jobs.ranks import placement, process_group, proof
from kempner.parallel.build import build_model
from kempner.parallel.config import DistributedConfig
from kempner.parallel.layout import Layout, build_layout
from kempner.train.parts import open_layout, open_replicas
from kempner.train.recording.run_directory import Run
from kempner.train.sections import RunConfig
from kempner.train.training import open_checkpointer
from tests.trainer.gpu_path.kernels import CPU, GPU, replaced

WORLDS = (2, 3, 4, 6, 8)
WITH_MODEL = (2, 4)  # worlds whose ranks make the model, too, on the CPU: of axes of 2
LIMIT_S = 100
MODEL = [
    "--model.vocab_size=64",
    "--model.dim=32",
    "--model.n_layers=4",
    "--model.n_heads=4",
    "--model.n_kv_heads=4",
    "--model.ffn_dim=16",
    "--train.seq_len=32",
    "--train.global_batch=16",
    "--data.dataset_path=fake:",
    "--eval.interval=0",
]


def products(world: int) -> list[dict[str, int]]:
    """All sizes of the axes that make this world; of 8 ranks those of three axes of 2, which hold
    every two of them, too."""
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    divisors = [n for n in range(1, world + 1) if world % n == 0 and (world < 8 or n <= 2)]
    found = []
    for sizes in itertools.product(divisors, repeat=len(names)):
        if math.prod(sizes) == world:
            axes = dict(zip(names, sizes, strict=True))
            inner = axes["dp_shard"] * axes["cp"]
            found += [{**axes, "ep": ep} for ep in range(1, inner + 1) if inner % ep == 0]
    return found


class Nccl:
    """In the place of NCCL's communicator of the world, of which torch may make others by a
    split."""

    supports_splitting = True

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo

    def perform_nocolor_split(self, device: torch.device) -> None:
        raise AssertionError("ncclCommSplit of the whole world, for a group of some ranks")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gloo, name)


def as_on_gpus(asked: list[Any]) -> contextlib.AbstractContextManager[None]:
    """torch takes the ways that it takes where the world's group has NCCL, with gloo in its place:
    a second gloo, as on GPUs, because the first has proved the network and is gone. `asked` gets
    the ranks of each group that is asked for."""
    init, prove, source = (
        dist.init_process_group,
        proof.prove,
        dist.distributed_c10d._get_split_source,
    )

    def without_nccl(backend: str, *, device_id: Any = None, **options: Any) -> None:
        kinds = dict(part.split(":") for part in backend.split(",") if ":" in part)
        nccl = {"cpu": "gloo", "cuda": "nccl"}  # tensors of the host are sent, too: votes, saves
        assert (kinds, device_id) == (nccl, GPU) or (backend, device_id) == ("gloo", None)
        init(backend.replace("nccl", "gloo"), **options)
        dist.distributed_c10d._get_default_group().bound_device_id = device_id

    real = dist.distributed_c10d._new_group_with_tag

    def new_group(ranks: Any = None, *words: Any, **named: Any) -> Any:
        asked.append(None if ranks is None else list(ranks))
        return real(ranks, *words, **named)

    def split_source(group: Any) -> Any:
        return Nccl(found) if (found := source(group)) is not None else Nccl(None)

    return replaced(
        (dist, "init_process_group", without_nccl),
        (dist.distributed_c10d, "_get_split_source", split_source),
        (dist.distributed_c10d, "_new_group_with_tag", new_group),
        (proof, "prove", lambda store, world, _, s: prove(store, world, "cpu", s)),
        (proof, "log_nccl", lambda world: None),
        (torch.accelerator, "is_available", lambda *_: True),
        (torch.accelerator, "current_accelerator", lambda *_, **__: GPU),
        (torch.cuda, "is_initialized", lambda: True),
        (torch.cuda, "set_device", lambda device: None),
        (torch.cuda, "device_count", lambda: 8),
        (copy, "deepcopy", lambda value, *_: value),  # of NCCL's options; gloo's have none
    )


def meet(groups: list[dist.ProcessGroup]) -> None:
    """An all-reduce in each, and in the world."""
    for group in (dist.group.WORLD, *groups):
        one = torch.ones(1)
        dist.all_reduce(one, group=group)
        assert one.item() == group.size(), (one, group)


def count(layout: Layout) -> None:
    """A token that the ranks of a tp group share counts once."""
    tokens = layout.once({"tokens": torch.ones(1)})["tokens"]
    assert layout.sum(tokens).item() * layout.sizes.tp == math.prod(layout.sizes)


def rank_of(rank: int, size: int, root: Path, asked: list[Any]) -> list[dict[str, int]]:
    """One rank of a world; returns the products of axes whose meshes it has made."""
    names = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    os.environ |= names | {"SLURM_STEP_NUM_TASKS": str(size)}
    made = []
    with as_on_gpus(asked):
        world = process_group.start_process_group(placement.discover_world(), GPU, root, LIMIT_S)
        for axes in products(size):
            layout = build_layout(DistributedConfig(**axes), size, size, "cuda")
            meet(layout.groups)
            count(layout)
            made.append(axes)
        for axes in products(size) if size in WITH_MODEL else []:
            if max(axes.values()) == 2:
                with_model(axes, world, root)
    process_group.leave_process_group(world)
    return made


def with_model(axes: dict[str, int], world: Any, root: Path) -> None:
    """The parts that train.py makes, in its order, up to the checkpointer, and its first save."""
    words = [f"--distributed.{name}={n}" for name, n in axes.items()]
    experts = ["--model.n_experts=4"] if axes["ep"] > 1 else []
    run_dir = root / "-".join(map(str, axes.values()))
    cfg = load_config_files(RunConfig, [], [*MODEL, *words, *experts, f"--run.dir={run_dir}"])
    run = Run(cfg, world)
    layout = open_layout(cfg, world, CPU)
    model = build_model(cfg.model, layout, cfg.train, cfg.distributed, cfg.lora)
    optimizer, replicas = open_replicas(cfg, world, model)
    meet([] if optimizer._group is None else [optimizer._group])
    open_checkpointer(cfg, run, model, optimizer, replicas)


def codes_of(pids: list[int]) -> list[int]:
    """Exit codes of the ranks of a world. Where one fails, the others would wait for it."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid]:
            for other in pids:
                if other not in codes:
                    os.kill(other, signal.SIGKILL)
    return [codes[pid] for pid in pids]


def start(rank: int, size: int, root: Path, say: int) -> None:
    """In the fork. `say`: a descriptor."""
    signal.alarm(LIMIT_S)
    code, asked = 1, list[Any]()
    try:
        made = rank_of(rank, size, root, asked)
        if rank == 0:
            os.write(say, json.dumps(made).encode())
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        (root / f"asked-{rank}.json").write_text(json.dumps(asked))
        sys.stderr.flush()
        os._exit(code)


def asked_of(folder: Path, size: int) -> list[list[Any] | None]:
    """Of each rank of a world; None: it was killed."""
    files = [folder / f"asked-{rank}.json" for rank in range(size)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def main(root: Path) -> None:
    torch.set_num_threads(1)  # a fork has none of its threads
    for size in WORLDS:
        read, write = os.pipe()
        folder = root / str(size)
        folder.mkdir()
        pids = []
        for rank in range(size):
            if not (pid := os.fork()):
                start(rank, size, folder, write)
            pids.append(pid)
        os.close(write)
        codes, made = codes_of(pids), json.loads(os.read(read, 1 << 16) or "[]")
        said = {"world": size, "codes": codes, "made": made, "asked": asked_of(folder, size)}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
