"""The order in which a run requests its tasks. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kempner.extensions.rl.orchestrate.groups import SampleGroup, TaskPlace

_State = dict[str, Any]
SKIPPED_TASKS = 10_000  # consecutive tasks of an environment that may be skipped


class Curriculum:
    """The order of tasks. In any prefix of it, each environment has its share to within one task.
    Prompts that prove too easy or too hard are left out afterwards."""

    def __init__(
        self,
        weights: Mapping[str, float],
        bounds: tuple[float, float],
        key: Callable[[str, int], str],
        say: Callable[[str], None],
    ) -> None:
        """`weights`: of each environment, by label; `bounds`: of the mean reward of prompts to
        keep; `key(label, number)`: the prompt of a task."""
        total = sum(weights.values())
        self._shares = {label: weight / total for label, weight in weights.items() if weight}
        self._bounds, self._key, self._say = bounds, key, say
        self._filters = bounds != (0.0, 1.0)
        self._place = 0
        self._due = dict.fromkeys(self._shares, 0.0)  # tasks due to each environment
        self._number = dict.fromkeys(self._shares, 0)  # of its next task
        self._out: dict[str, set[str]] = {label: set() for label in self._shares}

    def next(self) -> TaskPlace:
        for label, share in self._shares.items():
            self._due[label] += share
        label = max(self._due, key=lambda each: self._due[each])
        place = TaskPlace(self._place, label, self._wanted(label))
        self._place += 1
        # Fractional shares are kept, so that any prefix is right to within one task.
        self._due[label] -= 1
        self._number[label] = place.number + 1
        return place

    def _wanted(self, label: str) -> int:
        number = self._number[label]
        # Without bounds, do not make a task merely for its key.
        if not self._filters:
            return number
        for each in range(number, number + SKIPPED_TASKS):
            if self._key(label, each) not in self._out[label]:
                return each
        self._say(f"{label}: rl.solve_rate leaves none of its prompts; all are asked again")
        self._out[label].clear()
        return number

    def learn(self, groups: list[SampleGroup]) -> None:
        """Leave out prompts that these groups show to be too easy or too hard."""
        low, high = self._bounds
        for group in groups:
            rewards = group.rewards
            if self._filters and rewards and not low <= sum(rewards) / len(rewards) <= high:
                self._out.setdefault(group.at.env, set()).add(group.key)

    # --- a part of the checkpoint ---

    def state(self) -> _State:
        out = {label: sorted(keys) for label, keys in self._out.items() if keys}
        return {"place": self._place, "due": self._due, "number": self._number, "out": out}

    def load(self, state: _State) -> None:
        """Restore the state. Changed weights apply from now on; a new environment begins with
        its first task."""
        self._place = state["place"]
        for label in self._shares:
            self._due[label] = state["due"].get(label, 0.0)
            self._number[label] = state["number"].get(label, 0)
            self._out[label] = set(state["out"].get(label, []))
