"""What reinforcement learning costs beside its sampling and training, in figures of this machine.

    python -m benchmarks.rl overhead           seconds of a step of rl.py over those of train.py
    python -m benchmarks.rl update             new weights by directory over a plain write and read
    python -m benchmarks.rl update --size 15

Both things are measured by turns. `--quick` only shows that it works.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHAPE = ["--model.vocab_size=257", "--model.n_heads=4", "--train.seq_len=128",
         "--train.micro_batch=4", "--bench.length=variable", "--bench.warmup=2"]  # fmt: skip
REWARDS = ["--rl.tokenizer=bytes", '--rl.env=[{id="arithmetic"}]', "--rl.sampling.max_tokens=64"]
SIZES = {  # of the model, in millions of parameters: width, blocks, vocabulary
    1: (64, 2, 4096),
    15: (256, 8, 16384),
    134: (768, 12, 32000),
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.rl", description=__doc__)
    parser.add_argument("command", choices=("overhead", "update"))
    parser.add_argument("--size", type=int, default=134, choices=SIZES, help="of update, millions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(argv)
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory(prefix="kempner-rl-") as place:
        if options.command == "overhead":
            overhead(Path(place), rounds, options.quick)
        else:
            update(Path(place), rounds, 1 if options.quick else options.size)
    return 0


def overhead(place: Path, rounds: int, quick: bool) -> None:
    dim, steps = (32, 2) if quick else (256, 6)
    words = [*SHAPE, f"--model.dim={dim}", f"--bench.steps={steps}"]
    programs = {
        "train.py": ["scripts/train.py", "--train.global_batch=16", "--data.dataset_path=fake:"],
        "rl.py": ["scripts/rl.py", "--rl.batch_samples=16", *REWARDS],
    }
    found: dict[str, list[float]] = {name: [] for name in (*programs, "publish")}
    for number in range(rounds):
        for name, command in programs.items():
            run = place / f"{name}-{number}"
            line = [sys.executable, *command, *words, "--bench", f"--run.dir={run}"]
            subprocess.run(line, cwd=ROOT, check=True, capture_output=True, timeout=600)
            (result,) = json.loads((run / "bench.json").read_text())["results"]
            found[name].append(statistics.median(step["step, s"] for step in result["steps"]))
            if name == "rl.py":
                published = [step["publish, s"] for step in result["steps"]]
                found["publish"].append(statistics.median(published))
    seconds = {name: statistics.median(values) for name, values in found.items()}
    for name, value in seconds.items():
        print(f"| {name}, s | {value:.4f} |")
    print(f"| rl.py / train.py | {seconds['rl.py'] / seconds['train.py']:.3f} |")
    work = seconds["rl.py"] - seconds["publish"]
    print(f"| without publishing | {work / seconds['train.py']:.3f} |")


def update(place: Path, rounds: int, size: int) -> None:
    import torch

    from kempner.extensions.generate.load import load_model_and_tokenizer
    from kempner.extensions.rl.exchange import RolloutExchange
    from kempner.extensions.rl.trainer.publish import DirectoryPublisher
    from kempner.extensions.serve.weights import replace_weights
    from kempner.jobs.ranks.placement import discover_world
    from kempner.jobs.ranks.process_group import start_process_group
    from kempner.parallel.build import build_model
    from kempner.train.configure import load_config
    from kempner.train.parts import open_layout

    dim, layers, vocab = SIZES[size]
    words = [f"--model.dim={dim}", f"--model.n_layers={layers}", f"--model.vocab_size={vocab}",
             f"--model.ffn_dim={dim * 8 // 3 // 8 * 8}", "--model.n_heads=4",
             *REWARDS, "--train.seq_len=128", f"--run.dir={place}"]  # fmt: skip
    cfg, cpu = load_config([], words), torch.device("cpu")
    world = start_process_group(discover_world(), cpu, place, 60.0)
    layout = open_layout(cfg, world, cpu)
    model = build_model(cfg.model, layout, cfg.train, cfg.distributed)
    exchange = RolloutExchange(place)
    publisher = DirectoryPublisher(cfg, model, exchange, cpu)
    publisher.publish(0)
    engine = load_model_and_tokenizer(str(exchange.version(0)), "cpu").model
    total = json.loads((exchange.version(0) / "manifest.json").read_text())["bytes"]
    # Random: some file systems compress, or leave out zeros.
    data, file = bytearray(os.urandom(1 << 20) * (total >> 20)), place / "plain"

    def write_plain() -> None:
        with open(file, "wb", buffering=0) as out:
            done = 0
            while done < len(data):
                # One call moves 2 GiB at most.
                done += out.write(memoryview(data)[done:])

    def read_plain() -> None:
        with open(file, "rb", buffering=0) as source:
            done = 0
            while done < len(data):
                done += source.readinto(memoryview(data)[done:])

    acts: dict[str, Callable[[int], object]] = {
        "plain write": lambda _: write_plain(),
        "plain read": lambda _: read_plain(),
        "publish": publisher.publish,
        "load": lambda number: replace_weights(engine, str(exchange.version(number))),
    }
    found: dict[str, list[float]] = {name: [] for name in acts}
    for number in range(1, rounds + 1):
        for name, act in acts.items():
            began = time.monotonic()
            act(number)
            found[name].append(time.monotonic() - began)
            if name in ("plain read", "load"):  # what is not on the disk yet never need be
                file.unlink(missing_ok=True)
                shutil.rmtree(exchange.version(number), ignore_errors=True)
    seconds = {name: statistics.median(values) for name, values in found.items()}
    print(f"| bytes | {total / 1e6:.0f} MB |")
    for name, value in seconds.items():
        print(f"| {name}, s | {value:.3f} |")
    plain = seconds["plain write"] + seconds["plain read"]
    ours = seconds["publish"] + seconds["load"]
    print(f"| publish and load / plain write and read | {ours / plain:.2f} |")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
