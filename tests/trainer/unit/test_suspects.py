"""Which rank hangs, judged from what the ranks say and the kernel shows."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kempner.train.resilience.inquiry import Inquiry
from kempner.train.resilience.suspects import (
    ANSWERS,
    KERNEL,
    RAS,
    RECORDERS,
    Answer,
    Call,
    Judge,
    Look,
    Seen,
    Suspect,
)
from tests.trainer.unit.jitters import HANGS, JITTERS, RANKS, Simulation, hundred_hours

SUM = Call("0", 812, "all_reduce", "[9] Double")


def test_no_run_is_ended_in_a_hundred_hours_of_jitter() -> None:
    """And each kind came often."""
    table = hundred_hours(seed=1)
    assert list(table) == list(JITTERS) and min(each["came"] for each in table.values()) > 100
    assert {name: each["ended"] for name, each in table.items()} == dict.fromkeys(JITTERS, 0)


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_judged_in_seconds(name: str) -> None:
    """In the world of the jitters, whichever rank it is; ranks 0 and 1 see their own node."""
    latest, world = HANGS[name]
    for culprit in range(1, RANKS):
        doing = world(culprit)
        hung = [rank for rank, what in doing.items() if not (what.waits and what.reached)]
        ended, stuck, named = Simulation(culprit).late(120.0, doing)
        assert named and 0 < ended <= latest
        assert [suspect.rank for suspect in stuck] == hung
        assert all(len(suspect.sources) > 1 for suspect in stuck)


def answer(number: int, calls: tuple[Call, ...] = (SUM,), **more: object) -> Answer:
    seen = Seen("S", float(number), 1.0, 1.0)
    found = Answer("1 1 x", number, 7, "after step 7", calls=calls, launched=812, seen=seen)
    return replace(found, **more)  # type: ignore[arg-type]


def look_for(seconds: int, *answers: Answer, **more: object) -> list[Suspect]:
    """The suspects after so many seconds in which nothing changes but the clock."""
    judge = Judge()
    for now in range(seconds + 1):
        each = {
            rank: replace(a, number=now + 1, seen=a.seen and replace(a.seen, at=float(now)))
            for rank, a in enumerate(answers)
        }
        found = judge.look(float(now), Look(each, **more))  # type: ignore[arg-type]
    return found


def test_another_collective() -> None:
    """The one that differs from most is named; of two, both are."""
    other = answer(1, (Call("0", 812, "barrier"),), place="after step 7 in my.py:3 f")
    (suspect,) = look_for(15, answer(1), other, answer(1))
    assert suspect.is_stuck and suspect.rank == 1 and set(suspect.sources) == {RECORDERS, ANSWERS}
    assert "has launched barrier as collective 812 of group 0" in suspect.words
    assert "others have all_reduce [9] Double: after step 7 in my.py:3 f" in suspect.words
    assert [suspect.rank for suspect in look_for(15, answer(1), other)] == [0, 1]


def test_another_shape() -> None:
    """Also if its call is over, and it waits in the next one. A shape that may differ says
    nothing."""
    ahead = (Call("0", 812, "all_reduce", "[0] Double", done=True), replace(SUM, number=813))
    (suspect,) = look_for(15, answer(1), answer(1), answer(1, ahead))
    assert suspect.rank == 2 and "all_reduce [0] Double as collective 812" in suspect.words
    uneven = [Call("0", 812, "all_to_all", f"[{n}] Float") for n in range(2)]
    assert not look_for(15, *(answer(1, (call,)) for call in uneven))
    pair = [Call("0", 3, name, is_message=True) for name in ("send", "recv")]
    assert not look_for(15, *(answer(1, (call,)) for call in pair))


def test_one_source_is_not_enough() -> None:
    """Neither NCCL's RAS, nor a rank that is behind and works, nor silence."""
    idle = answer(1, (replace(SUM, done=True),), launched=811)
    assert not look_for(200, answer(1), answer(1), behind=frozenset([1]))
    (behind,) = look_for(200, answer(1), replace(idle, seen=None))
    assert behind.sources == (RECORDERS,) and not behind.is_stuck
    assert "has launched 811 of 812 collectives" in behind.words
    (silent,) = look_for(200, replace(idle, calls=None), silent={1: 200.0})
    assert silent.sources == (ANSWERS,) and not silent.is_stuck
    (hinted,) = look_for(50, idle, silent={1: 50.0}, behind=frozenset([1]))
    assert hinted.sources == (ANSWERS, RAS) and hinted.is_stuck


def test_a_rank_that_works_or_compiles_is_named_only() -> None:
    """Even if RAS says that it is behind."""
    idle = (replace(SUM, done=True),)
    busy = [Seen("R", float(now), float(now), float(now)) for now in range(201)]
    for compiles in (False, True):
        judge = Judge()
        for now, seen in enumerate(busy):
            each = {0: answer(now), 1: answer(now, idle, seen=seen, compiles=compiles)}
            (found,) = judge.look(float(now), Look(each, behind=frozenset([1])))
        assert found.sources == (RECORDERS, RAS) and not found.is_stuck


def test_the_lost_half_of_a_network_is_not_judged() -> None:
    """More ranks are silent than answer: this side may be the lost one."""
    found = look_for(200, answer(1), silent={1: 9.0, 2: 9.0, 3: 9.0})
    assert len(found) == 3 and not any(suspect.is_stuck for suspect in found)


def test_a_pause_of_the_judge_is_no_time_of_the_suspect() -> None:
    judge = Judge()
    each = {0: answer(1, other=1, other_seen=Seen("T", 1.0))}
    for now in (0.0, 5.0, 100.0, 105.0):
        (found,) = judge.look(now, Look(each, {1: 5.0}))
        assert not found.is_stuck
    (found,) = judge.look(110.0, Look(each, {1: 5.0}))
    assert found.is_stuck and found.sources == (ANSWERS, KERNEL, RECORDERS)


def test_an_answer_is_read_as_it_was_written() -> None:
    whole = answer(3, other=1, other_seen=Seen("D", 1.0, wchan="f"), place="\u00e9")
    assert Answer.parse(whole.write()) == whole


def test_who_says_nothing_is_recorded_with_who_is_stuck() -> None:
    """Of two stopped ranks of a node the second has nobody beside it who could see that."""
    words = ("rank 1 does not answer", "rank 2 is stopped (SIGSTOP)")
    found = [
        Suspect(2, "stopped", words[1], (ANSWERS, KERNEL), held=11.0),
        Suspect(1, "unseen", words[0], (ANSWERS,), held=8.0),
        Suspect(3, "works", "rank 3 lags", (RECORDERS,), held=8.0),
    ]
    inquiry = Inquiry.__new__(Inquiry)
    inquiry._judge = SimpleNamespace(look=lambda *_: found)  # type: ignore[assignment]
    inquiry._dog = SimpleNamespace(age=20.0, step=24, say=lambda _: None)  # type: ignore[assignment]
    inquiry._began, inquiry._round, inquiry._named = 0.0, 2.0, set()
    inquiry._judge_look(20.0, Look({}))
    assert [suspect.rank for suspect in inquiry.stuck] == [1, 2]
    assert all(each in inquiry.reason for each in words) and "rank 3" not in inquiry.reason
