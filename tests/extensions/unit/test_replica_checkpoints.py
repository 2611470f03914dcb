"""Which checkpoint replicas load when one of them cannot read it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kempner.extensions.lowcomm.checkpoints import ReplicaCheckpointer


class LastOfThree(ReplicaCheckpointer):
    """The third replica; the two others have step 20. All answers of replicas are given."""

    def __init__(self, answers: list[list[bool]]) -> None:
        self._world: Any = SimpleNamespace(replica=2)
        self.ranks: Any = SimpleNamespace(on_first=lambda act: act())
        self.root, self._loaded, self.tried = Path("checkpoints"), iter(answers), 0

    def wait(self, *_: Any, **__: Any) -> Any: ...

    def _all_steps(self, attempt: int) -> list[dict[int, int]]:
        return [{20: 2}, {20: 2}, {}]

    def _meet(self, name: str, ours: Any) -> list[bool]:
        return next(self._loaded)

    def _join(self, sibling: int, step: int) -> dict[str, Any] | None:
        self.tried += 1
        return {"step": step, "from": sibling}


def test_a_damaged_checkpoint_is_followed_by_another_attempt() -> None:
    """Its owner has set it aside; only the list of steps is the same here."""
    replica = LastOfThree([[True, False, False], [True, True, True]])
    assert replica.load() == {"step": 20, "from": 0}
    assert replica.tried == 2


def test_a_replica_that_alone_cannot_read_does_not_try_for_ever() -> None:
    with pytest.raises(RuntimeError, match=r"replica\(s\) \[2\] cannot read step 20 of replica"):
        LastOfThree([[True, True, False]]).load()
