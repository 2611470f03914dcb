"""A run's recorder: metrics.jsonl, and the console lines made from it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kempner.jobs.system.files import LineFile
from kempner.train.objective import Objective
from kempner.train.progress import Progress
from kempner.train.recording.metrics import Clock, console_line
from kempner.train.recording.run_directory import Run
from kempner.train.replicas import Replicas
from kempner.train.resilience.requests import ASKS_PROFILE
from kempner.train.step import StepResult

if TYPE_CHECKING:
    from kempner.optim.spikes import Spikes
    from kempner.train.extensions import Loader
    from kempner.train.recording.profiling import Profiler


def has_validation(run_dir: Path, step: int) -> bool:
    """Return whether metrics.jsonl has a validation at this step."""
    path = run_dir / "metrics.jsonl"
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        # Match text, as parsing 100,000 lines is slow; write() fixes the format.
        return any(line.startswith(f'{{"step": {step},') and '"val_loss":' in line for line in file)
    return False


class Recorder:
    """The recorder. Rank 0 writes metrics.jsonl and the console lines; other ranks only
    keep the clock.

    The file is only appended to: after a resume, the later line of a step counts.
    """

    def __init__(
        self,
        run: Run,
        device: torch.device,
        progress: Progress,
        loader: Loader,
        objective: Objective,
        replicas: Replicas,
        spikes: Spikes | None = None,
    ) -> None:
        """`loader`, `objective`, `replicas` and `spikes` define how their numbers are recorded."""
        cfg, world_size = run.cfg.metrics, run.world.size * run.world.replicas
        self.run, self.device, self.clock = run, device, Clock()
        if device.type == "cuda":
            from kempner.train.recording.gpu_clock import GpuClock

            self.clock = GpuClock()
        self._loader, self._objective = loader, objective
        self._replicas, self._spikes = replicas, spikes
        # Open it now if it records from the start, or must report that it cannot.
        early = run.cfg.profile.allocations or os.environ.get("KEMPNER_NSYS")
        self._profiler = self._open_profiler() if early else None
        self.skipped = 0
        # The previous line's step, tokens and time spent.
        self._last: tuple[int, int, dict[str, float]]
        self.begin(progress)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        peak: float | None = None
        if device.type == "cuda" or cfg.peak_tflops is not None:
            from kempner.train.recording.peak import peak_flops

            peak = peak_flops(cfg, name)
        self._peak = peak and peak * world_size
        window = run.cfg.model.sliding_window
        self._keys = None if run.world.rank else loader.keys_per_query(window)  # it opens files
        flops = self._flops_per_token(run.cfg.train.max_steps)
        about = f"{name}; MFU = tokens/s x {flops:.3g} flops/token / " + (
            f"({world_size} x {peak:.3g} flops/s)" if peak else "peak, which is not known for it"
        )
        run.announce(about)
        self._file: LineFile | None = None
        if run.world.rank == 0:
            self._path = run.dir / "metrics.jsonl"
            self._file = LineFile(self._path)

    def _open_profiler(self) -> Profiler:
        from kempner.train.recording.profiling import Profiler

        run = self.run
        ranks, size = run.cfg.profile.ranks, run.world.size
        if run.world.rank == 0 and all(rank >= size for rank in ranks):
            run.announce(
                f"profile.ranks = {', '.join(map(str, ranks)) or '()'}: none of the {size} rank(s) "
                "writes a trace; give --profile.ranks=0"
            )
        return Profiler(run.cfg.profile, run.dir, run.world.rank, self.device, run.announce)

    def _flops_per_token(self, step: int) -> float:
        cfg = self.run.cfg
        frozen = cfg.lora.rank > 0  # the adapters themselves hardly count
        pieces = cfg.train.stage(step).pieces
        # Counted in whole samples: if these are cut, a query sees other keys.
        keys = self._keys if pieces == 1 else None
        return cfg.model.flops_per_token(cfg.train.seq_len // pieces, frozen, keys)

    def begin(self, progress: Progress) -> None:
        """Reset the rates: at a start, and when the run has gone back."""
        self._last = (progress.step, progress.tokens, self.clock.begin())

    def step(self, result: StepResult) -> None:
        """Record a step if its line is due; a skipped step always, with its samples."""
        asked = result.values[ASKS_PROFILE] > 0
        last = result.step == self.run.cfg.train.max_steps
        if asked and self._profiler is None:  # few runs ever are
            self._profiler = self._open_profiler()
        if self._profiler is not None:
            self._profiler.step(result.step, asked, last)
        self.run.progress(result.step)
        if result.bad:
            self.skipped += 1
            batch = self.run.cfg.train.stage(result.step - 1).batch
            samples = self._loader.sample_numbers(result.after.samples - batch, batch)
            what: dict[str, Any] = {"not_finite": True}
            why = "was not finite"
            if result.spike and self._spikes is not None:
                what, why = self._spikes.record(result.values)
            if self.run.cfg.profile.layers_interval:
                from kempner.train.recording.layers import layer_figures

                what["layers"] = layer_figures(result.values)
            self.write({"step": result.step, **what, "sample_numbers": samples})
            self.run.announce(f"step {result.step} {why}: its update is skipped")
        line, texts = self._replicas.record(result)
        if line:
            self.write(line)
        for text in texts:
            self.run.announce(text)
        due = result.step % self.run.cfg.metrics.log_interval == 0 or last
        if due or self._loader.at_once:
            self._line(result)

    def _line(self, result: StepResult) -> None:
        step, tokens, before = self._last
        lap = {key: value - before.get(key, 0.0) for key, value in result.spent.items()}
        count = max(1, result.step - step)
        trained = result.after.tokens - tokens
        rate, done = (n / lap["total"] for n in (trained, self._loader.places(trained)))
        self._last = (result.step, result.after.tokens, result.spent)
        parts = {f"{k}_time": lap.get(k, 0.0) / count for k in ("data", "checkpoint", "eval")}
        record: dict[str, Any] = {
            "step": result.step,
            "loss": result.values["loss"],
            "lr": result.lr,
            "grad_norm": result.values["grad_norm"],
            "tokens": result.after.tokens,
            "samples": result.after.samples,
            "tokens_per_s": rate,
            "step_time": lap["total"] / count,
            **parts,
            "compute_time": (2 * lap["total"] - sum(lap.values())) / count,  # lap has a total
            "mfu": self._peak and done * self._flops_per_token(result.step - 1) / self._peak,
            "memory_gib": memory_gib(self.device),
            "skipped": self.skipped,
        }
        record |= self._loader.record(result, lap, self._objective.counted)
        record |= self._objective.record(result.values)
        self.write(record)
        self._add_results()
        self.run.announce(console_line(record, self.run.cfg.train.max_steps))

    def validation(self, step: int, sets: dict[str, tuple[float, int]]) -> None:
        """Record a validation. `sets`: loss and tokens of each; val_loss is the first set's."""
        loss, tokens = next(iter(sets.values()))
        record: dict[str, Any] = {"step": step, "val_loss": loss, "val_tokens": tokens}
        if len(sets) > 1:
            record["val_sets"] = {
                name: {"loss": loss, "tokens": tokens} for name, (loss, tokens) in sets.items()
            }
        self.write(record)
        for name, (loss, tokens) in sets.items():
            of = f" of {name}" if len(sets) > 1 else ""
            self.run.announce(f"step {step}  validation loss{of} {loss:.4f} over {tokens:,} tokens")

    def write(self, record: dict[str, Any]) -> None:
        """Write one line; numbers that JSON lacks (a non-finite loss) become null."""
        if self._file is None:
            return
        # "step" comes first: has_validation() looks for it at the beginning of a line.
        head = {"step": record["step"], "time": round(time.time(), 3), "attempt": self.run.attempt}
        text, file = json.dumps(_known_to_json({**head, **record})), self._file
        self.run.background.put(lambda: file.write(text), self._path)

    def _add_results(self) -> None:
        """Add the results of scripts/eval.py, as this process is the only writer of the file."""
        if (file := self._file) is not None:
            run_dir = self.run.dir
            self.run.background.put(lambda: _add_results(run_dir, file.write), self._path)


def _known_to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _known_to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_known_to_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _add_results(run_dir: Path, write: Callable[[str], object]) -> None:
    if (run_dir / "eval").is_dir():
        from kempner.jobs.records.results import add_results  # few runs are evaluated

        add_results(run_dir, write)


def memory_gib(device: torch.device) -> float:
    """Return the peak memory so far in GiB: of the device's tensors or, on a CPU,
    of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
