"""Checksums, and who is at fault if several ranks have computed the same batch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kempner.jobs.ranks.placement import World
from kempner.train.integrity import fingerprint
from kempner.train.integrity.fingerprint import NO_PLACE, Places, Trace, checksum
from kempner.train.integrity.first_steps import FirstSteps, read_first_step
from kempner.train.integrity.messages import Messages
from kempner.train.integrity.replay import Replay
from kempner.train.integrity.votes import Ballot, Difference, difference, suspects
from kempner.train.resilience.requests import named_rank
from kempner.train.sections import RunConfig

OUTPUT, OWN = 3, 17  # places: the output of block 3, own gradients of 8 blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64])
@pytest.mark.parametrize("size", [1, 1023, 1024, 5000])
def test_any_bit_changes_a_checksum(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(-99, 99, (size,), generator=generator).to(dtype)
    before = checksum(values)
    assert checksum(values.clone()) == before
    bits = values.view(torch.uint8).view(size, -1)
    for place, byte, bit in itertools.product(
        (0, size // 2, size - 1), range(bits.shape[1]), (0, 7)
    ):
        bits[place, byte] ^= 1 << bit
        assert checksum(values) != before
        bits[place, byte] ^= 1 << bit
    assert checksum(values) == before


def test_a_checksum_does_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole gradient at once would be copied to a dtype of up to four times its size."""
    values = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    whole = fingerprint.fingerprint(values)
    monkeypatch.setattr(fingerprint, "SUMMED_AT_ONCE", 2 * fingerprint.ROW)
    pieces = fingerprint.fingerprint(values)
    assert pieces[0] == whole[0]
    norms = (each[1:].view(torch.float64).item() for each in (whole, pieces))
    assert next(norms) == pytest.approx(next(norms), rel=1e-12)


def test_two_numbers_that_change_places_change_a_checksum() -> None:
    values = torch.arange(3000.0)
    swapped = values.clone()
    swapped[[7, 8]] = values[[8, 7]]
    assert checksum(values) != checksum(swapped)
    assert checksum(values.view(30, 100).t()) != checksum(values.view(30, 100))


def test_the_first_place_and_both_norms() -> None:
    def trace(output: float, own: float) -> torch.Tensor:
        made = Trace()
        made.add(OUTPUT, torch.tensor([3.0, 4.0]))
        made.add(OWN, torch.tensor([own]))
        made.add(OUTPUT + 1, torch.tensor([output]))
        return made.rows()

    a, b = trace(1.0, 5.0), trace(2.0, 6.0)
    assert difference(a, a).place == NO_PLACE
    assert difference(a, b) == (OUTPUT + 1, 1.0, 2.0)
    assert difference(a, trace(1.0, 5.5)) == (OWN, 5.0, 5.5)
    assert difference(a, trace(1.0, 5.5), tolerance=0.2).place == NO_PLACE
    assert difference(a, trace(1.0, float("nan")), tolerance=0.2).place == OWN
    assert difference(a, a[:2]).place == 0, "not the same computation"


def test_places_are_in_the_order_in_which_a_fault_spreads() -> None:
    places = Places(4)
    order = [
        *(places.output(block) for block in range(4)),
        places.loss,
        *(places.returning(block) for block in (3, 2, 1, 0)),
        places.own_gradient,
        places.summed_gradient,
    ]
    assert order == list(range(len(order)))
    assert places.name(2) == "the output of block 2"
    assert places.name(places.returning(1)) == "the gradient of block 1's output"


def ballot(ranks: Sequence[int], values: Sequence[str], place: int = OUTPUT) -> Ballot:
    """A vote from what each computation came to."""
    pairs = itertools.combinations(values, 2)
    return Ballot(
        tuple(ranks), tuple(Difference() if a == b else Difference(place) for a, b in pairs)
    )


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        # Computed again by itself alone: owner, owner, owner.
        ([ballot((0, 0, 0), "aaa"), ballot((1, 1, 1), "aba")], {1}),
        # By itself, the next, itself, the next but one, itself. Rank 1 is wrong once: in its own
        # batch, and in another's.
        ([ballot((0, 3, 0, 2, 0), "aaaaa"), ballot((1, 0, 1, 3, 1), "xbbbb")], {1}),
        ([ballot((2, 1, 2, 0, 2), "axaaa"), ballot((3, 2, 3, 1, 3), "aaaaa")], {1}),
        # Always: it agrees with itself.
        (
            [
                ballot((0, 3, 0, 2, 0), "aaaaa"),
                ballot((1, 0, 1, 3, 1), "xbxbx"),
                ballot((2, 1, 2, 0, 2), "cycccc"[:5]),
                ballot((3, 2, 3, 1, 3), "dddzd"),
            ],
            {1},
        ),
        # Two ranks alone: one of them.
        ([ballot((0, 1, 0, 1, 0), "axaxa"), ballot((1, 0, 1, 0, 1), "ybyby")], {0, 1}),
        # Unless it differs from itself.
        ([ballot((0, 1, 0, 1, 0), "axaya"), ballot((1, 0, 1, 0, 1), "bbbbb")], {1}),
        ([ballot((0, 1, 0, 1, 0), "aaaaa"), ballot((1, 0, 1, 0, 1), "bbbbb")], set()),
    ],
)
def test_who_is_at_fault(votes: list[Ballot], expected: set[int]) -> None:
    assert suspects(votes, range(len(votes))) == expected


def test_in_a_unit_the_first_place_counts() -> None:
    """Ranks 2 and 3 exchange activations, as 0 and 1 do: the fault of 3 reaches 2 later."""
    votes = [
        ballot((0, 2, 0, 4, 0), "aaaaa"),
        ballot((1, 3, 1, 5, 1), "axaaa", place=2),
        ballot((2, 4, 2, 0, 2), "ybyby"[:1] + "bbbb", place=6),
        ballot((3, 5, 3, 1, 3), "zcccc", place=5),
    ]
    assert suspects(votes, [0, 0, 1, 1]) == {3}


class Group:
    """Of so many ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks


def test_sums_over_many_ranks_are_rounded_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all ranks have nearly the same gradients, as in the first steps of a run. Each adds its
    own to the sum of those before it, as in a ring."""
    generator, ranks = torch.Generator().manual_seed(1), 1024
    alike = torch.randn(8, 1024, generator=generator)  # of eight messages
    received, totals = torch.zeros_like(alike), torch.zeros(2, 8, dtype=torch.float64)
    for _ in range(ranks):
        sent = alike + 0.3 * torch.randn(alike.shape, generator=generator)
        received += sent
        totals += torch.stack((sent.double().sum(1), sent.double().square().sum(1)))
    # [M, 2, R]: every rank received the same.
    all_sent = totals.t().unsqueeze(2).expand(-1, -1, ranks)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda sums, group: sums.copy_(all_sent))
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: 0)
    group: Any = Group(ranks)

    def is_wrong(received: torch.Tensor) -> bool:
        messages = Messages()
        for each in received:
            messages.add(each, torch.zeros(ranks * len(each)), group)
        return messages.are_wrong(())

    assert not is_wrong(received)
    received[2, 7] *= 1.5  # a bit of a mantissa
    assert is_wrong(received)


@pytest.mark.parametrize(("every", "often"), [(None, "each"), (200, "every 200 steps")])
def test_what_a_replay_costs(every: int | None, often: str) -> None:
    """RUN/REPLAY asks for one without resilience.replay_every, too."""
    said: list[str] = []
    replay = Replay.__new__(Replay)
    replay._cfg = SimpleNamespace(resilience=SimpleNamespace(replay_every=every))  # type: ignore[assignment]
    replay._run = SimpleNamespace(announce=said.append)  # type: ignore[assignment]
    replay._seconds = []
    for seconds in (9.0, 2.0, 2.5, 3.0):
        replay._account(seconds)
    assert said == [f"replay: costs 2.50 s {often}"]


def test_a_record_waits_for_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one of the same step may be there, of a branch that the run has left; and a save may
    fail."""
    monkeypatch.setattr("torch.distributed.gather_object", lambda x, found: found.__setitem__(0, x))
    for step in (4, 8):
        folder = tmp_path / f"step_{step:08d}"
        folder.mkdir()
        (folder / "manifest.json").write_text(f"of step {step}")
    run: Any = SimpleNamespace(dir=tmp_path, world=World(0, 0, 1, "single"), cfg=RunConfig())
    saves: Any = SimpleNamespace(root=tmp_path, in_flight=None, saved_step=8, failed_saves=0)
    steps = FirstSteps(run, torch.device("cpu"), saves)

    def written() -> int | None:
        steps.write()
        if steps._writer is not None:
            steps._writer.join()
        record = read_first_step(tmp_path)
        return record and record["checkpoint"]

    rows = torch.arange(6).view(2, 3)
    steps.begin(4, is_loaded=True)
    assert [steps.is_due(step) for step in (4, 5, 6)] == [False, True, False]
    steps.add((), rows, 0.0)
    assert written() == 4
    record = read_first_step(tmp_path)
    assert record is not None and record["computed"][0]["rows"].equal(rows)
    saves.in_flight = 8
    steps.begin(8, is_loaded=False)
    steps.add((), rows, 0.0)
    assert written() == 4
    saves.in_flight, saves.failed_saves = None, 1
    assert written() == 4
    steps.begin(8, is_loaded=False)
    steps.add((), rows, 0.0)
    saves.failed_saves = 0
    assert written() == 8


def test_requests_to_replay(tmp_path: Path) -> None:
    """A rank counts only with the attempt that a spare has audited, and a FIFO is not opened."""
    for text, rank in [("1 0\n", 1), ("1\n", -1), ("1 other\n", -1), ("7 0\n", -1),
                       ("9" * 400, -1), ("-1 0", -1), ("", -1)]:  # fmt: skip
        (tmp_path / "REPLAY").write_text(text)
        assert named_rank(tmp_path / "REPLAY", 2) == rank
    (tmp_path / "REPLAY").unlink()
    os.mkfifo(tmp_path / "REPLAY")
    assert named_rank(tmp_path / "REPLAY", 2) == -1
