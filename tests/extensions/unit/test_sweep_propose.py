"""[propose] of a sweep: points that follow from results, recorded once, by optuna."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import threading
from pathlib import Path

import optuna
import pytest

from kempner.config.option import ConfigError
from kempner.extensions.sweep import submit as submitting
from kempner.extensions.sweep.file import read_sweep
from kempner.extensions.sweep.journal import Journal, locked_journal
from kempner.extensions.sweep.look import PointStatus, look_at_points
from kempner.extensions.sweep.propose import proposal_room, propose_values, proposed_points
from kempner.jobs import slurm
from tests.extensions.unit.test_sweep_points import BASE, ROOT, SWEEP, TRAINER, Capture
from tests.waiting import LIMIT_S

TEXT = """
max_running = {running}
[set]
eval.interval = 20
data.dataset_path = "{data}"
[propose]
points = {points}
startup = 4
optimizer.lr = {{ log = [1e-5, 1.0] }}
"""


def write(more: str = "", running: int = 1, points: int = 20, data: object = "none") -> None:
    text = TEXT.format(running=running, points=points, data=data)
    Path("s.toml").write_text(BASE + text + more)


def end(name: str, loss: float | None, state: str = "done") -> None:
    run = Path("runs/s") / name
    run.mkdir(parents=True, exist_ok=True)
    (run / "status.json").write_text(json.dumps({"state": state, "step": 40}))
    (run / "metrics.jsonl").write_text(
        json.dumps({"step": 40, "time": 1.0, "val_loss": loss}) + "\n"
    )


def looks() -> list[PointStatus]:
    journal = Journal(Path("runs/s/sweep"))
    return look_at_points(proposed_points(read_sweep(Path("s.toml")), journal), journal)


def more(count: int = 1) -> list[str]:
    """Propose and record, as submit does; the names."""
    journal = Journal(Path("runs/s/sweep"))
    journal.folder.mkdir(parents=True, exist_ok=True)
    found = propose_values(read_sweep(Path("s.toml")), looks(), journal, count)
    for name, values in found.items():
        journal.append(event="proposed", point=name, values=values)
    return [*found]


def distance_of(name: str) -> float:
    """Ends the point with a loss that is its distance from lr = 0.01, in decades."""
    rate = Journal(Path("runs/s/sweep")).proposed[name]["optimizer.lr"]
    distance = abs(math.log10(rate) + 2)
    end(name, distance)
    return distance


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm, "my_jobs", lambda: {})
    monkeypatch.setattr(slurm, "jobs_named", lambda name: [])
    monkeypatch.setattr(slurm, "accounted_states", lambda jobs: {})
    monkeypatch.setattr(slurm, "max_array_size", lambda: 100)
    monkeypatch.delenv("KEMPNER_SITE", raising=False)


def test_points_come_near_the_best() -> None:
    """A loss with its minimum at lr = 0.01: what is proposed later lies closer to it. The same
    results give the same points."""
    write()
    distances = [distance_of(*more()) for _ in range(14)]
    assert statistics.median(distances[-6:]) < 0.75 < statistics.median(distances[:4])
    again = propose_values(read_sweep(Path("s.toml")), looks(), Journal(Path("runs/s/sweep")), 3)
    assert again == propose_values(
        read_sweep(Path("s.toml")), looks(), Journal(Path("runs/s/sweep")), 3
    )
    assert len(again) == 3


def test_what_runs_is_not_proposed_again_nearby() -> None:
    """Four points at the same time are not four times nearly the same."""
    write(running=4)
    for _ in range(8):
        distance_of(*more())
    more(4)
    rates = sorted(math.log10(each.point.cfg.optimizer.lr) for each in looks()[-4:])
    assert rates[-1] - rates[0] > 0.3


def test_room() -> None:
    """Those that run, wait or were killed keep their places; three failures in a row end it."""
    write(running=3, points=8)
    sweep, journal = read_sweep(Path("s.toml")), Journal(Path("runs/s/sweep"))
    assert proposal_room(sweep, []) == (3, "")
    first, second, third = more(3)
    assert proposal_room(sweep, looks()) == (0, "")
    end(first, 2.0)
    end(second, None, "failed")
    assert proposal_room(sweep, looks()) == (2, "")
    name = journal.intend("s", [third]).name
    journal.append(event="submitted", name=name, job="7")
    assert [each.state.word for each in looks()] == ["done", "failed", "killed"]
    assert proposal_room(sweep, looks()) == (2, "")
    for name in more(2):
        end(name, None, "failed")
    assert proposal_room(sweep, looks()) == (0, proposal_room(sweep, looks())[1])
    assert "the last 3 points have failed" in proposal_room(sweep, looks())[1]
    end(second, 2.5, "stopped")  # resubmitted
    assert proposal_room(sweep, looks()) == (2, "")
    more(3)
    assert proposal_room(sweep, looks()) == (0, "")


def test_what_optuna_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done by its loss, what was stopped before it was done, what has failed as the worst;
    a point that the ranges are without not at all."""
    write(running=9)
    rates = []
    ends = [("done", 2.0), ("done", None), ("stopped", 3.0), ("failed", None), ("crashed", 1.0)]
    for name, (state, loss) in zip(more(6), ends, strict=False):
        end(name, loss, state)
    with (looks()[2].point.run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"step": {i}, "time": 1.0, "loss": 1.0}}\n' for i in range(41, 2500))
    rates = [each.point.cfg.optimizer.lr for each in looks()]
    studies: list[optuna.Study] = []

    def create_study(direction: str) -> optuna.Study:
        studies.append(optuna.study.create_study(direction=direction))
        return studies[-1]

    monkeypatch.setattr(optuna, "create_study", create_study)
    more()
    told = [(t.state.name, t.values, t.intermediate_values) for t in studies[0].trials[:-1]]
    assert told == [
        ("COMPLETE", [2.0], {}), ("COMPLETE", [math.inf], {}), ("PRUNED", None, {40: 3.0}),
        ("PRUNED", None, {}), ("RUNNING", None, {}), ("RUNNING", None, {}),
    ]  # fmt: skip
    assert [t.params["optimizer.lr"] for t in studies[0].trials[:-1]] == rates
    text = Path("s.toml").read_text()
    Path("s.toml").write_text(text.replace("1e-5", str(sorted(rates)[1])))
    more()
    assert len(studies[1].trials) == 7  # without the smallest one, with the sixth and two new ones


def test_values() -> None:
    """Lists by value, also of lists; whole numbers; conditions; none twice, until all are there."""
    betas, heads = [[0.9, 0.95], [0.9, 0.99]], "[1, 2]"
    Path("s.toml").write_text(
        f'{BASE}max_running = 9\nwhere = ["train.seed > 1"]\n[set]\neval.interval = 20\n'
        f"[propose]\npoints = 9\noptimizer.betas = {betas}\n"
        f"train.seed = {{ linear = {heads} }}\noptimizer.lr = [1e-3, 2e-3]\n"
    )
    assert len(more(9)) == 4
    assert more(9) == []
    found = [each.point.cfg for each in looks()]
    kinds = {(cfg.optimizer.betas, cfg.optimizer.lr) for cfg in found}
    assert len(kinds) == 4 and {pair[0] for pair in kinds} == {(0.9, 0.95), (0.9, 0.99)}
    assert {cfg.train.seed for cfg in found} == {2}
    text = Path("s.toml").read_text()
    Path("s.toml").write_text(text.replace("seed > 1", "seed > 9"))
    with pytest.raises(ConfigError, match="none of 100 draws satisfies all conditions"):
        more(1)


def test_an_edited_file() -> None:
    """Other ranges keep what there is; other runs begin anew, and the first ones come back."""
    write()
    first = more(3)
    for name in first:
        end(name, 1.0)
    text = Path("s.toml").read_text()
    Path("s.toml").write_text(text.replace("1e-5, 1.0", "1e-3, 1e-2"))
    assert [each.point.name for each in looks()] == first and len(more(2)) == 2
    Path("s.toml").write_text(text.replace("eval.interval = 20", "eval.interval = 10"))
    assert looks() == [] and len(more(1)) == 1 and len(looks()) == 1
    Path("s.toml").write_text(text)
    assert [each.point.name for each in looks()][:3] == first


class Cluster:
    """sbatch, which takes everything or nothing; `jobs`: the points of each that it took."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: list[list[str]] = []
        self.env: dict[str, str] = {}
        self.dies = False
        monkeypatch.setattr(SWEEP.shutil, "which", lambda name: name)
        monkeypatch.setattr(submitting.subprocess, "run", self.run)
        monkeypatch.setattr(slurm, "my_jobs", self.queue)
        monkeypatch.setattr(slurm, "waiting_arrays", dict)

    def run(
        self, command: list[str], *args: object, env: dict[str, str], **more: object
    ) -> subprocess.CompletedProcess[str]:
        if self.dies:
            raise KeyboardInterrupt
        self.env = env
        lines = Path(command[-1].removeprefix("@")).read_text().split()
        self.jobs.append([Path(line).stem for line in lines])
        return subprocess.CompletedProcess(command, 0, f"{len(self.jobs)}\n", "")

    def queue(self) -> dict[str, slurm.SlurmJob]:
        names = [f"{i}_{k}" for i, job in enumerate(self.jobs, 1) for k in range(len(job))]
        return {name: slurm.SlurmJob(name, "RUNNING") for name in names}


def test_submit(data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """As many as may run; the end of one is the next; nothing twice, whatever happens between."""
    cluster = Cluster(monkeypatch)
    write(running=2, points=4, data=data_dir)
    monkeypatch.setattr(sys, "executable", "/the/python")

    def submit(*words: str) -> str:
        assert SWEEP.main(["s.toml", "submit", *words]) == 0
        return capsys.readouterr().out

    assert SWEEP.main(["s.toml", "plan"]) == 0
    planned = capsys.readouterr().out
    assert "2 of 4 points in runs/s, 1 array(s)" in planned and not Path("runs").exists()
    submit()
    assert cluster.env["KEMPNER_PROPOSE"] == str(Path("s.toml").absolute())
    assert cluster.env["KEMPNER_PROPOSE_PYTHON"] == "/the/python"
    ((first, second),) = cluster.jobs
    assert first in planned and second in planned
    assert "nothing to submit" in submit() and "nothing to submit" in submit("--from-job")
    end(first, 2.0)
    cluster.dies = True  # after the proposal
    assert SWEEP.main(["s.toml", "submit", "--from-job"]) == 130
    cluster.dies = False
    third = looks()[-1].point.name
    submit("--from-job")
    assert cluster.jobs == [[first, second], [third]]
    assert "nothing to submit" in submit("--from-job")
    Journal(Path("runs/s/sweep")).append(event="cancelled", points=[second])
    monkeypatch.setattr(slurm, "my_jobs", lambda: {})
    end(third, 1.0)
    assert "nothing to submit" not in submit("--from-job") and len(cluster.jobs) == 2
    submit()
    assert len(cluster.jobs) == 3 and cluster.jobs[-1][0] == second and len(looks()) == 4
    assert SWEEP.main(["s.toml", "status"]) == 1
    assert "4 of 4 points: " in capsys.readouterr().out


def test_submit_waits_for_a_job_that_submits() -> None:
    write(points=1)
    end(*more(), 1.0)
    held = contextlib.ExitStack()
    held.enter_context(locked_journal(Path("runs/s/sweep")))
    threading.Timer(0.5, held.close).start()
    assert SWEEP.main(["s.toml", "submit"]) == 0


def test_bad_points_are_not_recorded(data_dir: Path, capsys: Capture) -> None:
    """A world that does not divide the batch: the same error each time, and nothing is kept."""
    write("[resources]\ngpus_per_node = 7\n", data=data_dir)
    for _ in range(2):
        assert SWEEP.main(["s.toml", "submit", "--here"]) == 2
        assert "do not divide by 7 ranks" in capsys.readouterr().err
    assert looks() == []


def test_without_optuna(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    write()
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert SWEEP.main(["s.toml", "plan"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "optuna is not installed; run .venv/bin/pip install" in said
    assert SWEEP.main(["s.toml", "status"]) == 0
    assert SWEEP.main(["s.toml", "table"]) == 0


def test_here(data_dir: Path) -> None:
    """One after another, until all are there; one that fails does not stop the rest."""
    write("train.seed = [1, 2, 3]\n", points=3, data=data_dir)
    Path("train.py").write_text(TRAINER)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "KEMPNER"))}
    env |= {"KEMPNER_TRAIN": str(Path("train.py").absolute()), "KEMPNER_SITE": os.devnull}
    env |= {"KEMPNER_PYTHON": sys.executable}
    command = [sys.executable, str(ROOT / "scripts/sweep.py"), "s.toml", "submit", "--here"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.count("1 of 1: ") == 3 and "nothing to submit; " in done.stdout
    assert len(looks()) == 3
