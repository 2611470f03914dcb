"""The orchestrator in this process, between fake engines and a trainer that only publishes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from kempner.config.loading import load_config_files
from kempner.extensions.generate.load import Words
from kempner.extensions.rl.environments.opening import Tasks
from kempner.extensions.rl.environments.protocol import Message, Reply, Score, Task
from kempner.extensions.rl.exchange import Batch, ExchangeStart, ExchangeState, RolloutExchange
from kempner.extensions.rl.opening import open_curriculum, open_parts, open_router
from kempner.extensions.rl.orchestrate.conversation import DialogueWriter
from kempner.extensions.rl.orchestrate.orchestrator import Orchestrator
from kempner.extensions.rl.orchestrate.rollout import RolloutSampler
from kempner.train.checks import combination_problems
from kempner.train.sections import RunConfig
from tests.fake_engine import TOKEN, FakeEngine

RANKS = 2
OWN = -0.75  # log-probabilities by the trainer
ENVIRONMENTS = Path(__file__).with_name("rl_envs.py")


class InThisProcess:
    """A scorer without processes."""

    def score(self, env: Tasks, task: Task, talks: Sequence[Sequence[Message]]) -> list[Score]:
        return [self._score(env, task, talk) for talk in talks]

    def _score(self, env: Tasks, task: Task, messages: Sequence[Message]) -> Score:
        try:
            return Score(env.environment.judge(task, list(messages)))
        except RuntimeError as error:
            return Score(None, str(error))

    def reply(
        self, env: Tasks, task: Task, talks: Sequence[Sequence[Message]]
    ) -> list[Reply | None]:
        return [self._reply(env, task, talk) for talk in talks]

    def _reply(self, env: Tasks, task: Task, messages: Sequence[Message]) -> Reply | None:
        said = sum(m["role"] == "assistant" for m in messages)
        return None if said >= env.environment.turns else env.environment.reply(task, messages)


class Handed(NamedTuple):
    """A batch as the trainer gets it."""

    batch: Batch
    ranks: list[dict[str, NDArray[Any]]]

    def same(self, other: Handed) -> bool:
        """In all that a training depends on."""
        plain = [replace_figures(each.batch) for each in (self, other)]
        pairs = zip(self.ranks, other.ranks, strict=True)
        return plain[0] == plain[1] and all(
            np.array_equal(mine[name], theirs[name]) for mine, theirs in pairs for name in mine
        )


def replace_figures(batch: Batch) -> Batch:
    timed = ("engine", "update_seconds")
    kept = {name: v for name, v in batch.metrics.items() if not name.startswith(timed)}
    return batch._replace(metrics=kept)


def config(folder: Path, env: str = "Digits", steps: int = 3, **rl: Any) -> RunConfig:
    values: dict[str, Any] = {"tokenizer": "bytes", "group_size": 4, "batch_samples": 12}
    values |= {"max_async": 0} | rl
    words = [f"--rl.{key}={value}" for key, value in values.items()]
    words += [f"--run.dir={folder / 'run'}", f"--train.max_steps={steps}", "--train.seq_len=96"]
    words += ["--model.vocab_size=257", "--rl.sampling.max_tokens=8", "--train.micro_batch=2"]
    file = folder / "rl.toml"
    file.write_text(f'[[rl.env]]\nid = "{ENVIRONMENTS}:{env}"\nname = "{env}"\nuse = "both"\n')
    return load_config_files(RunConfig, [file], words, check=combination_problems)


class Loop:
    """One attempt. Its trainer publishes a version for each batch, after `trains` seconds."""

    def __init__(
        self, cfg: RunConfig, engines: Sequence[FakeEngine], start: int = 0,
        state: ExchangeState | None = None, trains: float = 0.0,
    ) -> None:  # fmt: skip
        self.cfg, self.start, self.state, self.trains = cfg, start, state, trains
        self.exchange = RolloutExchange(cfg.run.dir)
        for folder in (self.exchange.weights, self.exchange.engines):
            folder.mkdir(parents=True, exist_ok=True)
        self.exchange.token.write_text(TOKEN)
        self.lines: list[str] = []
        self.handed: list[Handed] = []
        self.straight: set[int] = set()  # versions that are no directories
        self.seen: list[set[int]] = []  # versions that are there after each step
        self.error: Exception | None = None
        self.stop = threading.Event()
        for number, engine in enumerate(engines):
            self.place(number, engine)

    def place(self, number: int, engine: FakeEngine) -> None:
        (self.exchange.engines / f"engine-{number}").write_text(f"{engine.url}\n")

    def publish(self, version: int) -> None:
        transport = "direct" if version in self.straight else "directory"
        self.exchange.version(version).mkdir(exist_ok=True)
        self.exchange.publish(version, {"version": version, "transport": transport})

    def run(self, limit: float = 60.0) -> list[Handed]:
        """All batches; raises what has ended the orchestrator."""
        self.publish(self.start)
        self.exchange.begin(ExchangeStart(self.start, RANKS, self.state))
        parts = open_parts(self.cfg)
        thread = threading.Thread(target=self._orchestrate, args=parts, daemon=True)
        thread.start()
        until = time.monotonic() + limit
        for step in range(self.start + 1, self.cfg.train.max_steps + 1):
            while (batch := self.exchange.batch(step)) is None and thread.is_alive():
                assert time.monotonic() < until, self.lines
                time.sleep(0.01)
            if batch is None:
                break
            names = [f"rank_{rank}.safetensors" for rank in range(RANKS)]
            files = [load_file(self.exchange.rollouts(step) / name) for name in names]
            self.handed.append(Handed(batch, files))
            time.sleep(self.trains)
            if batch.scored:
                self.exchange.hand_back(step, np.full(self.cfg.train.seq_len, OWN, np.float32))
            manifests = self.exchange.weights.glob("v*/manifest.json")
            self.seen.append({int(path.parent.name[1:]) for path in manifests})
            self.publish(step)
        thread.join(max(0.0, until - time.monotonic()))
        assert not thread.is_alive(), self.lines
        if self.error:
            raise self.error
        return self.handed

    def _orchestrate(self, envs: dict[str, Tasks], words: Words) -> None:
        router = open_router(self.cfg, self.exchange, words.ends, self.lines.append)
        scorer: Any = InThisProcess()
        sampler = RolloutSampler(
            self.cfg, envs, DialogueWriter(words), router, scorer, self.lines.append
        )
        curriculum = open_curriculum(self.cfg, envs, self.lines.append)
        router.start()
        try:
            parts = self.exchange, envs, curriculum, sampler, router
            Orchestrator(self.cfg, *parts, self.lines.append, self.stop).run()
        except Exception as error:
            self.error = error
        finally:
            router.close()
