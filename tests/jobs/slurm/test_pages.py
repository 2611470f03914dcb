"""The commands of README.md and docs/, typed as they stand there in a copy of the repository.

`make test` types those that take seconds and need no cluster; `make soak` types all of them.
`python -m tests.pages` counts them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster, boot
from tests.conftest import ROOT, clean_env
from tests.pages import ACTIVATE, PAGES, STAND_INS, Block, blocks, stand_ins

DEBUG = "configs/train/debug.toml"  # small as it is
NEED_PYTHON = re.compile(r"^(\w+=\S+ )*(sudo )?(python|torchrun|pip|tensorboard|wandb) ", re.M)
DRY = re.compile(r"sbatch [^\n]*scripts/slurm/(multinode|singlenode|replicas|rl|run|serve)\.sh")
JOB = re.compile(r"\b(sbatch|srun|submit\.sh|interactive\.sh)\b")
TRAINS = re.compile(r"(train|rl|generate)\.py|^bash scripts/slurm/(singlenode|rl|run)\.sh")
LOOKS = re.compile(r"--(check|help|build|dry-run)\b")
SLOW = {"small", "Ctrl-C", "JOBID", *(x for x in STAND_INS if re.match("runs/|models/", x))}
LARGEST = 4  # nodes of a job: with JOBID's node the test bed has five

# sbatch in front of a page's commands: the same job, as the dry run of its script.
DRY_RUN = """#!/bin/bash
options=()
while [[ $1 == -* ]]; do options+=("$1"); shift; done
exec bash "$1" --dry-run "${options[@]}" "${@:2}"
"""
# The same job on at most so many nodes, waited for, unless it goes on for ever.
REAL = """#!/bin/bash
words=()
while [[ ${1-} == -* ]]; do
    word=$1
    [[ ! $word =~ ^--nodes=([0-9]+)$ || ${BASH_REMATCH[1]} -le LARGEST ]] || word=--nodes=LARGEST
    [[ ! $word =~ ^--gpus-per-node=[3-9] ]] || word=--gpus-per-node=2
    [[ $word != --nodes=* || $* != *serve.sh* ]] || word=--nodes=1 # it goes on
    words+=("$word")
    shift
done
[[ -n ${KEMPNER_CHAIN_LINK:-} || ${1-} != *.sh || $1 == *serve.sh ]] || words+=(--wait)
exec SBATCH "${words[@]}" "$@"
"""
# What a small configuration has in place of its own.
SMALL = """base = "{base}"
[train]
max_steps = 4
seq_len = {length}
global_batch = 48
global_batch_tokens = "none"
micro_batch = 1
dtype = "fp32"
compile = false
[checkpoint]
interval = 0
[eval]
interval = 0
[distributed]
device = "cpu"
[schedule]
warmup_steps = 0
[metrics]
log_interval = 1
[bench]
steps = 2
warmup = 1
"""
SMALL_MODEL = """[model]
dim = 64
n_layers = 4
n_heads = 8
n_kv_heads = 8
ffn_dim = 96
"""


class Reader:
    """Somebody who types what the pages print, in a copy of the repository."""

    def __init__(self, home: Path, cluster: Cluster | None = None) -> None:
        self.home, self.cluster = home, cluster
        self.ended: set[str] = set()  # jobs of earlier blocks
        self.counts, self.began = Counter[str](), time.monotonic()
        self.root = home / "kempner"
        copy_repository(self.root)
        self.here = {
            "PYTHONPATH": str(self.root / "src"),
            "KEMPNER_SITE": os.devnull,
            "TMUX_TMPDIR": str(home),
            "USER": "root",
        }
        self.without = self.environment("without", DRY_RUN, SBATCH_GPUS_PER_NODE="8")
        self.within = self.env = self.without
        if cluster:
            sbatch = REAL.replace("LARGEST", str(LARGEST))
            sbatch = sbatch.replace("SBATCH ", f"{shutil.which('sbatch')} ")
            known = {name: cluster.env[name] for name in ("SLURM_CONF", "KEMPNER_TESTBED")}
            self.within = self.environment("within", sbatch, SBATCH_GPUS_PER_NODE="1", **known)

    def environment(self, name: str, sbatch: str, **more: str) -> dict[str, str]:
        """With this sbatch first in PATH."""
        commands = self.home / name
        commands.mkdir()
        (commands / "sbatch").write_text(sbatch)
        (commands / "sbatch").chmod(0o755)
        return clean_env(PATH=f"{commands}:{os.environ['PATH']}", **self.here, **more)

    def type(self, block: Block) -> None:
        """Type a block; every command has to succeed."""
        self.counts[block.how] += len(block.commands)
        if block.not_typed:
            return
        if block.typed_by:
            test = (ROOT / block.typed_by).read_text()
            assert Path(block.page).name in test, f"{block.where}: {block.typed_by} does not"
            return
        self.env = self.within if "cluster" in block.needs else self.without
        for name in stand_ins(block.needs):
            self.stand_in(name)
        with contextlib.ExitStack() as after:
            text = block.text
            configs = sorted({*re.findall(r"configs/\S+\.toml", text)} - {DEBUG})
            small = "small" in block.needs or (self.cluster and "cluster" in block.needs)
            runs = {f"runs/{Path(name).stem}" for name in configs}
            after.callback(self.put_back, self.set_aside(runs - {*(() if small else block.needs)}))
            if small:
                after.callback(self.grow, self.shrink(configs))
                text = re.sub(r"--train.max_steps=\d+", "--train.max_steps=4", text)
            if self.cluster and "cluster" in block.needs:
                after.callback(self.end_jobs, block)
            if "JOBID" in block.needs:
                text = re.sub(r"\bJOB(ID)?\b", self.submit(), text)
            text = text.replace("CONFIG", DEBUG)
            text = text.replace("/local/$USER", str(self.home / "local"))
            if "fake:" in block.needs:
                text = f"{text.rstrip()} --data.dataset_path=fake:"
            if "time" in block.needs:
                self.look(block)
            elif "Ctrl-C" in block.needs:
                self.interrupt(block, text)
            elif block.shown:
                self.compare(block)
            else:
                self.run(text, block.where)

    def stand_in(self, name: str) -> None:
        if (self.root / name.replace("@", "/checkpoints/step_0000")).exists():
            return
        if "@" in name:  # another page has trained a run of that name
            shutil.rmtree(self.root / name.partition("@")[0], ignore_errors=True)
        self.run(STAND_INS[name], f"the stand-in {name}")

    def run(self, text: str, where: str, code: int = 0, limit: float = 550) -> str:
        """Type some bash with the environment active; returns what it prints."""
        process = subprocess.Popen(
            ["bash", "-ec", f"{ACTIVATE}\n{text}"], cwd=self.root, env=self.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit)
        except BaseException:  # what it has started would go on
            os.killpg(process.pid, signal.SIGKILL)
            raise
        logs = "".join(path.read_text()[-3000:] for path in self.root.glob("*.out"))
        # On a busy machine preflight may find a slow node, which it then reports as it should.
        fine = process.returncode == code or "\nexclude: node" in output
        assert fine, f"{where}: {process.returncode}\n{text}\n{output}{logs}"
        for path in self.root.glob("*.out"):
            path.unlink()
        return output

    def look(self, block: Block) -> None:
        """Commands that take hours: are their options there?"""
        for command in block.commands:
            if target := re.search(r"\bmake ([\w-]+)", command):  # make -n would follow $(MAKE)
                phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
                assert phony and target[1] in phony[1].split(), f"{block.where}: {command}"
                continue
            program = re.match(
                r"(?:sudo )?(python -m \S+(?: [a-z]\w*)*|(?:python|bash) scripts/\S+)(.*)", command
            )
            assert program, f"{block.where}: {command}: what is it?"
            shown = self.run(f"{program[1]} --help", block.where)
            for option in re.findall(r" (--[\w-]+)", program[2]):
                assert option in shown, f"{block.where}: {option} is not in {shown}"

    def interrupt(self, block: Block, text: str) -> None:
        """Commands that may go on for ever, each for a few seconds, in a terminal; one block where
        they belong together."""
        together = "\ndone" in text
        for command in [text] if together else Block(block.page, 0, text).commands:
            limit, line = (40, f"{command}wait") if together else (6, command)
            shell = f"script --quiet --return --command {shlex.quote(line)} /dev/null"
            shell = f"timeout --kill-after=20 --signal=INT {limit} {shell} </dev/null"
            process = subprocess.Popen(
                ["bash", "-c", f"{ACTIVATE}\n{shell}"], cwd=self.root, env=self.env, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            out, _ = process.communicate(timeout=120)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            fine = {0, 124, 130, 137} | ({1} if "status.sh" in command else set())
            assert process.returncode in fine, f"{block.where}: {command}\n{out}"
            assert "Traceback" not in out and "error:" not in out, (
                f"{block.where}: {command}\n{out}"
            )

    def compare(self, block: Block) -> None:
        """A command whose answer the page prints."""
        code = 2 if "error:" in block.shown else 0
        shown = self.run(block.text, block.where, code).replace(str(self.root), "/home/me/kempner")
        for line in block.shown.splitlines():
            assert line in shown, f"{block.where}: {line!r} is not in:\n{shown}"

    def shrink(self, configs: list[str]) -> list[Path]:
        """Make the configurations of some commands small; returns their files."""
        files = [self.root / name for name in configs]
        for file in files:
            whole = file.read_text()
            file.rename(file.with_suffix(".whole"))
            if "sweeps" in file.parts:
                file.write_text(whole.replace("max_steps = 60", "max_steps = 2"))
                continue
            base = file.with_name(f"whole-{file.name}")
            base.write_text(whole)
            chat = "sft" in file.name or "dpo" in file.name
            small = SMALL.format(base=base.name, length=256 if chat else 32)
            if "rl" in file.parts:
                small = f'base = "{base.name}"\n[train]\nmax_steps = 2\n[bench]\nsteps = 2\n'
            elif not chat:
                small += SMALL_MODEL
            if "lowcomm" in file.parts:
                small += "[lowcomm]\ninterval = 4\n"
            file.write_text(small)
        return files

    def grow(self, files: list[Path]) -> None:
        for file in files:
            file.with_suffix(".whole").replace(file)

    def set_aside(self, runs: set[str]) -> list[Path]:
        """Runs of other sizes, until the block has been typed; returns where they are then."""
        found = [self.root / name for name in runs if (self.root / name).exists()]
        return [run.rename(self.home / run.name) for run in found]

    def put_back(self, aside: list[Path]) -> None:
        for run in aside:
            shutil.rmtree(self.root / "runs" / run.name, ignore_errors=True)
            run.rename(self.root / "runs" / run.name)

    def clear(self) -> None:
        """Remove the runs of other pages: status.sh would tell of those that were ended."""
        known = {name.partition("@")[0] for name in STAND_INS}
        for run in self.root.glob("runs/*/"):
            if f"runs/{run.name}" not in known:
                shutil.rmtree(run, ignore_errors=True)  # its job may still be ending

    def submit(self) -> str:
        """A job that waits, on one node, and has a batch log."""
        text = f"sbatch --parsable --nodes=1 --output={self.home}/job.log --wrap='sleep infinity'"
        job = self.run(text, "JOBID").strip()
        assert self.cluster
        while self.cluster.state(job) != "RUNNING":
            time.sleep(0.2)
        return job

    def end_jobs(self, block: Block) -> None:
        """No job of the block may have failed; those that still run are ended."""
        assert self.cluster
        found = self.cluster.ask("squeue", "--states=all", "--noheader", "--format=%i %T %j")
        new = {*found.splitlines()} - self.ended
        bad = [
            x
            for x in new
            if re.search(r" (FAILED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY) (?!preflight$)", x)
        ]
        self.cluster.run("scancel", "--user=root")
        self.ended |= new
        assert not bad, f"{block.where}: {bad}"


def copy_repository(to: Path) -> None:
    """The files of this repository as they are now, and an environment that is this one."""
    listed = ["git", "-c", "safe.directory=*", "ls-files", "-coz", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in names.split("\0"):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    prefix = Path(sys.prefix)
    (to / ".venv/bin").mkdir(parents=True)
    for path in [*prefix.iterdir(), *(prefix / "bin").iterdir()]:
        new = to / ".venv" / path.relative_to(prefix)
        if not new.exists() and path.name not in ("train", "dev", "activate"):
            new.symlink_to(path)
    activate = (prefix / "bin/activate").read_text()
    (to / ".venv/bin/activate").write_text(activate.replace(str(prefix), str(to / ".venv")))
    for name in ("train", "dev"):  # what make installs is installed
        (to / ".venv" / name).touch()
    if (data := ROOT / "data/stdlib").exists():
        shutil.copytree(data, to / "data/stdlib")


@contextlib.contextmanager
def counting(reader: Reader, request: pytest.FixtureRequest) -> Iterator[Reader]:
    """Prints at the end how many commands were typed, and how."""
    try:
        yield reader
    finally:
        subprocess.run(["tmux", "kill-server"], env=reader.without, capture_output=True)
    capture = request.config.pluginmanager.getplugin("capturemanager")
    assert capture
    with capture.global_and_fixture_disabled():
        counts = ", ".join(f"{n} {how}" for how, n in reader.counts.most_common())
        print(f"\ncommands of the pages: {counts}; {time.monotonic() - reader.began:.0f} s")


@pytest.fixture(scope="module")
def reader(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Reader]:
    with counting(Reader(tmp_path_factory.mktemp("reader")), request) as reader:
        yield reader


@pytest.fixture(scope="module")
def reader_on_a_cluster(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Reader]:
    with boot(LARGEST + 1, 2, tmp_path_factory) as cluster:
        made = Reader(tmp_path_factory.mktemp("reader"), cluster)
        with counting(made, request) as reader:
            yield reader


def quick(block: Block) -> bool:
    """Is it typed every day? All that neither trains nor needs a cluster."""
    if block.typed_by or block.not_typed:
        return True
    needs = {*block.needs}
    if needs & SLOW or ("time" in needs and "python" in block.text):
        return False
    jobs = [x for x in block.commands if JOB.search(x) or "cluster" in needs]
    trains = any(TRAINS.search(x) and not LOOKS.search(x) for x in block.commands)
    return not trains and all(DRY.search(job) for job in jobs)


@pytest.mark.parametrize("page", PAGES)
def test_page(reader: Reader, page: str) -> None:
    for block in blocks(page):
        if quick(block):
            reader.type(block)


@pytest.mark.soak
@pytest.mark.as_root("the reader of the pages is root")
@pytest.mark.parametrize("page", PAGES)
def test_page_on_a_cluster(reader_on_a_cluster: Reader, page: str) -> None:
    reader_on_a_cluster.clear()
    for block in blocks(page):
        reader_on_a_cluster.type(block)


def test_pages_say_where_to_type() -> None:
    """Once, before the first command: how the environment is made active."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        found = [block for block in blocks(page) if not block.not_typed]
        if page == "README.md":  # `make train` makes the environment
            found = [block for block in found if NEED_PYTHON.search(block.text)]
        if found and page != "CONTRIBUTING.md":
            first = text.index(found[0].commands[0].split("\n")[0][:40])
            assert text.count(ACTIVATE) == 1, f"{page}: say '{ACTIVATE}' once"
            said = text.index(ACTIVATE) < first or ACTIVATE in found[0].text
            assert said, f"{page}: say '{ACTIVATE}' before its first command"
