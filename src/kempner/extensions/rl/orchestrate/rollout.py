"""Rollouts: from a task to scored samples, through engines, environments and rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kempner.config.option import ConfigError
from kempner.extensions.generate.config import Sampling
from kempner.extensions.rl.config import RlConfig, SamplingConfig
from kempner.extensions.rl.engines.client import Flight, GivenUp
from kempner.extensions.rl.engines.router import Router
from kempner.extensions.rl.environments.opening import Tasks
from kempner.extensions.rl.environments.protocol import Score, Task
from kempner.extensions.rl.environments.sandbox.scorer import NoRewards, Scorer
from kempner.extensions.rl.orchestrate.conversation import Dialogue, DialogueWriter
from kempner.extensions.rl.orchestrate.groups import Rollout, SampleGroup, TaskPlace, seed_of

if TYPE_CHECKING:
    from kempner.train.sections import RunConfig


class RolloutSampler:
    """A sampler of groups. Its methods wait for engines and rewards; each group has
    a separate thread."""

    def __init__(
        self,
        cfg: RunConfig,
        envs: Mapping[str, Tasks],
        writer: DialogueWriter,
        router: Router,
        scorer: Scorer | NoRewards,
        say: Callable[[str], None],
    ) -> None:
        self._envs, self._writer, self._router, self._scorer = envs, writer, router, scorer
        self._sampling, self._seq_len, self._seed = (
            cfg.of(SamplingConfig),
            cfg.train.seq_len,
            cfg.of(RlConfig).seed,
        )
        self._say = say
        self._said: set[str] = set()  # environments whose failures have been reported

    def group(
        self, at: TaskPlace, size: int, least: int, flight: Flight | None = None
    ) -> SampleGroup:
        """Return `size` samples of one task, by weights of version `least` or later; none if
        engines have lost it too often, or if it is broken: a task is the user's code and data."""
        env = self._envs[at.env]
        try:
            task = env.task(at.number)
            # A trial: an error here is known to come from this task alone.
            self._writer.prompt(task)
        # No task at all is a configuration error, and ends the run.
        except ConfigError:
            raise
        except Exception as error:
            self._tell(env, f"task {at.number} is broken: {type(error).__name__}: {error}")
            return SampleGroup(at, "", "", [], broken=True)
        try:
            # _converse() gives each turn its own seed.
            sampling = self._sampling.sampling(0)
            rollouts = self._converse(env, task, size, sampling, at.place, least, flight)
        except GivenUp as error:
            self._say(f"{env.label}: task {task.number} is given up: {error}")
            return SampleGroup(at, task.key, prompt_text(task), [], given_up=True)
        return SampleGroup(at, task.key, prompt_text(task), rollouts)

    def evaluate(self, env: Tasks, task: Task | Exception, least: int) -> float | None:
        """Return the reward of the most likely answer; None if it has none, for example because the
        task raised an error."""
        try:
            if isinstance(task, Exception):
                raise task
            self._writer.prompt(task)
        except Exception as error:
            self._tell(env, f"a task is broken: {type(error).__name__}: {error}")
            return None
        greedy = Sampling(
            temperature=0.0, max_tokens=self._sampling.max_tokens, stop=self._sampling.stop
        )
        try:
            # Any place will do: it only determines the seed, which greedy text does not use.
            rollouts = self._converse(env, task, 1, greedy, 0, least)
        except GivenUp as error:
            self._say(f"{env.label}: task {task.number} is given up: {error}")
            return None
        return rollouts[0].reward if rollouts else None

    def _converse(
        self,
        env: Tasks,
        task: Task,
        count: int,
        sampling: Sampling,
        place: int,
        least: int,
        flight: Flight | None = None,
    ) -> list[Rollout]:
        """Run the conversations. Each turn is one request, for all unfinished conversations. A turn
        begins only if there is room for all of it; if there never is, the result has no samples."""
        prompt = self._writer.prompt(task)
        if not self._room(prompt):
            self._tell(env, f"task {task.number}: its prompt of {len(prompt)} tokens is too long")
            return []
        talks = [Dialogue(task.messages, prompt) for _ in range(count)]
        why: dict[int, str] = {}  # reasons for missing rewards
        turn, going = 0, talks
        while going:
            turn_sampling = replace(sampling, seed=seed_of(self._seed, place, turn))
            if turn == 0:
                # One prompt with many samples, so that the engine reads it once.
                texts = self._router.ask([prompt], count, turn_sampling, least, flight)[0]
            else:
                tokens = [talk.tokens for talk in going]
                texts = [
                    each[0] for each in self._router.ask(tokens, 1, turn_sampling, least, flight)
                ]
            for talk, text in zip(going, texts, strict=True):
                talk.say(text, self._writer.text(text.token_ids, sampling.stop))
            # A turn cut off at max_tokens gets no reply.
            going = [talk for talk in going if talk.open]
            going = self._replies(env, task, going, why)
            turn += 1
        valid_talks = [talk for talk in talks if id(talk) not in why]
        scores = self._scorer.score(env, task, [talk.messages for talk in valid_talks])
        rewards = {id(talk): score for talk, score in zip(valid_talks, scores, strict=True)}
        rollouts = []
        for talk in talks:
            score = rewards.get(id(talk)) or Score(None, why.get(id(talk), ""))
            if score.reward is None:
                self._tell(env, score.why)
            rollouts.append(
                Rollout(talk.sample, talk.text, score.reward, talk.truncated, talk.oldest)
            )
        return rollouts

    def _replies(
        self, env: Tasks, task: Task, talks: Sequence[Dialogue], why: dict[int, str]
    ) -> list[Dialogue]:
        """Add the environment's replies; returns the conversations that continue."""
        replies = self._scorer.reply(env, task, [talk.messages for talk in talks])
        going = []
        for talk, reply in zip(talks, replies, strict=True):
            if isinstance(reply, Score):
                why[id(talk)] = reply.why
            elif reply is not None:
                tokens = self._writer.reply(task, reply, talk.tokens[-1])
                # Without room for another turn the reply is left out: it may exceed the row, and a
                # scored conversation ends with the model's own words.
                if self._room([*talk.tokens, *tokens]):
                    talk.hear(reply, tokens)
                    going.append(talk)
                else:
                    talk.truncated = True
        return going

    def _room(self, tokens: Sequence[int]) -> bool:
        return len(tokens) + self._sampling.max_tokens <= self._seq_len

    def _tell(self, env: Tasks, why: str) -> None:
        """Report a failure once per environment: the metrics count them."""
        if env.label not in self._said:
            self._said.add(env.label)
            self._say(f"{env.label}: a sample without a reward: {why or 'no reason given'}")


def prompt_text(task: Task) -> str:
    """Return the prompt as human-readable text."""
    if isinstance(task.prompt, str):
        return task.prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in task.prompt)
