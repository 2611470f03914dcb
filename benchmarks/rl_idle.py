"""How long trainer and engines wait for each other when both are as fast, with the kit's own
orchestrator between stand-ins that sleep: what else this machine does hardly matters.

    python -m benchmarks.rl_idle                 about 45 minutes, most of them asleep
    python -m benchmarks.rl_idle --events        the last run's events on one axis, too

Engines have slots, and a text takes one for as long as it is long (of exponential length, cut at
four times the mean). The trainer needs as long for a batch as all engines for as many tokens with
all slots in use, times a ratio. `waits` is the share of its time that it waits for a batch;
`engines wait` that of their slots without a text.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kempner.config.loading import load_config_files
from kempner.extensions.rl.environments.protocol import Environment, Task
from kempner.extensions.rl.exchange import ExchangeStart
from kempner.extensions.rl.opening import open_parts
from kempner.extensions.rl.trainer import feed
from kempner.train.sections import RunConfig
from tests.fake_engine import FakeEngine
from tests.rl_loop import RANKS, Loop

ENGINES, SLOTS, GROUP = 2, 32, 8
MEAN, MOST = 100, 400  # tokens of a text
FIRST = 3  # steps that are left out
Draw = Callable[[random.Random], int]
LENGTHS: dict[str, Draw] = {
    "equal": lambda draw: MEAN,
    "uniform": lambda draw: draw.randint(1, 2 * MEAN - 1),
    "exponential": lambda draw: 1 + min(MOST - 1, int(draw.expovariate(1 / MEAN))),
}


class Lengths(Environment):
    """Rewards of a group differ."""

    def task(self, number: int, rng: Any) -> Task:
        return Task(f"{rng.random()}:")

    def score(self, task: Task, completion: str) -> float:
        return random.random()


class Slots(FakeEngine):
    """Texts wait for slots, first come, first served, and take `token_s` for each token."""

    def __init__(self, token_s: float, draw: Draw, seed: int) -> None:
        super().__init__()
        self.draw = draw
        self.token_s, self.free = token_s, [0.0] * SLOTS
        self.lock, self.lengths = threading.Lock(), random.Random(seed)
        self.used: list[tuple[float, float]] = []  # of each text
        self.taken: list[tuple[int, float]] = []

    def complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        choices, now, end = [], time.monotonic(), 0.0
        with self.lock:
            for index in range(body["n"]):
                length = self.draw(self.lengths)
                # The slot that is free first; with the lock, so that texts keep their order.
                begin = max(now, heapq.heappop(self.free))
                heapq.heappush(self.free, begin + length * self.token_s)
                self.used.append((begin, begin + length * self.token_s))
                end = max(end, self.used[-1][1])
                choices.append(
                    {
                        "index": index,
                        "token_ids": [48] * length,
                        "logprobs": {"token_logprobs": [-1.0] * length},
                        "finish_reason": "length",
                        "weight_versions": [self.version],
                    }
                )
        # Without the lock: the texts of other requests run beside these.
        time.sleep(max(0.0, end - time.monotonic()))
        return choices


class Timed(Loop):
    """Its trainer takes `token_s` for each token of a batch, and looks for the next one as feed.py
    does."""

    def train(self, token_s: float) -> list[tuple[float, float, float]]:
        """Of each step: when it began to wait, when it had the batch, when it had published."""
        self.publish(0)
        self.exchange.begin(ExchangeStart(0, RANKS, None))
        thread = threading.Thread(target=self._orchestrate, args=open_parts(self.cfg), daemon=True)
        thread.start()
        found, self.staleness = [], []
        for step in range(1, self.cfg.train.max_steps + 1):
            began, pause = time.monotonic(), 0.0
            while (batch := self.exchange.batch(step)) is None:
                time.sleep(pause)
                pause = feed.pause_after(time.monotonic() - began)
            there = time.monotonic()
            time.sleep(batch.tokens * token_s)
            self.publish(step)
            found.append((began, there, time.monotonic()))
            self.staleness.append(batch.metrics["staleness"])
        thread.join()
        return found


def configuration(folder: Path, steps: int, samples: int, behind: int) -> RunConfig:
    file = folder / "rl.toml"
    file.write_text(f'[[rl.env]]\nid = "{Path(__file__).resolve()}:Lengths"\n')
    values = {
        "run.dir": folder / "run", "train.max_steps": steps, "train.seq_len": MOST + 32,
        "train.micro_batch": 1, "model.vocab_size": 257, "rl.tokenizer": "bytes",
        "rl.group_size": GROUP, "rl.batch_samples": samples, "rl.sampling.max_tokens": MOST,
        "rl.inference.slots": SLOTS, "rl.max_async": behind,
    }  # fmt: skip
    return load_config_files(
        RunConfig, [file], [f"--{name}={value}" for name, value in values.items()]
    )


def measure(
    options: argparse.Namespace, lengths: str, each: int, behind: int
) -> tuple[float, float, float]:
    """Shares of time that the trainer waits and that slots are free; mean staleness. `each`:
    samples of a batch for a slot; `behind`: rl.max_async."""
    token_s = options.seconds / (each * MEAN)  # of a text in its slot
    steps = options.steps + FIRST
    memory = Path("/dev/shm")  # the disk is not what is measured
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        engines = [Slots(token_s, LENGTHS[lengths], number) for number in range(ENGINES)]
        loop = Timed(configuration(Path(place), steps, each * SLOTS * ENGINES, behind), engines)
        done = loop.train(options.ratio * token_s / (SLOTS * ENGINES))
    first, last = done[FIRST][0], done[-1][2]
    used = [each for engine in engines for each in engine.used]
    busy = sum(max(0.0, min(end, last) - max(begin, first)) for begin, end in used)
    if options.events:
        show(done, engines)
    for engine in engines:
        engine.end()
    waits = sum(there - began for began, there, _ in done[FIRST:]) / (last - first)
    free = 1 - busy / ((last - first) * SLOTS * ENGINES)
    return waits, free, statistics.mean(loop.staleness[FIRST:])


def show(done: list[tuple[float, float, float]], engines: list[Slots]) -> None:
    """In seconds from the first step that counts."""
    start = done[FIRST][0]
    lines = []
    for step, (began, there, published) in enumerate(done, 1):
        lines += [(began, f"trainer waits for batch {step}"), (there, f"trainer has batch {step}")]
        lines += [(published, f"trainer has published {step}")]
    for number, engine in enumerate(engines):
        for version, at in engine.taken:
            lines.append((at, f"    engine {number} has weights {version}"))
        changes = sorted([(b, 1) for b, _ in engine.used] + [(e, -1) for _, e in engine.used])
        count, said = 0, -1
        for at, change in changes:
            count += change
            # A line when all, none or less than half are in use: one for each text is too many.
            level = SLOTS if count == SLOTS else 0 if count == 0 else SLOTS // 2
            if level != said and (level != SLOTS // 2 or count < SLOTS // 2):
                said = level
                lines.append((at, f"    engine {number}: {count} slots in use"))
    for at, text in sorted(lines):
        if start <= at:
            print(f"{at - start:8.3f} {text}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.rl_idle", description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="of the engines for a batch")
    parser.add_argument("--ratio", type=float, default=1.0, help="of the trainer's to that")
    parser.add_argument("--lengths", nargs="+", default=[*LENGTHS], choices=LENGTHS)
    parser.add_argument("--each", type=int, nargs="+", default=[4, 16], help="samples for a slot")
    parser.add_argument("--max-async", type=int, nargs="+", default=[1, 2, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--events", action="store_true")
    options = parser.parse_args(argv)
    print("| lengths | samples for a slot | max_async | trainer waits | slots free | staleness |")
    print("|---|---|---|---|---|---|")
    for case in itertools.product(options.lengths, options.each, options.max_async):
        rounds = [measure(options, *case) for _ in range(options.rounds)]
        cells = []
        for values in zip(*rounds, strict=True):
            middle, low, high = statistics.median(values), min(values), max(values)
            cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
        print(f"| {' | '.join([*map(str, case), *cells])} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
