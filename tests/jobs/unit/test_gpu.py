"""What the sampler of a node finds at GPUs that the tests make up, and what follows from it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kempner.jobs.gpu import reading
from kempner.jobs.gpu.findings import THROTTLED, Finding, ReadingComparison, at_rest, of_xid
from kempner.jobs.gpu.reading import (
    GpuReading,
    NoAnswer,
    NvidiaSmi,
    Nvml,
    of_this_job,
    short_bus_id,
)
from kempner.jobs.gpu.sampler import GpuSampler
from kempner.jobs.records.event_reader import read_records
from tests.gpus import Shim, gpu
from tests.waiting import LIMIT_S, until


@pytest.fixture
def shim(tmp_path: Path) -> Shim:
    return Shim(tmp_path / "gpus")


def smi(shim: Shim) -> NvidiaSmi:
    return NvidiaSmi(f"{shim.folder}/bin/nvidia-smi")


def test_one_look_through_nvidia_smi(shim: Shim) -> None:
    hot = "clocks_event_reasons__hw_thermal_slowdown"
    shim.say(gpu(0), gpu(1, **{hot: "Active", "remapped_rows__pending": "Yes"}))
    first, second = smi(shim).read()
    assert (first.pci, first.uuid, first.serial) == ("0000:3b:00", "GPU-0", "160")
    assert first.number("power.draw") == 512.5 and not first.switches + first.slowdowns
    assert second.slowdowns == ("hw_thermal_slowdown",)
    assert second.switches == ("remapped_rows.pending",)
    assert [name for name, _ in at_rest(second)] == [
        "remapped_rows.pending",
        "clocks_event_reasons.hw_thermal_slowdown",
    ]


def test_names_that_a_driver_does_not_know(shim: Shim) -> None:
    old = gpu(0) | {"clocks_throttle_reasons.hw_slowdown": "Active"}
    unknown = ["remapped_rows.pending", *reading.REASONS]
    shim.say(old, unknown=unknown)
    (found,) = smi(shim).read()
    assert found.slowdowns == ("hw_slowdown",) and found.number("temperature.gpu") == 61


def test_a_driver_that_says_nothing(shim: Shim, monkeypatch: pytest.MonkeyPatch) -> None:
    shim.say(says="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    with pytest.raises(NoAnswer, match="couldn't communicate"):
        smi(shim).read()
    monkeypatch.setattr(reading, "NVIDIA_SMI_TIMEOUT_S", 0.2)
    shim.say(hangs=True)
    with pytest.raises(NoAnswer, match="did not answer"):
        smi(shim).read()


def test_buses_are_written_in_three_ways() -> None:
    names = ("00000000:3B:00.0", "PCI:0000:3b:00", "0000:3B:00.0")
    assert {short_bus_id(name) for name in names} == {"0000:3b:00"} and short_bus_id("none") == ""


@pytest.mark.parametrize(
    ("given", "mine"),
    [
        ("1", [1]),
        ("0,1", [0, 1]),
        ("", [0, 1]),
        ("5", [0, 1]),
        ("GPU-1b", [1]),
        ("GPU-1", [1]),  # CUDA takes the beginning of a name
        ("GPU-", [0, 1]),  # but none that fits several
    ],
)
def test_the_gpus_of_the_job(given: str, mine: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those hidden from the job do not count: the driver numbers the others from 0."""
    monkeypatch.setenv("SLURM_STEP_GPUS", given)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    both = [GpuReading(0, "GPU-0a"), GpuReading(1, "GPU-1b")]
    assert [each.index for each in of_this_job(both)] == mine


# --- what follows -----------------------------------------------------------------------------


def found(*looks: list[GpuReading]) -> list[tuple[str, str]]:
    watch = ReadingComparison()
    findings: dict[tuple[object, ...], Finding] = {}
    for look in looks:
        findings |= {finding.key: finding for finding in watch.look(look)}
    return [(finding.answer, finding.what) for finding in findings.values()]


def one(**changed: Any) -> GpuReading:
    numbers = {"utilization.gpu": 90.0, **changed.pop("numbers", {})}
    return GpuReading(index=3, pci="0000:3e:00", numbers=numbers, **changed)


ERRORS = "ecc.errors.uncorrected.volatile.total"
WIDTH = {"pcie.link.width.current": 8.0, "pcie.link.width.max": 16.0}
SLOW = {"pcie.link.gen.current": 1.0, "pcie.link.gen.max": 5.0}


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([one(), one()], []),
        (
            [one(numbers={ERRORS: 0.0}), one(numbers={ERRORS: 2.0}), one(numbers={ERRORS: 3.0})],
            [("exclude", "GPU 3: memory errors that could not be corrected")],
        ),
        (
            [one(numbers={ERRORS: 2.0}), one(numbers={ERRORS: 2.0})],
            [("warn", "GPU 3: 2 uncorrected memory errors before this run")],
        ),
        (
            [one(), one(switches=("remapped_rows.failure",))],
            [("exclude", "GPU 3: a broken row of memory could not be remapped")],
        ),
        (
            2 * [one(switches=("remapped_rows.failure",))],
            [("warn", "GPU 3: a broken row of memory could not be remapped")],
        ),
        (
            [one(), one(switches=("remapped_rows.pending",))],
            [("warn", "GPU 3: a broken row of memory is remapped at the next reset")],
        ),
        ([one(slowdowns=("hw_slowdown",)), one(), one(), one()], []),
        (
            THROTTLED * [one(slowdowns=("sw_thermal_slowdown",))],
            [("warn", "GPU 3: slowed down: sw_thermal_slowdown")],
        ),
        ([one(numbers=WIDTH)], [("warn", "GPU 3: PCIe has 8 of 16 lanes")]),
        (
            [one(numbers=SLOW), one(numbers=SLOW)],
            [("warn", "GPU 3: PCIe runs at generation 1, not 5")],
        ),
        ([one(numbers=SLOW), one()], []),
        (2 * [one(numbers={**SLOW, "utilization.gpu": 0.0})], []),  # it saves power
        (
            [one(nvlinks=(0, 1, 2)), one(nvlinks=(0, 2))],
            [("exclude", "GPU 3: NVLink 1 is down")],
        ),
        ([one(), one(lost=True), one(lost=True)], [("end", "GPU 3: the driver has lost it")]),
        ([one(), one(lost=True), one()], []),
        (3 * [one(lost=True)], []),
        ([one(), *2 * [GpuReading(-1, pci="0000:99:00", lost=True)]], []),  # of another job
        ([one(), *2 * [GpuReading(-1, lost=True)]], [("end", "GPU: the driver has lost it")]),
        (
            [[GpuReading(0, "a"), one()], [GpuReading(0, "a")], [GpuReading(0, "a")]],
            [("end", "GPU 3: the driver ha")],
        ),
    ],
)
def test_findings(looks: list[Any], expected: list[tuple[str, str]]) -> None:
    every = found(*(look if isinstance(look, list) else [look] for look in looks))
    assert [(answer, what[: len(text)]) for (answer, what), (_, text) in zip(
        every, expected, strict=True
    )] == expected  # fmt: skip


def test_nvidia_smi_names_only_the_lost_one(shim: Shim) -> None:
    reader, watch = smi(shim), ReadingComparison()
    assert not list(watch.look(reader.read()))
    shim.say(says="Unable to determine the device handle for GPU1: 0000:3C:00.0: GPU is lost.")
    assert not list(watch.look(reader.read())) and watch.in_doubt
    (lost,) = watch.look(reader.read())
    assert lost.answer == "end" and lost.what == "GPU 1: the driver has lost it"


@pytest.mark.parametrize(
    ("xid", "answer"),
    [(79, "end"), (95, "end"), (119, "end"), (48, "exclude"), (94, "exclude"), (74, "exclude"),
     (147, "exclude"), (63, "warn"), (92, "warn"), (13, "note"), (31, "note"), (43, "note"),
     (45, "note"), (154, "note"), (999, "note")],
)  # fmt: skip
def test_errors_of_the_hardware_and_of_programs(xid: int, answer: str) -> None:
    finding = of_xid(xid, "so it is", None)
    assert finding.answer == answer and f"Xid {xid}" in finding.what


# --- the process ------------------------------------------------------------------------------

PARENT = """
import sys, time
from pathlib import Path
from kempner.jobs.gpu.watch import start_watch
watch = start_watch(Path(sys.argv[1]), 3, 0.2)
print(watch is not None, flush=True)
what = sys.stdin.readline().strip()
if watch is not None and what != "die":
    getattr(watch, what)()
"""


class Rank:
    """A process that starts a sampler, as a rank does."""

    def __init__(self, run_dir: Path, env: dict[str, str]) -> None:
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(run_dir)],
            env={**env, "KEMPNER_ATTEMPT_ID": "1.0.7"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.watched = self.process.stdout.readline() == "True\n"

    def events(self) -> list[dict[str, Any]]:
        return read_records(self.run_dir / "attempts.jsonl")

    def until(self, true: Callable[[], object]) -> None:
        until(true, self.events)

    def end(self, how: str) -> str:
        """What it and its sampler have said; not before that has ended, too."""
        out, err = self.process.communicate(f"{how}\n", timeout=LIMIT_S)
        return out + err


def environment(shim: Shim, **more: str) -> dict[str, str]:
    import os

    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "CUDA", "KEMPNER"))}
    return {**kept, **shim.env, **more}


def test_an_error_of_the_hardware_ends_the_rank(shim: Shim, tmp_path: Path) -> None:
    """At once: a program's error before it is only noted, and other jobs' GPUs are not ours."""
    rank = Rank(tmp_path, environment(shim, CUDA_VISIBLE_DEVICES="0", SLURMD_NODENAME="n1"))
    rank.until((tmp_path / "gpu").exists)
    shim.xid(79, 1)
    shim.xid(31, 0)
    rank.until(rank.events)
    assert rank.process.poll() is None
    shim.xid(79, 0)
    assert rank.process.wait(LIMIT_S) == -signal.SIGKILL
    assert rank.process.stderr is not None
    said = rank.process.stderr.read()
    assert "WARNING: n1: GPU 0: Xid 79: the GPU has fallen off the bus: the run ends here" in said
    noted, cause, fault = rank.events()
    assert (noted["event"], noted["answer"], noted["xid"]) == ("gpu", "note", 31)
    assert noted["reason"].endswith("pid=7, name=python, so it is")
    known = {"host": "n1", "gpu": 0, "uuid": "GPU-0", "pci": "0000:3b:00", "serial": "160"}
    assert cause.items() >= {**known, "answer": "end", "xid": 79, "attempt": 3}.items()
    assert fault.items() >= {"event": "fault", "kind": "crash", "hosts": ["n1"]}.items()
    assert noted["attempt_id"] == "1.0.7" == fault["attempt_id"]


@pytest.mark.parametrize("how", ["end", "look_once_more", "die"])
def test_it_ends_with_its_rank(how: str, shim: Shim, tmp_path: Path) -> None:
    """And one that has failed is told what was wrong."""
    rank = Rank(tmp_path, environment(shim))
    rank.until(lambda: list((tmp_path / "gpu").glob("*.jsonl")))
    shim.say(gpu(0), gpu(1, ecc__errors__uncorrected__volatile__total="1"))
    shim.xid(94, 1)
    rank.end(how)
    assert how == "end" or "ecc" in {event["kind"] for event in rank.events()}
    (path,) = (tmp_path / "gpu").glob("*.jsonl")
    figures = [json.loads(text)["gpus"][1] for text in path.read_text().splitlines()]
    assert figures[0]["temperature_c"] == 61 and figures[0]["uncorrected"] == 0
    assert how == "end" or figures[-1]["uncorrected"] == 1


def test_a_driver_that_hangs_harms_nobody(shim: Shim, tmp_path: Path) -> None:
    """The kernel log is read all the same, and the rank does not wait for it."""
    shim.say(hangs=True)
    rank = Rank(tmp_path, environment(shim))

    def told() -> bool:
        shim.xid(92, 0)  # what is there before it looks is not of this run
        return bool(rank.events())

    rank.until(told)
    began = time.monotonic()
    rank.end("look_once_more")
    assert time.monotonic() - began < 30 and rank.events()[0]["answer"] == "warn"


@pytest.mark.parametrize(("given", "answer"), [("0", "warn"), ("0,1", "end")])
def test_an_error_of_a_gpu_that_nvml_cannot_name(
    given: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost GPU has no number any more. Where other jobs have GPUs of the node, it may be theirs;
    this job's own one is missed by the next two readings."""
    monkeypatch.setenv("SLURM_STEP_GPUS", given)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("KEMPNER_KERNEL_LOG", "/dev/null")
    both = [GpuReading(0, "GPU-0", "0000:3b:00"), GpuReading(1, "GPU-1", "0000:3c:00")]
    reader: Any = types.SimpleNamespace(name="NVML", read=lambda: both)
    sampler, findings = GpuSampler(tmp_path, 1, 30.0, reader), list[Finding]()
    monkeypatch.setattr(sampler, "_found", findings.append)  # which would end this one's parent
    threading.Thread(target=sampler._read, daemon=True).start()
    sampler._ask()
    until(lambda: sampler._looked, lambda: findings)
    sampler._errors.put(("", 79))
    sampler._take()
    assert [(finding.answer, finding.xid) for finding in findings] == [(answer, 79)]


def test_without_a_driver_there_is_none(tmp_path: Path, shim: Shim) -> None:
    (shim.folder / "bin/nvidia-smi").unlink()
    (tmp_path / "pynvml.py").write_text("raise ImportError\n")
    rank = Rank(tmp_path / "run", environment(shim, PYTHONPATH=str(tmp_path)))
    assert not rank.end("die").strip() and not (tmp_path / "run").exists()


# --- NVML -------------------------------------------------------------------------------------


class FakeNvml(types.ModuleType):
    """pynvml's functions and numbers, as far as they are used, over one GPU."""

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(f"error {value}")
            self.value = value

    NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED, NVML_TEMPERATURE_GPU = 15, 16, 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_NVLINK_MAX_LINKS, nvmlEventTypeXidCriticalError = 36, 8

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.lost, self.links, self.xids = False, [1, 1, 0], [79]
        self.versions = [self.nvmlMemory_v2]
        answers: dict[str, Any] = {
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetUUID": "GPU-0",
            "nvmlDeviceGetPciInfo": types.SimpleNamespace(busId="00000000:3B:00.0"),
            "nvmlDeviceGetPowerUsage": 512500,
            "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=98),
            "nvmlDeviceGetTotalEccErrors": 2,
            "nvmlDeviceGetRemappedRows": (5, 4, 1, 0),
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x8 | 0x40 | 0x4,
            "nvmlDeviceGetCurrPcieLinkWidth": 8,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetCurrPcieLinkGeneration": 5,
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetIndex": 0,
            "nvmlDeviceGetComputeRunningProcesses": [types.SimpleNamespace(pid=4711)],
            "nvmlEventSetCreate": "set",
            "nvmlDeviceRegisterEvents": None,
            "nvmlInit": None,
        }
        for name, answer in answers.items():
            setattr(self, name, lambda *_, answer=answer: answer)

    def nvmlDeviceGetTemperature(self, *_: object) -> int:
        if self.lost:
            raise self.NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        return 61

    nvmlMemory_v2 = 0x02000028

    def nvmlDeviceGetMemoryInfo(self, _: object, version: int | None = None) -> object:
        """The older version counts what the driver keeps for itself."""
        if version and version not in self.versions:
            raise self.NVMLError(3)
        return types.SimpleNamespace(used=(612 if version else 1300) << 20)

    def nvmlDeviceGetSerial(self, _: object) -> str:
        raise self.NVMLError(3)  # not supported

    def nvmlDeviceGetNvLinkState(self, _: object, link: int) -> int:
        if link >= len(self.links):
            raise self.NVMLError(2)
        return self.links[link]

    def nvmlEventSetWait_v2(self, *_: object) -> object:
        if not self.xids:
            raise self.NVMLError(10)  # timed out
        return types.SimpleNamespace(device="handle", eventData=self.xids.pop())


def test_one_look_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    reader = reading.open_reader()
    assert isinstance(reader, Nvml)
    (found,) = reader.read()
    assert (found.pci, found.uuid, found.serial) == ("0000:3b:00", "GPU-0", "")
    assert found.number("power.draw") == 512.5 and found.number(ERRORS) == 2
    assert found.switches == ("remapped_rows.pending",) and found.nvlinks == (0, 1)
    assert found.slowdowns == ("hw_slowdown", "hw_thermal_slowdown")
    assert list(reader.xids(0.1)) == [("0000:3b:00", 79)] and not list(reader.xids(0.1))
    assert found.number(reading.MEMORY_USED) == 612 and reader.processes(found) == [4711]
    fake.versions = []
    assert reader.read()[0].number(reading.MEMORY_USED) == 1300
    fake.lost = True
    (found,) = reader.read()
    assert found.lost and found.pci == "0000:3b:00"


def test_a_reader_that_is_told_of_no_errors_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler asks again at once: it must not keep a core busy beside the ranks."""
    fake, waited = FakeNvml(), list[float]()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(reading.time, "sleep", waited.append)
    monkeypatch.setattr(fake, "nvmlEventSetCreate", lambda: None)
    for reader in (NvidiaSmi("nvidia-smi"), Nvml()):
        assert not list(reader.xids(1.0))
    assert waited == [1.0, 1.0]


def test_the_real_nvml_has_these_names() -> None:
    real = pytest.importorskip("pynvml")
    own = {name for name in dir(FakeNvml()) if name.startswith(("nvml", "NVML"))}
    assert not own - set(dir(real))
