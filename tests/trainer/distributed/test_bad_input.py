"""Bad input ends in one clear message and exit code 2, before anything is made; nothing is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT, TINY, clean_env, start_train
from tests.waiting import LIMIT_S, until

HEAD = re.compile(r"train: error: (\d+) problems? with the input")


def rejected(*words: str, nproc: int = 1, prefix: Sequence[str] = (), **env: str) -> list[str]:
    """Start the trainer with input that it must refuse; returns its problems, a line each."""
    process = start_train(*words, nproc=nproc, **env) if not prefix else start_behind(prefix, words)
    out, err = process.communicate(timeout=120)
    text = f"exit code {process.returncode}\n{out}\n{err}"
    assert process.returncode == (2 if nproc == 1 else 1), text  # torchrun has a code of its own
    assert out == "", text
    lines = err.splitlines()
    begins = [i for i, line in enumerate(lines) if HEAD.fullmatch(line)]
    assert len(begins) == 1, text
    problems = []
    for line in lines[begins[0] + 1 :]:
        if not line.startswith("  - "):
            break
        problems.append(line[4:])
    assert len(problems) == int(HEAD.fullmatch(lines[begins[0]])[1]), text  # type: ignore[index]
    if nproc == 1:
        assert lines == [lines[begins[0]], *(f"  - {problem}" for problem in problems)], text
    return problems


def start_behind(prefix: Sequence[str], words: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, "scripts/train.py", *words],
        cwd=ROOT,
        env=clean_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def one(*words: str, **more: Any) -> str:
    problems = rejected(*words, **more)
    assert len(problems) == 1, problems
    return problems[0]


@pytest.fixture
def good(data_dir: Path, tmp_path: Path) -> list[str]:
    """A command line without a fault; its run directory does not exist yet."""
    return [*TINY, f"--data.dataset_path={data_dir}", f"--run.dir={tmp_path / 'run'}"]


@pytest.fixture
def own_data(data_dir: Path, tmp_path: Path) -> Path:
    """The data, in a copy that a test may damage."""
    return Path(shutil.copytree(data_dir, tmp_path / "data"))


def edit(data: Path, **values: object) -> None:
    sidecar = json.loads((data / "dataset.json").read_text())
    (data / "dataset.json").write_text(json.dumps(sidecar | values))


# --- The configuration --------------------------------------------------------------------------

WORDS = {
    "unknown-key": ("--train.max_step=9", "did you mean --train.max_steps?"),
    "unknown-section": ("--trainer.x=9", "unknown option"),
    "stray-word": ("max_steps=9", "unexpected argument"),
    "wrong-type": ("--train.max_steps=0.5", "must be an int, not a float; write a whole number"),
    "not-a-bool": ("--train.compile=ture", "did you mean true?"),
    "beyond-its-limit": ("--train.max_steps=0", "must be from 1 to 1000000000"),
    "beyond-64-bits": ("--train.seed=99999999999999999999", "must fit in 64 bits"),
    "absurd-batch": ("--train.global_batch=99999999", "1073741824 tokens a step; give at most"),
    "absurd-forward": ("--train.global_batch=4194304", "too large; give --train.micro_batch at"),
    "no-choice": ("--train.dtype=fp8", 'one of "auto", "bf16", "fp32"'),
    "missing-file": ("configs/train/debgu.toml", "did you mean configs/train/debug.toml?"),
    "recompute": ("--train.recompute_every=2", "none chooses no blocks; set it to selective"),
    "island": ("--distributed.reshard_island=2", "must divide dp_shard x cp = 1, the ranks"),
    "head-width": ("--model.dim=65", "must be a multiple of n_heads = 4"),
    "sequence": ("--train.seq_len=512", "model.max_seq_len = 256"),
    "group": ("--optimizer.groups=[{names=['blocks']}]", "no trained parameter matches this"),
}


@pytest.mark.parametrize("case", WORDS)
def test_word(good: list[str], tmp_path: Path, case: str) -> None:
    word, fix = WORDS[case]
    assert fix in one(*good, word)
    assert list(tmp_path.iterdir()) == []


TEXTS = {
    "not-toml": (b"train:\n  max_steps: 50\n", "not a TOML file"),
    "binary": (b"\x7fELF\xff\xfe", "not UTF-8"),
    "unknown-key": (b"[train]\nmax_step = 5\n", "did you mean train.max_steps?"),
    "wrong-type": (b'[train]\nmax_steps = "5"\n', "must be an int, not a string"),
    "missing-base": (b'base = "nowhere.toml"\n', "no such file"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_file(good: list[str], tmp_path: Path, case: str) -> None:
    content, fix = TEXTS[case]
    (tmp_path / "mine.toml").write_bytes(content)
    problem = one(str(tmp_path / "mine.toml"), *good)
    assert fix in problem and "mine.toml" in problem
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


# --- The data -----------------------------------------------------------------------------------


def test_missing_data(good: list[str], tmp_path: Path) -> None:
    problem = one(*good, "--data.dataset_path=nowhere/at/all")
    assert "nowhere/at/all" in problem and "python scripts/prepare_data.py" in problem
    assert list(tmp_path.iterdir()) == []


def test_missing_shard(good: list[str], own_data: Path) -> None:
    (own_data / "train_00000.npy").unlink()
    problem = one(*good, f"--data.dataset_path={own_data}")
    assert "train_00000.npy: No such file" in problem and "prepare the data again" in problem


def test_tokens_outside_the_vocabulary(good: list[str], tmp_path: Path) -> None:
    """The sidecar says so."""
    problem = one(*good, "--model.vocab_size=100")
    assert "model.vocab_size is 100" in problem and "--model.vocab_size=257" in problem
    assert list(tmp_path.iterdir()) == []


def test_wrong_dtype(good: list[str], own_data: Path, tmp_path: Path) -> None:
    """uint16 tokens, but the sidecar speaks of uint32: half of them, and nonsense."""
    edit(own_data, dtype="uint32")
    problem = one(*good, f"--data.dataset_path={own_data}")
    assert "uint16" in problem and "the sidecar says uint32" in problem
    tokens = np.load(own_data / "train_00000.npy")
    edit(own_data, dtype="int64")
    np.save(own_data / "train_00000.npy", tokens.astype(np.int64))
    problem = one(*good, f"--data.dataset_path={own_data}")
    assert "must be uint16 or uint32" in problem
    assert not (tmp_path / "run").exists()


def test_a_sidecar_that_is_none(good: list[str], own_data: Path) -> None:
    (own_data / "dataset.json").write_text("[]")
    assert "dataset.json" in one(*good, f"--data.dataset_path={own_data}")


@pytest.mark.parametrize("checkpoint", [False, True], ids=["first-start", "resumed"])
def test_a_token_that_the_sidecar_does_not_know(
    good: list[str], own_data: Path, tmp_path: Path, checkpoint: bool
) -> None:
    """Nobody reads all tokens at the start: it is found when its batch comes, and named."""
    words = [*good, f"--data.dataset_path={own_data}"]
    if checkpoint:
        process = start_train(*words, "--train.max_steps=2")
        assert process.wait(timeout=120) == 0
    tokens = np.load(own_data / "train_00000.npy", mmap_mode="r+")
    tokens[:] = 999
    tokens.flush()
    process = start_train(*words)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2, out + err
    assert err.count("error:") == 1 and "Traceback" not in out + err
    assert "train_00000.npy: token 999 at offset" in err and "model.vocab_size is 257" in err
    state = json.loads((tmp_path / "run/status.json").read_text())
    assert state["state"] == "failed" and "token 999" in state["reason"]
    if checkpoint:
        assert (tmp_path / "run/checkpoints/latest/manifest.json").is_file()


# --- Ranks and batches --------------------------------------------------------------------------

WORLDS = {
    "shard": (("--distributed.dp_shard=4",), "1 x 4 = 4", "world of 1 rank "),
    "replicate": (("--distributed.dp_replicate=3",), "3 x 1 = 3", "or start 3 tasks"),
    "pipeline": (
        ("--distributed.pp=2", "--train.micro_batch=1"), "2 x 1 x 1 = 2", "or start 2 tasks"
    ),
    "tensor": (("--distributed.tp=2",), "1 x 1 x 2 = 2", "or start 2 tasks"),
    "micro-batch": (("--train.micro_batch=3",), "8 sequences do not", "--train.global_batch=6"),
    "tokens": (
        ("--train.global_batch_tokens=256", "--train.micro_batch=3"),
        "8 sequences do not",
        "--train.global_batch_tokens=192",
    ),
    "part-of-a-sequence": (
        ("--train.global_batch_tokens=100",), "multiple of train.seq_len = 32", "such as 96"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WORLDS)
def test_world(good: list[str], tmp_path: Path, case: str) -> None:
    words, arithmetic, fix = WORLDS[case]
    problem = one(*good, *words)
    assert arithmetic in problem and fix in problem
    assert list(tmp_path.iterdir()) == []


def test_world_that_is_only_asked_for(good: list[str], tmp_path: Path) -> None:
    """What the batch scripts do before they start a task."""
    check = ["--check", "--nodes", "2", "--gpus-per-node=3"]
    mesh, batch = rejected(*good, *check, "--distributed.dp_shard=4")
    assert "1 x 4 = 4" in mesh and "world of 6 ranks" in mesh and "product is 6" in mesh
    assert "8 sequences do not divide by 6 ranks = 6" in batch and "--train.global_batch=6" in batch
    assert "from 1 to 100,000" in one(*good, "--check", "--nodes=0")
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_that_is_not_there(good: list[str], tmp_path: Path) -> None:
    problem = one(*good, "--distributed.device=cuda", CUDA_VISIBLE_DEVICES="")
    assert "no GPU is visible" in problem and "--gpus-per-node" in problem
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_make_no_sense(good: list[str], tmp_path: Path) -> None:
    problem = one(*good, SLURM_STEP_NUM_TASKS="2(x4)", SLURM_PROCID="0", SLURM_LOCALID="0")
    assert "SLURM_STEP_NUM_TASKS=2(x4)" in problem and "must be integers" in problem
    assert list(tmp_path.iterdir()) == []


# --- The run directory --------------------------------------------------------------------------


def test_a_file_in_the_way(good: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    problem = one(*good)
    assert "run.dir" in problem and "is not a directory; give another --run.dir" in problem
    problem = one(*good, f"--run.dir={tmp_path / 'run' / 'below'}")
    assert f"{tmp_path / 'run'} is not a directory" in problem
    assert (tmp_path / "run").read_text() == "mine"


def test_checkpoints_in_a_place_of_their_own(good: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    problem = one(*good, f"--checkpoint.dir={tmp_path / 'file'}")
    assert "checkpoint.dir" in problem and "give another --checkpoint.dir" in problem
    assert not (tmp_path / "run").exists()


def without_privileges() -> list[str]:
    """Words before a command that make the modes of files count for root too."""
    if os.getuid():
        return []
    capabilities = "-dac_override,-dac_read_search"
    words = ["setpriv", f"--bounding-set={capabilities}", f"--inh-caps={capabilities}"]
    try:
        subprocess.run([*words, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("root that cannot drop its privileges here")
    return words


@pytest.mark.parametrize("mode", [0o555, 0o000], ids=["read-only", "closed"])
def test_a_directory_that_is_not_ours(good: list[str], tmp_path: Path, mode: int) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    theirs.chmod(mode)
    try:
        prefix = without_privileges()
        problem = one(*good, f"--run.dir={theirs / 'deep' / 'run'}", prefix=prefix)
        assert f"{theirs} is not writable; give another --run.dir" in problem
        problem = one(*good, f"--run.dir={theirs}", "--check", prefix=prefix)
        assert f"{theirs} is not writable" in problem
    finally:
        theirs.chmod(0o755)
    assert list(theirs.iterdir()) == []


# --- Several at once, several processes ---------------------------------------------------------


def test_all_problems_together(good: list[str], tmp_path: Path) -> None:
    words = ["configs/train/nowhere.toml", "--train.max_step=5", "--train.compile=ture", "word"]
    problems = rejected(*good, *words)
    assert len(problems) == len(words)
    assert all(any(word in problem for problem in problems) for word in words)
    (tmp_path / "file").touch()
    data, run_dir, mesh, batch = rejected(  # each value is sound in itself
        *good,
        "--data.dataset_path=nowhere",
        f"--run.dir={tmp_path / 'file'}",
        "--distributed.dp_shard=3",
        "--train.micro_batch=3",
    )
    assert "nowhere" in data and "run.dir" in run_dir and "1 x 3" in mesh and "do not" in batch


def test_two_tasks_speak_once(good: list[str], tmp_path: Path) -> None:
    """Rank 0 tells it while the others wait to be ended, as srun does; one that is not ended has a
    problem of its own and tells it."""
    env = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "1"}
    words = [*good, "--distributed.dp_shard=3"]
    for terminated in (True, False):
        other, first = (
            start_train(*words, **env, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
            for rank in (1, 0)
        )
        said = first.communicate(timeout=LIMIT_S)[1]
        assert first.returncode == 2 and "= 3" in said and said.count("\n") == 2
        if terminated:
            wait_until_it_waits(other.pid)
            other.terminate()
        said = other.communicate(timeout=LIMIT_S)[1]
        assert (other.returncode, "= 3" in said) == ((-15, False) if terminated else (2, True))
    assert list(tmp_path.iterdir()) == []


def wait_until_it_waits(pid: int) -> None:
    """Until SIGTERM has its default action in that process again: others of ours are caught."""

    def waits() -> bool:
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        usr1, term = (1 << (number - 1) for number in (10, 15))
        mask = int(caught[1], 16) if caught else 0
        return bool(mask & usr1 and not mask & term)

    until(waits)


def test_torchrun(good: list[str], tmp_path: Path) -> None:
    (problem,) = rejected(*good, "--distributed.dp_shard=3", nproc=2)
    assert "1 x 3 = 3" in problem and "world of 2 ranks" in problem
    assert list(tmp_path.iterdir()) == []


def test_without_any_word() -> None:
    process = start_train()
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2 and out == ""
    assert err.startswith(f"usage: {sys.executable} scripts/train.py CONFIG.toml")
    assert not (ROOT / "runs" / "default").exists()
