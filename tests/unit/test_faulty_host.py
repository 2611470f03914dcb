"""Which host an attempt failed on."""

from __future__ import annotations

from typing import Any

import pytest

from kempner.history.faulty_host import blamed_before, host_of

KILLED = """\
Some warning of a rank
srun: error: node2: task 2: Killed
srun: launch/slurm: _step_signal: Terminating StepId=1.0
srun: error: node1: tasks 0-1: Exited with exit code 1
srun: error: node3: task 3: Terminated
"""


def fault(kind: str, *hosts: str, lost_peer: bool = False) -> dict[str, Any]:
    return {"event": "fault", "kind": kind, "hosts": list(hosts), "lost_peer": lost_peer}


@pytest.mark.parametrize(
    ("faults", "log", "host"),
    [
        ([], "", ""),
        ([fault("crash", "node1", lost_peer=True)], KILLED, "node2"),
        ([fault("crash", "node1", lost_peer=True), fault("crash", "node3")], "", "node3"),
        ([fault("hang", "node3"), fault("hang", "node1")], KILLED, "node3"),
        ([fault("hang", "node1", "node2")], "", ""),  # who is to blame for a network?
        ([fault("hang")], KILLED, ""),
        ([], "srun: error: node1: task 0: Exited with exit code 1\n", ""),
        ([], "srun: error: n-1: tasks 0-3,7: Segmentation fault (core dumped)\n", "n-1"),
        ([], "srun: error: node1: task 0: Terminated\n", ""),
        ([fault("crash")], "", ""),
        ([], 2 * "srun: error: n1: task 0: Killed\n", "n1"),
        ([], "srun: error: n1: task 0: Killed\nsrun: error: n2: task 1: Killed\n", ""),
    ],
)
def test_host_of(faults: list[dict[str, Any]], log: str, host: str) -> None:
    assert host_of(faults, log) == host


def test_only_the_newest_decision_about_this_job_counts() -> None:
    made = [
        {"event": "decision", "job": job, "blamed": host}
        for job, host in (("1", "a"), ("1", "b"), ("2", "c"))
    ]
    assert [blamed_before(made, job) for job in ("1", "2", "3")] == ["b", "c", ""]
    assert blamed_before([*made, {"event": "decision", "job": "1"}], "1") == ""
