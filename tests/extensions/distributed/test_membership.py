"""Replicas that are lost, stopped and started again: the same weights on all members after every
round, and no round counts twice. The processes are those of islands.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import zygote
from tests.conftest import ROOT, clean_env
from tests.extensions.distributed.islands import DONE, LR, MU, ROUNDS, TOO_FEW, delta
from tests.waiting import LIMIT_S

SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "other-past": {"other": 2},
    "kill-before": {"faults": {"1": "kill before 3"}},
    "kill-in": {"faults": {"1": "kill in 3"}},
    "kill-after": {"faults": {"0": "kill after 3"}},
    "kill-voted": {"faults": {"2": "kill voted 3"}},
    "stop-before": {"faults": {"2": "stop before 3"}},
    "stop-in": {"faults": {"1": "stop in 3"}},
    "two": {"faults": {"1": "kill in 2", "2": "kill in 3"}, "least": 1},
    "kill-shared": {"faults": {"1": "kill in 2", "0": "kill shared 3"}, "least": 1},
    "busy": {"faults": {"1": "busy before 3"}},
    "too-few": {"faults": {"1": "kill in 3"}, "least": 3},
    "long": {"faults": {"1": "kill in 20"}, "rounds": 60},
    "ranks": {"faults": {"1": "kill in 3"}, "replicas": 2, "least": 1, "ranks": 2},
    "ranks-stop": {"faults": {"1": "stop in 3"}, "replicas": 2, "least": 1, "ranks": 2},
}
LOST = [name for name, s in SCENARIOS.items() if "faults" in s and name not in ("too-few", "busy")]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All scenarios, side by side."""
    folder = tmp_path_factory.mktemp("islands")
    program = [
        sys.executable,
        "-m",
        "tests.extensions.distributed.islands",
        folder,
        json.dumps(SCENARIOS),
    ]
    done = zygote.run(
        program,
        cwd=ROOT,
        env=clean_env(GLOO_SOCKET_IFNAME="lo"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return folder


def rounds_of(folder: Path, rank: int = 0) -> dict[str, list[dict[str, Any]]]:
    """The lines of each replica, by name."""
    return {
        path.stem.partition("-")[0]: [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob(f"*-{rank}.jsonl")
    }


def expected(members: dict[int, list[str]], rank: int) -> dict[int, list[float]]:
    """Some of the weights after each round, from those that contributed to it: in one process."""
    anchor, momentum, found = torch.zeros(2, 4096), torch.zeros(2, 4096), {}
    for done in sorted(set(members) - {0}):
        parts = [delta(int(name.partition(".")[0]), rank, done) for name in members[done]]
        change = torch.stack(parts).mean(0)
        momentum = MU * momentum + change
        anchor = anchor - LR * (change + MU * momentum)
        found[done] = anchor[:, :2].flatten().tolist()
    return found


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_every_round_counts_once_and_for_all(played: Path, name: str) -> None:
    ranks, last = SCENARIOS[name].get("ranks", 1), SCENARIOS[name].get("rounds", ROUNDS)
    for rank in range(ranks):
        replicas = rounds_of(played / name, rank)
        by_round: dict[int, list[dict[str, Any]]] = {}
        for lines in filter(None, replicas.values()):
            numbers = [line["round"] for line in lines]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), name
            for line in lines:
                by_round.setdefault(line["round"], []).append(line)
        for number, lines in by_round.items():
            for what in ("hash", "members", "joiners"):
                assert len({str(line[what]) for line in lines}) == 1, (name, number, what)
        members = {number: lines[0]["members"] for number, lines in by_round.items()}
        weights = expected(members, rank)
        for number, first in weights.items():
            assert by_round[number][0]["first"] == pytest.approx(first, abs=1e-5), (name, number)
        if name != "too-few":
            assert list(weights) == list(range(1, last + 1))


def test_a_replica_with_other_weights_of_the_same_round_joins(played: Path) -> None:
    """Its checkpoint is of a round that the others have done again without it."""
    first = rounds_of(played / "other-past")["2.1"][0]
    assert (first["members"], first["joiners"]) == (["0.1", "1.1"], ["2.1"])


@pytest.mark.parametrize("name", LOST)
def test_a_lost_replica_is_started_again_and_joins(played: Path, name: str) -> None:
    """It contributes nothing to the round in which it joins, and to each one after it."""
    replicas, scenario = rounds_of(played / name), SCENARIOS[name]
    for slot, fault in scenario["faults"].items():
        at = int(fault.split()[2])
        joined = replicas[f"{slot}.2"]
        assert f"{slot}.2" in joined[0]["joiners"] and joined[0]["round"] >= at
        assert f"{slot}.2" in joined[1]["members"]
        last = {lines[-1]["hash"] for lines in replicas.values() if lines[-1] == joined[-1]}
        assert joined[-1]["round"] == scenario.get("rounds", ROUNDS) and len(last) == 1


@pytest.mark.parametrize(
    ("name", "counts"), [("before", False), ("in", False), ("after", False), ("voted", True)]
)
def test_when_the_last_round_of_a_killed_replica_counts(
    played: Path, name: str, counts: bool
) -> None:
    """From its vote on."""
    scenario = SCENARIOS[f"kill-{name}"]
    ((slot, fault),) = scenario["faults"].items()
    others = [lines for key, lines in rounds_of(played / f"kill-{name}").items() if ".1" in key]
    line = next(line for line in max(others, key=len) if line["round"] == int(fault.split()[2]))
    assert (f"{slot}.1" in line["members"]) == counts


def test_a_replica_that_is_busy_is_not_gone(played: Path) -> None:
    """Not even when no other thread of it can run."""
    log = [json.loads(line) for line in (played / "busy/replicas.jsonl").read_text().splitlines()]
    assert {line["reason"] for line in log if line["event"] == "gone"} == {"left"}


@pytest.mark.parametrize("name", ["stop-before", "stop-in", "ranks-stop"])
def test_a_replica_that_wakes_up_late_leaves(played: Path, name: str) -> None:
    slot = int(next(iter(SCENARIOS[name]["faults"])))
    exits = json.loads((played / name / "exits.json").read_text())
    assert [code for who, code in exits if who == slot] == [76, DONE]
    log = [json.loads(line) for line in (played / name / "replicas.jsonl").read_text().splitlines()]
    gone = {line["name"]: line["reason"] for line in log if line["event"] == "gone"}
    assert gone[f"{slot}.1"].startswith("silent for")


def test_the_store_keeps_the_last_rounds_alone(played: Path) -> None:
    """Each had up to 13 keys of its own, on a host that keeps them in memory for a whole job; a
    replica that comes later does without them."""
    assert int((played / "long/keys").read_text()) < 60


def test_fewer_replicas_than_the_least_end_the_run(played: Path) -> None:
    exits = json.loads((played / "too-few" / "exits.json").read_text())
    assert sorted(exits) == [[0, TOO_FEW], [1, -9], [1, TOO_FEW], [2, TOO_FEW]]
    ends = {
        name: lines[-1]["round"] for name, lines in rounds_of(played / "too-few").items() if lines
    }
    assert ends == {"0.1": 2, "1.1": 2, "2.1": 2}
