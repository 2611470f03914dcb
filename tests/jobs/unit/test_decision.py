"""What follows the end of a step: every rule, every fact, and what nobody knows."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kempner.jobs import slurm
from kempner.jobs.records import decision, judge
from kempner.jobs.records.decision import (
    DECISION_RULES,
    StepEnd,
    decide_next,
    decision_table,
    leave_out,
    rule_of,
)
from kempner.jobs.records.faulty_host import excluded_in_vain

ROOT = Path(__file__).parents[3]

# One for each rule, in their order: the least that makes it hold.
EXAMPLES: list[dict[str, Any]] = [
    {"run": "done"},
    {"refused": "no such file"},
    {"job": "ending", "successor": "13"},
    {"job": "cancelled"},
    {"job": "ending"},
    {"batch": False},
    {"interrupt": True},
    {"final": "out of memory"},
    {"site": "away", "waited": 24.0},
    {"no_progress": 3},
    {"site": "no answer", "away": True, "room": True},
    {"room": True},
    {"may_requeue": False},
    {"chain": "last"},
    {"preflight": True, "faulty": ("n1",), "others": 0},
    {"site": "away"},
    {"chain": "next"},
    {},
]

# For each fact, two ends that differ in it alone, and in what follows.
FACTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "run": ({}, {"run": "failed"}),
    "what": ({}, {"what": "a crash"}),
    "refused": ({}, {"refused": "no such file"}),
    "trained": ({"refused": "x"}, {"refused": "x", "trained": True}),
    "final": ({}, {"final": "out of memory"}),
    "site": ({}, {"site": "away"}),
    "away": ({"site": "away", "room": True}, {"site": "away", "room": True, "away": True}),
    "waited": ({"site": "away"}, {"site": "away", "waited": 2.0}),
    "no_progress": ({}, {"no_progress": 3}),
    "job": ({}, {"job": "ending"}),
    "slurm": ({"job": "ending"}, {"job": "ending", "slurm": "PREEMPTED"}),
    "batch": ({}, {"batch": False}),
    "interrupt": ({}, {"interrupt": True}),
    "may_requeue": ({}, {"may_requeue": False}),
    "chain": ({}, {"chain": "next"}),
    "successor": ({"job": "ending"}, {"job": "ending", "successor": "13"}),
    "faulty": ({"others": 9}, {"others": 9, "faulty": ("n1",)}),
    "fault": ({"others": 9, "faulty": ("n1",)}, {"others": 9, "faulty": ("n1",), "fault": "x"}),
    "lost": ({"others": 9, "faulty": ("n1",)}, {"others": 9, "faulty": ("n1",), "lost": True}),
    "broken": (
        {"others": 9, "faulty": ("n1",), "excluded": 2},
        {"others": 9, "faulty": ("n1",), "excluded": 2, "broken": True},
    ),
    "preflight": (
        {"faulty": ("n1",), "others": 0},
        {"faulty": ("n1",), "others": 0, "preflight": True},
    ),
    "spent": ({"others": 9}, {"others": 9, "spent": ("n1",)}),
    "spares": ({"room": True, "lost": True, "faulty": ("n1",)},) * 2,  # see below
    "nodes": ({"faulty": ("a", "b", "c"), "others": 99},) * 2,
    "needed": ({"faulty": ("n1",), "others": 2}, {"faulty": ("n1",), "others": 2, "needed": 3}),
    "others": ({"faulty": ("n1",)}, {"faulty": ("n1",), "others": 2}),
    "in_vain": (
        {"faulty": ("n1",), "others": 2, "no_progress": 3, "trained": True},
        {"faulty": ("n1",), "others": 2, "no_progress": 3, "trained": True, "in_vain": 2},
    ),
    "excluded": (
        {"faulty": ("n1",), "others": 2},
        {"faulty": ("n1",), "others": 2, "excluded": 2},
    ),
    "room": ({}, {"room": True}),
    "created": ({"room": True}, {"room": True, "created": False}),
    "early": ({}, {"early": True}),
    "left": ({"room": True, "start": 30.0}, {"room": True, "start": 30.0, "left": 59.0}),
    "start": ({"room": True, "left": 59.0}, {"room": True, "left": 59.0, "start": 30.0}),
    "max_crashes": ({"no_progress": 3}, {"no_progress": 3, "max_crashes": 4}),
    "max_excluded": (
        {"faulty": ("n1",), "others": 2},
        {"faulty": ("n1",), "others": 2, "max_excluded": 0},
    ),
    "max_wait": (
        {"site": "away", "waited": 30.0},
        {"site": "away", "waited": 30.0, "max_wait": 48.0},
    ),
}
FACTS["spares"] = (FACTS["spares"][0], FACTS["spares"][0] | {"spares": 1})
FACTS["nodes"] = (FACTS["nodes"][0], FACTS["nodes"][0] | {"nodes": 100})


def test_what_is_not_known_never_ends_a_run() -> None:
    assert decide_next(StepEnd()).answer == "requeue"
    for field in dataclasses.fields(StepEnd):
        assert field.default is not dataclasses.MISSING, field.name


def test_each_rule_has_an_example() -> None:
    found = [rule_of(ended, leave_out(ended)) for ended in (StepEnd(**e) for e in EXAMPLES)]
    assert found == list(DECISION_RULES)


@pytest.mark.parametrize("left_out", range(len(DECISION_RULES) - 1))
def test_a_rule_that_is_taken_away_is_missed(
    left_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its example then gets another answer, or other words."""
    ended = StepEnd(**EXAMPLES[left_out])
    before = decide_next(ended)
    monkeypatch.setattr(
        decision, "DECISION_RULES", (*DECISION_RULES[:left_out], *DECISION_RULES[left_out + 1 :])
    )
    assert decide_next(ended) != before


@pytest.mark.parametrize("place", range(len(DECISION_RULES) - 1))
def test_the_order_of_two_rules_counts(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both hold, the first one decides."""
    both = StepEnd(**EXAMPLES[place + 1] | EXAMPLES[place])
    nodes = leave_out(both)
    if not (
        DECISION_RULES[place].holds(both, nodes) and DECISION_RULES[place + 1].holds(both, nodes)
    ):
        pytest.skip("they exclude each other")
    assert rule_of(both, nodes) in DECISION_RULES[: place + 1]


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(StepEnd)])
def test_each_fact_counts(name: str) -> None:
    one, other = (StepEnd(**given) for given in FACTS[name])
    differ = [
        f.name for f in dataclasses.fields(StepEnd) if vars(one)[f.name] != vars(other)[f.name]
    ]
    assert differ == [name] and decide_next(one) != decide_next(other)


def test_an_end_takes_a_reason_that_is_known() -> None:
    """No fact of the nodes, and no number of them that nobody knows, ends a run alone."""
    for name in ("faulty", "spent", "lost", "broken", "preflight", "created", "others", "trained"):
        ended = StepEnd(**FACTS[name][1] | {"others": None})
        assert decide_next(ended).answer in ("restart", "requeue"), name


def test_the_pause_grows_with_the_time_waited() -> None:
    pauses = [decide_next(StepEnd(site="away", waited=hours)).pause for hours in (0, 0.2, 1, 10)]
    assert pauses == [1, 3, 15, 60]
    assert decide_next(StepEnd(no_progress=1)).pause == 0


def test_nodes_that_are_left_out() -> None:
    def out(**given: Any) -> tuple[tuple[str, ...], str]:
        made = decide_next(StepEnd(fault="failed twice in a row", **given))
        return made.excluded, " ".join(made.notes)

    assert out(faulty=("a",), others=2) == (("a",), "")
    assert out(faulty=("a",), others=0)[1].endswith(
        "the other nodes that could take this job, 0, are too few"
    )
    many = tuple(f"n{i}" for i in range(40))
    assert out(faulty=many, others=500, nodes=128)[0] == ()  # 6 at most
    assert "the limit is 6 (KEMPNER_EXCLUDE)" in out(faulty=many, others=500, nodes=128)[1]
    assert out(faulty=many[:6], others=500, nodes=128)[0] == many[:6]
    assert out(faulty=("a",), others=5, excluded=2, broken=True)[0] == ("a",)
    assert out(faulty=("a",), others=5, max_excluded=0, broken=True) == ((), "")


def test_a_job_that_cannot_be_requeued_restarts_on_its_node() -> None:
    """Nothing is left out where no start follows that could do without it."""
    given: dict[str, Any] = {"faulty": ("n1",), "others": 9, "room": True, "may_requeue": False}
    assert decide_next(StepEnd(**given, no_progress=2)).answer == "restart"
    assert decide_next(StepEnd(**given, no_progress=3)).answer == "end"
    assert decide_next(StepEnd(**given, no_progress=2, broken=True)).answer == "end"
    assert decide_next(StepEnd(**given, no_progress=2, chain="next")).answer == "chain"


def test_a_node_that_is_left_out_begins_the_count_anew() -> None:
    """Up to the limit, and where the program has proved itself or has not even begun."""
    third = {"faulty": ("n1",), "others": 9, "no_progress": 3}
    assert decide_next(StepEnd(**third)).answer == "end"  # a new program may fail wherever it runs
    for sure in ("trained", "broken"):
        made = decide_next(StepEnd(**third | {sure: True}))
        assert (made.answer, made.excluded, made.no_progress) == ("requeue", ("n1",), 0), sure
        assert decide_next(StepEnd(**third | {sure: True, "in_vain": 2})).answer == "end"
        assert decide_next(StepEnd(**third | {sure: True, "others": None})).answer == "end"
    assert decide_next(StepEnd(no_progress=2)).no_progress == 2


def test_a_node_on_which_the_run_would_end_is_left_out_beyond_the_limit() -> None:
    """Others were excluded that day, after which the run came further; it is not led from node to
    node."""
    third = {"faulty": ("n1",), "others": 9, "no_progress": 3, "trained": True, "excluded": 2}
    assert decide_next(StepEnd(**third)).excluded == ("n1",)
    assert decide_next(StepEnd(**third)).answer == "requeue"
    for more in ({"no_progress": 2}, {"in_vain": 2}, {"trained": False}, {"max_excluded": 0}):
        assert decide_next(StepEnd(**third | more)).excluded == ()


def test_exclusions_with_a_checkpoint_in_between_were_not_in_vain() -> None:
    """Each sets the count of attempts to 0, also the one that came no further."""

    def gone(host: str, step: int | None) -> dict[str, Any]:
        return {"decision": "requeue", "excluded": host, "no_progress": 0, "step": step}

    assert excluded_in_vain([gone("n1", 20), gone("n2", 20), gone("n2", 20)]) == 2
    assert excluded_in_vain([gone("n1", 20), gone("n2", 30)]) == 1
    assert excluded_in_vain([gone("n1", -1), gone("n2", None), gone("n3", None)]) == 3
    further = {"decision": "restart", "no_progress": 0, "step": 40}
    assert excluded_in_vain([gone("n1", 20), further]) == 0
    assert excluded_in_vain([gone("n1", 20), {**further, "step": 20, "no_progress": 1}]) == 1


def test_the_table_of_the_page() -> None:
    """Write it there when a rule changes: python -c 'from kempner.jobs.records import decision;
    print(decision.decision_table())'."""
    assert decision_table() in (ROOT / "docs/reference/slurm.md").read_text()


# --- judge.py -------------------------------------------------------------------------------------

BASE = {
    "run": "", "what": "the step ended", "code": "1", "committed": "-1", "committed_before": "-1",
    "jobs": "2", "attempt": "2.2.7", "job": "running", "batch": "1", "requeue": "1", "nodes": "2",
    "places": "node1 node2", "began": "1000",
}  # fmt: skip


def ask(
    run_dir: Path, capsys: pytest.CaptureFixture[str], log: Path = Path("none"), **facts: str
) -> dict[str, str]:
    words = [f"{name}={value}" for name, value in (BASE | facts).items()]
    judge.main(str(run_dir), str(log), *words)
    mark, *lines = capsys.readouterr().out.splitlines()
    assert mark == "kempner-answer" and len(lines) == len(judge.DECISION_FIELDS)
    return dict(zip(judge.DECISION_FIELDS, lines, strict=True))


def write(run_dir: Path, records: Sequence[dict[str, Any]]) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records) + '{"event": "fau'
    (run_dir / "attempts.jsonl").write_text(text)


def made(job: str, **values: object) -> dict[str, object]:
    return {"event": "decision", "job": job, "time": 1.0, **values}


def crash(*hosts: str, **values: object) -> dict[str, object]:
    return {"event": "fault", "kind": "crash", "hosts": list(hosts), "attempt_id": "2.2.7"} | values


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "other_nodes", lambda request, without: 9)


def test_only_this_job_and_only_this_attempt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        tmp_path,
        [
            made("1", no_progress=5, blamed="node9", excluded="node9"),
            made("2", no_progress=1, blamed="node3", excluded="node8"),
            {"event": "first_step", "time": 1042.0, "attempt_id": "2.2.7"},
            crash("node9", attempt_id="2.0.1"),
            crash("node3"),
        ],
    )
    said = ask(tmp_path, capsys)
    assert (said["decision"], said["no_progress"], said["blamed"]) == ("requeue", "2", "node3")
    assert (said["excluded"], said["fault"]) == ("node3", "failed twice in a row")
    assert said["why"] == "the step ended; without node3: failed twice in a row"
    assert said["start"] == "42"


def test_bad_input_only_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, [])
    said = ask(tmp_path, capsys, code="2", refusal="no such file")
    assert (said["decision"], said["why"]) == ("end", "bad input: no such file")
    assert said["kind"] == "bad input"
    first = {"event": "first_step", "time": 1.0, "job": "2", "attempt_id": "2.0.1"}
    write(tmp_path, [first])
    said = ask(tmp_path, capsys, code="2", refusal="node1: no CUDA device", room="1")
    assert (said["decision"], said["kind"]) == ("requeue", "host")  # not in place: the same node
    start = {"event": "start", "time": 1.0, "job": "1", "attempt_id": "1.0.1", "command": "abc"}
    write(tmp_path, [start, first | {"job": "1", "attempt_id": "1.0.1"}])
    assert ask(tmp_path, capsys, code="2", command="abc")["decision"] == "requeue"
    assert ask(tmp_path, capsys, code="2", command="xyz")["decision"] == "end"


def test_a_run_that_another_job_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who has trained in it waits for that job's end; who has not is one too many. No host is to
    blame, however often."""
    log, run_dir = tmp_path / "srun.log", tmp_path / "run"
    log.write_text("srun: error: node1: task 0: Exited with exit code 2\n")
    words = "runs/a is in use by job 9 on node7: wait for it or cancel it, or give this run a ..."
    first = {"event": "first_step", "time": 1.0, "job": "2", "attempt_id": "2.0.1"}
    blamed = made("2", blamed="node1", no_progress=1)
    write(run_dir, [first, blamed])
    said = ask(run_dir, capsys, log, code="2", refusal=words, room="1")
    assert (said["decision"], said["kind"], said["no_progress"]) == ("requeue", "site", "1")
    assert (said["blamed"], said["excluded"], said["pause"]) == ("", "", "1")
    assert said["why"] == "runs/a is in use by job 9 on node7: the next start waits 1 min"
    # Any other end is none of this: "is in use by" may be said of a port, too.
    said = ask(run_dir, capsys, log, code="1", refusal=words, room="1")
    assert (said["kind"], said["blamed"], said["excluded"]) == ("host", "node1", "node1")
    # The same command, and a step of the other job alone.
    start = {"event": "start", "time": 1.0, "job": "9", "attempt_id": "9.0.1", "command": "abc"}
    write(run_dir, [start, first | {"job": "9", "attempt_id": "9.0.1"}, blamed])
    said = ask(run_dir, capsys, log, code="2", refusal=words, command="abc")
    assert (said["decision"], said["kind"], said["blamed"]) == ("end", "bad input", "")


def test_a_file_system_that_is_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is nobody's crash: the count stands still, the pause grows, and the time has a limit."""
    storm = [crash("node1", reason="OSError: [Errno 5] Input/output error: x")]
    write(tmp_path, storm)
    assert ask(tmp_path, capsys)["kind"] != "site"  # on one host of two it is that host's
    late = "TimeoutError: [Errno 110] Connection timed out"
    write(tmp_path, [*storm, crash("node2", reason=late)])
    assert ask(tmp_path, capsys)["kind"] != "site"  # of a connection
    write(tmp_path, [*storm, crash("node2", reason=f"{late}: '/data/a.npy'")])
    assert ask(tmp_path, capsys)["kind"] == "site"
    storm.append(crash("node2", reason="OSError: [Errno 116] Stale file handle"))
    write(tmp_path, [made("2", no_progress=2), *storm])
    said = ask(tmp_path, capsys)
    assert (said["decision"], said["kind"], said["no_progress"]) == ("requeue", "site", "2")
    assert said["pause"] == "1"
    write(tmp_path, [made("2", no_progress=2, kind="site"), *storm])  # since 1970
    said = ask(tmp_path, capsys)
    assert said["decision"] == "end" and "KEMPNER_MAX_WAIT=24" in said["why"]
    said = ask(tmp_path / "unmounted", capsys, before="2")
    assert (said["decision"], said["kind"], said["no_progress"]) == ("requeue", "site", "2")
    (tmp_path / "odd" / "attempts.jsonl").mkdir(parents=True)  # EISDIR, as EIO would be
    assert ask(tmp_path / "odd", capsys, before="1", code="2")["kind"] == "site"


def test_a_file_system_that_fails_on_one_node_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job of one node blames it, and leaves it out; where the next one fails in the same way, it
    is the file system, for as long as the run makes no progress."""

    def failed(host: str, attempt_id: str, **values: object) -> list[dict[str, object]]:
        reason = "OSError: [Errno 116] Stale file handle: '/data'"
        own = {"attempt_id": attempt_id, "committed": 40, "blamed": host}
        return [crash(host, reason=reason, attempt_id=attempt_id), made("2", **own | values)]

    first = failed("node1", "2.0.1", no_progress=1)
    first += failed("node1", "2.0.1.1", no_progress=0, excluded="node1")
    (last, _) = failed("node2", "2.2.7")
    facts = {"nodes": "1", "committed_before": "40", "committed": "40", "room": "1"}
    write(tmp_path, [*first, last])
    said = ask(tmp_path, capsys, **facts)
    assert (said["decision"], said["kind"], said["pause"]) == ("requeue", "site", "1")
    assert said["why"].startswith("a file system fails on 2 hosts: OSError: [Errno 116]")
    # And again on that node, an hour later: a site's fault is not counted, but waited for.
    hour = failed("node2", "2.1.3", no_progress=0, kind="site", time=time.time() - 3600)
    write(tmp_path, [*first, *hour, last])
    said = ask(tmp_path, capsys, **facts)
    assert (said["decision"], said["kind"], said["pause"]) == ("requeue", "site", "15")
    # Not after progress, of this attempt or of a lost one, nor if it is another error; and where
    # another node of the job has no such error, it is this one.
    for other in ({"committed": "41"}, {"committed": "41", "committed_before": "41"}):
        assert ask(tmp_path, capsys, **facts | other)["kind"] == "host"
    assert ask(tmp_path, capsys, **facts | {"nodes": "2"})["kind"] == "host"
    write(tmp_path, [*first, last | {"reason": "KeyError: 1"}])
    assert ask(tmp_path, capsys, **facts)["decision"] == "restart"


def test_a_step_that_the_controller_did_not_create(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No attempt has begun: the script has waited for an answer, and goes on where it is."""
    log, run_dir = tmp_path / "srun.log", tmp_path / "run"
    write(run_dir, [made("2", no_progress=2, step=10)])
    refused = "srun: error: Unable to create step for job 2: "
    log.write_text(f"{refused}Socket timed out on send/recv operation\n")
    said = ask(run_dir, capsys, log, room="1", not_created="1")
    assert (said["decision"], said["kind"], said["no_progress"]) == ("restart", "site", "2")
    assert "Socket timed out" in said["why"]
    assert ask(run_dir, capsys, log)["decision"] == "requeue"  # no room: KEMPNER_RESTARTS
    log.write_text(f"{refused}Invalid generic resource (gres) specification\n")
    said = ask(run_dir, capsys, log, room="1", not_created="1")
    assert (said["decision"], said["no_progress"]) == ("end", "3")


def test_progress_of_an_attempt_that_was_lost_with_its_batch_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no decision; that it came further is seen by the next one."""
    write(tmp_path, [made("2", no_progress=2, step=100)])
    assert ask(tmp_path, capsys, committed="100", committed_before="100")["no_progress"] == "3"
    said = ask(tmp_path, capsys, committed="900", committed_before="900")
    assert (said["decision"], said["no_progress"]) == ("requeue", "1")
    # Under run.sh the progress is a count of checkpoints, and `step` the number in their names.
    for step in (2000, 3, None):
        write(tmp_path, [made("2", no_progress=2, step=step, committed=4)])
        assert ask(tmp_path, capsys, committed="57", committed_before="57")["no_progress"] == "1"
        assert ask(tmp_path, capsys, committed="4", committed_before="4")["no_progress"] == "3"


def test_a_program_whose_steps_are_unknown_restarts_in_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After ten hours of a job of 24 its start has taken seconds, not ten hours."""
    began = time.time() - 36_000
    job = {"began": f"{began}", "left": "46800", "room": "1", "requeue": "0"}
    start = {"event": "start", "attempt_id": "2.2.7", "time": began + 8}
    write(tmp_path, [start | {"step": None}, crash("node1")])
    said = ask(tmp_path, capsys, **job)
    assert (said["decision"], said["start"], said["notes"]) == ("restart", "8", "")
    # Once it has shown a step, that ends its start; and the trainer has done none yet.
    first = {"event": "first_step", "attempt_id": "2.2.7", "time": began + 60}
    write(tmp_path, [start | {"step": None}, first, crash("node1")])
    assert ask(tmp_path, capsys, **job)["start"] == "60"
    write(tmp_path, [start | {"step": 0}, crash("node1")])
    assert ask(tmp_path, capsys, **job)["decision"] == "end"


def test_a_script_that_no_host_sees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was removed, and the batch host does not see it either: no host is to blame."""
    log, run_dir = tmp_path / "srun.log", tmp_path / "run"
    log.write_text(
        "srun: error: node2: task 1: Exited with exit code 127\n"
        f"bash: {tmp_path}/code/1/scripts/slurm/lib/task.sh: No such file or directory\n"
    )
    write(run_dir, [made("2", blamed="node2", no_progress=1)])
    said = ask(run_dir, capsys, log, code="127")
    assert (said["blamed"], said["excluded"]) == ("", "")


def test_a_start_that_ends_before_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a later start of a run that has trained: the host is to blame, and there is a pause that
    grows. Bad input is counted; any other end is waited for by time, as it may be the site's."""
    first = {"event": "first_step", "time": 1.0, "job": "2", "attempt_id": "2.0.1"}
    write(tmp_path, [first, made("2", no_progress=1, blamed="node1")])
    said = ask(tmp_path, capsys, code="2", early="node2")
    assert (said["decision"], said["blamed"], said["excluded"]) == ("requeue", "node2", "")
    assert (said["no_progress"], said["pause"], said["kind"]) == ("2", "5", "host")
    assert ask(tmp_path, capsys, code="2", early="node1")["excluded"] == "node1"
    said = ask(tmp_path, capsys, code="1", early="node2", what="ended with exit code 1")
    assert (said["decision"], said["kind"], said["no_progress"]) == ("requeue", "site", "1")
    assert said["blamed"] == "node2" and said["pause"] == "1"
    write(tmp_path, [])  # and where it has not trained, it may be the program
    said = ask(tmp_path, capsys, code="1", early="node2", no_progress="0")
    assert (said["kind"], said["no_progress"], said["pause"]) == ("", "1", "1")


def test_a_host_that_could_not_be_excluded_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm did not take the order: it is given again, and is one of two that may be left out."""
    now = time.time()
    out = made("2", no_progress=0, blamed="node1", excluded="node1") | {"time": now}
    first = {"event": "first_step", "time": now, "job": "2", "attempt_id": "2.0.1"}
    write(tmp_path, [first, out, out, crash("node1")])
    assert ask(tmp_path, capsys)["excluded"] == "node1"


def test_one_broken_host_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hosts that do not see the shared directory: each is left out at its second time, also beyond
    KEMPNER_EXCLUDE, and it is not the program that fails three times in a row."""
    log = tmp_path / "srun.log"
    run_dir = tmp_path / "run"
    records: list[dict[str, Any]] = []
    answers = []
    for n in range(1, 10):
        host = f"node{(n + 1) // 2}"
        log.write_text(
            f"srun: error: {host}: task 1: Exited with exit code 127\n"
            "srun: launch/slurm: _step_signal: Terminating StepId=2.0\n"
            f"bash: {ROOT}/scripts/slurm/lib/task.sh: No such file or directory\n"
        )
        write(run_dir, records)
        said = ask(run_dir, capsys, log, code="127")
        answers.append((said["decision"], said["blamed"], said["excluded"], said["no_progress"]))
        records.append(made("2", **said | {"no_progress": int(said["no_progress"])}))
    assert answers == [
        ("requeue", "node1", "", "1"),
        ("requeue", "node1", "node1", "0"),
        ("requeue", "node2", "", "1"),
        ("requeue", "node2", "node2", "0"),
        ("requeue", "node3", "", "1"),
        ("requeue", "node3", "node3", "2"),  # out, but no bound else: the count stands
        ("end", "node4", "", "3"),
        ("end", "node4", "", "4"),
        ("end", "node5", "", "5"),
    ]
    assert not judge.jobs_have_trained(records, ["2"], "")
    write(run_dir, [*records[:4], made("2", no_progress=0), *records[:2]])
    log.write_text("srun: error: node3: task 1: Exited with exit code 1\n")  # no module torch
    assert ask(run_dir, capsys, log)["blamed"] == "node3"


@pytest.mark.parametrize("folder", [".", "replicas/1"])
def test_a_broken_gpu_is_to_blame_at_the_first_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    """Whatever else the ranks say; but not for a warning, and not for another attempt's."""

    def found(host: str, answer: str, attempt_id: str = "2.2.7") -> dict[str, Any]:
        about = {"host": host, "answer": answer, "attempt_id": attempt_id}
        return {"event": "gpu", **about, "reason": f"GPU 1: of\n{host}"}

    gpus = [
        found("node1", "end", "2.1.5"),
        found("node2", "warn"),
        found("node3", "note"),
        found("node4", "exclude"),
        found("node5", "end"),
    ]
    write(tmp_path, [crash("node9")])
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write("\n")
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    with (tmp_path / folder / "attempts.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in gpus)
    said = ask(tmp_path, capsys)
    assert (said["blamed"], said["excluded"]) == ("node4", "node4")
    assert said["fault"] == "has a broken GPU 1: of node4"
    assert ask(tmp_path, capsys, attempt="2.3.9")["blamed"] == ""


@pytest.mark.parametrize("state", ["", "interrupted"])
@pytest.mark.parametrize("hosts", [["node4"], ["node4", "node5"], []])
def test_hosts_that_compute_wrong_numbers_are_left_out_at_the_first_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hosts: list[str], state: str
) -> None:
    """Also after an orderly end: the fault was mended, and the run leaves the host."""
    fault = {**crash("node4"), "kind": "corruption", "hosts": hosts, "reason": "wrong numbers"}
    write(tmp_path, [{**crash("node9"), "lost_peer": True}, fault])
    answer = ask(tmp_path, capsys, run=state)
    assert answer["excluded"] == answer["blamed"] == ",".join(hosts)
    assert answer["decision"] == "requeue" if hosts else True


def test_exclusions_of_another_day_broken_gpus_and_spares_use_up_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1e9
    monkeypatch.setattr(judge.time, "time", lambda: now)
    old = [made("2", excluded=f"old{i}", time=now - 90000, decision="requeue") for i in range(3)]
    gpu = made("2", excluded="x", time=now, decision="requeue", why="x: has a broken GPU 0")
    spared = made("2", excluded="y,z", time=now, decision="restart")  # spares have replaced them
    new = made("2", excluded="a,b", blamed="node3", time=now - 60, decision="requeue")
    for last, excluded in ((made("2", blamed="node3", time=now), "node3"), (new, "")):
        write(tmp_path, [*old, gpu, spared, last, crash("node3")])
        said = ask(tmp_path, capsys, max_crashes="99")
        assert said["excluded"] == excluded, said
    assert "2 were in the last day" in said["notes"]
