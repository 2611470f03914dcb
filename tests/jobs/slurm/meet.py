"""Stands in for scripts/train.py where a test is about ranks that find each other: they meet
through kempner.jobs.ranks.process_group, and each says whom it has met."""

import os
import signal
import sys
from pathlib import Path

signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
run_dir = Path(next(a.split("=", 1)[1] for a in sys.argv if a.startswith("--run.dir=")))
if "--check" in sys.argv:
    print(f'[run]\ndir = "{run_dir}"')
    sys.exit(0)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from kempner.jobs.ranks.placement import discover_world  # noqa: E402
from kempner.jobs.ranks.process_group import start_process_group  # noqa: E402

world = discover_world()
start_process_group(world, torch.device("cpu"), run_dir, 60.0)
met: list[str | None] = [None] * world.size
dist.all_gather_object(met, os.environ["SLURM_JOB_ID"])
if world.rank == 0:
    print("met", *met, flush=True)
    (run_dir / "status.json").write_text(
        f'{{"state": "done", "attempt_id": "{os.environ["KEMPNER_ATTEMPT_ID"]}"}}'
    )
dist.barrier()
dist.destroy_process_group()
