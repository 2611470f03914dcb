"""Speed of a group's all-reduce: latency of a small message, bus bandwidth of a large one."""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kempner.jobs.ranks.nccl_transport import LOG_SETTINGS, transport_of
from kempner.jobs.ranks.own_device import pick_device

BUDGET_S = 0.5  # for one all-reduce: no larger message is tried after one that took longer
REPEATS = 10  # of the largest message, if the budget allows; the fastest counts
SMALLEST_MESSAGE, LARGEST_MESSAGE = 1 << 16, {"cpu": 1 << 24, "cuda": 1 << 28}  # bytes
GROWTH = 8
MEASURE_S = 10.0  # for the measurement, once the ranks are connected
READY = b"ready\n"


def connect_limit(ranks: int, kind: str) -> float:
    """Return the seconds that a group may take to connect.

    On a GPU this covers the CUDA context and NCCL's communicator, which alone takes over a minute
    on 16 nodes (github.com/NVIDIA/nccl/issues/1646); gloo connects every rank to every other.
    """
    return min(600.0, (60.0 if kind == "cuda" else 10.0) + 0.25 * ranks)


def run_in_child(
    measure: Callable[[Callable[[], None]], dict[str, Any]], connect_s: float, measure_s: float
) -> dict[str, Any]:
    """Run a measurement in a forked process, because a collective that hangs can only be killed.

    `measure` calls its argument once it is connected: it has `connect_s` seconds until then and
    `measure_s` afterwards. Returns its result or {"error": ...}. The calling process must not have
    used CUDA.
    """
    read, write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(read)

        def connected() -> None:
            os.write(write, READY)

        try:
            # CUDA would fail too, but only with GPUs, where the tests do not run.
            assert not torch.cuda._is_in_bad_fork(), "CUDA was asked before the fork"
            answer = measure(connected)
        except Exception as error:  # the table shows any error
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        os.write(write, json.dumps(answer).encode())
        # No clean-up: a broken communicator may hang in it.
        os._exit(0)
    # Now only the child holds the write end: if it dies, the read below ends.
    os.close(write)
    text = b""
    limit, deadline = connect_s, time.monotonic() + connect_s
    while select.select([read], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(read, 1 << 16)
        text += part
        # End of the pipe: the child has answered or died.
        if not part:
            break
        # A slow connection must not use up the measurement's time.
        if limit is connect_s and text.startswith(READY):
            limit, deadline = measure_s, time.monotonic() + measure_s
    os.close(read)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    phase = "no result" if text.startswith(READY) else "not connected"
    if text := text.removeprefix(READY):
        answer = json.loads(text)
        assert isinstance(answer, dict)
        return answer
    if time.monotonic() < deadline:
        return {"error": "the process that measures died"}
    return {"error": f"{phase} after {limit:g} s"}


def measure_allreduce(
    store: dist.Store,
    ranks: list[int],
    rank: int,
    local_rank: int,
    kind: str,
    nccl_log: Path,
    connected: Callable[[], None],
) -> dict[str, Any]:
    """Measure all-reduces among `ranks`, each of which calls this. `kind`: cpu (gloo) or cuda
    (NCCL). Calls `connected` after the first all-reduce. NCCL writes its log to `nccl_log`.

    Returns latency_s (median of a 4-byte message), and bytes and bus_bytes_per_s of the largest
    message that took less than half a second, at its best: 2 (n - 1) / n x bytes / seconds, which
    does not depend on the number n of ranks (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).
    With NCCL also transport, which NCCL reports for traffic between nodes.
    """
    device = pick_device(kind, local_rank)
    if kind == "cuda":
        os.environ.update(LOG_SETTINGS, NCCL_DEBUG_FILE=str(nccl_log))
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=store,
        rank=ranks.index(rank),
        world_size=len(ranks),
        # The parent's two limits end a group that hangs: torch's timeout must not come first.
        timeout=timedelta(seconds=connect_limit(len(ranks), kind) + MEASURE_S),
        device_id=device if kind == "cuda" else None,
    )

    def seconds(message: torch.Tensor) -> float:
        """Return the slowest rank's seconds."""
        began = time.perf_counter()
        dist.all_reduce(message)
        if kind == "cuda":
            torch.cuda.synchronize()
        # It selects the next message: with their own times, ranks would select different sizes.
        slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    small = torch.ones(1, device=device)
    # The first all-reduce makes the connections, so it counts as connecting.
    seconds(small)
    connected()
    figures = _measure(seconds, device, len(ranks))
    if kind == "cuda":
        figures["transport"] = transport_of(nccl_log.read_text(errors="replace"))
    return figures


def _measure(
    seconds: Callable[[torch.Tensor], float], device: torch.device, ranks: int
) -> dict[str, Any]:
    small = torch.ones(1, device=device)
    times = [seconds(small)]
    while len(times) < 20 and sum(times) < BUDGET_S:
        times.append(seconds(small))
    size = SMALLEST_MESSAGE
    while True:
        message = torch.ones(size // 4, device=device)
        took = seconds(message)
        if took * GROWTH < BUDGET_S:
            # The first message of a size also allocates memory; the second shows the speed.
            took = min(took, seconds(message))
        if took * GROWTH > BUDGET_S or size * GROWTH > LARGEST_MESSAGE[device.type]:
            break
        size *= GROWTH
    # The best of several: a host that is busy for some milliseconds is not a slow network.
    total = took
    for _ in range(REPEATS):
        if total + took > BUDGET_S:
            break
        again = seconds(message)
        total, took = total + again, min(took, again)
    return {
        "latency_s": statistics.median(times),
        "bytes": size,
        "bus_bytes_per_s": 2 * (ranks - 1) / ranks * size / took,
    }
