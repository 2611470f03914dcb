"""What a save costs the training: ours, torch's, and the least that it can cost.

    python benchmarks/async_save.py        60 M parameters, 718 MB, one process, some minutes
    python benchmarks/async_save.py --rounds 2 --layers 2
    python benchmarks/async_save.py --only nothing,limit,kempner --throttle 100

In each round every kind of save is made once, after quiet steps that say what a step costs then.
Kinds:

    nothing        no save, the same steps: the noise of this machine
    limit          every tensor copied into one kept buffer; a thread writes it past the page cache
    kempner        ours: also summed, committed, and the one before removed
    kempner sync   the same, waited for
    async thread   dcp.async_save as it comes
    async process  dcp.async_save in a process of its own
    dcp.save       the synchronous one

Columns: how long the loop stands still (stall); the seconds from there until the data is durable
(drain); the time of the steps that begin meanwhile, the mean and the longest, over that of quiet
steps; and stall and that slowness together. Medians over the rounds, [lowest, highest] behind.
--throttle makes the disk of limit and kempner slow: each write of theirs sleeps as long as such a
disk would take, and holds no lock of Python's meanwhile, as a write does not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shlex
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from kempner.checkpoint.checkpointer import Checkpointer
from kempner.checkpoint.config import CheckpointConfig
from kempner.checkpoint.format.plan import local_part
from kempner.checkpoint.format.writer import allocate_pages
from kempner.checkpoint.state import run_state
from kempner.model.config import ModelConfig
from kempner.optim.build import build_optimizer
from kempner.optim.config import OptimizerConfig
from kempner.parallel.build import build_model
from kempner.parallel.config import DistributedConfig
from kempner.parallel.layout import build_layout
from kempner.train.sections import TrainConfig

QUIET = 4  # steps before each save


class Job:
    """A model, its optimizer, and a real step on random tokens."""

    def __init__(self, layers: int, batch: int) -> None:
        shape = ModelConfig(
            vocab_size=8192, dim=512, n_layers=layers, n_heads=8, ffn_dim=1536, max_seq_len=128
        )
        axes = build_layout(DistributedConfig(), dist.get_world_size(), 1, "cpu")
        self.model = build_model(shape, axes, TrainConfig(), DistributedConfig())
        self.optimizer = build_optimizer(self.model, OptimizerConfig())
        self.tokens = torch.randint(shape.vocab_size, (batch, 129))

    def step(self) -> float:
        """Returns its seconds."""
        began = time.perf_counter()
        self.model(self.tokens[:, :-1], self.tokens[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began

    def state(self) -> dict[str, torch.Tensor]:
        state = {name: p.detach() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            state |= {f"{name}.{key}": value for key, value in self.optimizer.state[p].items()}
        return state


Save = Callable[[Path], Future[float]]  # returns when steps may continue; the future: durable at


def timed(future: Future[object]) -> Future[float]:
    """The time at which a future ends, as a future."""
    at: Future[float] = Future()

    def ended(future: Future[object]) -> None:
        error = future.exception()
        at.set_exception(error) if error else at.set_result(time.perf_counter())

    future.add_done_callback(ended)
    return at


def ended_now() -> Future[float]:
    future: Future[float] = Future()
    future.set_result(time.perf_counter())
    return future


def limit(job: Job) -> Save:
    """The least: copy, write, sync. Nothing can read the file."""
    tensors = [local_part(tensor) for tensor in job.state().values()]
    buffer = torch.frombuffer(allocate_pages(sum(t.nbytes for t in tensors)), dtype=torch.uint8)
    targets, at = [], 0
    # The widest first: each then begins at a multiple of its own width, as view() wants.
    for tensor in sorted(tensors, key=lambda t: -t.itemsize):
        targets.append(buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        at += tensor.nbytes
    sources = sorted(tensors, key=lambda t: -t.itemsize)

    def write(path: Path, done: Future[float]) -> None:
        path.mkdir()
        # O_DIRECT takes whole blocks from aligned memory: allocate_pages() gives both.
        fd = os.open(path / "data", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        data, at = buffer.numpy().data, 0
        while at < len(data):
            at += os.pwrite(fd, data[at : at + (1 << 26)], at)
        os.fsync(fd)
        os.close(fd)
        done.set_result(time.perf_counter())

    def save(path: Path) -> Future[float]:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
        done: Future[float] = Future()
        threading.Thread(target=write, args=(path, done)).start()
        return done

    return save


def ours(job: Job, root: Path, wait: bool) -> Save:
    contents: tuple[dict[str, str], dict[str, object]] = ({"config.toml": ""}, {"fixed": {}})
    cfg = CheckpointConfig(async_save=not wait, keep_last_n=1)
    state = run_state(job.model, job.optimizer)
    checkpointer = Checkpointer(cfg, root, state, contents, lambda line: None)
    steps = iter(range(1, 1000))

    def save(path: Path) -> Future[float]:
        checkpointer.save(next(steps), {})
        if checkpointer._pending is None:  # it was waited for
            assert checkpointer.failed_saves == 0
            return ended_now()
        return timed(checkpointer._pending[2])  # type: ignore[arg-type]

    return save


def plain(job: Job, kind: AsyncCheckpointerType, group: dist.ProcessGroup) -> Save:
    def save(path: Path) -> Future[float]:
        future = dcp.async_save(
            job.state(), checkpoint_id=path, async_checkpointer_type=kind, process_group=group
        )
        assert isinstance(future, Future)
        return timed(future)

    return save


def plain_sync(job: Job, group: dist.ProcessGroup) -> Save:
    def save(path: Path) -> Future[float]:
        dcp.save(job.state(), checkpoint_id=path, process_group=group)
        return ended_now()

    return save


class Cost(NamedTuple):
    """Seconds; `slower` and `slowest` are factors."""

    still: float
    drain: float
    slower: float
    slowest: float
    whole: float


def measure(job: Job, save: Save, path: Path) -> Cost:
    """One save after quiet steps."""
    quiet = statistics.median(job.step() for _ in range(QUIET))
    began = time.perf_counter()
    durable = save(path)
    still = time.perf_counter() - began
    flight = [job.step()]
    while not durable.done():
        flight.append(job.step())
    ended = durable.result() - began
    flight.append(job.step())  # what the save has left behind, such as cold caches
    whole = still + sum(flight) - len(flight) * quiet
    slower, slowest = statistics.mean(flight[:-1]) / quiet, max(flight[:-1]) / quiet
    return Cost(still, max(0.0, ended - still), slower, slowest, whole)


def throttle(rate: float) -> None:
    """Let os.pwrite, which limit and kempner write with, take as long as `rate` bytes/s does."""
    real = os.pwrite

    def slow(fd: int, data: memoryview, at: int) -> int:
        began = time.perf_counter()
        count = real(fd, data, at)
        time.sleep(max(0.0, count / rate - (time.perf_counter() - began)))
        return count

    os.pwrite = slow


def table(costs: dict[str, list[Cost]]) -> Iterator[str]:
    heads = ("stall, ms", "drain, s", "steps slower", "slowest step", "whole cost, ms")
    yield f"{'':14} " + " ".join(f"{head:>22}" for head in heads)
    for kind, rounds in costs.items():
        cells = []
        for values, scale, digits in zip(
            zip(*rounds, strict=True), (1000, 1, 1, 1, 1000), (0, 2, 2, 2, 0), strict=True
        ):
            low, high = min(values) * scale, max(values) * scale
            middle = statistics.median(values) * scale
            cells.append(f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]")
        yield f"{kind:14} " + " ".join(f"{cell:>22}" for cell in cells)


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=15, help="3.4 M parameters each")
    parser.add_argument("--batch", type=int, default=2, help="sequences of 128 tokens a step")
    parser.add_argument("--only", default="", help="kinds, comma-separated")
    parser.add_argument("--dir", default=".", help="directory of the file system to write to")
    parser.add_argument("--throttle", type=float, default=0.0, help="MB/s of the disk; 0: no limit")
    options = parser.parse_args()
    if options.throttle:
        throttle(1e6 * options.throttle)
    warnings.filterwarnings("ignore")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the process of dcp.async_save wants one
    os.environ.setdefault("MASTER_PORT", "0")
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    job = Job(options.layers, options.batch)
    steps = [job.step() for _ in range(3)]
    size = sum(local_part(tensor).nbytes for tensor in job.state().values())
    print(f"$ python benchmarks/async_save.py {shlex.join(sys.argv[1:])}")
    print(
        f"{time.strftime('%Y-%m-%d')}, {processor()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, "
        f"{sum(p.numel() for p in job.model.parameters()) / 1e6:.0f} M parameters, "
        f"{size / 1e6:.0f} MB, step {min(steps):.2f} s",
        flush=True,
    )
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="async-save-") as text:
        root, group = Path(text), dist.new_group(backend="gloo")
        saves: dict[str, Save] = {
            "nothing": lambda path: ended_now(),
            "limit": limit(job),
            "kempner": ours(job, root / "async", wait=False),
            "kempner sync": ours(job, root / "sync", wait=True),
            "async thread": plain(job, AsyncCheckpointerType.THREAD, group),
            "async process": plain(job, AsyncCheckpointerType.PROCESS, group),
            "dcp.save": plain_sync(job, group),
        }
        kinds = options.only.split(",") if options.only else list(saves)
        costs: dict[str, list[Cost]] = {kind: [] for kind in kinds}
        for number in range(options.rounds + 1):
            for kind in kinds:
                cost = measure(job, saves[kind], root / "plain")
                shutil.rmtree(root / "plain", ignore_errors=True)
                # The first round, in which each kind allocates, does not count.
                if number:
                    costs[kind].append(cost)
                elif kind == "kempner":
                    print(f"our first save, which plans and allocates memory: {cost.still:.2f} s")
        print("\n".join(table(costs)), flush=True)
    os._exit(0)  # the process of dcp.async_save would be waited for


if __name__ == "__main__":
    main()
