"""What is in a checkpoint and how it gets there: torch's distributed checkpoint (DCP) under our
commit protocol.

The state is a flat dict of tensors: model.NAME, optim.NAME.KEY, rng.RANK.KIND. Only tensors: what
is no tensor stands in the manifest as JSON, so that loading never runs code from a file. DTensors
carry their own sharding; any other mesh reads what it needs.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
import time
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult

from kempner.checkpoint import commit
from kempner.checkpoint.config import CheckpointConfig
from kempner.config import ConfigError
from kempner.parallel.build import parameter_names

T = TypeVar("T")
State = dict[str, Any]


class CommitWriter(dcp.FileSystemWriter):
    """DCP's writer, made durable: every rank syncs and sums what it wrote, rank 0 commits when all
    have written."""

    def __init__(self, root: Path, step: int, finish: Callable[[dict[str, dict[str, int]]], None]):
        # One thread: with more, DCP 2.13 swallows a write error and saves metadata of tensors that
        # are not there.
        super().__init__(commit.partial_of(root, step), thread_count=1, sync_files=False)
        self.partial = commit.partial_of(root, step)
        self.commit = finish

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # On rank 0, after all ranks have planned and before one writes: an earlier try's files must
        # not mix with ours.
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        results = super().write_data(plan, planner)
        sums = {}
        for name in sorted({result.storage_data.relative_path for result in results.value()}):
            commit.fsync(self.partial / name)
            sums[name] = commit.checksum(self.partial / name)
        # Also when this rank wrote nothing: rank 0 waits for one list from every rank.
        commit.write_atomic(self.partial / f"{plan.storage_data.prefix}sums.json", json.dumps(sums))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when every rank has written: check that nothing is missing, then commit."""
        super().finish(metadata, results)
        lost = metadata.state_dict_metadata.keys() - {i.fqn for i in metadata.storage_data}
        if lost:
            raise OSError(f"{len(lost)} tensors were not written, such as {min(lost)}")
        files = {}
        for rank in range(len(results)):
            sums = self.partial / f"__{rank}_sums.json"
            files.update(json.loads(sums.read_text()))
            sums.unlink()
        commit.fsync(self.partial / ".metadata")
        files[".metadata"] = commit.checksum(self.partial / ".metadata")
        self.commit(files)


# Every global that the pickle of DCP's metadata may name. Nothing else is looked up, so nothing
# else can run.
METADATA_GLOBALS = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in ("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata", "TensorStorageMetadata",
                 "TensorProperties", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING")
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in METADATA_GLOBALS or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")


class TensorReader(dcp.FileSystemReader):
    """DCP's reader for checkpoints that hold tensors only: it never runs code from the files."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata):
                raise ValueError(f"{name} is not a tensor")
        return metadata  # type: ignore[no-any-return]

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Shapes and dtypes by name."""
        return dict(self.read_metadata().state_dict_metadata)  # type: ignore[arg-type]


class Checkpointer:
    """Saves and loads one run. All ranks call the same methods in the same order.

    Its collectives run on a gloo group of their own: a save in the background must not meet the
    training's.
    """

    def __init__(
        self,
        cfg: CheckpointConfig,
        root: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        contents: tuple[dict[str, str], dict[str, Any]],
        log: Callable[[str], None],
    ) -> None:
        """`contents`: texts that go into each checkpoint, by file name, and facts for its manifest;
        those under "fixed" (sections of values) must be the same when it is loaded."""
        self.cfg, self.root, self.optimizer, self.log = cfg, root, optimizer, log
        self.parameters = parameter_names(model)
        self.files, self.about = contents
        # A slow file system makes ranks wait for each other longer than a step ever may.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(hours=1))
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        on_gpu = next(iter(self.parameters.values())).is_cuda
        self.stager = DefaultStager(StagingOptions(on_gpu, False, False, on_gpu))
        self.saved_step = -1  # newest step that is durable
        self.failed_saves = 0  # in a row
        self.seconds: float | None = None  # that the newest save took until it was durable
        self._pending: tuple[int, float, futures.Future[Any]] | None = None

    # --- saving ---

    def save(self, step: int, position: dict[str, Any]) -> None:
        """Start to save after `step` steps, or do it, when async_save is off. `position` goes into
        the manifest.

        A step that is saved, or being saved, is not saved again. A failed save is logged and
        counted; the run goes on, and `latest` stays what it was.
        """
        if step == self.saved_step or (self._pending and self._pending[0] == step):
            return
        self.wait()
        writer = CommitWriter(self.root, step, lambda sums: self._commit(step, sums, position))
        began = time.monotonic()
        if self.cfg.async_save:
            future = dcp.async_save(
                self._state(),
                storage_writer=writer,
                process_group=self.group,
                async_stager=self.stager,
            )
            assert isinstance(future, futures.Future)
        else:
            future = futures.Future()
            try:
                future.set_result(
                    dcp.save(self._state(), storage_writer=writer, process_group=self.group)
                )
            except dcp.CheckpointException as error:
                future.set_exception(error)
        self._pending = (step, began, future)
        self.poll()

    def poll(self) -> None:
        """See whether the save in flight has ended; costs nothing. Call it every step."""
        if self._pending is None or not self._pending[2].done():
            return
        step, began, future = self._pending
        self._pending = None
        error = future.exception()
        if error is None:
            self.saved_step, self.failed_saves = step, 0
            self.seconds = time.monotonic() - began
            self.log(f"checkpoint of step {step} is durable after {self.seconds:.1f} s")
        else:
            self.failed_saves += 1
            self.log(
                f"WARNING: the checkpoint of step {step} failed: {_reason(error)}; the one before stays"
            )

    def wait(self, seconds: float | None = None) -> None:
        """Until the save in flight is durable or has failed, at most so long; see `saved_step`."""
        if self._pending is not None:
            with contextlib.suppress(futures.TimeoutError):
                self._pending[2].exception(seconds)
            self.poll()

    def close(self) -> None:
        self.wait()
        self.stager.close()

    def _commit(self, step: int, sums: dict[str, dict[str, int]], position: dict[str, Any]) -> None:
        partial = commit.partial_of(self.root, step)
        for name, text in self.files.items():
            commit.write_atomic(partial / name, text)
            sums[name] = commit.checksum(partial / name)
        facts = {
            "world_size": self.world_size,
            "torch": torch.__version__,
            **position,
            **self.about,
        }
        commit.commit(self.root, step, sums, facts)
        with contextlib.suppress(OSError):  # what cannot be deleted is no reason to fail
            commit.prune(self.root, self.cfg.keep_last_n, self.cfg.keep_every)

    def _state(self) -> State:
        state: State = {f"model.{name}": p.detach() for name, p in self.parameters.items()}
        for name, p in self.parameters.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                state[f"optim.{name}.{key}"] = value
        return state | self._rng()

    def _rng(self) -> State:
        state = {f"rng.{self.rank}.cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            state[f"rng.{self.rank}.cuda"] = torch.cuda.get_rng_state()
        return state

    # --- loading ---

    def load(self) -> dict[str, Any] | None:
        """Load the best checkpoint there is; returns its manifest, None when there is none.

        Rank 0 chooses, all ranks check their part of the files, and a checkpoint that does not hold
        is set aside for the next older one. Raises ConfigError when the model has another shape,
        RuntimeError when there were checkpoints and none could be loaded.
        """
        tried = []
        if self.rank == 0 and (left := commit.clean(self.root)):
            self.log(f"removed what an earlier attempt left: {', '.join(left)}")
        while (path := self._choose()) is not None:
            with commit.reading(path):
                wrong = self._try_load(path)
            if wrong is None:
                manifest = commit.read_manifest(path)
                self.saved_step = int(manifest["step"])
                if self.rank == 0 and commit.latest(self.root) != path.resolve():
                    commit.point_latest(self.root, path.name)
                return manifest
            tried.append(f"{path.name}: {wrong}")
            if self.rank == 0:
                aside = commit.set_aside(path)
                self.log(f"WARNING: {path.name} cannot be used ({wrong}); it is now {aside.name}")
            dist.barrier(self.group)
        if tried:
            raise RuntimeError(
                f"no checkpoint in {self.root} could be loaded; they were set aside as *.corrupt:\n  "
                + "\n  ".join(tried)
                + "\nrepair one and rename it back, or start over with another run.dir"
            )
        return None

    def _choose(self) -> Path | None:
        choice: list[Path | None] = [None]
        if self.rank == 0:
            choice = [*commit.complete(self.root), None][:1]
        dist.broadcast_object_list(choice, src=0, group=self.group)
        return choice[0]

    def _try_load(self, path: Path) -> str | None:
        """None, or why this checkpoint does not hold; the same on all ranks."""
        stored, wrong = self._agree(lambda: self._check(path))
        if stored is None or wrong:
            return wrong
        return self._agree(lambda: self._read(path, stored))[1]

    def _agree(self, act: Callable[[], T]) -> tuple[T | None, str | None]:
        """Do it on every rank: its result here, and the first complaint of any. A ConfigError is
        raised on all."""
        result = complaint = None
        try:
            result = act()
        except Exception as error:
            complaint = (isinstance(error, ConfigError), _reason(error))
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, complaint, self.group)
        is_config, wrong = next((entry for entry in everyone if entry), (False, None))
        if is_config:
            raise ConfigError([str(wrong)])
        return result, wrong

    def _check(self, path: Path) -> dict[str, TensorStorageMetadata]:
        """Prove this rank's part of the files and the shape of the model; returns what is
        stored."""
        manifest = commit.read_manifest(path)
        mine = sorted(manifest["files"])[self.rank :: self.world_size]
        wrong = commit.verify(path, {name: manifest["files"][name] for name in mine})
        if wrong:
            raise ValueError("; ".join(wrong))
        differ = [
            f"{section}.{key} is {manifest['fixed'].get(section, {}).get(key)} there, {value} here"
            for section, values in self.about["fixed"].items()
            for key, value in values.items()
            if manifest["fixed"].get(section, {}).get(key) != value
        ]
        if differ:
            raise ConfigError([
                f"{path} does not fit this run: {'; '.join(differ)}. Set it as there, or give this run "
                "a directory of its own: --run.dir=runs/NAME"
            ])  # fmt: skip
        return TensorReader(path).tensors()

    def _read(self, path: Path, stored: dict[str, TensorStorageMetadata]) -> None:
        self.optimizer.state.clear()
        state: State = {f"model.{name}": p.detach() for name, p in self.parameters.items()}
        for name, p in self.parameters.items():
            prefix = f"optim.{name}."
            keys = [key for key in stored if key.startswith(prefix)]
            # The optimizer makes its state at its first step; here it is made in the stored shapes.
            slots = self.optimizer.state[p] if keys else {}
            for key in keys:
                as_parameter = stored[key].size == p.shape
                slots[key[len(prefix) :]] = state[key] = (
                    torch.zeros_like(p, dtype=stored[key].properties.dtype, requires_grad=False)
                    if as_parameter
                    else torch.zeros(
                        stored[key].size, dtype=stored[key].properties.dtype, device=p.device
                    )
                )
        state |= {key: value for key, value in self._rng().items() if key in stored}
        dcp.load(state, storage_reader=TensorReader(path), process_group=self.group)
        if f"rng.{self.rank}.cpu" in state:
            torch.set_rng_state(state[f"rng.{self.rank}.cpu"])
        if f"rng.{self.rank}.cuda" in state:
            torch.cuda.set_rng_state(state[f"rng.{self.rank}.cuda"])


def _reason(error: BaseException) -> str:
    """One line: DCP wraps the failures of all ranks into one exception."""
    if isinstance(error, dcp.CheckpointException):
        rank, (cause, *_) = next(iter(error.failures.items()))
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}" if not isinstance(error, ConfigError) else str(error)
