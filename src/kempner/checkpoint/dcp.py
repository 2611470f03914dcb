"""What is in a checkpoint and how it gets there: torch's distributed checkpoint (DCP) under our
commit protocol.

The state is a flat dict of tensors: model.NAME, optim.NAME.KEY, rng.RANK.KIND. Only tensors: what
is no tensor stands in the manifest as JSON, so that loading never runs code from a file. DTensors
carry their own sharding; any other mesh reads what it needs.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
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
from torch.distributed.checkpoint.utils import _DistWrapper

from kempner.checkpoint import commit
from kempner.checkpoint.config import CheckpointConfig
from kempner.checkpoint.writer import Image, file_of, geometry_of, make_plan, write_file
from kempner.config.option import ConfigError
from kempner.parallel.build import parameter_names
from kempner.slurm import short_window

T = TypeVar("T")
State = dict[str, Any]


# Every global that the pickle of DCP's metadata may name. Nothing else is looked up, so nothing
# else can run.
METADATA_GLOBALS = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in ("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata",
                 "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
                 "_MEM_FORMAT_ENCODING")
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
        self._ranks = _DistWrapper(self.group, use_dist=True, coordinator_rank=0)
        self._background = futures.ThreadPoolExecutor(1, "checkpoint")
        self._geometry: list[Any] | None = None  # what the plan and the image are made for
        self._image: Image | None = None
        self._metadata = b""
        self.saved_step = -1  # newest step that is durable
        self.failed_saves = 0  # in a row
        self._warned_of = 0.0  # seconds of a save that the signal window is too short for
        self.seconds: float | None = None  # that the newest save took until it was durable
        self._pending: tuple[int, float, futures.Future[float]] | None = None

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
        began = time.monotonic()
        problem = self._stage()
        position = copy.deepcopy(position)  # the caller goes on counting in his own
        future = self._background.submit(self._write, step, position, problem)
        if not self.cfg.async_save:
            futures.wait([future])
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
            self.seconds = future.result() - began
            self.log(f"checkpoint of step {step} is durable after {self.seconds:.1f} s")
            if self.seconds > 1.2 * self._warned_of and (
                warning := short_window(self.seconds, 0.0)
            ):
                self._warned_of = self.seconds
                self.log(warning)
        else:
            self.failed_saves += 1
            self.log(
                f"WARNING: the checkpoint of step {step} failed: {_reason(error)}; "
                "the one before stays"
            )

    def wait(self, seconds: float | None = None) -> None:
        """Until the save in flight is durable or has failed, at most so long; see `saved_step`."""
        if self._pending is not None:
            with contextlib.suppress(futures.TimeoutError):
                self._pending[2].exception(seconds)
            self.poll()

    def close(self) -> None:
        self.wait()
        self._background.shutdown()
        self._forget()

    def _forget(self) -> None:
        if self._image is not None:
            self._image.close()
        self._geometry = self._image = None

    def _stage(self) -> BaseException | None:
        """Copy the state as it is now. An error is returned: all ranks hear of it in _write."""
        state = self._state()
        geometry = geometry_of(state)
        changed = torch.tensor(geometry != self._geometry, dtype=torch.int32)
        dist.all_reduce(changed, dist.ReduceOp.MAX, self.group)
        try:
            if changed.item():
                self._forget()
                items, self._metadata = make_plan(state, self._ranks)
                self._image = Image(items, pinned=next(iter(self.parameters.values())).is_cuda)
                self._geometry = geometry
            assert self._image is not None
            self._image.stage(state)
        except (Exception, dcp.CheckpointException) as error:  # the second is no Exception
            return error
        return None

    def _write(self, step: int, position: dict[str, Any], problem: BaseException | None) -> float:
        """Make the staged state the newest checkpoint; returns the time when it was durable.

        Runs on a thread, with few and long operations: a thread that often wants the interpreter
        slows the steps. Raises CheckpointException on all ranks when one has failed.
        """
        partial, image, name = commit.partial_of(self.root, step), self._image, file_of(self.rank)

        def begin() -> None:  # an earlier try's files must not mix with ours, nor fill the disk
            commit.clean(self.root)
            partial.mkdir(parents=True)

        def write() -> dict[str, dict[str, int]]:
            if problem is not None:
                raise problem
            assert image is not None
            return {name: write_file(partial / name, image.bytes)} if image.bytes else {}

        def finish(sums: list[dict[str, dict[str, int]]]) -> None:
            self._commit(step, {name: of for rank in sums for name, of in rank.items()}, position)

        self._ranks.broadcast("begin", begin)
        self._ranks.all_reduce("write", write, finish)
        durable = time.monotonic()
        if self.rank == 0:
            with contextlib.suppress(OSError):  # what cannot be deleted is no reason to fail
                commit.prune(self.root, self.cfg.keep_last_n, self.cfg.keep_every)
        return durable

    def _commit(self, step: int, sums: dict[str, dict[str, int]], position: dict[str, Any]) -> None:
        partial = commit.partial_of(self.root, step)
        (partial / ".metadata").write_bytes(self._metadata)
        commit.fsync(partial / ".metadata")
        sums[".metadata"] = commit.checksum(partial / ".metadata")
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

    def _state(self) -> State:
        state: State = {f"model.{name}": p for name, p in self.parameters.items()}
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
        RuntimeError when there are checkpoints and none can be loaded: also at the next start,
        which must not begin from nothing because the first one has set them aside.
        """
        self.wait()  # a run that goes back: what is in flight is the newest, and no leftover
        tried = []
        if self.rank == 0 and (left := commit.clean(self.root)):
            self.log(f"removed what an earlier attempt left: {', '.join(left)}")
        while (choice := self._choose())[0] is not None:
            path = choice[0]
            with commit.reading(path):
                wrong = self._try_load(path)
            if wrong is None:
                manifest = commit.read_manifest(path)
                self.saved_step = int(manifest["step"])
                if self.rank == 0 and commit.latest(self.root) != path:
                    commit.point_latest(self.root, path.name)
                return manifest
            tried.append(f"{path.name}: {wrong}")
            if self.rank == 0:
                aside = commit.set_aside(path)
                self.log(f"WARNING: {path.name} cannot be used ({wrong}); it is now {aside.name}")
            dist.barrier(self.group)
        if there := choice[1]:
            raise RuntimeError(
                f"no checkpoint in {self.root} can be loaded; set aside are\n  "
                + "\n  ".join(tried or there)
                + "\nrepair one and rename it back, or start over with another run.dir"
            )
        return None

    def _choose(self) -> tuple[Path | None, list[str]]:
        """The best checkpoint that is left, and the names of those that are set aside."""
        choice: list[tuple[Path | None, list[str]]] = [(None, [])]
        if self.rank == 0:
            aside = sorted(path.name for path in self.root.glob("step_*.corrupt*"))
            choice = [(next(iter(commit.complete(self.root)), None), aside)]
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
        except (Exception, dcp.CheckpointException) as error:  # the second is no Exception
            complaint = (isinstance(error, ConfigError), _reason(error))
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, complaint, self.group)
        is_config, wrong = next((entry for entry in everyone if entry), (False, None))
        if is_config:
            raise ConfigError(str(wrong))
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
            raise ConfigError(
                f"{path} does not fit this run: {'; '.join(differ)}. Set it as there, or give this "
                "run a directory of its own: --run.dir=runs/NAME"
            )
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
        return f"rank {rank}: {_reason(cause)}"
    return f"{type(error).__name__}: {error}" if not isinstance(error, ConfigError) else str(error)
