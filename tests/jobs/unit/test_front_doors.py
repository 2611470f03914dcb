"""Wrong input at every program's front door: exit code 2, one error that names what was given and
what to do, no traceback, and nothing on the disk is new, changed or gone."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY, clean_env, start_train
from tests.forks import Forks
from tests.trainer.unit.test_writer import small_disk
from tests.waiting import LIMIT_S

PROGRAMS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py") if path.stem != "first")
MODULES = (
    "kempner.jobs.check",
    "kempner.checkpoint.format.metadata",
    "kempner.data.prepare.stage",
    "kempner.extensions.lowcomm.judge",
    "kempner.jobs.preflight",
    "kempner.extensions.rl.engines.vllm_engine",
    "kempner.jobs.trackers",
    "kempner.jobs.records.judge",
    "kempner.jobs.report.loop_bench",
    "kempner.jobs.report.notify",
    "kempner.jobs.records.watch",
    "kempner.extensions.sweep.early_stop",
)
DEBUG = str(ROOT / "configs/train/debug.toml")
SWEEP = f'base = "{DEBUG}"\n[axes]\ntrain.seed = [1, 2]\n'
ERROR = re.compile(r"^\w+: error: ", re.MULTILINE)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as started:
        yield started


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, data_dir: Path, forks: Forks) -> Path:
    """A directory with what users have lying about: a run, data, a model; and damaged ones."""
    here = tmp_path_factory.mktemp("world")
    shutil.copytree(data_dir, here / "data/own")
    words = [*TINY, f"--data.dataset_path={here}/data/own", f"--run.dir={here}/runs/debug"]
    process = start_train(*words, "--train.max_steps=5", "--checkpoint.interval=2")
    assert process.communicate(timeout=120) and process.returncode == 0
    assert forks.run("convert", "export", "runs/debug", "models/debug", cwd=here).code == 0

    damage(here)
    (here / "x.toml").symlink_to("/nonexistent/x.toml")
    for place in ("data", "runs"):
        (here / place / "link").symlink_to("/nonexistent/there")
    (here / "bom.toml").write_bytes(b"\xef\xbb\xbf[train]\nmax_steps = 5\n")
    (here / "utf16.toml").write_text("[train]\nmax_steps = 5\n", encoding="utf-16")
    (here / "pyproject.toml").write_text("[project]\n")
    (here / "README.md").write_text("# Mine\n")
    (here / "prompts.bin").write_bytes(b"\x00\xfa\xff")
    (here / "nothing.txt").touch()
    (here / "cat.png").write_bytes(b"\x89PNG of a cat")
    (here / "blank").mkdir()
    (here / "at-blank").symlink_to("blank")
    (here / "corpus").mkdir()
    (here / "corpus/a.txt").write_text("words\n" * 100)
    (here / "sweep.toml").write_text(SWEEP)
    (here / "wrong-sweep.toml").write_text(f'base = "{DEBUG}"\n[axis]\ntrain.seed = [1]\n')
    (here / "loop.toml").write_text('base = "loop.toml"\n')
    (here / "twice.toml").write_text("[train]\nmax_steps = 1\nmax_steps = 2\n")
    return here


def damage(here: Path) -> None:
    """Copies of what is whole, each with one fault."""
    cut = shutil.copytree(here / "data/own", here / "data/cut") / "train_00000.npy"
    os.truncate(cut, 999_872)
    sidecar = json.loads((here / "data/own/dataset.json").read_text())
    other = {"name": "bpe of 257 tokens", "kind": "tokenizer.json", "hash": "sha256:1a2b"}
    shutil.copytree(here / "data/own", here / "data/other")
    (here / "data/other/dataset.json").write_text(json.dumps({**sidecar, "tokenizer": other}))
    shutil.copytree(here / "data/own", here / "data/half/own")
    for name, split in sidecar["splits"].items():
        sidecar["splits"][name] = [{**split[0], "documents": 1}]
    (here / "data/half/own/dataset.json").write_text(json.dumps(sidecar))
    torn = shutil.copytree(here / "runs/debug", here / "runs/torn", symlinks=True)
    for path in (torn / "checkpoints").glob("step_*/manifest.json"):
        path.write_text("{")
    (here / "runs/fifo").mkdir()
    os.mkfifo(here / "runs/fifo/metrics.jsonl")
    (here / "runs/fifo/status.json").write_text("{}")
    os.mkfifo(here / "fifo.toml")
    (here / "nul.toml").write_text('[run]\ndir = "a\\u0000"\n')
    (here / "array.json").write_text('[\n  {"text": "a"}, {"text": "b"}\n]\n')
    (here / "runs/noise").mkdir()
    (here / "runs/noise/metrics.jsonl").write_bytes(bytes(range(128, 256)) * 8)
    (here / "runs/empty").mkdir()


def picture(world: Path) -> dict[str, tuple[int, ...]]:
    """What a start could change."""
    found = {}
    for folder, names, files in os.walk(world):
        for name in (*names, *files):
            path = os.path.join(folder, name)
            stat = os.lstat(path)
            size = 0 if name in names else stat.st_size
            found[path] = (stat.st_mode, size, 0 if name in names else stat.st_mtime_ns)
    return found


TRAIN = ("train", DEBUG, "--train.max_steps=9", "--run.dir=runs/new")
OWN = "--data.dataset_path=data/own"
SMALL = ("--model.dim=64", "--model.n_layers=2", "--model.ffn_dim=96", "--train.seq_len=32")
START = ("train", DEBUG, *SMALL, "--run.dir=runs/new")
RESUME = ("train", DEBUG, *SMALL, OWN, "--run.dir=runs/debug", "--train.max_steps=9")

# (the words of a program), and what its error must say.
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # train.py: files
    "a link to no file": (("train", "x.toml"), ("x.toml: is a broken link to /nonexistent/",)),
    "a byte order mark": (("train", "bom.toml"), ("bom.toml", "byte order mark", "without one")),
    "UTF-16": (("train", "utf16.toml"), ("utf16.toml", "save it as UTF-8")),
    "no such file": (("train", "mix.toml"), ("mix.toml: no such file", "has bom.toml, fifo.toml,")),
    "a directory": (("train", "corpus.toml/"), ("corpus.toml/",)),
    "a base of itself": (("train", "loop.toml"), ("cannot be its own base",)),
    "a key twice": (("train", "twice.toml"), ("twice.toml: not a TOML file", "overwrite")),
    "a run as a file": (("train", "runs/debug"), ("unexpected argument", "runs/debug/config.toml")),
    "an unknown flag": ((*TRAIN, OWN, "--chek"), ("did you mean --check?",)),
    "a FIFO": (("train", "fifo.toml", "--check"), ("fifo.toml: is not a regular file; name one",)),
    "a size without a check": (
        (*TRAIN, OWN, "--nodes=2", "--gpus-per-node=8"),
        ("--nodes: goes with --check or --build", "--gpus-per-node: goes with"),
    ),
    "a NUL": (
        ("train", "nul.toml", OWN, "--check"),
        (r'run.dir = "a\u0000": must be valid UTF-8',),
    ),
    "not a number": ((*TRAIN, OWN, "--optimizer.lr=nan"), ("must be a finite number",)),
    "too large": ((*TRAIN, OWN, "--optimizer.lr=1e400"), ("--optimizer.lr=1e400",)),
    "too many ranks": (
        (*TRAIN, OWN, *SMALL, "--check", "--nodes", "100000", "--gpus-per-node", "8"),
        ("cannot be shared by 800,000 ranks",),
    ),
    # train.py: data
    "no data": ((*TRAIN, "--data.dataset_path=data/gone"), ("data/gone: no such", "--kind chat")),
    "data: a link": ((*TRAIN, "--data.dataset_path=data/link"), ("a broken link to /",)),
    "data: a run": ((*TRAIN, "--data.dataset_path=runs/debug"), ("a run", "its data are", "/own")),
    "data: a file": ((*TRAIN, "--data.dataset_path=README.md"), ("README.md: is a file",)),
    "data: a model": ((*TRAIN, "--data.dataset_path=models/debug"), ("models/debug: is a model",)),
    "data: others'": ((*TRAIN, "--data.dataset_path=corpus"), ("corpus: no dataset.json in it",)),
    "data: cut off": (
        (*TRAIN, "--data.dataset_path=data/cut"),
        ("train_00000.npy: is cut off: 999,872 of ", "prepare the data again"),
    ),
    "text for chats": (
        (*TRAIN, OWN, "--data.kind=chat"),
        ("of the kind text", "--kind chat --tok"),
    ),
    # train.py: weights and directories
    "no weights": (
        (*START, OWN, "--model.init_from=runs/nope"),
        ("runs/nope: no such directory", "runs/debug"),
    ),
    "weights of no step": (
        (*START, OWN, "--model.init_from=runs/debug@abc"),
        ("abc is not a step", "runs/debug@250"),
    ),
    "another tokenizer": (
        (*START, "--data.dataset_path=data/other", "--model.init_from=runs/debug@4"),
        ("bpe of 257 tokens (sha256:1a2b)", "the weights bytes", "--tokenizer bytes"),
    ),
    "another tokenizer: an export": (
        (*START, "--data.dataset_path=data/other", "--model.init_from=models/debug"),
        ("bpe of 257 tokens (sha256:1a2b)", "the weights bytes", "--tokenizer bytes"),
    ),
    "another tokenizer: a fork": (
        (*START, "--data.dataset_path=data/other", "--run.fork=runs/debug"),
        ("run.fork = runs/debug: data/other: its tokenizer is bpe", "--tokenizer bytes"),
    ),
    "a fork of another size": (
        (*START, OWN, "--run.fork=runs/debug", "--model.dim=32"),
        ("run.fork = runs/debug", "model.dim is 64 there, 32 here"),
    ),
    "resumed: another length": (
        (*RESUME, "--train.seq_len=16"),
        ("does not fit this run: train.seq_len is 32 there, 16 here. Use", "--run.fork="),
    ),
    "resumed: other tokens": (
        (*RESUME, "--data.dataset_path=data/half/own"),
        ("data/half/own holds other tokens than", "data/own, on which it was trained"),
    ),
    "resumed: a phase that has passed": (
        (*RESUME, "--data.phases=[{start_step=2, weights=[1.0]}]"),
        ("would have begun before step 5",),
    ),
    "run.dir: a link": (
        ("train", DEBUG, OWN, "--run.dir=runs/link"),
        ("runs/link", "a broken link to /nonexistent/there"),
    ),
    "run.dir: a file": (
        ("train", DEBUG, OWN, "--run.dir=README.md"),
        ("run.dir = README.md", "give another"),
    ),
    # generate.py
    "generate: no run": (("generate", "runs/nope"), ("no such directory", "runs/debug")),
    "generate: no such step": (("generate", "runs/debug@3"), ("of step 3", "steps 4, 5")),
    "generate: damaged": (("generate", "runs/torn"), ("is damaged", "name an older one")),
    "generate: damaged, by its path": (
        ("generate", "runs/torn/checkpoints/step_00000005"),
        ("is damaged", "name an older one", "/runs/torn@STEP"),
    ),
    "generate: no checkpoint": (("generate", "runs/empty"), ("neither a model",)),
    "generate: data": (("generate", "data/own"), ("neither a model",)),
    "generate: no prompts": (
        ("generate", "runs/debug", "--prompts=gone"),
        ("--prompts gone: No s",),
    ),
    "generate: binary": (
        ("generate", "runs/debug", "--prompts=prompts.bin"),
        ("prompts.bin: is not",),
    ),
    "generate: empty": (
        ("generate", "runs/debug", "--prompts=nothing.txt"),
        ("one prompt per line",),
    ),
    "generate: closed": (
        ("generate", "runs/debug", "--prompts=/dev/stdin"),
        ("one prompt per line",),
    ),
    "generate: chat": (("generate", "runs/debug", "--chat", "--prompt=x"), ("chat",)),
    "generate: a value": (("generate", "runs/debug", "--top-k=0"), ("--top-k 0",)),
    "generate: an option": (("generate", "runs/debug", "--promt=x"), ("--promt",)),
    # convert.py
    "export: there already": (
        ("convert", "export", "runs/debug", "models/debug"),
        ("is a model; give another",),
    ),
    "export: no room": (("convert", "export", "runs/debug", "/proc/x"), ("/proc/x",)),
    "export: damaged": (("convert", "export", "runs/torn", "models/new"), ("is damaged",)),
    "export: a model": (
        ("convert", "export", "models/debug", "m"),
        ("already in Hugging Face format",),
    ),
    "import: a run": (("convert", "import", "runs/debug", "runs/new"), ("--model.init_from",)),
    "import: gone": (("convert", "import", "models/gone", "runs/new"), ("no such directory",)),
    "check: data": (("convert", "check", "data/own"), ("neither a model",)),
    "push: a run": (("convert", "push", "runs/debug", "a/b"), ("export it first",)),
    "push: no network": (("convert", "push", "models/debug", "me/debug"), ("me/debug", "network")),
    "convert: a command": (("convert", "exprt", "runs/debug", "x"), ("exprt",)),
    # prepare_data.py
    "prepare: a file as --out": (
        ("prepare_data", "corpus", "--out=README.md"),
        ("README.md", "file"),
    ),
    "prepare: an array": (
        ("prepare_data", "array.json", "--out=data/new"),
        ("array.json: is a JSON array; give a file with one object per line: jq -c '.[]'",),
    ),
    "prepare: twice": (
        ("prepare_data", "corpus", "--source=stdlib", "--out=data/new"),
        ("or --source stdlib, but not both",),
    ),
    "prepare: nothing to inspect": (("prepare_data", "inspect"), ("inspect: give a directory",)),
    "prepare: no input": (("prepare_data", "gone", "--out=data/new"), ("gone",)),
    "prepare: only empty": (
        ("prepare_data", "nothing.txt", "--out=data/new"),
        ("contains no text",),
    ),
    "prepare: not text": (("prepare_data", "cat.png", "--out=data/new"), ("cat.png", "not text")),
    "prepare: itself": (("prepare_data", "corpus", "--out=corpus"), ("also an input",)),
    "prepare: no tokenizer": (
        ("prepare_data", "corpus", "--out=data/new", "--tokenizer=gone"),
        ("--tokenizer gone",),
    ),
    "inspect: a run": (("prepare_data", "inspect", "runs/debug"), ("is a run", "its data are")),
    "inspect: a picture of data": (
        ("prepare_data", "inspect", "data/own", "--plot", "x.png"),
        ("--plot=x.png: the picture is of a run's mixture, and data/own is data; name a config",),
    ),
    "inspect: a directory for a picture": (
        ("prepare_data", "inspect", DEBUG, OWN, *SMALL, "--plot", "blank"),
        ("--plot = blank is an empty directory; remove it, or name another file",),
    ),
    "inspect: two": (("prepare_data", "inspect", "data/own", "runs"), ("runs: give a single DIR",)),
    "inspect: gone": (("prepare_data", "inspect", "data/gone"), ("data/gone",)),
    # serve.py, eval.py
    "serve: no run": (("serve", "runs/nope"), ("no such directory", "runs/debug")),
    "serve: no token": (
        ("serve", "runs/debug", "--token-file=gone"),
        ("--token-file gone: No such",),
    ),
    "serve: a port": (("serve", "runs/debug", "--port=x"), ("--port",)),
    "eval: no run": (("eval", "runs/7b", "--tasks=x"), ("no such directory", "runs/debug")),
    "eval: follow": (("eval", "runs/7b", "--tasks=x", "--follow"), ("runs/7b: no such directory",)),
    # plan.py, sweep.py
    "plan: a run": (("plan", "runs/debug"), ("unexpected argument", "runs/debug/config.toml")),
    "plan: a GPU": (("plan", DEBUG, "--gpu=H1000"), ("--gpu=H1000: is not known",)),
    "tune: a time": (
        ("tune", DEBUG, "--minutes=soon"),
        ("--minutes=soon: must be a number over 0",),
    ),
    "tune: what is allowed": (("tune", DEBUG, "--allow=fp4"), ("--allow=fp4: is not known; give",)),
    "tune: a run": (
        ("tune", DEBUG, "--run.dir=runs/debug"),
        ("runs/debug is a run; give one of its own",),
    ),
    "tune: a batch that does not fit": (
        ("tune", DEBUG, "--check", "--nodes=5", "--gpus-per-node=1"),
        ("16 sequences do not divide by 5 ranks", "--train.global_batch=15"),
    ),
    "sweep: gone": (("sweep", "gone.toml", "plan"), ("gone.toml",)),
    "sweep: a section": (("sweep", "wrong-sweep.toml", "plan"), ("axis",)),
    "sweep: a command": (("sweep", "sweep.toml", "plann"), ("did you mean plan?",)),
    # report.py, status.py
    "report: runs": (("report", "runs"), ("is a directory of runs", "--html", "runs/debug")),
    "report: a page without a name": (
        ("report", "runs/debug", "--html", "."),
        ("--html .: must end in .html; name the runs before --html",),
    ),
    "report: a file": (("report", "README.md"), ("README.md is a file",)),
    "report: a FIFO": (("report", "runs/fifo"), ("runs/fifo: no step is recorded yet",)),
    "report: a name for the terminal": (("report", "runs/\x1b[31m"), (r"runs/\x1b[31m: no such",)),
    "report: noise": (("report", "runs/noise"), ("no line has a step",)),
    "report: gone": (("report", "runs/gone"), ("runs/gone: no such directory",)),
    "report: full disk": (("report", "runs/debug", "--out=/proc/x.png"), ("/proc/x.png", "--out")),
    "report: a picture of yours": (
        ("report", "runs/debug", "--out=cat.png"),
        ("cat.png exists, and was not made by this program",),
    ),
    "report: a format": (("report", "runs/debug", "--out=x.jpeg"), ("must end in .png",)),
    "status: gone": (("status", "runs/gone"), ("runs/gone",)),
    # the others
    "audit: here": (("audit", "."), (".: is not a run that has started: it has no config.toml",)),
    "audit: no run": (("audit",), ("outside a job, name a run",)),
    "rl: no environment": (("rl", DEBUG, OWN), ("rl.env",)),
    "orchestrate: none either": (("orchestrate", DEBUG, OWN), ("rl.env",)),
    "program: no command": (("program", "--"), ("no command given",)),
    "program: not there": (("program", "--run-dir=runs/new", "--", "gone.sh"), ("gone.sh",)),
    "metadata: nothing": (
        ("-m", "kempner.checkpoint.format.metadata", "runs/gone"),
        ("is not there",),
    ),
    "metadata: a run": (
        ("-m", "kempner.checkpoint.format.metadata", "runs/debug"),
        ("is a run, not",),
    ),
    "metadata: no word": (("-m", "kempner.checkpoint.format.metadata"), ("CHECKPOINT",)),
    "trackers: data": (("-m", "kempner.jobs.trackers", "data/own"), ("no config.toml in it",)),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_input(forks: Forks, world: Path, case: str) -> None:
    words, expected = CASES[case]
    before = picture(world)
    done = forks.run(*words, cwd=world, stdin=None if case.endswith("closed") else "")
    assert done.code == 2, done
    assert len(ERROR.findall(done.err)) == 1 and "Traceback" not in done.err, done.err
    assert all(text in done.err for text in expected), done.err
    assert "[Errno" not in done.err, done
    assert done.out == "" or case == "report: full disk", done  # the table comes before the picture
    assert picture(world) == before


def test_a_record_that_is_a_fifo_is_named_and_the_runs_are_shown(forks: Forks, world: Path) -> None:
    done = forks.run("status", "runs/fifo", "runs/noise", cwd=world)
    assert done.code == 2 and "runs/fifo " in done.out and "runs/noise " in done.out
    problem = "runs/fifo/metrics.jsonl: is not a regular file; remove it"
    assert done.err == f"status: error: {problem}\n"


def test_a_warm_up_that_never_ends_is_a_warning(forks: Forks, world: Path) -> None:
    """A trial of some steps of a long run's configuration is nothing wrong."""
    words = (*TRAIN, OWN, *SMALL, "--schedule.warmup_steps=10", "--check")
    done = forks.run(*words, cwd=world)
    assert done.code == 0 and done.err.count("warning:") == 1, done.err
    assert "is more than train.max_steps = 9" in done.err


@pytest.mark.parametrize(("interval", "warnings"), [("20min", 1), ("auto", 1), ("500", 0)])
def test_saves_by_the_clock_beside_replays_are_a_warning(
    forks: Forks, world: Path, interval: str, warnings: int
) -> None:
    """No replay knows in advance which steps these are."""
    words = ("--resilience.replay_every=50", f"--checkpoint.interval={interval}", "--check")
    done = forks.run(*TRAIN, OWN, *SMALL, *words, cwd=world)
    assert done.code == 0 and done.err.count("warning:") == warnings, done.err
    said = f"warning: checkpoint.interval = {interval}: a step that is saved by the clock is not"
    assert done.err.count(said) == warnings and done.err.count("interval=50\n") == warnings


@pytest.mark.parametrize(("warmup", "decay", "warnings"), [(4, 6, 1), (4, 5, 0)])
def test_a_decay_that_begins_in_the_warm_up_is_a_warning(
    forks: Forks, world: Path, warmup: int, decay: int, warnings: int
) -> None:
    words = ["--schedule.name=wsd", f"--schedule.warmup_steps={warmup}", "--check"]
    done = forks.run(*TRAIN, OWN, *SMALL, *words, f"--schedule.decay_steps={decay}", cwd=world)
    assert done.code == 0 and done.err.count("warning:") == warnings, done.err
    said = "the learning rate drops where the warm-up ends; consider --schedule.decay_steps=5\n"
    assert done.err.count(said) == warnings


def test_a_shape_that_cannot_be_exported_is_a_warning(forks: Forks, world: Path) -> None:
    """Before a month of training."""
    words = (*TRAIN, OWN, *SMALL, "--train.max_steps=20", "--check")
    for shape, said in (("--model.n_experts=4", 0), ("--model.n_experts=4 --model.router_bias", 1)):
        done = forks.run(*words, *shape.split(), cwd=world)
        assert done.code == 0 and done.err.count("warning: no export") == said, done.err
    assert "the one transformers model with such a router, Glm4Moe" in done.err


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--rl.batch_samples=32", "[rl] has no effect: rl.env names no environment"),
        ("--lowcomm.interval=4", "[lowcomm] has no effect: it has no replicas"),
        ("--preference.beta=0.2", "[preference] has no effect: preference.loss = "),
        (
            "--train.global_batch=64 --train.global_batch_tokens=2048",
            "train.global_batch = 64 has no effect: train.global_batch_tokens = 2048",
        ),
        ("--schedule.decay_steps=5", "schedule.decay_steps = 5 has no effect with"),
        ("--eval.interval=0 --eval.sets=[{path='x'}]", "eval.sets has no effect: eval.interval"),
        ("--run.fork_optimizer=fresh", "run.fork_optimizer = fresh has no effect without run.fork"),
    ],
)
def test_what_has_no_effect_is_a_warning(forks: Forks, world: Path, word: str, said: str) -> None:
    words = ("--train.max_steps=20", "--check", *word.split())
    done = forks.run(*TRAIN, OWN, *SMALL, *words, cwd=world)
    assert done.code == 0 and done.err.count("warning:") == 1, done.err
    assert f"warning: {said}" in done.err


def test_an_empty_directory_is_exported_to(forks: Forks, world: Path) -> None:
    """Where it is, by way of a link, too; and it stays, empty, when there is no room."""
    for place in ("blank", "at-blank"):
        done = forks.run("convert", "export", "runs/debug", place, cwd=world)
        assert done.code == 0 and forks.run("convert", "check", place, cwd=world).code == 0, done
        assert {"config.json", "model.safetensors"} == {
            path.name for path in (world / "blank").iterdir()
        }
        assert (world / "at-blank").is_symlink() and not (world / "blank.partial").exists()
        for path in (world / "blank").iterdir():
            path.unlink()


def test_a_page_of_ours_is_replaced(forks: Forks, world: Path, tmp_path: Path) -> None:
    """By way of a link, too, which stays; not one that its reader has edited since."""
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to("page.html")
    words = ("report", world / "runs/debug", "--html")
    for name in ("page.html", "page.html", "link.html"):
        assert forks.run(*words, name, cwd=tmp_path).code == 0
    assert link.is_symlink() and not page.is_symlink()
    page.write_text(page.read_text().replace("<body>", "<body><p>My remarks</p>"))
    before = picture(tmp_path)
    done = forks.run(*words, "page.html", cwd=tmp_path)
    assert done.code == 2 and "page.html was changed since this program wrote it; " in done.err
    assert picture(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_a_full_disk(forks: Forks, world: Path, tmp_path: Path) -> None:
    """The path, what is free and, of a model, what it takes; and nothing of it stays."""
    with small_disk(tmp_path / "disk", "1m"):
        disk = tmp_path / "disk"
        report = ("report", "runs/debug", f"--out={disk}/old.png")
        assert forks.run(*report, cwd=world).code == 0
        (disk / "blank").mkdir()
        (disk / "rest").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
        before = picture(disk)
        for words in (
            ("convert", "export", "runs/debug", f"{disk}/model"),
            ("convert", "export", "runs/debug", f"{disk}/blank"),
            report,
            ("prepare_data", "corpus", f"--out={disk}/data"),
            ("train", DEBUG, *SMALL, OWN, f"--run.dir={disk}/run"),
        ):
            done = forks.run(*words, cwd=world)
            assert done.code == 2 and "Traceback" not in done.err, done
            assert f"{disk}/" in done.err and "No space left on device" in done.err, done.err
            for made in ("run", "data"):
                shutil.rmtree(disk / made, ignore_errors=True)
        assert picture(disk) == before


# --- no environment, and --help ---


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_needs_no_torch(program: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(name='torch')")
    done = start(program, "--help", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0 and program in done.stdout and not done.stderr, done


def test_the_part_that_all_programs_begin_with_says_that_it_is_none() -> None:
    done = start("first", "--help")
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (0, 1, ""), done


@pytest.mark.parametrize("module", MODULES)
def test_help_of_a_module(module: str) -> None:
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0 and module in done.stdout and not done.stderr, done
    done = subprocess.run(command[:-1], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_python_without_the_environment(program: str) -> None:
    command = [sys.executable, "-S", "-E", f"scripts/{program}.py", "a b"]  # -S: no packages
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    assert f"scripts/{program}.py 'a b'" in done.stderr and ".venv" in done.stderr
    command[-1] = "--help"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    about = ast.get_docstring(ast.parse((ROOT / f"scripts/{program}.py").read_text()))
    assert about and done.stdout.startswith(f"{about}\n\nTo list all options, which needs"), done
    assert (done.returncode, done.stderr) == (0, "")


def test_preflight_in_an_image_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "kempner.jobs.preflight"],
        cwd=ROOT / "src", capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    assert "lacks torch: name an image that has it" in done.stderr


def test_a_python_that_does_not_look_beside_the_program() -> None:
    done = start("status", "--help", PYTHONSAFEPATH="1")
    assert done.returncode == 0 and "--notify" in done.stdout and not done.stderr, done


GONE = [("train", DEBUG, "--check"), ("train", "a.toml"), ("prepare_data", "a", "--out=b")]


@pytest.mark.parametrize("words", GONE)
def test_a_current_directory_that_is_gone(tmp_path: Path, words: tuple[str, ...]) -> None:
    program = ROOT / f"scripts/{words[0]}.py"
    leave = f"cd '{tmp_path}'; mkdir gone; cd gone; rmdir ../gone; exec \"$@\""
    command = ["bash", "-c", leave, "-", sys.executable, program, *words[1:]]
    env = clean_env(PYTHONPATH=str(ROOT / "src"))  # with a relative path Python itself would fail
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done
    assert "the current directory is gone; cd to one that exists" in done.stderr


def test_a_python_with_the_package_of_another_clone(tmp_path: Path) -> None:
    (tmp_path / "kempner").mkdir()
    (tmp_path / "kempner/__init__.py").write_text("raise SystemExit('another clone')")
    done = start("status", "--help", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0 and "--notify" in done.stdout and not done.stderr, done


def test_a_package_that_is_missing(tmp_path: Path) -> None:
    """numpy, before the program can ask for it by itself."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('No numpy', name='numpy')")
    done = start("train", DEBUG, "--data.dataset_path=fake:", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    assert "it lacks the package numpy; " in done.stderr


@pytest.mark.parametrize("program", [*PROGRAMS, "first"])
def test_an_old_python_reads_it_to_the_refusal(program: str) -> None:
    text = (ROOT / f"scripts/{program}.py").read_text()
    ast.parse(text, feature_version=(3, 6))
    assert "from __future__ import annotations" not in text  # of 3.7


def start(*words: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / f"scripts/{words[0]}.py"), *words[1:]]
    return subprocess.run(
        command, cwd=cwd, env=clean_env(**env), capture_output=True, text=True, timeout=120
    )


# --- Ctrl-C, closed pipes and closed streams ---

# What takes a while, or prints something.
BUSY = {
    "convert": ("check", "models/debug"),
    "eval": ("runs/debug", "--tasks=none"),
    "generate": ("runs/debug", "--max-tokens=20000", "--device=cpu"),
    "plan": (str(ROOT / "configs/train/7b.toml"), "--data.dataset_path=fake:"),
    "prepare_data": ("inspect", "data/own"),
    "report": ("runs/debug", "--out=report.png"),
    "status": ("runs/debug",),
    "sweep": ("sweep.toml", "status"),
}


def interrupt(world: Path, program: str, words: tuple[str, ...], after: float) -> None:
    """`after`: seconds since its first line. It ends quietly, if it still runs: by the signal, or
    as a program that was asked to end."""
    command = [sys.executable, str(ROOT / f"scripts/{program}.py"), *words]
    process = subprocess.Popen(
        command,
        cwd=world,
        env=clean_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_the_first_line(process)
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err and "Exception ignored" not in err, (after, err)
    # -2: by the signal, which a shell calls 130; 2: eval.py has found by then that there is no such
    # task.
    assert process.returncode in (0, -signal.SIGINT, 130, 2), (after, process.returncode, err)


def wait_for_the_first_line(process: subprocess.Popen[str]) -> None:
    """Until Python, which catches SIGINT, no longer does: before that it has words of its own."""
    begun = False
    while process.poll() is None:
        found = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
        catches = bool(found and int(found[1], 16) & 1 << (signal.SIGINT - 1))
        if begun and not catches:
            return
        begun |= catches
        time.sleep(0.001)


@pytest.mark.parametrize("program", BUSY)
def test_ctrl_c(world: Path, program: str) -> None:
    for after in (0.0, 0.4):
        interrupt(world, program, BUSY[program], after)


@pytest.mark.soak
@pytest.mark.parametrize("program", BUSY)
def test_ctrl_c_at_ten_moments(world: Path, program: str) -> None:
    for tenth in range(10):
        interrupt(world, program, BUSY[program], 0.2 * tenth)


@pytest.mark.soak
def test_ctrl_c_of_the_trainer(world: Path) -> None:
    """Before the run has begun it leaves none; later it is saved, and its records are true."""
    for tenth in range(10):
        run = world / f"runs/stopped-{tenth}"
        words = (DEBUG, OWN, *SMALL, "--train.max_steps=100000", f"--run.dir={run}")
        interrupt(world, "train", words, 0.3 * tenth)
        if (run / "status.json").exists():
            assert json.loads((run / "status.json").read_text())["state"] == "stopped"


@pytest.mark.parametrize("program", [name for name in BUSY if name != "eval"])
def test_whoever_reads_it_has_left(world: Path, program: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(ROOT / f"scripts/{program}.py"), *BUSY[program]]
    done = subprocess.run(
        command, cwd=world, env=clean_env(), stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert done.returncode == 141 and not ERROR.search(done.stderr), done
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_closed_streams(world: Path, tmp_path: Path) -> None:
    """Nothing that is opened later gets their numbers, and the records of a run are true."""
    run = tmp_path / "run"
    train = ["train", *TINY, f"--data.dataset_path={world}/data/own", f"--run.dir={run}"]
    for program, *words in (train, ["status", str(run)], ["report", str(run)]):
        command = [sys.executable, f"scripts/{program}.py", *words]
        shell = ["bash", "-c", 'exec "$@" <&- >&-', "bash", *command]
        done = subprocess.run(shell, cwd=ROOT, env=clean_env(), stderr=subprocess.PIPE, text=True)
        assert done.returncode == 0 and not done.stderr, done
    assert json.loads((run / "status.json").read_text())["state"] == "done"
