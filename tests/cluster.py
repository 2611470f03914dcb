"""A real Slurm of two virtual hosts, booted by the project's own test bed, for one test session."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts/slurm"
TESTBED = SCRIPTS / "testbed.sh"
FAKE_TRAINER = ROOT / "tests/jobs/slurm/fake_trainer.py"
if os.environ.get(
    "SLURM_BIN"
):  # another Slurm than that in PATH; a directory without one is an error
    told = subprocess.run(["bash", TESTBED, "path"], capture_output=True, text=True)
    if told.returncode:
        pytest.exit(told.stderr.strip(), returncode=2)
    os.environ["PATH"] = told.stdout.strip()
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
AS_USER = [False]  # --as-user: the commands of the tests are those of a user without rights
USER, USER_ID = "alice", 4201  # of scripts/slurm/testbed/users.sh


class Cluster:
    """The commands of one test bed. Every path and argument goes through as it is, without a
    shell."""

    def __init__(
        self, number: int, slurm_conf: str, data: Path, small_disk: Path, user: str = "root"
    ) -> None:
        """`small_disk`: a disk of 2 MB that the hosts see too; `user`: who types."""
        self.number, self.data, self.small_disk, self.user = number, data, small_disk, user
        self._pending: dict[str, float] = {}  # since when, by job
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))},
            "SLURM_CONF": slurm_conf,
            "KEMPNER_TESTBED": str(number),
            "KEMPNER_PYTHON": sys.executable,
            "KEMPNER_SITE": os.devnull,  # what this machine's user has set is not under test
            "KEMPNER_CODE": "0",  # tests/jobs/slurm/test_code.py is about the copies
            "OMP_NUM_THREADS": "1",
        }
        if user != "root":
            home = str(Path(slurm_conf).parent / "home" / user)
            self.env |= {"HOME": home, "USER": user, "LOGNAME": user}

    def typed(
        self, command: Sequence[object], env: dict[str, str] | None = None, cwd: object = None
    ) -> dict[str, Any]:
        """What subprocess takes, to run a command as the user."""
        words, env = [str(part) for part in command], {**self.env, **(env or {})}
        if self.user != "root":
            given = [f"{name}={value}" for name, value in env.items()]
            words = ["env", "-i", "-C", str(cwd or os.getcwd()), *given, *words]
            words, env = ["bash", str(TESTBED), "as", self.user, *words], self.env
        return {"args": words, "env": env, "cwd": cwd}

    def run(
        self,
        *command: object,
        env: dict[str, str] | None = None,
        cwd: object = None,
        **more: object,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command against this cluster to its end, as its user."""
        return self._run(**self.typed(command, env, cwd), **more)

    def root(
        self, *command: object, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """The same for what takes rights on this machine."""
        return self._run([str(part) for part in command], env={**self.env, **(env or {})})

    def _run(self, args: Sequence[str], **more: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(args, capture_output=True, text=True, timeout=400, **more)

    def ask(self, *command: object) -> str:
        """What a command prints; it has to succeed."""
        done = self.run(*command)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def testbed(self, *command: object) -> str:
        done = self.root("bash", TESTBED, *command)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def sbatch(
        self,
        script: str | Path,
        *arguments: object,
        options: Sequence[object] = (),
        cwd: Path,
        env: dict[str, str] | None = None,
    ) -> str:
        """Submit one of the launch scripts (a name) or any file; returns the job's number."""
        path = script if isinstance(script, Path) else SCRIPTS / script
        done = self.run("sbatch", "--parsable", *options, path, *arguments, cwd=cwd, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def field(self, job: str, name: str) -> str:
        """One field of `scontrol show job`."""
        found = re.search(rf"\b{name}=(\S*)", self.ask("scontrol", "show", "job", job))
        assert found, f"job {job} has no {name}"
        return found[1]

    def state(self, job: str) -> str:
        return self.field(job, "JobState")

    def steps(self, job: str) -> int:
        """How many times a host has started its part of a step of this job, by its own log."""
        return len(re.findall(rf"launch task StepId={job}\.\d+ request", self._host_logs()))

    def has_signalled(self, job: str, name: str) -> bool:
        """Whether a host has sent this signal to the job's batch script."""
        number = signal.Signals[f"SIG{name}"].value
        return bool(re.search(rf"sent signal {number} to .*StepId={job}\.batch", self._host_logs()))

    def _host_logs(self) -> str:
        logs = Path(self.env["SLURM_CONF"]).parent.glob("log/node*.log")
        return "".join(log.read_text() for log in logs)

    def wait(self, job: str) -> int:
        """Wait for the end of a job, through its requeues; returns its exit code (128 + n: signal
        n)."""
        end = time.monotonic() + LIMIT_S
        while (state := self.state(job)) not in ENDED:
            # Newer Slurm calls a job this that was preempted once, however its last start ends.
            if state == "PREEMPTED" and self.field(job, "Requeue") == "0":
                break
            assert time.monotonic() < end, f"job {job} is still {state} after {LIMIT_S} s"
            self.hasten(job)
            time.sleep(0.2)
        code, number = map(int, self.field(job, "ExitCode").split(":"))
        return code or (128 + number if number else 0)

    def hasten(self, job: str) -> None:
        """Let a requeued job start now, and not when its old credential has expired. It must be of
        another second, or the start fails: so not before the job has been pending for two."""
        if self.state(job) != "PENDING" or self.field(job, "Restarts") == "0":
            self._pending.pop(job, None)
        elif time.monotonic() - self._pending.setdefault(job, time.monotonic()) > 2:
            self.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def start_again(self, job: str) -> None:
        """Wait until a job that is being requeued runs again."""
        end = time.monotonic() + LIMIT_S
        while self.field(job, "Restarts") == "0" or self.state(job) != "RUNNING":
            assert time.monotonic() < end, f"job {job} has not started again after {LIMIT_S} s"
            self.hasten(job)
            time.sleep(0.2)

    def wait_for(self, what: str, file: Path) -> str:
        """Wait until a file holds some text; returns all of it."""
        end = time.monotonic() + LIMIT_S
        while what not in (text := file.read_text() if file.exists() else ""):
            assert time.monotonic() < end, f"no {what!r} in {file} after {LIMIT_S} s:\n{text}"
            time.sleep(0.1)
        return text

    def bytes(self, node: str, interface: str) -> int:
        return int(self.testbed("bytes", node, interface))

    def debug_run(self, run_dir: Path, *overrides: object) -> list[object]:
        """train.py's arguments for a run of debug.toml that takes seconds."""
        return [
            ROOT / "configs/train/debug.toml",
            f"--data.dataset_path={self.data}",
            f"--run.dir={run_dir}",
            "--distributed.device=cpu",  # the GPUs of the test bed are only counted
            "--train.seq_len=64",
            "--eval.interval=0",
            "--metrics.log_interval=1",
            *overrides,
        ]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts of four GPUs. Skips where it cannot boot, but fails in CI."""
    with boot(2, 4, tmp_path_factory) as cluster:
        yield cluster


@contextlib.contextmanager
def files_of_user() -> Iterator[None]:
    """Files that this thread makes belong to the user meanwhile. It keeps the rights of root, and
    so has every process that it starts."""
    c = ctypes.CDLL(None)
    securebits, keep_rights = 28, 1 << 2  # PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP

    def become(number: int) -> None:
        c.prctl(securebits, keep_rights)
        c.setfsgid(number)
        c.setfsuid(number)
        c.prctl(securebits, 0)

    become(USER_ID)
    try:
        yield
    finally:
        become(0)


def need_slurm() -> None:
    reason = ""
    if os.geteuid() != 0:
        reason = "the Slurm test bed needs root"
    elif missing := [p for p in ("slurmctld", "slurmd", "munged", "ip") if not shutil.which(p)]:
        reason = f"not installed: {', '.join(missing)}; run {TESTBED} install"
    elif AS_USER[0] and any(not p.stat().st_mode & 1 for p in (ROOT, *ROOT.parents)):
        reason = (
            f"--as-user: {USER} cannot read {ROOT}: run it in a checkout elsewhere, in /srv say"
        )
    if reason:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


@contextlib.contextmanager
def boot(
    nodes: int,
    gpus: int,
    tmp_path_factory: pytest.TempPathFactory,
    conf: str = "",
    gpu: str = "",
    **more: str,
) -> Iterator[Cluster]:
    """A cluster for as long as the body runs. Skips where it cannot boot, but fails in CI. `conf`:
    lines of slurm.conf that it has in place of the usual ones, between blanks; `gpu`: the type of
    its GPUs; `more`: other variables of testbed.sh."""
    need_slurm()
    env = {**os.environ, "KEMPNER_TESTBED_OWNER": str(os.getpid()), "KEMPNER_TESTBED_CONF": conf}
    env |= {"KEMPNER_TESTBED_GPU": gpu, **more}
    user = (
        USER if AS_USER[0] and "KEMPNER_TESTBED_SITE" not in more else "root"
    )  # a site has its own
    if user == USER:
        env["KEMPNER_TESTBED_SITE"] = "accounting"
        # As without accounting: the tests ask for the partition `urgent`, not for a QOS
        env["KEMPNER_TESTBED_CONF"] = f"PreemptType=preempt/partition_prio {conf}"
    disk = tmp_path_factory.mktemp("small-disk")  # a host sees what was mounted before it booted
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk], check=True)
    if AS_USER[0]:
        os.chown(disk, USER_ID, USER_ID)
    for attempt in range(5):  # a number may be taken by another cluster
        env["KEMPNER_TESTBED"] = str((os.getpid() + attempt) % 249 + 1)
        up = subprocess.run(
            ["bash", TESTBED, "up", str(nodes), str(gpus)], env=env, capture_output=True, text=True
        )
        if up.returncode == 0:
            break
    else:
        subprocess.run(["umount", disk], check=True)
        pytest.fail(up.stderr)
    try:
        if user == USER and (lacks := re.search("without the part accounting: (.*)", up.stderr)):
            pytest.skip(f"--as-user: {lacks[1]}")
        path = up.stdout.split("SLURM_CONF=")[1].strip()
        data = make_data(tmp_path_factory.mktemp("data"))
        yield Cluster(int(env["KEMPNER_TESTBED"]), path, data, disk, user)
    finally:
        subprocess.run(["bash", TESTBED, "down"], env=env, check=True)
        subprocess.run(["umount", disk], check=True)


def make_data(folder: Path) -> Path:
    """Token shards of a few hundred kB, through the project's own program."""
    text = folder / "text.txt"
    text.write_text(
        "".join(f"{i} squared is {i * i}, and {i} cubed {i**3}.\n" for i in range(9000))
    )
    program = [sys.executable, ROOT / "scripts/prepare_data.py", text, "--out", folder / "shards"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "shards"


def program(folder: Path, name: str, text: str) -> dict[str, str]:
    """An executable in front of PATH; returns the environment that has it."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def apptainer(folder: Path, enter: str = "exec") -> dict[str, str]:
    """A shim that takes apptainer's words away, writes them to ../calls, a line each call, and runs
    the rest."""
    text = f"""#!/bin/bash
printf '%s\\n' "$(printf '%q ' "$@")" >>{folder.parent}/calls
while [[ $1 != /images/a.sif ]]; do shift; done
shift
{enter} "$@"
"""
    return program(folder, "apptainer", text)


def pyxis(folder: Path) -> dict[str, str]:
    """A shim in front of the real srun that takes pyxis's options away: ../calls has a line "srun"
    for each call, and one for each option."""
    text = f"""#!/bin/bash
[[ $1 != --help ]] || {{ echo --container-image=; exit; }}
words=()
echo srun >>{folder.parent}/calls
for word; do
    case $word in
        --container-* | --no-container-*) printf '%s\\n' "$word" >>{folder.parent}/calls ;;
        *) words+=("$word") ;;
    esac
done
exec {shutil.which("srun")} "${{words[@]}}"
"""
    return program(folder, "srun", text)


def calls_of(name: str, folder: Path, before: str = "") -> dict[str, str]:
    """A shim in front of one of Slurm's commands that writes its arguments to ../calls-NAME, a line
    each call. `before`: bash that runs first."""
    text = f"""#!/bin/bash
echo "$*" >>{folder.parent}/calls-{name}
{before}
exec {shutil.which(name)} "$@"
"""
    return program(folder, name, text)
