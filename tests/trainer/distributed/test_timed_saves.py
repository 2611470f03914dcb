"""Saves by the clock, and what each save has cost, through the trainer itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY, Train, losses, start_train
from tests.trainer.distributed.test_start_hang import start
from tests.waiting import LIMIT_S

NODES = ("--nodes=128", "--gpus-per-node=8")
WORDS = ("--checkpoint.keep_last_n=99", "--schedule.name=constant")


def test_a_rank_that_is_slow_to_save_is_named(tmp_path: Path) -> None:
    """By rank 0; the other ranks, which know no hosts, go on."""
    fault = "hold at=kempner.checkpoint.checkpointer:write_file:before s=2 rank=1\nslow ms=20"
    words = ("--train.max_steps=40", "--checkpoint.interval=20")
    ranks = [start(tmp_path / "run", rank, fault, *words) for rank in (0, 1)]
    said = [process.communicate(timeout=LIMIT_S) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    assert "straggler: rank 1 on " in said[0][0] and " is slow to save" in said[0][0], said


def saved(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))


def test_saves_by_the_clock_are_of_one_step_and_cost_what_is_recorded(
    train: Train, tmp_path: Path
) -> None:
    """Any time has passed after 1 ms: a save is due at each step, but not while one is in
    flight."""
    run = tmp_path / "run"
    done = train(run, *WORDS, "--checkpoint.interval=0.001s", "--train.max_steps=20", nproc=2)
    steps = saved(run)
    assert steps[-1] == 20 and 2 <= len(steps) <= 11, done.stdout
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "saved_step" in line]
    assert [line["saved_step"] for line in lines] == steps[:-1]  # no step has followed the last
    for line in lines:
        assert line["save_stall"] > 0 and line["save_drain"] >= 0 and line["save_wait"] < 1
        assert line["save_steps"] == line["step"] - line["saved_step"]
        assert line["save_steps"] and 0 < line["save_step_mean"] <= line["save_step_max"]
    page = run.with_suffix(".html")
    told = [
        subprocess.run(
            [sys.executable, "scripts/report.py", run, *more],
            cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S,
        ).stdout
        for more in ((), ("--html", page))
    ]  # fmt: skip
    assert re.search(rf"saves +{len(lines)}: stall .* durable .* later", told[0]), told
    assert f"save of step {steps[-2]}" in page.read_text()
    # Each is whole, with the state of its step on both ranks.
    for path in (run / "checkpoints").iterdir():
        if path.name.startswith("step_") and int(path.name[5:]) > steps[0]:
            shutil.rmtree(path)
    (run / "checkpoints/latest").unlink()
    (run / "checkpoints/latest").symlink_to(f"step_{steps[0]:08d}")
    unbroken = losses(run)
    more = train(run, *WORDS, "--checkpoint.interval=2h", "--train.max_steps=20", nproc=2)
    assert f"continues after step {steps[0]}" in more.stdout
    assert losses(run) == unbroken and saved(run) == [steps[0], 20]


def test_multiples_of_keep_every_are_saved_and_kept_whatever_the_clock_says(
    train: Train, tmp_path: Path
) -> None:
    words = ("--checkpoint.interval=2h", "--checkpoint.keep_every=3", "--checkpoint.keep_last_n=1")
    train(tmp_path / "run", *words, "--train.max_steps=8", nproc=2)
    assert saved(tmp_path / "run") == [3, 6, 8]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--checkpoint.interval=20mins",), 2, "write 500, 20min or auto"),
        (
            ("--checkpoint.interval=auto", "--train.global_batch=1024", *NODES),
            0,
            "1,024 ranks are assumed to fail once in 49 h",
        ),
        (  # 10 TB
            ("--model.n_layers=4096", "--model.dim=8192", "--nodes=1", "--gpus-per-node=4"),
            0,
            "warning: the saves of 4 ranks hold",
        ),
    ],
)
def test_the_check_says_what_saves_will_do(words: tuple[str, ...], code: int, told: str) -> None:
    words = (*TINY, "--data.dataset_path=fake:", "--distributed.device=cpu", *words, "--check")
    process = start_train(*words)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code and told in err, err
