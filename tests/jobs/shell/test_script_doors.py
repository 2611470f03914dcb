"""The launch scripts as somebody meets them who mistypes: --help, wrong words, wrong files, Ctrl-C,
readers that leave. Slurm's commands are shims that note what they are asked."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cluster import ROOT, SCRIPTS
from tests.trainer.distributed.test_bad_input import without_privileges
from tests.waiting import LIMIT_S

TAIL = "\n# --- the kit, where it is not beside this file"
SLURM = ("sbatch", "scontrol", "squeue", "srun", "scancel", "salloc", "sinfo", "sacct")
DEBUG = ROOT / "configs/train/debug.toml"
FAKE = [str(DEBUG), "--data.dataset_path=fake:"]
DRY = [*FAKE, "--dry-run"]
# One line of an error, whoever says it: the scripts, testbed.sh, scripts/status.py and argparse.
ERROR = re.compile(
    r"^(kempner: error|testbed|status: error|status\.py: error|drill: error): ", re.M
)
DONE = '{"state": "done", "step": 5, "max_steps": 5}'
TRACE = re.compile(r"Traceback|\.(sh|env): line \d+:|: command not found|unbound variable")


@dataclass
class Bench:
    """A place with a PATH in which all is there but Slurm's commands; `asked` says what those were
    asked."""

    path: Path  # in which the scripts run
    tools: Path
    env: dict[str, str] = field(default_factory=dict)

    def start(self, script: str, *words: object, **env: str) -> subprocess.Popen[str]:
        slurm = env.pop("SLURM", str(self.tools / "slurm"))
        return subprocess.Popen(
            ["bash", str(SCRIPTS / script), *map(str, words)],
            env={**self.env, "PATH": f"{slurm}:{self.tools}", **env},
            cwd=self.path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str, *words: object, **env: str) -> tuple[int, str, str]:
        process = self.start(script, *words, **env)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def refused(self, script: str, *words: object, **env: str) -> str:
        """Its one error; nothing is started, nothing is left."""
        before = everything(self.path)
        code, out, err = self.run(script, *words, **env)
        assert code == 2, f"{code}\n{out}\n{err}"
        assert len(ERROR.findall(err)) == 1 and not TRACE.search(out + err), err
        assert everything(self.path) == before
        assert not (self.tools / "asked-sbatch").exists()
        return err


def everything(folder: Path) -> dict[str, int]:
    return {str(file): file.lstat().st_mtime_ns for file in folder.rglob("*")}


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to this machine's commands, without Slurm's; shims of those in slurm/."""
    folder = tmp_path_factory.mktemp("tools")
    for place in ("/bin", "/usr/bin"):
        for file in Path(place).iterdir():
            if file.name not in SLURM and not (folder / file.name).is_symlink():
                (folder / file.name).symlink_to(file)
    (folder / "slurm").mkdir()
    for name in SLURM:
        shim = folder / "slurm" / name
        shim.write_text(f'#!/bin/sh\necho "$@" >>{folder}/asked-{name}\nexit 1\n')
        shim.chmod(0o755)
    return folder


@pytest.fixture
def bench(tools: Path, tmp_path: Path) -> Bench:
    (tools / "asked-sbatch").unlink(missing_ok=True)
    work = tmp_path / "work"
    work.mkdir()
    env = {"HOME": str(tmp_path), "KEMPNER_SITE": os.devnull, "KEMPNER_PYTHON": sys.executable}
    return Bench(work, tools, {**env, "LC_ALL": "C.UTF-8", "KEMPNER_TESTBED": "250"})


# --- --help -------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.sh")))
def test_help_is_the_header_of_the_script(bench: Bench, script: str) -> None:
    """Before any check: without Slurm, without Python, with a broken site.env."""
    (bench.path / "site.env").write_text("if\n")
    env = {"SLURM": "", "KEMPNER_PYTHON": "/nowhere", "KEMPNER_SITE": "./site.env"}
    comment = itertools.takewhile(
        lambda line: line == "#" or line.startswith("# "),
        (SCRIPTS / script).read_text().splitlines()[1:],
    )
    header = [line[2:] for line in comment]
    ways = [["--help"], ["-h"]] + [["CONFIG", "--help"]] * (script != "testbed.sh")
    for words in ways:
        assert bench.run(script, *words, **env) == (0, "\n".join(header) + "\n", ""), words
    assert any(f"scripts/slurm/{script}" in line for line in header)


def test_the_help_of_a_program_is_its_own(bench: Bench) -> None:
    """What comes after run.sh's "--" is the program's."""
    words = ["--run-dir", "--", sys.executable, "--help"]
    assert "--run-dir" in bench.refused("run.sh", *words)


# --- wrong words --------------------------------------------------------------------------------

# script: words, what the error says; a third one: variables
WORDS: list[tuple[str, list[object], str, dict[str, str]]] = [
    ("multinode.sh", [], "no configuration given", {}),
    ("multinode.sh", [DEBUG, "--dryrun", "--nodes=2"], "did you mean --dry-run?", {}),
    ("multinode.sh", [DEBUG, "--dry_run"], "did you mean --dry-run?", {}),
    ("multinode.sh", [DEBUG, "--nodes=2"], "is an option of sbatch: put it before the script", {}),
    ("multinode.sh", [DEBUG, "--export=ALL"], "is an option of sbatch: put it before", {}),
    ("multinode.sh", [DEBUG, "--output=x"], "is an option of sbatch: put it before", {}),
    ("multinode.sh", [*DRY, "--gpu-per-node=2"], "did you mean --gpus-per-node?", {}),
    ("multinode.sh", [*DRY, "--partion=gpu"], "did you mean --partition?", {}),
    ("multinode.sh", [*DRY, "--zzz"], "--zzz: sbatch has no such option; sbatch --help", {}),
    ("multinode.sh", [*DRY, "-z"], "-z: sbatch has no such option", {}),
    ("multinode.sh", [*DRY, "--nodes=two"], "must be a number of nodes, such as 4", {}),
    ("multinode.sh", [*DRY, "--nodes", "2"], "write --nodes=VALUE as one word", {}),
    ("multinode.sh", [*DRY, "-N0"], "--nodes=0: must be a number of nodes", {}),
    ("multinode.sh", [*DRY, "--time=abc"], "must be minutes, HOURS:MINUTES:SECONDS", {}),
    ("multinode.sh", [*DRY, "--gpus=3", "--nodes=2"], "give --gpus-per-node=N instead", {}),
    ("multinode.sh", [*DRY, "--script"], "write --script=FILE", {}),
    ("multinode.sh", ["@/nope"], "@/nope cannot be read: name a file", {}),
    ("multinode.sh", [DEBUG, "--submit"], "no sbatch here", {"SLURM": ""}),
    ("multinode.sh", [DEBUG], "scontrol knows no job 77", {"SLURM_JOB_ID": "77"}),
    ("multinode.sh", [DEBUG], "no Python at '/nope'", {"KEMPNER_PYTHON": "/nope"}),
    ("multinode.sh", [DEBUG], "lacks torch", {"KEMPNER_PYTHON": "/usr/bin/python3"}),
    ("multinode.sh", [DEBUG], "must be a whole number from 1", {"KEMPNER_MAX_CRASHES": "0"}),
    ("singlenode.sh", [DEBUG, "--dryrun"], "did you mean --dry-run?", {}),
    ("singlenode.sh", [*DRY, "--nodes=2"], "give --nodes=1, or submit multinode.sh", {}),
    ("replicas.sh", FAKE, "replicas.sh runs in a job: sbatch scripts/slurm/replicas.sh", {}),
    ("interactive.sh", [], "usage: bash scripts/slurm/interactive.sh JOBID CONFIG", {}),
    ("interactive.sh", ["abc", DEBUG], "'abc' is not the number of a job", {}),
    ("interactive.sh", ["7", DEBUG], "no job '7': squeue --me lists yours", {}),
    ("interactive.sh", ["7", DEBUG], "no sbatch here: this needs Slurm's", {"SLURM": ""}),
    ("submit.sh", [], "no word names no launch script", {}),
    ("submit.sh", [ROOT / "README.md"], "README.md names no launch script: give one", {}),
    ("submit.sh", ["--nodes=2", DEBUG], "names no launch script: give one of the kit's", {}),
    ("submit.sh", [SCRIPTS / "multinode.sh"], "no configuration given: name one after", {}),
    ("submit.sh", [SCRIPTS / "status.sh"], "status.sh is not a job: give a launch script", {}),
    ("submit.sh", [SCRIPTS / "eval.sh"], f"without a copy: sbatch {SCRIPTS / 'eval.sh'}", {}),
    ("submit.sh", ["--dryrun", SCRIPTS / "multinode.sh", DEBUG], "mean --dry-run?", {}),
    ("submit.sh", [SCRIPTS / "multinode.sh", *FAKE], "no sbatch here", {"SLURM": ""}),
    ("submit.sh", [SCRIPTS / "run.sh", "--", "true"], "give --code=DIR", {}),
    ("submit.sh", ["--refresh"], "usage: submit.sh --refresh JOB", {}),
    ("submit.sh", ["--refresh", "x"], "'x' is not the number of a job", {}),
    ("submit.sh", ["--refresh", "99"], "no job '99'", {}),
    ("run.sh", [], "no command given: run.sh", {}),
    ("run.sh", ["--checkpoint=x", "--", "true"], "did you mean --checkpoints=GLOB?", {}),
    ("run.sh", ["--heartbeat=abc", "--", "true"], "must be a number of seconds >= 1", {}),
    ("run.sh", ["--dryrun", "--", "true"], "did you mean --dry-run?", {}),
    ("run.sh", ["--dry-run", "--gpu-per-node=2", "--", "true"], "mean --gpus-per-node?", {}),
    (
        "run.sh",
        ["--", sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "nope.py"],
        "no file 'nope.py' in",
        {},
    ),
    ("run.sh", ["--", "nowhere"], "no command 'nowhere' here: give its path, or load", {}),
    ("rl.sh", [], "no configuration given", {}),
    ("rl.sh", [ROOT / "configs/rl/arithmetic.toml", "--dryrun"], "did you mean --dry-run?", {}),
    ("pack.sh", ["abc", "a.toml"], "'abc' is not a number of runs: sbatch", {}),
    ("pack.sh", ["0", "a.toml"], "'0' is not a number of runs: sbatch", {}),
    ("pack.sh", ["2", "a", "b", "c"], "3 configuration(s) for 2 runs", {}),
    ("pack.sh", ["2", "@/nope"], "@/nope cannot be read: name a file", {}),
    ("pack.sh", ["2", DEBUG], "pack.sh runs in a job: sbatch scripts/slurm/pack.sh", {}),
    ("prepare.sh", ["corpus", "--out", "x"], "prepare.sh runs in a job: sbatch", {}),
    ("eval.sh", ["runs/nope"], "eval.sh runs in a job: sbatch scripts/slurm/eval.sh RUN", {}),
    ("serve.sh", [], "no model given: sbatch scripts/slurm/serve.sh MODEL", {}),
    ("serve.sh", ["--dry-run", "--bogus=1"], "no model given: sbatch scripts/slurm/serve.sh", {}),
    ("serve.sh", ["runs/nope"], "serve.sh runs in a job: sbatch", {}),
    ("serve.sh", ["runs/nope", "--dry-run", "--node=2"], "did you mean --nodes?", {}),
    ("preflight.sh", [], "checks the nodes of a job: sbatch --nodes=N", {}),
    ("drill.sh", ["runs"], "'runs' is not an option: write --NAME=VALUE as one word", {}),
    ("drill.sh", ["--minutes=0"], "--minutes=0: must be from 1 to 1440", {}),
    ("drill.sh", ["--minutes"], "--minutes: a value is missing", {}),
    ("drill.sh", ["--only=kil"], "no case 'kil'; choose from unbroken, kill,", {}),
    ("drill.sh", ["--only=own"], "--only=own: give your program after --", {}),
    ("drill.sh", ["--"], 'no command after "--"', {}),
    ("drill.sh", ["--time=5"], "--time=5: the drill sets this for each of its jobs", {}),
    ("drill.sh", ["--partion=gpu"], "did you mean --partition?", {}),
    ("drill.sh", ["--nodes=two"], "must be a number of nodes, such as 4", {}),
    ("drill.sh", [], "no sbatch here: this needs Slurm's", {"SLURM": ""}),
    ("drill.sh", [], "no Slurm controller answers here", {}),
    ("drill.sh", [], "already inside job 77", {"SLURM_JOB_ID": "77"}),
    ("ray.sh", [], "ray.sh runs in a job: sbatch --nodes=N", {}),
    ("ray.sh", ["python", "driver.py"], 'COMMAND="python driver.py" sbatch', {}),
    ("status.sh", [], "runs: no such directory; name a run", {}),
    ("status.sh", ["runs/nope"], "runs/nope: no such directory; name a run", {}),
    ("status.sh", [ROOT / "README.md"], "README.md: is a file; name a run", {}),
    ("status.sh", ["."], "no run in .; name a run", {}),
    ("status.sh", ["--jsn"], "unrecognized arguments: --jsn", {}),
    ("logs.sh", [], "usage: bash scripts/slurm/logs.sh RUN|JOBID", {}),
    ("logs.sh", ["runs/nope"], "no run directory 'runs/nope': give one (ls runs)", {}),
    ("logs.sh", [ROOT / "README.md"], "is a file: give the directory of a run", {}),
    ("logs.sh", ["/etc"], "is not a run directory, it has no logs/", {}),
    ("logs.sh", ["7"], "no run of job 7 in", {}),
    ("logs.sh", ["a", "b"], "give one run, not both 'a' and 'b'", {}),
    ("logs.sh", ["a", "--rank", "x"], "--rank x: must be the number of a rank", {}),
    ("logs.sh", ["a", "--rank=12345678901234567890"], "must be the number of a rank", {}),
    ("logs.sh", ["a", "--rank"], "--rank: a value is missing; usage", {}),
    ("logs.sh", ["a", "--part="], "--part: a value is missing; usage", {}),
    ("logs.sh", ["a", "--part=engine"], "must be trainer-0, orchestrator or engine-K", {}),
    ("logs.sh", ["a", "--follow"], "unknown option '--follow'; usage", {}),
    ("tmux.sh", [], "usage: bash scripts/slurm/tmux.sh RUN|JOBID", {}),
    ("tmux.sh", ["runs/nope", "--figures"], "no run directory 'runs/nope'", {}),
    ("tmux.sh", ["a", "--detach"], "unknown option '--detach'; usage", {}),
    ("testbed.sh", [], "no command '': give one of install, up,", {}),
    ("testbed.sh", ["upp"], "no command 'upp': give one of install, up,", {}),
    ("testbed.sh", ["up", "x"], "up [NODES 1..99] [GPUS PER NODE 0..99], not: up x", {}),
    ("testbed.sh", ["up", "2", "4", "6"], "up: unexpected argument '6'", {}),
    ("testbed.sh", ["down", "x"], "down: unexpected argument 'x'", {}),
    ("testbed.sh", ["crash", "node1"], "cluster 250 is not up: testbed.sh up", {}),
    (
        "testbed.sh",
        ["up"],
        "no part 'slwo': give hostile, or some of slow,noise,",
        {"KEMPNER_TESTBED_SITE": "home,slwo"},
    ),
    ("testbed.sh", ["away", "soon"], "away SECONDS: a number, not 'soon'", {}),
    ("testbed.sh", ["as", "alice"], "cluster 250 is not up: testbed.sh up", {}),
    ("testbed.sh", ["break", "node1", "eio"], "cluster 250 is not up: testbed.sh up", {}),
    ("testbed.sh", ["exec", "node1"], "exec NODE COMMAND: no command is given", {}),
    ("testbed.sh", ["status"], "must be a number from 1 to 250", {"KEMPNER_TESTBED": "a[1"}),
    ("testbed.sh", ["status"], "must be a number from 1 to 250", {"KEMPNER_TESTBED": "08"}),
]


@pytest.mark.parametrize(
    ("script", "words", "says", "env"),
    WORDS,
    ids=[" ".join([s, *(Path(str(w)).name for w in words)]) for s, words, *_ in WORDS],
)
def test_wrong_words(
    bench: Bench, script: str, words: list[object], says: str, env: dict[str, str]
) -> None:
    assert says in bench.refused(script, *words, **env)


def test_the_other_runs_are_shown(bench: Bench) -> None:
    (bench.path / "run").mkdir()
    (bench.path / "run/status.json").write_text(DONE)
    code, out, err = bench.run("status.sh", "nope", "run")
    assert code == 2 and "nope: no such directory" in err and "5/5" in out


def test_a_script_is_written_over_its_own_alone(bench: Bench) -> None:
    """Rendered again, also by way of a link; not over one that its user has changed."""
    job, link = bench.path / "job.sh", bench.path / "link.sh"
    link.symlink_to("job.sh")
    for name in ("job.sh", "job.sh", "link.sh"):
        code, out, err = bench.run("singlenode.sh", *DRY, f"--script={name}", SLURM="")
        assert code == 0 and f"written: {name}" in out, err
    assert link.is_symlink() and job.is_file()
    job.write_text(job.read_text().replace("set -euo pipefail", "set -euxo pipefail"))
    assert "was changed since" in bench.refused("singlenode.sh", *DRY, "--script=job.sh", SLURM="")
    (bench.path / "mine.sh").write_text("echo mine\n")
    assert "exists, and was not" in bench.refused(
        "singlenode.sh", *DRY, "--script=mine.sh", SLURM=""
    )
    assert "is a directory" in bench.refused("singlenode.sh", *DRY, "--script=.", SLURM="")


def test_a_run_that_cannot_be_read_is_named(bench: Bench) -> None:
    for name in ("read", "closed", "half"):
        (bench.path / name).mkdir()
        (bench.path / name / "status.json").write_text(DONE)
    (bench.path / "link").symlink_to("/nonexistent/run")
    (bench.path / "half/status.json").chmod(0)
    (bench.path / "closed").chmod(0)
    command = [*without_privileges(), sys.executable, ROOT / "scripts/status.py", "."]
    done = subprocess.run(command, cwd=bench.path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2 and re.search(r"^read +done", done.stdout, re.M), done
    told = done.stderr.splitlines()
    assert [line.split()[2] for line in told] == ["closed:", "half/status.json:", "link:"], told
    assert "cannot be read: Permission denied" in told[0] and "/nonexistent/run" in told[2]


# --- site.env and its like ----------------------------------------------------------------------

SITES = {
    "unterminated if": ("X=1\nif true; then\nY=2\n", "line 4: bash cannot parse it: syntax"),
    "lost quote": ('X=1\nY="lost\nZ=2\n', 'line 2: bash cannot parse it: unexpected EOF'),
    "lost end": ("X=1\ncat <<END\nY=lost\n", "bash cannot parse it: warning: here-document"),
    "blanks around =": ("X=1\nA = 5\n", "line 2: 'A = 5': write NAME=VALUE, without blanks around"),
    "no such command": ("X=1\nmodule load x\n", "line 2: 'module load x': there is no such"),
    "binary": ("X=1\n\0\0\n", "is a binary file: give a text file"),
    "exit": ("X=1\nexit 0\n", "line 2: 'exit 0': ends the script that reads the file: remove it"),
    "exit in a function": ("f() { exit 3; }\n\nf\n", "ends the script that reads the file"),
    "return 3": ("X=1\n[[ X == Y ]] ||\n  return 3\n", "line 3: 'return 3': skips the rest"),
    "Windows": ("X=1\r\nY=2\r\n", "line 1: ends with a carriage return, as Windows writes lines"),
    "byte order mark": ("\ufeffX=1\n", "line 1: begins with a byte order mark: remove it by: sed"),
}  # fmt: skip


@pytest.mark.parametrize("name", SITES)
def test_a_broken_settings_file_is_named_with_its_line(bench: Bench, name: str) -> None:
    """site.env, and the secrets, of which no word is shown."""
    text, says = SITES[name]
    file = bench.path / "my settings"
    file.write_text(text, newline="")
    file.chmod(0o600)
    said = bench.refused("status.sh", KEMPNER_SITE=str(file))
    assert f"{file}" in said and says in said
    said = bench.refused("status.sh", KEMPNER_SECRETS=str(file))
    assert f"{file}" in said and not (set(re.findall("[=' ]+(5|module|lost|exit 0)", said)))


def test_a_broken_profile(bench: Bench) -> None:
    (bench.path / "site.d").mkdir()
    (bench.path / "site.d/gpu.env").write_text("SBATCH_PARTITION=gpu\nA = 5\n")
    read = 'set -euo pipefail; source "$1"; KP_ROOT=$PWD KP_ORIGIN=$PWD; kp_read_site; echo read'
    done = subprocess.run(
        ["bash", "-c", read, "-", SCRIPTS / "lib/all.sh"],
        env={**bench.env, "PATH": str(bench.tools), "KEMPNER_SITE": "gpu"},
        cwd=bench.path, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "site.d/gpu.env, line 2: 'A = 5': write NAME=VALUE" in done.stderr


def test_settings_that_are_no_file(bench: Bench) -> None:
    (bench.path / "link").symlink_to("/nonexistent")
    for name, says in ((".", "is a directory"), ("./link", "cannot be read"), ("/nope", "correct")):
        assert says in bench.refused("status.sh", KEMPNER_SITE=name)
    assert "is a directory" in bench.refused("status.sh", KEMPNER_SECRETS="/etc")


def test_a_site_may_ask_what_is_there(bench: Bench) -> None:
    """Commands that return non-zero are allowed: only a lone one that fails is told."""
    (bench.path / "site.env").write_text(
        "[[ -d /nonexistent ]] && export A=1\nif ! grep -q x /dev/null; then export B=1; fi\n"
        "nvidia-smi-x 2>/dev/null || export C=1\nfalse\nD=$(nonexistent)\nexport E=1 F=$(false)\n"
        "f() { return 4; }; f || true\nmodule() { return 1; }\nmodule load x\n"
        "cd /\n[[ -n ${G:-} ]] || return\nexit 1\n"
    )
    run = bench.path / "run"
    run.mkdir()
    (run / "status.json").write_text(DONE)
    code, out, err = bench.run("status.sh", "run", KEMPNER_SITE="./site.env")
    assert code == 0 and "5/5" in out
    told = [line.split("site.env, ")[1] for line in err.splitlines()]
    assert told == [
        "line 4: 'false': ended with exit code 1",
        "line 5: 'D=$(nonexistent)': ended with exit code 127",
        "line 9: 'module load x': ended with exit code 1",
    ]


# --- Ctrl-C, and readers that leave ---------------------------------------------------------------


@pytest.mark.parametrize("after", [0.05, 0.3, 0.8])
@pytest.mark.parametrize("script", ["status.sh", "multinode.sh", "run.sh", "logs.sh"])
def test_ctrl_c_is_quiet(bench: Bench, script: str, after: float) -> None:
    (bench.path / "run/logs").mkdir(parents=True)
    words: dict[str, list[object]] = {
        "status.sh": ["run"],
        "multinode.sh": DRY,
        "run.sh": ["--run-dir=prog", "--", "sleep", "300"],
        "logs.sh": ["run"],
    }
    process = bench.start(script, *words[script])
    time.sleep(after)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=150)
    assert process.returncode in (0, 130, -signal.SIGINT, 2) and not TRACE.search(out + err), err
    status = bench.path / "prog/status.json"
    assert not status.exists() or '"running"' not in status.read_text()


def test_logs_are_not_read_byte_by_byte(bench: Bench) -> None:
    """A progress bar may have written one line of many MB."""
    (bench.path / "run/logs/attempt-0").mkdir(parents=True)
    (bench.path / "run/logs/latest").symlink_to("attempt-0")
    (bench.path / "run/logs/attempt-0/rank-0.log").write_text(f"{9999 * 'a bar'}\nthe end\n")
    process = bench.start("logs.sh", "run")
    assert process.stdout
    try:
        while (line := process.stdout.readline()) != "rank-0 the end\n":
            assert line, "logs.sh has ended"
        reads = [n for pid in Path("/proc").glob("[0-9]*") for n in reads_of(pid, process)]
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=LIMIT_S)
    assert len(reads) == 1 and reads[0] < 999, reads


def reads_of(pid: Path, leader: subprocess.Popen[str]) -> list[int]:
    """The calls of read() so far, if it is a sed of that session."""
    with contextlib.suppress(OSError):  # it may have ended
        if os.getsid(int(pid.name)) == leader.pid and (pid / "comm").read_text() == "sed\n":
            return [int(count) for count in re.findall(r"syscr: (\d+)", (pid / "io").read_text())]
    return []


@pytest.mark.parametrize("redirect", ["| head -n 1", ">&-", "<&-", "2>&-", ">&- 2>&- <&-"])
def test_readers_that_leave(bench: Bench, redirect: str) -> None:
    (bench.path / "run/logs/attempt-0").mkdir(parents=True)
    (bench.path / "run/logs/latest").symlink_to("attempt-0")
    (bench.path / "run/logs/attempt-0/rank-0.log").write_text(9999 * "a line\n")
    (bench.path / "run/status.json").write_text(DONE)
    commands = ["status.sh run", "logs.sh run --no-follow", "run.sh --help", "testbed.sh --help"]
    text = "\n".join(f"bash {SCRIPTS}/{command} {redirect}; echo $?" for command in commands)
    done = subprocess.run(
        ["bash", "-c", text],
        env={**bench.env, "PATH": f"{bench.tools}"},
        cwd=bench.path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    codes = [line for line in done.stdout.splitlines() if line.isdecimal()]
    assert codes == ["0"] * len(commands) and done.stderr == "", done.stdout + done.stderr


@pytest.mark.parametrize(
    "script", [p.name for p in sorted(SCRIPTS.glob("*.sh")) if TAIL in p.read_text()]
)
def test_a_copy_of_a_script_waits_for_slurms_answer(tmp_path: Path, script: str) -> None:
    """sbatch runs a copy; only Slurm knows whence. "Timed out" is no answer."""
    copy = tmp_path / "spool" / "slurm_script"
    copy.parent.mkdir()
    copy.write_text((SCRIPTS / script).read_text())
    for name, text in {
        "sleep": ":",
        "scontrol": f"""echo asked >>{tmp_path}/asked
            (($(wc -l <{tmp_path}/asked) > 2)) || {{
                echo "slurm_load_jobs error: Socket timed out on send/recv operation" >&2
                exit 1
            }}
            echo "JobId=7 JobName=x"
            echo "   Command={SCRIPTS / script} --help\"""",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", copy, "--help"],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=tmp_path,
    )
    assert done.returncode == 0 and "sbatch" in done.stdout, done.stderr
    assert (tmp_path / "asked").read_text().count("asked") == 3
    assert done.stderr.count("waiting for Slurm to say where job 7 comes from") == 2


def test_a_copy_that_is_in_no_job_does_not_wait(tmp_path: Path) -> None:
    """A number of a job that is over; the controller is away."""
    copy = tmp_path / "mine.sh"
    copy.write_text((SCRIPTS / "run.sh").read_text())
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    for root, code, text in (
        (str(ROOT), 0, "waiting for Slurm"),
        ("/nowhere", 2, "nor in '/nowhere': export KEMPNER_ROOT"),
    ):
        done = subprocess.run(
            ["bash", copy, "--help"],
            env=env | {"KEMPNER_ROOT": root},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            cwd=tmp_path,
        )
        assert (done.returncode, text in done.stderr) == (code, True), done.stderr


def test_a_kit_whose_path_has_a_colon_says_so(tmp_path: Path) -> None:
    """It would be two entries of PYTHONPATH."""
    (tmp_path / "kit:2").symlink_to(ROOT)
    done = subprocess.run(
        ["bash", tmp_path / "kit:2/scripts/slurm/status.sh"],
        env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 2 and "the kit's path has a colon" in done.stderr, done
