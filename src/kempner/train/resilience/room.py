"""train.recompute = auto: as little recomputation as the memory allows.

The planner estimates each choice's needs. A trial, two steps with random tokens, measures the
first choice that should fit. If memory runs out, it tries the next choice that needs less; if there
is room for less recomputation, that one. Only the choice outlasts a trial; later attempts on the
same kind of GPU reuse it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kempner.config.option import ConfigError
from kempner.data.batch import MicroBatch
from kempner.jobs.system.files import write_atomic
from kempner.optim.build import build_optimizer
from kempner.parallel.build import build_model
from kempner.train import lookup
from kempner.train.parts import open_objective
from kempner.train.sections import RunConfig, TrainConfig, micro_batch
from kempner.train.step import StepSums, forward_backward, reduce_step, update_weights

if TYPE_CHECKING:
    from kempner.parallel.layout import Layout
    from kempner.train.recording.run_directory import Run

_GIB = 2.0**30
MEMORY_VARIABLE = "KEMPNER_MEMORY_GIB"
CHOICE_FILE = "recompute.json"  # in the run's directory
_SHARE = 0.95  # of the free memory, for tensors: the rest is for NCCL and fragmentation


def choose_recompute(cfg: RunConfig, run: Run, layout: Layout, device: torch.device) -> TrainConfig:
    """Return [train] with auto replaced by a choice. All ranks must call it, before the model is
    built. Raises torch.OutOfMemoryError if not even full recomputation fits."""
    limit = memory_limit(device)
    if limit is None:
        run.announce("recomputation: none (train.recompute = auto): the memory has no limit here")
        return replace(cfg.train, recompute="none")
    found = lookup.recompute_choices(cfg, run.world, device.type == "cuda")
    choices = [RecomputeChoice(*each) for each in found]
    choice = _Trials(cfg, run, layout, device, choices, limit).choose()
    run.announce(f"recomputation: {choice} (train.recompute = auto)")
    return replace(cfg.train, **choice.values)


def memory_limit(device: torch.device) -> float | None:
    """Return the bytes that tensors may take, the smallest over all ranks; None:
    unknown. Raises ConfigError."""
    limit = math.inf
    if device.type == "cuda":
        # Memory reserved by torch is used to the driver, but free for a trial.
        limit = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        limit *= _SHARE
    if text := os.environ.get(MEMORY_VARIABLE):
        named = 0.0
        with contextlib.suppress(ValueError):
            named = float(text)
        if not 0 < named < math.inf:
            raise ConfigError(
                f"{MEMORY_VARIABLE} = {text}: give a number of GiB over 0, or unset it"
            )
        limit = min(limit, named * _GIB)
    # The smallest, so that all ranks build the same model.
    smallest = torch.tensor(limit, dtype=torch.float64, device=device)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return None if smallest.isinf() else float(smallest)


@dataclass
class RecomputeChoice:
    """Values of [train], and the planner's estimate of the bytes that a rank needs with them."""

    values: dict[str, Any]
    estimate: float
    tried: bool = False
    failed: bool = False  # it needs more memory than available

    def __str__(self) -> str:
        every = self.values["recompute_every"]
        return f"{self.values['recompute']}" + (f", one block in {every}" if every > 1 else "")


@dataclass
class _Trials:
    cfg: RunConfig
    run: Run
    layout: Layout
    device: torch.device
    choices: list[RecomputeChoice]  # the fastest first
    limit: float

    def choose(self) -> RecomputeChoice:
        stored = self._load()
        if "values" in stored:
            return RecomputeChoice(stored["values"], 0.0)
        for number in stored.get("failed", ()):
            self.choices[number].failed = True
        left = [choice for choice in self.choices if not choice.failed] or self.choices[-1:]
        smallest = min(left, key=lambda choice: choice.estimate)
        if smallest.estimate > self.limit:
            one = self.cfg.train.micro_batch == 1
            fewer = "a shorter --train.seq_len" if one else "a smaller --train.micro_batch"
            self.run.announce(
                f"warning: train.recompute = auto: {smallest} needs {smallest.estimate / _GIB:.2f} "
                f"GiB by the estimate, and a rank has {self.limit / _GIB:.2f}; if a trial is out "
                f"of memory, give {fewer}, --train.offload_activations=2 or more GPUs"
            )
        choice = next((each for each in left if each.estimate <= self.limit), smallest)
        while not choice.tried:
            choice.tried = True
            peak = self._measure(choice)
            choice = self._after(choice, peak)
        if self.run.world.rank == 0:
            self._store(values=choice.values)
        return choice

    def _after(self, choice: RecomputeChoice, peak: float) -> RecomputeChoice:
        """Return the choice to try next, or the tried one that stays."""
        if peak > self.limit:
            choice.failed = True
            if smaller := self._smaller(choice):
                return smaller[0]
            # A choice with a finite peak has run, even over the limit: it stays if nothing
            # smaller is left.
            if math.isinf(peak):
                raise torch.OutOfMemoryError(
                    f"train.recompute = auto: a step is out of memory even with {choice}"
                )
            return choice
        for other in self.choices[: self.choices.index(choice)]:
            # Corrected by this trial's excess over its estimate.
            needs = other.estimate + peak - choice.estimate
            if needs <= self.limit and not (other.tried or other.failed):
                return other
        return choice

    def _smaller(self, choice: RecomputeChoice) -> list[RecomputeChoice]:
        less = (each for each in self.choices if each.estimate < choice.estimate)
        return [each for each in less if not each.failed]

    def _measure(self, choice: RecomputeChoice) -> float:
        """Return the bytes of the rank that needs most; infinite if memory runs out. Raises
        RuntimeError if other ranks wait in the middle of a step: this attempt ends, and the next
        one knows why."""
        try:
            train = replace(self.cfg.train, **choice.values)
            peak = try_steps(self.cfg, train, self.layout, self.device, self.run)
            peak = choice.estimate if peak is None else peak
        except torch.OutOfMemoryError as error:
            peak = math.inf
            if self.run.world.size > 1:
                if not self._smaller(choice):
                    raise
                choice.failed = True
                self._store(failed=[i for i, x in enumerate(self.choices) if x.failed])
                raise RuntimeError(
                    f"train.recompute = auto: {choice} is out of memory; the next start takes "
                    "more recomputation"
                ) from error
        release_memory(self.device, self.cfg.train.compile)
        most = torch.tensor(peak, dtype=torch.float64, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        text = "out of memory" if most.isinf() else f"{float(most) / _GIB:.3f} GiB"
        self.run.log(f"trial of recomputation {choice}: {text} of {self.limit / _GIB:.3f}")
        return float(most)

    # --- what earlier attempts found ---

    @property
    def _about(self) -> dict[str, Any]:
        """Facts that a choice depends on: if any has changed, the choice is made again."""
        cuda = self.device.type == "cuda"
        return {
            "gpu": torch.cuda.get_device_name(self.device) if cuda else "CPU",
            "limit": os.environ.get(MEMORY_VARIABLE, ""),
            "estimates": [round(choice.estimate) for choice in self.choices],
        }

    def _load(self) -> dict[str, Any]:
        stored: list[dict[str, Any]] = [{}]
        if self.run.world.rank == 0:
            with contextlib.suppress(OSError, ValueError):
                stored[0] = json.loads((self.run.dir / CHOICE_FILE).read_text())
            about = self._about
            if not isinstance(stored[0], dict):
                stored[0] = {}
            if {key: stored[0].get(key) for key in about} != about:
                stored[0] = {}
        # Ranks that read the file separately could find different contents.
        dist.broadcast_object_list(stored, src=0)
        return stored[0]

    def _store(self, **found: Any) -> None:
        write_atomic(self.run.dir / CHOICE_FILE, json.dumps({**self._about, **found}) + "\n")


def try_steps(
    cfg: RunConfig, train: TrainConfig, layout: Layout, device: torch.device, run: Run
) -> float | None:
    """Train two steps with a temporary model; returns the peak in bytes of the second, when the
    optimizer has its state; None on a CPU, which cannot measure it."""
    rows = micro_batch(train, layout.shares, train.sequences)
    passes = train.sequences // (rows * layout.shares)
    # From the second pass on there are gradients beside activations; later passes need no more. A
    # pipeline holds the activations of all passes under way.
    passes = passes if layout.pp is not None else min(2, passes)
    model = build_model(cfg.model, layout, train, cfg.distributed, cfg.lora, experts=cfg.experts)
    optimizer = build_optimizer(model, cfg.optimizer)
    objective = open_objective(cfg, layout, model, run, device)
    # Equal tokens would all go to the same experts.
    fixed = torch.Generator().manual_seed(0)
    tokens = torch.randint(cfg.model.vocab_size, (rows, train.seq_len), generator=fixed)
    batches, count = [MicroBatch(tokens, tokens)] * passes, train.sequences * train.seq_len
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        sums = StepSums((), device)
        found: Any = forward_backward(model, objective, batches, sums, count, leave=None)
        found = {**layout.once(found), "grad_norm_sq": layout.norm_sq(model.parameters())}
        update_weights(optimizer, reduce_step(found, layout), count, 0.0, train.grad_clip)
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None


def release_memory(device: torch.device, compiled: bool) -> None:
    if compiled:
        # The budget is no guard of compiled code: the next model would run this one's.
        torch.compiler.reset()
    # A model refers to itself, e.g. by begin_micro_batch: only garbage collection frees it.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
