"""`orchestrate.py --bench`: only the engines, with the prompts of the configuration. No torch."""

from __future__ import annotations

import json
import statistics
import threading
import time
from pathlib import Path
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any, NamedTuple

from kempner.extensions.rl.config import InferenceConfig, RlConfig
from kempner.extensions.rl.engines.client import Closed, Lost, NoEngines
from kempner.extensions.rl.engines.router import Router
from kempner.extensions.rl.orchestrate.curriculum import Curriculum
from kempner.extensions.rl.orchestrate.groups import SampleGroup
from kempner.extensions.rl.orchestrate.rollout import RolloutSampler
from kempner.jobs.report.tables import align_table
from kempner.jobs.system.files import write_atomic

if TYPE_CHECKING:
    from kempner.train.sections import RunConfig

MEASURE_ROUNDS = 3
FIRST_ENGINE_S = 600.0
RESULT = "bench-engines.json"


class Measured(NamedTuple):
    tokens: int
    prompts: int  # tokens of all prompts, counted once per sample
    seconds: float
    full: float  # tokens/s while all engines had more work than they could take

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Bench:
    def __init__(
        self,
        cfg: RunConfig,
        sampler: RolloutSampler,
        router: Router,
        curriculum: Curriculum,
        stop: threading.Event,
    ) -> None:
        self._cfg, self._sampler, self._router = cfg, sampler, router
        self._curriculum, self._stop = curriculum, stop

    def run(self) -> None:
        """Print a table, and write RUN/bench-engines.json. Raises Closed, Lost, NoEngines."""
        until = time.monotonic() + FIRST_ENGINE_S
        while not self._router.alive():
            if self._stop.wait(0.1):
                raise Closed
            if time.monotonic() > until:
                raise NoEngines(f"no engine after {FIRST_ENGINE_S:.0f} s")
        engines, rl = len(self._router.alive()), self._cfg.of(RlConfig)
        batch = max(1, (rl.batch_samples or 0) // rl.group_size)
        room = engines * self._cfg.of(InferenceConfig).resolved_slots
        # Six times the engines' capacity: they are full from the first sixth to the last.
        many = max(4 * batch, -(-6 * room // rl.group_size))
        self._measure(batch, room)  # the first run is slower
        alone, stream, read = [], [], self._tokens_read()
        # Alternating, so that a temporarily busy machine slows both alike.
        for _ in range(MEASURE_ROUNDS):
            alone.append(self._measure(batch, room))
            stream.append(self._measure(many, room))
        after = self._tokens_read()
        full = statistics.median(each.full for each in stream)
        losses = [1 - a.rate / b.full for a, b in zip(alone, stream, strict=True)]
        result: dict[str, Any] = {
            "engines": engines,
            "slots": self._cfg.of(InferenceConfig).resolved_slots,
            "groups_of_a_batch": batch,
            "group_size": rl.group_size,
            "tokens_per_s": full,
            "tokens_per_s_of_batches": statistics.median(each.rate for each in alone),
            "straggler_loss": statistics.median(losses),
            "length": sum(each.tokens for each in stream) / (many * rl.group_size * MEASURE_ROUNDS),
            "prefix_reuse": None,
        }
        prompts = sum(each.prompts for each in (*alone, *stream))
        if read is not None and after is not None:
            result["prefix_reuse"] = 1 - (after - read) / prompts
        self._say(result)

    def _tokens_read(self) -> int | None:
        """Return the prompt tokens read by all engines; None: one of them does not count."""
        counts = [engine.tokens_read() for engine in self._router.alive()]
        return None if None in counts else sum(each or 0 for each in counts)

    def _measure(self, count: int, room: int) -> Measured:
        """Measure `count` groups, all requested at the same time."""
        come: Queue[SampleGroup | Exception] = Queue()

        def work() -> None:
            try:
                # -1: any weights. pop() of a list is atomic, so each thread has a different place.
                come.put(self._sampler.group(at.pop(), self._cfg.of(RlConfig).group_size, -1))
            except Exception as error:
                come.put(error)

        at = [self._curriculum.next() for _ in range(count)]
        began = time.monotonic()
        for _ in range(count):
            threading.Thread(target=work, daemon=True).start()
        tokens = prompts = 0
        marks: list[tuple[float, int]] = []  # times at which the engines were full
        for number in range(1, count + 1):
            group = self._next(come)
            tokens += group.tokens
            prompts += sum(len(each.sample.tokens) - each.length for each in group.rollouts)
            remaining = (count - number) * self._cfg.of(RlConfig).group_size
            if number > count // 6 and remaining >= room:
                marks.append((time.monotonic(), tokens))
        if not tokens:
            raise Lost(f"no sample of {count} groups has come back: see the lines above")
        seconds = time.monotonic() - began
        full = tokens / seconds
        if len(marks) > 1:  # between two moments with equally many tokens in progress
            (first, few), (last, more) = marks[0], marks[-1]
            full = (more - few) / (last - first) if last > first else full
        return Measured(tokens, prompts, seconds, full)

    def _next(self, come: Queue[SampleGroup | Exception]) -> SampleGroup:
        while True:
            if self._stop.is_set():
                raise Closed
            try:
                result = come.get(timeout=0.1)
            except Empty:
                continue
            if isinstance(result, Exception):
                raise result
            return result

    def _say(self, result: dict[str, Any]) -> None:
        reuse = result["prefix_reuse"]
        rows = [
            ["engines", "slots", "tokens/s", "tokens/s, by batches", "lost to stragglers",
             "prompt tokens reused"],
            [
                str(result["engines"]), str(result["slots"]), f"{result['tokens_per_s']:,.0f}",
                f"{result['tokens_per_s_of_batches']:,.0f}", f"{result['straggler_loss']:.1%}",
                "-" if reuse is None else f"{reuse:.1%}",
            ],
        ]  # fmt: skip
        print(align_table(rows, 2, range(6)))
        path = Path(self._cfg.run.dir) / RESULT
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(result, indent=1) + "\n")
        print(f"written to {path}")
