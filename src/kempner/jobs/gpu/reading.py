"""One reading of this node's GPUs, through NVML (the extra `gpu`) or else nvidia-smi. No torch.

Neither makes a CUDA context. Both may hang with the driver: read in a process, or at least a
thread, that nobody waits for. Names and units: `nvidia-smi --help-query-gpu`, NVML's API reference.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

# Without persistence mode each nvidia-smi loads the driver: seconds on a node with eight GPUs.
NVIDIA_SMI_TIMEOUT_S = 20.0
LOST_GPU = re.compile(r"GPU is lost|fallen off the bus|Unable to determine the device handle")
# Slowdown reasons: nvidia-smi's name -> NVML's bit. The software power cap (sw_power_cap) is left
# out: most GPUs reach it in most steps.
SLOWDOWNS = {
    "hw_slowdown": 0x8,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}
REASONS = [f"clocks_event_reasons.{name}" for name in SLOWDOWNS]
MEMORY_USED = "memory.used"  # MiB
NUMBERS = [
    MEMORY_USED,
    "temperature.gpu",
    "power.draw",
    "utilization.gpu",
    "ecc.errors.uncorrected.volatile.total",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
]
SWITCHES = ["remapped_rows.failure", "remapped_rows.pending", "retired_pages.pending"]
QUERY = ["index", "uuid", "pci.bus_id", "serial", *NUMBERS, *SWITCHES, *REASONS]


class NoAnswer(Exception):
    """The driver does not answer, or its answer cannot be read."""


@dataclass(frozen=True)
class GpuReading:
    """Readings of one GPU; unknown values are None or missing."""

    index: int
    uuid: str = ""
    pci: str = ""  # bus id, such as 0000:3b:00
    serial: str = ""
    lost: bool = False
    numbers: Mapping[str, float | None] = field(default_factory=dict)  # by NUMBERS
    switches: tuple[str, ...] = ()  # those of SWITCHES that are on
    slowdowns: tuple[str, ...] = ()  # active ones
    nvlinks: tuple[int, ...] = ()  # those that are up; empty with nvidia-smi

    def number(self, name: str) -> float | None:
        return self.numbers.get(name)

    @property
    def label(self) -> str:
        if self.index >= 0:
            return f"GPU {self.index}"
        return f"GPU at {self.pci}" if self.pci else "GPU"


class Reader(Protocol):
    name: str

    def read(self) -> list[GpuReading]:
        """Return all GPUs that the driver shows. Raises NoAnswer."""

    def xids(self, seconds: float) -> Iterator[tuple[str, int]]:
        """Wait up to `seconds` and yield bus and number of the next error."""

    def processes(self, gpu: GpuReading) -> list[int]:
        """Return the ids of the known processes that use its memory."""


def open_reader() -> Reader | None:
    """Open a reader; None on a node without a driver, or without both NVML and nvidia-smi."""
    with contextlib.suppress(ImportError, NoAnswer):
        return Nvml()
    program = shutil.which("nvidia-smi")
    return NvidiaSmi(program) if program else None


def short_bus_id(text: str) -> str:
    """Normalize the bus ids of NVML, nvidia-smi and the kernel log to one form, 0000:3b:00."""
    found = re.search(r"([0-9a-fA-F]+):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})", text)
    return f"{int(found[1], 16):04x}:{found[2]}:{found[3]}".lower() if found else ""


def given_names() -> list[str] | None:
    """Return numbers or names of the GPUs that Slurm gave to this task; None if it set nothing.
    With --gpu-bind these are the task's own, otherwise all of the job's on this node."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    text = os.environ.get("SLURM_STEP_GPUS") or visible
    if visible and "MIG-" in visible:  # SLURM_STEP_GPUS numbers cards, or Slurm's own list
        text = visible
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def of_this_job(gpus: Sequence[GpuReading]) -> list[GpuReading]:
    """Select the GPUs that the job was given on a shared node, or all if no name fits: if the other
    GPUs are hidden from the job, the driver counts from 0 and the numbers mean nothing."""
    return surely_of_this_job(gpus) or list(gpus)


def surely_of_this_job(gpus: Sequence[GpuReading]) -> list[GpuReading]:
    """Select the same, but none if no name fits and there are more GPUs than names: some may belong
    to another job."""
    names = given_names()
    if names is None or len(names) >= len(gpus):
        return list(gpus)
    fits = [[gpu for gpu in gpus if _is_called(gpu, name)] for name in names]
    return [gpu for gpu in gpus if [gpu] in fits]  # CUDA rejects an ambiguous name


def _is_called(gpu: GpuReading, name: str) -> bool:
    """Return whether a name means this GPU. CUDA also takes the beginning of a UUID."""
    return name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))


# --- nvidia-smi -------------------------------------------------------------------------------


class NvidiaSmi:
    name = "nvidia-smi"

    def __init__(self, program: str) -> None:
        self._program = program
        self._known: dict[str, str] = {}  # name -> this driver's name; empty: not yet asked

    def read(self) -> list[GpuReading]:
        if not self._known:
            self._known = self._learn()
        rows = self._ask(list(self._known.values()))
        return [_from_row(dict(zip(self._known, row, strict=True))) for row in rows]

    def xids(self, seconds: float) -> Iterator[tuple[str, int]]:
        """Wait; nvidia-smi does not report errors."""
        time.sleep(seconds)
        return iter(())

    def processes(self, gpu: GpuReading) -> list[int]:
        with contextlib.suppress(NoAnswer):
            rows = self._ask(["gpu_uuid", "pid"], "compute-apps")
            return [int(pid) for uuid, pid in rows if uuid == gpu.uuid and pid.isdecimal()]
        return []

    def _learn(self) -> dict[str, str]:
        """Return the names that this version knows. One unknown name fails the whole query, so each
        name is then tried alone."""
        with contextlib.suppress(NoAnswer):
            self._ask(QUERY)
            return dict(zip(QUERY, QUERY, strict=True))
        self._ask(["index"])  # raises if there is no answer at all
        names: dict[str, str] = {}
        for name in QUERY:
            for called in (name, name.replace("event", "throttle")):  # before driver 535
                with contextlib.suppress(NoAnswer):
                    self._ask([called])
                    # The new name wins if the driver knows both.
                    names.setdefault(name, called)
        return names

    def _ask(self, names: list[str], about: str = "gpu") -> list[list[str]]:
        query = f"--query-{about}={','.join(names)}"
        command = [self._program, query, "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=NVIDIA_SMI_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise NoAnswer(
                f"nvidia-smi did not answer within {NVIDIA_SMI_TIMEOUT_S:.0f} s"
            ) from None
        except OSError as error:
            raise NoAnswer(f"nvidia-smi: {error}") from None
        output = (done.stdout + done.stderr).strip()
        if match := LOST_GPU.search(output):
            return self._of_lost(output, match[0], names)
        rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
        if done.returncode or not rows or any(len(row) != len(names) for row in rows):
            raise NoAnswer(f"nvidia-smi: exit code {done.returncode}: {output[:200]}")
        return rows

    def _of_lost(self, output: str, why: str, names: list[str]) -> list[list[str]]:
        """Return the row of a lost GPU: nvidia-smi then reports nothing about the others."""
        row = {"index": "-1", "pci.bus_id": short_bus_id(output), "lost": why}
        back = {called: name for name, called in self._known.items()}
        return [[row.get(back.get(name, name), "lost") for name in names]]


def _from_row(row: dict[str, str]) -> GpuReading:
    index = _number(row.get("index", ""))
    return GpuReading(
        index=-1 if index is None else int(index),
        uuid=row.get("uuid", ""),
        pci=short_bus_id(row.get("pci.bus_id", "")),
        serial=row.get("serial", ""),
        lost=index == -1,
        numbers={name: _number(row.get(name, "")) for name in NUMBERS},
        switches=tuple(name for name in SWITCHES if row.get(name) in ("Yes", "1")),
        slowdowns=tuple(
            name
            for name, reason in zip(SLOWDOWNS, REASONS, strict=True)
            if row.get(reason) == "Active"
        ),
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


# --- NVML -------------------------------------------------------------------------------------


class Nvml:
    """A reader through nvidia-ml-py (module pynvml)."""

    name = "NVML"

    def __init__(self) -> None:
        import pynvml

        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except pynvml.NVMLError as error:
            raise NoAnswer(str(error)) from None
        # Read now: a lost GPU reports neither its bus nor its serial number.
        self._about = [self._identity(index) for index in range(count)]
        self._events = self._maybe(pynvml.nvmlEventSetCreate)
        xid = pynvml.nvmlEventTypeXidCriticalError
        for handle in self._handles if self._events is not None else ():
            self._maybe(partial(pynvml.nvmlDeviceRegisterEvents, handle, xid, self._events))

    def read(self) -> list[GpuReading]:
        return [self._read(index) for index in range(len(self._handles))]

    def xids(self, seconds: float) -> Iterator[tuple[str, int]]:
        """Yield errors; the driver reports them even if the kernel log is not readable."""
        if self._events is None:
            time.sleep(seconds)
            return
        data = self._maybe(lambda: self._nvml.nvmlEventSetWait_v2(self._events, int(seconds * 1e3)))
        if data is None:
            return
        index = self._maybe(lambda: self._nvml.nvmlDeviceGetIndex(data.device))
        yield self._about[index].pci if index is not None else "", int(data.eventData)

    def processes(self, gpu: GpuReading) -> list[int]:
        ask = self._nvml.nvmlDeviceGetComputeRunningProcesses
        found = self._maybe(lambda: ask(self._handles[gpu.index])) or []
        return [process.pid for process in found]

    def _identity(self, index: int) -> GpuReading:
        nvml, handle = self._nvml, self._handles[index]
        return GpuReading(
            index=index,
            uuid=str(self._maybe(lambda: nvml.nvmlDeviceGetUUID(handle)) or ""),
            pci=short_bus_id(
                str(self._maybe(lambda: nvml.nvmlDeviceGetPciInfo(handle).busId) or "")
            ),
            serial=str(self._maybe(lambda: nvml.nvmlDeviceGetSerial(handle)) or ""),
        )

    def _read(self, index: int) -> GpuReading:
        nvml, handle, about = self._nvml, self._handles[index], self._about[index]
        uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        try:
            # The first query of a reading; any would detect a lost GPU.
            temperature = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                return replace(about, lost=True)
            temperature = None
        power = self._maybe(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        # The older structure (v1) counts the driver's own memory as used.
        memory = self._maybe(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used)
        if memory is None:
            memory = self._maybe(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used)
        figures = [
            None if memory is None else memory / 2**20,
            temperature,
            # NVML has milliwatts, nvidia-smi watts.
            None if power is None else power / 1000,
            self._maybe(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            self._maybe(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, volatile)),
            self._maybe(lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
            self._maybe(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
            self._maybe(lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
            self._maybe(lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
        ]
        rows = self._maybe(lambda: nvml.nvmlDeviceGetRemappedRows(handle)) or (0, 0, 0, 0)
        pages = self._maybe(lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
        # nvmlDeviceGetRemappedRows: corrected, uncorrected, pending, failure.
        on = dict(zip(SWITCHES, (rows[3], rows[2], pages), strict=True))
        # The older of two names, which all versions have.
        slow = self._maybe(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
        return replace(
            about,
            numbers=dict(zip(NUMBERS, figures, strict=True)),
            switches=tuple(name for name, value in on.items() if value),
            slowdowns=tuple(name for name, bit in SLOWDOWNS.items() if slow & bit),
            nvlinks=tuple(self._links(handle)),
        )

    def _links(self, handle: Any) -> Iterator[int]:
        for link in range(self._nvml.NVML_NVLINK_MAX_LINKS):
            state = self._maybe(lambda n=link: self._nvml.nvmlDeviceGetNvLinkState(handle, n))
            if state is None:  # no more links
                return
            if state:
                yield link

    def _maybe(self, ask: Callable[..., Any]) -> Any:
        """Return the answer; None if this GPU or driver does not support the query."""
        try:
            return ask()
        except (self._nvml.NVMLError, AttributeError):
            return None
