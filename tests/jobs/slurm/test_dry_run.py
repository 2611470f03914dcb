"""--dry-run: what sbatch would be told, the variables, the command; nothing starts."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.cluster import FAKE_TRAINER, SCRIPTS, Cluster, program

HOSTILE = ["--data.dataset_path=two 'words' $HOME `id` *"]


def dry(
    cluster: Cluster, cwd: Path, script: str, *words: object, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return cluster.run("bash", SCRIPTS / script, *words, cwd=cwd, env=env)


def command(text: str) -> list[str]:
    """The srun command that it has printed, as a shell would read it."""
    return shlex.split(text.split("the command:\n", 1)[1].split("\n\n", 1)[0])


def test_it_says_what_a_job_then_does(cluster: Cluster, tmp_path: Path) -> None:
    """The command is, word for word, the one that a real job of this request runs."""
    arguments = cluster.debug_run(tmp_path / "a run", "--train.max_steps=2")
    request = ["--nodes=2", "--gpus-per-node=2"]
    done = dry(cluster, tmp_path, "multinode.sh", *arguments, "--dry-run", *request)
    assert done.returncode == 0, done.stderr
    told = done.stdout
    assert re.search(r"--nodes=2 +the command line", told)
    assert re.search(r"--signal=B:SIGTERM@120 +the header", told)
    assert "2 node(s) x 2 task(s) = world size 4, 2 GPU(s) a node" in told
    assert re.search(r"\n  SRUN_CPUS_PER_TASK=2\n", told)
    assert "sbatch --test-only says:\n  sbatch: Job " in told
    assert not (tmp_path / "a run").exists()
    assert list(tmp_path.iterdir()) == []
    job = cluster.sbatch("multinode.sh", *arguments, "--dry-run", options=request, cwd=tmp_path)
    assert cluster.wait(job) == 0
    log = (tmp_path / f"kempner-{job}.out").read_text()
    assert f"inside job {job}" in log and cluster.steps(job) == 0
    plain = [re.sub(r"kempner-[\w.]+", "kempner-X", word) for word in command(told)]
    real = [re.sub(r"kempner-[\w.]+", "kempner-X", word) for word in command(log)]
    assert plain == real
    assert plain[-len(arguments) :] == [str(a) for a in arguments]


def test_spare_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """They wait; the job must survive the loss of a node."""
    arguments = [*cluster.debug_run(tmp_path / "run"), "--dry-run", "--nodes=2"]
    env = {"KEMPNER_SPARES": "1"}
    done = dry(cluster, tmp_path, "multinode.sh", *arguments, env=env)
    assert done.returncode == 2 and "export SBATCH_NO_KILL=set before sbatch" in done.stderr
    env["SBATCH_NO_KILL"] = "set"
    done = dry(cluster, tmp_path, "multinode.sh", *arguments, env=env)
    assert done.returncode == 0, done.stderr
    assert "1 node(s) x 4 task(s) = world size 4" in done.stdout
    assert "up to 10 restart(s) in place, then a requeue; spare nodes: 1" in done.stdout
    assert "--nodes=1" in command(done.stdout)


def test_a_chain(cluster: Cluster, tmp_path: Path) -> None:
    words = [f"--run.dir={tmp_path}/run", "--dry-run"]
    env = {"KEMPNER_TRAIN": str(FAKE_TRAINER), "KEMPNER_CHAIN": "20"}
    done = dry(cluster, tmp_path, "singlenode.sh", *words, env=env)
    assert done.returncode == 0, done.stderr
    assert "chain: up to 20 job(s) continue this one" in done.stdout
    assert "restart(s) in place, then the next job of the chain; spare nodes: 0" in done.stdout
    env["KEMPNER_CHAIN"] = "0"
    assert "chain: " not in dry(cluster, tmp_path, "singlenode.sh", *words, env=env).stdout
    for most in ("-1", "1000", "many"):
        env["KEMPNER_CHAIN"] = most
        done = dry(cluster, tmp_path, "singlenode.sh", *words, env=env)
        assert done.returncode == 2 and f"KEMPNER_CHAIN={most}: must be" in done.stderr


def test_gpus_of_sockets(cluster: Cluster, tmp_path: Path) -> None:
    words = [f"--run.dir={tmp_path}/run", "--dry-run", "--sockets-per-node=2", "--nodes=1"]
    env = {"KEMPNER_TRAIN": str(FAKE_TRAINER)}
    for count, code in (("2", 0), ("two", 2)):
        more = f"--gpus-per-socket={count}"
        done = dry(cluster, tmp_path, "multinode.sh", *words, more, env=env)
        assert done.returncode == code, done.stderr
    assert "--gpus-per-socket=two: must be a whole number" in done.stderr


def test_the_variables_that_are_set(cluster: Cluster, tmp_path: Path) -> None:
    """They are listed, without secrets; one that nothing reads is said to be so, once."""
    env = {"KEMPNER_CHIAN": "3", "KEMPNER_RESTARTS": "2", "KEMPNER_WEBHOOK": "http://host/secret"}
    arguments = [*cluster.debug_run(tmp_path / "run"), "--dry-run", "--nodes=2"]
    done = dry(cluster, tmp_path, "multinode.sh", *arguments, env=env | {"KEMPNER_MINE": "1"})
    assert done.returncode == 0, done.stderr
    title = "variables of the kit that you have set (docs/reference/slurm.md):\n"
    told = done.stdout.split(title)[1]
    set_here = told.split("\n\n")[0].split("\n")
    assert "  KEMPNER_RESTARTS=2" in set_here and "  KEMPNER_WEBHOOK=***" in set_here
    assert not [line for line in set_here if "SIGNAL_LEAD" in line or "CHIAN" in line]
    warnings = [
        line.split("warning: ")[1] for line in done.stdout.split("\n") if "warning: " in line
    ]
    assert warnings == [
        "nothing reads KEMPNER_CHIAN (did you mean KEMPNER_CHAIN?): docs/reference/slurm.md has "
        "the list",
        "nothing reads KEMPNER_MINE: docs/reference/slurm.md has the list",
    ]


def test_whole_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """Without a word about GPUs, those of the partition's nodes count."""
    arguments = cluster.debug_run(tmp_path / "run")
    env = {"SBATCH_PARTITION": "urgent", "SBATCH_TIMELIMIT": "60"}
    done = dry(cluster, tmp_path, "singlenode.sh", *arguments, "--dry-run", env=env)
    assert done.returncode == 0, done.stderr
    assert "1 node(s) x 4 task(s) = world size 4, 4 GPU(s) a node, 1 CPU(s) a task" in done.stdout
    assert re.search(r"--partition=urgent +SBATCH_PARTITION", done.stdout)
    assert re.search(r"--time=60 +SBATCH_TIMELIMIT", done.stdout)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--nodes=4"], "sbatch would refuse this request"),  # there are two
        (["--ntasks-per-node=3", "--gpus-per-node=2"], "give --ntasks-per-node=2"),
        (["--partition=nosuch"], "no such partition; choose from gpu urgent"),
        (["--nodes=x"], "--nodes=x: must be a number of nodes"),
        (["--gpus-per-node=-1"], "--gpus-per-node=-1: must be a whole number"),
        (["nowhere.toml"], "nowhere.toml: no such file"),
        (["--train.max_step=2"], "train.max_step"),
        (["--nodes"], "write --nodes=VALUE as one word"),
        (["--distributed.dp_shard=3", "--gpus-per-node=2"], "does not make the world of 4 ranks"),
    ],
)
def test_what_would_fail(cluster: Cluster, tmp_path: Path, words: list[str], problem: str) -> None:
    arguments = cluster.debug_run(tmp_path / "run")
    done = dry(cluster, tmp_path, "multinode.sh", *arguments, "--dry-run", *words)
    assert done.returncode == 2
    assert problem in done.stderr + done.stdout
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr


def test_without_a_controller(cluster: Cluster, tmp_path: Path) -> None:
    """All that can be said is said."""
    tools = tmp_path / "bin"
    for name in ("sinfo", "scontrol", "sbatch"):
        program(tools, name, "#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    env = {"PATH": f"{tools}:{os.environ['PATH']}"}
    arguments = cluster.debug_run(tmp_path / "run")
    request = ["--nodes=2", "--gpus-per-node=4"]
    done = dry(cluster, tmp_path, "multinode.sh", *arguments, "--dry-run", *request, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no Slurm controller answers here" in done.stdout
    assert "2 node(s) x 4 task(s) = world size 8, 4 GPU(s) a node" in done.stdout
    assert "--gpus-per-node=4" in command(done.stdout)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in done.stdout  # the trainer sets it for itself
    assert "not asked" in done.stdout.split("the command:")[1]


def test_interactive(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.ask(
        "sbatch", "--parsable", "--nodes=2", "--gpus-per-node=1", "--output=/dev/null",
        "--wrap=sleep 60",
    )  # fmt: skip
    try:
        while cluster.state(job) != "RUNNING":
            pass
        arguments = cluster.debug_run(tmp_path / "run")
        done = dry(cluster, tmp_path, "interactive.sh", job, *arguments, "--dry-run")
        assert done.returncode == 0, done.stderr
        assert f"inside job {job}" in done.stdout
        assert {f"--jobid={job}", "--overlap", "--ntasks=2"} <= set(command(done.stdout))
        assert cluster.steps(job) == 0
    finally:
        cluster.ask("scancel", job)


def test_hostile_words(cluster: Cluster, tmp_path: Path) -> None:
    """What the check refuses is named as it was given."""
    arguments = cluster.debug_run(tmp_path / "run")
    done = dry(cluster, tmp_path, "multinode.sh", *arguments, *HOSTILE, "--dry-run")
    assert done.returncode == 2
    assert "$HOME `id` *" in done.stderr
