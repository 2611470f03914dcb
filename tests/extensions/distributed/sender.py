"""A program for torchrun: the ranks of a trainer that offer versions of a model to engines.

    torchrun ... tests/extensions/distributed/sender.py RUN

It publishes version n when RUN/n is there, with weights that differ from version to version, and
writes what they are to RUN/expected-n.safetensors before. "dies" in RUN/n: rank 1 is lost while it
sends that one. The first version and version 9 are files: here, a file of that name.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from kempner.config.loading import load_config_files
from kempner.extensions.rl.exchange import RolloutExchange
from kempner.extensions.rl.trainer import transfer
from kempner.parallel.build import build_model, parameter_names
from kempner.parallel.layout import build_layout
from kempner.train.sections import RunConfig

SHAPE = [
    "--model.vocab_size=61",
    "--model.dim=32",
    "--model.n_layers=2",
    "--model.n_heads=4",
    "--model.n_kv_heads=2",
    "--model.ffn_dim=48",
    "--model.n_experts=4",  # the matrix of one is larger than a bucket
    "--model.experts_per_token=2",
    "--data.dataset_path=none",
]
BUCKET, TIMEOUT_S, LAST = 1 << 12, 4.0, 9


def limit() -> None:
    """Many buckets, and short waits."""
    transfer.BUCKET, transfer.TIMEOUT_S = BUCKET, TIMEOUT_S


def dying_send(*words: Any) -> None:
    """It takes its process with it in the middle."""
    SENT.append(words)
    if len(SENT) > 2:
        os._exit(1)
    SEND(*words)


SENT: list[Any] = []
SEND = transfer.send_part


def main() -> None:
    dist.init_process_group("gloo")
    limit()
    run = Path(sys.argv[1])
    cfg = load_config_files(RunConfig, [], SHAPE)
    layout = build_layout(cfg.distributed, dist.get_world_size(), 1, "cpu")
    model = build_model(cfg.model, layout, cfg.train, cfg.distributed)
    by_files = lambda number: (run / f"files-{number}").touch()  # noqa: E731
    publisher = transfer.DirectPublisher(by_files, model, RolloutExchange(run), torch.float32, LAST)
    for number in range(LAST + 1):
        while not (run / str(number)).exists():
            time.sleep(0.02)
        if (run / str(number)).read_text() == "dies" and dist.get_rank() == 1:
            transfer.send_part = dying_send
        whole = {}
        for name, p in parameter_names(model).items():
            with torch.no_grad():
                p.add_(0.1 * (number + 1))
            whole[name] = (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        if dist.get_rank() == 0:
            save_file(whole, run / f"expected-{number}.safetensors")
        publisher.publish(number)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
