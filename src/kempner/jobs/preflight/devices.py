"""Measures and judges the speed of each task's device and the bits of a product on it."""

from __future__ import annotations

import argparse
import collections
import hashlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kempner.jobs.preflight.allreduce import MEASURE_S, connect_limit, run_in_child
from kempner.jobs.preflight.channel import Driver
from kempner.jobs.preflight.verdict import Figure, NodeResult, Report
from kempner.jobs.ranks.own_device import pick_device
from kempner.jobs.report.tables import format_amount

PRODUCT_SIZE = {"cpu": 512, "cuda": 8192}  # rows and columns of both factors
PRODUCTS = {"cpu": 1, "cuda": 8}  # per repetition: several, to hide the host's overhead
COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 29}  # larger than any cache
LEAST_REPEATS = 3
SAME_BITS = 4  # products that must have the same bits
SLOW_CPU = 0.8  # share below the median: virtual hosts share their cores with others
SPEEDS = {
    "flops_per_s": ("matrix product", "FLOP/s"),
    "copy_bytes_per_s": ("copy in its memory", "B/s"),
}


class SlowLimits(NamedTuple):
    """Shares below the median of devices of the same name at which a GPU is named, and refused."""

    named: float = 0.05
    refused: float = 0.15


def slow_limits(text: str) -> SlowLimits:
    """Parse --slow: two percentages such as 5,15. Raises argparse.ArgumentTypeError."""
    try:
        named, refused = (float(part) / 100 for part in text.split(","))
        if 0 < named <= refused < 1:
            return SlowLimits(named, refused)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"{text!r}: must be two percentages, the first at most the second, as in 5,15"
    )


def measure_device(kind: str, local_rank: int, seconds: float) -> Figure:
    """Measure this task's device in a child process, for about twice `seconds`. `kind`: cpu, cuda.

    Returns device (its name), flops_per_s of a matrix product (bf16 on a GPU, fp32 on a CPU),
    copy_bytes_per_s (bytes read and written), bits (a hash of a fixed product's bits) and steady
    (False if repeats of that product had different bits); or {"error": ...}.
    """

    def run(connected: Callable[[], None]) -> Figure:
        device = pick_device(kind, local_rank)
        torch.ones(1, device=device)  # the CUDA context
        connected()
        return _measure_device(device, seconds)

    return run_in_child(run, connect_limit(1, kind), MEASURE_S + 2 * seconds)


def _measure_device(device: torch.device, seconds: float) -> Figure:
    kind, size = device.type, PRODUCT_SIZE[device.type]
    random = torch.Generator().manual_seed(0)  # on the CPU: the same numbers for every device
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    a, b = (torch.randn(size, size, generator=random).to(device, dtype) for _ in range(2))
    out = torch.empty_like(a)

    def wait() -> None:
        if kind == "cuda":
            torch.cuda.synchronize()

    def multiply() -> None:
        for _ in range(PRODUCTS[kind]):
            torch.mm(a, b, out=out)
        wait()

    source = torch.ones(COPY_BYTES[kind] // 4, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        wait()

    flops = _best_rate(multiply, 2 * size**3 * PRODUCTS[kind], seconds)
    if kind == "cpu":  # summation order, and so the bits, may depend on the number of threads
        torch.set_num_threads(1)
    # Several products: an intermittently faulty unit shows as changing bits.
    products = [torch.mm(a, b) for _ in range(SAME_BITS)]
    # As bytes: NumPy has no bf16.
    bits = products[0].view(torch.uint8).cpu().numpy().tobytes()
    return {
        "device": _device_name(device),
        "flops_per_s": flops,
        "copy_bytes_per_s": _best_rate(copy, 2 * COPY_BYTES[kind], seconds),
        "bits": hashlib.sha256(bits).hexdigest()[:16],
        "steady": all(torch.equal(products[0], other) for other in products[1:]),
    }


def _best_rate(work: Callable[[], None], amount: float, seconds: float) -> float:
    """Return `amount` per second of the best repetition in the second half of the time, when a GPU
    throttled by heat or power is slow."""
    began, count, best = time.perf_counter(), 0, float("inf")
    while True:
        start = time.perf_counter()
        work()
        end, count = time.perf_counter(), count + 1
        if end - began >= seconds / 2:
            best = min(best, end - start)
        if end - began >= seconds and count >= LEAST_REPEATS:
            return amount / best


def _device_name(device: torch.device) -> str:
    """Name the model of a device. Devices of one name compute a product with the same kernel."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        return f"{gpu.name} ({gpu.multi_processor_count} SMs)"
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'CPU'} ({torch.backends.cpu.get_cpu_capability()})"


def ask_devices(driver: Driver, report: Report, seconds: float) -> None:
    """Let all tasks measure their devices at once, as in a run."""
    nodes = [node for node in report.nodes if node.answered]
    question = {"what": "device", "kind": report.kind, "seconds": seconds}
    keys = driver.ask([rank for node in nodes for rank in node.ranks], question)
    limit = connect_limit(1, report.kind) + MEASURE_S + 2 * seconds
    answers = driver.answers(keys, time.monotonic() + limit + 3.0)
    silent = {"error": f"no answer after {limit:.0f} s"}
    for node in nodes:
        node.devices = {rank: answers.get(rank, silent) for rank in node.ranks}


def judge_devices(report: Report, limits: SlowLimits) -> None:
    """Find devices that fail, are slower than others of the same name, or compute different bits.
    A slow CPU is not a fault."""
    by_name = collections.defaultdict(list)
    for node, rank, figure in _devices_of(report):
        if "device" not in figure:
            found = node.faults if report.kind == "cuda" else node.notes
            found.append(f"{_label(report, rank)}: {figure.get('error', 'no figures')}")
        else:
            by_name[figure["device"]].append((node, rank, figure))
    for name, devices in by_name.items():
        _judge_bits(report, name, devices)
        for key, (what, unit) in SPEEDS.items():
            # Of two, the faster one: no error makes a device faster.
            usual = statistics.median_high(figure[key] for *_, figure in devices)
            for node, rank, figure in devices:
                under = 1 - figure[key] / usual
                said = (
                    f"{_label(report, rank)}: {what} {format_amount(figure[key], unit)}, "
                    f"{under:.0%} under the median of {format_amount(usual, unit)}"
                )
                if report.kind != "cuda":
                    node.notes += [said] * (under > SLOW_CPU)
                elif under >= limits.refused:
                    node.faults.append(said)
                elif under >= limits.named:
                    node.notes.append(said)


def _judge_bits(report: Report, name: str, devices: list[tuple[NodeResult, int, Figure]]) -> None:
    """Find the devices of one name whose product has different bits than the majority's."""
    for node, rank, figure in devices:
        if not figure["steady"]:
            node.faults.append(f"{_label(report, rank)}: the same product has new bits each time")
    counts = collections.Counter(figure["bits"] for *_, figure in devices)
    ((usual, count), *others) = counts.most_common()
    if not others:
        return
    # Half is not a majority: of two devices that differ, either may be wrong.
    if 2 * count <= len(devices):
        hosts = ", ".join(sorted({node.name for node, *_ in devices}))
        report.notes.append(
            f"the bits of the same product differ between devices of {name}, and there is no "
            f"majority: {hosts}"
        )
        return
    for node, rank, figure in devices:
        if figure["bits"] != usual:
            node.faults.append(
                f"{_label(report, rank)}: its product differs in bits from that of {count} of the "
                f"{len(devices)} devices of {name}: it computes wrong numbers"
            )


def _devices_of(report: Report) -> Iterator[tuple[NodeResult, int, dict[str, Any]]]:
    for node in report.nodes:
        for rank, figure in node.devices.items():
            yield node, rank, figure


def _label(report: Report, rank: int) -> str:
    return f"{'GPU' if report.kind == 'cuda' else 'CPU'} of task {rank}"
