"""scripts/slurm/logs.sh and tmux.sh, mostly on a run directory that the test writes itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from kempner.jobs.records.decision import BatchAction
from tests.cluster import FAKE_TRAINER, SCRIPTS, Cluster
from tests.conftest import clean_env
from tests.waiting import LIMIT_S, until

LOGS, TMUX = SCRIPTS / "logs.sh", SCRIPTS / "tmux.sh"
HOSTILE = 'a run; it\'s "$HOME" #{pid} `x`;'


class Follower:
    """logs.sh in a session of its own, its output in a file."""

    def __init__(self, out: Path, **typed: Any) -> None:
        """`typed`: as of Cluster.typed."""
        self.out = out
        with open(out, "w") as file:
            self.process = subprocess.Popen(
                stdout=file, stderr=file, start_new_session=True, **typed
            )

    def wait_for(self, line: str) -> list[str]:
        """Wait until that line is there; returns all."""
        until(
            lambda: line in self.lines(),
            lambda: f"no {line!r} in:\n{self.out.read_text()}",
        )
        return self.lines()

    def lines(self) -> list[str]:
        return self.out.read_text().splitlines()

    def left(self) -> list[str]:
        """The processes of its session."""
        return in_session(self.process.pid)

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> int:
        """Ctrl-C, or another signal to the script alone; returns the exit code."""
        if number == signal.SIGINT:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        return self.process.wait(LIMIT_S)


def in_session(session: int) -> list[str]:
    """The commands of the processes of a session."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            state, *ids = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(ids[-1]) == session and state != "Z":
                words = (process / "cmdline").read_bytes().decode(errors="replace")
                found.append(words.replace("\0", " "))
    return found


@pytest.fixture
def env() -> dict[str, str]:
    kept = {name: value for name, value in clean_env().items() if not name.startswith("TMUX")}
    return kept | {"KEMPNER_SITE": os.devnull}


@pytest.fixture
def follow(tmp_path: Path, env: dict[str, str]) -> Iterator[Callable[..., Follower]]:
    started: list[Follower] = []

    def start(
        *arguments: object, env: dict[str, str] = env, cluster: Cluster | None = None
    ) -> Follower:
        command = ["bash", str(LOGS), *map(str, arguments)]
        here = {"args": command, "env": env, "cwd": tmp_path}
        typed = cluster.typed(command, cwd=tmp_path) if cluster else here
        started.append(Follower(tmp_path / f"out-{len(started)}", **typed))
        return started[-1]

    yield start
    for follower in started:
        if follower.process.poll() is None:
            follower.interrupt(signal.SIGTERM)


def begin_attempt(run_dir: Path, number: int, *ranks: int) -> None:
    """As the trainer does: the logs, then the link."""
    logs = run_dir / f"logs/attempt-{number}"
    logs.mkdir(parents=True)
    for rank in ranks:
        write(logs / f"rank-{rank}.log", f"attempt {number} of rank {rank}")
    fresh = run_dir / "logs/.latest.new"
    fresh.symlink_to(logs.name)
    fresh.replace(run_dir / "logs/latest")


def write(file: Path, *lines: str) -> None:
    with open(file, "a") as log:
        log.writelines(f"2026-11-21 16:13:09 {line}\n" for line in lines)


def stamped(line: str) -> str:
    source, _, text = line.partition(" ")
    return f"{source} 2026-11-21 16:13:09 {text}"


def test_logs_are_followed_into_the_next_attempt(
    tmp_path: Path, follow: Callable[..., Follower]
) -> None:
    run_dir = tmp_path / HOSTILE
    begin_attempt(run_dir, 0, 0, 1)
    write(run_dir / "logs/attempt-0/rank-1.log", *(f"step {i}" for i in range(30)))
    (run_dir / "logs/batch-7.log").write_text("[16:13:09] kempner: hello\n")
    follower, one = follow(run_dir), follow(run_dir, "--rank", 1)
    lines = follower.wait_for(stamped("rank-1 step 29"))
    assert "batch [16:13:09] kempner: hello" in lines
    assert stamped("rank-0 attempt 0 of rank 0") in lines
    assert (
        stamped("rank-1 step 10") in lines and stamped("rank-1 step 9") not in lines
    )  # the last 20
    write(run_dir / "logs/attempt-0/rank-1.log", "a last word")
    follower.wait_for(stamped("rank-1 a last word"))
    begin_attempt(run_dir, 1, 0)
    follower.wait_for(stamped("rank-0 attempt 1 of rank 0"))
    write(run_dir / "logs/attempt-1/rank-1.log", "late, but here")  # it opens its log by itself
    write(run_dir / "logs/attempt-1/rank-0.log", "step 31")
    follower.wait_for(stamped("rank-1 late, but here"))
    lines = follower.wait_for(stamped("rank-0 step 31"))
    assert len(set(lines)) == len(lines), "a line came twice"
    assert {line.split()[0] for line in one.wait_for(stamped("rank-1 late, but here"))} == {
        "rank-1"
    }
    # The tail of the first attempt alone has ended: it held no batch log.
    until(
        lambda: sum(line.startswith("tail ") for line in one.left()) == 1, lambda: str(one.left())
    )


def test_the_logs_of_a_large_world(tmp_path: Path, env: dict[str, str]) -> None:
    """More than 64 ranks: in a directory for each host."""
    begin_attempt(tmp_path / "run", 0)
    for rank, host in ((0, "n1"), (70, "n2")):
        (tmp_path / f"run/logs/attempt-0/{host}").mkdir()
        write(tmp_path / f"run/logs/attempt-0/{host}/rank-{rank}.log", "hello")
    for words, expected in (([], ["rank-0", "rank-70"]), (["--rank", "70"], ["rank-70"])):
        done = subprocess.run(
            ["bash", str(LOGS), "run", "--no-follow", *words],
            env=env, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert [line.split()[0] for line in done.stdout.splitlines()] == expected, done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_no_process_stays_behind(
    number: signal.Signals, code: int, tmp_path: Path, follow: Callable[..., Follower]
) -> None:
    run_dir = tmp_path / "run"
    begin_attempt(run_dir, 0, 0, 1)
    follower = follow(run_dir)
    follower.wait_for(stamped("rank-1 attempt 0 of rank 1"))
    assert follower.interrupt(number) == code
    until(lambda: not follower.left(), lambda: str(follower.left()))
    assert len(follower.lines()) == 2  # and no message


def test_warnings_are_shown_once(tmp_path: Path, env: dict[str, str]) -> None:
    run_dir = tmp_path / "run"
    begin_attempt(run_dir, 0, *range(12))
    slow = "straggler: rank 3 on node2 is 2.1 times slower than the median rank since step 1"
    for rank in range(12):
        write(
            run_dir / f"logs/attempt-0/rank-{rank}.log",
            slow,
            "step 5  loss 1.0, the default changed",
        )
    write(run_dir / "logs/attempt-0/rank-3.log", "RuntimeError: x", *["step 6"] * 100)
    decided = [f"[16:13:09] kempner: {word}: exit code 1" for word in get_args(BatchAction)]
    (run_dir / "logs/batch-7.log").write_text("\n".join([slow, *decided, ""]))
    (run_dir / "logs/srun-7.0.1.log").write_text("srun: error: it is in the batch log\n")
    told = subprocess.run(
        ["bash", LOGS, "run", "--warnings", "--no-follow"],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert told.stdout.splitlines() == [
        f"batch {slow}",
        *(f"batch {line}" for line in decided),
        stamped("rank-3 RuntimeError: x"),
    ]


@pytest.mark.parametrize(
    ("script", "arguments", "fix"),
    [
        (LOGS, ["nowhere"], "give one (ls runs)"),
        (LOGS, ["empty"], "give one (ls runs)"),
        (TMUX, ["nowhere"], "give one (ls runs)"),
        (LOGS, ["987654"], "give the run directory"),
        (LOGS, ["run", "--rank", "2"], "0 to 1"),
        (LOGS, ["run", "--rank"], "a value is missing"),
        (LOGS, ["run", "--rank="], "a value is missing"),
        (LOGS, ["run", "--quiet"], "usage: "),
        (LOGS, [], "usage: "),
        (TMUX, ["run", "run"], "usage: "),
    ],
)
def test_bad_input_ends_with_two_and_the_fix(
    script: Path, arguments: list[str], fix: str, tmp_path: Path, env: dict[str, str]
) -> None:
    begin_attempt(tmp_path / "run", 0, 0, 1)
    (tmp_path / "run/attempts.jsonl").write_text('{"event": "start", "world_size": 2}\n')
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        ["bash", script, *arguments],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kempner: error: ") and done.stderr.count("\n") == 1
    assert fix in done.stderr


def fake_scontrol(tmp_path: Path, log: Path) -> dict[str, str]:
    """The PATH on which scontrol knows job 7 with this batch log."""
    tools = tmp_path / "bin"
    tools.mkdir()
    told = f"JobId=7 JobName=kempner\n   StdErr={tmp_path}/err\n   StdOut={log}\n"
    (tools / "scontrol").write_text(f"#!/bin/sh\ncat <<'END'\n{told}END\n")
    (tools / "scontrol").chmod(0o755)
    return {"PATH": f"{tools}:{os.environ['PATH']}"}


def test_a_job_that_is_still_looking_for_its_run(
    tmp_path: Path, env: dict[str, str], follow: Callable[..., Follower]
) -> None:
    """Its batch log is where scontrol says; the run directory is named in there, and links it."""
    log = tmp_path / "a log.out"
    queue = env | fake_scontrol(tmp_path, log)
    log.write_text("[16:13:09] kempner: job 7\n")
    follower = follow(7, env=queue)
    follower.wait_for("batch [16:13:09] kempner: job 7")
    run_dir = tmp_path / "runs/a run"
    begin_attempt(run_dir, 0, 0)
    (run_dir / "logs/batch-7.log").hardlink_to(log)
    with open(log, "a") as file:
        file.write(f"[16:13:09] kempner: run directory {run_dir}\n")
    follower.wait_for(stamped("rank-0 attempt 0 of rank 0"))
    assert len(follower.lines()) == 3, "the batch log is shown once"
    forgotten = {**env, "SLURM_CONF": os.devnull}
    done = subprocess.run(
        ["bash", LOGS, "7", "--rank=0", "--no-follow"],
        env=forgotten, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.stdout.splitlines() == [stamped("rank-0 attempt 0 of rank 0")], done.stderr


def test_logs_of_a_job_from_the_queue_to_its_second_start(
    cluster: Cluster, tmp_path: Path, follow: Callable[..., Follower]
) -> None:
    """The job's number is enough: before there is a run directory, and after Slurm forgot it."""
    run_dir = tmp_path / "somewhere else"  # not in runs/
    job = cluster.sbatch(
        "singlenode.sh",
        f"--run.dir={run_dir}",
        "--plan=wait,done",
        options=["--hold", "--gpus-per-node=1"],
        cwd=tmp_path,
        env={"KEMPNER_TRAIN": str(FAKE_TRAINER)},
    )
    follower = follow(job, cluster=cluster)
    follower.wait_for("logs: no log yet, waiting for the first")
    cluster.ask("scontrol", "release", job)
    follower.wait_for("batch here is attempt 0")
    begin_attempt(run_dir, 0, 0)  # what the real trainer does
    follower.wait_for(stamped("rank-0 attempt 0 of rank 0"))
    cluster.ask("scancel", "--batch", "--signal=TERM", job)
    assert cluster.wait(job) == 0
    begin_attempt(run_dir, 1, 0)
    follower.wait_for(stamped("rank-0 attempt 1 of rank 0"))
    lines = follower.wait_for("batch here is attempt 1")
    assert (
        lines.count("batch here is attempt 0") == 1
    )  # the link in the run directory is the same log
    (tmp_path / "runs").symlink_to(tmp_path)
    forgotten = {**cluster.env, "SLURM_CONF": os.devnull}
    again = cluster.run("bash", LOGS, job, "--no-follow", cwd=tmp_path, env=forgotten)
    assert "batch here is attempt 1" in again.stdout.splitlines(), again.stderr


# --- tmux ---------------------------------------------------------------------------------


@pytest.fixture
def tmux(
    env: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., str]]:
    """tmux of a server of its own, which ends with the test."""
    if not shutil.which("tmux"):
        reason = f"not installed: tmux; run {SCRIPTS / 'testbed.sh'} install"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    env["TMUX_TMPDIR"] = str(tmp_path_factory.mktemp("tmux"))
    # The panes' shells must not read the startup files of whoever runs the tests: pyenv's, for
    # one, wait 60 s for a lock that a killed process has left behind.
    env |= {"HOME": env["TMUX_TMPDIR"], "SHELL": str(shutil.which("bash"))}

    def run(*command: str) -> str:
        done = subprocess.run(
            ["tmux", *command], env=env, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    yield run
    subprocess.run(["tmux", "kill-server"], env=env, capture_output=True)


def test_a_tmux_session_shows_the_run(
    tmux: Callable[..., str], tmp_path: Path, env: dict[str, str]
) -> None:
    run_dir = tmp_path / HOSTILE
    begin_attempt(run_dir, 0, 0, 1)
    write(run_dir / "logs/attempt-0/rank-1.log", "straggler: rank 1 is slow")
    (run_dir / "status.json").write_text('{"state": "done", "step": 5, "max_steps": 5}')
    (run_dir / "metrics.jsonl").write_text(
        '{"step": 5, "time": 1, "loss": 1.25, "tokens_per_s": 999}\n'
    )

    def call(*arguments: object, cwd: Path = tmp_path) -> str:
        done = subprocess.run(
            ["bash", TMUX, *map(str, arguments)],
            env=env, cwd=cwd, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    name = "kempner-a_run__it_s___HOME____pid___x__"
    assert f"{name} is made; attach to it: tmux attach -t {name}" in call(HOSTILE, "--detached")
    assert f"{name} already exists; attach" in call(".", cwd=run_dir)
    # Another run of that name gets a session of its own.
    begin_attempt(tmp_path / "other" / HOSTILE, 0, 0)
    assert f"{name}-2 is made" in call(tmp_path / "other" / HOSTILE)
    listed = tmux(
        "list-panes", "-s", "-t", f"={name}", "-F", "#{pane_id} #{pane_pid} #{pane_title}"
    )
    panes = {
        title: (pane, int(pid))
        for pane, pid, title in (p.split(" ", 2) for p in listed.splitlines())
    }
    assert list(panes) == ["figures", "rank 0", "warnings of all ranks", "shell"]  # from the top

    def shows(title: str, *words: str) -> str:
        text = ""

        def there() -> bool:
            nonlocal text
            text = tmux("capture-pane", "-p", "-J", "-t", panes[title][0])
            return all(word in text for word in words)

        until(there, lambda: f"no {words} in {title}:\n{text}")
        return text

    shows("figures", HOSTILE, "5/5", "1.2500", "999")
    assert "rank 1" not in shows("rank 0", stamped("rank-0 attempt 0 of rank 0"))
    assert "attempt 0" not in shows(
        "warnings of all ranks", stamped("rank-1 straggler: rank 1 is slow")
    )
    tmux("send-keys", "-t", panes["shell"][0], "pwd; echo $((6 * 7))", "Enter")
    shows("shell", f"{tmp_path}\n42")
    tmux("kill-server")
    until(
        lambda: not any(in_session(pid) for _, pid in panes.values()),
        lambda: str([in_session(pid) for _, pid in panes.values()]),
    )


def test_the_session_of_a_job_that_waits(
    tmux: Callable[..., str], tmp_path: Path, env: dict[str, str]
) -> None:
    log = tmp_path / "log.out"
    queue = env | fake_scontrol(tmp_path, log)

    def call() -> str:
        done = subprocess.run(
            ["bash", TMUX, "7", "--detached"],
            env=queue,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def figures() -> str:
        return tmux("capture-pane", "-p", "-t", "=kempner-job-7:.{top}")

    assert "kempner-job-7 is made" in call()
    until(lambda: figures() == "job 7 has no run directory yet", figures)
    begin_attempt(tmp_path / "run", 0, 0)
    (tmp_path / "run/status.json").write_text('{"state": "stopped", "step": 5}')
    log.write_text(f"[16:13:09] kempner: run directory {tmp_path / 'run'}\n")
    until(lambda: "stopped" in figures(), figures)
    assert "kempner-job-7 already exists" in call()


def test_a_terminal_is_attached_to_the_session(
    tmux: Callable[..., str], tmp_path: Path, env: dict[str, str]
) -> None:
    """In a terminal that is itself a pane: from outside tmux it attaches, inside it switches."""
    for run in ("one", "two"):
        begin_attempt(tmp_path / run, 0, 0)
    tmux("new-session", "-d", "-x", "160", "-y", "45", "-s", "user", "bash", "--norc")
    here = tmux("list-panes", "-t", "=user:", "-F", "#{pane_id}")

    def attached() -> list[str]:
        clients = tmux("list-clients", "-F", "#{session_name}").splitlines()
        return sorted(clients)

    def type_in(pane: str, command: str) -> None:
        tmux("send-keys", "-t", pane, f"cd {tmp_path}; {command}", "Enter")

    type_in(here, f"env -u TMUX TERM=screen bash {TMUX} one")
    until(lambda: attached() == ["kempner-one"], lambda: str(attached()))
    shell = tmux("list-panes", "-t", "=kempner-one:", "-f", "#{pane_active}", "-F", "#{pane_id}")
    type_in(shell, f"bash {TMUX} two")
    until(lambda: attached() == ["kempner-two"], lambda: str(attached()))


def test_without_tmux(tmp_path: Path, env: dict[str, str]) -> None:
    begin_attempt(tmp_path / "run", 0, 0)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname"):
        (tools / name).symlink_to(str(shutil.which(name)))
    done = subprocess.run(
        ["bash", TMUX, "run"],
        env={**env, "PATH": str(tools)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "kempner: error: no tmux here: install it or load its module; "
        "without it: bash scripts/slurm/logs.sh run\n"
    )


def test_the_parts_of_reinforcement_learning(
    tmux: Callable[..., str], tmp_path: Path, env: dict[str, str]
) -> None:
    """rl.sh links their logs beside those of the ranks."""
    run = tmp_path / "rewards"
    begin_attempt(run, 0, 0)
    (run / "logs/rl-7.0.1").mkdir()
    for name in ("orchestrator", "engine-0", "engine-1"):
        write(run / f"logs/rl-7.0.1/{name}.log", f"I am {name}")
        (run / f"logs/attempt-0/{name}.log").symlink_to(f"../rl-7.0.1/{name}.log")
    (run / "logs/attempt-0/trainer-0.log").symlink_to("rank-0.log")

    def said(*words: str) -> set[str]:
        command = ["bash", str(LOGS), "rewards", "--no-follow", *words]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
        return {line.partition(" ")[0] for line in done.stdout.splitlines()} or {done.stderr}

    assert said() == {"rank-0", "orchestrator", "engine-0", "engine-1"}
    assert said("--part", "engine-1") == {"engine-1"}
    assert said("--part=trainer-0") == {"trainer-0"}
    assert "must be trainer-0, orchestrator or engine-K" in said("--part", "all").pop()
    assert "give --rank or --part" in said("--part", "engine-1", "--rank=0").pop()
    subprocess.run(["bash", TMUX, "rewards", "--detached"], env=env, cwd=tmp_path, check=True)
    panes = tmux("list-panes", "-s", "-t", "=kempner-rewards", "-F", "#{pane_title}")
    assert panes.splitlines() == [
        "figures", "rank 0", "orchestrator", "engine-0", "warnings of all ranks", "shell",
    ]  # fmt: skip
