"""Saving and loading of a run's state providers under the commit protocol, on all ranks at once."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kempner.checkpoint import commit
from kempner.checkpoint.choose import (
    Choice,
    choose_checkpoint,
    remember_skip,
    set_damaged_aside,
)
from kempner.checkpoint.config import CheckpointConfig
from kempner.checkpoint.format import plan as layout
from kempner.checkpoint.format.plan import TENSORS, Table, local_part
from kempner.checkpoint.format.writer import WRITE, Image, image_bytes, plan_file, write_file
from kempner.checkpoint.history import MANIFEST, Damaged
from kempner.checkpoint.ownership import claim_directory, is_own, remove_directory
from kempner.checkpoint.ranks import PeersLost, Ranks, in_touch
from kempner.checkpoint.state import StateProvider, collect_state
from kempner.jobs.lock import RunLock
from kempner.jobs.this_job import attempt_name, short_window

LAST_PRUNE_S = 10.0
SAVE_THREAD = SAVE_GROUP = "checkpoint"  # the thread's name prefix; the group's description


class Checkpointer:
    """Saves and loads a run. All ranks call the same methods in the same order.

    Its collectives use a separate gloo group, so that a background save never mixes with the
    collectives of training. They are few and of constant size.
    """

    # Of the newest save: the rank whose write took longest, its seconds, the mean of the others'.
    slowest_write: tuple[int, float, float] | None = None

    def __init__(
        self,
        cfg: CheckpointConfig,
        root: Path,
        providers: Mapping[str, StateProvider],
        contents: tuple[dict[str, str], dict[str, Any]],
        log: Callable[[str], None],
        run_lock: RunLock | None = None,
    ) -> None:
        """`contents`: texts that go into each checkpoint, by file name, and facts for its manifest.
        Of these, "run" (the identity of the run) and "fixed" (sections of values) must be the same
        when it is loaded; rank 0's count. `run_lock`, on rank 0: the lock of the run directory;
        `latest` moves only while it is held.

        Raises ConfigError on all ranks if another live job uses `root`, or it belongs
        to another run.
        """
        self.cfg, self.root, self.providers, self.log = cfg, root, providers, log
        self.texts, self.about = contents
        # A separate timeout: a slow file system makes ranks wait longer than a step ever may.
        limit = timedelta(hours=1)
        self.ranks = Ranks(dist.new_group(backend="gloo", timeout=limit, group_desc=SAVE_GROUP))
        self.rank, self.world_size = self.ranks.rank, self.ranks.size
        self._held_by = layout.ranks_of(collect_state(providers)[0].values(), self.world_size)
        firsts = [*range(0, self.world_size, len(self._held_by))]  # of each stage of a pipeline
        # new_group() is a collective: ranks outside the group call it, too.
        self._firsts = dist.new_group(firsts, backend="gloo") if len(firsts) > 1 else None
        self._background = futures.ThreadPoolExecutor(1, SAVE_THREAD)
        # A separate thread: deleting may take minutes, and must not hold up the next save.
        self._retention = futures.ThreadPoolExecutor(1, "retention")
        self._pruning: futures.Future[None] | None = None
        self._prune_due = False
        self._table: Table | None = None  # the image's table
        self._room = 1 << 62  # bytes of host memory for the image; a small one always fits
        self._whole: Table = {}  # on rank 0: includes the tensors of all stages
        self._built: futures.Future[tuple[Image, bytes | None]] | None = None
        self.saved_step = -1  # newest durable step
        self.failed_saves = 0  # in a row
        self._step_time = 0.0
        self._warned_of = 0.0  # seconds of a save too long for the signal window
        self.seconds: float | None = None  # of the newest save until it was durable
        self.stall, self._said_waves = 0.0, False  # while the slowest rank stood still
        self._pending: tuple[int, float, futures.Future[tuple[float, float, int]]] | None = None
        self._lock: RunLock | None = None
        self._run_lock = run_lock
        # All use rank 0's: they write into one directory, whose name contains it.
        self._attempt = self.ranks.on_first(attempt_name)
        self.ranks.on_first(self._claim)

    def _claim(self) -> None:
        """Mark the directory as this run's, and lock it; by default it is inside run.dir, whose
        lock covers it."""
        try:
            claim_directory(self.root, self.about.get("run", ""))
            if self.cfg.dir:
                on_lost = self._run_lock.on_lost if self._run_lock is not None else None
                self._lock = RunLock(self.root, "--checkpoint.dir=DIR", on_lost)
        except OSError as error:  # a full disk: train on, as when a save fails
            self.log(f"WARNING: {self.root} is not locked; nothing keeps other runs out: {error}")

    # --- saving ---

    def save(self, step: int, position: dict[str, Any]) -> None:
        """Start to save after `step` steps, or save at once if async_save is off. `position` goes
        into the manifest.

        A step that is saved, or being saved, is not saved again. A failed save is logged and
        counted; the run continues, and `latest` stays what it was. Raises PeersLost, here or where
        the save is seen to have ended, if the ranks have lost each other.
        """
        if step == self.saved_step or (self._pending and self._pending[0] == step):
            return
        # The previous write still reads the image that this save stages into.
        self.wait()
        start_time = time.monotonic()
        # Pass an error on instead of raising: the other ranks wait for this one in _write.
        problem = self._stage()
        position = copy.deepcopy(position)  # the caller goes on mutating its dict
        waves = 1 if problem or self._built is None else self._built.result()[0].waves
        # Integers, because they travel in the all-reduce that tells whether all ranks have written.
        most = [int(1e6 * (time.monotonic() - start_time)), waves]
        # If one rank saves in waves, the steps of all ranks wait for it. They wait here, because to
        # the watchdog a rank that waits in its next step hangs.
        waves = self.ranks.largest(waves)
        future = self._background.submit(self._write, step, position, problem, most)
        if not self.cfg.async_save or waves > 1:
            futures.wait([future])
        self._pending = (step, start_time, future)
        self.poll()

    @property
    def in_flight(self) -> int | None:
        """Return the step whose save is in flight."""
        return self._pending[0] if self._pending else None

    def poll(self, step_time: float = 0.0) -> None:
        """Check whether the save in flight has ended. Call it after every step, with its seconds:
        the first call also prepares the memory of the first save, in the background."""
        self._step_time = step_time
        if self._built is None:
            self._prepare()
        self._see()
        if self._prune_due and self.rank == 0 and (not self._pruning or self._pruning.done()):
            self._prune_due = False
            self._pruning = self._retention.submit(self._prune)

    def _see(self) -> None:
        if self._pending is None or not self._pending[2].done():
            return
        step, start_time, future = self._pending
        self._pending = None
        if error := future.exception():
            if isinstance(error, PeersLost):
                raise error  # every later save would fail, too
            self.failed_saves += 1
            self.log(
                f"WARNING: the checkpoint of step {step} failed: {self.ranks.describe(error)}; "
                "the previous one is kept"
            )
            return
        self.saved_step, self.failed_saves, self._prune_due = step, 0, True
        durable, self.stall, waves = future.result()
        self.seconds = durable - start_time
        if waves > 1 or not self.cfg.async_save:
            self.stall = self.seconds
        if waves > 1 and self.rank == 0 and not self._said_waves:
            self._said_waves = True
            from kempner.checkpoint.format.waves import warning_of_waves

            self.log(warning_of_waves(waves))
        self.log(f"checkpoint of step {step} is durable after {self.seconds:.1f} s")
        # Warn again only if saves become clearly slower.
        if self.seconds > 1.2 * self._warned_of and (
            warning := short_window(self.seconds, self._step_time)
        ):
            self._warned_of = self.seconds
            self.log(warning)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the save in flight is durable or has failed, at most
        `seconds`; see saved_step."""
        if self._pending is not None:
            with contextlib.suppress(futures.TimeoutError):
                self._pending[2].exception(seconds)
            self._see()

    def close(self, seconds: float | None = None, prune: bool = True) -> None:
        """Run wait() and, with `prune`, the last retention, which a job that must
        exit now skips."""
        self.wait(seconds)
        if prune and self._prune_due and self.rank == 0:
            futures.wait([self._retention.submit(self._prune)], LAST_PRUNE_S)
        # Do not wait: a hanging file system must not delay the end beyond `seconds`.
        for executor in (self._background, self._retention):
            executor.shutdown(wait=False)
        # A write in flight still reads that memory.
        if self._pending is None:
            self._unpin()
        if self._lock is not None:
            self._lock.release()

    def _prune(self) -> None:
        """Apply retention, outside the save: deleting takes minutes on a parallel file system."""
        with contextlib.suppress(OSError):  # a failed deletion must not end the run
            cfg = self.cfg
            commit.prune_checkpoints(self.root, cfg.keep_last_n, cfg.keep_every, cfg.powers_of_two)

    def _prepare(self) -> None:
        with contextlib.suppress(TypeError):  # the save reports what cannot be stored
            shared, _, table, whole = self._collect()
            self._build(table, whole, shared)

    def _build(self, table: Table, whole: Table, state: dict[str, Tensor]) -> None:
        """Plan and allocate for this table, in the background. `whole`: the table of all stages."""
        self._unpin()
        on_gpu = (local_part(tensor).device for tensor in state.values() if tensor.is_cuda)
        device = next(on_gpu, None)
        if self._table is None and sum(local_part(t).nbytes for t in state.values()) > WRITE:
            from kempner.jobs.ranks.host_memory import memory_of_rank

            # Measure it here, before any rank takes its part: all come from the same step.
            self._room = memory_of_rank()

        def build() -> tuple[Image, bytes | None]:
            from kempner.checkpoint.format.dcp import dcp_metadata  # 0.3 s, here beside the steps

            plan = plan_file(table, self.rank)
            if image_bytes(plan) <= self._room:
                image = Image(plan, device, self.log)
            else:
                from kempner.checkpoint.format.waves import WavedImage

                image = WavedImage(plan, device, self.log, self._room)
            return image, dcp_metadata(whole, self.world_size) if self.rank == 0 else None

        self._table, self._whole, self._built = table, whole, self._background.submit(build)

    def _collect(self) -> tuple[dict[str, Tensor], dict[str, Tensor], Table, Table]:
        """Return the shared state and this rank's own, their table, and the table of all stages."""
        try:
            shared, own = collect_state(self.providers)
            table = layout.make_table(shared, own, self.world_size)
        except Exception:
            self._of_all_stages({})  # the other stages wait for this one's
            raise
        return shared, own, table, self._of_all_stages(table)

    def _of_all_stages(self, table: Table) -> Table:
        """Merge the tables of all pipeline stages, at each save: one stage's tensors may change
        while another's do not."""
        # A stage's first rank knows all of its tensors; rank 0 writes the table.
        if self._firsts is None or self.rank != self._held_by.start:
            return table
        tables: list[Any] = [None] * dist.get_world_size(self._firsts)
        with in_touch():
            dist.all_gather_object(tables, table, self._firsts)
        return {name: spec for table in tables for name, spec in table.items()}

    def _unpin(self) -> None:
        if self._built is not None and not self._built.exception():
            self._built.result()[0].close()

    def _stage(self) -> Exception | None:
        """Copy the current state. Returns an error, which all ranks learn of in _write."""
        try:
            shared, own, table, whole = self._collect()
            unchanged = table == self._table and whole == self._whole
            # exception() also waits for the memory; a failed build is retried.
            if not unchanged or self._built is None or self._built.exception():
                self._build(table, whole, shared)
            assert self._built is not None
            self._built.result()[0].stage(shared | own)
        except Exception as error:
            return error
        return None

    def _write(
        self, step: int, position: dict[str, Any], problem: Exception | None, most: list[int]
    ) -> tuple[float, float, int]:
        """Make the staged state the newest checkpoint; returns the time when it was durable, and
        `most` of all ranks: the seconds to stage it (given in microseconds), and the waves.

        Runs on a thread, with few and long operations: a thread that often takes the GIL slows the
        steps. Raises on all ranks if one has failed.
        """
        partial = commit.partial_of(self.root, step, self._attempt)

        def begin() -> None:
            commit.begin_save(self.root, step, self._attempt)
            for rank in range(0, self.world_size, layout.FILES_PER_FOLDER):
                (partial / layout.file_of(rank)).parent.mkdir(parents=True)

        def write() -> float:
            if problem is not None:
                raise problem
            assert self._built is not None
            image = self._built.result()[0]
            index = {"step": step, "rank": self.rank, "tensors": image.entries}
            began = time.monotonic()
            write_file(partial / layout.file_of(self.rank), image.pieces(), index)
            return time.monotonic() - began

        try:
            # Each of these is a barrier: no rank writes before the directory exists, and nothing is
            # committed before every rank's fsync has returned.
            self.ranks.on_first(begin)
            seconds = self.ranks.on_all(write, most)
            if self.world_size > 1:
                self.slowest_write = self.ranks.slowest(seconds)
            self.ranks.on_first(lambda: self._commit(step, position))
        except Exception:
            if self.rank == 0 and is_own(partial):  # do not fill the disk until the next save
                remove_directory(partial)
            raise
        return time.monotonic(), most[0] / 1e6, most[1]

    def _commit(self, step: int, position: dict[str, Any]) -> None:
        assert self._built is not None
        texts = {name: text.encode() for name, text in self.texts.items()}
        texts[TENSORS] = json.dumps(layout.to_json(self._whole)).encode()
        if (metadata := self._built.result()[1]) is not None:
            texts[".metadata"] = metadata
        facts = {
            "world_size": self.world_size,
            "torch": torch.__version__,
            # Tells history.run_branches() the branch of a run that has gone back.
            "parent": self.saved_step,
            **position,
            **self.about,
        }
        commit.commit_save(self.root, step, texts, facts, self._attempt, self._check_locks)

    def _check_locks(self) -> None:
        """End this process if it has lost a lock. Called before `latest` moves."""
        for lock in (self._run_lock, self._lock):
            if lock is not None:
                lock.check()

    # --- loading ---

    def load(self, only: int | None = None) -> dict[str, Any] | None:
        """Load the best checkpoint, or the one of step `only`; returns its manifest, None if
        there is none.

        Rank 0 chooses. A checkpoint that proves to be damaged is set aside for the one before;
        any other error ends the attempt and leaves it alone. Raises ConfigError if a checkpoint
        does not fit this run or this version, RuntimeError if none of the checkpoints can be
        loaded: also at the next start, which must not begin from nothing because the first one
        has set them aside.
        """
        self.wait()  # a run that goes back: the save in flight is the newest checkpoint
        # Retention must not delete the checkpoint about to be chosen.
        futures.wait([self._pruning] if self._pruning else [])
        if leftovers := self.ranks.on_first(lambda: commit.clean_leftovers(self.root)):
            self.log(f"removed what an earlier attempt left: {', '.join(leftovers)}")
        while choice := self.ranks.on_first(
            lambda: choose_checkpoint(self.root, self.about, self.log, only)
        ):
            path = choice[0]
            try:
                # Rank 0's lock serves all: on_all() returns when every rank has read.
                with commit.reading_lock(path) if self.rank == 0 else contextlib.nullcontext():
                    self.ranks.on_all(partial(self._read_seen, choice))
            except Damaged as error:
                self.ranks.on_first(partial(set_damaged_aside, path, error, self.log))
                continue
            # Only after all ranks have read and verified the checkpoint.
            self.ranks.on_first(partial(commit.set_latest, path))
            self.saved_step = int(choice[1]["step"])
            return choice[1]
        return None

    def _read_seen(self, choice: Choice) -> None:
        """Read all state. A missing file on a host without the file system proves no damage: rank 0
        has read the manifest."""
        try:
            self.read(choice, self.providers)
        except Damaged:
            if not (choice[0] / MANIFEST).is_file():
                what = "is not visible from this host"
                raise FileNotFoundError(errno.ENOENT, what, str(choice[0])) from None
            raise

    def remember_skip(self, skip: list[list[int]]) -> None:
        """Record durably which samples the run leaves out since it went back to the checkpoint just
        loaded: load() puts them into the manifest, also after a restart."""
        if self.rank == 0:
            try:
                remember_skip(self.root, self.saved_step, skip)
            except OSError as error:
                self.log(f"WARNING: a restart will not know which samples to skip: {error}")

    def read(self, choice: Choice, providers: Mapping[str, StateProvider]) -> None:
        """Fill the state of these providers from a checkpoint."""
        from kempner.checkpoint.format.reader import read_wanted
        from kempner.checkpoint.loading import read_targets

        path, manifest, table = choice
        wants = read_targets(providers, table, manifest["world_size"], self.rank, self.world_size)
        # If every file has a copy, read this rank's own, in a world of the same size.
        read_wanted(path, manifest, table, wants, near=self.rank % manifest["world_size"])
        for provider in providers.values():
            provider.restored()
