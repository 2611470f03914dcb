"""The runs of a tune that end without figures: what each of them means for the search."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kempner.config.command_line import parse_command
from kempner.config.option import ConfigError
from kempner.extensions.lowcomm.config import LowcommConfig
from kempner.extensions.tune import front, report, runs
from kempner.extensions.tune.journal import TuneJournal
from kempner.extensions.tune.search import OutOfTime, Search
from kempner.extensions.tune.space import RankDevice, Space
from kempner.extensions.tune.trials import Measurement, Trial
from kempner.jobs.records import events
from kempner.train.configure import check_world, load_config
from tests.conftest import ROOT, TINY

H100 = RankDevice("NVIDIA H100 80GB HBM3", 79.1)
KILLED = Measurement(failed="killed by the host", killed=True, wall=3.0)
OTHER = {"train.micro_batch": 2}


class Beds:
    """A Runs whose processes are made up: `ends` has what each leaves, and its exit code."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.journal, self.orders = TuneJournal(folder, "it"), runs.Orders(folder)
        command = parse_command([*TINY, "--data.dataset_path=fake:"], {})
        always = lambda: 100.0  # noqa: E731
        self.runs = runs.Runs(command, folder, self.journal, self.orders, always, lambda: 0.0)
        self.ends: dict[str, Any] = {"code": 0, "log": "", "faults": []}
        monkeypatch.setattr(runs, "run_trial", self.run_trial)

    def run_trial(self, order: dict[str, Any], out: Any, leaves: Any) -> int:
        leaves()
        out.write(self.ends["log"])
        run_dir = Path(order["run_dir"])
        head = {"attempt": 0, "attempt_id": "a", "restart": 0, "step": 0, "time": 1.0}
        for fault in self.ends["faults"]:
            events.append_event(run_dir / "attempts.jsonl", events.FaultEvent(**head, **fault))
        return int(self.ends["code"])

    def result(self, overrides: dict[str, Any], code: int, log: str = "", *faults: Any) -> Any:
        self.ends = {"code": code, "log": log, "faults": faults}
        return self.runs(overrides, 0, 1, 1, 50.0)


@pytest.fixture
def beds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Beds:
    return Beds(tmp_path, monkeypatch)


def test_a_kill_by_the_host_is_not_out_of_memory(beds: Beds) -> None:
    result = beds.result(OTHER, -signal.SIGKILL)
    assert result.killed and not result.out_of_memory
    assert result.failed == runs.KILLED and "perhaps because it ran out of memory" in result.failed
    lost = {"kind": "crash", "reason": "PeerFailed: rank 1", "lost_peer": True}
    assert not beds.result(OTHER, 1, "", lost).killed
    own = {"kind": "oom", "reason": "rank 1: OutOfMemoryError: CUDA out of memory. Tried"}
    result = beds.result(OTHER, -signal.SIGKILL, "", own)  # ended, as another rank had failed
    assert result.out_of_memory and not result.killed
    assert beds.result(OTHER, 1, "", own).out_of_memory


def test_a_rank_says_that_its_process_was_killed(beds: Beds) -> None:
    lost = {"kind": "crash", "reason": "PeerFailed: rank 1", "lost_peer": True}
    run_trial = runs.run_trial

    def killed_beside(*words: Any) -> int:
        (beds.orders.folder / "1.killed").touch()
        return run_trial(*words)

    runs.run_trial = killed_beside  # the fixture puts it back
    assert beds.result(OTHER, 1, "", lost).killed


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("train: error: 1 problem with the input\n  - a.b = 3: no\nlast words\n", "a.b = 3: no"),
        ("train: error: 2 problems with the input\n  - a\n  - b\n", "a; b"),
        ("train: error: no port is free\n  (traceback in x)\n", "no port is free"),
        ("Fatal Python error: Aborted\n", "Fatal Python error: Aborted"),
        ("", "exit code 1"),
    ],
)
def test_the_reason_is_the_error_and_not_the_last_line(beds: Beds, log: str, reason: str) -> None:
    assert beds.result(OTHER, 1, log).failed == reason


def test_bad_input_of_the_configuration_itself_ends_the_tune(beds: Beds) -> None:
    log = "train: error: 1 problem with the input\n  - no port\n"
    assert beds.result(OTHER, 2, log).failed == "no port"
    with pytest.raises(ConfigError, match=r"^no port$"):
        beds.result({}, 2, log)
    assert len(beds.journal.results) == 1


def test_a_full_disk_is_no_result(beds: Beds) -> None:
    fault = {"kind": "crash", "reason": "OSError: [Errno 28] No space left on device"}
    for code in (0, 1):
        with pytest.raises(ConfigError, match=r"ran out of disk space.*is kept: make room"):
            beds.result(OTHER, code, "", fault)
    assert not beds.journal.results


def test_a_disk_that_took_no_words_is_no_result_either(
    beds: Beds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's log and status lie on it, too."""

    def full(folder: Path, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    monkeypatch.setattr(runs, "try_to_write", full)
    with pytest.raises(ConfigError, match="ran out of disk space"):
        beds.result(OTHER, 1, "")
    assert not beds.journal.results


def test_what_the_host_has_killed_is_tried_once_more(tmp_path: Path) -> None:
    """At the next start; the configuration itself at each."""
    for start, results in enumerate((0, 0, 1, 1)):
        journal = TuneJournal(tmp_path, "it")
        assert len(journal.results) == results, start
        for overrides in ({}, OTHER) if start < 2 else ({},):
            journal.start(overrides, 0)
            journal.end(overrides, 0, KILLED)
        assert journal.spent == pytest.approx(3.0 * (2 * min(start + 1, 2) + max(start - 1, 0)))
        journal.close()


def test_a_run_that_was_cut_off_has_taken_its_time(tmp_path: Path, beds: Beds) -> None:
    """So that all starts together keep to --minutes: after a kill -9, too."""
    beds.journal.cut(OTHER, 0, 5.0)
    beds.journal.start(OTHER, 0)
    beds.journal.beat()
    began = json.loads((tmp_path / "journal.jsonl").read_text().splitlines()[-1])["time"]
    os.utime(tmp_path / "lock", (began + 7, began + 7))
    beds.journal.close()
    for _ in range(2):  # it is counted once
        again = TuneJournal(tmp_path, "it")
        assert again.spent == pytest.approx(12.0, abs=0.01)
        again.close()


def test_the_configuration_itself_is_measured_after_a_kill() -> None:
    cfg = load_config([str(ROOT / "configs/train/debug.toml")], ["--run.dir=r"])
    calls: list[Any] = []

    def measure(overrides: Any, *_: Any) -> Measurement:
        calls.append(overrides)
        if len(calls) > 2:
            raise OutOfTime
        return KILLED if len(calls) == 1 else Measurement((0.1,) * 5, 1.0, wall=1.0)

    search = Search(Space(cfg, 1, 1, H100, check_world), measure, lambda: 100.0, say=lambda _: None)
    search.run()
    assert calls[:2] == [{}, {}] and search.best and search.best.overrides == {}
    memory = search.memory.predict("", 1.0)
    search.take(OTHER, 0, KILLED)
    assert search.memory.predict("", 1.0) == memory  # nothing is learnt of it


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ([], 4),
        (["--lowcomm.tau=5"], 10),
        (["--lowcomm.fragments=2", "--lowcomm.tau=5"], 20),
        (["--lowcomm.fragments=2", "--lowcomm.tau=200"], 500),
    ],
)
def test_rounds_of_replicas_are_short_in_a_measurement(words: list[str], steps: int) -> None:
    """The configuration itself would take 1,000 steps for 3 + 5."""
    rounds = ["--lowcomm.replicas=2", "--lowcomm.interval=500", "--checkpoint.interval=500"]
    rounds += ["--train.max_steps=1000", "--eval.interval=0"]
    command = parse_command([str(ROOT / "configs/train/125m.toml"), *rounds, *words], {})
    cfg = runs.trial_of(command, {}, Path("r"), 3, 5).cfg
    assert cfg.of(LowcommConfig).interval == steps
    assert cfg.train.max_steps == steps * (1 + -(-5 // steps))


@pytest.mark.parametrize(
    "words",
    [
        ["--resilience.spike_sigma=6", "--resilience.spike_window=500"],
        ["--checkpoint.powers_of_two"],
        ["--run.fork=runs/other", "--run.fork_optimizer=fresh"],
    ],
)
def test_what_a_short_run_without_saves_cannot_have_is_left_out(words: list[str]) -> None:
    command = parse_command([str(ROOT / "configs/train/125m.toml"), *words], {})
    cfg = runs.trial_of(command, {}, Path("r"), 3, 5).cfg
    assert cfg.train.max_steps == 8 and not cfg.checkpoint.save


def test_a_kill_does_not_undo_what_was_measured() -> None:
    trial = Trial({}, 1.0, runs=[Measurement((0.1,) * 5, 1.0, 0.4, wall=1.0), KILLED])
    assert not trial.failed and trial.step == 0.1 and trial.mfu == pytest.approx(0.4)
    assert Trial({}, 1.0, runs=[KILLED]).failed


@pytest.mark.parametrize(
    "out", ["file/tuned.toml", "notes.toml", "/dev/null", "/proc/1/tuned.toml"]
)
def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "notes.toml").write_text("of somebody")
    words = [*TINY, "--data.dataset_path=fake:", f"--run.dir={tmp_path}/r"]
    command = parse_command([*words, f"--out={tmp_path / out}"], front.TUNE_FLAGS)
    with pytest.raises(ConfigError, match=r"^--out = .*name another file"):
        front.configure_tune(command)
    assert os.path.exists("/dev/null") and not Path("/dev/null").is_file()


def test_what_an_earlier_tune_has_found_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, first = tmp_path / "tuned.toml", report.overlay_text({"train.micro_batch": 2}, ["first"])
    front._keep_earlier(out, first)
    out.write_text(first)
    front._keep_earlier(out, report.overlay_text({"train.micro_batch": 2}, ["second"]))
    assert os.listdir(tmp_path) == ["tuned.toml"]
    front._keep_earlier(out, report.overlay_text({"train.micro_batch": 4}, ["third"]))
    (kept,) = tmp_path.iterdir()
    assert kept.read_text() == first and f"differs, and is now {kept}" in capsys.readouterr().out


def test_a_full_disk_ends_the_tune_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"device": "CPU", "memory_gib": 8.0, "driver": None, "torch": "2.13.0", "cuda": None}
    facts |= {"commit": "abc", "cpus": 2, "fp8": False}
    monkeypatch.setattr(front, "ask_machine", lambda _: facts)

    class FullAfterOne:
        def __init__(self, _command: Any, _folder: Any, journal: TuneJournal, *_: object) -> None:
            self.journal = journal

        def __call__(self, overrides: Any, rung: int, *_: object) -> Measurement:
            self.journal.start(overrides, rung)
            if overrides:
                monkeypatch.setattr(self.journal._file._file, "write", lambda _: 0)
            result = Measurement((0.1,) * 5, 1.0, wall=1.0)
            self.journal.end(overrides, rung, result)
            return result

    monkeypatch.setattr(front, "Runs", FullAfterOne)
    words = [*TINY, "--data.dataset_path=fake:", f"--run.dir={tmp_path}"]
    command = parse_command(words, front.TUNE_FLAGS)
    cfg, options = front.configure_tune(command)
    stop = SimpleNamespace(wants_to_leave=lambda: 0.0, flags=[0.0] * 3)
    with pytest.raises(OSError) as full:
        front.tune(command, cfg, options, stop)  # type: ignore[arg-type]
    assert full.value.errno == errno.ENOSPC and full.value.filename.endswith("journal.jsonl")
    assert "settings" in capsys.readouterr().out  # the table
