"""How long an engine waits for new weights: through files, straight from the ranks of the trainer,
and what one plain write and one plain read of the same bytes take.

    python -m benchmarks.rl_weights                     # 500 MB, two ranks, one engine
    python -m benchmarks.rl_weights --megabytes 100 --rounds 5

By turns, in one run. An update begins with the call of publish() and ends when the engine has the
weights in its model, which are compared with the trainer's in the first round. Files are written as
the trainer writes them, to --dir, and none is made durable: they are read while the page cache has
them, on either side. The first round is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.async_save import processor
from kempner.config.loading import load_config_files
from kempner.extensions.rl.exchange import RolloutExchange
from kempner.extensions.rl.trainer.publish import DirectoryPublisher, full_tensor
from kempner.extensions.rl.trainer.transfer import DirectPublisher
from kempner.extensions.serve import weights
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder
from kempner.parallel.build import build_model, parameter_names
from kempner.parallel.layout import build_layout
from kempner.train.sections import RunConfig

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
LAYERS, VOCAB = 8, 1024


def configuration(run: Path, megabytes: int) -> RunConfig:
    """Of about so many bytes in fp32: 12 D^2 a layer."""
    dim = max(64, round((megabytes * 1e6 / 4 / 12 / LAYERS) ** 0.5 / 64) * 64)
    words = {
        "run.dir": run,
        "model.dim": dim,
        "model.n_layers": LAYERS,
        "model.n_heads": dim // 64,
        "model.ffn_dim": dim * 8 // 3,
        "model.vocab_size": VOCAB,
        "data.dataset_path": "none",
        "rl.tokenizer": "bytes",
        "train.max_steps": 10**6,
    }
    return load_config_files(RunConfig, [], [f"--{name}={value}" for name, value in words.items()])


def trainer(run: Path, megabytes: int) -> None:
    """A rank: it publishes version n as RUN/n says."""
    dist.init_process_group("gloo")
    cfg, exchange = configuration(run, megabytes), RolloutExchange(run)
    layout = build_layout(cfg.distributed, dist.get_world_size(), 1, "cpu")
    model = build_model(cfg.model, layout, cfg.train, cfg.distributed)
    files = DirectoryPublisher(cfg, model, exchange, CPU)
    direct = DirectPublisher(lambda _: None, model, exchange, torch.float32, -1)
    direct.publish(0)  # the first one is files
    number, names = 1, parameter_names(model)
    while True:
        while not (run / str(number)).exists():
            time.sleep(0.005)
        kind = (run / str(number)).read_text()
        if kind == "end":
            break
        with torch.no_grad():
            for p in names.values():
                p.add_(0.01)
        # The first round has one update of each kind.
        if number <= 2:
            sums = {name: full_tensor(p).double().sum().item() for name, p in names.items()}
            if dist.get_rank() == 0:
                (run / f"sums-{number}").write_text(json.dumps(sums))
        dist.barrier()
        (files if kind == "directory" else direct).publish(number)
        number += 1
    dist.destroy_process_group()


class Engine:
    def __init__(self, run: Path, cfg: ModelConfig) -> None:
        self.run, self.exchange, self.number = run, RolloutExchange(run), 0
        self.model = Decoder(cfg).eval().requires_grad_(False)

    def update(self, kind: str) -> float:
        """Seconds."""
        self.number += 1
        place = self.exchange.version(self.number)
        manifest = place / "manifest.json"
        (self.run / f"new-{self.number}").write_text(kind)
        began = time.monotonic()
        # Renamed, so that a rank never reads an empty file.
        (self.run / f"new-{self.number}").rename(self.run / str(self.number))
        while not manifest.exists():
            time.sleep(0.005)
        if kind == "directory":
            weights.replace_weights(self.model, str(place))
        else:
            weights.receive_version(
                self.model, str(manifest), self.exchange.token.read_text().strip()
            )
        seconds = time.monotonic() - began
        if self.number <= 2:
            sums = json.loads((self.run / f"sums-{self.number}").read_text())
            found = {n: p.double().sum().item() for n, p in self.model.named_parameters()}
            assert found == sums, f"{kind}: not the weights of the trainer"
        shutil.rmtree(place)
        return seconds


def plain(file: Path, data: bytearray) -> float:
    began = time.monotonic()
    with open(file, "wb", buffering=0) as target:
        left = memoryview(data)
        while left:
            left = left[target.write(left[: 1 << 24]) :]
    with open(file, "rb", buffering=0) as source:
        left = memoryview(data)
        while left:
            left = left[source.readinto(left[: 1 << 24]) :]
    seconds = time.monotonic() - began
    file.unlink()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dir", type=Path, help="where files go (default: a temporary directory)")
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.trainer:
        return trainer(options.trainer, options.megabytes)
    run = Path(tempfile.mkdtemp(dir=options.dir))
    cfg = configuration(run, options.megabytes)
    engine = Engine(run, cfg.model)
    size = sum(p.nbytes for p in engine.model.parameters())
    words = ["--standalone", f"--nproc-per-node={options.ranks}", "-m", "benchmarks.rl_weights"]
    words += ["--trainer", str(run), "--megabytes", str(options.megabytes)]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    data, seconds = bytearray(size), {"files": [], "ranks": [], "plain": []}
    try:
        for number in range(options.rounds + 1):
            found = engine.update("directory"), engine.update("direct"), plain(run / "x", data)
            for name, value in zip(seconds, found, strict=True):
                if number:
                    seconds[name].append(value)
    finally:
        (run / str(engine.number + 1)).write_text("end")
        process.wait(60)
        shutil.rmtree(run)
    print(f"$ python -m benchmarks.rl_weights {shlex.join(sys.argv[1:])}".rstrip())
    print(
        f"{time.strftime('%Y-%m-%d')}, {processor()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}, torch {torch.__version__}; {size / 1e6:.0f} MB, "
        f"{options.ranks} ranks, one engine, {options.rounds} rounds"
    )
    print("          seconds   ratio to plain (spread)")
    for name, values in seconds.items():
        ratios = sorted(a / b for a, b in zip(values, seconds["plain"], strict=True))
        print(
            f"{name:8} {statistics.median(values):8.2f}   {statistics.median(ratios):.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
