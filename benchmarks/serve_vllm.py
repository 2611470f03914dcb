"""The engine of scripts/serve.py beside vLLM on a CPU: texts side by side, over HTTP.

    make test-vllm                                     # once: installs vLLM into .venv-vllm
    KEMPNER_VLLM=.venv-vllm/bin/python python -m benchmarks.serve_vllm --size 4M,19M

By turns, with the same weights and prompts, one thread each, as benchmarks.serve does. What counts
is the CPU time: of this process for the kit, of all its processes for vLLM; the client's work is
in the former alone. Tokens are greedy, and the share that both sides agree on is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
import transformers

from benchmarks.async_save import processor
from benchmarks.generate import LENGTH, models
from benchmarks.serve import complete, make_prompts, serving
from kempner.extensions.generate.config import Sampling
from kempner.extensions.rl.engines.client import VllmEngine

START_S = 300.0
TICK = os.sysconf("SC_CLK_TCK")


def start(place: Path, model: transformers.LlamaForCausalLM, slots: int) -> subprocess.Popen[bytes]:
    """vLLM with these weights, ready to answer."""
    version = place / "weights/v00000001"
    model.save_pretrained(version)
    (version / "manifest.json").write_text(json.dumps({"version": 1, "transport": "directory"}))
    words = ["--weights", place / "weights", "--publish", place, "--slots", slots]
    # Without the cache: each round has the same prompts, and would read them once.
    words += ["--max-model-len", LENGTH, "--no-enable-prefix-caching"]
    command = [sys.executable, "-m", "kempner.extensions.rl.engines.vllm_engine", *map(str, words)]
    with open(place / "log", "w") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    end = time.monotonic() + START_S
    while not (place / "engine-0").exists():
        if process.poll() is not None or time.monotonic() > end:
            sys.exit((place / "log").read_text()[-3000:] + "vLLM has not started")
        time.sleep(0.5)
    return process


def descendants(pid: int) -> list[int]:
    try:
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return []
    return [pid, *(one for child in children for one in descendants(child))]


def cpu_seconds(pid: int) -> float:
    """Of a process and all below it that live."""
    ticks = 0
    for one in descendants(pid):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        # utime and stime, fields 14 and 15 of proc(5); pid and name, the first two, are cut off.
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICK


def measure(size: str, batch: int, new: int, rounds: int) -> str:
    ours, theirs = models(size)
    prompts = make_prompts(batch)
    seconds: dict[str, list[float]] = {"kempner": [], "vllm": []}
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        process = start(place, theirs, batch)
        # Callbacks run in reverse: the signal first, then the wait.
        stack.callback(process.wait)
        stack.callback(process.send_signal, signal.SIGTERM)
        port, _ = stack.enter_context(serving(ours, batch))
        engine = VllmEngine((place / "engine-0").read_text().strip(), "", [])

        def run_vllm() -> list[list[int]]:
            answers = engine.complete(prompts, 1, Sampling(temperature=0, max_tokens=new))
            return [answer[0].token_ids for answer in answers]

        sides: dict[str, tuple[Callable[[], list[list[int]]], Callable[[], float]]] = {
            "kempner": (lambda: complete(port, prompt=prompts, max_tokens=new), time.process_time),
            "vllm": (run_vllm, lambda: cpu_seconds(process.pid)),
        }
        found = {}
        for number in range(rounds + 1):  # the first one allocates
            for name, (run, clock) in sides.items():
                began = clock()
                found[name] = run()
                if number:
                    seconds[name].append(clock() - began)
    same = sum(a == b for a, b in zip(*found.values(), strict=True)) / batch
    a, b = (batch * new / statistics.median(each) for each in seconds.values())
    ratios = sorted(y / x for x, y in zip(*seconds.values(), strict=True))
    middle = statistics.median(ratios)
    spread = f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return f"{size:5} {a:9.0f} {b:9.0f} {middle:7.2f} {spread:15} {same:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16, help="texts at a time")
    parser.add_argument("--size", default="4M,19M", help="models, comma-separated")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate for each prompt")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"$ python -m benchmarks.serve_vllm {shlex.join(sys.argv[1:])}".rstrip())
    print(
        f"{time.strftime('%Y-%m-%d')}, {processor()}, 1 thread, fp32, load "
        f"{os.getloadavg()[0]:.1f}, torch {torch.__version__}; {options.batch} texts, "
        f"{options.new} new tokens each; tokens per CPU second"
    )
    print("model   kempner      vLLM   ratio (spread)       the same texts")
    for size in options.size.split(","):
        print(measure(size, options.batch, options.new, options.rounds), flush=True)


if __name__ == "__main__":
    main()
