"""Compute steps of a run again, beside it, and compare: the work of an idle spare node.

    export KEMPNER_SPARE_COMMAND='python scripts/audit.py'    before sbatch, with KEMPNER_SPARES
    python scripts/audit.py runs/7b                           the same by hand, until the run ends

With resilience.replay_every a job with spares records what each rank has computed in the first step
after a checkpoint. This program loads the checkpoint, recomputes the step for one rank after the
other, and compares, bit for bit if the run's kernels are exact. If a rank differs, and this device
agrees with itself, the run is asked to compare its next step (RUN/REPLAY): its votes find the host.
Exit code 0; 3 if numbers were wrong: those of a rank, by hand, or of this device; 2 on bad input.
"""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(__file__))  # PYTHONSAFEPATH leaves it out
    import first

    first.start_program()  # before anything that may be missing or slow

import argparse
import contextlib
import os
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kempner.checkpoint.commit import reading_lock
from kempner.checkpoint.history import MANIFEST, Damaged, read_manifest
from kempner.checkpoint.named import checkpoints_of
from kempner.config.command_line import argument_parser
from kempner.config.loading import config_hash, load_config_files
from kempner.jobs import slurm
from kempner.jobs.records.event_reader import read_kind
from kempner.jobs.records.events import GpuFault, StartEvent, append_event, own_file
from kempner.jobs.records.run_history import load_history
from kempner.jobs.records.state import LIVE_STATES
from kempner.jobs.system.files import name_of_step, write_atomic
from kempner.jobs.system.front_door import explain_os_error, run_program
from kempner.jobs.this_job import host_name
from kempner.train.configure import set_allocator
from kempner.train.sections import RunConfig

if TYPE_CHECKING:
    from kempner.train.integrity.audit import Auditor

POLL_S = 5.0
WRONG = 3  # exit code; 1 means an error


def main(argv: list[str]) -> int:
    options = parse(argv)
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices.split(",")[0]  # one is enough
    set_allocator()
    audit = Audit(options.run, options.by_hand)
    while True:
        stays = not options.by_hand or is_live(options.run)
        if audit.find():
            if not audit.compare_next():
                return WRONG
        elif not stays or (options.by_hand and audit.obstacle):
            return WRONG if audit.differed else 0
        else:
            time.sleep(POLL_S)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argument_parser("audit.py", __doc__)
    about = "run directory (default: that of the job to which this spare node belongs)"
    parser.add_argument("run", metavar="RUN", nargs="?", type=Path, help=about)
    options = parser.parse_args(argv)
    options.by_hand = options.run is not None
    run_dir = options.run or os.environ.get("KEMPNER_RUN_DIR")
    if not run_dir:
        parser.error("outside a job, name a run, such as runs/7b")
    options.run = Path(run_dir)
    if options.by_hand and not (options.run / "config.toml").is_file():
        parser.error(f"{options.run}: is not a run that has started: it has no config.toml")
    return options


def is_live(run_dir: Path) -> bool:
    return load_history(run_dir, slurm.my_jobs()).state.word in LIVE_STATES


class Audit:
    """An audit of the ranks, in turn, in the newest first step whose checkpoint exists."""

    def __init__(self, run_dir: Path, by_hand: bool) -> None:
        """`by_hand`: the run may have ended, and its records are left unchanged."""
        self._dir, self._by_hand, self.obstacle = run_dir, by_hand, ""
        self._auditor: Auditor | None = None
        self._stamp = -1  # of the record's file
        self._record: dict[str, Any] = {}
        self._manifest: dict[str, Any] = {}
        self._left: list[int] = []  # ranks of this record
        self._turn = random.randrange(1 << 16)  # different spares begin with different ranks
        self.differed: set[str] = set()  # hosts
        self._said: set[str] = set()

    def _say(self, text: str, once: bool = False) -> None:
        if not once or text not in self._said:
            print(f"{time.strftime('%H:%M:%S')} audit by {host_name()}: {text}", flush=True)
        self._said.add(text)

    def find(self) -> bool:
        """Load the weights of a newer record, if there is one; returns whether a rank is left."""
        from kempner.train.integrity.first_steps import AUDIT_FILE, obstacle, read_first_step

        file, there = self._dir / "config.toml", self._dir / AUDIT_FILE
        if not file.is_file():  # the run has not begun
            return False
        cfg = load_config_files(RunConfig, [file])
        self.obstacle = obstacle(cfg)
        if self.obstacle:
            self._say(f"one device cannot do what a rank of this run does: {self.obstacle}", True)
            return False
        stamp = there.stat().st_mtime_ns if there.exists() else 0
        if stamp == self._stamp:
            return bool(self._left)
        self._stamp = stamp
        try:
            record = read_first_step(self._dir)
        except (ValueError, OSError) as error:
            self._say(f"{there}: cannot be read, or was written by another version: {error}")
            return bool(self._left)
        if record is None:
            self._say(
                f"{there} does not exist yet: a job with spares (KEMPNER_SPARES) writes it after "
                "the first step that follows a checkpoint"
            )
        elif record["config"] != config_hash(cfg):
            self._say(f"{there} belongs to another configuration than {file}: nothing is compared")
        else:
            self._open(cfg, record)
        return bool(self._left)

    def _open(self, cfg: RunConfig, record: dict[str, Any]) -> None:
        from kempner.train.integrity.audit import Auditor

        path = checkpoints_of(self._dir) / name_of_step(record["checkpoint"])
        mesh = (record["config"], record["ranks"], record["per_node"])
        if self._auditor is None:
            self._auditor, self._mesh = Auditor(cfg, record, self._say), mesh
        elif self._mesh != mesh:
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # the model has changed
        self._record, self._left = record, []
        try:
            with reading_lock(path):  # against retention
                if zlib.crc32((path / MANIFEST).read_bytes()) != record["manifest"]:
                    self._say(f"{path} has been replaced: nothing is compared")
                    return
                self._manifest = read_manifest(path)
                self._auditor.load(path)
        except (Damaged, OSError) as error:
            self._say(f"cannot read the checkpoint of step {record['checkpoint']}: {error}")
            return
        for rank, computed in enumerate(record["computed"]):
            if computed["device"] == self._auditor.kind:
                self._left.append(rank)
            else:
                other = f"rank {rank} has another kind of device: {computed['device']}"
                self._say(f"{other}, and this one is {self._auditor.kind}", once=True)

    def compare_next(self) -> bool:
        """Compute what the next rank has computed; returns whether this device can be trusted."""
        import torch

        from kempner.train.integrity.fingerprint import NO_PLACE
        from kempner.train.integrity.first_steps import fingerprint_of_batch
        from kempner.train.integrity.votes import difference

        assert self._auditor is not None
        rank = min(self._left, key=lambda rank: (rank - self._turn) % self._record["ranks"])
        self._left.remove(rank)
        self._turn = rank + 1
        computed, tolerance = self._record["computed"][rank], self._record["tolerance"]
        step, places = self._record["checkpoint"] + 1, self._auditor.places
        where = f"step {step} of rank {rank} on {computed['host']}"
        began = time.perf_counter()
        # On a CPU the number of threads determines the order of sums.
        torch.set_num_threads(computed["threads"])
        share = self._auditor.share(self._manifest, rank)
        if fingerprint_of_batch(share.batches) != computed["batch"]:
            self._say(f"{where}: not compared: the data have changed")
            return True
        theirs = self._auditor.comparable(computed["rows"])
        ours = self._auditor.compute(share)
        found = difference(theirs, ours, tolerance)
        if found.place == NO_PLACE:
            self._say(f"{where}: equal, in {time.perf_counter() - began:.1f} s")
            return True
        # A device that does not agree with itself accuses nobody.
        own = difference(ours, self._auditor.compute(share), tolerance)
        if own.place != NO_PLACE:
            self._retire(f"it differs from itself: {own.describe(places, 'once', 'once')}")
            return False
        self._warn(
            f"wrong numbers in step {step} by one of rank {rank} on {computed['host']} and the "
            f"spare {host_name()}: {found.describe(places, 'there', 'here, twice')}"
        )
        self.differed.add(computed["host"])
        if len(self.differed) > 1:
            hosts = ", ".join(sorted(self.differed))
            self._retire(f"it differs from ranks on {hosts}, unless all have received wrong data")
            return False
        if not self._by_hand:
            with explained(self._say):
                write_atomic(self._dir / "REPLAY", f"{rank} {self._record['attempt_id']}\n")
        return True

    def _retire(self, why: str) -> None:
        """Report that this device cannot be trusted; as a spare it replaces no node."""
        self._warn(f"the spare {host_name()} computes wrong numbers: {why}")
        job = os.environ.get("SLURM_JOB_ID")
        if job and not self._by_hand:
            node = os.environ.get("SLURMD_NODENAME", host_name())
            with explained(self._say):
                (self._dir / f".unfit-{job}-{node}").touch()

    def _warn(self, reason: str) -> None:
        """Report a finding, and add it to the attempt's findings about devices. These exclude no
        host: the votes of the run do."""
        self._say(f"ERROR: {reason}")
        file = self._dir / "attempts.jsonl"
        attempt = self._record["attempt_id"]
        starts = [s for s in read_kind(file, StartEvent) if (s.attempt_id or "0") == attempt]
        if self._by_hand or not starts:
            return
        start = starts[-1]
        finding = GpuFault(
            time=time.time(),
            job=start.job,
            restart=start.restart,
            attempt_id=start.attempt_id,
            attempt=start.attempt,
            step=None,
            kind="numbers",
            answer="warn",
            reason=reason,
            host=host_name(),
        )
        with explained(self._say):
            append_event(own_file(file), finding)


@contextlib.contextmanager
def explained(say: Callable[[str], None]) -> Iterator[None]:
    """Report what cannot be written, and continue."""
    try:
        yield
    except OSError as error:
        say(f"WARNING: {explain_os_error(error)}")


if __name__ == "__main__":
    run_program(main)
