"""A group: the samples of one prompt, their rewards and advantages. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kempner.extensions.rl.config import LossConfig
from kempner.extensions.rl.orchestrate.packing import Sample

SAME = 1e-6  # rewards that differ by less count as equal


class TaskPlace(NamedTuple):
    """A task's place in the order in which a run requests tasks."""

    place: int  # from 0
    env: str  # label of its environment
    number: int  # of the task in its environment


class Rollout(NamedTuple):
    """One sample of a prompt."""

    sample: Sample
    text: str  # the model's last turn
    reward: float | None  # None: none available
    truncated: bool  # it had no room to end
    oldest: int  # version of the oldest weights that drew its tokens

    @property
    def length(self) -> int:
        """Number of tokens that the model has sampled."""
        return int(self.sample.sampled.sum())


@dataclass(frozen=True)
class SampleGroup:
    at: TaskPlace
    key: str  # of the prompt
    prompt: str
    rollouts: Sequence[Rollout]  # all of them
    given_up: bool = False  # engines have lost it too often
    broken: bool = False  # its task has raised an error

    @property
    def scored(self) -> list[Rollout]:
        """Samples with a reward."""
        return [each for each in self.rollouts if each.reward is not None]

    @property
    def rewards(self) -> list[float]:
        return [each.reward for each in self.rollouts if each.reward is not None]

    @property
    def failed(self) -> bool:
        """True if there are too few rewards to compare."""
        return len(self.rewards) < 2

    @property
    def flat(self) -> bool:
        """True if all rewards are equal, so that the group teaches nothing."""
        return max(self.rewards) - min(self.rewards) < SAME

    @property
    def oldest(self) -> int:
        return min((each.oldest for each in self.scored), default=0)

    @property
    def tokens(self) -> int:
        return sum(each.length for each in self.scored)

    def advantages(self, loss: LossConfig, max_tokens: int) -> list[float]:
        """Return the advantage of each scored sample: its reward, minus the penalty on its length,
        minus the mean of the group (GRPO, arXiv:2402.03300; without the division by the deviation
        arXiv:2503.20783). A flat group has advantages 0, whatever its lengths: it would only teach
        brevity. With loss.mask_truncated, a sample without room to end counts only in the mean
        (overlong filtering, arXiv:2503.14476)."""
        if self.flat:
            return [0.0] * len(self.rewards)
        lengths = np.array([each.length for each in self.scored])
        rewards = np.array(self.rewards) - loss.length_penalty * lengths / max_tokens
        # The penalty comes first, so that the advantages of a group still sum to 0.
        found = rewards - rewards.mean()
        # The penalty may have made different rewards equal.
        if loss.name == "grpo" and (deviation := rewards.std()) > SAME:
            found = found / deviation
        cut = [loss.mask_truncated and each.truncated for each in self.scored]
        return [0.0 if out else float(each) for out, each in zip(cut, found, strict=True)]


def seed_of(seed: int, *numbers: int) -> int:
    """Derive a 63-bit seed for one request."""
    # Engines store a seed as a signed 64-bit integer.
    words = " ".join(map(str, (seed, *numbers)))
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big") >> 1
