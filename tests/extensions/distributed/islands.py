"""Replicas without a trainer, for the tests of their membership: each is a process with a vector.

    python -m tests.extensions.distributed.islands FOLDER '{"name": SCENARIO, ...}'

A scenario says who suffers what: {"faults": {"1": "kill in 2"}, "rounds": 6, "replicas": 3,
"least": 2}: replica 1 is killed in the collective of its round 2. Points: before, in, after (the
collective), voted, shared (the state, with one that joins). `stop` stops the process and wakes it
once it has been declared gone; `busy` holds the interpreter for longer. The driver starts again
whoever was lost, once. With "ranks": 2 a replica is so many processes, of which the fault strikes
the last. "other": 2 begins with other weights than the rest. All processes are forks of this one,
which has imported torch.

FOLDER/NAME/SLOT.START-RANK.jsonl holds a line for each round of a replica: rounds done, the hash of
its weights, members, joiners; FOLDER/NAME/struck the time of a fault; exits.json how each replica
ended; keys how many the store had at the end.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kempner.extensions.lowcomm.config import REPLICA_SILENCE_S
from kempner.extensions.lowcomm.door import HERE_KEY, Door
from kempner.extensions.lowcomm.judge import JudgeServer
from kempner.extensions.lowcomm.membership import Epoch, Membership, ReplicaGroup, TooFew
from kempner.jobs.system.files import write_atomic

ROUNDS = 6
TOO_FEW, DONE = 75, 0
LR, MU = 0.7, 0.9


def delta(slot: int, rank: int, rounds: int, size: int = 4096) -> torch.Tensor:
    """What this rank would send in the round after which `rounds` are done, [2, size]."""
    generator = torch.Generator().manual_seed(1000 * slot + 100 * rank + rounds)
    return torch.randn(2, size, generator=generator)


class Replica:
    def __init__(
        self, folder: Path, slot: int, rank: int, scenario: dict[str, Any], first: bool
    ) -> None:
        self.slot, self.rank, self.rounds = slot, rank, 0
        ours = first and rank == scenario.get("ranks", 1) - 1
        fault = scenario.get("faults", {}).get(str(slot), "") if ours else ""
        self.faults = scenario.get("faults", {})
        self.fault, self.point, self.at = (*fault.split(), "", "", "")[:3]
        self.folder, self.size = folder, scenario.get("size", 4096)
        self.anchor, self.momentum = torch.zeros(2, self.size), torch.zeros(2, self.size)
        if slot == scenario.get("other"):
            self.anchor += 1.0
        replicas, least = scenario.get("replicas", 3), scenario.get("least", 2)
        door = Door(folder / "door", 20.0)
        self.membership = Membership(door, slot, replicas, least, start_timeout=20.0)
        self.log = open(folder / f"{self.membership.me}-{rank}.jsonl", "a", buffering=1)  # noqa: SIM115
        self._settle = self.membership._settle
        self.membership._settle = self.settle  # type: ignore[method-assign]

    def strike(self, point: str) -> None:
        if self.point == point and self.rounds + 1 == int(self.at):
            self.point = ""
            (self.folder / "struck").write_text(f"{time.time()} {time.monotonic()}")
            if self.fault == "busy":
                ctypes.PyDLL(None).sleep(round(REPLICA_SILENCE_S) + 2)  # a PyDLL keeps the lock
            else:
                os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.fault])

    def settle(self, epoch: Any, problem: str) -> bool:
        if self.point == "voted" and self.rounds + 1 == int(self.at):
            number = epoch.number
            self.membership.store.append(f"votes/{number}", f"{self.membership.me} yes\n")
        self.strike("voted")
        return self._settle(epoch, problem)

    def exchange(self, group: ReplicaGroup) -> list[torch.Tensor]:
        first, second = delta(self.slot, self.rank, group.epoch.round, self.size).unbind()
        mean = [group.mean(first)]
        self.strike("in")
        mean.append(sum(group.gather(second)) / len(group.epoch.members))
        self.strike("after")
        return mean

    def step(self, mean: list[torch.Tensor]) -> None:
        change = torch.stack(mean)
        self.momentum = MU * self.momentum + change
        self.anchor = self.anchor - LR * (change + MU * self.momentum)

    def share(self, group: ReplicaGroup) -> list[torch.Tensor]:
        state = [self.anchor.clone(), self.momentum.clone()]
        group.share(state)
        self.strike("shared")
        return state

    def record(self, epoch: Epoch, members: Sequence[str]) -> None:
        self.rounds = epoch.round
        line = {
            "round": epoch.round,
            "hash": hashlib.sha256(self.anchor.numpy().tobytes()).hexdigest(),
            "members": members,
            "joiners": epoch.joiners,
            "time": time.monotonic(),
            "first": self.anchor[:, :2].flatten().tolist(),
        }
        self.log.write(json.dumps(line) + "\n")

    def round(self) -> None:
        epoch, mean = self.membership.round(self.rounds + 1, self.exchange)
        self.step(mean)
        members = epoch.members
        if epoch.waiting:
            about = {"members": members}
            epoch, _ = self.membership.admit(self.rounds + 1, about, self.share)
        self.record(epoch, members)

    def await_lost(self) -> None:
        """Those that have been lost come back while there are rounds to do."""
        for slot, fault in self.faults.items():
            if self.rounds >= int(fault.split()[2]) and "busy" not in fault:
                while f'"{slot}.2"' not in self.membership.store.get(HERE_KEY).decode():
                    time.sleep(0.02)

    def run(self, rounds: int) -> int:
        try:
            about = {"weights": self.anchor.sum().item()}
            entered = self.membership.enter(self.rounds, about, self.share)
            if entered is None:
                return DONE
            epoch, (self.anchor, self.momentum) = entered
            self.record(epoch, epoch.about.get("members", epoch.members))
            while self.rounds < rounds:
                self.await_lost()
                self.strike("before")
                self.round()
        except TooFew:
            self.membership.close()
            return TOO_FEW
        self.membership.over()
        (self.folder / "keys").write_text(str(self.membership.store.num_keys()))
        self.membership.close()
        return DONE


def fork(act: Any) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = act()
        finally:
            os._exit(code)
    return pid


def begin_replica(folder: Path, slot: int, scenario: dict[str, Any], first: bool) -> int:
    """The process of a replica, or one that looks after several, as srun does."""
    ranks = scenario.get("ranks", 1)
    rounds = scenario.get("rounds", ROUNDS)

    def run(rank: int) -> int:
        if ranks > 1:
            store = dist.FileStore(f"{folder}/world-{slot}-{first}", ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        return Replica(folder, slot, rank, scenario, first).run(rounds)

    def step() -> int:
        left = {fork(lambda rank=rank: run(rank)) for rank in range(ranks)}
        code = 0
        while left:
            pid, status = os.wait()
            left.discard(pid)
            if found := os.waitstatus_to_exitcode(status):
                code = code or abs(found)
                for other in left:
                    os.kill(other, signal.SIGKILL)
        return code

    return fork(step if ranks > 1 else lambda: run(0))


def judge(folder: Path) -> int:
    parent, found = (
        os.getppid(),
        JudgeServer(["127.0.0.1"], REPLICA_SILENCE_S, folder / "replicas.jsonl"),
    )
    write_atomic(folder / "door", found.note)
    found.serve(lambda: os.getppid() == parent)
    return 0


def play(folder: Path, scenario: dict[str, Any]) -> int:
    folder.mkdir(parents=True)
    judging = fork(lambda: judge(folder))
    running: dict[int, int] = {}
    exits: list[tuple[int, int]] = []
    again = dict.fromkeys(range(scenario.get("replicas", 3)), False)
    for slot in range(scenario.get("replicas", 3)):
        running[begin_replica(folder, slot, scenario, first=True)] = slot
    while running:
        time.sleep(0.02)
        for pid, slot in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if done and os.WIFSTOPPED(status):
                while '"gone", "time"' not in (folder / "replicas.jsonl").read_text():
                    time.sleep(0.05)
                os.kill(pid, signal.SIGCONT)
            elif done:
                del running[pid]
                code = os.waitstatus_to_exitcode(status)
                exits.append((slot, code))
                if code not in (DONE, TOO_FEW) and not again[slot]:
                    again[slot] = True
                    running[begin_replica(folder, slot, scenario, first=False)] = slot
    os.kill(judging, signal.SIGKILL)
    (folder / "exits.json").write_text(json.dumps(exits))
    return 0


def main() -> None:
    torch.set_num_threads(1)  # a fork has no pool of threads
    root, scenarios = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name, scenario in scenarios.items():
        fork(lambda name=name, scenario=scenario: play(root / name, scenario))
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
