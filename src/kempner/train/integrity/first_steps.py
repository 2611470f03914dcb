"""Fingerprints of the first step after each checkpoint, RUN/audit.json: an idle spare computes it
again from that checkpoint (audit.py). Loaded where the job has a spare."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kempner.config.loading import config_hash
from kempner.data.batch import MicroBatch
from kempner.jobs.system.files import write_atomic
from kempner.jobs.this_job import host_name
from kempner.train.integrity.fingerprint import checksum
from kempner.train.recording.run_directory import Run
from kempner.train.sections import RunConfig

AUDIT_FILE = "audit.json"
KEPT = 2  # the newest one's checkpoint may still be written, or fail


def obstacle(cfg: RunConfig) -> str:
    """Return why one device cannot compute what a rank of this run does; "" if it can."""
    sizes = cfg.distributed
    several = {f"distributed.{axis}": getattr(sizes, axis) > 1 for axis in ("tp", "pp", "cp", "ep")}
    found = {
        **several,
        "distributed.fsdp_cpu_offload": sizes.fsdp_cpu_offload,
        "lora.rank": cfg.lora.rank > 0,
        "train.fp8": cfg.train.fp8 != "none",
        **dict.fromkeys((f"[{name}]" for name, _ in cfg.more), True),
    }
    if cfg.resilience.replay_every is None:
        return "resilience.replay_every is unset"
    return next((f"{name} is set" for name, is_set in found.items() if is_set), "")


def kind_of_device(device: torch.device) -> str:
    """Name what must be equal for two devices to compute the same bits."""
    name = f"CPU {torch.backends.cpu.get_cpu_capability()}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return f"{name}, torch {torch.__version__}"


def fingerprint_of_batch(batches: Sequence[MicroBatch]) -> list[int]:
    """Return checksums of the tokens: data that have changed are no fault of a device."""
    return [int(checksum(part)) for each in batches for part in (each.inputs, each.targets)]


def read_first_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Read what is recorded, the oldest first."""
    with contextlib.suppress(OSError, ValueError):
        return list(json.loads((run_dir / AUDIT_FILE).read_text()))
    return []


class FirstSteps:
    """The record of this run. All ranks call the same methods."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self._run, self._saved = run, -1
        self._records = read_first_steps(run.dir) if run.world.rank == 0 else []
        self._about = {
            "config": config_hash(run.cfg),
            "ranks": run.world.size,
            "per_node": run.world.per_node,
        }
        self._own = {
            "host": host_name(),
            "device": kind_of_device(device),
            "threads": torch.get_num_threads(),  # on a CPU the order of sums depends on them
        }

    def begin(self, step: int) -> None:
        """The weights are now those of the checkpoint of `step`. Later ones are of a branch that
        the run has left, and are about to be replaced."""
        self._saved = step
        if any(record["checkpoint"] > step for record in self._records):
            self._write([r for r in self._records if r["checkpoint"] <= step])

    def is_due(self, step: int) -> bool:
        """Return whether `step` is the first one after a checkpoint."""
        return step == self._saved + 1

    def add(self, batches: Sequence[MicroBatch], rows: Tensor, tolerance: float) -> None:
        """Record what each rank has computed in that step."""
        mine = {**self._own, "batch": fingerprint_of_batch(batches), "rows": rows.tolist()}
        first = self._run.world.rank == 0
        found: list[Any] | None = [None] * self._run.world.size if first else None
        dist.gather_object(mine, found)
        if first:
            new = {
                **self._about,
                "time": time.time(),
                "checkpoint": self._saved,
                "tolerance": tolerance,
                "computed": found,
            }
            before = [r for r in self._records if r["checkpoint"] < self._saved]
            self._write([*before, new][-KEPT:])

    def _write(self, records: list[dict[str, Any]]) -> None:
        self._records = records
        with contextlib.suppress(OSError):  # the next one is written again
            write_atomic(self._run.dir / AUDIT_FILE, json.dumps(records))
