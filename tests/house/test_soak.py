"""The plans of the soaks, which the seed alone decides, and what they refuse to accept."""

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tests.soak
from benchmarks import soak_replicas
from benchmarks.soak import GAP, KINDS, Kinds, draw, revived
from benchmarks.soak_replicas import BATCH, H, Line, count_rounds
from tests.soak import Part
from tests.waiting import until


@pytest.mark.parametrize(("kinds", "gap"), [(KINDS, GAP), (soak_replicas.KINDS, soak_replicas.GAP)])
def test_plan(kinds: Kinds, gap: tuple[float, float]) -> None:
    plan = draw(40, 3, kinds, gap)
    assert plan == draw(40, 3, kinds, gap) != draw(40, 4, kinds, gap)
    assert {fault.kind for fault in plan[:20]} == set(kinds)
    steps = [0.0, *(fault.step for fault in plan)]
    assert all(b - a >= gap[0] - 0.1 for a, b in itertools.pairwise(steps))


def test_a_start_after_the_end_is_found(tmp_path: Path) -> None:
    """Slurm requeued the job once more, although the batch script had ended the run."""
    events: list[dict[str, object]] = [
        {"event": "start", "attempt": 0},
        {"event": "decision", "decision": "requeue", "why": "interrupted"},
        {"event": "start", "attempt": 1},
        {"event": "decision", "decision": "end", "why": "the run is done"},
    ]
    file = tmp_path / "attempts.jsonl"
    file.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert revived(tmp_path) == []
    with file.open("a") as log:
        log.write(json.dumps({"event": "start", "attempt": 2}) + "\n")
    assert revived(tmp_path) == ["attempt 2 started after the decision 'the run is done'"]


def told(number: int, *members: str, by: str = "", entry: bool = False, **more: object) -> Line:
    """What a replica says of a round."""
    taken = {int(name[0]) for name in members}
    return {
        "event": "round",
        "time": 1.0,
        "name": by or members[0],
        "round": number,
        "entry": entry,
        "members": list(members),
        "joiners": [],
        "samples": [BATCH * H * (number - 1), BATCH * H * number],
        "left_out": sorted({0, 1, 2} - taken),
        "weights": f"w{number}",
        **more,
    }


def start(*names: str) -> list[Line]:
    return [{"event": "here", "name": name, "time": 0.0} for name in names]


ALL = ("0.1", "1.1", "2.1")
FIRST = [*start(*ALL), told(0, *ALL, entry=True), told(1, *ALL), told(2, "0.1", "2.1")]


def test_a_round_that_was_not_saved_is_done_again_and_counts_once() -> None:
    again = told(2, *ALL, weights="other")
    found = count_rounds([*FIRST, *start(*ALL), told(1, *ALL, entry=True), again])
    assert found.wrong == [] and found.counted == {1: FIRST[4], 2: again}
    assert [count for _, count in found.starts] == [0, 1]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ([told(2, "0.1", "2.1", by="2.1", weights="x")], "replicas differ in weights"),
        ([told(2, "0.1", "2.1", by="1.1")], "have said that it counts"),
        ([told(4, *ALL)], "round 4 comes after round 2"),
        ([*start(*ALL), told(0, *ALL, entry=True), told(2, *ALL)], "round 2 comes after round 0"),
        ([*start(*ALL), told(1, *ALL, entry=True, weights="x")], "with other weights"),
        ([told(3, "0.1", "2.1", left_out=[])], "of [] left out"),
        ([told(3, *ALL, samples=[0, BATCH * H])], f"samples [0, {BATCH * H}]"),
    ],
)
def test_what_is_wrong_with_the_rounds_of_replicas(more: list[Line], problem: str) -> None:
    assert count_rounds(FIRST).wrong == []
    found = count_rounds([*FIRST, *more])
    assert len(found.wrong) == 1 and problem in found.wrong[0]


def test_the_parts_of_make_soak(capfd: pytest.CaptureFixture[str]) -> None:
    """Each runs whatever the others do; pytest's get the words, and the table has them all."""
    say = "import sys; print(*sys.argv[1:]); sys.exit(len(sys.argv) - 1)"
    parts = {
        "fails": Part((sys.executable, "-c", say, "one")),
        "beside": Part((sys.executable, "-c", say, "two", "three"), beside=True),
        "passes": Part((sys.executable, "-c", say)),
        "of-pytest": Part((*tests.soak.PYTEST, "--version")),
        "also-beside": Part((sys.executable, "-c", say), beside=True),
    }
    results = tests.soak.Runner(["--quiet"]).run(parts)
    assert [(name, code) for name, _, code in results] == [
        ("fails", 1), ("beside", 2), ("passes", 0), ("of-pytest", 0), ("also-beside", 0),
    ]  # fmt: skip
    out = capfd.readouterr().out
    assert "pytest --version --quiet" in out and "one --quiet" not in out
    assert "== beside has ended: exit code 2\ntwo three\n" in out
    text = tests.soak.table([tests.soak.Result("fails", 1.6, 1)], ["rl"], 2.4).splitlines()
    assert [line.split() for line in text] == [
        ["part", "seconds", "result"], ["fails", "2", "exit", "code", "1"],
        ["rl", "not", "run"], ["together", "2"],
    ]  # fmt: skip


def test_parts_run_beside_each_other(tmp_path: Path) -> None:
    """Each waits until the other one has begun; with two of the lane, the second one's turn comes
    after the first."""
    wait = "import pathlib, sys, time; own, other = map(pathlib.Path, sys.argv[1:]); own.touch()\n"
    wait += "while not other.exists(): time.sleep(.02)"
    paths = [str(tmp_path / name) for name in "ab"]
    parts = {
        "tests": Part((sys.executable, "-c", wait, *paths)),
        "faults": Part((sys.executable, "-c", wait, *paths[::-1]), beside=True),
        "site": Part(("test", "-e", paths[1]), beside=True),
    }
    assert [result.code for result in tests.soak.Runner([]).run(parts)] == [0, 0, 0]


def test_ctrl_c_ends_the_parts_that_run_and_leaves_out_the_rest(tmp_path: Path) -> None:
    program = f"""
        import sys, tests.soak
        from tests.soak import Part, main
        sleep = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
        part = lambda name: Part((sys.executable, "-c", sleep, "{tmp_path}/" + name), name == "b")
        tests.soak.PARTS = dict(a=part("a"), b=part("b"), c=part("c"))
        main(["--only", "a", "b", "c"])
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tests.soak.ROOT)},
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    until(lambda: (tmp_path / "a").exists() and (tmp_path / "b").exists(), alive=(process,))
    os.killpg(process.pid, signal.SIGINT)
    lines = process.communicate()[0].splitlines()
    assert [line.split()[0] for line in lines[-4:]] == ["a", "b", "c", "together"]
    assert lines[-2].endswith("not run") and "exit code" in lines[-3]


def test_the_parts_that_make_soak_names_exist() -> None:
    for words, _ in tests.soak.PARTS.values():
        for place in (word for word in words if word.startswith("tests/")):
            assert (tests.soak.ROOT / place).is_dir()
        for module in (word for word in words if word.startswith("benchmarks.")):
            assert (tests.soak.ROOT / f"{module.replace('.', '/')}.py").is_file()
