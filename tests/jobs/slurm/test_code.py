"""The code of the submission: a run has the repository as it was, whatever becomes of it. See
docs/guide/startup.md."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kempner.jobs.code import ORIGIN
from tests.cluster import FAKE_TRAINER, Cluster
from tests.conftest import ROOT, status

PARTS = ("scripts", "src", "configs", "constraints.txt", "pyproject.toml", ".gitignore")
BROKEN = (
    "scripts/train.py",
    "src/kempner/train/sections.py",
    "scripts/slurm/lib/launch.sh",
    "configs/a.toml",
)
COPY = {"KEMPNER_CODE": "1"}
WORDS = ["--train.max_steps=100000", "--checkpoint.interval=20"]
REQUEST = ["--nodes=1", "--gpus-per-node=1"]
MISSION_CONTROL = '{"APS": {"auto_resume_mode": "requeue", "max_retries": 2}}'


def git(cluster: Cluster, repository: Path, *words: str) -> str:
    given = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    done = cluster.run("git", *given, *words, cwd=repository)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def checkout(cluster: Cluster, tmp_path: Path) -> Path:
    """A repository of its own, with a configuration that is not committed yet, and a secret."""
    path = tmp_path / "my checkout"
    path.mkdir()
    for name in PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, path / name)
    git(cluster, path, "init", "-q")
    git(cluster, path, "add", "-A")
    git(cluster, path, "commit", "-q", "-m", "first")
    (path / "configs/a.toml").write_text('base = "../../outside.toml"\n[metrics]\nlog_interval=1\n')
    (tmp_path / "outside.toml").write_text('base = "my checkout/configs/train/debug.toml"\n')
    (path / ".env").write_text("TOKEN=hf_secret")
    (path / "notes.bin").write_bytes(bytes(20_000_001))
    return path


def breaks(checkout: Path) -> None:
    """As an editor leaves it in the middle of a word."""
    for name in BROKEN:
        (checkout / name).write_text("if [[ (\n")
    (checkout.parent / "outside.toml").write_text("=")


def words(cluster: Cluster, tmp_path: Path, *more: str) -> list[object]:
    return ["configs/a.toml", *cluster.debug_run(tmp_path / "run", *WORDS, *more)[1:]]


def copies(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "code").iterdir() if path.is_dir())


def starts(run: Path) -> list[dict[str, object]]:
    records = map(json.loads, (run / "attempts.jsonl").read_text().splitlines())
    return [record for record in records if record["event"] == "start"]


def resume(cluster: Cluster, job: str, log: Path, meanwhile: Callable[[], object]) -> None:
    """Interrupt a job that trains, and wait until its next start trains."""
    cluster.wait_for("step", log)
    meanwhile()
    cluster.ask("scancel", "--batch", "--signal=TERM", job)
    text = cluster.wait_for("requeue: interrupted and saved", log)
    while cluster.state(job) != "PENDING":
        time.sleep(0.1)
    time.sleep(2.1)  # as in Cluster.wait
    cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    count = text.count("continues after step")
    while cluster.wait_for("continues after step", log).count("continues after step") == count:
        assert cluster.state(job) in ("PENDING", "RUNNING", "COMPLETING"), log.read_text()
        time.sleep(0.1)


def submit(cluster: Cluster, checkout: Path, *command: object) -> str:
    done = cluster.run(*command, cwd=checkout, env=COPY)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


@pytest.mark.soak
def test_a_checkout_that_is_broken_after_sbatch(
    cluster: Cluster, tmp_path: Path, checkout: Path
) -> None:
    """Plain sbatch: from the start of the job on nothing of the checkout is read. The resumed run,
    which is told to have the code as it is now, names the difference."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    shutil.copytree(checkout, whole)
    script = checkout / "scripts/slurm/multinode.sh"
    options = [*REQUEST, f"--comment={MISSION_CONTROL}"]  # which reads it as JSON
    job = cluster.sbatch(script, *words(cluster, tmp_path), options=options, cwd=checkout, env=COPY)
    log = checkout / f"kempner-{job}.out"
    resume(cluster, job, log, lambda: breaks(checkout))
    (first,) = copies(run)
    text = log.read_text()
    assert "changed since the last attempt" not in text and "changed since sbatch" not in text
    assert "not in the copy of the code, larger than 20 MB or not a file: notes.bin\n" in text
    (comment,) = re.findall(r"Comment=(.*)", cluster.ask("scontrol", "show", "job", job))
    added = {"kempner": f"kempner-code={run}/code/{first}"}
    assert json.loads(comment) == json.loads(MISSION_CONTROL) | added

    copy, about = run / "code" / first, json.loads((run / f"code/{first}.json").read_text())
    assert (copy / ORIGIN).read_text().strip() == about["origin"] == str(checkout)
    assert about["commit"] == git(cluster, whole, "rev-parse", "HEAD")
    assert (
        not list(copy.rglob(".env"))
        and "hf_secret" not in (run / f"code/{first}.patch").read_text()
    )
    assert (copy / f".inputs{tmp_path}/outside.toml").is_file()

    for name in BROKEN:
        shutil.copy(whole / name, checkout / name)
    (tmp_path / "outside.toml").write_text('base = "my checkout/configs/train/debug.toml"\n')
    train = checkout / "scripts/train.py"
    train.write_text(train.read_text() + "# another one\n")

    def refresh() -> None:
        (run / "STOP").unlink(missing_ok=True)
        submit(cluster, checkout, "bash", checkout / "scripts/slurm/submit.sh", "--refresh", job)

    resume(cluster, job, log, refresh)
    second = next(name for name in copies(run) if name != first)
    changed = f"code {first} -> {second}, 1 file differs: scripts/train.py"
    cluster.wait_for(f"changed since the last attempt: {changed}", log)
    (run / "STOP").touch()
    assert cluster.wait(job) == 0, log.read_text()
    assert status(run)["state"] == "stopped"
    assert [start["code"] for start in starts(run)] == [first, first, second]
    assert starts(run)[2]["changed"] == [changed]
    manifest = json.loads((run / "checkpoints/latest/manifest.json").read_text())
    assert manifest["code"]["hash"] == second and manifest["code"]["commit"] == about["commit"]
    assert any(text.startswith("torch ") for text in manifest["code"]["versions"])
    told = cluster.ask(cluster.env["KEMPNER_PYTHON"], "scripts/report.py", run)
    assert f"attempt 2, changed: {changed}" in told
    assert "start-up of " in told and "queue   code   check   " in told
    parts = starts(run)[2]["parts"]
    assert {"queue", "check", "batch script", "srun", "imports", "model", "checkpoint"} < {*parts}


def test_submit_copies_before_the_job_waits(
    cluster: Cluster, tmp_path: Path, checkout: Path
) -> None:
    """The checkout is broken while the job waits; the same submission again has the same copy."""
    command = ["bash", "scripts/slurm/submit.sh", "--hold", *REQUEST, "scripts/slurm/singlenode.sh"]
    arguments = [*words(cluster, tmp_path, "--train.max_steps=3")]
    job = submit(cluster, checkout, *command, *arguments)
    again = submit(cluster, checkout, *command, *arguments)
    cluster.ask("scancel", again)
    (name,) = copies(tmp_path / "run")
    before = (tmp_path / "run/code" / name / "scripts/train.py").read_text()
    breaks(checkout)
    shutil.rmtree(checkout / "scripts")
    cluster.ask("scontrol", "release", job)
    log = checkout / f"kempner-{job}.out"
    assert cluster.wait(job) == 0, log.read_text()
    assert status(tmp_path / "run")["state"] == "done"
    assert before == (ROOT / "scripts/train.py").read_text()


@pytest.mark.soak
def test_what_was_edited_while_the_job_waited_is_named(
    cluster: Cluster, tmp_path: Path, checkout: Path
) -> None:
    """sbatch alone cannot keep it. Without git the directory itself says what is code."""
    shutil.rmtree(checkout / ".git")
    (checkout / "data").mkdir()
    (checkout / "data/large").write_text("x")
    script = checkout / "scripts/slurm/singlenode.sh"
    arguments = words(cluster, tmp_path, "--train.max_steps=3")
    options = [*REQUEST, "--begin=now+2"]
    job = cluster.sbatch(script, *arguments, options=options, cwd=checkout, env=COPY)
    subprocess.run(["sleep", "1.1"], check=True)
    (checkout / "src/kempner/model/loss.py").touch()
    log = checkout / f"kempner-{job}.out"
    assert cluster.wait(job) == 0, log.read_text()
    assert "note: 1 file(s) changed since sbatch (src/kempner/model/loss.py): " in log.read_text()
    (name,) = copies(tmp_path / "run")
    copy = tmp_path / "run/code" / name
    assert not (copy / "data").exists() and not list(copy.rglob(".env"))


def test_too_much_is_not_copied(cluster: Cluster, tmp_path: Path, checkout: Path) -> None:
    """Over 200 MB in all: submit.sh refuses, and a job of plain sbatch runs the checkout itself."""
    for k in range(11):
        with open(checkout / f"data-{k}.bin", "wb") as file:
            file.truncate(19_000_000)  # of holes
    words = [f"--run.dir={tmp_path / 'run'}", "--plan=done"]
    env = {**COPY, "KEMPNER_TRAIN": str(FAKE_TRAINER)}
    script = checkout / "scripts/slurm/singlenode.sh"
    why = f"the files of {checkout} take 2"
    done = cluster.run("bash", script.with_name("submit.sh"), script, *words, cwd=checkout, env=env)
    assert done.returncode == 2 and why in done.stderr, done.stderr
    assert f"the code could not be copied to {tmp_path}/run/code" in done.stderr
    job = cluster.sbatch(script, *words, options=REQUEST, cwd=checkout, env=env)
    log = checkout / f"kempner-{job}.out"
    assert cluster.wait(job) == 0, log.read_text()
    assert why in log.read_text()
    assert f"the run uses {checkout} as it is, even after a requeue" in log.read_text()
    assert list((tmp_path / "run/code").iterdir()) == []


def test_dry_run_and_bad_words(cluster: Cluster, tmp_path: Path, checkout: Path) -> None:
    script = ["bash", "scripts/slurm/multinode.sh", *words(cluster, tmp_path), "--dry-run"]
    done = cluster.run(*script, cwd=checkout, env=COPY)
    assert f"the code would be a copy of {checkout}, RUN/code/HASH" in done.stdout, done.stderr
    done = cluster.run(*script, cwd=checkout, env={"KEMPNER_CODE": "0"})
    assert f"the code is {checkout} itself" in done.stdout
    done = cluster.run(*script, cwd=checkout, env={"KEMPNER_CODE": "yes"})
    assert done.returncode == 2 and "KEMPNER_CODE=yes: 1, or unset, copies" in done.stderr
    assert not (tmp_path / "run").exists()
    for bad, why in (
        (["scripts/slurm/eval.sh", "x"], "eval.sh runs the repository itself"),
        (["nothing.sh", "x"], "no launch script"),
        (["scripts/slurm/multinode.sh", "nowhere.toml"], "nowhere.toml: no such file"),
        (["--refresh", "999999"], "no job '999999'"),
    ):
        done = cluster.run("bash", "scripts/slurm/submit.sh", *bad, cwd=checkout, env=COPY)
        assert done.returncode == 2 and why in done.stderr, done.stderr


# --- the code of any program ---------------------------------------------------------------------

PROGRAM = """
import signal, sys, time
from pathlib import Path
import helper

asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
config = Path(sys.argv[1].removeprefix("--config=")).read_text().strip()
print(f"began with helper {helper.VERSION}, {config}, {Path('data.txt').read_text()}", flush=True)
for step in range(1, 10**6):
    print(f"step {step}", flush=True)
    time.sleep(0.1)
    if asked or helper.VERSION == "last":
        break
"""


@pytest.fixture
def project(cluster: Cluster, tmp_path: Path) -> Path:
    """The repository of a program, installed as editable: its package is found by PYTHONPATH, as by
    a .pth file. Git ignores its data, but not its runs."""
    path = tmp_path / "a project"
    (path / "src").mkdir(parents=True)
    (path / "src/helper.py").write_text("VERSION = 'one'\n")
    (path / "train.py").write_text(PROGRAM)
    (path / "conf.txt").write_text("conf one")
    (path / "data.txt").write_text("data")
    (path / ".gitignore").write_text("data.txt\n")
    git(cluster, path, "init", "-q")
    git(cluster, path, "add", "-A")
    git(cluster, path, "commit", "-q", "-m", "first")
    return path


def test_any_program_runs_as_it_was_submitted(
    cluster: Cluster, tmp_path: Path, project: Path
) -> None:
    """submit.sh and run.sh --code: the job waits, is edited, starts, comes back with the same code,
    and comes back once more with that of --refresh. Data and results are where they were."""
    env = {**COPY, "PYTHONPATH": str(project / "src")}
    words = ["--code=.", "--run-dir=here/train", r"--steps=step (\d+)", "--"]
    words += [cluster.env["KEMPNER_PYTHON"], "train.py"]
    command = ["bash", ROOT / "scripts/slurm/submit.sh", "--hold", "--comment", "mine", *REQUEST]
    done = cluster.run(
        *command, ROOT / "scripts/slurm/run.sh", *words, "--config=conf.txt", cwd=project, env=env
    )
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[-1]
    run, log = project / "here/train", project / f"kempner-{job}.out"
    (first,) = copies(run)
    assert f"Comment=mine kempner-code={run}/code/{first}" in cluster.ask(
        "scontrol", "show", "job", job
    )

    def edit(version: str) -> None:
        (project / "src/helper.py").write_text(f"VERSION = '{version}'\n")

    edit("broken'")
    (project / "conf.txt").unlink()
    (project / "train.py").rename(project / "other.py")
    cluster.ask("scontrol", "release", job)
    cluster.wait_for("[0] began with helper one, conf one, data\n", log)

    def come_back(count: int, meanwhile: Callable[[], object]) -> None:
        cluster.wait_for("step 3", log)
        meanwhile()
        cluster.ask("scancel", "--batch", "--signal=TERM", job)
        while cluster.state(job) != "PENDING":
            time.sleep(0.1)
        time.sleep(2.1)  # as in Cluster.wait
        cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
        while log.read_text().count("began with") != count:
            assert cluster.state(job) in ("PENDING", "RUNNING", "CONFIGURING"), log.read_text()
            time.sleep(0.1)

    come_back(2, lambda: None)
    (project / "other.py").rename(project / "train.py")
    (project / "conf.txt").write_text("conf two")
    assert log.read_text().count("began with helper one, conf one, data\n") == 2
    assert "changed since the last attempt" not in log.read_text()
    edit("last")
    refresh = ["bash", ROOT / "scripts/slurm/submit.sh", "--refresh", job]
    come_back(3, lambda: cluster.ask(*refresh))
    assert cluster.wait(job) == 0, log.read_text()
    text = log.read_text()
    second = next(name for name in copies(run) if name != first)
    changed = f"code {first} -> {second}, 2 files differ: conf.txt, src/helper.py"
    assert "began with helper last, conf two, data\n" in text
    assert text.count(f"changed since the last attempt: {changed}\n") == 1
    assert [start["code"] for start in starts(run)] == [first, first, second]
    assert starts(run)[0]["commit"] == git(cluster, project, "rev-parse", "HEAD")
    assert f"attempt 2, changed: {changed}" in cluster.ask(
        cluster.env["KEMPNER_PYTHON"], ROOT / "scripts/report.py", run
    )


def test_the_code_of_a_program_is_checked(cluster: Cluster, project: Path, tmp_path: Path) -> None:
    """Before a node is held; the dry run says where the code would be. Plain sbatch copies when the
    job starts; KEMPNER_CODE=0 does not."""
    python = cluster.env["KEMPNER_PYTHON"]
    run = ["bash", ROOT / "scripts/slurm/run.sh", "--dry-run"]
    for words, why in (
        (["--code=nowhere", "--", python, "train.py"], "--code=nowhere: no such directory"),
        (["--code=src", "--", python, "train.py"], "no word of the command names a file in it"),
        (["--code=.", "--", python, "-m", "train"], "of '-m train' from the working directory"),
    ):
        done = cluster.run(*run, *words, cwd=project, env=COPY)
        assert done.returncode == 2 and why in done.stderr, done.stderr
    command = ["--code=.", "--", python, "train.py", "conf.txt"]
    done = cluster.run(*run, *command, cwd=project, env=COPY)
    assert f"the program's code would be a copy of {project}, RUN/code/HASH" in done.stdout
    submit = ["bash", ROOT / "scripts/slurm/submit.sh", ROOT / "scripts/slurm/run.sh"]
    done = cluster.run(*submit, "--", python, "train.py", cwd=project, env=COPY)
    assert done.returncode == 2 and "give --code=DIR" in done.stderr
    assert not (project / "runs").exists()

    (project / "src/helper.py").write_text("VERSION = 'last'\n")
    for code, where in (("1", str(project / "runs/train/code")), ("0", f"{python} train.py")):
        env = {"KEMPNER_CODE": code, "PYTHONPATH": str(project / "src")}
        job = cluster.sbatch("run.sh", *command, options=REQUEST, cwd=project, env=env)
        assert cluster.wait(job) == 0
        text = (project / f"kempner-{job}.out").read_text()
        assert "began with helper last, conf one, data\n" in text
        begins = next(line for line in text.splitlines() if "attempt " in line)
        assert where in begins, begins


@pytest.mark.soak
def test_a_changed_copy_of_a_launch_script_runs_as_it_is_written(
    cluster: Cluster, tmp_path: Path, checkout: Path
) -> None:
    """README: "copy it and change it". At the first start, and after a requeue."""
    text = (checkout / "scripts/slurm/multinode.sh").read_text()
    mine = checkout / "scripts/slurm/mine.sh"
    mine.write_text(text.replace("\nkp_run ", '\nkp_log "a line of my own"\nkp_run ', 1))
    job = cluster.sbatch(mine, *words(cluster, tmp_path), options=REQUEST, cwd=checkout, env=COPY)
    log = checkout / f"kempner-{job}.out"
    resume(cluster, job, log, lambda: None)
    assert log.read_text().count("a line of my own") == 2
    assert len(copies(tmp_path / "run")) == 1  # it is of the copy
    cluster.ask("scancel", job)


@pytest.mark.soak
@pytest.mark.parametrize("name", [pytest.param("mine.sh", marks=pytest.mark.soak), "multinode.sh"])
def test_a_changed_copy_outside_of_the_repository_runs_as_it_is_written(
    cluster: Cluster, tmp_path: Path, checkout: Path, name: str
) -> None:
    """Also under the name of the original. One line of it names the repository; the copy of the
    code has it, so that later starts, even with newer code, need neither it nor the repository."""
    text = (checkout / "scripts/slurm/multinode.sh").read_text()
    text = text.replace("\nkp_run ", '\nkp_log "a line of my own"\nkp_run ', 1)
    mine = tmp_path / "my jobs" / name
    mine.parent.mkdir()
    mine.write_text(text)
    arguments = words(cluster, tmp_path)
    job = cluster.sbatch(mine, *arguments, options=REQUEST, cwd=tmp_path, env=COPY)
    assert cluster.wait(job) == 2
    told = (tmp_path / f"kempner-{job}.out").read_text()
    assert "no kit beside this script" in told and "KEMPNER_ROOT" in told, told

    line = f'\nKEMPNER_ROOT="{checkout}"\n'
    mine.write_text(text.replace("\nset -euo pipefail\n", f"\nset -euo pipefail{line}", 1))
    arguments[0] = checkout / "configs/a.toml"
    done = cluster.run("bash", mine, *arguments, "--dry-run", cwd=tmp_path, env=COPY)
    assert done.returncode == 0 and f"a copy of {checkout}, RUN/code" in done.stdout, done.stderr
    job = cluster.sbatch(mine, *arguments, options=REQUEST, cwd=tmp_path, env=COPY)
    log = tmp_path / f"kempner-{job}.out"
    cluster.wait_for("step", log)
    mine.unlink()
    resume(cluster, job, log, lambda: breaks(checkout))
    assert log.read_text().count("a line of my own") == 2
    assert len(copies(tmp_path / "run")) == 1

    for name in BROKEN[:-1]:
        shutil.copy(ROOT / name, checkout / name)
    for file in (checkout / "configs/a.toml", tmp_path / "outside.toml"):
        file.write_text(f'base = "{checkout}/configs/train/debug.toml"\n')
    submit_sh = checkout / "scripts/slurm/submit.sh"
    resume(
        cluster, job, log, lambda: submit(cluster, checkout, "bash", submit_sh, "--refresh", job)
    )
    assert log.read_text().count("a line of my own") == 3
    assert len(copies(tmp_path / "run")) == 2
    cluster.ask("scancel", job)
