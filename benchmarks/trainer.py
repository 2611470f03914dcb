"""What the trainer costs over the work itself, in figures of this machine.

    python -m benchmarks.trainer overhead             tokens/s of the trainer over a bare loop's
    python -m benchmarks.trainer overhead --ranks 2
    python -m benchmarks.trainer startup              seconds until step 1 has ended
    python -m benchmarks.trainer data                 tokens/s that one core reads
    python -m benchmarks.trainer checkpoint           what a save costs the steps

`--quick` only shows that it works. docs/reference/benchmarks.md has figures, and says how
they are taken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kempner.jobs.records.run_history import load_history

if TYPE_CHECKING:
    from kempner.data.batch import MicroBatch

ROOT = Path(__file__).resolve().parent.parent
TRAIN = str(ROOT / "scripts/train.py")
EVERY = 5  # steps of a turn, and of a line
WARM_UP = 3  # turns that do not count
ONLY_STEPS = (
    "--checkpoint.interval=0",
    "--eval.interval=0",
    "--train.max_steps=1000000",
    f"--metrics.log_interval={EVERY}",
)
# Some 60 M parameters and steps of a second: the state of AdamW is 0.7 GB.
LARGE = (
    "--model.dim=768",
    "--model.n_layers=10",
    "--model.n_heads=12",
    "--model.n_kv_heads=4",
    "--model.ffn_dim=2048",
    "--train.seq_len=128",
    "--train.global_batch=4",
)


def main(argv: list[str]) -> int:
    if argv[:1] == ["by-turns"]:
        by_turns(int(argv[1]), argv[2:])
    options = parse(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):  # what is started here never ends by itself
        signal.signal(number, lambda *_: sys.exit(1))
    print(f"$ python -m benchmarks.trainer {shlex.join(argv)}\n{machine()}\n", flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-") as work:
            options.measure(options, Path(work))
    except subprocess.CalledProcessError as error:
        print(f"bench: error: {shlex.join(error.cmd)}\n{error.stderr}", file=sys.stderr)
        return 2
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    about, _, more = (__doc__ or "").partition("\n")
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "benchmarks.trainer", None, about, more, formatter_class=as_it_is
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for measure, repeats in ((overhead, 20), (startup, 5), (data, 5), (checkpoint, 3)):
        command = commands.add_parser(measure.__name__, help=(measure.__doc__ or "").split(".")[0])
        command.set_defaults(measure=measure)
        command.add_argument("--quick", action="store_true", help="once, with the debug model")
        command.add_argument("--repeats", type=int, default=repeats, help=f"default: {repeats}")
        if measure is not data:
            command.add_argument("--config", default="configs/train/quickstart.toml")
            command.add_argument("overrides", nargs="*", help="after --: overrides for the trainer")
        if measure is overhead:
            command.add_argument("--ranks", type=int, default=1, help="processes (default: 1)")
            command.add_argument("--dtype", nargs="+", default=["fp32", "bf16"])
            command.add_argument("--compile", nargs="+", default=["false", "true"])
    options = parser.parse_args(argv)
    if options.repeats < 1 or getattr(options, "ranks", 1) < 1:
        parser.error("--repeats and --ranks: at least 1")
    if options.quick:
        quick = {"repeats": 1, "dtype": ["fp32"], "compile": ["false"]}
        vars(options).update(quick, config="configs/train/debug.toml")
    return options


def machine() -> str:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    name = cpu[1] if cpu else platform.machine()
    when, load = time.strftime("%Y-%m-%d %H:%M"), os.getloadavg()[0]
    return f"{when}, {name}, {os.cpu_count()} cores, load {load:.1f} before the start"


def spread(values: Sequence[float], form: str = ".3f") -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def run(words: list[str]) -> str:
    """Run Python to its end; returns what it printed."""
    command = [sys.executable, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


# --- overhead ---------------------------------------------------------------------------------


def overhead(options: argparse.Namespace, work: Path) -> None:
    """Tokens/s of the trainer over those of a bare loop. That does forward, backward and a fused
    AdamW step, nothing else, with another model of the same kind on one batch.

    Both live in the same processes and take turns, a few steps each: what slows the machine
    for a while slows both.
    """
    print(
        "trainer / bare loop, target 0.980   CPU seconds of the turns  by the clock             "
        "trainer  bare, tokens/s"
    )
    for dtype, compiled in itertools.product(options.dtype, options.compile):
        words = [f"--train.dtype={dtype}", f"--train.compile={compiled}", *options.overrides]
        with tempfile.TemporaryDirectory(dir=work) as run_dir:
            words = [options.config, *ONLY_STEPS, *words, f"--run.dir={run_dir}"]
            launcher = ["-m", "torch.distributed.run", "--standalone"]
            launcher += [f"--nproc-per-node={options.ranks}"]
            program = ["-m", "benchmarks.trainer", "by-turns", str(options.repeats), *words]
            out = run([*(launcher if options.ranks > 1 else []), *program])
        found = json.loads(out.splitlines()[-1])
        tokens, seconds = found["tokens"], found["wall"]
        ours, theirs = (tokens / statistics.median(x) for x in zip(*seconds, strict=True))
        cpu, wall = ([bare / own for own, bare in found[clock]] for clock in ("cpu", "wall"))
        name = f"{dtype} {'compiled' if compiled == 'true' else 'eager'}, ranks: {options.ranks}"
        speeds = f"{ours:>9,.0f}  {theirs:>9,.0f}"
        ratios = f"{spread(cpu)}  {spread(wall)}"
        print(f"{name:<25} {len(cpu):>2} pairs  {ratios}  {speeds}", flush=True)


def by_turns(repeats: int, argv: list[str]) -> None:
    """scripts/train.py, interrupted every few steps by as many of the bare loop. Ends by printing
    the seconds of both, by the clock and of this process, and the tokens of a turn, as JSON."""
    import torch
    import torch.distributed as dist

    from kempner.optim.build import build_optimizer
    from kempner.parallel.build import build_model
    from kempner.parallel.layout import build_layout
    from kempner.train.configure import configure
    from kempner.train.resilience import requests
    from scripts import train

    stop = requests.StopRequests()
    cfg = configure(argv, stop)
    step_tokens = cfg.train.sequences * cfg.train.seq_len
    pairs: dict[str, list[tuple[float, float]]] = {"wall": [], "cpu": []}
    bare: list[Any] = []
    calls, mark = itertools.count(), (0.0, 0.0)

    def now() -> tuple[float, float]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    def bare_loop(device: torch.device, batches: list[MicroBatch]) -> None:
        if not bare:
            axes = build_layout(cfg.distributed, dist.get_world_size(), 1, device.type)
            bare.append(build_model(cfg.model, axes, cfg.train, cfg.distributed))
            bare.append(build_optimizer(bare[0], cfg.optimizer))
            bare.append([batch.to(device) for batch in batches])
        model, optimizer, batches = bare
        for _ in range(EVERY):
            for batch in batches:
                (model(batch.inputs, batch.targets) / step_tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

    def take_turns(batches: list[MicroBatch]) -> None:
        nonlocal mark
        if next(calls) % EVERY:
            return
        began = now()
        bare_loop(torch.device("cuda" if torch.cuda.is_available() else "cpu"), batches)
        ended = now()
        for i, clock in enumerate(pairs):
            pairs[clock].append((began[i] - mark[i], ended[i] - began[i]))
        if len(pairs["wall"]) == WARM_UP + repeats:
            if dist.get_rank() == 0:
                found = {clock: seconds[WARM_UP:] for clock, seconds in pairs.items()}
                print(json.dumps({"tokens": EVERY * step_tokens, **found}), flush=True)
            # No rank may end while another one still needs its messages.
            dist.barrier()
            requests.end_process(0)
        mark = now()

    before_each_step(take_turns)
    requests.end_process(train.main(cfg, stop) or 1)  # it ends in take_turns()


def before_each_step(act: Callable[[list[MicroBatch]], None]) -> None:
    """Let the trainer of this process call `act` with the micro-batches of each step first."""
    from kempner.data.loader import TrainLoader

    real = TrainLoader.__next__

    def following(loader: TrainLoader) -> list[MicroBatch]:
        batches = real(loader)
        act(batches)
        return batches

    TrainLoader.__next__ = following  # type: ignore[method-assign]


# --- startup ----------------------------------------------------------------------------------


def startup(options: argparse.Namespace, work: Path) -> None:
    """Seconds from the start of the process to the end of step 1. Beside them `import torch`, and
    the imports of the trainer. CPU seconds of the main thread with one thread for products, which
    other work on the machine hardly changes, and seconds of the clock.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    imports = f"import runpy; runpy.run_path({TRAIN!r}, run_name='imports')"
    seconds: dict[str, list[tuple[float, float]]] = {
        "import torch": [],
        "the trainer's imports": [],
        "step 1": [],
    }
    for i in range(options.repeats + 1):
        found = (
            imported("import torch"),
            imported(imports),
            first_step(options, work / str(i)),
        )
        if i:  # the first fills the page cache
            for values, value in zip(seconds.values(), found, strict=True):
                values.append(value)
    for at, kind in enumerate(("CPU", "clock")):
        print(f"seconds, {kind}")
        columns = {name: [pair[at] for pair in pairs] for name, pairs in seconds.items()}
        for name, values in columns.items():
            ratios = [b / a for a, b in zip(columns["import torch"], values, strict=True)]
            print(f"{name:<22} {spread(values, '.2f')} s   {spread(ratios, '.2f')} x import torch")
        over = [b - a for a, b in zip(columns["import torch"], columns["step 1"], strict=True)]
        print(f"step 1 - import torch  {spread(over, '.2f')} s   target 1.00")


def imported(program: str) -> tuple[float, float]:
    """CPU seconds of the main thread, and those of the clock."""
    began = time.perf_counter()
    said = run(["-c", f"{program}\nimport time; print(time.thread_time())"])
    return float(said.split()[-1]), time.perf_counter() - began


def first_step(options: argparse.Namespace, run_dir: Path) -> tuple[float, float]:
    """The line of step 1 is written when step 2 has been started: the host is one step ahead."""
    words = ["--train.max_steps=2", "--schedule.warmup_steps=0"]
    words += ["--metrics.log_interval=1", "--eval.interval=0"]
    command = [sys.executable, TRAIN, options.config, f"--run.dir={run_dir}", *words]
    began, lines = time.time(), run_dir / "metrics.jsonl"
    with subprocess.Popen([*command, *options.overrides], stdout=subprocess.DEVNULL) as process:
        spent = Path(f"/proc/{process.pid}/schedstat")
        cpu = 0.0
        while process.poll() is None and not (lines.is_file() and '"loss"' in lines.read_text()):
            cpu = int(spent.read_text().split()[0]) / 1e9
            time.sleep(0.005)
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)}: exit code {process.returncode}")
    return cpu, float(load_history(run_dir).losses[0]["time"]) - began


# --- data -------------------------------------------------------------------------------------


def data(options: argparse.Namespace, work: Path) -> None:
    """Tokens/s that one core reads, shuffles and makes into tensors. They come from the page
    cache, from 100 M tokens in samples of 2048 and of 128: as one stream, with its documents (of
    about 500 tokens) apart, from three sources, and both; and from the same tokens as chats of
    about 150 and 600 tokens that are packed into samples of 2048.
    """
    import numpy as np
    import torch

    from kempner.data.formats.chat_dataset import ChatDataset
    from kempner.data.formats.dataset import TokenDataset
    from kempner.data.loader import reading_speed
    from kempner.data.mixture import Ingredient, Mixture, MixturePhase
    from kempner.data.sidecar import DATA_SPLITS, SIDECAR, Shard, Sidecar
    from kempner.data.source import Shape
    from kempner.data.text import chat_marks

    if hasattr(os, "sched_setaffinity"):
        # One core: threads of NumPy or torch cannot help.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    count, vocab = 1_000_000 if options.quick else 100_000_000, 50_000
    tokens = np.random.default_rng(0).integers(0, vocab, count, np.uint16)
    tokens[::500] = 0
    np.save(work / "tokens.npy", tokens)
    shards = {split: [Shard("tokens.npy", count, 1, vocab - 1)] for split in DATA_SPLITS}
    tokenizer = {"name": "none", "kind": "bytes", "hash": ""}
    Sidecar(tokenizer, "uint16", vocab, 0, shards, {}).save(work / SIDECAR)
    seconds = 0.1 if options.quick else 1.0
    for seq_len in (2048, 128):
        for apart, number in ((False, 1), (True, 1), (False, 3), (True, 3)):
            sources = [
                TokenDataset.open(work, "train", seq_len, vocab, separate=apart)
                for _ in range(number)
            ]
            parts = [Ingredient(str(i), len(each)) for i, each in enumerate(sources)]
            mixture = Mixture(parts, [MixturePhase(0, (5.0, 3.0, 2.0)[:number])])
            speeds = [
                reading_speed(sources, mixture, 65536 // seq_len, seconds)
                for _ in range(options.repeats)
            ]
            name = f"{number} source{'s' * (number > 1)}{', documents apart' * apart}"
            speed = spread([x / 1e6 for x in speeds], ".0f")
            print(f"seq_len {seq_len:<5} {name:<26} {speed} M tokens/s", flush=True)
    np.save(
        chat_marks.files_of_shard(work / "tokens.npy")["loss_mask"], (tokens & 1).astype(np.uint8)
    )
    for mean in (150, 600):
        lengths = 2 + np.random.default_rng(0).exponential(mean, count // mean).astype(np.int64)
        ends = np.cumsum(lengths)
        ends = ends[ends <= count]
        np.save(chat_marks.files_of_shard(work / "tokens.npy")["ends"], ends)
        shards = {
            split: [Shard("tokens.npy", count, len(ends), vocab - 1)] for split in DATA_SPLITS
        }
        Sidecar(tokenizer, "uint16", vocab, 0, shards, {}, "chat").save(work / SIDECAR)
        began = time.perf_counter()
        chat = ChatDataset.open(work, "train", Shape(2048, vocab))
        opened = time.perf_counter() - began
        speeds = [
            reading_speed([chat], Mixture.alone(chat, 0), 32, seconds) / 1e6
            for _ in range(options.repeats)
        ]
        print(f"chats of {mean:<4} {spread(speeds, '.0f')} M tokens/s; opened in {opened:.2f} s:")
        print(f"              {chat.describe()}")
    print("target, plain shards of one source in samples of 2048: 50")


# --- checkpoint -------------------------------------------------------------------------------


def checkpoint(options: argparse.Namespace, work: Path) -> None:
    """What a save costs the steps, async and synchronous by turns. They stand still for it, and are
    slower while it is written; "in all" is both.
    """
    interval = 4 if options.quick else 8
    words = [options.config, *(() if options.quick else LARGE), f"--checkpoint.interval={interval}"]
    words += [f"--train.max_steps={5 * interval}", "--checkpoint.keep_last_n=1"]
    words += ["--metrics.log_interval=1", "--eval.interval=0", *options.overrides]
    costs: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    firsts: dict[bool, list[float]] = {True: [], False: []}  # they also plan and find the memory
    for i in range(options.repeats):
        for kind, found in costs.items():
            with tempfile.TemporaryDirectory(dir=work) as run_dir:
                is_async = f"--checkpoint.async_save={str(kind).lower()}"
                out = run([TRAIN, *words, is_async, f"--run.dir={run_dir}"])
                steps = {line["step"]: line for line in load_history(Path(run_dir)).losses}
                files = Path(run_dir, "checkpoints/latest/").iterdir()
                size = sum(file.stat().st_size for file in files) / 1e6
            durable = re.findall(r"step (\d+) is durable after ([\d.]+) s", out)
            # The second half of the steps between two saves: by then the save is written.
            quiet = [s["step_time"] for n, s in steps.items() if n % interval > interval // 2]
            first, *later = save_costs(steps, dict(durable), interval, statistics.median(quiet))
            firsts[kind].append(first[0])
            found += later
        if i == 0:
            print(f"{size:,.0f} MB, steps of {statistics.median(quiet):.3f} s, in seconds:")
    for kind, found in costs.items():
        still, whole, until = (spread(column) for column in zip(*found, strict=True))
        name = f"{'async' if kind else 'synchronous':<12} {len(found)} saves"
        print(f"{name}   stands still {still}   in all {whole}   durable after {until}")
        print(f"{'':<12} the first save of a process stands still {spread(firsts[kind])}")
    medians = {
        kind: [statistics.median(column) for column in zip(*found, strict=True)]
        for kind, found in costs.items()
    }
    still, whole = (medians[True][i] / medians[False][i] for i in (0, 1))
    print(f"async / synchronous    stands still {still:.3f}   in all {whole:.3f}")


def save_costs(
    steps: dict[int, dict[str, Any]], durable: dict[str, str], interval: int, quiet: float
) -> list[tuple[float, float, float]]:
    """Of each save but the last, which no step follows: seconds in the call, which the line of its
    step tells or, on a CPU, of the next one; seconds by which the steps from there to the next
    save were longer than `quiet` ones; seconds until durable."""
    found = []
    for saved in range(interval, max(steps), interval):
        still = steps[saved]["checkpoint_time"] + steps[saved + 1]["checkpoint_time"]
        first = saved if steps[saved]["checkpoint_time"] else saved + 1
        longer = sum(steps[n]["step_time"] - quiet for n in range(first, saved + interval))
        found.append((still, longer, float(durable[str(saved)])))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
