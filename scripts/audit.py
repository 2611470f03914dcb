"""Compute steps of a run again, beside it, and compare: the work of an idle spare node.

    export KEMPNER_SPARE_COMMAND='python scripts/audit.py'    before sbatch, with KEMPNER_SPARES
    python scripts/audit.py runs/7b                           the same by hand, until the run ends

With resilience.replay_every a job with spares records what each rank has computed in the first step
after a checkpoint. This program loads the checkpoint, computes the same for one rank after the
other, and compares, bit for bit where the run's kernels are exact. Where a rank differs, and this
device agrees with itself, the run is asked to compare its next step (RUN/REPLAY): its votes find
the host. Exit code 0; 1 if this device computes wrong numbers; 2 on bad input.
"""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(__file__))  # PYTHONSAFEPATH leaves it out
    import first

    first.start_program()  # before anything that may be missing or slow

import argparse
import os
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kempner.checkpoint.commit import reading_lock
from kempner.checkpoint.history import MANIFEST, Damaged, read_manifest
from kempner.checkpoint.named import checkpoints_of
from kempner.config.command_line import argument_parser
from kempner.config.loading import config_hash, load_config_files
from kempner.jobs import slurm
from kempner.jobs.records.event_reader import read_kind
from kempner.jobs.records.events import FaultEvent, StartEvent, append_event, own_file
from kempner.jobs.records.run_history import load_history
from kempner.jobs.records.state import LIVE_STATES
from kempner.jobs.system.files import name_of_step, write_atomic
from kempner.jobs.system.front_door import run_program
from kempner.jobs.this_job import host_name
from kempner.train.configure import set_allocator
from kempner.train.sections import RunConfig

if TYPE_CHECKING:
    from kempner.train.integrity.audit import Auditor

POLL_S = 5.0


def main(argv: list[str]) -> int:
    options = parse(argv)
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices.split(",")[0]  # it needs one
    set_allocator()
    audit = Audit(options.run, options.by_hand)
    while True:
        stays = not options.by_hand or is_live(options.run)
        if audit.find():
            if not audit.compare_next():
                return 1
        elif not stays or (options.by_hand and audit.obstacle):
            return 0
        else:
            time.sleep(POLL_S)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argument_parser("audit.py", __doc__)
    about = "run directory (default: that of the job whose spare this is)"
    parser.add_argument("run", metavar="RUN", nargs="?", type=Path, help=about)
    options = parser.parse_args(argv)
    options.by_hand = options.run is not None
    options.run = options.run or Path(os.environ.get("KEMPNER_RUN_DIR", ""))
    if not options.run.name:
        parser.error("outside of a job name a run, such as runs/7b")
    if options.by_hand and not (options.run / "config.toml").is_file():
        parser.error(f"{options.run}: is not a run that has begun: it has no config.toml")
    return options


def is_live(run_dir: Path) -> bool:
    return load_history(run_dir, slurm.my_jobs()).state.word in LIVE_STATES


class Audit:
    """One rank after the other of the newest first step whose checkpoint is there."""

    def __init__(self, run_dir: Path, by_hand: bool) -> None:
        """`by_hand`: it may have ended."""
        self._dir, self._by_hand, self.obstacle = run_dir, by_hand, ""
        self._auditor: Auditor | None = None
        self._records: list[dict[str, Any]] = []
        self._stamp = 0  # of their file
        self._record: dict[str, Any] = {"time": 0.0}
        self._manifest: dict[str, Any] = {}
        self._left: list[int] = []  # ranks of this record
        self._turn = random.randrange(1 << 16)  # several spares begin with several ranks
        self._differed: set[str] = set()  # hosts
        self._said: set[str] = set()

    def _say(self, text: str, once: bool = False) -> None:
        if not once or text not in self._said:
            print(f"{time.strftime('%H:%M:%S')} audit by {host_name()}: {text}", flush=True)
        self._said.add(text)

    def find(self) -> bool:
        """Load the weights of a newer record, if there is one; returns whether a rank is left."""
        from kempner.train.integrity.first_steps import AUDIT_FILE, obstacle, read_first_steps

        file = self._dir / "config.toml"
        if not file.is_file():  # the run has not begun
            return False
        cfg = load_config_files(RunConfig, [file])
        self.obstacle = obstacle(cfg)
        if self.obstacle:
            self._say(f"one device cannot do what a rank of this run does: {self.obstacle}", True)
            return False
        records = self._dir / AUDIT_FILE
        stamp = records.stat().st_mtime_ns if records.exists() else 0
        if stamp != self._stamp:
            self._records, self._stamp = read_first_steps(self._dir), stamp
        for record in reversed(self._records):
            path = checkpoints_of(self._dir) / name_of_step(record["checkpoint"])
            newer = record["time"] > self._record["time"]
            if newer and record["config"] == config_hash(cfg) and (path / MANIFEST).is_file():
                self._open(cfg, record, path)
                break
        return bool(self._left)

    def _open(self, cfg: RunConfig, record: dict[str, Any], path: Path) -> None:
        from kempner.train.integrity.audit import Auditor

        if self._auditor is None:
            self._auditor = Auditor(cfg, record, self._say)
        elif (self._record["config"], self._record["ranks"]) != (record["config"], record["ranks"]):
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # it is another model
        self._record, self._left = record, []
        try:
            with reading_lock(path):  # retention leaves it alone until then
                self._manifest = read_manifest(path)
                self._auditor.load(path)
        except (Damaged, OSError) as error:
            self._say(f"the checkpoint of step {record['checkpoint']} is not read: {error}")
            return
        for rank, computed in enumerate(record["computed"]):
            if computed["device"] == self._auditor.kind:
                self._left.append(rank)
            else:
                other = f"rank {rank} has another device: {computed['device']}"
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
        step = self._record["checkpoint"] + 1
        where = f"step {step} of rank {rank} on {computed['host']}"
        began = time.perf_counter()
        torch.set_num_threads(computed["threads"])
        share = self._auditor.share(self._manifest, rank)
        if fingerprint_of_batch(share.batches) != computed["batch"]:
            self._say(f"{where}: not compared: the data have changed")
            return True
        theirs = self._auditor.comparable(torch.tensor(computed["rows"]))
        ours = self._auditor.compute(share)
        found = difference(theirs, ours, tolerance)
        if found.place == NO_PLACE:
            self._say(f"{where}: equal, in {time.perf_counter() - began:.1f} s")
            return True
        own = difference(ours, self._auditor.compute(share), tolerance)
        if own.place != NO_PLACE:
            what = f"{self._auditor.places.name(own.place)} had the norm {own.first!r} once and"
            what = f"wrong numbers by the spare {host_name()}: {what} {own.second!r} once"
            self._record_fault(step, (), what)
            return False
        what = self._auditor.places.name(found.place)
        self._record_fault(
            step,
            (rank,),
            f"wrong numbers in step {step} by one of rank {rank} on {computed['host']} and the "
            f"spare {host_name()}: {what} had the norm {found.first!r} there and "
            f"{found.second!r} here, twice",
        )
        self._differed.add(computed["host"])
        if len(self._differed) > 1:
            self._say(
                f"this device differs from ranks on {', '.join(sorted(self._differed))}: it is "
                "wrong, or what they all have received"
            )
            return False
        if not self._by_hand or is_live(self._dir):
            write_atomic(self._dir / "REPLAY", f"{rank}\n")
        return True

    def _record_fault(self, step: int, ranks: tuple[int, ...], reason: str) -> None:
        """Add an event to the run's newest attempt. It excludes no host: the votes of the run do
        that."""
        self._say(f"ERROR: {reason}")
        file = self._dir / "attempts.jsonl"
        start = read_kind(file, StartEvent)[-1]
        fault = FaultEvent(
            time=time.time(),
            job=start.job,
            restart=start.restart,
            attempt_id=start.attempt_id,
            attempt=start.attempt,
            step=step - 1,
            kind="corruption",
            ranks=ranks,
            reason=reason,
        )
        append_event(own_file(file), fault)


if __name__ == "__main__":
    run_program(main)
