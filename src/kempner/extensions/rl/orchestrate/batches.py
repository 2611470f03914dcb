"""Choice of the groups of a batch from those that have arrived. No torch, no threads.

A group without variance has no gradient. It is replaced before the batch is cut, so that a token
weighs the same in all steps. A batch is smaller than requested only if groups with fewer than two
rewards use up rl.refill, which the log reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kempner.extensions.rl.config import RlConfig
from kempner.extensions.rl.orchestrate.groups import SampleGroup, TaskPlace

SOON = 2  # batches filled at a time: one is trained meanwhile


class Failed(Exception):
    """The run cannot continue; the message says why."""


def is_wanted(newest: int, step: int) -> bool:
    """Return whether to hand over a batch after that of `step`: the trainer has no other one than
    that which it trains. Handed over earlier, samples would age in a queue."""
    return step - newest < SOON


def batches_ahead(rl: RlConfig, newest: int, step: int, last: int) -> int:
    """Return the number of batches after that of `step` that may be worked on while the newest
    weights are `newest`: groups requested now can be trained in each of them, up to step `last`."""
    return max(0, min(newest + 1 + rl.max_async, last) - step) if newest >= 0 else 0


class Groups:
    """Groups that have arrived, but are not trained yet. `ahead`: batches that may be worked on
    now; `flying`: groups that were requested and have not arrived."""

    def __init__(self, rl: RlConfig, max_tokens: int, say: Callable[[str], None]) -> None:
        self._rl, self._max_tokens, self._say = rl, max_tokens, say
        self._ready: list[SampleGroup] = []  # may be trained
        self._since: list[SampleGroup] = []  # all arrivals since the last batch
        self._flat: list[SampleGroup] = []  # of these, those without variance
        self._nothing = 0  # groups since the last batch that do not count toward the next one
        self._stale = 0  # too old, since the last batch
        self.again: list[TaskPlace] = []  # of stale groups, to be requested again
        self._target = 0  # groups of the next batch
        self.tokens_of_group = 0.0  # mean number of sampled tokens; part of the state

    @property
    def carried(self) -> list[TaskPlace]:
        """Places of the groups that wait for a later batch."""
        return [group.at for group in self._ready]

    def new_target(self) -> None:
        """Set the number of groups of the next batch; with rl.batch_tokens, as many as it
        will probably take."""
        rl = self._rl
        if rl.batch_tokens is None:
            assert rl.batch_samples is not None
            self._target = rl.batch_samples // rl.group_size
        else:
            # The first groups count as full; _enough() requests more if they are shorter.
            tokens = self.tokens_of_group or rl.group_size * self._max_tokens
            self._target = math.ceil(rl.batch_tokens / tokens)

    def wanted(self, ahead: int, flying: int, late: int = 0) -> int:
        """Return the number of groups to request. `late`: the number in flight that began
        with older weights than the newest. An extra group is requested for each, so that
        batches do not wait for long answers, and groups of ordinary length do not age in a
        queue, however large rl.max_async."""
        there = len(self._ready) + flying
        # Late groups are requested twice, but the total must never exceed what can be trained.
        new = min(ahead, SOON) * self._target - (there - late)
        return max(0, min(new, ahead * self._target - there, self._left(ahead, there - late)))

    def _left(self, ahead: int, there: int) -> int:
        """Return the number of groups that rl.refill still allows, in addition to `there` groups
        for the batches being filled now."""
        spare = math.ceil((self._rl.refill - 1) * self._target)
        return min(ahead, SOON) * self._target + spare - there - self._nothing

    def least(self, step: int) -> int:
        """Return the oldest version whose samples step `step` may train."""
        return step - 1 - self._rl.max_async

    def add(self, group: SampleGroup) -> None:
        self._since.append(group)
        if group.failed or group.flat:
            self._nothing += 1
            self._flat += [] if group.failed else [group]
        else:
            self._ready.append(group)

    def chosen(self, step: int, ahead: int, flying: int) -> list[SampleGroup] | None:
        """Return the groups of the batch of `step`; None: not yet. Raises Failed."""
        least = self.least(step)
        fresh = [group for group in self._ready if group.oldest >= least]
        old = [group.at for group in self._ready if group.oldest < least]
        self._stale += len(old)
        self.again += old
        # In synchronous training all versions are equal, so this is the order of the tasks.
        self._ready = sorted(fresh, key=lambda group: (group.oldest, group.at.place))
        # The oldest weights whose samples this batch may train are not yet published.
        if ahead == 0:
            return None
        if (enough := self._enough()) is not None:
            return enough
        # Groups that are still coming may complete the batch.
        if flying or self._left(ahead, len(self._ready)) > 0:
            return None
        return self._filled(step, [group for group in self._flat if group.oldest >= least])

    def _enough(self) -> list[SampleGroup] | None:
        if len(self._ready) < self._target:
            return None
        least = self._rl.batch_tokens
        if least is None:
            return self._ready[: self._target]
        tokens = 0
        for number, group in enumerate(self._ready, 1):
            tokens += group.tokens
            if tokens >= least:
                return self._ready[:number]
        count = len(self._ready)
        # Too few tokens: estimate from these how many more groups to request.
        self._target = count + math.ceil((least - tokens) / (tokens / count))
        return None

    def _filled(self, step: int, flat: list[SampleGroup]) -> list[SampleGroup]:
        """Fill the batch when rl.refill is used up, with groups without variance: they do not
        affect the gradient, but their tokens count, so that the others do not weigh more than
        in other batches."""
        # By task order, not by arrival: a synchronous batch must not depend on timing.
        flat.sort(key=lambda group: group.at.place)
        groups = (self._ready + flat)[: self._target]
        if not groups:
            raise Failed(f"none of {len(self._since)} groups has two rewards; reasons are above")
        self._say(
            f"warning: step {step}: {len(self._ready)} of {self._target} groups have different "
            f"rewards after {len(self._since)} prompts (rl.refill); "
            f"{len(groups) - len(self._ready)} others fill the batch"
            + (f", which has only {len(groups)}" if len(groups) < self._target else "")
        )
        return groups

    def next_batch(self, groups: list[SampleGroup]) -> tuple[list[SampleGroup], int]:
        """Hand over these groups. Returns the groups that have arrived since the previous batch, in
        the order of the tasks, and the number that were too old."""
        used = {group.at.place for group in groups}
        self._ready = [group for group in self._ready if group.at.place not in used]
        come, stale = sorted(self._since, key=lambda group: group.at.place), self._stale
        tokens = [group.tokens for group in come if not group.failed]
        if tokens:
            self.tokens_of_group = sum(tokens) / len(tokens)
        self._since, self._flat, self._nothing, self._stale = [], [], 0, 0
        self.new_target()
        return come, stale
