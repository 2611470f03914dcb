"""How fast some ranks all-reduce: latency of a small message, bus bandwidth of a large one."""

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
from typing import Any

import torch
import torch.distributed as dist

BUDGET_S = 0.5  # one all-reduce; a larger message than the last that took less is not tried
TIMES = 10  # of the largest message, if they fit into the budget: the best counts
SMALLEST, LARGEST = 1 << 16, {"cpu": 1 << 24, "cuda": 1 << 28}  # bytes
GROWTH = 8


def measure_apart(measure: Callable[[], dict[str, Any]], limit: float) -> dict[str, Any]:
    """Run a measurement in a forked process, because a collective that hangs can only be killed.

    Returns what it returns, or {"error": ...}. This process must not have used CUDA.
    """
    read, write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            answer = measure()
        except Exception as error:  # whatever it is, the table names it
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        os.write(write, json.dumps(answer).encode())
        os._exit(0)  # no clean-up: a broken communicator may hang in it
    os.close(write)
    text = b""
    deadline = time.monotonic() + limit
    while select.select([read], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(read, 1 << 16)
        text += part
        if not part:
            break
    os.close(read)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if text:
        answer = json.loads(text)
        assert isinstance(answer, dict)
        return answer
    if time.monotonic() < deadline:
        return {"error": "the process that measures died"}
    return {"error": f"not over after {limit:g} s"}


def measure(
    store: dist.Store, ranks: list[int], rank: int, local_rank: int, kind: str, limit: float
) -> dict[str, Any]:
    """All-reduce among `ranks`; every one of them calls it. `kind` is cpu (gloo) or cuda (NCCL).

    Returns latency_s (median of a 4-byte message), bytes and bus_bytes_per_s of the largest message
    that took less than half a second, at its best: 2 (n - 1) / n x bytes / seconds, so that the
    figure does not depend on the number n of ranks (github.com/NVIDIA/nccl-tests,
    doc/PERFORMANCE.md).
    """
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=store,
        rank=ranks.index(rank),
        world_size=len(ranks),
        timeout=timedelta(seconds=limit),
        device_id=device if kind == "cuda" else None,
    )

    def seconds(message: torch.Tensor) -> float:
        """The slowest rank's, so that all ranks decide the same."""
        began = time.perf_counter()
        dist.all_reduce(message)
        if kind == "cuda":
            torch.cuda.synchronize()
        slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    small = torch.ones(1, device=device)
    seconds(small)  # connects
    times = [seconds(small)]
    while len(times) < 20 and sum(times) < BUDGET_S:
        times.append(seconds(small))
    size = SMALLEST
    while True:
        message = torch.ones(size // 4, device=device)
        took = seconds(message)
        if took * GROWTH < BUDGET_S:
            took = min(took, seconds(message))  # the first of a size also allocates
        if took * GROWTH > BUDGET_S or size * GROWTH > LARGEST[kind]:
            break
        size *= GROWTH
    spent = took  # a host that is busy for some milliseconds is no slow network
    for _ in range(TIMES):
        if spent + took > BUDGET_S:
            break
        again = seconds(message)
        spent, took = spent + again, min(took, again)
    n = len(ranks)
    return {
        "latency_s": statistics.median(times),
        "bytes": size,
        "bus_bytes_per_s": 2 * (n - 1) / n * size / took,
    }
