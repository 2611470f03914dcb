"""What is built on the trainer: loaded when a configuration asks for it, and only then."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kempner.config.loading import as_dict, load_config_files, to_toml
from kempner.config.option import ConfigError
from kempner.extensions.lowcomm.config import LowcommConfig
from kempner.extensions.rl.config import RlConfig, SamplingConfig
from kempner.parallel.config import ExpertsConfig
from kempner.train import lookup
from kempner.train.configure import load_config
from kempner.train.progress import Progress
from kempner.train.recording.changes import what_changed
from kempner.train.resilience.requests import Verdict
from kempner.train.resilience.resuming import go_back
from kempner.train.sections import RunConfig
from kempner.train.training import Training
from tests.house.test_layers import LAYERS, MODULES, level

ROOT = Path(__file__).parents[3]
PLAIN = ["configs/train/debug.toml", "--data.dataset_path=fake:", "--distributed.device=cpu"]
RL = ["--rl.env=[{id='arithmetic'}]", "--rl.tokenizer=bytes", "--model.vocab_size=257"]


def train(*words: str) -> subprocess.CompletedProcess[str]:
    """scripts/train.py, and on standard error what it imports."""
    command = [sys.executable, "-X", "importtime", "scripts/train.py", *words]
    env = {**os.environ, "PYTHONPATH": "src"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def extensions_in(text: str) -> set[str]:
    loaded = set(re.findall(r"\| +(kempner[\w.]*)$", text, re.MULTILINE)) & MODULES.keys()
    assert "kempner.train.sections" in loaded
    index = {"kempner.extensions.index"}  # data alone
    return {name for name in loaded if level(name) == len(LAYERS) - 1} - index


@pytest.mark.parametrize("word", ["--check", "--train.max_steps=2"])
def test_a_plain_configuration_loads_no_extension(tmp_path: Path, word: str) -> None:
    done = train(*PLAIN, f"--run.dir={tmp_path / 'run'}", word)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not extensions_in(done.stderr)


def test_a_section_loads_its_extension_and_no_other() -> None:
    done = train(*PLAIN, "--lowcomm.replicas=2", "--lowcomm.interval=10", "--check")
    assert done.returncode == 0 and "\n[lowcomm]\n" in done.stdout and "[rl" not in done.stdout
    assert {name.split(".")[2] for name in extensions_in(done.stderr)} == {"lowcomm"}


def test_help_lists_an_extension_that_is_asked_for() -> None:
    plain, section, every = (train("--help", *more) for more in ((), ("rl",), ("--all",)))
    assert plain.returncode == section.returncode == every.returncode == 0
    assert "--train.max_steps int" in plain.stdout and "--rl." not in plain.stdout
    assert (
        "More sections: lora, freeze, experts, trackers, resilience, profile, lowcomm, preference, "
        "rl, bench;" in plain.stdout
    )
    assert "--rl.loss.kl float" in section.stdout and "--train.max" not in section.stdout
    for option in ("--train.max_steps", "--rl.loss.kl", "--lowcomm.tau", "--bench.steps"):
        assert f"\n  {option} " in every.stdout


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("--rll.group_size=4", "unknown option; did you mean --rl.group_size?"),
        ("--rl.los.kl=1", "unknown option; did you mean --rl.loss.kl?"),
        ("--lowcom.tau=4", "unknown option; did you mean --lowcomm.tau?"),
        ("--rl=4", "rl is a section; write --rl.key=value"),
    ],
)
def test_a_wrong_word_is_answered_by_an_extensions_name(word: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config_files(RunConfig, [], ["--data.dataset_path=x", word])
    assert error.value.problems == [f"{word}: {expected}"]


def test_a_section_that_is_not_given_has_its_defaults() -> None:
    cfg = load_config(PLAIN[:1], [*PLAIN[1:], "--lowcomm.lr=0.5"])
    assert cfg.of(LowcommConfig).lr == 0.5 and cfg.of(RlConfig) == RlConfig()
    assert "rl" not in as_dict(cfg)


def test_the_file_of_an_older_run_has_all_sections_and_is_the_same_run(tmp_path: Path) -> None:
    cfg, file = load_config(PLAIN[:1], PLAIN[1:]), tmp_path / "config.toml"
    others = tuple((name, each()) for name, each in RunConfig.all_sections().items())
    file.write_text(to_toml(RunConfig(**{**vars(cfg), "more": others})))
    assert "[rl.deployment]" in file.read_text() and "[bench]" in file.read_text()
    assert load_config([str(file)], []) == cfg and what_changed(file, cfg, 3) == []
    now = load_config(PLAIN[:1], [*PLAIN[1:], "--lowcomm.lr=0.5"])
    assert what_changed(file, now, 3) == ["lowcomm.lr: 0.7 -> 0.5"]


@pytest.mark.parametrize("name", ["cosine", "constant"])
def test_a_change_of_the_steps_that_stretches_the_schedule_is_told(
    tmp_path: Path, name: str
) -> None:
    words = [*PLAIN[1:], f"--schedule.name={name}"]
    file = tmp_path / "config.toml"
    file.write_text(to_toml(load_config(PLAIN[:1], words)))
    words += ["--train.max_steps=5000", "--optimizer.lr=1e-5"]
    told = what_changed(file, load_config(PLAIN[:1], words), 50)
    assert len([text for text in told if "is stretched" in text]) == (name == "cosine")


def test_the_sections_of_a_run_are_read_back(tmp_path: Path) -> None:
    words = [*RL, "--rl.sampling.max_tokens=64", "--rl.batch_samples=48"]
    cfg, file = load_config([], words), tmp_path / "config.toml"
    file.write_text(to_toml(cfg))
    again = load_config([str(file)], [])
    assert again == cfg and again.of(SamplingConfig).max_tokens == 64
    assert again.train.global_batch == 48 and lookup.bringer(again)


# --- What scripts/train.py does alike for all feeds --------------------------------------------


@pytest.mark.parametrize(("waits_for_all", "seconds"), [(False, 5.0), (True, 3.0)])
def test_a_wait_of_all_ranks_is_no_ranks_own_work(waits_for_all: bool, seconds: float) -> None:
    """With it the ranks would look alike, however slow one of them is."""
    at: Any = SimpleNamespace(
        loader=SimpleNamespace(waits_for_all=waits_for_all),
        clock=SimpleNamespace(last={"data": 2.0}),
        stragglers=(
            SimpleNamespace(take=lambda: 3.0),
            SimpleNamespace(contribution=lambda compute, waited: {"work": compute + waited}),
        ),
    )
    assert Training.own_work(at) == {"work": seconds}


def test_a_step_that_is_repeated_has_its_own_number() -> None:
    """By it replays and measurements of the layers are due, and faults are recorded. Requests of
    the steps that do not count are made again."""
    sought: list[int] = []
    steps: list[Any] = [SimpleNamespace(values={"asks_save": n}) for n in (0.0, 1.0)]
    asked: list[Any] = []
    at: Any = SimpleNamespace(
        watchdog=SimpleNamespace(patient=contextlib.nullcontext),
        progress=Progress(step=11),
        judged=Progress(step=9, samples=72),
        loader=SimpleNamespace(seek=lambda position, step, *_: sought.append(step)),
        model=SimpleNamespace(routings=SimpleNamespace(repeat=lambda: 8)),
        run=SimpleNamespace(
            step=11,
            cfg=RunConfig(experts=ExpertsConfig(0.25)),
            announce=str,
            world=SimpleNamespace(rank=0),
        ),
        stop=SimpleNamespace(ask_again=lambda values, only_save=False: asked.append(values)),
    )
    unread: Any = SimpleNamespace(read=lambda: steps[1])
    Training.go_back(at, Verdict(go_back=True, repeat=True, reason="3 rows"), steps[0], [unread])
    assert asked == [step.values for step in steps]
    assert (at.run.step, at.progress.step, sought) == (9, 9, [9])


def test_a_run_whose_feed_is_ahead_goes_back_in_a_new_attempt() -> None:
    loader: Any = SimpleNamespace(at_once=True)
    nothing: Any = None
    with pytest.raises(RuntimeError, match="3 steps in a row"):
        verdict = Verdict(go_back=True, reason="3 steps in a row were not finite")
        go_back(Progress(), Progress(), verdict, nothing, loader, nothing)
