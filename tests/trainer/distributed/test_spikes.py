"""Steps far above the others: their update is skipped, as if it had never been there, and the run
decides so again when it is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TINY, losses, start_train
from tests.trainer.distributed.runs import begun, state

STEPS, WINDOW = 24, 8
LOUD = "from=144 to=152"  # step 19, of 8 samples each
SETTINGS = (
    f"--train.max_steps={STEPS}",
    "--schedule.name=constant",
    "--checkpoint.interval=4",
    "--checkpoint.keep_last_n=99",
)
SPIKES = ("--resilience.spike_sigma=60", f"--resilience.spike_window={WINDOW}")
LOUD_STEP = f"loud {LOUD} by=100"
SOAK = pytest.mark.soak
Runs = Callable[..., Path]


@pytest.fixture(scope="module")
def runs(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run of that name, done once; with `start` it goes on from that step of that run."""
    place = tmp_path_factory.mktemp("spikes")

    def run(name: str, *words: str, faults: str = "", start: tuple[str, int] | None = None) -> Path:
        path = place / name
        if path.exists():
            return path
        if start is not None:
            begun(place, start[0], path, start[1])
        words = (*TINY, *SETTINGS, f"--data.dataset_path={data_dir}", f"--run.dir={path}", *words)
        process = start_train(*words, program="tests/trainer/fault/faulty_train.py", FAULTS=faults)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, out + err
        (path / "out").write_text(out)
        return path

    return run


def lines(run: Path, key: str) -> list[dict[str, Any]]:
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if key in line]


def same(a: Path, b: Path, *without: str) -> None:
    ours, theirs = (
        {name: x for name, x in state(run, STEPS).items() if name.partition(".")[0] not in without}
        for run in (a, b)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("adamw", ()),
        pytest.param("muon", ("--optimizer.name=muon", "--train.micro_batch=2"), marks=SOAK),
        pytest.param(
            "schedule-free",
            ("--optimizer.name=schedule_free", "--optimizer.cpu_offload"),
            marks=SOAK,
        ),
    ],
)
def test_a_spike_changes_nothing_but_the_position(
    runs: Runs, name: str, more: tuple[str, ...]
) -> None:
    """Like a step that is not finite, which a run without the guard skips at the same place."""
    found = runs(name, *more, *SPIKES, faults=LOUD_STEP)
    expected = runs(f"{name}-nan", *more, faults=f"nan {LOUD}")
    ours, theirs = losses(found), losses(expected)
    assert ours.pop(19) > 50 and theirs.pop(19) is None and ours == theirs
    same(found, expected, "spikes")
    (spike,), (bad,) = lines(found, "spike"), lines(expected, "not_finite")
    assert spike["step"] == 19 and spike["sample_numbers"] == bad["sample_numbers"]
    assert 0 < spike["spike"]["loss_limit"] < 20 < spike["spike"]["loss"]
    assert not lines(found, "not_finite") and lines(found, "loss")[-1]["skipped"] == 1
    assert "step 19 is a spike: loss " in (found / "out").read_text()


@pytest.mark.soak
def test_without_the_option_nothing_is_skipped(runs: Runs) -> None:
    off, plain, on = runs("off", faults=LOUD_STEP), runs("plain"), runs("quiet", *SPIKES)
    assert losses(on) == losses(plain) and not lines(on, "spike")
    same(on, plain, "spikes")
    assert not lines(off, "spike") and losses(off)[20] != losses(plain)[20]


@pytest.mark.parametrize("step", [pytest.param(4, marks=SOAK), 16])
def test_a_resumed_run_decides_alike(runs: Runs, step: int) -> None:
    """Before the window is full, and after: by the same limits, bit for bit."""
    whole = runs("adamw", *SPIKES, faults=LOUD_STEP)
    resumed = runs(f"resumed-{step}", *SPIKES, faults=LOUD_STEP, start=("adamw", step))
    (spike,), (again,) = lines(whole, "spike"), lines(resumed, "spike")
    assert again["spike"] == spike["spike"] and losses(resumed) == losses(whole)
    same(resumed, whole)


@pytest.mark.soak
def test_spikes_in_a_row_send_the_run_back(runs: Runs) -> None:
    found = runs(
        "back", *SPIKES, "--resilience.max_skipped=2", faults="loud from=144 to=160 by=100"
    )
    assert [line["step"] for line in lines(found, "spike")] == [19, 20]
    text = (found / "out").read_text()
    assert (
        "2 steps in a row were spikes (resilience.max_skipped): back to step 16, without the "
        "samples 144 to 159" in text
    )
    assert max(losses(found).values()) < 50 and len(losses(found)) == STEPS
