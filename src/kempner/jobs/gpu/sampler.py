"""Watches the GPUs of one node for a rank, in a separate process. No torch, no CUDA.

    python -m kempner.jobs.gpu.sampler RUN_DIR ATTEMPT SECONDS

The rank that starts it holds its standard input. When that is closed or the rank is gone, it takes
a last reading and ends. Findings become events in attempts/HOST.jsonl of the run directory;
gpu/HOST.jsonl there gets a line per minute, one with each event, and one at the end. The driver is
queried in threads, which may hang with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from kempner.jobs.gpu.findings import ECC, Finding, ReadingComparison, of_xid
from kempner.jobs.gpu.kernel_log import KernelLog
from kempner.jobs.gpu.reading import GpuReading, NoAnswer, Reader, of_this_job, open_reader
from kempner.jobs.records import events
from kempner.jobs.records.events import Event, FaultEvent, GpuFault
from kempner.jobs.system.files import LineFile
from kempner.jobs.this_job import host_name, job_name

GPU_POLL_S = 1.0  # between two checks of the kernel log and the rank
SOON_S = 2.0  # until another reading if a GPU is in doubt
SAMPLER_LAST_READ_S = 4.0
DRIVER_SILENCE_S = 60.0  # without an answer of the driver; a slow driver takes seconds
GPU_LINE_S = 60.0  # between two lines of figures

_GpuLook = list[GpuReading] | str  # str: why there is no reading


class GpuSampler:
    def __init__(self, run_dir: Path, attempt: int, interval: float, reader: Reader) -> None:
        self.run_dir, self.attempt, self.interval = run_dir, attempt, interval
        self.host, self.rank = host_name(), os.getppid()
        self.reader, self.log, self.watch = reader, KernelLog(), ReadingComparison()
        self.known: set[tuple[object, ...]] = set()
        self.gpus: dict[str, GpuReading] = {}  # of this job, by bus id
        self.has_all = False  # the driver shows no others
        self.figures = Figures(run_dir, self.host, attempt)
        self._looks: queue.Queue[_GpuLook] = queue.Queue()
        self._errors: queue.Queue[tuple[str, int]] = queue.Queue()
        self._due = threading.Event()
        self._asked = self._looked = 0  # numbers of the last reading requested, and done
        self._answered = time.monotonic()

    def run(self) -> None:
        for work in (self._read, self._listen):
            threading.Thread(target=work, daemon=True).start()
        self._ask()
        following = time.monotonic() + self.interval
        while self._rank_lives():
            self._take()
            if self.watch.in_doubt:
                following = min(following, time.monotonic() + SOON_S)
            if time.monotonic() >= following:
                self._ask()
                following = time.monotonic() + self.interval
        self._ask()  # why has the rank ended?
        end = time.monotonic() + SAMPLER_LAST_READ_S
        while self._looked < self._asked and time.monotonic() < end:
            time.sleep(0.05)
        self._take()
        self.close()

    def close(self) -> None:
        self.figures.write()
        self.log.close()

    def _rank_lives(self) -> bool:
        # Two checks: a forked child of the rank, such as a loader worker, keeps the pipe open; and
        # if the rank is gone before the first getppid(), its value never changes.
        readable, _, _ = select.select([sys.stdin], [], [], min(GPU_POLL_S, self.interval))
        return not readable and os.getppid() == self.rank

    def _ask(self) -> None:
        self._asked += 1
        self._due.set()

    def _read(self) -> None:
        while self._due.wait():
            # Before the reading: a request during it asks for another one.
            self._due.clear()
            count = self._asked
            try:
                gpus = self.reader.read()
                own = of_this_job(gpus)
                self.has_all = len(own) == len(gpus)
                self._looks.put(own)
            except NoAnswer as error:
                self._looks.put(str(error))
            self._looked = count

    def _listen(self) -> None:
        while True:
            for error in self.reader.xids(GPU_POLL_S):
                self._errors.put(error)
            time.sleep(0.01)  # NVML returns at once if a GPU is lost

    def _take(self) -> None:
        """Process all readings and errors since the last call."""
        while not self._looks.empty():
            look = self._looks.get()
            if isinstance(look, str):
                continue
            self._answered = time.monotonic()
            self.gpus |= {gpu.pci: gpu for gpu in look if gpu.pci and not gpu.lost}
            self.figures.add(look)
            for finding in self.watch.look(look):
                self._found(finding)
        # With a long interval, one reading without an answer is not yet silence.
        if time.monotonic() - self._answered > max(DRIVER_SILENCE_S, 3 * self.interval):
            text = f"{self.reader.name} does not answer"
            self._found(Finding("silent", "warn", text))
        errors = [(*self._errors.get(), "") for _ in range(self._errors.qsize())]
        for pci, xid, text in (*self.log.xids(), *errors):
            if pci in self.gpus or (self.has_all and not pci):  # not another job's
                self._found(of_xid(xid, text, self.gpus.get(pci)))
            elif not self.gpus or not pci:  # unknown whose it is; a lost GPU is also missed
                finding = of_xid(xid, text, GpuReading(index=-1, pci=pci))
                harmless = finding.answer in ("warn", "note")
                self._found(finding if harmless else replace(finding, answer="warn"))

    def _found(self, finding: Finding) -> None:
        if finding.key in self.known:
            return
        self.known.add(finding.key)
        gpu = finding.gpu or GpuReading(index=-1)
        head = {
            "attempt": self.attempt,
            "time": round(time.time(), 3),
            "job": job_name(),
            "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
            "attempt_id": os.environ.get("KEMPNER_ATTEMPT_ID"),
        }
        about = {"gpu": gpu.index, "uuid": gpu.uuid, "pci": gpu.pci, "serial": gpu.serial}
        kind, answer, reason = finding.kind, finding.answer, finding.what
        self._record(
            GpuFault(
                **head,  # type: ignore[arg-type]
                **about,  # type: ignore[arg-type]
                kind=kind,
                answer=answer,
                reason=reason,
                xid=finding.xid,
                host=self.host,
            ),
        )
        if answer == "note":
            return
        # Write the figures now: the node may not live until the next line is due.
        self.figures.write()
        ends = answer == "end"
        print(
            f"WARNING: {self.host}: {reason}{': the run ends here' if ends else ''}",
            file=sys.stderr,
            flush=True,
        )
        # If the rank is gone, its id may be another process's; then it is no longer our parent.
        if ends and os.getppid() == self.rank:
            # Collectives would hang now, and the other ranks' watchdogs wait for minutes.
            text = f"{self.host}: {reason}"
            self._record(FaultEvent(**head, kind="crash", hosts=(self.host,), reason=text))  # type: ignore[arg-type]
            # Not SIGTERM, which requests a save: that needs the GPU. After the record, which tells
            # the batch script the node.
            os.kill(self.rank, signal.SIGKILL)

    def _record(self, event: Event) -> None:
        with contextlib.suppress(OSError):  # a full disk: the rest does not need the record
            events.append_event(events.own_file(self.run_dir / "attempts.jsonl"), event)


class Figures:
    """Writes a line per minute, or sooner: the mean of each GPU's readings since the last line."""

    def __init__(self, run_dir: Path, host: str, attempt: int) -> None:
        self.path, self.head = run_dir / "gpu" / f"{host}.jsonl", {"host": host, "attempt": attempt}
        self.looks: list[list[GpuReading]] = []
        self.written = -GPU_LINE_S  # the first reading gets a line

    def add(self, look: list[GpuReading]) -> None:
        self.looks.append(look)
        if time.monotonic() - self.written >= GPU_LINE_S:
            self.write()

    def write(self) -> None:
        by_index: dict[int, list[GpuReading]] = {}
        for gpu in (gpu for look in self.looks for gpu in look if not gpu.lost):
            by_index.setdefault(gpu.index, []).append(gpu)
        if by_index:
            line = {"time": round(time.time(), 3), **self.head, "looks": len(self.looks)}
            line["gpus"] = [_figures(index, looks) for index, looks in sorted(by_index.items())]
            with contextlib.suppress(OSError):
                self.path.parent.mkdir(exist_ok=True)
                LineFile(self.path).write(json.dumps(line))
        self.looks, self.written = [], time.monotonic()


def _figures(index: int, looks: list[GpuReading]) -> dict[str, object]:
    def mean(name: str) -> float | None:
        values = [value for gpu in looks if (value := gpu.number(name)) is not None]
        return round(statistics.fmean(values), 1) if values else None

    slowed = Counter(name for gpu in looks for name in gpu.slowdowns)
    return {
        "gpu": index,
        "temperature_c": mean("temperature.gpu"),
        "power_w": mean("power.draw"),
        "utilization": mean("utilization.gpu"),
        "uncorrected": looks[-1].number(ECC),
        "slowed": {name: round(count / len(looks), 2) for name, count in slowed.items()},
    }


def main(run_dir: Path, attempt: int, interval: float) -> None:
    # These are requests to the rank: Slurm sends a step's signals to all of its processes.
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if (reader := open_reader()) is None:
        return
    sampler = GpuSampler(run_dir, attempt, interval, reader)

    def leave(*_: object) -> None:
        sampler.close()
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)  # the run has ended as it should, or Slurm ends the step
    sampler.run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
    os._exit(0)  # a thread may hang in the driver
