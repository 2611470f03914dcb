"""What this kit itself costs as the number of ranks grows: at the start, in a step, in a save and
in a hang.

    python -m benchmarks.scale                                  the table, for 256 to 16,384 ranks
    python -m benchmarks.scale --before docs/pictures/scale-before.json \\
        --plot docs/pictures/scale.png

Needs no GPU and no second machine. Up to 1,024 clients, threads of this process, talk to one real
store, and up to 128 to each other by gloo. Checkpoints, the step's all-reduce and the data run as
one rank of as many as stated under a fake process group, with the 70B model on the meta device.
What was not run with so many ranks is extrapolated from the largest run, and marked ~.
`--json FILE` keeps the figures; `--quick` only shows that the program works.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Cut
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.scale_table import RANKS, Row, plot, read, row, table
from kempner.checkpoint.format import plan as checkpoint_layout
from kempner.checkpoint.format.reader import from_json
from kempner.checkpoint.format.writer import plan_file
from kempner.config import toml
from kempner.config.command_line import argument_parser
from kempner.data.formats.dataset import TokenDataset
from kempner.data.sidecar import SIDECAR, Shard, Sidecar
from kempner.jobs.ranks import rendezvous
from kempner.jobs.ranks.placement import World
from kempner.jobs.records.run_log import log_path
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder
from kempner.parallel.config import DistributedConfig
from kempner.parallel.layout import build_layout
from kempner.train.resilience.hanging import HANG_AT, HANG_ORDER
from kempner.train.resilience.inquiry import HANG_VERDICT, Inquiry
from kempner.train.resilience.requests import REQUEST_FLAGS
from kempner.train.resilience.suspects import Answer, Call, Seen
from kempner.train.resilience.watchdog import ANSWERS_PER_S
from kempner.train.step import reduce_step

ROOT = Path(__file__).resolve().parent.parent
PER_HOST = 8
SHARDS = 1000  # of a data set: 100 billion tokens


# --- Many clients of one real store ---


@contextlib.contextmanager
def clients(count: int) -> Iterator[list[dist.TCPStore]]:
    """Connections to one store; the first is that of its server."""
    limit = timedelta(seconds=600)
    server = dist.TCPStore("localhost", 0, None, True, limit, wait_for_workers=False)
    found = [server] * count

    def connect(i: int) -> None:
        found[i] = dist.TCPStore("localhost", server.port, None, False, limit)

    together([lambda i=i: connect(i) for i in range(1, count)])  # type: ignore[misc]
    yield found


def together(acts: Sequence[Callable[[], Any]]) -> float:
    """Run all at once, a thread each; seconds until the last has ended."""
    # One more than the acts: the clock starts when all threads are there.
    gate = threading.Barrier(len(acts) + 1)

    def run(act: Callable[[], Any]) -> None:
        gate.wait()
        act()

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    gate.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def check_in(ranks: int) -> float:
    with clients(ranks) as stores:
        return together([
            lambda r=r: rendezvous.await_ranks(stores[r], World(r, 0, ranks, "slurm"), 600.0)
            for r in range(ranks)
        ])  # fmt: skip


def inquiry_of(rank: int, ranks: int, store: dist.TCPStore) -> Inquiry:
    dog: Any = SimpleNamespace(
        rank=rank, world_size=ranks, store=store, patience=5.0 + ranks / ANSWERS_PER_S,
        step=1000, starting=False, is_patient=False, main=threading.get_ident(), age=9.0,
        beside=-1, process_beside="", say=lambda line: None,
    )  # fmt: skip
    return Inquiry(dog)


def question(ranks: int) -> float:
    """All ranks hang, and find out where the others are."""

    def ask(rank: int, store: dist.TCPStore, inquiry: Inquiry) -> None:
        answers = inquiry.ask("on node1234 after step 1000: in train.py:88 train > all_reduce")
        if rank == 0:
            assert len(answers) == ranks, f"{len(answers)} of {ranks} ranks answered in time"
            store.set(HANG_VERDICT, "")

    with clients(ranks) as stores:
        # Opened before: each rank has done so when its step was late.
        opened = [inquiry_of(rank, ranks, stores[rank]) for rank in range(ranks)]
        return together([
            lambda r=r: ask(r, stores[r], opened[r]) for r in range(ranks)  # type: ignore[misc]
        ])  # fmt: skip


def round_of_answers(ranks: int) -> float:
    """A step is late: each rank gives an answer and asks for orders, and rank 0 reads all."""
    place = "after step 1000 in train.py:88 train > distributed_c10d.py:3245 all_reduce"
    calls = tuple(Call(f"{group}", 812, "all_reduce", "[9] Double") for group in range(9))
    seen = Seen("S", 1.0, 2.0, 3.0, 4, "futex_wait")
    answer = Answer("1 1 x", 1, 1000, place, False, False, 812, calls, seen, 1, seen).write()

    def give(rank: int, store: dist.TCPStore) -> None:
        store.set(f"{HANG_AT}{rank}", answer)
        store.get(HANG_ORDER)

    with clients(ranks) as stores:
        stores[0].set(HANG_ORDER, "")
        seconds = together([lambda r=r: give(r, stores[r]) for r in range(ranks)])  # type: ignore[misc]
        began, first = time.perf_counter(), inquiry_of(0, ranks, stores[0])
        assert len(first._hear(0.0, list(range(ranks)))) == ranks
        return seconds + time.perf_counter() - began


def sockets(ranks: int) -> float:
    """Sockets of one rank after a gloo group's first all-reduce."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # as process_group.start_process_group() sets it
    groups: list[Any] = [None] * ranks

    def join(rank: int) -> None:
        store = dist.PrefixStore("gloo", stores[rank])
        groups[rank] = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=120))
        groups[rank].allreduce([torch.ones(1)]).wait()

    with clients(ranks) as stores:
        before = open_sockets()
        together([lambda r=r: join(r) for r in range(ranks)])  # type: ignore[misc]
        return (open_sockets() - before) / ranks


def open_sockets() -> int:
    links = Path("/proc/self/fd").iterdir()
    return sum(os.readlink(link).startswith("socket") for link in links if link.is_symlink())


# --- Files ---


OPENED: list[str] = []
# An audit hook sees every open() of Python, whatever module calls it.
sys.addaudithook(lambda event, args: OPENED.append(str(args[0])) if event == "open" else None)


def note_operations(seconds: float) -> float:
    """Operations a second of one host on the shared file system while rank 0 has not started."""
    with tempfile.TemporaryDirectory() as work, contextlib.suppress(RuntimeError):
        OPENED.clear()
        rendezvous._read_note(Path(work, "note"), Path(work, "copy"), 0, seconds)
    return 2 * len(OPENED) / seconds  # a failed open, and a listdir


def shard_opens(samples: int) -> tuple[int, int]:
    """Opens of data files: by rank 0 at the start, and by any other rank up to its first batch."""
    with tempfile.TemporaryDirectory() as work:
        shards = [Shard(f"train_{i:05d}.npy", 64, 1, 0) for i in range(SHARDS)]
        for shard in shards:
            np.save(Path(work, shard.file), np.zeros(64, np.uint16))
        about = {"name": "bytes", "kind": "bytes", "hash": ""}
        splits = {"train": shards, "val": []}
        Sidecar(about, "uint16", 257, 256, splits, {}).save(Path(work, SIDECAR))
        counts = []
        for check in (True, False):
            OPENED.clear()
            data = TokenDataset.open(work, "train", 16, 257, check)
            if not check:
                data.read(np.linspace(0, len(data) - 1, samples, dtype=np.int64))
            counts.append(sum(name.startswith(work) for name in OPENED))
    return counts[0], counts[1]


def logs_in_one_directory(ranks: int) -> int:
    """The most entries of one directory that the logs of an attempt make."""
    entries: dict[Path, set[str]] = {}
    for rank in range(ranks):
        os.environ["SLURMD_NODENAME"] = f"node{rank // PER_HOST}"
        path = log_path(Path("run"), 0, World(rank, rank % PER_HOST, ranks, "slurm"))
        for parent, name in ((path.parent, path.name), (path.parent.parent, path.parent.name)):
            entries.setdefault(parent, set()).add(name)
    return max(map(len, entries.values()))


# --- One rank of many ---


@contextlib.contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def step_bytes(ranks: int) -> float:
    sent, send = list[int](), dist.all_reduce
    dist.all_reduce = lambda t, *a, **k: (sent.append(t.nbytes), send(t, *a, **k))[1]
    names = ("loss_sum", "tokens", "grad_norm_sq", "work", "step_time", *REQUEST_FLAGS)
    try:
        with fake_world(ranks):
            axes = build_layout(DistributedConfig(), ranks, PER_HOST, "cpu")
            reduce_step(dict.fromkeys(names, torch.zeros(())), axes)
    finally:
        dist.all_reduce = send
    return sum(sent)


def first_shard(whole: Tensor, mesh: DeviceMesh, ranks: int) -> DTensor:
    """What fully_shard leaves of a parameter on rank 0. It is not called here: it cuts every
    parameter in as many pieces as there are ranks, which takes minutes for 16,384."""
    local = whole.new_empty(-(-len(whole) // ranks), *whole.shape[1:])
    return DTensor.from_local(
        local, mesh, [Cut(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def first_save(ranks: int) -> dict[str, float]:
    """Of one rank: seconds to plan the first save (which gathers nothing from the others), MB of
    the index, seconds to read it, and the most files in one directory."""
    shape = toml.loads((ROOT / "configs/train/70b.toml").read_text())["model"]
    with fake_world(ranks):
        with torch.device("meta"):
            model = Decoder(ModelConfig(**shape))
        mesh = init_device_mesh("cpu", (ranks,))
        state: dict[str, Tensor] = {}
        for name, whole in model.named_parameters():
            parameter = first_shard(whole.detach(), mesh, ranks)
            for key in ("exp_avg", "exp_avg_sq"):
                state[f"optim.{name}.{key}"] = torch.zeros_like(parameter)
            state |= {f"model.{name}": parameter, f"optim.{name}.step": torch.zeros(())}
        began = time.perf_counter()
        table = checkpoint_layout.make_table(state, {"rng.*.cpu": torch.get_rng_state()}, ranks)
        plan = plan_file(table, 0)
        planned = time.perf_counter()
        assert plan
    index = json.dumps(checkpoint_layout.to_json(table))
    read = time.perf_counter()
    from_json(json.loads(index))
    folders = Counter(Path(checkpoint_layout.file_of(rank)).parent for rank in range(ranks))
    return {
        "plan": planned - began,
        "index": len(index) / 1e6,
        "read": time.perf_counter() - read,
        "files": max(folders.values()),
    }


# --- All of it ---


def measure(quick: bool) -> list[Row]:
    def sizes(*given: int) -> Sequence[int]:
        return (8,) if quick else given

    def of(act: Callable[[int], float], *given: int) -> dict[int, float]:
        return {w: act(w) for w in sizes(*given)}

    note = note_operations(0.5 if quick else 10.0) / PER_HOST
    first, others = shard_opens(samples=8)
    saves = {w: first_save(w) for w in sizes(*RANKS)}

    def save(figure: str) -> dict[int, float]:
        return {w: saves[w][figure] for w in saves}

    def per_rank(each: float, once: float = 0.0) -> dict[int, float]:
        return {w: each * w + once for w in sizes(*RANKS)}

    return [
        row("waiting for rank 0: file operations, all ranks", "/s", per_rank(note), 1),
        row("check-in of all ranks", "s", of(check_in, 256, 1024), 1),
        row("gloo sockets of one rank", "", of(sockets, 32, 64, 128), 0),
        row("opens of data files, all ranks", "", per_rank(others, first - others), 1),
        row("most log files in one directory", "", of(logs_in_one_directory, *RANKS), 1),
        row("step: bytes all-reduced", "B", of(step_bytes, *RANKS), 0),
        row("first save: planning", "s", save("plan"), 0),
        row("first save: gathered on rank 0", "MB", per_rank(0.0), 0),
        row("checkpoint: most files in one directory", "", save("files"), 0),
        row("checkpoint: the index to load by", "MB", save("index"), 0),
        row("load: reading that index", "s", save("read"), 0),
        row("hang: asking all ranks", "s", of(question, 256, 1024), 1),
        row("late step: one answer of all ranks", "s", of(round_of_answers, 256, 1024), 1),
    ]  # fmt: skip


def main(argv: list[str]) -> int:
    parser = argument_parser("benchmarks.scale", __doc__)
    parser.add_argument("--quick", action="store_true", help="8 ranks: show that it works")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--before", help="a file of figures of another version, to compare with")
    parser.add_argument("--plot", help="with --before: draw both into this file")
    options = parser.parse_args(argv)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # All clients and the server are in this process: two descriptors for each connection.
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows = measure(options.quick)
    before = read(options.before) if options.before else None
    print(table(rows, before))
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if options.plot and before:
        plot(rows, before, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
