"""One tracker of one run, in its own process: reads metrics.jsonl and sends its points. No torch.

Nothing that happens here affects the training: a server that does not answer is retried, and missed
points are still in the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Protocol

from kempner.jobs.trackers.points import MetricsPoint, MetricsReader

METRICS_POLL_S = 2.0
BATCH = 1000  # points
RETRY_S = 30.0  # between tries
LAST_S = 60.0  # for the last points, if nobody waits for them


class Sink(Protocol):
    position: int
    """Number of points, from the first, that it already has when it is opened."""

    def write(self, points: list[MetricsPoint]) -> None: ...

    def close(self, failed: bool) -> None: ...


def open_sink(name: str, run_dir: Path) -> Sink:
    if name == "tensorboard":
        from kempner.jobs.trackers.to_tensorboard import TensorBoard

        return TensorBoard(run_dir)
    from kempner.jobs.trackers.to_wandb import WeightsAndBiases

    return WeightsAndBiases(run_dir)


def follow_run(name: str, run_dir: Path, forever: bool) -> int:
    """Bring a tracker up to date and, if `forever`, keep it so until standard input ends: this is a
    pipe held by the trainer, which ends with it. Returns the exit code."""
    # A copy from before the start: W&B leaves its helper's address in os.environ, which would
    # affect the next start.
    environment = dict(os.environ)
    over = threading.Event()
    if forever:
        threading.Thread(target=watch_stdin, args=(over,), daemon=True).start()
    else:
        over.set()
    is_over = over.wait  # within so many seconds
    with contextlib.ExitStack() as stack:
        # Wait, do not refuse: an earlier attempt's tracker may be sending its last points.
        file = stack.enter_context(open(run_dir / f".{name}.lock", "w"))
        while not _lock(file.fileno()):
            if is_over(METRICS_POLL_S):
                print_message(f"{name}: another process keeps {run_dir} up to date")
                return 1
        try:
            deliver_points(open_sink(name, run_dir), run_dir, is_over)
            return 0
        except Exception as error:
            print_message(f"{name}: {type(error).__name__}: {error}")
        if is_over(RETRY_S):
            return 1
    # Re-execute: a library's leftovers from a failed start would break the next one.
    print_message(f"{name}: trying again")
    os.execve(sys.executable, sys.orig_argv, environment)


def deliver_points(sink: Sink, run_dir: Path, is_over: Callable[[float], bool]) -> None:
    """Send all points that the sink lacks, and new ones until the end."""
    points = MetricsReader(run_dir / "metrics.jsonl")
    skip, over = sink.position, False
    while not over:
        # Checked before reading the file: a read after the end finds all points.
        over = is_over(METRICS_POLL_S)
        new = points.more()
        skip -= sum(1 for _ in islice(new, skip))
        for batch in batch_points(new):
            sink.write(batch)
    sink.close(failed=_state(run_dir) == "failed")
    print_message("all points have been passed on")


def batch_points(points: Iterator[MetricsPoint]) -> Iterator[list[MetricsPoint]]:
    while batch := list(islice(points, BATCH)):
        yield batch


def watch_stdin(over: threading.Event) -> None:
    """Set `over` when standard input ends, and exit soon after, whatever this process waits for."""
    while os.read(0, 4096):
        pass
    over.set()
    time.sleep(LAST_S)
    os._exit(1)


def print_message(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _lock(fd: int) -> bool:
    """Lock the state: two writers would send each point twice."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def _state(run_dir: Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((run_dir / "status.json").read_text())["state"])
    return ""
