"""Profiles of the time and memory of a few steps, on request, and of the memory after it ran out.
`touch RUN/PROFILE` requests one; the files go into RUN/profile. Under Nsight Systems (KEMPNER_NSYS,
task.sh), nsys records the steps instead."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kempner.jobs.system.front_door import explain_os_error
from kempner.train.recording.config import ProfileConfig

if TYPE_CHECKING:
    import torch

ENTRIES = 100_000  # allocations with stacks; older ones are dropped
UNDER_NSYS = "KEMPNER_UNDER_NSYS"  # task.sh sets it to 1 for a rank started by nsys


class NsysRange:
    """A range recorded by Nsight Systems, with torch's operators and FSDP's modules
    as NVTX ranges."""

    def __init__(self) -> None:
        import torch

        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        self._names = torch.autograd.profiler.emit_nvtx()  # type: ignore[no-untyped-call]
        # Not a `with` block: the range begins in one step and ends in another.
        self._names.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        import torch

        self._names.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        # The host runs ahead: the GPU may still be working on the last step.
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


class Profiler:
    """A profiler. Call step() on all ranks after every step. All begin at the same step, because
    the request travels in the step's all-reduce."""

    def __init__(
        self,
        cfg: ProfileConfig,
        run_dir: Path,
        rank: int,
        device: torch.device,
        say: Callable[[str], None],
    ) -> None:
        self._cfg, self._dir, self._rank = cfg, run_dir / "profile", rank
        self._device, self._say = device, say
        self._running: torch.profiler.profile | NsysRange | None = None
        self._nsys = os.environ.get(UNDER_NSYS) == "1" and device.type == "cuda"
        if (ranks := os.environ.get("KEMPNER_NSYS")) and not {"SLURM_PROCID", "KP_RUN_DIR"} <= {
            *os.environ
        }:
            say(
                f"KEMPNER_NSYS={ranks}: has no effect outside of a Slurm job, whose scripts start "
                "these ranks under nsys"
            )
        self._first, self._left = 0, 0
        if cfg.allocations:
            record_allocations(device)

    def step(self, step: int, asked: bool, last: bool = False) -> None:
        """Advance. `asked`: a rank has received a request for a profile; `last`:
        no step follows."""
        if self._running is not None:
            self._left -= 1
            if last or not self._left:
                self._stop(step)
        elif asked and last:
            self._say("profile: the run ends here, and no step is left to record")
        elif asked and (self._nsys or self._rank in self._cfg.ranks):
            self._start(step)

    def _start(self, step: int) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._first, self._left = step + 1, self._cfg.steps
        if self._nsys:
            self._running = NsysRange()
            return
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # Start here, so that the snapshot has the stacks of these steps' allocations.
        record_allocations(self._device)
        self._running = profile(activities=activities, record_shapes=True, profile_memory=True)
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", ".*clears events"
            )  # torch 2.11 warns of cycles; here is one
            self._running.start()

    def _stop(self, step: int) -> None:
        """Write the files; the run waits meanwhile."""
        assert self._running is not None
        self._running.stop()
        if isinstance(self._running, NsysRange):
            self._running = None
            self._say(f"profile: Nsight Systems has recorded steps {self._first} to {step}")
            return
        try:
            self._write(self._running, f"steps-{self._first}-{step}-rank-{self._rank}")
        except OSError as error:  # e.g. a full disk, which the run survives
            self._say(f"profile: cannot be written: {explain_os_error(error)}")
        # Stacks cost time at each allocation: keep them only if requested.
        if not self._cfg.allocations:
            record_allocations(self._device, False)
        self._running = None

    def _write(self, profile: torch.profiler.profile, name: str) -> None:
        self._dir.mkdir(exist_ok=True)
        trace = self._dir / f"{name}.json.gz"
        profile.export_chrome_trace(str(trace))
        self._say(f"profile: {trace}")
        if memory_snapshot(self._device, self._dir / f"{name}.pickle"):
            self._say(f"memory: {self._dir / f'{name}.pickle'}")


def record_allocations(device: torch.device, on: bool = True) -> None:
    """Start or stop recording the stack of each GPU allocation, for memory_snapshot()."""
    import torch

    if device.type == "cuda":
        torch.cuda.memory._record_memory_history("all" if on else None, max_entries=ENTRIES)


def memory_snapshot(device: torch.device, path: Path) -> bool:
    """Write a snapshot of the GPU's memory for https://pytorch.org/memory_viz. Returns False on a
    CPU, whose allocator keeps no record."""
    import torch

    if device.type != "cuda":
        return False
    path.parent.mkdir(exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    return True
