"""Fingerprints of the first step after the newest checkpoint, RUN/audit.json: an idle spare
recomputes it from that checkpoint (audit.py). Loaded only if the job has a spare."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from kempner.checkpoint.history import MANIFEST
from kempner.config.loading import config_hash
from kempner.data.batch import MicroBatch
from kempner.jobs.system.files import name_of_step, write_atomic
from kempner.jobs.this_job import host_name
from kempner.parallel.compiled import kind_of_cpu
from kempner.train.integrity.fingerprint import checksum
from kempner.train.recording.run_directory import Run
from kempner.train.sections import RunConfig

if TYPE_CHECKING:
    from kempner.checkpoint.checkpointer import Checkpointer

AUDIT_FILE = "audit.json"
FORMAT = 1  # of that file
MOST_THREADS = 1024


def obstacle(cfg: RunConfig) -> str:
    """Return why one device cannot recompute a rank's work in this run; "" if it can."""
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
    """Name the properties that two devices must share to compute the same bits."""
    # Include the CPU model: math libraries have different code for each.
    name = f"CPU {torch.backends.cpu.get_cpu_capability()} {kind_of_cpu()}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return f"{name}, torch {torch.__version__}"


def fingerprint_of_batch(batches: Sequence[MicroBatch]) -> list[int]:
    """Return checksums of the tokens, so that changed data is not blamed on a device."""
    return [int(checksum(part)) for each in batches for part in (each.inputs, each.targets)]


def read_first_step(run_dir: Path) -> dict[str, Any] | None:
    """Read the record, if any. Raises ValueError if it is damaged or of another version."""
    try:
        text = (run_dir / AUDIT_FILE).read_bytes()
    except FileNotFoundError:
        return None
    try:
        record: dict[str, Any] = json.loads(text)
        if record["format"] != FORMAT:
            raise ValueError(f"its format is {record['format']}, not {FORMAT}")
        for name in ("checkpoint", "manifest", "ranks", "per_node"):
            record[name] = int(record[name])
        record["tolerance"] = float(record["tolerance"])
        for each in record["computed"]:
            rows = np.frombuffer(base64.b64decode(each["rows"]), np.int64).reshape(-1, 3)
            # A copy, because torch warns of read-only memory, such as the bytes of b64decode().
            each["rows"] = torch.from_numpy(rows.copy())
            each["threads"], each["batch"] = int(each["threads"]), [int(x) for x in each["batch"]]
            if not (rows.size and 0 < each["threads"] <= MOST_THREADS):
                raise ValueError("a rank has no rows, or no threads")
            each["host"], each["device"] = str(each["host"]), str(each["device"])
        if not 0 < record["ranks"] == len(record["computed"]):
            raise ValueError("it has not all ranks")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return record


class FirstSteps:
    """The record of this run. All ranks call the same methods."""

    def __init__(self, run: Run, device: torch.device, checkpointer: Checkpointer) -> None:
        self._run, self._checkpointer = run, checkpointer
        self._base, self._is_loaded = -1, True
        self._unwritten: dict[str, Any] | None = None  # until its checkpoint is durable; on rank 0
        self._writer: threading.Thread | None = None
        self._about = {
            "format": FORMAT,
            "config": config_hash(run.cfg),
            "attempt_id": os.environ.get("KEMPNER_ATTEMPT_ID", "0"),
            "ranks": run.world.size,
            "per_node": run.world.per_node,
        }
        self._own = {
            "host": host_name(),
            "device": kind_of_device(device),
            "threads": torch.get_num_threads(),  # sums on a CPU depend on it
        }

    def begin(self, step: int, is_loaded: bool) -> None:
        """Note that the weights are those of the checkpoint of `step`, which was loaded or is about
        to be saved."""
        self._base, self._is_loaded, self._unwritten = step, is_loaded, None

    def is_due(self, step: int) -> bool:
        """Return whether `step` is the first one after a checkpoint."""
        return step == self._base + 1

    def add(self, batches: Sequence[MicroBatch], rows: Tensor, tolerance: float) -> None:
        """Take each rank's results of that step."""
        text = base64.b64encode(rows.numpy().tobytes()).decode()
        mine = {**self._own, "batch": fingerprint_of_batch(batches), "rows": text}
        first = self._run.world.rank == 0
        found: list[Any] | None = [None] * self._run.world.size if first else None
        dist.gather_object(mine, found)
        if first:
            facts = {"checkpoint": self._base, "tolerance": tolerance}
            self._unwritten = {**self._about, **facts, "computed": found}

    def write(self) -> None:
        """Write the record once its checkpoint is durable: until then, a checkpoint of the same
        step may exist from an abandoned branch of the run. A thread writes, because an unresponsive
        file system must not hold up the steps."""
        record, saves = self._unwritten, self._checkpointer
        if record is None or (not self._is_loaded and saves.in_flight == self._base):
            return
        self._unwritten = None
        durable = self._is_loaded or (saves.saved_step == self._base and not saves.failed_saves)
        if durable and not (self._writer is not None and self._writer.is_alive()):
            self._writer = threading.Thread(target=self._write, args=(record,), daemon=True)
            self._writer.start()

    def _write(self, record: dict[str, Any]) -> None:
        manifest = self._checkpointer.root / name_of_step(record["checkpoint"]) / MANIFEST
        with contextlib.suppress(OSError):  # the next record is written anyway
            # Tells an auditor if the checkpoint of this step has since been replaced.
            record["manifest"] = zlib.crc32(manifest.read_bytes())
            write_atomic(self._run.dir / AUDIT_FILE, json.dumps(record))
