"""What is recorded of a run: one JSON line per logged step, and a console line (or a bar) made from
the same record."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kempner.config import option

if TYPE_CHECKING:
    import torch

    from kempner.run import Run
    from kempner.step import Numbers

# Dense bf16 operations per second, without sparsity, by the name that the driver gives (NVIDIA and
# AMD data sheets). The first entry that the name contains counts: the PCIe and NVL cards before the
# SXM ones whose name theirs extends.
PEAK_BF16 = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "A10": 125e12,
    "L40S": 362e12,
    "V100": 125e12,
    "MI300X": 1307e12,
    "MI250X": 383e12,
}


@dataclass(frozen=True)
class MetricsConfig:
    log_interval: int = option(10, "steps between lines", minimum=1)
    peak_tflops: float | None = option(
        None,
        "operations per second of one device for MFU, in 1e12; unset: from its name",
        minimum=0.0,
    )


def peak_flops(cfg: MetricsConfig, device_name: str) -> float | None:
    """Peak of one device in operations per second, None where it is not known (a CPU)."""
    if cfg.peak_tflops is not None:
        return cfg.peak_tflops * 1e12
    return next((peak for name, peak in PEAK_BF16.items() if name in device_name), None)


@dataclass
class Clock:
    """Splits the wall time of the host into named parts; what is in no part is compute."""

    parts: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - began

    def lap(self) -> dict[str, float]:
        """Seconds since the last lap: `total` and the parts. Starts the next lap."""
        now = time.perf_counter()
        lap = {"total": now - self.began, **self.parts}
        self.began, self.parts = now, {}
        return lap


class Recorder:
    """Rank 0 writes metrics.jsonl and the console's lines from it; the other ranks only keep the
    clock.

    The file is appended to and never rewritten: after a resume the later line of a step counts.
    """

    def __init__(
        self, cfg: MetricsConfig, run: Run, flops_per_token: float, device: torch.device
    ) -> None:
        """`flops_per_token`: operations of the training, see ModelConfig.flops_per_token."""
        self.cfg, self.run, self.device = cfg, run, device
        self.clock = Clock()
        self.skipped = 0
        self._last: tuple[int, int] | None = None  # step and tokens of the line before
        self._writes = run.place.rank == 0
        name = device_name(device)
        peak = peak_flops(cfg, name)
        self._peak = peak and peak * run.place.world_size
        self._flops_per_token = flops_per_token
        self._about = f"{name}; MFU = tokens/s x {flops_per_token:.3g} flops/token / " + (
            f"({run.place.world_size} x {peak:.3g} flops/s)" if peak else "peak: unknown for it"
        )
        if self._writes:
            path = run.dir / "metrics.jsonl"
            end_torn_line(path)
            self._file = open(path, "a", buffering=1)  # noqa: SIM115 (lives as long as the run)

    def begin(self, step: int, tokens: int) -> None:
        """The clock and the rates start here."""
        self._last = (step, tokens)
        self.run.say(self._about)
        self.clock.lap()

    def step(self, numbers: Numbers) -> None:
        """Record a step, if its line is due."""
        self.skipped += numbers.bad
        self.run.progress(numbers.step)
        steps, tokens = self._last or (0, 0)
        last = numbers.step == self.run.cfg.train.max_steps
        if not (numbers.step % self.cfg.log_interval == 0 or last) or numbers.step == steps:
            return
        lap = self.clock.lap()
        count = numbers.step - steps
        rate = (numbers.tokens - tokens) / lap["total"]
        self._last = (numbers.step, numbers.tokens)
        parts = {f"{k}_time": lap.get(k, 0.0) / count for k in ("data", "checkpoint", "eval")}
        record = {
            "step": numbers.step,
            "loss": numbers.loss,
            "lr": numbers.lr,
            "grad_norm": numbers.grad_norm,
            "tokens": numbers.tokens,
            "samples": numbers.samples,
            "tokens_per_s": rate,
            "step_time": lap["total"] / count,
            **parts,
            "compute_time": lap["total"] / count - sum(parts.values()),
            "mfu": self._peak and rate * self._flops_per_token / self._peak,
            "memory_gib": memory_gib(self.device),
            "skipped": self.skipped,
        }
        self.write(record)
        self.run.say(line(record, self.run.cfg.train.max_steps))

    def validation(self, step: int, loss: float, tokens: int) -> None:
        self.write({"step": step, "val_loss": loss, "val_tokens": tokens})
        self.run.say(f"step {step}  validation loss {loss:.4f} over {tokens:,} tokens")

    def write(self, record: dict[str, Any]) -> None:
        """One line; numbers that JSON does not know (a non-finite loss) become null."""
        if not self._writes:
            return
        head = {"step": record["step"], "time": round(time.time(), 3), "attempt": self.run.attempt}
        known = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        with contextlib.suppress(OSError):  # a full disk must not end the training
            self._file.write(json.dumps({**head, **known}) + "\n")


def device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def memory_gib(device: torch.device) -> float:
    """Most memory so far, in GiB: of the device's tensors, or of the process on a CPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


def line(record: dict[str, Any], max_steps: int) -> str:
    """The console's form of a step's record."""
    total = max(record["step_time"], 1e-9)
    share = " ".join(
        f"{k} {100 * record[f'{k}_time'] / total:.0f}%" for k in ("data", "checkpoint")
    )
    mfu = f"  mfu {100 * record['mfu']:.1f}%" if record["mfu"] is not None else ""
    skipped = f"  skipped {record['skipped']}" if record["skipped"] else ""
    return (
        f"step {record['step']:>{len(str(max_steps))}}/{max_steps}  loss {record['loss']:.4f}  "
        f"lr {record['lr']:.2e}  |g| {record['grad_norm']:.3f}  {record['tokens_per_s']:,.0f} tok/s  "
        f"{record['step_time']:.3f} s/step ({share}){mfu}{skipped}"
    )


def read(path: Path) -> list[dict[str, Any]]:
    """All records in order; of two lines of one step and kind the later stands. A torn last line is
    left out."""
    newest: dict[tuple[int, str], dict[str, Any]] = {}
    with open(path) as file:
        for text in file:
            with contextlib.suppress(ValueError):
                record = json.loads(text)
                kind = "loss" if "loss" in record else "val_loss"
                newest[record["step"], kind] = record
    return sorted(newest.values(), key=lambda record: int(record["step"]))


def end_torn_line(path: Path) -> None:
    """A killed run may have left half a line: end it, so that it does not swallow ours."""
    if path.exists() and path.stat().st_size:
        with open(path, "rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
