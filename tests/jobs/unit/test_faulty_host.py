"""Which host an attempt failed on."""

from __future__ import annotations

from typing import Any

import pytest

from kempner.jobs.records.faulty_host import (
    ENDING,
    blamed_before,
    decisions_without_progress,
    final_reason,
    host_of,
    launch_failed_on,
)

KILLED = """\
Some warning of a rank
srun: error: node2: task 2: Killed
srun: launch/slurm: _step_signal: Terminating StepId=1.0
srun: error: node1: tasks 0-1: Exited with exit code 1
srun: error: node3: task 3: Terminated
"""

# One rank leaves with an error of its own; srun then kills the others.
STOPPED = """\
srun: error: n2: task 9: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=7.0
srun: error: n1: tasks 0-7: Killed
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
        ([], "srun: error: node1: task 0: Exited with exit code 1\n", "node1"),
        ([], "srun: error: node1: task 0: Exited with exit code 75\n", ""),  # interrupted
        ([], "srun: error: node1: task 0: Exited with exit code 2\n", "node1"),
        (
            [],
            "srun: error: n1: task 0: Exited with exit code 2\n"
            "srun: error: n2: task 1: Exited with exit code 2\n",
            "",
        ),
        ([fault("crash", "n2")], STOPPED, "n2"),
        ([], STOPPED, "n2"),
        ([], "srun: error: n-1: tasks 0-3,7: Segmentation fault (core dumped)\n", "n-1"),
        ([], "srun: error: node1: task 0: Terminated\n", ""),
        ([], "srun: error: node7: task 12: Aborted (core dumped)\n", ""),  # it waited for another
        ([fault("crash")], "", ""),
        ([], 2 * "srun: error: n1: task 0: Killed\n", "n1"),
        ([], "srun: error: n1: task 0: Killed\nsrun: error: n2: task 1: Killed\n", ""),
        ([fault("crash", "n2")], f"{ENDING}\nsrun: error: n1: task 0: Killed\n", "n2"),
    ],
)
def test_host_of(faults: list[dict[str, Any]], log: str, host: str) -> None:
    assert host_of(faults, log) == host


def decision(job: str, **values: object) -> dict[str, object]:
    return {"event": "decision", "job": job, "time": 1.0, **values}


def test_attempts_without_progress() -> None:
    def count(*values: int | None) -> int:
        return decisions_without_progress([decision("1", no_progress=value) for value in values])

    assert [count(), count(1, 2), count(2, 0), count(2, 0, None, None)] == [0, 2, 0, 2]
    assert decisions_without_progress([{"event": "decision"}]) == 1  # of an older version


def test_the_last_blamed_host() -> None:
    assert blamed_before([decision("1", blamed="a"), decision("1", blamed="b")]) == "b"
    assert blamed_before([decision("1", blamed="a"), decision("1")]) == ""
    assert blamed_before([]) == ""


def test_a_final_fault() -> None:
    oom = fault("oom", "node1") | {"final": True, "reason": "CUDA out of memory:\n7 GiB"}
    assert final_reason([fault("crash"), oom]) == "CUDA out of memory: 7 GiB"
    assert final_reason([fault("crash"), oom | {"final": False}]) == ""
    assert host_of([oom], "") == ""


def test_a_task_that_could_not_be_started() -> None:
    """srun then kills the tasks of the other hosts."""
    log = "srun: error: task 0 launch failed: Unspecified error\n"
    log += "srun: error: node2: tasks 2-3: Killed\n"
    nodes = ("node1", "node2")
    assert launch_failed_on(log, 2, nodes) == "node1"
    assert launch_failed_on(log.replace("task 0", "task 3"), 2, nodes) == "node2"
    assert launch_failed_on("srun: error: node2: tasks 2-3: Killed", 2, nodes) == ""
    assert launch_failed_on(log, 2, ()) == ""
