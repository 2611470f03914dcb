"""Checkpoints of replicas: each replica saves its own, and all resume at the same step."""

from __future__ import annotations

import contextlib
import itertools
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kempner.checkpoint import commit, history
from kempner.checkpoint.checkpointer import Checkpointer
from kempner.checkpoint.choose import Choice
from kempner.checkpoint.format.reader import read_table
from kempner.checkpoint.history import Damaged
from kempner.jobs.system.files import name_of_step, step_of_name

if TYPE_CHECKING:
    from kempner.jobs.ranks.placement import World
    from kempner.train.replicas import Replicas

_Steps = dict[int, int]  # steps of a replica's checkpoints, with the number of replicas at each


class ReplicaCheckpointer(Checkpointer):
    """A checkpointer that lets an additional replica, which has no checkpoint, start from another
    one's: anchor, outer momentum and position are the same for all replicas."""

    def __init__(self, *parts: Any, world: World, replicas: Replicas) -> None:
        super().__init__(*parts)
        self._world, self._replicas = world, replicas

    def load(self, only: int | None = None) -> dict[str, Any] | None:
        self.wait()
        # Repeated if a replica finds its checkpoint damaged: all must load the same step.
        for attempt in itertools.count():
            all_steps = self.ranks.on_first(partial(self._all_steps, attempt))
            step = agreed_step(all_steps)
            if step is None:
                return super().load()  # reports that all have been set aside
            holders = [number for number, steps in enumerate(all_steps) if step in steps]
            number = self._world.replica
            if number in holders:
                manifest = super().load(step)
            else:
                manifest = self._join(holders[number % len(holders)], step)
            answers = self.ranks.on_first(partial(self._meet, f"{attempt} loaded", bool(manifest)))
            if all(answers):
                return manifest
            if all(answers[each] for each in holders):  # none set it aside: it would come again
                others = [each for each, has_loaded in enumerate(answers) if not has_loaded]
                raise RuntimeError(
                    f"replica(s) {others} cannot read step {step} of replica(s) {holders}, "
                    f"although those can; check that all nodes see the same files in {self.root}"
                )
        raise AssertionError

    def _all_steps(self, attempt: int) -> list[_Steps]:
        ours = {}
        for path in history.complete_checkpoints(self.root):
            with contextlib.suppress(Damaged):
                ours[step_of_name(path.name)] = history.read_manifest(path).get("replicas", 1)
        answers = self._meet(f"{attempt} steps", ours)
        return [{int(step): count for step, count in steps.items()} for steps in answers]

    def _meet(self, name: str, ours: Any) -> list[Any]:
        """Exchange a value between the first ranks of all replicas; returns all values."""
        store, world = self._world.store, self._world
        # `name` includes the attempt, so that answers of an earlier one are not mistaken for its.
        store.set(f"resume {name} {world.replica}", json.dumps(ours))
        keys = [f"resume {name} {number}" for number in range(world.replicas)]
        # multi_get() waits until all keys are there.
        return [json.loads(each) for each in store.multi_get(keys)]

    def _join(self, sibling: int, step: int) -> dict[str, Any] | None:
        """Start from another replica's checkpoint, without its compression errors, which belong
        to that replica."""
        path = self._root_of(sibling) / name_of_step(step)
        providers = {name: self.providers[name] for name in ("model", "outer", "optim")}

        def choose() -> Choice:
            manifest = history.read_manifest(path)
            return path, manifest, read_table(path, manifest)

        try:
            with commit.reading_lock(path) if self.rank == 0 else contextlib.nullcontext():
                choice = self.ranks.on_first(choose)
                self.ranks.on_all(partial(self.read, choice, providers))
        except Damaged:
            return None  # its owner finds the damage, too, and sets the checkpoint aside
        self._replicas.forget_errors()
        self.log(f"joins at step {step}, with the state of replica {sibling}")
        return choice[1]

    def _root_of(self, number: int) -> Path:
        own = ("replicas", str(self._world.replica)) if self._world.replica else ()
        inner = () if self.cfg.dir else ("checkpoints",)
        # Up to the run's directory, then down to the other replica's.
        base = self.root
        for _ in (*own, *inner):
            base = base.parent
        return base.joinpath(*(("replicas", str(number)) if number else ()), *inner)


def agreed_step(all_steps: list[_Steps]) -> int | None:
    """Return the newest step that every replica existing at its save has; otherwise the newest step
    of all: a replica without it starts from another's. None: nothing is saved."""
    candidates = sorted({step for steps in all_steps for step in steps}, reverse=True)
    for step in candidates:
        before = max(steps.get(step, 0) for steps in all_steps)
        if all(step in steps for steps in all_steps[:before]):
            return step
    return candidates[0] if candidates else None
