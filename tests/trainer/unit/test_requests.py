"""Requests to stop: files on a sick file system, and the middle of a long step."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kempner.train.progress import Progress
from kempner.train.resilience.requests import (
    ASKS_PROFILE,
    ASKS_REPLAY,
    REQUEST_FLAGS,
    REQUESTS,
    SAVE_REQUEST,
    Meanwhile,
    StopRequests,
    Verdict,
    final_verdict,
    requested_verdict,
)
from tests.waiting import until


def requests() -> StopRequests:
    """Without the handlers of signals, which are this process's."""
    stop = StopRequests.__new__(StopRequests)
    stop.flags, stop._job_end, stop._once = [0.0] * len(REQUESTS), None, {}
    stop._say = lambda text: None
    return stop


class Interleaved(list[float]):
    """Flags, of which one is set while they are read."""

    def __iter__(self) -> Iterator[float]:
        yield from list(super().__iter__())
        self[SAVE_REQUEST] = 1.0


def test_a_request_that_comes_while_the_flags_are_taken_is_kept() -> None:
    stop = requests()
    stop.flags = Interleaved(stop.flags)
    assert stop.take_flags()["asks_save"] == 0.0
    stop.flags = list(stop.flags)
    assert stop.take_flags()["asks_save"] == 1.0 and stop.take_flags()["asks_save"] == 0.0


def test_requests_of_a_step_that_nobody_has_looked_at_are_made_again() -> None:
    stop = requests()
    stop._once = {ASKS_PROFILE: 0.0, ASKS_REPLAY: 2.0 + 5}
    stop.request(SAVE_REQUEST, "SAVE file")
    sums = stop.take_flags()
    assert not any(stop.take_flags().values())
    stop.ask_again(sums)
    assert stop.take_flags() == sums
    stop.ask_again(sums, only_save=True)  # the others were seen
    assert stop.take_flags() == {**sums, ASKS_REPLAY: 0.0}


def test_a_file_system_that_fails_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO and ESTALE of a shared file system must not end a training."""
    monkeypatch.setattr("kempner.train.resilience.requests.FILE_POLL_S", 0.01)
    real, failures = Path.unlink, [errno.EIO, errno.ESTALE]

    def unlink(path: Path, *args: Any) -> None:
        if failures and path.name == "STOP":
            raise OSError(failures.pop(), "sick", str(path))
        real(path, *args)

    monkeypatch.setattr(Path, "unlink", unlink)
    (tmp_path / "STOP").touch()
    stop, said = requests(), []
    replica = tmp_path / "replicas/1"  # the first one, in whose directory the file is, is away
    run: Any = SimpleNamespace(
        dir=replica, announce=said.append, world=SimpleNamespace(rank=0, size=1, replica=1)
    )
    stop._unsaid = []
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    stop.begin(run, lambda: 0.0)
    until(lambda: said)
    assert said == ["STOP file: stopped by the user"] and not (tmp_path / "STOP").exists()
    assert any(thread.name == "stop files" for thread in threading.enumerate())


def test_the_end_that_slurm_told_before_counts_while_it_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = [time.time() + 1000.0, None, None]
    monkeypatch.setattr("kempner.train.resilience.requests.JOB_END_POLL_S", 0.0)
    monkeypatch.setattr("kempner.train.resilience.requests.time.sleep", lambda seconds: None)
    monkeypatch.setattr("kempner.jobs.slurm.job_fields", lambda job: {})
    monkeypatch.setattr("kempner.jobs.slurm.end_of", lambda fields: ends.pop(0) if ends else None)
    stop = requests()
    stop._watch_end("12", lambda: 0.0 if ends else 2000.0)
    assert stop.flags[1] == 1.0 and not ends


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_request_to_leave_is_seen_in_the_middle_of_a_long_step(kind: int) -> None:
    """On a GPU one micro-batch later: the host reads what has long arrived."""
    for late in (False, True):
        stop = requests()
        meanwhile = Meanwhile(stop, torch.device("cpu"), late)
        assert meanwhile() is None
        stop.flags[kind] = 1.0
        if late:
            assert meanwhile() is None
        assert meanwhile() == (REQUESTS[kind] if kind else None)  # a save waits for the step's end


def test_the_strongest_request_wins() -> None:
    assert requested_verdict(dict.fromkeys(REQUEST_FLAGS, 0.0)).state == ""
    assert requested_verdict(dict.fromkeys(REQUEST_FLAGS, 2.0)).state == "stopped"


class Saver:
    """A checkpointer whose save does not end in time. The one before has failed."""

    saved_step, failed_saves = 5, 1
    in_flight: int | None = None

    def __init__(self) -> None:
        self.said: list[Any] = []

    def save(self, step: int, position: dict[str, Any]) -> None:
        self.in_flight = step
        self.said.append("save")

    def close(self, seconds: float | None, prune: bool) -> None:
        self.said += [seconds, prune]


def test_the_last_save_begins_before_slurm_is_asked_how_long_it_may_take() -> None:
    """Slurm may take as long to answer as there is. A save that is not over has not failed: such a
    run is started again."""
    saver: Any = Saver()
    leave = Verdict(save=True, state="interrupted")

    def seconds() -> float:
        saver.said.append("asked")
        return 3.0

    with pytest.raises(TimeoutError, match="the checkpoint of step 7 was not durable in time"):
        final_verdict(leave, Progress(step=7), saver, seconds)
    assert saver.said == ["save", "asked", 3.0, False]
