"""Replicas in srun steps of their own: what is lost comes back, and no round counts twice."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster, boot
from tests.conftest import status
from tests.trainer.fault.broken_run import BrokenRun
from tests.waiting import until

ROUNDS, H = 10, 4
LOWCOMM = [
    "--lowcomm.replicas=3",
    "--lowcomm.mode=steps",
    f"--lowcomm.interval={H}",
    "--train.global_batch=12",
    f"--checkpoint.interval={H}",
]
# twice a round: of a few numbers, of the changes
MEMBERSHIP = "kempner.extensions.lowcomm.membership:Membership.round"
MEAN = "kempner.extensions.lowcomm.membership:ReplicaGroup.mean"


class Islands(BrokenRun):
    """A run of three replicas on three hosts."""

    def strike(
        self, fault: str, replica: int, at: str, round_: int, number: str = "SIGKILL", ms: int = 700
    ) -> None:
        """A run with one fault, in the given round."""
        nth = 2 * round_  # twice in each
        strike = f"{fault} at={at} nth={nth} replica={replica} once={self.folder}/once"
        self.submit_slowly(f"{strike} signal={number}", ms=ms)

    def submit_slowly(
        self, fault: str = "", rounds: int = ROUNDS, least: int = 2, ms: int = 700
    ) -> None:
        """With time in each round for a replica to be started."""
        options, faults = ["--nodes=3"], f"slow ms={ms}\n{fault}"
        limits = f"--train.max_steps={rounds * H}", f"--lowcomm.min_replicas={least}"
        words = (*LOWCOMM, *limits)
        self.submit(*words, script="replicas.sh", options=options, faults=faults, KEMPNER_CODE="1")

    def log_of_replicas(self, event: str) -> list[dict[str, Any]]:
        path = self.dir / "replicas.jsonl"
        lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
        return [line for line in lines if line["event"] == event]

    def rounds(self) -> dict[int, list[dict[str, Any]]]:
        """What the replicas have said after each round."""
        found: dict[int, list[dict[str, Any]]] = {}
        for line in self.log_of_replicas("round"):
            if line["entry"] and line["round"]:  # another attempt begins where one has ended
                continue
            found.setdefault(line["round"], []).append(line)
        return found

    def assert_one_model(self) -> None:
        """After every round that counts, with the same members in the eyes of all of them."""
        rounds = self.rounds()
        assert list(rounds) == list(range(ROUNDS + 1)), self.log
        for number, lines in rounds.items():
            for what in ("weights", "members", "joiners", "samples", "left_out"):
                assert len({str(line[what]) for line in lines}) == 1, (number, what, lines)
            assert {line["name"] for line in lines} <= {*lines[0]["members"], *lines[0]["joiners"]}
            # All samples of a round are those of its members, or said to be left out.
            slots = {int(name.partition(".")[0]) for name in lines[0]["members"]}
            assert number == 0 or sorted(slots | set(lines[0]["left_out"])) == [0, 1, 2]
        taken = [lines[0]["samples"] for number, lines in rounds.items() if number]
        assert taken == [[12 * H * i, 12 * H * (i + 1)] for i in range(ROUNDS)]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with boot(3, 1, tmp_path_factory) as cluster:
        yield cluster


@pytest.fixture
def islands(three: Cluster, tmp_path: Path) -> Iterator[Islands]:
    run = Islands(three, {}, tmp_path)
    yield run
    run.end()


@pytest.mark.parametrize(
    ("at", "counts"),
    [
        pytest.param(f"{MEAN}:before", False, id="in"),
        pytest.param(f"{MEMBERSHIP}:before", False, id="before", marks=pytest.mark.soak),
        pytest.param(f"{MEAN}:after", False, id="after", marks=pytest.mark.soak),
    ],
)  # fmt: skip
def test_kill_of_a_replica(islands: Islands, at: str, counts: bool) -> None:
    """The others go on; it is started again, and joins."""
    islands.strike("kill", 1, at, 2)
    assert islands.wait() == 0
    assert status(islands.dir)["state"] == "done", islands.log
    islands.assert_one_model()
    lost = islands.log_of_replicas("gone")[0]
    assert lost["name"] == "1.1" and lost["reason"] == "its process ended"
    assert ("1.1" in islands.rounds()[2][0]["members"]) == counts
    joined = [number for number, lines in islands.rounds().items() if lines[0]["joiners"]]
    assert len(joined) == 1 and "1.2" in islands.rounds()[joined[0] + 1][0]["members"]
    assert islands.decisions() == ["end"]
    (copy,) = (islands.dir / "code").glob("*/scripts/slurm/replicas.sh")  # of the submission
    starts = islands.events("start")
    assert [start["code"] for start in starts] == [copy.parents[2].name] * len(starts)


@pytest.mark.soak
def test_a_replica_that_is_stopped(islands: Islands) -> None:
    """It falls silent; its step is ended, and it is started again."""
    # On a loaded machine it takes half a minute to be back, after 20 s of silence.
    islands.strike("kill", 1, f"{MEMBERSHIP}:before", 2, "SIGSTOP", ms=2000)
    assert islands.wait() == 0
    assert status(islands.dir)["state"] == "done", islands.log
    islands.assert_one_model()
    assert islands.log_of_replicas("gone")[0]["reason"].startswith("silent for")
    assert any(lines[0]["joiners"] for lines in islands.rounds().values())


@pytest.mark.soak
@pytest.mark.parametrize("replica", [0, 2])
def test_kill_of_the_first_and_of_the_last_replica(islands: Islands, replica: int) -> None:
    islands.strike("kill", replica, f"{MEAN}:before", 3)
    assert islands.wait() == 0
    assert status(islands.dir)["state"] == "done", islands.log
    islands.assert_one_model()


@pytest.mark.soak
def test_stop_while_the_first_replica_is_away(islands: Islands) -> None:
    """The others look into its run directory, too."""
    islands.strike("kill", 0, f"{MEAN}:before", 3)
    islands.wait_for("replica 0.1: gone")
    (islands.dir / "STOP").touch()
    assert islands.wait() == 0
    assert status(islands.dir)["state"] == "stopped", islands.log
    assert max(islands.rounds()) < ROUNDS and not (islands.dir / "STOP").exists()


@pytest.mark.soak
def test_a_crashed_host(islands: Islands) -> None:
    """The job outlives it. There is no other host for the replica, which stays away."""
    islands.submit_slowly()
    islands.wait_for("round 2: ")
    try:
        islands.cluster.testbed("crash", "node3")
        assert islands.wait() == 0
    finally:
        islands.cluster.testbed("revive", "node3")
    assert status(islands.dir)["state"] == "done", islands.log
    islands.assert_one_model()
    assert islands.decisions() == ["end"]


@pytest.mark.soak
def test_a_cut_cable(islands: Islands) -> None:
    islands.submit_slowly()
    islands.wait_for("round 2: ")
    try:
        islands.cluster.testbed("cut", "node3")
        assert islands.wait() == 0
    finally:
        islands.cluster.testbed("join", "node3")
    assert status(islands.dir)["state"] == "done", islands.log
    islands.assert_one_model()
    assert islands.log_of_replicas("gone")[0]["reason"].startswith("silent for")


@pytest.mark.soak
def test_the_network_of_the_batch_host(islands: Islands) -> None:
    """All replicas but its own are out of reach: too few, so that the job is requeued."""
    islands.submit_slowly()
    islands.wait_for("round 2: ")
    try:
        islands.cluster.testbed("cut", "node1")
        until(lambda: islands.decisions() == ["requeue"])
    finally:
        islands.cluster.testbed("join", "node1")
    assert islands.wait() == 0
    assert status(islands.dir)["state"] == "done", islands.log


@pytest.mark.soak
def test_too_few_replicas(islands: Islands) -> None:
    """Two of three are lost at once, of which one may: requeued, and finished."""
    islands.strike("kill", 1, f"{MEAN}:before", 3)
    islands.wait_for("round 2: ")
    for pid in islands.pids(0, replica=2):
        os.kill(pid, signal.SIGKILL)
    assert islands.wait() == 0
    assert status(islands.dir)["state"] == "done", islands.log
    assert islands.decisions() == ["requeue", "end"]


@pytest.mark.soak
def test_too_few_after_a_crashed_host(islands: Islands) -> None:
    """The job has lost the host, also when that is back: there is no room for the step that is to
    be started again, which waits. Then another replica is lost: requeued, and finished."""
    islands.submit_slowly(rounds=30)
    islands.wait_for("round 2: ")
    islands.cluster.testbed("crash", "node3")
    until(lambda: "DOWN" in islands.cluster.ask("scontrol", "show", "node", "node3"))
    islands.cluster.testbed("revive", "node3")
    for pid in islands.pids(0, replica=1):
        os.kill(pid, signal.SIGKILL)
    until(lambda: islands.decisions() == ["requeue"])
    assert islands.wait() == 0
    assert status(islands.dir)["state"] == "done", islands.log


@pytest.mark.soak
def test_the_batch_host_is_lost(islands: Islands) -> None:
    """Slurm lets the job go on without its batch script. The guard on another host requeues it."""
    islands.submit_slowly()
    islands.wait_for("round 2: ")
    islands.cluster.testbed("crash", "node1")
    try:
        until(lambda: islands.cluster.field(islands.job, "Restarts") == "1")
    finally:
        islands.cluster.testbed("revive", "node1")
    assert islands.wait() == 0
    assert status(islands.dir)["state"] == "done", islands.log


@pytest.mark.soak
def test_a_replica_comes_back_after_a_host_was_lost(islands: Islands) -> None:
    """Slurm gives the job no exclusive step any more, although cores are free."""
    islands.submit_slowly(rounds=30, least=1)
    islands.wait_for("round 2: ")
    islands.cluster.testbed("crash", "node3")
    try:
        until(lambda: "replica 2 stays away" in islands.log)
        for pid in islands.pids(0, replica=1):
            os.kill(pid, signal.SIGKILL)
        islands.wait_for("joined by 1")
    finally:
        islands.cluster.testbed("revive", "node3")


@pytest.mark.soak
def test_a_request_to_leave(islands: Islands) -> None:
    """All replicas save the end of the same round, and go on from it."""
    islands.submit_slowly()
    islands.wait_for("round 2: ")
    islands.cluster.run("scancel", "--batch", "--signal=TERM", islands.job)
    until(lambda: islands.decisions() == ["requeue"])
    saved = [os.readlink(path) for path in islands.dir.glob("**/checkpoints/latest")]
    assert len(saved) == 3 and len(set(saved)) == 1
    assert islands.wait() == 0
    assert status(islands.dir)["state"] == "done", islands.log
    islands.assert_one_model()
