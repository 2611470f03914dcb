"""Runs that an older commit began, continued with the numbers that the same commit computes without
a break; and what the quickstart computes.

tests/fixtures/begin_runs.py says which commit it was, and makes them anew. On a machine and a torch
that round as those which began them, the numbers are equal to the last bit. Elsewhere they are
equal within TOLERANCE, and a warning says so.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from kempner.extensions.lowcomm import judge
from kempner.jobs.system.process import pid_namespace
from kempner.jobs.this_job import host_name
from tests.conftest import ROOT, clean_env
from tests.fixtures.begin_runs import (
    FIGURES,
    FIXED,
    ISLANDS,
    RUNS,
    TRAINED,
    WHOLE,
    ended,
    figures,
    parts_of,
    written,
)
from tests.forks import Forks
from tests.trainer.distributed.runs import begun
from tests.waiting import until

EXPECTED = json.loads(FIGURES.read_text())
TOLERANCE = 1e-3
TRAIN, FAULTY = ROOT / "scripts/train.py", ROOT / "tests/trainer/fault/faulty_train.py"


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FIXED.items():
            patch.setenv(name, value)
        with Forks() as forks:
            yield forks


@pytest.fixture(scope="module")
def exact(forks: Forks) -> bool:
    """Does this machine round as the one that began the runs?"""
    said = forks.run("-m", "tests.fixtures.begin_runs", "--digest", cwd=ROOT)
    assert said.code == 0, said.err
    if said.out.strip() == EXPECTED["digest"]:
        return True
    warnings.warn(
        f"other rounding than that of the old runs: equal within {TOLERANCE} only", stacklevel=1
    )
    return False


@pytest.fixture(scope="module")
def place(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands are typed: with the data, the model and the runs."""
    return unpacked(tmp_path_factory.mktemp("old"))


def unpacked(folder: Path) -> Path:
    with tarfile.open(RUNS) as tar:
        tar.extractall(folder, filter="data")
    # As if they had been killed on this machine: for a sign of another one a start waits 45 s.
    for lock in folder.glob("runs/**/lock"):
        here = {"host": host_name(), "kernel": pid_namespace()}
        lock.write_text(json.dumps(json.loads(lock.read_text()) | here))
    return folder


def start(
    place: Path, program: Path, *words: object, ranks: int = 1, **env: str
) -> subprocess.Popen[str]:
    command = ["bash"] if program.suffix == ".sh" else [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [*command, str(program), *map(str, words)],
        cwd=place,
        env=clean_env(**FIXED, KEMPNER_PYTHON=sys.executable, **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(process: subprocess.Popen[str], seconds: float = 240.0) -> str:
    try:
        out, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, out
    return out


def saved(run: Path) -> int:
    return int((run / "checkpoints/latest").readlink().name.removeprefix("step_"))


def assert_equal(name: str, run: Path, exact: bool, after: int = 0) -> None:
    """All steps after that one."""
    found, expected = figures(run), EXPECTED["runs"][name]
    assert found.keys() == expected.keys()
    for step in expected:
        if int(step) > after:
            wanted = expected[step] if exact else pytest.approx(expected[step], rel=TOLERANCE)
            assert found[step] == wanted, f"{name}, step {step}"


def assert_continued(name: str, run: Path, before: dict[str, int], exact: bool) -> None:
    for part, path in parts_of(run).items():
        lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
        steps = [line["step"] for line in lines if "loss" in line and line["attempt"] == 1]
        last = max(map(int, EXPECTED["runs"][f"{name}{part}"]))
        assert steps == list(range(before[part] + 1, last + 1)) != [], f"{name}{part}"
        assert json.loads((path / "status.json").read_text())["state"] == "done"
        assert_equal(f"{name}{part}", path, exact, before[part])


@pytest.mark.parametrize("name", TRAINED)
def test_a_run_goes_on(name: str, place: Path, forks: Forks, exact: bool) -> None:
    run, (words, fault, ranks) = place / "runs" / name, TRAINED[name]
    before = {part: saved(path) for part, path in parts_of(run).items()}
    words = (*words, f"--run.dir=runs/{name}")
    *lasting, _ = fault.splitlines()
    if ranks == 1 and not lasting:
        done = forks.run("train", *words, cwd=place)
        assert done.code == 0, done.out + done.err
    else:
        program = FAULTY if lasting else TRAIN
        finished(start(place, program, *words, ranks=ranks, FAULTS="\n".join(lasting)))
    assert_continued(name, run, before, exact)


def test_a_sweep_goes_on(place: Path, forks: Forks, exact: bool) -> None:
    """One point is done, one was killed, and one had not begun."""
    folder, sweep = place / "runs/lr", ROOT / "scripts/sweep.py"
    found = forks.run("sweep", "sweep.toml", "table", cwd=place)
    states = re.findall(r"\b(done|killed|planned)\b", found.out)
    assert sorted(states) == ["done", "killed", "planned"]
    finished(start(place, sweep, "sweep.toml", "resubmit", "--here"))
    finished(start(place, sweep, "sweep.toml", "submit", "--here"))
    points = sorted(folder.glob("lr0*"))
    assert len(points) == 3
    for point in points:
        assert_equal(f"lr/{point.name}", point, exact)
    found = forks.run("sweep", "sweep.toml", "table", cwd=place)
    assert re.findall(r"\b(done|killed|planned)\b", found.out) == ["done"] * 3
    attempts = (folder / f"{points[1].name}/attempts.jsonl").read_text()
    assert '"attempt": 1' in attempts


@pytest.mark.soak
def test_reinforcement_learning_goes_on(place: Path, exact: bool) -> None:
    if not exact:
        pytest.skip("another rounding draws other samples")
    run = place / "runs/rl"
    before = {"": saved(run)}
    finished(start(place, ROOT / "scripts/slurm/rl.sh", "rl.toml", "--run.dir=runs/rl"))
    assert_continued("rl", run, before, exact)


@pytest.mark.soak
def test_replicas_of_several_steps_go_on(place: Path, exact: bool) -> None:
    run = place / "runs/islands"
    before = {part: saved(path) for part, path in parts_of(run).items()}
    door = run / ".door-1.0"
    words = ["-m", judge.__name__, str(door), "127.0.0.1", "--log", str(run / "replicas.jsonl")]
    with ended(subprocess.Popen([sys.executable, *words], cwd=place, env=clean_env(**FIXED))):
        until(door.exists)
        shared = {"KEMPNER_DOOR": str(door), "KEMPNER_REPLICAS": "2"}
        words = [*ISLANDS, "--run.dir=runs/islands"]
        both = [start(place, TRAIN, *words, KEMPNER_REPLICA=i, **shared) for i in "01"]
        for process in both:
            finished(process)
    assert_continued("islands", run, before, exact)


def test_what_the_programs_say_of_the_runs(forks: Forks, tmp_path: Path) -> None:
    """Before anything has continued them."""
    unpacked(tmp_path)
    said = forks.run("status", "--json", "runs", "runs/lr", cwd=tmp_path)
    found = {run["run"].removeprefix("runs/"): run for run in json.loads(said.out)["runs"]}
    names = {*TRAINED, "rl", "islands", *(x.name for x in tmp_path.glob("runs/lr/lr0*"))}
    assert {Path(name).name for name in found} == names
    for name, told in EXPECTED["status"].items():
        assert {key: found[name][key] for key in told} == told, name
    for name in ("killed", "diloco", "rl"):
        done = forks.run("report", f"runs/{name}", "--out", "report.png", cwd=tmp_path)
        assert done.code == 0 and str(found[name]["step"]) in done.out, done.err
    page = forks.run("report", "runs", "--html", "page.html", cwd=tmp_path)
    text = (tmp_path / "page.html").read_text()
    assert page.code == 0 and all(name in text for name in (*TRAINED, "rl", "islands"))


def test_a_model_says_what_it_said(forks: Forks, exact: bool, tmp_path: Path) -> None:
    """That of a checkpoint, and the one that was exported from another."""
    unpacked(tmp_path)
    for source, text in EXPECTED["texts"].items():
        found = forks.run("generate", *written(source), cwd=tmp_path)
        assert found.code == 0, found.err
        assert not exact or found.out == text, source


@pytest.mark.parametrize(
    "name", ["quickstart", pytest.param("quickstart-fsdp", marks=pytest.mark.soak)]
)
def test_the_quickstart_computes_what_it_did(
    name: str, place: Path, tmp_path: Path, exact: bool
) -> None:
    """Unbroken, and resumed in its middle."""
    (words, ranks), run = WHOLE[name], tmp_path / "run"
    finished(start(place, TRAIN, *words, f"--run.dir={run}", ranks=ranks))
    assert_equal(name, run, exact)
    begun(tmp_path, "run", tmp_path / "resumed", 10)
    finished(start(place, TRAIN, *words, f"--run.dir={tmp_path / 'resumed'}", ranks=ranks))
    assert_continued(name, tmp_path / "resumed", {"": 10}, exact)
