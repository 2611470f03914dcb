"""Recorder of a run: metrics.jsonl, and the console's lines from it."""

from __future__ import annotations

import json
import math
import resource
import time
from typing import Any

import torch

from kempner.data.loader import TrainLoader
from kempner.files import LineFile
from kempner.history import results
from kempner.metrics import Clock, line, peak_flops
from kempner.profiling import Profiler
from kempner.progress import Progress
from kempner.resilience.requests import ASKS_PROFILE
from kempner.rl.feed import Feed
from kempner.run_directory import Run
from kempner.step import StepResult


class Recorder:
    """The recorder. Rank 0 writes metrics.jsonl and the console's lines from it; the other ranks
    only keep the clock.

    The file is appended to and never rewritten: after a resume the later line of a step counts.
    """

    def __init__(
        self, run: Run, device: torch.device, progress: Progress, loader: TrainLoader | Feed
    ) -> None:
        cfg, world_size = run.cfg.metrics, run.world.size * run.world.replicas
        self.run, self.device, self.clock = run, device, Clock()
        self._profiler = Profiler(run.cfg.profile, run.dir, run.world.rank, device, run.announce)
        self.skipped = 0
        # The previous line's step, tokens, and the time spent until then.
        self._last: tuple[int, int, dict[str, float]]
        self.begin(progress)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
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

    def _flops_per_token(self, step: int) -> float:
        cfg = self.run.cfg
        frozen = cfg.lora.rank > 0  # the adapters themselves hardly count
        pieces = cfg.train.stage(step).pieces
        keys = self._keys if pieces == 1 else None
        return cfg.model.flops_per_token(cfg.train.seq_len // pieces, frozen, keys)

    def begin(self, progress: Progress) -> None:
        """Start the rates: at a start, and when the run has gone back."""
        self._last = (progress.step, progress.tokens, self.clock.spent())

    def step(self, result: StepResult, loader: TrainLoader | Feed) -> None:
        """Record a step, if its line is due; one that was skipped always, with its samples."""
        self._profiler.step(result.step, result.values[ASKS_PROFILE] > 0)
        self.run.progress(result.step)
        if result.bad:
            self.skipped += 1
            batch = self.run.cfg.train.stage(result.step - 1).batch
            samples = loader.sample_numbers(result.after.samples - batch, batch)
            what, why = _of_skipped(result)
            self.write({"step": result.step, **what, "sample_numbers": samples})
            self.run.announce(f"step {result.step} {why}: its update is skipped")
        if "round_loss" in result.values:
            found = _of_round(result)
            self.write(found)
            for replica in found["not_finite"]:
                self.run.announce(
                    f"replica {replica}: had weights that were not finite when it sent what they "
                    f"have changed, before step {result.step}: these counted as unchanged"
                )
        last = result.step == self.run.cfg.train.max_steps
        due = result.step % self.run.cfg.metrics.log_interval == 0 or last
        if due or isinstance(loader, Feed):  # which has more to say of each step
            self._line(result, loader)

    def _line(self, result: StepResult, loader: TrainLoader | Feed) -> None:
        step, tokens, before = self._last
        lap = {key: value - before.get(key, 0.0) for key, value in result.spent.items()}
        count = max(1, result.step - step)
        rate = (result.after.tokens - tokens) / lap["total"]
        done = loader.places / lap["total"] if isinstance(loader, Feed) else rate
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
            "compute_time": lap["total"] / count - sum(parts.values()),
            "mfu": self._peak and done * self._flops_per_token(result.step - 1) / self._peak,
            "memory_gib": memory_gib(self.device),
            "skipped": self.skipped,
        }
        if isinstance(loader, Feed):
            record |= loader.record(result.values, lap)
            record["compute_time"] -= record["publish_seconds"]
        elif len(loader.names) > 1:
            record["sources"] = _by_source(result, loader)
        if packing := {each.name: each.packing for each in loader.sources if each.packing}:
            record |= {"loss_tokens": result.values["tokens"], "packing": packing}
        if "load_max" in result.values:
            record["experts"] = _of_experts(result)
        if "z_loss_sum" in result.values:
            record["z_loss"] = result.values["z_loss_sum"] / max(1.0, result.values["tokens"])
        if "margin_sum" in result.values:
            pairs = record["pairs"] = record.pop("loss_tokens")
            record["accuracy"] = result.values["ordered_right"] / pairs if pairs else None
            record["margin"] = result.values["margin_sum"] / pairs if pairs else None
        self.write(record)
        self._add_results()
        self.run.announce(line(record, self.run.cfg.train.max_steps))

    def validation(self, step: int, sets: dict[str, tuple[float, int]]) -> None:
        """Record a validation. `sets`: loss and tokens of each; val_loss is that of the first."""
        loss, tokens = next(iter(sets.values()))
        record: dict[str, Any] = {"step": step, "val_loss": loss, "val_tokens": tokens}
        if len(sets) > 1:
            record["val_sets"] = {
                name: {"loss": loss if math.isfinite(loss) else None, "tokens": tokens}
                for name, (loss, tokens) in sets.items()
            }
        self.write(record)
        for name, (loss, tokens) in sets.items():
            of = f" of {name}" if len(sets) > 1 else ""
            self.run.announce(f"step {step}  validation loss{of} {loss:.4f} over {tokens:,} tokens")

    def write(self, record: dict[str, Any]) -> None:
        """Write one line; numbers that JSON does not know (a non-finite loss) become null."""
        if self._file is None:
            return
        head = {"step": record["step"], "time": round(time.time(), 3), "attempt": self.run.attempt}
        known = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        text, file = json.dumps({**head, **known}), self._file
        self.run.background.put(lambda: file.write(text), self._path)

    def _add_results(self) -> None:
        """Add the results of scripts/eval.py: this process is the only writer of the file."""
        if (file := self._file) is not None:
            run_dir = self.run.dir
            self.run.background.put(lambda: results.add(run_dir, file.write), self._path)


def _by_source(result: StepResult, loader: TrainLoader) -> dict[str, dict[str, float | None]]:
    """Return loss and tokens of this step, and the epochs so far, by source."""
    drawn = loader.mixture.drawn(result.after.samples)
    found: dict[str, dict[str, float | None]] = {}
    for source, samples in zip(loader.sources, drawn, strict=True):
        loss_sum, tokens = (result.values[f"{x} of {source.name}"] for x in ("loss_sum", "tokens"))
        loss = loss_sum / tokens if tokens and math.isfinite(loss_sum) else None
        epochs = None if source.ordered else round(samples / len(source), 4)
        found[source.name] = {"loss": loss, "tokens": tokens, "epochs": epochs}
    return found


def _of_experts(result: StepResult) -> dict[str, float]:
    """Return the load of the busiest and of the idlest expert of any layer in this step, as a
    multiple of the mean; the auxiliary loss, 0 if there is none: mean of the layers, 1 at equal
    load; and their z-loss, if there is one: mean of the layers, too."""
    values, tokens = result.values, max(1.0, result.values["tokens"])
    found = {name: values[name] for name in ("load_max", "load_min")}
    found["aux_loss"] = values.get("aux_loss_sum", 0.0) / tokens
    if "router_z_loss_sum" in values:
        found["z_loss"] = values["router_z_loss_sum"] / tokens
    return found


def _of_skipped(result: StepResult) -> tuple[dict[str, Any], str]:
    """Return the record and the message for a skipped step."""
    if not result.spike:
        return {"not_finite": True}, "was not finite"
    names = {"loss": "loss", "grad_norm": "gradient norm"}
    limits = {name: result.values[f"{name}_limit"] for name in names}
    found = {name: result.values[name] for name in names}
    text = ", ".join(f"{names[n]} {found[n]:.4g} (limit {limits[n]:.4g})" for n in names)
    return {"spike": found | {f"{n}_limit": v for n, v in limits.items()}}, f"is a spike: {text}"


def _of_round(result: StepResult) -> dict[str, Any]:
    """Return the numbers that all replicas share: see Replicas."""
    whole = ("round", "replicas", "bytes_sent", "bytes_data_parallel")
    parts = ("round_loss", "outer_time")
    return {
        "step": result.step,
        **{name: int(result.values[name]) for name in whole},
        **{name: result.values[name] for name in parts},
        "not_finite": [
            i for i in range(int(result.values["replicas"])) if result.values[f"spoilt {i}"]
        ],
    }


def memory_gib(device: torch.device) -> float:
    """Return the peak memory so far, in GiB: of the device's tensors, or of the process on a
    CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
