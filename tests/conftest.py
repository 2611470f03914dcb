"""What the tests share: a small data set, and the real trainer started as a user starts it."""

from __future__ import annotations

import asyncio
import contextlib
import email
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kempner
from kempner.jobs.system.front_door import exit_code
from tests import zygote
from tests.cluster import AS_USER, ROOT, cluster, files_of_user

pytest_plugins = ("tests.one_process", "tests.trainer.fault.fixtures")

__all__ = ["cluster"]  # a fixture

# A shell that starts us in the background ignores SIGINT, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Directories of tests that mostly wait, and of those that keep several cores busy.
KINDS = ({"slurm", "ray", "fault"}, {"distributed", "gpu_path"})

TINY = [
    "configs/train/debug.toml",
    "--model.dim=64",
    "--model.n_layers=2",
    "--model.ffn_dim=96",
    "--train.seq_len=32",
    "--train.global_batch=8",
    "--train.max_steps=8",
    "--train.deterministic",
    "--checkpoint.interval=0",
    "--eval.interval=0",
    "--metrics.log_interval=1",
]


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards of parts of Python's library, byte by byte. Not of the kit's own source: now and
    then a batch has a gradient so sensitive to rounding that two meshes differ by more than a test
    allows, and each commit would draw anew."""
    out = tmp_path_factory.mktemp("data") / "own"
    sources = [str(Path(package.__file__).parent) for package in (asyncio, email, unittest)]
    command = ["scripts/prepare_data.py", *sources, "--out", str(out), "--val-fraction", "0.2"]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return out


def load_program(name: str) -> ModuleType:
    """A program of scripts/ in this process; its main() returns the exit code in every case."""
    spec = importlib.util.spec_from_file_location(f"{name}_program", ROOT / f"scripts/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main = functools.partial(exit_code, module.main, name=name)  # type: ignore[attr-defined]
    return module


def clean_env(**more: str) -> dict[str, str]:
    """This environment without what SLURM or torchrun left in it, one thread a process."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "TORCHELASTIC", "KEMPNER"))
        and name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    return kept | {"OMP_NUM_THREADS": "1"} | more


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--as-user",
        action="store_true",
        help="on Slurm with accounting, with the commands typed by a user without rights",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--as-user"):
        AS_USER[0] = True
        # Only root enters pytest's own
        config.option.basetemp = config.option.basetemp or tempfile.mkdtemp(prefix="as-user-")


@pytest.hookimpl(trylast=True)  # without the tests that are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests wait for Slurm, Ray or a hang, those that start several ranks, and all
    others come in turn: then the workers of one machine neither compete for its cores nor leave
    them idle. Of each kind the files with most tests come first, as in xdist's own order, which
    `make test` turns off."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    kinds: dict[int, list[Path]] = {}
    for path in files:
        kind = next((n for n, names in enumerate(KINDS) if path.parent.name in names), len(KINDS))
        kinds.setdefault(kind, []).append(path)
    places = dict[Path, float]()
    for some in kinds.values():
        some.sort(key=lambda path: -len(files[path]))
        places |= {path: (number + 0.5) / len(some) for number, path in enumerate(some)}
    items[:] = [item for path in sorted(files, key=places.__getitem__) for item in files[path]]


def pytest_collection_finish() -> None:
    """What modules have set as they were imported is not for the programs that tests start."""
    for name in zygote.read_at_start(dict(os.environ)).keys() - zygote.FIRST_ENVIRON.keys():
        del os.environ[name]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if AS_USER[0] and (mark := item.get_closest_marker("as_root")):
        pytest.skip(f"--as-user: {mark.args[0]}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """However a test ends, nothing that it has started goes on."""
    yield
    zygote.end_all()


@contextlib.contextmanager
def same_variables() -> Iterator[None]:
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="module", autouse=True)
def variables_of_module() -> Iterator[None]:
    """What the program sets in this process, such as a cache's place, is not the next module's."""
    with same_variables():
        yield


@pytest.fixture(autouse=True)
def variables_of_test() -> Iterator[None]:
    """Nor the next test's."""
    with same_variables():
        yield


@pytest.fixture(scope="session", autouse=True)
def files_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """With --as-user: what the tests write is the user's, as if it had been written by hand."""
    if not AS_USER[0] or os.geteuid() != 0:  # the latter: need_slurm says why nothing runs
        yield
        return
    base = tmp_path_factory.getbasetemp()
    for place in (base, base.parent):  # with -n, the base of a worker is in that of the session
        if not place.stat().st_mode & 0o077:
            place.chmod(0o711)
    with files_of_user():
        yield


def cannot_train(python: str) -> str:
    """Why the trainer need not, or cannot, be tested by this Python; empty when it can."""
    ask = [python, "-c", "import sys, torch, kempner.train.sections; print(sys.version)"]
    try:
        found = subprocess.run(ask, env=packages(), capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        return f"there is no {python}"
    if found.returncode:
        return f"{python} cannot import torch: {found.stderr.splitlines()[-1]}"
    same = found.stdout.strip() == sys.version
    return f"{python} is the version that runs the tests" if same else ""


def packages() -> dict[str, str]:
    """An environment in which another Python finds torch and kempner."""
    paths = [str(Path(module.__file__ or "").parents[1]) for module in (kempner, torch)]
    return clean_env(PYTHONPATH=os.pathsep.join(paths))


def start_train(
    *args: str, nproc: int = 1, program: str = "scripts/train.py", **env: str
) -> subprocess.Popen[str]:
    """The trainer, or `program` in its place, in one process, or in several by torchrun. What of it
    still runs when the test ends is killed."""
    launcher = [sys.executable]
    if nproc > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    return zygote.Popen(
        [*launcher, program, *args],
        cwd=ROOT,
        env=clean_env(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


Train = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def train(data_dir: Path) -> Train:
    """Run the trainer with TINY, the data and the given words to its end; `code` is the expected
    exit code."""

    def run(
        run_dir: Path, *args: str, nproc: int = 1, code: int = 0, **env: str
    ) -> subprocess.CompletedProcess[str]:
        words = [*TINY, f"--data.dataset_path={data_dir}", f"--run.dir={run_dir}", *args]
        process = start_train(*words, nproc=nproc, **env)
        out, err = process.communicate(timeout=240)
        assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
        assert "FutureWarning" not in err, err  # of torch, about our code
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    return run


def losses(run_dir: Path) -> dict[int, float]:
    """Loss by step, the last line of a step counting."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {r["step"]: r["loss"] for r in records if "loss" in r}


def status(run_dir: Path) -> dict[str, object]:
    return json.loads((run_dir / "status.json").read_text())
