"""The wall time of a run from its records: made-up runs whose every second is known, and records
that no run would leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kempner.jobs.records.run_history import History, load_history
from kempner.jobs.report.wall_time import TIME_PARTS
from kempner.jobs.slurm import SlurmJob

BEGAN = 1_700_000_000.0
PACE, FIRST = 2.0, 12.0  # seconds of a step, and of the first one
SAVE, VALIDATE = 0.5, 3.0  # that the steps are held up
EVERY = 10  # steps between lines
ENDS = {  # of an attempt: its state, and whether it is told what it has done after its last line
    "done": ("done", True),
    "interrupted": ("interrupted", True),
    "stopped": ("stopped", True),
    "crash": ("crashed", True),
    "hang": ("hung", True),
    "kill": ("killed", False),
}


class MadeUp:
    """Writes the records that a run would leave, and counts its seconds by another way: step by
    step, once it is known which ones stand."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True)
        self.path, self.now, self.number = path, BEGAN, -1
        self.parts = dict.fromkeys(TIME_PARTS, 0.0)
        self.done: list[tuple[int, int, float]] = []  # attempt, step, seconds of training
        self.resumes: list[tuple[int, int]] = []  # attempt, step that it resumes from
        self.saved, self.between = 0, "not running"

    def write(self, name: str, **record: Any) -> None:
        with open(self.path / f"{name}.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")

    def event(self, event: str, step: int, /, **more: Any) -> None:
        self.write(
            "attempts", event=event, attempt=self.number, time=self.now, job="12",
            restart=self.number, attempt_id=f"12.{self.number}", step=step, **more,
        )  # fmt: skip

    def spend(self, part: str, seconds: float) -> None:
        self.now += seconds
        self.parts[part] += seconds

    def attempt(
        self,
        first: int,
        last: int,
        end: str,
        *,
        idle: float = 0.0,
        startup: float = 7.0,
        shutdown: float = 5.0,
        save_every: int = 20,
        pace: float = PACE,
        decision: str = "requeue",
        stall: tuple[int, float] = (0, 0.0),
        **fault: Any,
    ) -> None:
        """Steps `first` + 1 to `last`; one that ends in order saves its last step. `stall`: a step,
        and the seconds that it took more."""
        self.number += 1
        self.spend(self.between, idle if self.number else 0.0)  # the run begins after that
        batch_began = self.now
        self.spend("start-up", startup)
        self.resumes.append((self.number, first))
        self.event(
            "start", first, nodes=["n1", "n2"], world_size=4,
            batch_began=batch_began, process_began=batch_began + 1,
        )  # fmt: skip
        state, is_told = ENDS[end]
        self.between = "ended" if state in ("done", "stopped") else "not running"
        known = last if is_told else max(last // EVERY * EVERY, last // save_every * save_every)
        self._steps(first, last, known, save_every, pace, stall)
        self.spend("shutdown", shutdown)
        if state in ("done", "interrupted", "stopped"):
            self.saved = last
            self.event("end", last, state=state, reason=f"why {end}")
        elif is_told:
            self.event("fault", last, kind=end, ranks=[3], hosts=["n2"], lost_peer=False,
                       reason=f"why {end}", **fault)  # fmt: skip
        self.decide(decision)

    def _steps(
        self,
        first: int,
        last: int,
        known: int,
        save_every: int,
        pace: float,
        stall: tuple[int, float],
    ) -> None:
        """A line has the means since the one before, and is written when the next step is done."""
        lap = dict.fromkeys(("step_time", "checkpoint_time", "eval_time"), 0.0)
        before, due = first, None

        def spend(part: str, seconds: float, *, told: bool) -> None:
            self.spend(part if told else "shutdown", seconds)
            lap["step_time"] += seconds
            if part in ("saving", "validation"):
                lap["checkpoint_time" if part == "saving" else "eval_time"] += seconds

        for step in range(first + 1, last + 1):
            if step == first + 1:
                spend("start-up", FIRST, told=True)
                self.event("first_step", step)
                self.done.append((self.number, step, 0.0))
            else:
                if step == stall[0]:
                    self.spend("stalled", stall[1])
                    lap["step_time"] += stall[1]
                self.now += pace
                lap["step_time"] += pace
                if step <= known:
                    self.done.append((self.number, step, pace))
                else:
                    self.parts["shutdown"] += pace
            if due:
                self.write("metrics", **due, time=self.now)
                due = None
            if step % EVERY == 0:
                means = {key: seconds / (step - before) for key, seconds in lap.items()}
                due = {"step": step, "attempt": self.number, "loss": 2.0, **means}
                before, lap = step, dict.fromkeys(lap, 0.0)
            if step % save_every == 0:  # what comes after the last line is told by nothing
                self.saved = step
                spend("saving", SAVE, told=step < last // EVERY * EVERY)
            if step % 40 == 0:
                self.write("metrics", step=step, attempt=self.number, val_loss=2.5, time=self.now)
                spend("validation", VALIDATE, told=step < last // EVERY * EVERY)
        if due:
            self.write("metrics", **due, time=self.now)

    def decide(self, decision: str, **more: Any) -> None:
        self.write(
            "attempts", event="decision", decision=decision, why="so it is", job="12",
            restart=self.number, attempt_id=f"12.{self.number}", step=self.saved, no_progress=0,
            time=self.now, **more,
        )  # fmt: skip

    def stands(self, attempt: int, step: int, at_end: float) -> bool:
        return step <= min([at_end, *(s for a, s in self.resumes if a > attempt)])

    def check(self) -> History:
        """Compare with what the records tell."""
        run = load_history(self.path)
        orderly = run.attempts[-1].state in ("done", "interrupted", "stopped")
        at_end = float("inf") if orderly else self.saved
        lost = [0] * len(self.resumes)
        for attempt, step, seconds in self.done:
            stands = self.stands(attempt, step, at_end)
            self.parts["training" if stands else "lost"] += seconds
            lost[attempt] += not stands
        assert run.wall_time.lost == lost
        assert run.wall_time.parts == pytest.approx(self.parts, abs=1e-4)
        assert run.wall_time.total == pytest.approx(self.now - BEGAN, abs=1e-6)
        assert run.wall_time.effective == pytest.approx(
            self.parts["training"] / (run.wall_time.total - self.parts["ended"])
        )
        return run


@pytest.fixture
def made(tmp_path: Path) -> MadeUp:
    return MadeUp(tmp_path / "run")


def test_six_attempts(made: MadeUp) -> None:
    made.attempt(0, 47, "interrupted")
    made.attempt(47, 95, "crash", idle=30)
    made.attempt(80, 118, "hang", idle=90, shutdown=125)
    made.attempt(100, 133, "stopped", idle=60, decision="end", pace=3.0)
    made.attempt(133, 177, "kill", idle=4000)
    made.attempt(160, 200, "done", idle=11, startup=31, decision="end")
    run = made.check()
    assert run.wall_time.lost == [0, 15, 18, 0, 10, 0]  # of the kill, 7 more are in no record
    assert [a.state for a in run.attempts] == [
        "interrupted", "crashed", "hung", "stopped", "killed", "done",
    ]  # fmt: skip
    assert [a.decision for a in run.attempts] == [
        "requeue", "requeue", "requeue", "end", "requeue", "end",
    ]  # fmt: skip
    assert run.wall_time.startups == [19.0, 19.0, 19.0, 19.0, 19.0, 43.0]
    assert run.wall_time.parts["not running"] == 30 + 90 + 60 + 11
    assert run.wall_time.parts["ended"] == 4000  # a user continued it by hand
    assert run.wall_time.parts["shutdown"] > 125


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_made_up_run(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    made = MadeUp(tmp_path_factory.mktemp("made") / "run")
    for least in (20, *[1] * data.draw(st.integers(0, 5))):  # a first line tells the pace
        first = made.saved
        last = first + data.draw(st.integers(least, 90))
        end = data.draw(st.sampled_from(sorted(ENDS)))
        times = {key: data.draw(st.floats(0, 500)) for key in ("idle", "startup", "shutdown")}
        made.attempt(first, last, end, save_every=data.draw(st.integers(1, 50)), **times)
    made.check()


garbage = st.one_of(st.none(), st.integers(-5, 50), st.floats(0, 1000), st.text(max_size=3))
records = st.fixed_dictionaries(
    {
        "time": st.floats(BEGAN, BEGAN + 1000) | garbage,
        "step": st.integers(0, 60) | st.none(),
    },
    optional={
        "event": st.sampled_from(["start", "first_step", "fault", "end", "decision", "new"]),
        "attempt": st.integers(0, 4) | st.none(),
        "attempt_id": st.sampled_from(["a", "b", None]),
        "kind": st.sampled_from(["crash", "hang", "other"]),
        "lost_peer": st.booleans(),
        "state": st.sampled_from(["done", "interrupted", "failed"]),
        "process_began": st.floats(BEGAN - 10, BEGAN + 1000) | st.none(),
        "batch_began": st.floats(BEGAN - 10, BEGAN + 1000) | st.none(),
        "nodes": st.lists(st.text(max_size=2)) | st.none(),
        "loss": st.floats(0, 9),
        "val_loss": st.floats(0, 9),
        "not_finite": st.just(True),
        "step_time": st.floats(0, 100),
        "checkpoint_time": st.floats(0, 100),
        "eval_time": st.floats(0, 100),
    },
)


@settings(max_examples=300, deadline=None)
@given(events=st.lists(records, max_size=14), lines=st.lists(records, max_size=20))
def test_whatever_the_records_are_the_parts_are_the_wall_time(
    tmp_path_factory: pytest.TempPathFactory, events: list[Any], lines: list[Any]
) -> None:
    path = tmp_path_factory.mktemp("records")
    for name, found in (("attempts", events), ("metrics", lines)):
        text = "".join(json.dumps(record) + "\n" for record in found)
        (path / f"{name}.jsonl").write_text(f'{{"event": "sta\n[]\n{text}{{"torn": ')
    run = load_history(path)
    spent = run.wall_time
    assert min(spent.parts.values()) >= 0
    assert sum(spent.parts.values()) == pytest.approx(spent.total, abs=1e-6)
    assert len(spent.lost) == len(spent.startups) == len(run.attempts)
    assert min((steps for steps in spent.lost if steps is not None), default=0) >= 0
    times = [time for a in run.attempts for time in (a.opened, a.ended)]
    assert not spent.phases or spent.phases[-1].ended <= max(times)
    assert all(a.ended == b.began for a, b in zip(spent.phases, spent.phases[1:], strict=False))


def test_an_attempt_without_a_line_has_the_pace_of_the_others(made: MadeUp) -> None:
    """But not of their first lines, in which there is the first step."""
    made.attempt(0, 20, "interrupted")
    made.attempt(20, 25, "crash", shutdown=100, decision="end")
    assert made.check().wall_time.parts["lost"] == 4 * PACE  # without the first one, as everywhere


def test_a_decision_belongs_to_its_attempt_not_to_the_first(made: MadeUp) -> None:
    made.attempt(0, 40, "interrupted")
    made.attempt(40, 80, "crash", decision="end")
    first, second = load_history(made.path).attempts
    assert (first.state, first.last_step, first.decision) == ("interrupted", 40, "requeue")
    assert (second.state, second.decision, second.why) == ("crashed", "end", "so it is")


def test_a_decision_about_an_attempt_that_never_began(made: MadeUp) -> None:
    made.attempt(0, 40, "interrupted")
    made.number += 1
    made.spend("not running", 20)
    made.decide("requeue", excluded="n2")
    made.resumes.append((1, 40))
    made.attempt(40, 80, "done", idle=20, decision="end")
    run = made.check()
    assert [(a.number, a.state, a.decision) for a in run.attempts] == [
        (0, "interrupted", "requeue"), (-1, "killed", "requeue"), (2, "done", "end"),
    ]  # fmt: skip
    assert run.attempts[1].excluded == "n2" and run.wall_time.startups[1] is None


def test_the_rank_that_only_lost_a_peer_is_no_cause(made: MadeUp) -> None:
    made.number = 0
    made.event("start", 0)
    made.event("fault", 5, kind="crash", lost_peer=True, reason="connection closed")
    made.event("fault", 5, kind="hang", hosts=["n2"], reason="no step for 120 s")
    made.event("fault", 5, kind="crash", lost_peer=False, reason="too late")
    (attempt,) = load_history(made.path).attempts
    assert (attempt.state, attempt.reason) == ("hung", "no step for 120 s")


def test_a_rank_that_was_killed_is_missed_by_another(made: MadeUp) -> None:
    made.number = 0
    made.event("start", 0)
    reason = "rank 1 on n2: RuntimeError: [pair.cc:553] connection closed: [10.0.0.1]"
    made.event("fault", 5, kind="crash", lost_peer=True, reason=reason)
    (attempt,) = load_history(made.path).attempts
    assert attempt.state == "crashed"
    assert (
        attempt.reason == "a rank died, no error recorded; rank 1 on n2 lost the connection to it"
    )


def test_the_end_of_a_run_that_saved_it_wins_over_a_crash_while_leaving(made: MadeUp) -> None:
    made.attempt(0, 40, "done", decision="end")
    made.event("fault", 40, kind="crash", lost_peer=False, reason="the barrier")
    made.spend("shutdown", 0)
    assert made.check().attempts[0].state == "done"


def test_steps_after_the_last_checkpoint_of_a_run_that_does_not_go_on_are_lost(
    made: MadeUp,
) -> None:
    made.attempt(0, 58, "crash", decision="end")
    assert made.check().wall_time.lost == [18]  # the decision names step 40
    checkpoints = made.path / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "latest").symlink_to("step_00000050")  # the truth of now
    assert load_history(made.path).wall_time.lost == [8]


def test_a_step_that_stood_still_is_no_training(made: MadeUp) -> None:
    """The network was away for a minute; the run went on by itself."""
    made.attempt(0, 60, "done", stall=(37, 60.0), decision="end")
    assert made.check().wall_time.parts["stalled"] == pytest.approx(60.0, abs=0.5)


def test_the_next_start_tells_of_steps_that_no_line_does(made: MadeUp) -> None:
    """It was killed behind a save that comes after its last line, and nobody decided anything."""
    made.attempt(0, 47, "kill", save_every=43)
    made.attempt(43, 60, "done")
    text = (made.path / "attempts.jsonl").read_text().splitlines(keepends=True)
    text = [line for line in text if '"decision"' not in line]
    (made.path / "attempts.jsonl").write_text("".join(text))
    run = load_history(made.path)
    assert run.attempts[0].last_step == 43 and run.wall_time.lost == [0, 0]


def test_steps_that_an_attempt_itself_went_back_over(made: MadeUp) -> None:
    """Steps 26 to 35 were not finite: back to 20, from where the next line is that of 30 again."""
    made.number = 0
    made.event("start", 0)
    made.now += 10
    made.event("first_step", 1)

    def line(step: int, count: int, seconds: float) -> None:
        made.now = BEGAN + seconds
        made.write("metrics", step=step, attempt=0, time=made.now, loss=2.0, step_time=seconds_of)

    for step, count, seconds in ((10, 10, 28), (20, 10, 48), (30, 10, 68)):
        seconds_of = 2.8 if step == 10 else 2.0
        line(step, count, seconds)
    for step in range(31, 36):
        made.now = BEGAN + 68 + 2 * (step - 30)
        made.write("metrics", step=step, attempt=0, time=made.now, not_finite=True)
    seconds_of = 30.0  # the whole lap: 5 steps, and 10 again
    line(30, 1, 98)
    made.event("end", 30, state="done")
    spent = load_history(made.path).wall_time
    assert spent.lost == [15]
    assert spent.parts["lost"] == pytest.approx(30, abs=1e-6)
    assert spent.parts["training"] == pytest.approx(98 - 10 - 30, abs=1e-6)


def test_an_attempt_that_still_runs(made: MadeUp) -> None:
    made.attempt(0, 40, "interrupted")
    made.attempt(40, 80, "kill")
    text = (made.path / "attempts.jsonl").read_text().splitlines(keepends=True)
    (made.path / "attempts.jsonl").write_text("".join(text[:-1]))  # no decision yet
    made.event("of another version", 80)
    made.write("attempts", event="note", time=made.now)
    status = {"state": "running", "attempt": 1, "step": 40}
    (made.path / "status.json").write_text(json.dumps(status))
    run = load_history(made.path, {"12": SlurmJob("12", "RUNNING")})
    assert [a.state for a in run.attempts] == ["interrupted", "running"]
    assert run.state.word == "silent"  # since 2023
    assert run.wall_time.lost == [0, 0] and run.wall_time.parts["lost"] == 0


def test_a_kill_that_the_batch_script_has_seen_is_no_running_attempt(made: MadeUp) -> None:
    made.attempt(0, 40, "kill")
    status = {"state": "running", "attempt": 0, "step": 0}
    (made.path / "status.json").write_text(json.dumps(status))
    assert load_history(made.path).state.word == "killed"
