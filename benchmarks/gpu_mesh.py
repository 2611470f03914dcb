"""One of two ranks that make their groups as on GPUs, with gloo in the place of NCCL: what one GPU,
or none, can show of a mesh of two axes.

    python -m benchmarks.gpu_mesh RANK DIRECTORY AXIS
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kempner.jobs.ranks import placement, process_group, proof
from kempner.parallel.config import DistributedConfig
from kempner.parallel.layout import build_layout
from kempner.train.resilience.requests import end_process

AXES = ("tp", "pp", "ep", "dp_replicate")


def main(rank: str, directory: str, axis: str) -> None:
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    init, prove = dist.init_process_group, proof.prove

    def without_nccl(backend: str, *, device_id: Any, **options: Any) -> None:
        init(backend.replace("nccl", "gloo"), **options)
        # A bound device is what makes torch split the NCCL communicator for new groups.
        dist.distributed_c10d._get_default_group().bound_device_id = device_id

    replaced: dict[Any, dict[str, Any]] = {
        dist: {"init_process_group": without_nccl},
        proof: {
            "prove": lambda store, world, device, seconds: prove(store, world, "cpu", seconds),
            "log_nccl": lambda world: None,
        },
        torch.accelerator: {
            "is_available": lambda: True,
            "current_accelerator": lambda *_, **__: torch.device("cuda"),
        },
        torch.cuda: {
            "is_initialized": lambda: True,
            "set_device": lambda device: None,
            "device_count": lambda: 2,
        },
        copy: {"deepcopy": lambda value, *_: value},  # of NCCL's options; gloo's have none
    }
    for module, names in replaced.items():
        for name, value in names.items():
            setattr(module, name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # they meet in the directory
        os.environ.pop(name, None)
    world = process_group.start_process_group(
        placement.discover_world(), torch.device("cuda", 0), Path(directory), 60
    )
    layout = build_layout(DistributedConfig(**{axis: 2}), world.size, 2, "cuda")
    some = dist.new_group([0], backend="gloo")  # as the checkpointer's of a pipeline
    total = torch.ones(1)
    for group in (None, *layout.groups, *([some] if rank == "0" else [])):
        dist.all_reduce(total, group=group)
    process_group.leave_process_group(world)


if __name__ == "__main__":
    main(*sys.argv[1:])
    end_process(0)  # as the trainer does: one that unwound was seen to end by SIGABRT
