"""The search of tune.py, with measurements that a function makes up and a clock that they move."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kempner.config.command_line import Command, parse_command
from kempner.config.option import ConfigError
from kempner.extensions.planner.gpus import GPUS
from kempner.extensions.planner.memory import GIB
from kempner.extensions.tune import front, report, verified
from kempner.extensions.tune.journal import TuneJournal
from kempner.extensions.tune.machine import ask_machine
from kempner.extensions.tune.runs import with_batch
from kempner.extensions.tune.search import OutOfTime, Search
from kempner.extensions.tune.space import (
    Overrides,
    RankDevice,
    Space,
    describe_candidate,
    shorter_batch,
)
from kempner.extensions.tune.trials import Measurement, Trial, rank_trials
from kempner.jobs.ranks.placement import World
from kempner.train.configure import check_world, load_config
from tests.conftest import ROOT

START_S = 5.0  # of a process
H100 = RankDevice("NVIDIA H100 80GB HBM3", 79.1)
FACTORS = {  # of a step's time, by the choice
    "train.micro_batch": {1: 1.3, 2: 1.1, 4: 0.9, 8: 1.0},
    "train.recompute": {"full": 1.3, "selective": 1.1},
    "train.attention": {"cudnn": 0.95, "efficient": 1.2},
    "train.loss_chunk": {None: 1.0},
    "distributed.sync_once": {True: 0.97},
}
BEST = {
    "distributed.sync_once": True,
    "train.attention": "cudnn",
    "train.compile": True,
    "train.compile_scope": "model",
    "train.micro_batch": 4,
}


def space_of(*words: str, machine: RankDevice = H100, file: str = "debug", world: int = 1) -> Space:
    cfg = load_config([str(ROOT / f"configs/train/{file}.toml")], ["--run.dir=r", *words])
    return Space(cfg, world, world, machine, check_world)


def seconds(overrides: Overrides) -> float:
    step = 0.1
    for key, value in overrides.items():
        step *= FACTORS.get(key, {}).get(value, 1.0)
    if overrides.get("train.compile"):
        step *= 0.7 if overrides.get("train.compile_scope") == "model" else 0.75
    return step


class Fake:
    """A machine that measures by seconds(), with a noise of some per cent; and its clock.
    `memory`: bytes that a candidate needs really."""

    def __init__(self, space: Space, minutes: float, noise: float = 0.01) -> None:
        self.space, self.total, self.now, self.noise = space, 60 * minutes, 0.0, noise
        self.random, self.calls = random.Random(1), Counter[tuple[str, int]]()
        self.crashes: set[str] = set()
        self.memory = space.memory
        self.said: list[str] = []

    def left(self) -> float:
        return self.total - self.now

    def __call__(
        self, overrides: Overrides, rung: int, warmup: int, steps: int, limit: float
    ) -> Measurement:
        assert not self.calls or 0 < limit <= self.left()  # the first run comes to its end
        self.calls[describe_candidate(overrides), rung] += 1
        step, gib = seconds(overrides), self.memory(overrides) / GIB
        wall = START_S + (warmup + steps) * step
        if wall > self.left():
            self.now = self.total
            raise OutOfTime
        self.now += wall
        if any(name in describe_candidate(overrides) for name in self.crashes):
            return Measurement(failed="crashed", wall=wall)
        if gib * GIB > self.space.machine.limit:
            return Measurement(failed="out of memory", out_of_memory=True, wall=wall)
        measured = (step * self.random.gauss(1, self.noise) for _ in range(steps))
        return Measurement(tuple(measured), gib, 0.4, wall=wall)

    def search(self, *first: Overrides) -> Search:
        return Search(self.space, self, self.left, first, self.said.append)


def test_halving_finds_the_best_and_measures_it_longest() -> None:
    fake = Fake(space_of(), 20)
    search = fake.search()
    search.run()
    assert search.best and search.best.overrides == BEST
    by_rung = Counter(rung for _, rung in fake.calls)
    assert by_rung[0] > 4 * by_rung[1] > 4 * by_rung[2] > by_rung[3] > 0
    assert max(fake.calls.values()) == 1  # nothing is measured twice at the same length
    lengths = [len(one.seconds) for one in search.trials.values()]
    assert len(search.best.seconds) > 0.9 * max(lengths) > 8 * min(lengths)
    assert fake.left() > 0  # it ends when nothing is left to try


@pytest.mark.parametrize("minutes", [0.2, 1, 3])
def test_it_ends_at_its_time_with_the_best_so_far(minutes: float) -> None:
    fake = Fake(space_of(), minutes)
    search = fake.search()
    search.run()
    assert 0 <= fake.left() <= 0.5 * fake.total
    assert search.best and seconds(search.best.overrides) <= seconds({})
    fastest = min(one.step for one in search.trials.values() if one.runs)
    assert search.best.step < 1.02 * fastest  # within the noise of 1 %


def test_more_than_the_noise_or_no_change() -> None:
    steps = tuple(0.1 + 0.001 * (i % 7) for i in range(21))
    plain = Trial({}, 1.0, runs=[Measurement(steps)])
    faster = Trial({"a.b": 1}, 1.0, runs=[Measurement(tuple(0.999 * step for step in steps))])
    much = Trial({"a.b": 2, "a.c": 3}, 1.0, runs=[Measurement(tuple(0.9 * x for x in steps))])
    assert rank_trials([faster, plain]) == [plain, faster]
    assert rank_trials([faster, plain, much]) == [much, plain, faster]


def test_a_lever_that_crashes_and_one_out_of_memory_are_results() -> None:
    fake = Fake(space_of(), 20)
    fake.crashes = {"train.attention"}
    need = fake.space.memory
    fake.memory = lambda o: need(o) + 100 * GIB * (o.get("train.compile_scope") == "model")
    search = fake.search()
    search.run()
    assert search.best and not search.best.failed
    assert search.best.overrides == {
        "distributed.sync_once": True,
        "train.compile": True,
        "train.micro_batch": 4,
    }
    table = report.tune_table(search)
    assert ": crashed" in table and ": out of memory" in table


def test_even_the_configuration_itself_may_fail() -> None:
    fake = Fake(space_of(), 20)
    fake.crashes = {"as configured"}
    search = fake.search()
    search.run()
    assert search.best and search.best.overrides == BEST


BIG = ("--train.global_batch_tokens=262144", "--train.compile")


@pytest.mark.parametrize("factor", [0.7, 1.3])
def test_a_planner_that_is_wrong_by_30_per_cent(factor: float) -> None:
    """Its error is learnt: what cannot fit is left out, and what it denied is tried."""
    limit = 0.6 * 79.1
    fake = Fake(space_of(*BIG, file="1b", machine=H100._replace(gib=limit)), 60, noise=0.001)
    planned, room = fake.space.memory, fake.space.machine.limit
    fake.memory = lambda o: factor * planned(o)
    search = fake.search()
    search.run()
    assert search.memory.error == pytest.approx(factor, rel=1e-6)
    ran_out = [one for one in search.trials.values() if one.failed]
    assert len(ran_out) <= 2  # the configuration itself may be one
    assert any("left out, as it would need" in text for text in fake.said)
    tried = {name for name, one in search.trials.items() if one.planned_bytes > room}
    assert bool(tried - {"as configured"}) == (factor < 1)
    assert all(search.skipped[name] >= room for name in search.skipped)
    assert search.best
    near = fake.space.neighbours(search.best.overrides)
    left_out = [other for other in near if describe_candidate(other) in search.skipped]
    assert left_out and all(fake.memory(other) >= room for other in left_out)


def test_what_an_earlier_tune_found_comes_first() -> None:
    fake = Fake(space_of(), 0.5)
    search = fake.search(BEST)
    search.run()
    assert list(search.trials)[:2] == ["as configured", describe_candidate(BEST)]


def test_the_record_has_the_best_first(tmp_path: Path) -> None:
    """The next tune begins with it; a record that is none is no error."""
    fake = Fake(space_of(), 20)
    fake.crashes = {"efficient"}
    search = fake.search()
    search.run()
    report.write_record(tmp_path / "record.json", search, {"machine": {}}, 1)
    again = report.remembered(tmp_path / "record.json")
    assert again[0] == BEST and len(again) == report.REMEMBERED
    record = json.loads((tmp_path / "record.json").read_text())
    best, last = record["trials"][0], record["trials"][-1]
    assert best["tokens_per_s"] == pytest.approx(fake.space.tokens / seconds(BEST), rel=0.01)
    assert best["planned_step_s"] == fake.space.seconds(BEST) and last["failed"] == "crashed"
    (tmp_path / "record.json").write_text("{}")
    assert report.remembered(tmp_path / "record.json") == []


class Killed(BaseException):
    """Stands for kill -9: nothing is written any more."""


def test_after_a_kill_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """A result counts once, and a run without one is repeated."""
    space = space_of()
    fake, last = Fake(space, 20), 7

    def measured(journal: TuneJournal, kill: bool) -> Any:
        def measure(
            overrides: Overrides, rung: int, warmup: int, steps: int, limit: float
        ) -> Measurement:
            journal.start(overrides, rung)
            if kill and journal.runs == last:
                raise Killed
            result = fake(overrides, rung, warmup, steps, limit)
            journal.end(overrides, rung, result)
            return result

        return measure

    journal = TuneJournal(tmp_path, "subject")
    with pytest.raises(Killed):
        Search(space, measured(journal, True), fake.left, say=fake.said.append).run()
    with pytest.raises(ConfigError, match=r"another tune\.py works here"):
        TuneJournal(tmp_path, "subject")
    journal.close()
    with open(tmp_path / "journal.jsonl", "a") as file:
        file.write(
            '{"event": "cut", "of": "subject", "wall": null}\n{"of": "subject", "wall": -9}\n'
        )
        file.write('{"event": "resu')  # half a line

    again = TuneJournal(tmp_path, "subject")
    assert len(again.results) == last - 1 and again.runs == last
    assert again.spent == pytest.approx(fake.now)
    search = Search(space, measured(again, False), fake.left, say=fake.said.append)
    for result in again.results:
        search.take(*result)
    search.run()
    assert max(fake.calls.values()) == 1
    assert search.best and search.best.overrides == BEST
    again.close()
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().split("\n")
             if line and not line.endswith("resu")]  # fmt: skip
    twice = [line["overrides"] for line in lines if line.get("event") == "start"]
    assert sum(one == twice[last - 1] for one in twice[: last + 1]) == 2
    other = TuneJournal(tmp_path, "another machine")
    assert not other.results and other.runs == again.runs
    other.close()


def test_the_candidates_of_several_ranks() -> None:
    """Meshes are among them; each divides the batch, and none repeats another."""
    space = space_of(*BIG, file="1b", world=8)
    found = list(space.neighbours({}))
    assert any("distributed.dp_shard" in other for other in found)
    assert len({describe_candidate(other) for other in found}) == len(found)
    for other in found:
        assert not check_world(space.config(other), 8, 8)
        tokens = space.config(other).train.sequences * space.config(other).train.seq_len
        assert tokens == space.tokens
    assert space.planned()
    assert not any("fp8" in describe_candidate(other) for other in found)


def test_fp8_is_tried_where_it_is_allowed_and_the_gpu_has_it() -> None:
    cfg = space_of().cfg
    for machine, allow, there in (
        (H100._replace(fp8=True), ("fp8",), True),
        (H100._replace(fp8=True), (), False),
        (H100, ("fp8",), False),
    ):
        space = Space(cfg, 1, 1, machine, check_world, allow)
        assert any("train.fp8" in axis.keys for axis in space.axes) == there


def test_the_whole_share_of_a_rank_is_no_change() -> None:
    space = space_of("--train.global_batch=16")
    assert space.canonical({"train.micro_batch": 16}) == {}
    assert space.canonical({"train.micro_batch": 8}) == {"train.micro_batch": 8}
    assert space.canonical({"train.compile": False, "train.compile_scope": "model"}) == {}


@pytest.mark.parametrize(
    ("file", "world", "machine", "sequences"),
    [
        ("1b", 1, H100, 2 * 8),  # of 256: 8 fit
        ("7b", 8, H100, 8 * 2 * 4),  # of 1024
        ("125m", 8, H100, None),  # a step is short
        ("1b", 1, RankDevice("CPU", 100.0), None),
        ("7b", 8, H100._replace(gib=30.0), 8 * 2 * 2),  # less fits
    ],
)
def test_a_long_step_is_measured_shorter(
    file: str, world: int, machine: RankDevice, sequences: int | None
) -> None:
    """All that is tried fits it, with two passes or more."""
    whole = space_of(file=file, world=world, machine=machine).cfg
    assert shorter_batch(whole, world, world, machine) == sequences
    if sequences is not None:
        path = str(ROOT / f"configs/train/{file}.toml")
        command = with_batch(parse_command([path, "--run.dir=r"], {}), whole, sequences)
        cfg = load_config(command.files, command.overrides)
        space = Space(cfg, world, world, machine, check_world, short=True)
        assert cfg.train.sequences == sequences and space.is_allowed({})
        for other in [*space.neighbours({}), *space.planned()]:
            micro = space.config(other).train.micro_batch
            assert micro and 2 * micro * world <= sequences
            assert "distributed.pp" not in other


def test_the_overlay_and_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The overlay gives what was measured, over words that set the same."""
    file = str(ROOT / "configs/train/debug.toml")
    words = ["--train.micro_batch=2", "--no-train.compile", "--train.seq_len=64", "--run.dir=here"]
    command = parse_command([file, *words], {})
    best = {**BEST, "distributed.nodes_per_fsdp_group": None}
    out = tmp_path / "tuned.toml"
    out.write_text(report.overlay_text(best, ["one", "two"]))
    text = report.command_with(command, best, out, World(0, 0, 1, "single"))
    given = text.split("train.py ")[1].split()
    assert given == [file, str(out), "--train.seq_len=64"]
    cfg = load_config(given[:2], given[2:])
    assert cfg.train.micro_batch == 4 and cfg.train.compile_scope == "model"
    assert cfg.train.seq_len == 64
    world = World(0, 0, 16, "slurm", per_node=8)
    monkeypatch.setenv("KEMPNER_ATTEMPT_ID", "1.0.0")
    assert report.command_with(command, {}, out, world).startswith(
        f"sbatch --nodes=2 scripts/slurm/multinode.sh {file} --train.micro_batch=2"
    )


def test_the_spread_is_that_of_the_median() -> None:
    rng = random.Random(0)
    steps = tuple(rng.gauss(0.1, 0.01) for _ in range(400))
    trial = Trial({}, 1.0, runs=[Measurement(steps)])
    assert trial.error == pytest.approx(1.253 * 0.01 / math.sqrt(400), rel=0.15)


class FakeRuns:
    """Takes the place of Runs: each candidate takes what the planner says, on a clock of its own
    that is not looked at."""

    def __init__(self, command: Command, *_: object) -> None:
        cfg = load_config(command.files, command.overrides, (), "tune-")
        self.space = Space(cfg, 1, 1, H100, check_world, short=True)

    def __call__(self, overrides: Overrides, rung: int, *_: object) -> Measurement:
        step = self.space.seconds(overrides) or 0.0
        gib = self.space.memory(overrides) / GIB
        return Measurement((step,) * 9, gib, 0.4, wall=1.0)


def test_a_tune_of_a_gpu_from_its_front_to_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A long step is measured shorter; the command that is printed has the whole one."""
    facts = {"device": H100.name, "memory_gib": 79.1, "driver": "580.65.06", "torch": "2.13.0"}
    facts |= {"cuda": "13.0", "kempner": "0.2.0", "commit": "abc", "cpus": 96, "fp8": False}
    monkeypatch.setattr(front, "ask_machine", lambda _: facts)
    monkeypatch.setattr(front, "Runs", FakeRuns)
    monkeypatch.setattr(verified, "VERIFIED", tmp_path / "verified")
    words = [str(ROOT / "configs/train/1b.toml"), f"--run.dir={tmp_path}/run", "--record"]
    command = parse_command([*words, "--train.seed=5"], front.TUNE_FLAGS)
    cfg, options = front.configure_tune(command)
    stop = SimpleNamespace(wants_to_leave=lambda: 0.0, flags=[0.0] * 3)
    assert front.tune(command, cfg, options, stop) == 0  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert "the measured steps have 16 sequences, not 256" in said and "of plan" in said
    assert said.splitlines()[-1].endswith("tuned.toml --train.seed=5")
    entry = verified.read_entry("1b", "H100")
    assert entry and "--train.global_batch_tokens=65536" in entry.changes
    assert entry.nodes == entry.gpus_per_node == 1 and entry.measured["driver"] == "580.65.06"
    assert not verified.entry_problems(entry)
    overlay = (tmp_path / "run/tuned.toml").read_text()
    assert "driver 580.65.06, commit abc" in overlay and "global_batch" not in overlay


def test_a_state_that_the_host_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first run: the kernel might end the processes of others."""
    monkeypatch.setattr(front, "available_memory", lambda: 8 * GIB)
    words = ["--run.dir=r", "--data.dataset_path=fake:"]
    cfg = load_config([str(ROOT / "configs/train/7b.toml")], words)
    with pytest.raises(ConfigError, match=r"need 100\.\d GiB, and 8\.0 GiB are available"):
        front._refuse_large_state(cfg, 1, 1)
    front._refuse_large_state(space_of().cfg, 1, 1)


def test_the_configuration_has_two_minutes_in_any_case() -> None:
    """Killed by the host, it is measured once more within what is left of them."""
    limits: list[float] = []

    def measure(*words: Any) -> Measurement:
        limits.append(words[-1])
        return Measurement(failed="killed", killed=True, wall=1.0)

    search = Search(space_of(), measure, lambda: 25.0 if limits else 60.0, [], print)
    search._try({}, 0)
    assert limits == [120.0, 25.0]


def test_a_prime_number_of_passes_is_measured_whole() -> None:
    """Seven passes of 8 sequences."""
    words = ("--train.global_batch_tokens=none", "--train.global_batch=56")
    assert shorter_batch(space_of(*words, file="1b").cfg, 1, 1, H100) is None


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL"])
def test_a_card_without_a_row_is_not_that_of_another_form(name: str) -> None:
    assert RankDevice(name, 93.0).spec is None
    assert H100.spec == GPUS["H100"]


def test_a_machine_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kempner.extensions.tune.machine.MACHINE_S", 0)
    with pytest.raises(ConfigError, match="auto: torch has not answered in 0 s"):
        ask_machine("auto")
