"""Rates at which nodes write files to the run directory and read each other's files."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from kempner.jobs.preflight.allreduce import run_in_child
from kempner.jobs.preflight.channel import Driver, token_file
from kempner.jobs.preflight.verdict import Figure, NodeResult, Report

LARGEST_FILE, LARGEST_SUM = 1 << 28, 1 << 36  # bytes, of one node and of all
SMALLEST_FILE = 1 << 20
ROOM = 10  # all files together take at most 1/ROOM of the free space
STORAGE_PIECE, STORAGE_SYNC = 1 << 22, 1 << 24  # bytes per write, and between two fsyncs
_written: set[Path] = set()  # files of this task that are not yet removed
STORAGE_S = 20.0  # extra time for a slow last call
SLOW_STORAGE = 0.5  # of the median node


def data_file(folder: Path, rank: int) -> Path:
    """Return the file of a task: the folder comes from the batch script, the token is secret."""
    return token_file(folder).with_name(f"{token_file(folder).name}-{int(rank)}")


def write_rate(folder: Path, rank: int, size: int, seconds: float) -> Figure:
    """Write this task's file, with fsync, until it has `size` bytes or the time is over. Returns
    write_bytes_per_s and bytes, or {"error": ...}. Size 0 removes the file."""
    path = data_file(folder, rank)
    if not size:
        remove_written()
        return {}
    # Before writing: a measurement that is killed leaves a partial file.
    _written.add(path)

    def run(connected: Callable[[], None]) -> Figure:
        connected()
        piece, count = os.urandom(min(STORAGE_PIECE, size)), 0  # a file system may compress zeros
        path.unlink(missing_ok=True)
        # O_EXCL: never follows a planted link.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        began = synced = time.perf_counter()
        while count < size and synced - began < seconds:
            for _ in range(STORAGE_SYNC // STORAGE_PIECE):
                count += os.write(fd, piece) if count < size else 0
            # Without it, this measures the page cache.
            os.fsync(fd)
            synced = time.perf_counter()
        os.close(fd)
        return {"write_bytes_per_s": count / (synced - began), "bytes": count}

    figure = run_in_child(run, STORAGE_S, STORAGE_S + seconds)
    if "error" in figure:
        remove_written()
    return figure


def remove_written() -> None:
    """Remove this task's files, even if the driver is gone."""
    while _written:
        _remove(_written.pop())


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def read_rate(folder: Path, owner: int, seconds: float) -> Figure:
    """Read the file of task `owner` to its end or for `seconds`. Returns read_bytes_per_s or
    {"error": ...}."""

    def run(connected: Callable[[], None]) -> Figure:
        connected()
        # The file is new and from another node: a listing makes an NFS client ask the server.
        os.listdir(folder)
        fd = os.open(data_file(folder, owner), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        # A single node reads its own file, which is in the page cache.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds and (part := os.read(fd, STORAGE_PIECE)):
            count += len(part)
        return {"read_bytes_per_s": count / (time.perf_counter() - began)}

    return run_in_child(run, STORAGE_S, STORAGE_S + seconds)


def ask_storage(driver: Driver, report: Report, folder: Path, seconds: float) -> None:
    """Measure the directory with one node alone, then with all at once. Each node reads another's
    file, which is not in its page cache."""
    nodes = [node for node in report.nodes if node.answered and not node.faults]
    if not nodes:
        return
    size = min(LARGEST_FILE, LARGEST_SUM // len(nodes), free_bytes(folder) // ROOM // len(nodes))
    if size < SMALLEST_FILE:
        report.notes.append(f"run directory: too little room in {folder} to measure its rates")
        return
    try:
        (report.storage_alone,) = _rates(driver, nodes[:1], nodes[1:2] or nodes, size, seconds)
        if len(nodes) > 1:
            figures = _rates(driver, nodes, [*nodes[1:], nodes[0]], size, seconds)
        else:
            figures = [report.storage_alone]
        for node, figure in zip(nodes, figures, strict=True):
            node.storage = figure
    finally:
        question = {"what": "write files", "size": 0, "seconds": 0.0}
        driver.answers(driver.ask([n.first for n in nodes], question), time.monotonic() + 5.0)
        for node in nodes:
            # Here too: a task that does not answer leaves its file.
            _remove(data_file(folder, node.first))


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the directory's file system; 0 if unknown."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _rates(
    driver: Driver, writers: list[NodeResult], readers: list[NodeResult], size: int, seconds: float
) -> list[Figure]:
    """Let all `writers` write at once, then each of `readers` read the file of the writer at the
    same position. Returns the write and read figures of each node of `writers`."""
    limit = STORAGE_S + seconds + 3.0
    silent = {"error": f"no answer after {limit:.0f} s"}
    question = {"what": "write files", "size": size, "seconds": seconds}
    keys = driver.ask([node.first for node in writers], question)
    answers = driver.answers(keys, time.monotonic() + limit)
    wrote = [answers.get(node.first, silent) for node in writers]
    keys = {}
    for writer, reader, figure in zip(writers, readers, wrote, strict=True):
        if "error" not in figure:
            question = {"what": "read files", "owner": writer.first, "seconds": seconds}
            keys |= driver.ask([reader.first], question)
    answers = driver.answers(keys, time.monotonic() + limit)
    # A file that was not written is not read: the write error says more.
    read = {rank: answers.get(rank, silent) for rank in keys}
    if len(writers) == 1:
        return [wrote[0] | read.get(readers[0].first, {})]
    return [figure | read.get(node.first, {}) for node, figure in zip(writers, wrote, strict=True)]


def judge_storage(report: Report) -> None:
    """Note slow rates and errors of the run directory: it is shared, so no node is at fault."""
    for node in report.nodes:
        if node.storage and "error" in node.storage:
            node.notes.append(f"run directory: {node.storage['error']}")
    for key, verb in (("write_bytes_per_s", "writes"), ("read_bytes_per_s", "reads")):
        rates = {node.name: (node.storage or {}).get(key) for node in report.nodes}
        known = [rate for rate in rates.values() if rate]
        for node in report.nodes:
            rate, usual = rates[node.name], statistics.median(known or [0.0])
            if rate is not None and rate < SLOW_STORAGE * usual:
                node.notes.append(
                    f"run directory: it {verb} {rate / 1e6:,.0f} MB/s, the median node "
                    f"{usual / 1e6:,.0f} MB/s"
                )
