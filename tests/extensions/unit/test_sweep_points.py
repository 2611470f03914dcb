"""Sweeps: expressions, the file, points and their names, arrays, the journal."""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kempner.config.option import ConfigError
from kempner.extensions.lowcomm.config import LowcommConfig
from kempner.extensions.sweep import look as looking
from kempner.extensions.sweep import submit as submitting
from kempner.extensions.sweep.early_stop import stop_reason
from kempner.extensions.sweep.expression import Expression, ExpressionError
from kempner.extensions.sweep.file import read_sweep
from kempner.extensions.sweep.here import run_here
from kempner.extensions.sweep.journal import Journal, locked_journal
from kempner.extensions.sweep.keys import SWEEP_KEYS
from kempner.extensions.sweep.look import look_at_points
from kempner.extensions.sweep.points import SweepPoint, expand_points, run_identity
from kempner.extensions.sweep.propose import propose_values, proposed_points
from kempner.extensions.sweep.resources import profile_environment
from kempner.extensions.sweep.submit import arrays_of
from kempner.jobs import slurm
from kempner.jobs.records.run_history import is_run
from kempner.jobs.system.directories import Kind, mark_directory
from tests.conftest import load_program
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[3]
SWEEPS = ROOT / "configs/sweeps"
BASE = f'base = "{ROOT}/configs/train/debug.toml"\n'


SWEEP = load_program("sweep")
Capture = pytest.CaptureFixture[str]
PROPOSE = "max_running = 1\n[propose]\npoints = 2\ntrain.seed = [1, 2]\n"


def points_of(folder: Path, text: str) -> list[SweepPoint]:
    file = folder / "s.toml"
    file.write_text(BASE + text)
    return expand_points(read_sweep(file))


def problems_of(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        points_of(folder, text)
    return [line.replace(str(folder / "s.toml") + ": ", "") for line in caught.value.problems]


@functools.cache
def shipped(file: Path) -> list[SweepPoint]:
    sweep = read_sweep(file)
    if sweep.propose is None:
        return expand_points(sweep)
    journal = Journal(Path("nowhere"))
    journal.proposed = propose_values(sweep, [], journal, 4)
    return proposed_points(sweep, journal)


# --- expressions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 + 3 * 4 ** 2 - -1", 51),
        ("7 // 2 + 7 % 4 + 1 / 2", 6.5),
        ("ceil(1.2) + floor(1.8) + round(2.6)", 6),
        ("min(x, 2) + max(x, 2)", 5),
        ("log(1) + sqrt(16)", 4),
        ("1 < x <= 3 and not x == 2 or unset > 1", True),
        ("name == 'ddp' and train.max_steps >= 10", True),
        ("2 + 2 * (x <= 3)", 4),
        ("x if name == 'ddp' else 'none'", 3),
    ],
)
def test_expressions(text: str, value: object) -> None:
    known = {"x": 3, "name": "ddp", "train.max_steps": 10, "unset": None}
    assert Expression(text).value(known) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "open('/etc/passwd')",
        "[x for x in (1, 2)]",
        "lambda: 1",
        "x.y.z",
        "(1).real",
        "x[0]",
        "f'{x}'",
        "{1: 2}",
        "~x",
        "x << 9",
        "x is 1",
        "min(*x)",
        "max(x, key=x)",
        "(x := 1)",
        "1 +",
        "1; 2",
        "",
        "9j",
        "...",
        "-" * 5000 + "1",
    ],
)
def test_expressions_that_are_not_allowed(text: str) -> None:
    with pytest.raises(ExpressionError):
        Expression(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1 / zero", "has no value: "),
        ("9 ** 9 ** 9 ** 9", "has no value: "),
        ("word * 10", 'has no value: "a" is not a number'),
        ("unset + 1", "has no value: unset is none"),
        ("zer + 1", "unknown name zer; did you mean zero?"),
        ("log(zero)", "has no value: "),
        ("-8 ** 0.5 * (0 - 8) ** 0.5", "has no value: "),
    ],
)
def test_expressions_without_a_value(text: str, problem: str) -> None:
    with pytest.raises(ExpressionError, match=problem.replace("?", r"\?")):
        Expression(text).value({"zero": 0, "word": "a", "unset": None})


# --- the file and its points ------------------------------------------------------------------


def test_axes(tmp_path: Path) -> None:
    points = points_of(
        tmp_path,
        """
        where = ["not (optimizer.lr > 0.005 and train.seed == 1)"]
        [axes]
        optimizer.lr = { log = [1e-3, 1e-1], count = 3 }
        "train.seed" = { linear = [0, 2], count = 3 }
        [[zip]]
        train.global_batch = [8, 16]
        train.max_steps = [20, 10]
        """,
    )
    found = [(p.cfg.optimizer.lr, p.cfg.train.seed, p.cfg.train.global_batch) for p in points]
    every = [(lr, s, b) for lr in (1e-3, 1e-2, 1e-1) for s in (0, 1, 2) for b in (8, 16)]
    assert found == [(lr, s, b) for lr, s, b in every if not (lr > 0.005 and s == 1)]
    assert all(p.cfg.train.global_batch * p.cfg.train.max_steps == 160 for p in points)


def test_random_draws(tmp_path: Path) -> None:
    """Seeded; more samples leave the first ones as they are."""
    text = "[random]\nseed = 3\nsamples = {}\noptimizer.lr = {{ log = [1e-4, 1e-2] }}\n"
    text += "train.seed = [1, 2, 3]\n"
    few, more = points_of(tmp_path, text.format(4)), points_of(tmp_path, text.format(9))
    assert [p.name for p in more[:4]] == [p.name for p in few]
    assert all(1e-4 <= p.cfg.optimizer.lr <= 1e-2 for p in more)
    assert len({p.cfg.optimizer.lr for p in more}) == 9
    assert [p.name for p in points_of(tmp_path, text.replace("= 3", "= 4", 1).format(4))] != few


def test_several_bases(tmp_path: Path) -> None:
    base = {name: f"{ROOT}/configs/train/{name}.toml" for name in ("debug", "quickstart")}
    file = tmp_path / "s.toml"
    lines = "".join(f'{name} = "{path}"\n' for name, path in base.items())
    file.write_text(
        f"[base]\n{lines}[axes]\nlr = [1, 2]\n[rules]\n"
        "optimizer.lr = \"lr * 1e-3 * (1 + (base == 'debug'))\"\n"
        'train.max_steps = "train.max_steps + 1"\n'  # its own name: the value before
    )
    points = expand_points(read_sweep(file))
    assert [p.values["base"] for p in points] == ["debug", "debug", "quickstart", "quickstart"]
    assert [p.cfg.optimizer.lr for p in points] == [2e-3, 4e-3, 1e-3, 2e-3]
    assert [p.cfg.train.max_steps for p in points] == [41, 41, 251, 251]
    assert all(p.name.startswith(f"{p.values['base']}-lr") for p in points)


def test_the_nine_sizes() -> None:
    """Parameters and steps by formula, nothing from a table. Reference: the formulas in ten plain
    lines."""
    points = [p for p in shipped(SWEEPS / "sizes.toml") if p.values["lr_step"] == 0]
    points, diloco = points[:9], points[9:]
    assert [p.cfg.of(LowcommConfig).replicas for p in (*points, *diloco)] == [None] * 9 + [8] * 9
    assert [p.cfg.optimizer.weight_decay for p in diloco] == pytest.approx([0.1 / 8] * 9)
    for point, width in zip(points, range(512, 4609, 512), strict=True):
        depth, vocab = 6 * width // 512, 128256
        matrices = 2 * vocab * width + depth * (4 * width**2 + 3 * width * (11 * width // 4))
        model, train = point.cfg.model, point.cfg.train
        vectors = depth * (4 * width + 2 * 128) + width  # the norms
        assert model.count_parameters() == matrices + vectors
        assert train.max_steps == math.ceil(20 * matrices / (512 * 2048) / 240) * 240
        assert (model.resolved_head_dim, train.global_batch, train.seq_len) == (128, 512, 2048)
    assert [p.cfg.train.micro_batch for p in points] == [32, 16, 16, 8, 4, 2, 2, 2, 2]
    assert [p.cfg.train.max_steps for p in points] == [
        2880, 8160, 17520, 33600, 58560, 94560, 143760, 208320, 290640,
    ]  # fmt: skip
    rates = [p.cfg.optimizer.lr for p in points]
    assert rates[0] == pytest.approx(4e-3, rel=1e-2) and rates == sorted(rates, reverse=True)


def test_rules_at_another_batch(tmp_path: Path) -> None:
    """Half the sequences and two replicas: twice the steps, a quarter of the weight decay."""
    text = (SWEEPS / "sizes.toml").read_text()
    text = text.replace("../train", f"{ROOT}/configs/train")
    changed = text.replace("batch = 512 ", "batch = 256 ").replace("else 1", "else 2")
    found = []
    for each in (text, changed):
        each = each.replace("[-2, -1, 0, 1, 2]", "[0]")
        (tmp_path / "s.toml").write_text(each)
        found.append(expand_points(read_sweep(tmp_path / "s.toml"))[2].cfg)
    assert found[1].train.max_steps == 2 * found[0].train.max_steps
    assert found[1].optimizer.weight_decay == pytest.approx(found[0].optimizer.weight_decay / 4)


def test_the_nine_sizes_fit_their_nodes(tmp_path: Path, data_dir: Path) -> None:
    """As `plan` checks them: data parallel, and replicas of one GPU and of four."""
    text = (SWEEPS / "sizes.toml").read_text().replace("../train", f"{ROOT}/configs/train")
    text = text.replace("[set]", f"[set]\ndata.dataset_path = '{data_dir}'")
    (tmp_path / "s.toml").write_text(text.replace("[-2, -1, 0, 1, 2]", "[0]"))
    sweep = read_sweep(tmp_path / "s.toml")
    arrays = submitting.plan_arrays(sweep, expand_points(sweep))
    assert [array.words[0] for array in arrays] == ["--nodes=1", "--nodes=4"]
    assert [len(array.points) for array in arrays] == [8, 10]


@pytest.mark.parametrize("file", sorted(SWEEPS.glob("*.toml")), ids=lambda f: f.stem)
def test_every_shipped_sweep(file: Path) -> None:
    assert shipped(file)


def test_a_name_is_what_the_run_does(tmp_path: Path) -> None:
    """Not where or on what it runs: the same on other machines and nodes; any change of the
    configuration is another run."""
    text = "[axes]\noptimizer.lr = [1e-3, 2e-3]\n"
    points = points_of(tmp_path, text)
    assert points[0].run_dir.parts[:2] == ("runs", "s")
    moved = points_of(tmp_path, f'dir = "else"\n{text}[resources]\nnodes = 2\n')
    assert [p.name for p in moved] == [p.name for p in points]
    changed = points_of(tmp_path, f"{text}[set]\ntrain.seed = 1\n")
    assert not {p.name for p in changed} & {p.name for p in points}
    assert run_identity(points[0].cfg) == points[0].name.rpartition("-")[2]


def test_long_values_that_end_differently(tmp_path: Path) -> None:
    paths = [f"/scratch/{'project/' * 12}{name}.json" for name in "ab"]
    points = points_of(tmp_path, f"[axes]\ndata.dataset_path = {json.dumps(paths)}\n")
    assert [p.cfg.data.dataset_path for p in points] == paths
    assert points[0].name != points[1].name


def test_equal_hashes_are_no_equal_configurations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 points some have the same one hexadecimal digit."""
    monkeypatch.setattr("kempner.extensions.sweep.points.HASH", 1)
    text = "[axes]\ntrain.seed = { linear = [0, 19], count = 20 }\n"
    assert len(points_of(tmp_path, text)) == 20
    (problem, *_) = problems_of(tmp_path, f"[axes]\na = [1, 2]\n{text[7:]}[rules]\nb = 'a'\n"
                                "optimizer.lr = '1e-3 + 0 * b'\n")  # fmt: skip
    assert "two points have the same configuration: a=1 train.seed=0, and a=2" in problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[zip]\n", "zip: has no lists; give some, or leave it out"),
        ("[zip]\ntrain.seed = ['a']", "zip: train.seed = \"a\": must be an int"),
        ("[random]\nsamples = 1\ntrain.seed = ['a']", "random: train.seed = \"a\": must be an"),
        ("[axes]\noptimizer.lrr = [1]", "unknown option; did you mean optimizer.lr?"),
        ("[axis]\noptimizer.lr = [1]", "axis: unknown key; did you mean axes?"),
        ("[axes]\nlr = [1, 2]", "axes: lr: has no effect: no rule or condition uses it"),
        ("[axes]\noptimizer.lr = [1e-3, 0.001]", "has a value twice"),
        ("[axes]\noptimizer.lr = []", "has no values"),
        ("[axes]\noptimizer.lr = 1", "must be a list, or {log"),
        ("[axes]\noptimizer.lr = {log = [0, 1], count = 3}", "must be [LOW, HIGH] over 0"),
        ("[axes]\noptimizer.lr = {log = [1, 2]}", "must be a list, or {log"),
        ("[axes]\noptimizer.lr = {log = [1, 2], count = 1}", "count = 1: must be 2 to"),
        ("[axes]\ntrain.seed = ['a']", "must be an int, not a string"),
        ("[axes]\nrun.dir = ['a']", "a sweep names its run directories itself"),
        ("[axes]\ntrain.seed = [1]\n[set]\ntrain.seed = 2", "is in [set] and in [axes]"),
        ("[rules]\ntrain.seed = 'open(1)'", "is not allowed; an expression has"),
        ("[rules]\ntrain.seed = 'sed'", "unknown name sed"),
        ("[rules]\ntrain.seed = '1 / 2'", "rules: train.seed = 0.5: must be an int"),
        ("[rules]\na = 'b'\nb = 'a'\ntrain.seed = 'a'", "break the cycle"),
        ("[zip]\ntrain.seed = [1, 2]\noptimizer.lr = [1]", "the lists must be equally long"),
        ("[random]\ntrain.seed = [1, 2]", "random: samples = "),
        ("where = ['train.seed > 0']", "no combination satisfies all conditions"),
        ("where = ['train.seed >']", "is not an expression"),
        ("max_running = 0", "max_running = 0: must be at least 1"),
        ("[early_stop]\nafter = 0", "early_stop.after = 0: must be at least 1"),
        ("[early_stop]\nevery = 1", "early_stop.every = 1: unknown key"),
        ("[early_stop]\n[set]\neval.interval = 0", "early_stop: needs validations"),
        ("[propose]\ntrain.seed = [1]\npoints = 2", "propose: give max_running"),
        ("max_running = 1\n[propose]\ntrain.seed = [1]", "propose.points: is required"),
        ("max_running = 1\n[propose]\npoints = 2", "propose: nothing to choose"),
        ("max_running = 1\n[propose]\npoints = 2\na = [1]", "propose: a: has no effect"),
        (f"{PROPOSE}startup = 0", "propose.startup = 0: must be at least 1"),
        (f"{PROPOSE}optimizer.lr = {{log = [1, 2], count = 3}}", "optimizer.lr = {log = [1, 2], c"),
        (f"{PROPOSE}train.max_steps = {{log = [1, 4]}}", "train.max_steps = 2.0: must be an int"),
        (f"{PROPOSE}optimizer.lr = {{linear = [-1, 1]}}", "optimizer.lr = -1: must be at least 0"),
        (f"{PROPOSE}[axes]\noptimizer.lr = [1, 2]", "cannot be combined with [axes]"),
        ("base = 3", "Cannot overwrite a value"),
        ("[resources]\nnode = 2", "resources.node: unknown option; did you mean resources.nodes?"),
        ("[resources]\nshare = true", "give resources.cpus_per_task and resources.mem"),
        ("[resources]\npack = 2\nnodes = 2", "on 2 nodes does not fit on a part of one"),
        ("[resources]\npack = 2\nshare = true\nmem = '1G'\ncpus_per_task = 1", "leave one of them"),
        (f"{PROPOSE}[resources]\npack = 2", "pack: cannot be combined with [propose]"),
        ("[set]\nmodel.dim = 130", "model.dim = 130: must be a multiple of n_heads = 4"),
        ("[axes]\na = [1, 2]\n[rules]\ntrain.seed = '0 * a'", "have the same configuration: a=1"),
    ],
)  # fmt: skip
def test_bad_input_is_one_problem(tmp_path: Path, text: str, problem: str) -> None:
    (found,) = problems_of(tmp_path, text)
    assert problem in found


def test_all_problems_together(tmp_path: Path) -> None:
    found = problems_of(tmp_path, "maxrunning = 1\n[axes]\ntrain.sed = [1]\n[rules]\nx = 'y.z'\n")
    assert len(found) == 4  # and x has no effect


# --- arrays -----------------------------------------------------------------------------------


def test_arrays(tmp_path: Path) -> None:
    """One for each request, cut at MaxArraySize; max_running holds over all of them."""
    text = """
        max_running = 6
        [axes]
        train.seed = { linear = [0, 9], count = 10 }
        [rules]
        resources.nodes = "1 + (train.seed >= 8)"
        """
    points = points_of(tmp_path, text)
    sweep = read_sweep(tmp_path / "s.toml")
    whole = arrays_of(sweep, points, None)
    assert [(a.indices, a.script.name) for a in whole] == [
        ("0-7%5", "singlenode.sh"), ("0-1%1", "multinode.sh"),
    ]  # fmt: skip
    cut = arrays_of(sweep, points, 3)
    assert [len(a.points) for a in cut] == [3, 3, 2, 2]
    assert sum(a.running or len(a.points) for a in cut) <= 6
    assert [p for a in cut for p in a.points] == points
    with pytest.raises(ConfigError, match="max_running = 6: the points make 10 arrays"):
        arrays_of(sweep, points, 1)
    with pytest.raises(ConfigError, match="allows no job arrays"):
        arrays_of(sweep, points, 0)


def test_packed_arrays(tmp_path: Path) -> None:
    """A task runs `pack` points, and counts so often for max_running."""
    text = """
        max_running = 7
        [axes]
        train.seed = { linear = [0, 10], count = 11 }
        [resources]
        gpus_per_node = 2
        pack = 3
        """
    points = points_of(tmp_path, text)
    sweep = read_sweep(tmp_path / "s.toml")
    (array,) = arrays_of(sweep, points, None)
    assert (array.indices, array.program[1:]) == ("0-3%2", ["3"])
    assert "--gpus-per-node=6" in array.words and points[0].resources.world_size == 2
    assert [len(a.points) for a in arrays_of(sweep, points, 2)] == [6, 5]
    with pytest.raises(ConfigError, match="give at least 12"):
        arrays_of(sweep, points, 1)


def test_max_running_over_all_arrays(
    swept: list[SweepPoint], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:  # fmt: skip
    """A later submit divides it among its own array and the one that Slurm still has."""
    told: list[list[str]] = []

    def run(command: list[str], **more: object) -> subprocess.CompletedProcess[str]:
        told.append(command)
        return subprocess.CompletedProcess(command, 0, f"{len(told)}\n", "")

    monkeypatch.setattr(submitting.subprocess, "run", run)
    monkeypatch.setattr(submitting.slurm, "max_array_size", lambda: None)
    monkeypatch.setattr(submitting.slurm, "waiting_arrays", dict)
    monkeypatch.setattr(submitting, "check_points", lambda points: None)
    monkeypatch.setattr("shutil.which", lambda name: name)
    file = Path("s.toml")
    file.write_text(f"max_running = 4\n{BASE}[axes]\ntrain.seed = [1, 2, 3, 4, 5, 6]\n")
    assert SWEEP.main(["s.toml", "submit"]) == 0
    assert "--array=0-5%4" in told[0]
    jobs = {f"1_{i}": slurm.SlurmJob(f"1_{i}", "PENDING") for i in range(2, 6)}
    monkeypatch.setattr(slurm, "my_jobs", lambda: jobs)
    file.write_text(file.read_text().replace("5, 6", "5, 6, 7, 8"))
    assert SWEEP.main(["s.toml", "submit"]) == 0
    assert told[1] == ["scontrol", "update", "JobId=1", "ArrayTaskThrottle=3"]
    assert "--array=0-1%1" in told[2] and len(told) == 3
    file.write_text(file.read_text().replace("max_running = 4", "max_running = 1"))
    assert SWEEP.main(["s.toml", "resubmit"]) == 2  # those that job 1 no longer holds
    assert "beside 1 that Slurm has already" in capsys.readouterr().err


# --- the journal, and what follows from it ----------------------------------------------------


@pytest.fixture
def swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[SweepPoint]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm, "my_jobs", lambda: {})
    monkeypatch.setattr(slurm, "jobs_named", lambda name: [])
    monkeypatch.setattr(slurm, "accounted_states", lambda jobs: {})
    return points_of(tmp_path, "[axes]\ntrain.seed = [1, 2, 3]\n")


def words(points: list[SweepPoint], journal: Journal) -> list[str]:
    return [each.state.word for each in look_at_points(points, journal)]


def test_states(swept: list[SweepPoint], monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path("runs/s/sweep")
    with locked_journal(own) as journal:
        assert words(swept, journal) == ["planned"] * 3
        assert not is_run(own)  # status.sh shows the runs beside it
        submission = journal.intend("s", [p.name for p in swept[:2]])
        assert words(swept, journal) == ["unknown", "unknown", "planned"]
        journal.append(event="submitted", name=submission.name, job="7")
    journal = Journal(own)  # another process
    assert journal.task(swept[1].name) == "7_1"
    assert words(swept, journal) == ["killed", "killed", "planned"]
    jobs = {
        "7_0": slurm.SlurmJob("7_0", "RUNNING"),
        "7_1": slurm.SlurmJob("7_1", "PENDING", "", "Resources"),
    }
    monkeypatch.setattr(slurm, "my_jobs", lambda: jobs)
    assert words(swept, journal) == ["starting", "waiting", "planned"]
    monkeypatch.setattr(slurm, "my_jobs", lambda: None)
    assert words(swept, journal) == ["unknown", "unknown", "planned"]
    monkeypatch.setattr(slurm, "my_jobs", lambda: {})
    monkeypatch.setattr(slurm, "accounted_states", lambda jobs: {"7_0": "REQUEUED"})
    assert words(swept, journal) == ["unknown", "killed", "planned"]
    told = {"7_0": "CANCELLED", "7_1": "NODE_FAIL"}
    monkeypatch.setattr(slurm, "accounted_states", lambda jobs: told)
    assert words(swept, journal) == ["cancelled", "killed", "planned"]
    journal.append(event="cancelled", points=[swept[1].name])
    assert words(swept, journal) == ["cancelled", "cancelled", "planned"]


def test_states_of_packed_points(swept: list[SweepPoint], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one job: it waits to start again for one of them alone."""
    with locked_journal(Path("runs/s/sweep")) as journal:
        submission = journal.intend("s", [p.name for p in swept], 2)
        journal.append(event="submitted", name=submission.name, job="7")
    assert [journal.task(p.name) for p in swept] == ["7_0", "7_0", "7_1"]
    jobs = {
        "7_0": slurm.SlurmJob("7_0", "PENDING", "", "BeginTime"),
        "7_1": slurm.SlurmJob("7_1", "PENDING"),
    }
    monkeypatch.setattr(slurm, "my_jobs", lambda: jobs)
    for point, decision in zip(swept, ("requeue", "end"), strict=False):
        point.run_dir.mkdir(parents=True)
        start = {"event": "start", "time": 1.0, "job": "7_0", "attempt_id": "7.0.1", "attempt": 0}
        made = {**start, "event": "decision", "time": 2.0, "decision": decision}
        lines = f"{json.dumps(start)}\n{json.dumps(made)}\n"
        (point.run_dir / "attempts.jsonl").write_text(lines)
    looks = look_at_points(swept, journal)
    assert [each.state.word for each in looks] == ["waiting", "killed", "waiting"]
    assert [each.failed for each in looks] == [False, True, False]


def test_an_intent_is_settled(swept: list[SweepPoint], monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash between sbatch and its record: found in the queue, or by what the runs recorded;
    without an answer it stays open."""
    journal = Journal(Path("runs/s/sweep"))
    journal.folder.mkdir(parents=True)
    monkeypatch.setattr(slurm, "jobs_named", lambda name: None)
    submission = journal.intend("s", [p.name for p in swept])
    SWEEP.settle_journal(journal)
    assert journal.open == [submission]
    run = swept[2].run_dir
    run.mkdir()
    event = {"event": "start", "job": "9_2", "time": time.time()}
    (run / "attempts.jsonl").write_text(json.dumps(event) + "\n")
    monkeypatch.setattr(slurm, "jobs_named", lambda name: [])
    SWEEP.settle_journal(journal)
    assert not journal.open and journal.task(swept[0].name) == "9_0"
    other = journal.intend("s", ["gone"])
    monkeypatch.setattr(slurm, "jobs_named", lambda name: ["12"] if name == other.name else [])
    SWEEP.settle_journal(journal)
    assert journal.task("gone") == "12_0"
    journal.intend("s", ["never"])
    SWEEP.settle_journal(journal)
    assert not journal.open and journal.of("never") == []


@pytest.mark.parametrize(("answers", "calls"), [([""] * 5, 3), ([None] + [""] * 3, 2), (["5"], 1)])
def test_sbatch_fails_for_a_while(
    swept: list[SweepPoint], monkeypatch: pytest.MonkeyPatch, answers: list[str | None], calls: int
) -> None:
    """It is called again only once Slurm has said that it did not take the job, some seconds after
    the answer was lost: a busy controller registers a job later."""
    journal = Journal(Path("runs/s/sweep"))
    journal.folder.mkdir(parents=True)
    told = iter(answers)
    monkeypatch.setattr(submitting, "find_job", lambda *_: next(told))
    monkeypatch.setattr(submitting.time, "sleep", lambda s: None)
    made: list[int] = []

    def sbatch(*args: object, **more: object) -> subprocess.CompletedProcess[str]:
        made.append(1)
        done = len(made) == 3 or (None in answers and len(made) == 2)
        return subprocess.CompletedProcess([], 0 if done else 1, "8\n" if done else "", "away")

    monkeypatch.setattr(submitting.subprocess, "run", sbatch)
    sweep = read_sweep(Path("s.toml"))
    (array,) = arrays_of(sweep, swept, None)
    assert submitting.submit_array(sweep, array, journal, {}, lambda text: None)
    assert len(made) == calls and next(told, "all asked") == "all asked"
    assert journal.task(swept[0].name) == ("5_0" if answers == ["5"] else "8_0")


def test_an_array_that_slurm_registers_late_is_withdrawn(
    swept: list[SweepPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After sbatch was called again, or was given up: its tasks would run every point twice. What
    of it runs already is left alone: its points are not planned any more."""
    journal = Journal(Path("runs/s/sweep"))
    journal.folder.mkdir(parents=True)
    again, given_up, other = (journal.intend("s", [p.name]) for p in swept)
    submitting.record_job(journal, again, "8")
    submitting.record_job(journal, given_up, "")
    submitting.record_job(journal, other, "9")
    queue = f"7|{again.name}\n8|{again.name}\n9|{other.name}\n5|{given_up.name}\n6|mine\n"
    monkeypatch.setattr(slurm, "_ask", lambda *words: queue)
    cancelled: list[list[str]] = []

    def scancel(words: list[str], **more: object) -> subprocess.CompletedProcess[str]:
        cancelled.append(words)
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(submitting.subprocess, "run", scancel)
    assert SWEEP.settle_journal(Journal(journal.folder)) == ["7", "5"]
    assert cancelled == [["scancel", "--state=PENDING", job] for job in ("7", "5")]


@pytest.mark.parametrize(("said", "calls"), [(submitting.NO_CLUSTER, 1), ("(connect failure)", 7)])
def test_without_a_controller(
    swept: list[SweepPoint], monkeypatch: pytest.MonkeyPatch, said: str, calls: int
) -> None:
    """sbatch says that it has sent nothing: the points are not submitted, and may be again."""
    made: list[int] = []

    def sbatch(*args: object, **more: object) -> subprocess.CompletedProcess[str]:
        made.append(1)
        return subprocess.CompletedProcess([], 1, "", f"sbatch: error: {said}")

    monkeypatch.setattr(slurm, "jobs_named", lambda name: None)  # squeue does not answer either
    monkeypatch.setattr(submitting.time, "sleep", lambda s: None)
    monkeypatch.setattr(submitting.subprocess, "run", sbatch)
    journal = Journal(Path("runs/s/sweep"))
    journal.folder.mkdir(parents=True)
    sweep = read_sweep(Path("s.toml"))
    (array,) = arrays_of(sweep, swept, None)
    assert not submitting.submit_array(sweep, array, journal, {}, lambda text: None)
    assert len(made) == calls and not journal.open


FULL = """sbatch: error: QOSMaxSubmitJobPerUserLimit
sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit,
user's size and/or time limits)"""


def limited(monkeypatch: pytest.MonkeyPatch, room: int) -> list[tuple[int, str]]:
    """An sbatch that takes so many tasks, as with MaxSubmitJobs; the size of each array and its
    answer."""
    made: list[tuple[int, str]] = []

    def sbatch(words: list[str], **more: object) -> subprocess.CompletedProcess[str]:
        indices = next(word for word in words if word.startswith("--array="))
        tasks = int(indices.partition("=0-")[2].partition("%")[0]) + 1
        held = sum(size for size, said in made if said == "taken")
        made.append((tasks, "taken" if held + tasks <= room else "refused"))
        if held + tasks <= room:
            return subprocess.CompletedProcess(words, 0, f"{70 + len(made)};site\n", "")
        return subprocess.CompletedProcess(words, 1, "", FULL)

    monkeypatch.setattr(submitting.subprocess, "run", sbatch)
    monkeypatch.setattr(submitting.time, "sleep", lambda s: made.append((0, "slept")) if s else 0)
    return made


@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_no_more_jobs_are_allowed_at_a_time(
    swept: list[SweepPoint], monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """What there is room for is submitted, at once; the rest stays planned, and may be submitted
    later. The whole array was refused, seven times in a minute."""
    made = limited(monkeypatch, room)
    journal = Journal(Path("runs/s/sweep"))
    journal.folder.mkdir(parents=True)
    sweep = read_sweep(Path("s.toml"))
    (array,) = arrays_of(sweep, swept, None)
    assert len(swept) == 3
    said: list[str] = []
    taken = submitting.submit_array(sweep, array, journal, {}, said.append)
    assert [point for part in taken for point in part.points] == swept[:room]
    assert (0, "slept") not in made and not journal.open
    assert [bool(journal.task(point.name)) for point in swept] == [i < room for i in range(3)]
    left = [f"{3 - room} of 3 point(s) stay planned"] if room < 3 else []
    assert [text.partition(":")[0] for text in said] == left
    made.clear()
    (rest,) = arrays_of(sweep, swept[room:], None) if room < 3 else (array,)
    submitting.submit_array(sweep, replace(rest, running=1), journal, {}, said.append)
    if room < 3:
        assert sum(said == "taken" for _, said in made) <= 1  # each part would run so many at once


def test_the_shell_of_the_user_does_not_answer_for_scontrol(
    swept: list[SweepPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []

    def scontrol(
        words: list[str], env: dict[str, str], **more: object
    ) -> subprocess.CompletedProcess[str]:
        seen.append(env)
        assert words == ["scontrol", "update", "JobId=7", "ArrayTaskThrottle=2"]
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(submitting.subprocess, "run", scontrol)
    monkeypatch.setenv("SCONTROL_ALL", "1")
    (array,) = arrays_of(read_sweep(Path("s.toml")), swept, None)
    assert submitting.throttle_array(replace(array, job="7", running=2)) == ""
    assert "PATH" in seen[0] and "SCONTROL_ALL" not in seen[0]


@pytest.mark.parametrize(
    "refusal",
    [
        FULL.replace("MaxSubmitJobPer", "MaxWall"),
        "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
        "sbatch: error: Batch job submission failed: Invalid account or account/partition "
        "combination specified\n",
    ],
)
def test_a_final_refusal_is_not_asked_twice(
    swept: list[SweepPoint], monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    calls: list[int] = []

    def sbatch(*args: object, **more: object) -> subprocess.CompletedProcess[str]:
        calls.append(1)
        return subprocess.CompletedProcess([], 1, "", refusal)

    monkeypatch.setattr(submitting.subprocess, "run", sbatch)
    journal = Journal(Path("runs/s/sweep"))
    journal.folder.mkdir(parents=True)
    sweep = read_sweep(Path("s.toml"))
    (array,) = arrays_of(sweep, swept, None)
    said: list[str] = []
    assert not submitting.submit_array(sweep, array, journal, {}, said.append)
    assert len(calls) == 1 and not journal.open and refusal.strip() in said[0]


@pytest.mark.parametrize(
    ("error", "count"),
    [
        ("scancel: error: Kill job error on job id 7_1: Invalid job id specified\n", 2),
        ("scancel: error: slurm_kill_job2: Unable to contact slurm controller\n", 0),
    ],
)
def test_a_cancel_that_fails_for_some(
    swept: list[SweepPoint], monkeypatch: pytest.MonkeyPatch, error: str, count: int
) -> None:
    with locked_journal(Path("runs/s/sweep")) as journal:
        name = journal.intend("s", [p.name for p in swept]).name
        journal.append(event="submitted", name=name, job="7")
    jobs = {f"7_{i}": slurm.SlurmJob(f"7_{i}", "PENDING") for i in range(3)}
    monkeypatch.setattr(slurm, "my_jobs", lambda: jobs)
    monkeypatch.setattr(
        SWEEP.subprocess, "run",
        lambda words, **more: subprocess.CompletedProcess(words, 1, "", error),
    )  # fmt: skip
    monkeypatch.setattr(SWEEP, "settle_all", lambda journal, options: None)
    assert SWEEP.main(["s.toml", "cancel"]) == 1
    cancelled = Journal(Path("runs/s/sweep")).cancelled
    assert [*cancelled] == [p.name for p in swept if count and p is not swept[1]]


@pytest.mark.parametrize(
    ("printed", "job"),
    [
        ("80\n", "80"),
        ("80;site42\n", "80"),
        ("site42: your project has 12 hours left\n80\n", "80"),
        ("80\nthank you\n", "80"),
        ("7 jobs\n80\n", "80"),
        ("submitted\n", "9"),
        ("", "9"),
    ],
)
def test_an_sbatch_that_says_more(
    swept: list[SweepPoint], monkeypatch: pytest.MonkeyPatch, printed: str, job: str
) -> None:
    """A site's wrapper: the job is the last line that is one; without one the queue is asked."""
    calls: list[int] = []

    def sbatch(*args: object, **more: object) -> subprocess.CompletedProcess[str]:
        calls.append(1)
        return subprocess.CompletedProcess([], 0, printed, "")

    monkeypatch.setattr(submitting.subprocess, "run", sbatch)
    monkeypatch.setattr(submitting.time, "sleep", lambda s: None)
    monkeypatch.setattr(slurm, "jobs_named", lambda name: ["9"])
    journal = Journal(Path("runs/s/sweep"))
    journal.folder.mkdir(parents=True)
    sweep = read_sweep(Path("s.toml"))
    (array,) = arrays_of(sweep, swept, None)
    assert submitting.submit_array(sweep, array, journal, {}, lambda text: None)
    assert len(calls) == 1 and journal.task(swept[0].name) == f"{job}_0"


@pytest.mark.parametrize("name", ["a,b", "../../x", "50%j", "..", "a\\b", "lr (b)", "x\ny", "ä"])
def test_a_name_that_would_be_more_than_a_name(tmp_path: Path, name: str) -> None:
    """`squeue --name=a,b` asks for two names: an array whose answer was lost was sent twice."""
    (problem,) = problems_of(tmp_path, f"name = {json.dumps(name)}\n[axes]\ntrain.seed = [1, 2]\n")
    assert problem.startswith("name = ") and "is not a valid sweep name" in problem
    named = points_of(tmp_path, 'name = "lr_1e-3+b.2"\n[axes]\ntrain.seed = [1, 2]\n')
    assert named[0].run_dir.parent.name == "lr_1e-3+b.2"


@pytest.mark.parametrize("dir", ["runs/50%x", "a\\b"])
def test_a_dir_that_would_be_a_pattern_of_sbatch(tmp_path: Path, dir: str) -> None:
    """The logs of the array went to another place, which need not exist: no task began."""
    (problem,) = problems_of(tmp_path, f"dir = {json.dumps(dir)}\n[axes]\ntrain.seed = [1, 2]\n")
    assert problem.startswith("dir = ") and "where % and \\ have" in problem


def test_what_slurm_never_answers_about_runs_here(
    swept: list[SweepPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(Path("runs/s/sweep"))
    journal.folder.mkdir(parents=True)
    journal.intend("s", [swept[0].name])
    monkeypatch.setattr(slurm, "jobs_named", lambda name: None)
    SWEEP.settle_journal(journal)
    assert journal.open
    SWEEP.settle_journal(journal, here=True)
    assert not journal.open


@pytest.mark.parametrize("full", [1, 2])
def test_a_full_disk(
    swept: list[SweepPoint], monkeypatch: pytest.MonkeyPatch, capsys: Capture, full: int
) -> None:  # fmt: skip
    """While the line before sbatch is written: nothing is submitted. While the line after it is:
    the next command finds the array by its name."""
    calls: list[str] = []

    def run(command: list[str], **more: object) -> subprocess.CompletedProcess[str]:
        calls.append(command[0])
        return subprocess.CompletedProcess(command, 0, "7\n", "")

    def sync(number: int) -> None:
        calls.append("line")
        if calls.count("line") == full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(submitting.subprocess, "run", run)
    monkeypatch.setattr(submitting.slurm, "max_array_size", lambda: None)
    monkeypatch.setattr(submitting, "check_points", lambda points: None)
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("kempner.extensions.sweep.journal.os.fsync", sync)
    assert SWEEP.main(["s.toml", "submit"]) == 1
    error = capsys.readouterr().err
    assert "sweep: error: runs/s/sweep" in error and "No space left on device; fix that" in error
    monkeypatch.setattr(slurm, "jobs_named", lambda name: ["7"] if full == 2 else [])
    assert SWEEP.main(["s.toml", "submit"]) == 0
    assert calls.count("sbatch") == 1


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with locked_journal(tmp_path), pytest.raises(BlockingIOError), locked_journal(tmp_path):
        pass


def test_tries(swept: list[SweepPoint], capsys: Capture) -> None:
    """A point that failed so often is not submitted again, and sweep.py says so."""
    own = Path("runs/s/sweep")
    with locked_journal(own) as journal:
        for job in ("1", "2", "3"):
            name = journal.intend("s", [swept[0].name]).name
            journal.append(event="submitted", name=name, job=job)
    assert looking.look_at_points(swept, Journal(own))[0].failed
    assert SWEEP.main(["s.toml", "resubmit"]) == 1
    out = capsys.readouterr()
    assert "killed after 3 tries (tries = 3)" in out.err and "nothing to resubmit" in out.out


def test_early_stop(tmp_path: Path) -> None:
    """A run that is worse than the median of enough others at the same step, and no other."""

    def write(name: str, **losses: float | None) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        lines = [{"step": int(step[1:]), "val_loss": loss} for step, loss in losses.items()]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
        return tmp_path / name

    write("a", s10=3.0, s20=2.0)
    write("b", s10=3.1, s20=2.1)
    last = write("c", s10=2.9)
    assert stop_reason(write("d", s10=3.05), 10, 3).startswith(
        "validation loss 3.0500 at step 10 is over"
    )
    assert not stop_reason(write("d", s10=3.0), 10, 3)  # the median itself
    assert not stop_reason(write("d", s10=9.0), 11, 3)  # too early
    assert not stop_reason(write("d", s10=9.0), 10, 4)  # too few others
    assert not stop_reason(write("d", s10=9.0, s20=2.05), 10, 2)  # the newest one counts
    assert "at step 10 is over" in stop_reason(
        write("d", s10=9.0, s20=9.0, s30=9.0), 10, 3
    )  # ahead
    bad = write("d", s10=None)
    with (last / "metrics.jsonl").open("a") as file:
        file.write('{"val_loss": 1.0}\n')  # damaged
    env = {**os.environ, "KEMPNER_EARLY_STOP": "10:3"}
    command = [sys.executable, "-m", "kempner.extensions.sweep.early_stop", str(bad)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert "early stop of d: validation loss inf" in done.stdout and (bad / "STOP").exists()
    assert not (last / "STOP").exists()


def test_the_profile_of_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as the batch script reads it; the environment wins, and two names are a problem."""
    monkeypatch.delenv("KEMPNER_SITE", raising=False)
    monkeypatch.setenv("SBATCH_QOS", "mine")
    env = profile_environment("example")
    found = [env[f"SBATCH_{name}"] for name in ("PARTITION", "QOS")]
    assert (env["KEMPNER_SITE"], found) == ("example", ["gpu", "mine"])
    monkeypatch.setenv("SBATCH_COMMENT", "\udcff")  # a byte that is no UTF-8
    assert profile_environment("example")["SBATCH_COMMENT"] == "\udcff"
    with pytest.raises(ConfigError, match=r"there is no site\.d/exampel\.env"):
        profile_environment("exampel")
    monkeypatch.setenv("KEMPNER_SITE", "other")
    with pytest.raises(ConfigError, match="unset one of them"):
        profile_environment("example")


# --- the program ------------------------------------------------------------------------------


def run(folder: Path, *argv: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts/sweep.py", *argv]
    return subprocess.run(
        [str(word) for word in command], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S
    )


def test_plan_checks_files_and_worlds(tmp_path: Path) -> None:
    """Every problem of every point once, and nothing is written."""
    text = BASE + "[axes]\ntrain.global_batch = [8, 12]\n[resources]\ngpus_per_node = 8\n"
    (tmp_path / "s.toml").write_text(text)
    done = run(tmp_path, "s.toml", "plan")
    assert done.returncode == 2 and done.stderr.startswith(
        "sweep: error: 2 problems with the input"
    )
    assert "12 sequences do not divide by 8 ranks" in done.stderr
    assert done.stderr.count("data/stdlib") >= 1
    assert [file.name for file in tmp_path.iterdir()] == ["s.toml"]


TRAINER = """
import json, pathlib, sys
from kempner.config import toml
cfg = toml.loads(pathlib.Path(sys.argv[1]).read_text())
run = pathlib.Path(cfg["run"]["dir"])
if "--check" in sys.argv:
    print(f'[run]\\ndir = "{run}"')
else:
    fails = cfg["train"]["seed"] == 2 and not pathlib.Path("mended").exists()
    state = "failed" if fails else "done"
    (run / "status.json").write_text(json.dumps({"state": state, "step": 1}))
    sys.exit(fails)
"""


def test_here(tmp_path: Path, data_dir: Path) -> None:
    """Without Slurm: one after another; one that fails does not stop the rest."""
    (tmp_path / "train.py").write_text(TRAINER)
    text = f'{BASE}[set]\ndata.dataset_path = "{data_dir}"\n[axes]\ntrain.seed = [1, 2, 3]\n'
    (tmp_path / "s.toml").write_text(text)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "KEMPNER"))}
    env |= {"KEMPNER_TRAIN": str(tmp_path / "train.py"), "KEMPNER_PYTHON": sys.executable}
    env |= {"KEMPNER_SITE": os.devnull}

    def said(code: int, *argv: str) -> str:
        command = [sys.executable, str(ROOT / "scripts/sweep.py"), "s.toml", *argv]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert re.findall(r"error: (\w+)-", said(1, "submit", "--here")) == ["seed2"]
    assert "3 points: 2 done, 1 failed" in said(1, "status")
    assert "nothing to submit" in said(0, "submit", "--here")
    (tmp_path / "mended").touch()
    assert "1 of 1: seed2-" in said(0, "resubmit", "--here")
    assert "3 points: 3 done" in said(0, "status")


def test_ctrl_c_here(swept: list[SweepPoint], monkeypatch: pytest.MonkeyPatch) -> None:
    """The run saves and stops by itself; no other point starts."""
    Path("script").write_text("echo $1 >>ran; kill -INT $PPID; sleep 0.5; echo saved >>ran")
    monkeypatch.setattr("kempner.extensions.sweep.resources.Resources.script", Path("script"))
    assert run_here(Path("runs/s/sweep"), swept, {}) == 130
    assert Path("ran").read_text().count("\n") == 2 and Path("ran").read_text().endswith("saved\n")


def test_the_commands_of_the_page() -> None:
    """Its commands are known to the program, and its files are there."""
    page = (ROOT / "docs/extensions/sweeps.md").read_text()
    lines = re.findall(r"scripts/sweep\.py (\S+\.toml) (.+)", page)
    assert len(lines) == 3
    for file, words in lines:
        assert SWEEP.parse([file, *words.split()]).command in SWEEP.COMMANDS
        assert read_sweep(ROOT / file).dir == Path("runs/learning-rate")
    for key in SWEEP_KEYS:
        assert f"`{key}`" in page or f"`[{key}]`" in page, key


def test_the_program_does_without_torch() -> None:
    command = [sys.executable, "-X", "importtime", "scripts/sweep.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "kempner.extensions.sweep.points" in done.stderr
    assert not [text for text in done.stderr.splitlines() if text.endswith("| torch")]


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["s.toml", "plann"], "plann: unknown command; did you mean plan?"),
        (["s.toml", "plan", "--here"], "--here: has no effect with plan"),
        (["s.toml", "plan", "--gpu=H1000"], "--gpu=H1000: is not known"),
        (["nowhere.toml", "plan"], "nowhere.toml: No such file or directory"),
        (["s.toml", "table", "--x=sed"], "--x=sed: is not an axis"),
    ],
)
def test_bad_command_lines(
    swept: list[SweepPoint], capsys: Capture, argv: list[str], problem: str
) -> None:
    assert SWEEP.main(argv) == 2 and problem in capsys.readouterr().err


def test_table(swept: list[SweepPoint], capsys: Capture) -> None:
    """Sorted by loss, with what is not there yet at the end; also at one step."""
    for point, loss in zip(swept[:2], (3.0, 2.0), strict=True):
        point.run_dir.mkdir(parents=True)
        lines = [{"step": s, "time": s, "loss": loss, "val_loss": loss + s / 10} for s in (1, 2)]
        path = point.run_dir / "metrics.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    mark_directory(Path("runs/s/sweep"), Kind.SWEEP)
    assert SWEEP.main(["s.toml", "table", "--step=1"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:3] for row in rows[1:4]] == [
        ["2", "2.1000", "1"], ["1", "3.1000", "1"], ["3", "-", "-"],
    ]  # fmt: skip
    csv = Path("runs/s/sweep/table.csv").read_text().splitlines()
    assert csv[0] == "train.seed,val_loss,step,state,tokens_per_s,parameters,run"
    assert csv[1].startswith("2,2.1,1,") and csv[3].startswith("3,,,planned,")
    assert Path("runs/s/sweep/table.png").stat().st_size > 1000
