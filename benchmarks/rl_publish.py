"""Publishing a version as files: seconds by the number of writers that can write only so fast.

    python -m benchmarks.rl_publish                                  # 4 ranks, 400 MB, 30 MB/s each
    python -m benchmarks.rl_publish --ranks 8 --megabytes 256 --rate 10

As on a shared file system, where one stream has a limit and several have it each. The ranks sleep
in place of a slow disk. The ideal is that all writers write all the time: bytes / writers / rate.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.rl_weights import CPU, configuration
from kempner.extensions.rl.exchange import RolloutExchange
from kempner.extensions.rl.trainer import publish
from kempner.parallel.build import build_model
from kempner.parallel.layout import build_layout


def rank(number: int, ranks: int, megabytes: int, rate: float, folder: str) -> None:
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=number, world_size=ranks
    )
    cfg, exchange = configuration(Path(folder), megabytes), RolloutExchange(folder)
    layout = build_layout(cfg.distributed, ranks, 1, "cpu")
    model = build_model(cfg.model, layout, cfg.train, cfg.distributed)
    write_all = publish.write_all

    def write_slowly(file: Any, data: Any) -> None:
        began = time.monotonic()
        write_all(file, data)
        time.sleep(max(0.0, len(data) / rate / 1e6 - (time.monotonic() - began)))

    publish.write_all = write_slowly
    for version, writers in enumerate(w for w in (1, 2, 4, 8) if w <= ranks):
        # Looked up when a publisher is made.
        publish.WRITERS = writers
        publisher = publish.DirectoryPublisher(cfg, model, exchange, CPU)
        dist.barrier()
        began = time.monotonic()
        publisher.publish(version)
        dist.barrier()
        seconds, ideal = time.monotonic() - began, publisher._bytes / writers / rate / 1e6
        if number == 0:
            print(
                f"| {writers} | {seconds:.2f} | {ideal:.2f} | {seconds / ideal:.2f} |", flush=True
            )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rate", type=float, default=30.0, help="MB/s of a writer")
    options = parser.parse_args()
    print("| Writers | Seconds | Ideal | Ratio |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="kempner-publish-") as folder:
        words = (options.ranks, options.megabytes, options.rate, folder)
        mp.spawn(rank, words, options.ranks)


if __name__ == "__main__":
    sys.exit(main())
