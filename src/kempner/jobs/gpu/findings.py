"""Faults of GPUs and the reaction to each. No torch.

The table of docs/guide/resilience.md. Source: NVIDIA's Xid catalog and GPU debug guidelines
(docs.nvidia.com/deploy/xid-errors, docs.nvidia.com/deploy/gpu-debug-guidelines).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kempner.jobs.gpu.reading import REASONS, SLOWDOWNS, SWITCHES, GpuReading

# end: the run ends at once and restarts without the node. exclude: it goes on; a restart after a
# crash or a hang excludes the node. warn: for the administrator. note: recorded only.
FaultAction = Literal["end", "exclude", "warn", "note"]

# After these the GPU does not compute until it is reset, and the program may never be told: the
# catalog's immediate action is to reset the GPU or to restart the machine.
DEAD = {
    46: "the GPU has stopped processing",
    62: "its micro-controller has halted",
    79: "the GPU has fallen off the bus",
    95: "a memory error that could not be contained",
    119: "its system processor (GSP) does not answer",
    120: "its system processor (GSP) has failed",
    140: "a memory error that could not be corrected",
    143: "the GPU could not be initialized",
    158: "a fatal timeout of the GPU",
}
# Also hardware faults, but the program is told or may go on.
BROKEN_GPU = {
    48: "a double-bit memory error",
    64: "a broken row of memory could not be remapped",
    74: "an NVLink error",
    94: "a memory error that ends the programs that use the memory",
    109: "a context switch timed out",
    110: "a security fault",
    136: "a link could not be trained",
    **dict.fromkeys(range(144, 151), "an NVLink error"),
    155: "an NVLink error",
    171: "a memory error (DRAM) that could not be corrected",
    172: "a memory error (SRAM) that could not be corrected",
}
WORN = {
    63: "a broken row of memory is remapped at the next reset",
    92: "many single-bit memory errors",
    156: "a resource of the GPU is retired at the next reset",
    157: "a resource of the GPU could not be retired",
}
# All others blame no GPU: 13, 31, 43, 45 and 69 are mostly faults of the program, and 154 only
# repeats the recovery action of another Xid.

THROTTLED = 4  # readings, with a GPU slowed down in at least half of them
LOADED = 50.0  # percent: an idle GPU slows its link to save power
SWITCHED: dict[str, tuple[FaultAction, str]] = {
    "remapped_rows.failure": ("exclude", "a broken row of memory could not be remapped"),
    "remapped_rows.pending": ("warn", "a broken row of memory is remapped at the next reset"),
    "retired_pages.pending": ("warn", "a broken page of memory is retired at the next reset"),
}
ECC = "ecc.errors.uncorrected.volatile.total"
LINK_WIDTH, LINK_GENERATION = "pcie.link.width", "pcie.link.gen"


@dataclass(frozen=True)
class Finding:
    kind: Literal["xid", "lost", "ecc", "memory", "throttled", "link", "silent"]
    answer: FaultAction
    text: str
    gpu: GpuReading | None = None
    xid: int | None = None

    @property
    def what(self) -> str:
        """Description, with the GPU."""
        return f"{self.gpu.label}: {self.text}" if self.gpu is not None else self.text

    @property
    def key(self) -> tuple[object, ...]:
        """Identity of the finding: each is reported once."""
        where = None if self.gpu is None else self.gpu.pci or self.gpu.index
        return self.kind, where, self.xid, self.text if self.xid is None else ""


def of_xid(xid: int, text: str, gpu: GpuReading | None) -> Finding:
    """Return the finding for an Xid. `text`: the driver's message, or ""."""
    tables: tuple[tuple[dict[int, str], FaultAction], ...] = (
        (DEAD, "end"),
        (BROKEN_GPU, "exclude"),
        (WORN, "warn"),
    )
    for meanings, answer in tables:
        if xid in meanings:
            return Finding("xid", answer, f"Xid {xid}: {meanings[xid]}", gpu, xid)
    return Finding("xid", "note", f"Xid {xid}{f': {text}' if text else ''}", gpu, xid)


def at_rest(gpu: GpuReading) -> Iterator[tuple[str, str]]:
    """Yield (nvidia-smi's name, value) of the faults visible in one reading, for the preflight."""
    if gpu.lost:
        yield "state", "lost"
    if errors := gpu.number(ECC):
        yield ECC, f"{errors:.0f}"
    for name in gpu.switches:
        yield name, "Yes"
    for name, reason in zip(SLOWDOWNS, REASONS, strict=True):
        if name in gpu.slowdowns and name.startswith("hw_"):
            yield reason, "Active"
    if _narrow(gpu):
        yield f"{LINK_WIDTH}.current", f"{gpu.number(f'{LINK_WIDTH}.current'):.0f}"


def _narrow(gpu: GpuReading) -> bool:
    now, most = gpu.number(f"{LINK_WIDTH}.current"), gpu.number(f"{LINK_WIDTH}.max")
    return now is not None and most is not None and 0 < now < most


@dataclass
class ReadingComparison:
    """Compares each reading with the first one and with the last few."""

    first: dict[str, GpuReading] = field(default_factory=dict)
    last: dict[str, GpuReading] = field(default_factory=dict)
    slowed: dict[str, deque[tuple[str, ...]]] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)  # in the last reading

    @property
    def in_doubt(self) -> bool:
        """True if another reading is needed soon."""
        return bool(self.missing)

    def look(self, gpus: Sequence[GpuReading]) -> Iterator[Finding]:
        now = {_name(gpu): gpu for gpu in gpus}
        yield from self._lost(now)
        for name, gpu in now.items():
            if gpu.lost:
                continue
            before = self.first.setdefault(name, gpu)
            yield from _memory(before, gpu)
            yield from self._throttled(name, gpu)
            yield from _link(before, gpu, self.last.get(name))
            self.last[name] = gpu

    def _lost(self, now: dict[str, GpuReading]) -> Iterator[Finding]:
        """Yield lost GPUs: missing twice in a row, because a busy driver may omit one, and healthy
        before, because the driver also reports other jobs' GPUs as lost."""
        lost_gpus = {name: self.first[name] for name in self.first.keys() - now.keys()}
        if any(gpu.lost and gpu.index < 0 for gpu in now.values()):
            lost_gpus = {}  # nvidia-smi then reports no others
        for name, gpu in now.items():
            if gpu.lost and (name in self.first or (self.first and not gpu.pci)):
                lost_gpus[name] = self.first.get(name, gpu)
        for name in sorted(self.missing & lost_gpus.keys()):
            yield Finding("lost", "end", "the driver has lost it", lost_gpus[name])
        self.missing = set(lost_gpus)

    def _throttled(self, name: str, gpu: GpuReading) -> Iterator[Finding]:
        looks = self.slowed.setdefault(name, deque(maxlen=THROTTLED))
        looks.append(gpu.slowdowns)
        for reason in SLOWDOWNS:
            if 2 * sum(reason in active for active in looks) >= THROTTLED:
                yield Finding("throttled", "warn", f"slowed down: {reason}", gpu)


def _name(gpu: GpuReading) -> str:
    return gpu.pci or gpu.uuid or str(gpu.index)


def _memory(first: GpuReading, gpu: GpuReading) -> Iterator[Finding]:
    """Yield memory errors. Those from before the run do not exclude the node."""
    # This counter starts when the driver is loaded, so it includes errors of earlier jobs.
    errors, before = gpu.number(ECC) or 0, first.number(ECC) or 0
    if errors > before:
        text = "memory errors that could not be corrected"
        yield Finding("ecc", "exclude", text, gpu)
    elif errors and gpu is first:
        yield Finding("ecc", "warn", f"{errors:.0f} uncorrected memory errors before this run", gpu)
    for name in SWITCHES:
        if name in gpu.switches:
            answer, text = SWITCHED[name]
            yield Finding("memory", "warn" if name in first.switches else answer, text, gpu)


def _link(first: GpuReading, gpu: GpuReading, before: GpuReading | None) -> Iterator[Finding]:
    if _narrow(gpu):
        now, most = gpu.number(f"{LINK_WIDTH}.current"), gpu.number(f"{LINK_WIDTH}.max")
        yield Finding("link", "warn", f"PCIe has {now:.0f} of {most:.0f} lanes", gpu)
    # In two readings: the load is a mean over up to a second, the link's state instantaneous.
    if before is not None and _slow_link(before) and _slow_link(gpu):
        now, most = gpu.number(f"{LINK_GENERATION}.current"), gpu.number(f"{LINK_GENERATION}.max")
        yield Finding("link", "warn", f"PCIe runs at generation {now:.0f}, not {most:.0f}", gpu)
    if down := sorted(set(first.nvlinks) - set(gpu.nvlinks)):
        yield Finding("link", "exclude", f"NVLink {', '.join(map(str, down))} is down", gpu)


def _slow_link(gpu: GpuReading) -> bool:
    now, most = gpu.number(f"{LINK_GENERATION}.current"), gpu.number(f"{LINK_GENERATION}.max")
    load = gpu.number("utilization.gpu") or 0.0
    return now is not None and most is not None and 0 < now < most and load >= LOADED
