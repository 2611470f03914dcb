"""What import, export and model.init_from cost, against reading and writing the same bytes.

    python -m benchmarks.convert                    500 M parameters: 1 GB in bf16, 2 GB in fp32
    python -m benchmarks.convert --layers 4 --rounds 1

In each round every program runs once in a process of its own, from files that are not in the page
cache, until what it writes is durable; starting Python and torch is not counted. Beside it, the
same bytes are read and written by as little code as that takes. Memory is the anonymous memory of
the process at its peak, over what it had before: mapped files are page cache, which the kernel
takes back at will. The fastest round counts.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

CHUNK = 1 << 24
SHARD = 500_000_000  # --max-shard-size of the export


class Cost(NamedTuple):
    seconds: float
    peak: int  # bytes


def files_of(path: Path) -> list[Path]:
    return [p for p in sorted(path.rglob("*")) if p.is_file() and not p.is_symlink()]


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in files_of(path))


def forget(path: Path) -> None:
    """Take the files out of the page cache."""
    for file in files_of(path):
        fd = os.open(file, os.O_RDONLY)
        # DONTNEED leaves dirty pages where they are.
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_plainly(path: Path, out: Path) -> None:
    buffer = bytearray(CHUNK)
    for file in files_of(path):
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def write_plainly(path: Path, out: Path) -> None:
    """As many bytes as `path` has, in as many files."""
    buffer = bytearray(os.urandom(CHUNK))
    out.mkdir()
    for number, file in enumerate(files_of(path)):
        left = file.stat().st_size
        with open(out / str(number), "wb", buffering=0) as opened:
            while left:
                left -= opened.write(memoryview(buffer)[: min(left, CHUNK)])
            os.fsync(opened.fileno())


def anonymous() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def measured(act: Callable[..., None], path: Path, out: Path, results: Any) -> None:
    """In a process of its own."""
    import torch

    import kempner.extensions.hf.exporting
    import kempner.extensions.hf.importing  # noqa: F401

    # Conversions are work of one thread; others would only blur the figure.
    torch.set_num_threads(1)
    # Made before the clock starts: a rank has this memory already.
    if act is init_from:
        quarter(path)
    peak, base, done = 0, anonymous(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous() - base)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    act(path, out)
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    results.put(Cost(seconds, peak))


def import_(path: Path, out: Path) -> None:
    from kempner.extensions.hf.importing import import_model
    from kempner.extensions.hf.source import find_weights
    from kempner.model.config import ModelConfig

    import_model(path, ModelConfig(**find_weights(str(path)).model()), out, "", str(path))


def export(path: Path, out: Path) -> None:
    from kempner.extensions.hf.exporting import export_checkpoint
    from kempner.extensions.hf.source import find_weights

    export_checkpoint(find_weights(str(path)).path, out, "auto", SHARD)


def init_from(path: Path, out: Path) -> None:
    """As one of four ranks that shard the model, and have the memory for it."""
    from kempner.extensions.hf.load import ReadJob, fill_tensors
    from kempner.extensions.hf.stored import Stored

    with Stored(path, "pt") as stored:
        fill_tensors(
            stored, [ReadJob(part, name, box) for name, (box, part) in quarter(path).items()]
        )


@functools.cache
def quarter(path: Path) -> dict[str, Any]:
    """By name what one of four ranks holds: a box and its tensor."""
    import torch

    from kempner.checkpoint.format.plan import CheckpointLayout, StoredTensor, own_box
    from kempner.extensions.hf.source import find_weights
    from kempner.extensions.hf.tensors import tensor_names
    from kempner.model.config import ModelConfig
    from kempner.model.shapes import tensor_shapes

    cfg = ModelConfig(**find_weights(str(path)).model())
    names, parts = tensor_names(cfg, "llama"), {}
    for ours, shape in tensor_shapes(cfg).items():
        whole = StoredTensor(torch.Size(shape), torch.float32, CheckpointLayout((4,), (0,)), 0)
        box = own_box(whole, 1)
        parts[names[ours]] = box, torch.ones([length for _, length in box])
    return parts


def read_quarter(path: Path, out: Path) -> None:
    buffer = bytearray(CHUNK)
    left = size_of(path) // 4
    with open(path / "model.safetensors", "rb", buffering=0) as file:
        while left > 0:
            left -= file.readinto(buffer)


def make_model(path: Path, layers: int) -> int:
    """A random Llama in bf16; returns its parameters."""
    import json

    import torch
    from safetensors.torch import save_file

    from kempner.extensions.hf.families import config_json
    from kempner.extensions.hf.tensors import tensor_names
    from kempner.model.config import ModelConfig
    from kempner.model.shapes import tensor_shapes

    cfg = ModelConfig(
        vocab_size=32_000, dim=2048, n_layers=layers, n_heads=16, ffn_dim=5632, max_seq_len=64
    )
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config_json(cfg, None, "bfloat16", None)))
    names = tensor_names(cfg, "llama")
    tensors = {
        names[ours]: torch.randn(shape).bfloat16() for ours, shape in tensor_shapes(cfg).items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return cfg.count_parameters()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8, help="of 51 M parameters each")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dir", default=None, help="file system to measure (default: /tmp)")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()

    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        root = Path(folder)
        model, run, out = root / "model", root / "run", root / "out"
        worker = spawn.Process(target=make_model, args=(model, options.layers))
        worker.start()
        worker.join()
        costs: dict[str, list[Cost]] = {}

        def cost(name: str, act: Callable[..., None], path: Path, to: Path) -> None:
            forget(root)
            shutil.rmtree(to, ignore_errors=True)
            os.sync()
            worker = spawn.Process(target=measured, args=(act, path, to, results))
            worker.start()
            # Before join(): a process does not end while its queue holds what nobody has taken.
            costs.setdefault(name, []).append(results.get())
            worker.join()

        copy, none = root / "copy", root / "none"
        pairs: list[list[tuple[str, Callable[..., None], Path, Path]]] = [
            [("import", import_, model, run), ("read model", read_plainly, model, none)],
            [("export", export, run, out), ("read run", read_plainly, run, none)],
            [("init_from", init_from, model, none), ("read quarter", read_quarter, model, none)],
            [("write run", write_plainly, run, copy)],
            [("write model", write_plainly, model, copy)],
        ]
        for number in range(options.rounds):
            for pair in pairs:
                # By turns: what comes second may find the files in a cache of the host below.
                for act in pair[:: -1 if number % 2 else 1]:
                    cost(*act)
        seconds = {name: min(c.seconds for c in of) for name, of in costs.items()}
        peaks = {name: max(c.peak for c in of) for name, of in costs.items()}
        sizes = {"model": size_of(model), "run": size_of(run)}
    for name, size in sizes.items():
        print(f"{name}: {size / 1e9:.2f} GB")
    floors = {
        "import": seconds["read model"] + seconds["write run"],
        "export": seconds["read run"] + seconds["write model"],
        "init_from": seconds["read quarter"],
    }
    print("\n| | s | the same bytes, s | ratio | peak, MB |\n|---|---|---|---|---|")
    for name, floor in floors.items():
        print(
            f"| {name} | {seconds[name]:.2f} | {floor:.2f} | {seconds[name] / floor:.2f} "
            f"| {peaks[name] / 1e6:,.0f} |"
        )


if __name__ == "__main__":
    main()
