"""The runs of a tune: each candidate is scripts/train.py with fake data, in a separate process
beside every rank. Rank 0 decides which is next; the other ranks read that in files of the run
directory, and run the same. No torch."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kempner.config.command_line import Command
from kempner.config.option import ConfigError
from kempner.config.values import to_text
from kempner.extensions.bench.config import BenchConfig
from kempner.extensions.bench.measure import bench_overrides, run_variant, why_failed
from kempner.extensions.lowcomm.config import LowcommConfig
from kempner.extensions.tune.journal import TuneJournal
from kempner.extensions.tune.search import OutOfTime
from kempner.extensions.tune.space import Overrides
from kempner.extensions.tune.trials import Measurement
from kempner.jobs.ranks.rendezvous import SLOWEST_POLL_S
from kempner.jobs.records import event_reader, events
from kempner.jobs.system.compiler import keep_private
from kempner.jobs.system.files import FULL, try_to_write, write_atomic
from kempner.jobs.system.front_door import BAD_INPUT_EXIT
from kempner.jobs.system.reading import read_jsonl
from kempner.train.configure import load_config
from kempner.train.extensions import Variant
from kempner.train.sections import RunConfig

START_VARIABLES = (  # these identify this start of all ranks
    "KEMPNER_ATTEMPT_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT",
)  # fmt: skip
TRAIN = Path(__file__).resolve().parents[4] / "scripts" / "train.py"
POLL_S = 0.2
ROUND_STEPS = 4  # of a fragment: the median step is then one without an outer step
PROBE_BYTES = 1 << 20  # bytes that a disk must accept after a failed run
REASON = 160  # characters kept of a reason
ERROR_LINE, ITEM = re.compile(r"[\w.-]+: error: (.*)"), "  - "  # the format of print_problems()
# The kernel kills the process that takes the last memory of a host; a person may kill it, too.
KILLED = "killed by the host (signal 9), perhaps because it ran out of memory"
# A program that ends with this process; otherwise a killed tune leaves a run that the next one
# meets. A separate program, not preexec_fn: Python code between fork and exec may crash or deadlock
# if the process has threads. 1: PR_SET_PDEATHSIG, which an exec keeps.
ENDS_WITH_PARENT = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, {int(signal.SIGKILL)}, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def trial_of(
    command: Command, overrides: Overrides, run_dir: Path, warmup: int, steps: int
) -> Variant:
    """Return the run that measures a candidate. Raises ConfigError."""
    changes = [f"--{key}={to_text(value)}" for key, value in overrides.items()]
    length = [f"--bench.warmup={warmup}", f"--bench.steps={steps}"]
    # In this order, because the last of several words for an option counts.
    words = [*command.overrides, *changes, *length]
    cfg = load_config(command.files, words)
    if cfg.data.document_mask and cfg.of(BenchConfig).data == "fake":
        words.append("--bench.length=variable")  # the run packs its rows, too
        cfg = load_config(command.files, words)
    if (replicas := cfg.of(LowcommConfig)).on:
        words.append(f"--lowcomm.interval={shortest_round(replicas)}")
        cfg = load_config(command.files, words)
    # These follow from the configuration, and are then checked together with it.
    words += bench_overrides(cfg, str(run_dir))
    cfg = load_config(command.files, words)
    return Variant(" ".join(changes), [*command.files, *words], cfg)


def shortest_round(cfg: LowcommConfig) -> int:
    """Return the steps of a round (H) for a measurement, which has whole rounds: the fewest in
    which most steps are without an outer step, as in a long round. They divide the run's, as its
    checkpoint.interval is a multiple of that."""
    fewest = cfg.fragments * max(cfg.tau + 1, ROUND_STEPS)
    divisors = (steps for steps in range(fewest, cfg.interval) if cfg.interval % steps == 0)
    return next((steps for steps in divisors if steps % cfg.fragments == 0), cfg.interval)


def with_batch(command: Command, cfg: RunConfig, sequences: int) -> Command:
    """Return a command line with another global batch."""
    word = f"--train.global_batch={sequences}"
    if cfg.train.global_batch_tokens is not None:
        word = f"--train.global_batch_tokens={sequences * cfg.train.seq_len}"
    return replace(command, overrides=[*command.overrides, word])


class Orders:
    """Rank 0's orders to the other ranks of its start: numbered files."""

    def __init__(self, folder: Path) -> None:
        names = [os.environ.get(variable, "") for variable in START_VARIABLES]
        local = os.environ.get("LOCAL_WORLD_SIZE")  # torchrun's, which may repeat the names
        if local is not None and local == os.environ.get("WORLD_SIZE"):
            # On one host all ranks are children of the same torchrun.
            names.append(str(os.getppid()))
        name = re.sub(r"\W+", "_", "-".join(names)).strip("_")
        self.folder, self._number = folder / "orders" / (name or "alone"), 0

    def post(self, order: dict[str, Any]) -> None:
        # Not in __init__: the other ranks make an Orders, too, perhaps after the first order.
        if not self._number:  # remains of an earlier start of the same name
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
        self._number += 1
        # The other ranks read an order as soon as its file exists.
        write_atomic(self.folder / f"{self._number}.json", json.dumps(order))

    def follow(self, leaves: Callable[[], float]) -> int:
        """Follow rank 0's orders on this rank until the final one; returns the exit code."""
        while True:
            path = self.folder / f"{self._number + 1}.json"
            pause = POLL_S
            while not path.exists():
                if leaves():
                    return 0
                for folder in (self.folder.parent, self.folder):
                    with contextlib.suppress(OSError):
                        os.listdir(folder)  # NFS forgets its cached "no such file"
                time.sleep(pause)
                pause = min(1.2 * pause, SLOWEST_POLL_S)
            self._number += 1
            order = json.loads(path.read_text())
            if "code" in order:
                return int(order["code"])
            # Only the parent knows the signal: rank 0 merely sees a lost peer.
            if run_trial(order, subprocess.DEVNULL, leaves) == -signal.SIGKILL:
                (self.folder / f"{self._number}.killed").touch()

    def was_killed(self) -> bool:
        """Return whether another rank reported that its process of the newest run was killed."""
        return (self.folder / f"{self._number}.killed").exists()


def run_trial(order: dict[str, Any], out: Any, leaves: Callable[[], float]) -> int:
    """Run this rank's process of a candidate; returns its exit code."""
    keep_private()  # one cache for all candidates' compilations: a run has its own
    return run_variant(
        [*ends_with_parent(), str(TRAIN), *order["words"]],
        Path(order["run_dir"]),
        order["number"],
        leaves,
        order["seconds"],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
    )


def ends_with_parent() -> list[str]:
    """Return the words before those of a Python program that end it once this process has ended."""
    # -I -S: it needs only the standard library, and starts without site-packages.
    return [sys.executable, "-ISc", ENDS_WITH_PARENT, str(os.getpid())]


class Runs:
    """Rank 0's measurements, for Search."""

    def __init__(
        self,
        command: Command,
        folder: Path,
        journal: TuneJournal,
        orders: Orders,
        left: Callable[[], float],
        leaves: Callable[[], float],
    ) -> None:
        self._command, self._folder, self._journal = command, folder, journal
        self._orders, self._left, self._leaves = orders, left, leaves

    def __call__(
        self, overrides: Overrides, rung: int, warmup: int, steps: int, limit: float
    ) -> Measurement:
        if self._leaves() or limit <= 0:
            raise OutOfTime
        number = self._journal.start(overrides, rung)
        run_dir = self._folder / "trials" / f"{number:04d}"
        # A journal with a damaged line counts one run less, and reuses a number.
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        words = trial_of(self._command, overrides, run_dir, warmup, steps).words
        order = {"words": words, "run_dir": str(run_dir), "number": number, "seconds": limit}
        log, began = run_dir.with_suffix(".out"), time.monotonic()
        # Before rank 0's own run, in which the processes of all ranks meet.
        self._orders.post(order)
        with open(log, "w") as out:
            code = run_trial(order, out, self._beat)
        wall = time.monotonic() - began
        try:
            result = self._judge(run_dir, log, code, wall, limit, (warmup, steps))
            if code == BAD_INPUT_EXIT and not overrides:  # would affect all others, too
                raise ConfigError(result.failed)
        except (OutOfTime, ConfigError):
            self._journal.cut(overrides, rung, wall)
            raise
        self._journal.end(overrides, rung, result)
        # A failed run stays, for inspection.
        if code == 0:
            shutil.rmtree(run_dir, ignore_errors=True)
            log.unlink(missing_ok=True)
        return result

    def _beat(self) -> float:
        self._journal.beat()
        return self._leaves()

    def _judge(
        self,
        run_dir: Path,
        log: Path,
        code: int,
        wall: float,
        limit: float,
        length: tuple[int, int],
    ) -> Measurement:
        """Return the result of a run. Raises OutOfTime if it was cut off, ConfigError if the
        disk is full."""
        warmup, steps = length
        lines = [line for line in read_jsonl(run_dir / "metrics.jsonl") if "loss" in line]
        if self._leaves() or (wall >= limit and self._left() <= 1.0):
            raise OutOfTime  # half measured
        lines = [line for line in lines if line["step"] > warmup]
        if code == 0 and len(lines) >= steps:
            return _result(lines, wall)
        _refuse_full_disk(run_dir, log, code)
        if code == 0:  # another rank was asked to leave
            raise OutOfTime
        return _failure(run_dir, log, code, self._orders.was_killed(), wall, limit)


def _result(lines: Sequence[dict[str, Any]], wall: float) -> Measurement:
    # None on a device whose peak is unknown.
    mfus = [line["mfu"] for line in lines if line["mfu"] is not None]
    return Measurement(
        seconds=tuple(line["step_time"] for line in lines),
        gib=max(line["memory_gib"] for line in lines),
        mfu=statistics.median(mfus) if mfus else None,
        wall=wall,
    )


def _failure(
    run_dir: Path, log: Path, code: int, peer_killed: bool, wall: float, limit: float
) -> Measurement:
    """Return why a run has no figures. `peer_killed`: another rank's process was killed."""
    if wall >= limit:
        return Measurement(failed=f"took over {limit:.0f} s", wall=wall)
    faults = event_reader.read_kind(run_dir / "attempts.jsonl", events.FaultEvent)
    # A rank that has only lost its peer reveals nothing about the candidate.
    own = [fault for fault in faults if not fault.lost_peer]
    if not own and (peer_killed or code == -signal.SIGKILL):
        return Measurement(failed=KILLED, killed=True, wall=wall)
    why = why_failed(run_dir, code)
    if why.startswith("exit code"):
        why = reason_in(log.read_text(errors="replace")) or why
    return Measurement(failed=why[:REASON], out_of_memory="out of memory" in why, wall=wall)


def _refuse_full_disk(run_dir: Path, log: Path, code: int) -> None:
    said = f"{why_failed(run_dir, code)}\n{log.read_text(errors='replace')}".splitlines()
    try:
        try_to_write(run_dir.parent, PROBE_BYTES)  # the lines themselves may have found no room
    except OSError as error:
        said.append(str(error))
    for line in said:
        if any(os.strerror(number) in line for number in FULL):
            raise ConfigError(
                f"a run ran out of disk space: {line.strip()[:REASON]}; what was measured is "
                f"kept: make room, and give the same command again ({log} says where)"
            )


def reason_in(log: str) -> str:
    """Return the error, possibly a list, at the end of a program's log; or its last line."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    for number in range(len(lines) - 1, -1, -1):
        if found := ERROR_LINE.match(lines[number]):
            listed = itertools.takewhile(lambda line: line.startswith(ITEM), lines[number + 1 :])
            return "; ".join(line.removeprefix(ITEM) for line in listed) or found[1]
    return lines[-1].strip() if lines else ""
