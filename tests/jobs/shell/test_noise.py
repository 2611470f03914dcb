"""Wrappers, images and prologs that print: what they say is never taken for an answer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import clean_env
from tests.jobs.shell.test_lib import ROOT, bash

SCRIPTS = ROOT / "scripts/slurm"
NOISY = """#!/bin/bash
echo '*** Welcome to site42: $(date) ***'
code=0
"$REAL_PYTHON" "$@" || code=$?
printf 'bye'
exit "$code"
"""
# The time; and the interfaces of this machine: other tests boot clusters meanwhile
VARIES = r"\[[-\d: ]+\] |BATCH_BEGAN=\d+|network of .*"


@pytest.fixture
def noisy(tmp_path: Path) -> str:
    """A Python that says something before and after."""
    path = tmp_path / "bin/noisy-python"
    path.parent.mkdir()
    path.write_text(NOISY)
    path.chmod(0o755)
    return str(path)


def test_an_answer_is_what_is_between_the_marks() -> None:
    told = """
ask() { printf '== PyTorch ==\\nkempner-answer\\0a\\0b c\\n\\0\\0more\\n'; return 3; }
code=0
kp_values ask || code=$?
printf '<%s>' "$code" "${KP_VALUES[@]}"
kp_values echo nothing
printf '<%s>' "${#KP_VALUES[@]}"
"""
    assert bash(told).stdout == "<3><a><b c\n><><0>"


def test_a_run_with_a_python_that_prints(tmp_path: Path, noisy: str) -> None:
    """The configuration, run.dir and what is missing are read from its output."""
    env = clean_env(KEMPNER_PYTHON=noisy, REAL_PYTHON=sys.executable, KEMPNER_SITE=os.devnull)
    words = ["bash", SCRIPTS / "run.sh", "--run-dir=run", "--", "true"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"bin", "run"}
    for script, config in (("multinode", "train/debug"), ("rl", "rl/arithmetic")):
        dry = ["bash", SCRIPTS / f"{script}.sh", ROOT / f"configs/{config}.toml", "--dry-run"]
        dry += ["--nodes=1", "--gpus-per-node=2", f"--run.dir={tmp_path}/a run"]
        if script == "multinode":
            dry.append("--data.dataset_path=fake:")
        told = [
            subprocess.run(dry, cwd=tmp_path, env=env | more, capture_output=True, text=True)
            for more in ({}, {"KEMPNER_PYTHON": sys.executable})
        ]
        assert [each.returncode for each in told] == [0, 0], told[0].stderr + told[1].stderr
        text = [re.sub(VARIES, "", each.stdout) for each in told]
        assert text[0].replace(noisy, sys.executable) == text[1]


@pytest.mark.parametrize("script", ["multinode", "rl", "replicas"])
def test_a_run_whose_modules_print(tmp_path: Path, script: str) -> None:
    """A sitecustomize, or a .pth of a package, prints in every Python, also behind the marks."""
    (tmp_path / "sitecustomize.py").write_text("print('sitecustomize of mine')\n")
    configs = {"rl": "rl/arithmetic", "replicas": "train/lowcomm/steps"}
    config = ROOT / f"configs/{configs.get(script, 'train/debug')}.toml"
    dry = ["bash", SCRIPTS / f"{script}.sh", config, "--dry-run"]
    dry += [f"--nodes={1 + (script != 'rl')}", "--gpus-per-node=2", f"--run.dir={tmp_path}/a run"]
    if script != "rl":
        dry.append("--data.dataset_path=fake:")
    told = []
    for path in ("/nothing", str(tmp_path)):
        env = clean_env(KEMPNER_PYTHON=sys.executable, KEMPNER_SITE=os.devnull, PYTHONPATH=path)
        done = subprocess.run(dry, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        told.append(re.sub(rf"{VARIES}|PYTHONPATH=.*", "", done.stdout))
    assert told[0] == told[1]


@pytest.mark.parametrize("words", [
    ["multinode.sh", "CONFIG", "--data.dataset_path=fake:", "--dry-run", "--nodes=2"],
    ["rl.sh", str(ROOT / "configs/rl/arithmetic.toml"), "--dry-run", "--nodes=1"],
    ["run.sh", "--run-dir=run", "--", "true"],
    ["singlenode.sh", "--run.dir=run", "--plan=done"],
])  # fmt: skip
def test_nothing_is_imported_from_the_current_directory(tmp_path: Path, words: list[str]) -> None:
    """Where sbatch was typed: in a scratch directory for all, another user may have put modules
    there, and the user a file with the name of one of Python's."""
    here, ran = tmp_path / "scratch", tmp_path / "ran"
    here.mkdir()
    for name in ("kempner/__init__", "dataclasses", "json", "numpy/__init__", "torch/__init__"):
        (here / f"{name}.py").parent.mkdir(exist_ok=True)
        (here / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write({name!r})\nraise OSError")
    env = clean_env(
        KEMPNER_PYTHON=sys.executable, KEMPNER_SITE=os.devnull, KEMPNER_PAGE="5",
        KEMPNER_NOTIFY="true", KEMPNER_NPROC="1",
    )  # fmt: skip
    if "--plan=done" in words:
        env["KEMPNER_TRAIN"] = str(ROOT / "tests/jobs/slurm/fake_trainer.py")
    words = [word.replace("CONFIG", str(ROOT / "configs/train/debug.toml")) for word in words]
    command = ["bash", SCRIPTS / words[0], *words[1:]]
    done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=120)
    assert not ran.exists(), ran.read_text()
    assert done.returncode == 0, done.stdout + done.stderr


def test_functions_of_the_users_shell() -> None:
    """`export -f` hands them on: a cd that says where it goes, a scontrol of one's own."""
    cd = '() { builtin cd "$@" && echo "now in $PWD"; }'
    env = {"BASH_FUNC_cd%%": cd, "BASH_FUNC_scontrol%%": "() { echo NOPE; }"}
    env["BASH_FUNC_module%%"] = "() { echo loaded; }"
    done = bash("echo on; type -t scontrol || true; module", **env)
    assert done.stdout.split() in (["on", "file", "loaded"], ["on", "loaded"]), done
    assert "NOPE" not in bash("scontrol show job 1 || true", **env).stdout


def test_words_of_a_wrapper(noisy: str) -> None:
    """KEMPNER_PYTHON="uv run python": the interpreter is asked for."""
    done = bash(
        'KP_PYTHON="$NOISY -E"; kp_unwrap_python; echo "$KP_PYTHON"',
        NOISY=noisy,
        REAL_PYTHON=sys.executable,
    )
    assert done.stdout == f"{sys.executable}\n", done.stderr


def test_a_question_into_a_container_of_pyxis_is_a_step_of_its_own() -> None:
    """With the whole environment, no part of the node's memory, and not the job's request."""
    request = {"NTASKS_PER_NODE": "4", "GPUS_PER_NODE": "2", "MEM_PER_CPU": "100", "JOB_ID": "7"}
    done = bash(
        'KP_ROOT=/r; kp_choose_container; printf "%s\\n" "${KP_INSIDE[@]}"',
        KEMPNER_CONTAINER="image",
        KEMPNER_CONTAINER_RUNTIME="pyxis",
        **{f"SLURM_{name}": value for name, value in request.items()},
    )
    words = done.stdout.splitlines()
    step = words.index("srun")
    assert words[0] == "env" and {*words[1:step:2]} == {"-u"}
    removed = {name.removeprefix("SLURM_") for name in words[2:step:2]}
    assert {
        "NTASKS_PER_NODE",
        "GPUS_PER_NODE",
        "MEM_PER_CPU",
    } <= removed and "JOB_ID" not in removed
    assert {"--jobid=7", "--mem=0", "--export=ALL", "--overlap"} <= {*words[step:]}
    assert any(word.startswith("--job-name=") for word in words[step:])


def test_a_number_is_a_number(noisy: str, tmp_path: Path) -> None:
    """That of the replicas."""
    script = f"""
source "{SCRIPTS}/lib/replicas.sh"
KP_ROOT={ROOT} PYTHONPATH={ROOT}/src KP_PYTHON=$NOISY KP_NODES=4 KP_TASKS=1 KP_GPUS=0
export PYTHONPATH
KP_VALUES=($'[lowcomm]\\nreplicas = 2\\nmode = "steps"\\ninterval = 4\nsilence = 20')
kp_count_replicas
echo "$KP_REPLICAS $KP_NODES"
kp_start() {{ echo "${{@: -5}}" && echo >"$KEMPNER_DOOR"; }}
KEMPNER_PEERS="10.0.0.1 10.0.0.2" KP_RUN_DIR=/runs/x KEMPNER_DOOR=$FOLDER/door
kp_open_door
"""
    done = bash(script, NOISY=noisy, REAL_PYTHON=sys.executable, FOLDER=str(tmp_path))
    words = "10.0.0.1 --silence 20 --log /runs/x/replicas.jsonl"
    assert done.stdout.endswith(f"2 2\n{words}\n"), done.stderr
    done = bash(script, NOISY="/bin/echo")
    assert done.returncode == 2 and "does not say how many replicas" in done.stderr
