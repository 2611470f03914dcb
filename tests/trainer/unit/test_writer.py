"""The saving of large tensors: that any DCP reader reads it, that the bytes are those of the moment
of the save, and that a disk that does not take them is answered on all ranks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import subprocess
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from kempner.checkpoint import checkpointer as checkpoints
from kempner.checkpoint import history
from kempner.checkpoint.checkpointer import Checkpointer
from kempner.checkpoint.config import CheckpointConfig
from kempner.checkpoint.format import writer
from kempner.checkpoint.format.crc import FAR, NEAR, crc32
from kempner.checkpoint.format.metadata import write_metadata
from kempner.checkpoint.format.plan import make_table
from kempner.checkpoint.format.reader import DataFile, read_tensors, verify_checkpoint
from kempner.checkpoint.format.writer import (
    CRC_BLOCK_BYTES,
    FILE_MAGIC,
    PAGE,
    Image,
    plan_file,
    torch_save_frame,
    write_file,
)
from kempner.checkpoint.ranks import PeerFailed, PeersLost
from kempner.checkpoint.state import run_state
from kempner.jobs.system.files import name_of_step
from kempner.parallel.build import parameter_names
from kempner.train.progress import Progress
from kempner.train.resilience.requests import Verdict, final_verdict

pytestmark = pytest.mark.usefixtures("one_process")


class Holder(nn.Module):
    """Parameters of given values: whatever a checkpoint may have to hold."""

    def __init__(self, **values: Tensor) -> None:
        super().__init__()
        for name, value in values.items():
            setattr(self, name, nn.Parameter(value, requires_grad=value.is_floating_point()))


def checkpointer(root: Path, model: nn.Module, **cfg: Any) -> tuple[Checkpointer, list[str]]:
    log: list[str] = []
    optimizer = torch.optim.AdamW(model.parameters())
    state = run_state(model, optimizer)
    state["model"].parameters = parameter_names(model)  # type: ignore[attr-defined]  # integers too
    made = Checkpointer(CheckpointConfig(**cfg), root, state, ({}, {"fixed": {}}), log.append)
    return made, log


def read_plainly(path: Path, no_dist: bool = True) -> dict[str, Tensor]:
    """With torch's own reader, into fresh tensors."""
    reader = dcp.FileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata
    state = {}
    for name, entry in stored.items():
        assert isinstance(entry, TensorStorageMetadata)
        state[name] = torch.zeros(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        dcp.load(state, storage_reader=reader, no_dist=no_dist)
    return state


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# --- The sum --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [0, 1, FAR, FAR + 4 * NEAR - 1, FAR + 4 * NEAR, FAR + 11 * NEAR + 5]
)
@pytest.mark.parametrize("value", [0, 1, 0xFFFFFFFF, 0xDEADBEEF])
def test_the_sum_is_that_of_zlib(words: int, value: int) -> None:
    data = np.random.default_rng(words).integers(0, 256, 8 * words + 3, dtype=np.uint8).data
    assert crc32(data, value) == zlib.crc32(data, value)


# --- The bytes ------------------------------------------------------------------------------------

TENSORS = {
    "matrix": torch.randn(300, 500),
    "scalar": torch.tensor(3.25),
    "empty": torch.zeros(0, 7),
    "half_precision": torch.randn(33, 3).bfloat16(),
    "long": torch.arange(-5, 100),
    "bytes": torch.arange(251, dtype=torch.uint8),
    "flags": torch.arange(9) % 2 == 0,
    "columns": torch.randn(40, 30).t(),  # not contiguous
    "odd": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_the_frame_is_that_of_torch_save(name: str) -> None:
    tensor = TENSORS[name]
    before, after = torch_save_frame(tensor.shape, tensor.dtype)
    again = torch.load(io.BytesIO(before + bits(tensor) + after), weights_only=True)
    assert again.dtype == tensor.dtype and again.shape == tensor.shape
    assert bits(again) == bits(tensor)


@pytest.mark.parametrize("async_save", [True, False], ids=["async", "sync"])
def test_torch_reads_it_bit_for_bit(tmp_path: Path, async_save: bool) -> None:
    saver, _ = checkpointer(tmp_path, Holder(**TENSORS), async_save=async_save)
    saver.save(1, {})
    saver.close()
    latest = tmp_path / "latest"
    readings = [read_plainly(latest), converted(latest), read_tensors(latest)]
    before = (latest / ".metadata").read_bytes()
    (latest / ".metadata").unlink()  # as in a checkpoint of very many ranks
    write_metadata(latest)
    assert len((latest / ".metadata").read_bytes()) == len(before)
    for read in (*readings, read_plainly(latest)):
        for name, tensor in TENSORS.items():
            assert read[f"model.{name}"].dtype == tensor.dtype
            assert bits(read[f"model.{name}"]) == bits(tensor), name
    assert (latest / DATA).stat().st_size % PAGE == 0 and verify_checkpoint(latest) == []


def converted(path: Path) -> dict[str, Tensor]:
    """By torch's own tool, which has a planner of its own."""
    dcp_to_torch_save(path, path.parent / "one.pt")
    return torch.load(path.parent / "one.pt", weights_only=True)  # type: ignore[no-any-return]


def test_a_flipped_byte_anywhere_is_found(tmp_path: Path) -> None:
    """In each block of the tensors, in the index and in the footer."""
    saver, _ = checkpointer(tmp_path, Holder(weight=torch.randn(5 * CRC_BLOCK_BYTES // 8)))
    saver.save(1, {})
    saver.close()
    file = tmp_path / "latest" / DATA
    content = file.read_bytes()
    with DataFile(tmp_path / "latest", history.read_manifest(tmp_path / "latest"), 0) as data:
        end = data.index["bytes"]
    assert end > 2 * CRC_BLOCK_BYTES
    for place in (5000, CRC_BLOCK_BYTES + 7, 2 * CRC_BLOCK_BYTES + 7, end + 9, len(content) - 20):
        with open(file, "r+b") as damaged:
            damaged.seek(place)
            damaged.write(bytes([content[place] ^ 1]))
        assert len(verify_checkpoint(tmp_path / "latest")) == 1, place
        file.write_bytes(content)
    assert verify_checkpoint(tmp_path / "latest") == []


# --- The moment -----------------------------------------------------------------------------------


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Files are not written until the event is set."""
    go = threading.Event()

    def late(*args: Any) -> None:
        assert go.wait(60)
        write_file(*args)

    monkeypatch.setattr(checkpoints, "write_file", late)
    yield go
    go.set()


def test_what_is_written_late_is_the_state_of_the_save(
    tmp_path: Path, held: threading.Event
) -> None:
    """And the next save, which would write into the same memory, waits for it."""
    model = Holder(weight=torch.full((1000,), 1.0))
    saver, _ = checkpointer(tmp_path, model, keep_last_n=2)
    saver.save(1, {})
    with torch.no_grad():
        model.weight.fill_(2.0)
    second = threading.Thread(target=saver.save, args=(2, {}))
    second.start()
    second.join(0.5)
    assert second.is_alive() and not list(tmp_path.glob("step_????????"))
    held.set()
    second.join()
    saver.close()
    for step in (1, 2):
        weight = read_plainly(tmp_path / name_of_step(step))["model.weight"]
        assert weight.unique().tolist() == [float(step)]


def test_the_plan_is_made_before_the_first_save_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images: list[Image] = []
    monkeypatch.setattr(
        checkpoints, "Image", lambda *given: images.append(Image(*given)) or images[-1]
    )
    model = Holder(weight=torch.ones(100, 10))
    saver, _ = checkpointer(tmp_path, model)
    optimizer = saver.providers["optim"].optimizer  # type: ignore[attr-defined]
    for step in range(4):
        if step == 2:  # the optimizer has made its state
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        saver.poll()
        assert saver._built is not None and saver._built.result()
        made = len(images)
        saver.save(step, {})
        saver.wait()
        assert (made, len(images)) == ((1, 1) if step < 2 else (1, 2) if step == 2 else (2, 2))
    saver.close()
    state = read_plainly(tmp_path / "latest")
    assert torch.equal(state["model.weight"], model.weight.detach())
    assert state["optim.weight.step"] == 1 and state["optim.weight.exp_avg"].all()


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Driver:
        def cudaHostRegister(self, *_: int) -> int:
            return 2  # cudaErrorMemoryAllocation

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    table = make_table({"weight": torch.arange(10.0)}, {}, world=1)
    log: list[str] = []
    image = Image(plan_file(table, 0), torch.device("cuda", 0), log.append)
    image.stage({"weight": torch.arange(10.0)})
    assert torch.equal(image.targets["weight"], torch.arange(10.0))
    assert "cannot be pinned (CUDA error 2" in log[0] and len(log) == 1
    image.close()


# --- Disks ----------------------------------------------------------------------------------------


def without_o_direct_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tmpfs was before Linux 6.6."""
    real = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)


def without_o_direct_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that takes the flag and then wants blocks that are larger than ours."""
    real = os.pwrite

    def refuse(fd: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse)


def with_short_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[: 3 * PAGE], at))


@pytest.mark.parametrize(
    "disk", [None, without_o_direct_flag, without_o_direct_writes, with_short_writes]
)
def test_a_file_is_whole_on_any_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Callable[..., None] | None
) -> None:
    size = 10 * PAGE
    memory = writer.allocate_pages(size)
    memory.write(os.urandom(size))
    if disk is not None:
        disk(monkeypatch)
    write_file(tmp_path / "file", [memoryview(memory)], {})
    monkeypatch.undo()
    content = (tmp_path / "file").read_bytes()
    assert content[:size] == memory[:] and content[size + PAGE - 32 :].startswith(FILE_MAGIC)


def test_another_error_of_a_disk_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(OSError, match=r"Input/output error: .*/file"):
        write_file(tmp_path / "file", [memoryview(bytes(PAGE))], {})
    monkeypatch.undo()
    with pytest.raises(FileExistsError):  # somebody else's file is not written into
        write_file(tmp_path / "file", [memoryview(bytes(PAGE))], {})


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    model = Holder(weight=torch.full((1 << 19,), 1.0))  # 2 MB
    with small_disk(tmp_path / "disk", "5m"):
        saver, log = checkpointer(tmp_path / "disk", model, keep_last_n=1)
        saver.save(1, {})
        saver.wait()
        with open(tmp_path / "disk" / "other", "wb") as other:
            other.truncate(0)
            other.write(bytes(2 << 20))
        with torch.no_grad():
            model.weight.fill_(2.0)
        saver.save(2, {})
        saver.wait()
        assert "No space left on device" in log[-1] and "step 2 failed" in log[-1]
        assert saver.failed_saves == 1 and saver.saved_step == 1
        assert history.latest_checkpoint(tmp_path / "disk") == tmp_path / "disk" / name_of_step(1)
        assert read_plainly(tmp_path / "disk" / "latest")["model.weight"].eq(1.0).all()
        (tmp_path / "disk" / "other").unlink()
        saver.save(3, {})  # the memory and the plan are still good
        saver.close()
        assert saver.saved_step == 3 and saver.failed_saves == 0
        assert read_plainly(tmp_path / "disk" / "latest")["model.weight"].eq(2.0).all()


# --- Several ranks --------------------------------------------------------------------------------

DATA = "ranks-000/__0_0.distcp"
ROWS = {"even": 6, "uneven": 4}  # over 3 ranks, 4 rows are 2, 2 and none


def of_three(rank: int, root: Path) -> None:
    """One of three ranks: shards, replicas, and a disk that breaks under rank 1 alone."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(root / "store"), 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    mesh = init_device_mesh("cpu", (3,))
    values: dict[str, Tensor] = {
        name: distribute_tensor(torch.arange(rows * 5.0).view(rows, 5), mesh, [Shard(0)])
        for name, rows in ROWS.items()
    }
    model = Holder(**values, replica=torch.arange(100_000.0), small=torch.arange(7.0))
    saver, log = checkpointer(root / "checkpoints", model)
    saver.save(1, {})
    saver.wait()
    assert saver.saved_step == 1, log
    if rank == 1:
        real = os.pwrite
        os.pwrite = None  # type: ignore[assignment]
    saver.save(2, {})
    saver.wait()
    assert saver.saved_step == 1 and saver.failed_saves == 1, log
    assert "failed: rank 1: TypeError" in log[-1], log
    assert history.latest_checkpoint(root / "checkpoints") == root / "checkpoints" / name_of_step(1)
    if rank == 1:
        os.pwrite = real
    saver.save(3, {})
    saver.close()
    assert saver.saved_step == 3, log
    opened = files_that_a_load_opens(root / "checkpoints", model)
    assert opened <= {f"__{rank}_0.distcp", "__0_0.distcp"}, opened  # 0 wrote the large replica
    dist.destroy_process_group()


def files_that_a_load_opens(root: Path, model: nn.Module) -> set[str]:
    opened: set[str] = set()
    real = os.open

    def watch(path: Any, *more: Any, **named: Any) -> int:
        if str(path).endswith(".distcp"):
            opened.add(Path(path).name)
        return real(path, *more, **named)

    os.open = watch
    loader, _ = checkpointer(root, model)
    assert loader.load() is not None
    os.open = real
    return opened


def test_three_ranks_write_one_state_and_fail_together(tmp_path: Path) -> None:
    mp.spawn(of_three, (tmp_path,), nprocs=3)
    path = tmp_path / "checkpoints" / "latest"
    for state in (read_plainly(path), read_tensors(path)):
        for name, rows in ROWS.items():
            assert torch.equal(state[f"model.{name}"], torch.arange(rows * 5.0).view(rows, 5))
        assert torch.equal(state["model.replica"], torch.arange(100_000.0))
        assert torch.equal(state["model.small"], torch.arange(7.0))
    assert {f"rng.{rank}.cpu" for rank in range(3)} <= read_plainly(path).keys()
    files = {path.name: path.stat().st_size for path in path.glob("ranks-000/*.distcp")}
    assert sorted(files) == [f"__{rank}_0.distcp" for rank in range(3)]
    assert sum(files.values()) < 2 * 400_000  # the replica is there once


def saved_by_two(rank: int, root: Path) -> tuple[checkpoints.Checkpointer, list[str]]:
    """Join the group of two ranks, which save step 1; returns the checkpointer, and its log."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(root / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    saver, log = checkpointer(root / "checkpoints", Holder(weight=torch.arange(7.0)))
    saver.save(1, {})
    saver.wait()
    assert saver.saved_step == 1, log
    return saver, log


def of_two(rank: int, root: Path) -> None:
    """One of two ranks, of which rank 1 is killed while it writes the last checkpoint."""
    saver, _ = saved_by_two(rank, root)
    if rank == 1:
        checkpoints.write_file = lambda *_: os._exit(0)
    leave = Verdict(save=True, state="interrupted")
    with pytest.raises(PeersLost, match="the ranks have lost contact"):
        final_verdict(leave, Progress(step=2), saver, lambda: None)
    assert history.latest_checkpoint(root / "checkpoints") == root / "checkpoints" / name_of_step(1)
    with pytest.raises(PeersLost):  # gloo has closed the connections: this would be so for ever
        saver.ranks.on_all(lambda: None)


def test_a_rank_that_is_lost_in_the_last_save_is_no_failed_run(tmp_path: Path) -> None:
    """A run that has failed is never started again; one that has crashed is."""
    mp.spawn(of_two, (tmp_path,), nprocs=2)


def of_two_hosts(rank: int, root: Path) -> None:
    """One of two ranks, of which rank 1 has another disk where the checkpoints of rank 0 are."""
    saver, log = saved_by_two(rank, root)
    if rank == 1:
        real = saver.ranks.on_first

        def moved(act: Callable[[], Any]) -> Any:
            result = real(act)
            return (root / "disk" / "step_00000001", *result[1:]) if result else result

        saver.ranks.on_first = moved  # type: ignore[method-assign]
    error = FileNotFoundError if rank else PeerFailed
    with pytest.raises(error, match="is not visible from this host"):
        saver.load()
    dist.barrier()
    assert sorted(path.name for path in (root / "checkpoints").glob("s*")) == [name_of_step(1)], log


def test_a_host_that_does_not_see_a_checkpoint_does_not_set_it_aside(tmp_path: Path) -> None:
    mp.spawn(of_two_hosts, (tmp_path,), nprocs=2)
