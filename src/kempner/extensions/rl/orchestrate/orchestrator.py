"""The loop of a run: hands versions of the weights to the engines, collects groups, and hands
batches to the trainer. No torch.

In synchronous training (max_async = 0), a batch depends only on the state and the weights: its
tasks are a prefix of the order, extended by one task for each unusable group, each request has its
own seed, and nothing is counted in order of arrival.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any

from kempner.extensions.rl.config import LossConfig, RlConfig, SamplingConfig
from kempner.extensions.rl.engines.client import Closed, Flight
from kempner.extensions.rl.engines.router import Router
from kempner.extensions.rl.environments.opening import Tasks
from kempner.extensions.rl.exchange import (
    AGAIN_S,
    DISK_S,
    Batch,
    Beat,
    ExchangeStart,
    ExchangeState,
    RolloutExchange,
)
from kempner.extensions.rl.orchestrate import packing
from kempner.extensions.rl.orchestrate.batches import (
    Failed,
    Groups,
    batches_ahead,
    is_wanted,
)
from kempner.extensions.rl.orchestrate.curriculum import Curriculum
from kempner.extensions.rl.orchestrate.groups import SampleGroup, TaskPlace
from kempner.extensions.rl.orchestrate.mismatch import Mismatch
from kempner.extensions.rl.orchestrate.rollout import RolloutSampler
from kempner.extensions.rl.samples import SampleLog, mean_or_zero, reward_figures
from kempner.jobs.records import results

if TYPE_CHECKING:
    from kempner.train.sections import RunConfig

VERSION_POLL_S = 0.02  # between two checks for a new version
TIDY_S = 1.0
RL_TASKS = "rl.env"  # names its evaluations among those of a run


class Orchestrator:
    def __init__(
        self,
        cfg: RunConfig,
        exchange: RolloutExchange,
        envs: Mapping[str, Tasks],
        curriculum: Curriculum,
        sampler: RolloutSampler,
        router: Router,
        say: Callable[[str], None],
        stop: threading.Event,
    ) -> None:
        self._cfg, self._exchange, self._envs = cfg, exchange, envs
        self._sampler, self._router, self._say, self._stop = sampler, router, say, stop
        self._curriculum, self._beat = curriculum, Beat(exchange, "orchestrator")
        # Not SimpleQueue: up to Python 3.12 its get(timeout) may wait for ever after a signal.
        self._come: Queue[tuple[Flight, SampleGroup | Exception]] = Queue()
        self._again: deque[TaskPlace] = deque()  # requested before, but not trained
        self._flying: dict[Flight, TaskPlace] = {}  # requested, but not arrived
        self._cancelled = 0  # groups since the last batch
        self._mismatch = Mismatch(exchange, router, cfg.of(SamplingConfig).temperature)
        self._groups = Groups(cfg.of(RlConfig), cfg.of(SamplingConfig).max_tokens, say)
        self._step = 0  # of the last batch handed over
        self._newest = -1  # version
        self._evaluated = -1  # version
        self._tidied = 0.0

    def run(self) -> None:
        """Run until the last version is evaluated, or until stopped. Raises Closed, Failed,
        NoEngines, Rejected."""
        while (start := self._exchange.started()) is None:
            self._pause()
        self._begin(start)
        while self._step < self._cfg.train.max_steps:
            self._look()
            self._mismatch.look()
            self._take()
            if not is_wanted(self._newest, self._step):
                continue
            groups = self._groups.chosen(self._step + 1, self._ahead(), len(self._flying))
            self._ask_again(self._groups.again)
            self._groups.again = []
            if groups is not None:
                self._hand_over(groups)
        while self._newest < self._cfg.train.max_steps:
            self._look()
            self._pause()

    def _begin(self, start: ExchangeStart) -> None:
        self._data_ranks, self._step = start.data_ranks, start.step
        self._log = SampleLog(Path(self._cfg.run.dir), start.step, self._say)
        if self._cfg.of(RlConfig).eval_interval:
            # An attempt that got past the checkpoint has evaluated weights that are lost.
            done = results.evaluated_steps(Path(self._cfg.run.dir), RL_TASKS)
            self._evaluated = max((each for each in done if each <= start.step), default=-1)
        if start.state is not None:
            self._curriculum.load(start.state["curriculum"])
            self._groups.tokens_of_group = start.state["tokens_of_group"]
            # An environment may have been removed from the configuration since the checkpoint.
            pending = [TaskPlace(*each) for each in start.state["pending"]]
            self._again.extend(each for each in pending if each.env in self._envs)
        self._groups.new_target()
        self._say(f"step {start.step} is loaded; {start.data_ranks} data rank(s)")

    def _state(self) -> ExchangeState:
        """Return the state after the batch. Groups that wait for a later batch, like
        those in flight, are requested again after a resume, from newer weights: samples
        are not checkpointed."""
        # Tasks without a usable group are finished: others were requested in their place.
        waiting = [*self._flying.values(), *self._groups.carried, *self._again]
        return {
            "curriculum": self._curriculum.state(),
            "pending": sorted(list(each) for each in waiting),
            "tokens_of_group": self._groups.tokens_of_group,
        }

    def _pause(self) -> None:
        self._beat.alive()
        if self._stop.wait(VERSION_POLL_S):
            raise Closed

    # --- versions ---

    def _look(self) -> None:
        """Look for a new version, and act on it."""
        self._beat.alive()
        if self._stop.is_set():
            raise Closed
        newest = self._exchange.newest()
        if newest is None or newest <= self._newest:
            self._tidy()
            return
        self._newest = newest
        # First of all: engines load the version while this thread tidies up.
        self._router.offer(newest, self._exchange.update(newest))
        # These weights were trained on them: no rank reads these batches again.
        for step in range(newest, 0, -1):
            # Older ones were removed with an earlier version.
            if not (folder := self._exchange.rollouts(step)).exists():
                break
            shutil.rmtree(folder, ignore_errors=True)
        if self._evaluation_due():
            self._evaluate(newest)

    def _evaluation_due(self) -> bool:
        """Return whether to evaluate: before the first step, at each new interval, and
        at the end."""
        interval, newest = self._cfg.of(RlConfig).eval_interval, self._newest
        if not interval or newest == self._evaluated:
            return False
        last = newest == self._cfg.train.max_steps
        return last or newest // interval > self._evaluated // interval

    def _tidy(self) -> None:
        """Remove versions that no engine reads or will read: a starting engine reads the newest
        directory. Versions in use are in the engines' memory."""
        if time.monotonic() < self._tidied + TIDY_S:
            return
        self._tidied = time.monotonic()
        there = {
            int(manifest.parent.name[1:]): json.loads(manifest.read_text())
            for manifest in self._exchange.weights.glob("v*/manifest.json")
        }
        directories = [n for n, facts in there.items() if facts["transport"] == "directory"]
        for number in there.keys() - {max(directories, default=-1), *self._router.reading()}:
            if number < self._newest:
                folder = self._exchange.version(number)
                (folder / "manifest.json").unlink()  # first, so that nobody begins to read it
                shutil.rmtree(folder, ignore_errors=True)

    def _evaluate(self, version: int) -> None:
        """Evaluate, greedily, on tasks that training never sees. Newer weights wait until
        it is done. A sample without a reward counts as 0: failures of the judge must not
        raise the score."""
        answers: Queue[tuple[str, float | None] | Exception] = Queue()

        def work(env: Tasks, number: int) -> None:
            try:
                reward = self._sampler.evaluate(env, tasks[env.label][number], version)
                answers.put((env.label, reward))
            except Exception as error:
                answers.put(error)

        envs = [env for env in self._envs.values() if env.cfg.use != "train"]
        tasks = {env.label: env.evaluation(self._cfg.of(RlConfig).eval_samples) for env in envs}
        for env in envs:
            for number in range(len(tasks[env.label])):
                threading.Thread(target=work, args=(env, number), daemon=True).start()
        rewards: dict[str, list[float | None]] = {}
        for _ in range(sum(map(len, tasks.values()))):
            label, reward = self._next_of(answers)
            rewards.setdefault(label, []).append(reward)
        figures = {
            label: mean_or_zero([each or 0.0 for each in all_]) for label, all_ in rewards.items()
        }
        figures |= {f"{label}/failed": float(all_.count(None)) for label, all_ in rewards.items()}
        folder = Path(self._cfg.run.dir)
        self._write(
            f"evaluation of step {version}",
            lambda: results.record_result(folder, version, RL_TASKS, figures),
        )
        text = ", ".join(f"{label} {value:.3f}" for label, value in figures.items())
        self._say(f"step {version}: evaluation: {text or 'no rewards'}")
        self._evaluated = version

    def _next_of(self, queue: Queue[Any]) -> Any:
        """Wait for the next item; re-raises an exception of a thread."""
        while True:
            self._beat.alive()
            if self._stop.is_set():
                raise Closed
            try:
                result = queue.get(timeout=VERSION_POLL_S)
            except Empty:
                continue
            if isinstance(result, Exception):
                raise result
            return result

    # --- groups and batches ---

    def _ahead(self) -> int:
        return batches_ahead(
            self._cfg.of(RlConfig), self._newest, self._step, self._cfg.train.max_steps
        )

    def _ask_again(self, places: Sequence[TaskPlace]) -> None:
        """Put dropped tasks first in line, so that none is lost and slow ones are not
        replaced by others."""
        self._again.extendleft(reversed(places))

    def _cancel(self) -> None:
        """Cancel the generation of groups that are too old for any batch."""
        least = self._groups.least(self._step + 1)
        old = [each for each in self._flying if each.version is not None and each.version < least]
        self._ask_again([self._flying.pop(each) for each in old])
        self._cancelled += len(old)
        for each in old:
            each.cancel()

    def _take(self) -> None:
        """Request all groups that may be requested, and take those that have arrived."""
        # In asynchronous training an engine keeps working while another one loads new weights.
        least = max(0, self._newest - (self._cfg.of(RlConfig).max_async > 0))
        versions = [each.version for each in self._flying if each.version is not None]
        late = sum(version < self._newest for version in versions)
        for _ in range(self._groups.wanted(self._ahead(), len(self._flying), late)):
            at = self._again.popleft() if self._again else self._curriculum.next()
            flight = Flight()
            self._flying[flight] = at
            threading.Thread(target=self._work, args=(flight, at, least), daemon=True).start()
        try:
            flight, result = self._come.get(timeout=VERSION_POLL_S)
            while True:
                # _cancel() has already put the task of a cancelled group back in line.
                if not flight.cancelled:
                    if isinstance(result, Exception):
                        raise result
                    del self._flying[flight]
                    self._groups.add(result)
                flight, result = self._come.get_nowait()
        except Empty:
            pass

    def _work(self, flight: Flight, at: TaskPlace, least: int) -> None:
        result: SampleGroup | Exception
        try:
            result = self._sampler.group(at, self._cfg.of(RlConfig).group_size, least, flight)
        except Exception as error:
            result = error
        self._come.put((flight, result))

    def _hand_over(self, groups: list[SampleGroup]) -> None:
        loss, most = self._cfg.of(LossConfig), self._cfg.of(SamplingConfig).max_tokens
        self._step += 1
        come, stale = self._groups.next_batch(groups)
        self._curriculum.learn(come)
        metrics = reward_figures(come, groups, self._step, stale, self._cancelled)
        metrics |= self._router.figures() | self._mismatch.take()
        self._cancelled = 0
        # Before _state(), because tasks whose groups are dropped here belong to this checkpoint.
        self._cancel()
        arrays = packing.pack_batch(
            [each.sample for group in groups for each in group.scored],
            [each for group in groups for each in group.advantages(loss, most)],
            [each.oldest for group in groups for each in group.scored],
            self._cfg.train.seq_len,
            self._data_ranks,
            self._cfg.train.micro_batch or 1,
        )
        tokens = packing.tokens_that_count(arrays)
        # Without a sample of the newest weights, mismatch.py measures the mismatch separately.
        newest = max(each.oldest for group in groups for each in group.scored)
        batch = Batch(self._step, tokens, metrics, self._state(), scored=newest < self._step - 1)

        def write() -> None:
            packing.write_rank_files(self._exchange.rollouts(batch.step), arrays)
            # Last, because the trainer reads the rank files as soon as it sees the batch.
            self._exchange.hand_over(batch)

        self._write(f"batch of step {self._step}", write)
        if batch.scored:
            self._mismatch.add(batch.step, arrays[0])
        self._log.add(self._step, groups)

    def _write(self, what: str, write: Callable[[], None]) -> None:
        """Write, and retry on a full disk, which may be cleared: do not throw samples
        away at once."""
        until, waits = time.monotonic() + DISK_S, False
        # After one wait, take everything that has arrived meanwhile.
        while True:
            try:
                write()
                break
            except OSError as error:
                if time.monotonic() > until:
                    raise Failed(f"the {what}: {error}") from None
                if not waits:
                    self._beat.full()
                    self._say(f"the {what} cannot be written: {error}; waiting for room")
                waits = True
            self._beat.alive()
            if self._stop.wait(AGAIN_S):
                raise Closed
        if waits:
            self._beat.room()
            self._say(f"the {what} is written")
