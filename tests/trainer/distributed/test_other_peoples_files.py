"""Nothing of a user's is destroyed: every path that a program can be given, as an option, a word or
a variable, is pointed at directories of other people's files, and at those of other programs of
this kit. None of their files changes, and what was refused has left nothing.

DOORS is the table of docs/reference/checkpoints.md. Below it, a test for each place where a path
may come in (sections of the configuration, argparse, run.sh, variables) fails for one that is in no
list.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kempner.config.option import whole_schema
from kempner.jobs.program.options import OPTION_NAMES
from kempner.train.sections import RunConfig
from tests.conftest import ROOT, clean_env
from tests.forks import Done, Forks

TINY = [
    "--model.dim=16", "--model.n_layers=1", "--model.n_heads=1", "--model.n_kv_heads=1",
    "--model.ffn_dim=16", "--train.seq_len=16", "--train.global_batch=1", "--train.max_steps=1",
    "--checkpoint.interval=0", "--eval.interval=0", "--checkpoint.async_save=false",
    "--bench.steps=1", "--bench.warmup=1", "--trackers.tensorboard=false",
]  # fmt: skip
FILES = {  # of somebody else; most have names that this kit uses, too
    "notes.txt": "do not lose this",
    "mine.partial/weights.pt": "half a download",
    "old.deleted/weights.pt": "not yet",
    "latest.new": "a file",
    ".latest.7.new": "another program's",
    "step_00000001/weights.pt": "another trainer's",
    "step_00000002.partial/weights.pt": "being written by another trainer",
    "step_00000003.deleted/weights.pt": "kept for a reason",
    "out.partial/thesis.tex": "chapter 1",
    "dataset.json": '{"name": "photographs"}',
    "dataset.partial.json": "[]",
    "config.json": '{"colour": "blue"}',
    "tokenizer.json": '{"mine": true}',
    "tokenizer_config.json": "{}",
    "model.safetensors.index": "x",
    "train_00000.npy": "numbers",
    "units/00000000.npz": "more numbers",
    "units/thesis.tex": "chapter 2",
    "id": "42\n",
    "status.json": '{"state": "happy"}',
    "attempts.jsonl": '{"attempt": "at a novel"}\n',
    "metrics.jsonl": "1, 2, 3\n",
    "progress": "good\n",
    "config.toml": 'title = "mine"\n',
    "lock": "and key",
    "logs/latest/rank-0.log": "somebody's",
    "checkpoints/mine.partial/w.pt": "w",
    "code/main.c": "int main() {}",
    "sweep/journal.txt": "dear diary",
    "journal.jsonl": "dear diary\n",
    "table.csv": "a,b\n",
    "kempner-3/results.csv": "1,2\n",
    ".git/HEAD": "ref: refs/heads/main\n",
    ".git/config": "[core]\n",
    ".bashrc": "alias ll='ls -l'\n",
}
EXTRA = {  # that are put into every kind of directory: what an option may name as a file
    "picture.png": "\x89PNG of a cat",
    "page.html": "<html>a home page</html>",
    "figures.json": '{"figures": [1, 2]}',
    "report.json": '{"report": "annual"}',
    "report.md": "# Annual report\n",
    "engine-0": "a steam engine",
}


@dataclass(frozen=True)
class Door:
    """A program, and the option, word or variable that takes a path."""

    words: Callable[[Path, Path, Path], list[str]]  # of the place, of scratch, of what is shared
    at: str = ""  # where in the place that the user names the files are
    own: tuple[str, ...] = ()  # kinds that it is meant to write to
    env: Callable[[Path], dict[str, str]] = lambda place: {}


def train(*more: str, program: str = "train.py") -> Callable[[Path, Path, Path], list[str]]:
    """train.py, or a program with its words; "PLACE" and "FRESH" in the words are replaced."""

    def words(place: Path, fresh: Path, shared: Path) -> list[str]:
        given = [w.replace("PLACE", str(place)).replace("FRESH", str(fresh)) for w in more]
        config, data = str(ROOT / "configs/train/debug.toml"), f"--data.dataset_path={shared}/data"
        return [f"scripts/{program}", config, data, *TINY, *given]

    return words


def rl(program: str) -> Callable[[Path, Path, Path], list[str]]:
    config = str(ROOT / "configs/rl/arithmetic.toml")
    return lambda place, *_: [program, config, f"--run.dir={place}", "--train.max_steps=1"]


def prepare(*more: str) -> Callable[[Path, Path, Path], list[str]]:
    return lambda place, _, shared: [
        "scripts/prepare_data.py", str(shared / "text"), "--out", str(place), "--workers=1", *more
    ]  # fmt: skip


def sweep(folder: Path, fresh: Path, command: str) -> list[str]:
    """Of one whose DIR/NAME is the folder."""
    file = fresh.with_suffix(".toml")
    file.parent.mkdir(exist_ok=True)
    lines = [f'name = "{folder.name}"', f'dir = "{folder.parent}"', "[axes]", "train.seed = [1]"]
    lines += ["[set]", 'data.dataset_path = "fake:"', "train.max_steps = 1"]
    file.write_text("\n".join([f'base = "{ROOT}/configs/train/debug.toml"', *lines, ""]))
    return ["scripts/sweep.py", str(file), *command.split()]


DOORS = {
    "train.py --run.dir": Door(train("--run.dir=PLACE"), own=("run",)),
    "train.py --checkpoint.dir": Door(train("--run.dir=FRESH", "--checkpoint.dir=PLACE")),
    "train.py --bench --run.dir": Door(train("--bench", "--run.dir=PLACE")),
    "train.py --bench.output_json": Door(
        train("--bench", "--run.dir=FRESH", "--bench.output_json=PLACE"), at="figures.json"
    ),
    "tune.py --run.dir": Door(train("--run.dir=PLACE", program="tune.py")),
    "tune.py --out": Door(
        train("--run.dir=FRESH", "--out=PLACE", program="tune.py"), at="figures.json"
    ),
    "rl.py --run.dir": Door(rl("scripts/rl.py"), own=("run",)),
    "orchestrate.py --run.dir": Door(rl("scripts/orchestrate.py"), own=("run",)),
    "program.py --run-dir (run.sh)": Door(
        lambda place, *_: [
            "scripts/program.py", "--here", "1", f"--run-dir={place}", "--", "sleep", "1"
        ],
        own=("run of run.sh",),
    ),
    "prepare_data.py --out": Door(prepare("--train-bpe=257"), own=("data set",)),
    "prepare_data.py --out --overwrite": Door(prepare("--overwrite"), own=("data set",)),
    "prepare_data.py inspect --plot": Door(
        lambda place, _, shared: [
            "scripts/prepare_data.py", "inspect", str(ROOT / "configs/train/debug.toml"),
            f"--data.dataset_path={shared}/data", *TINY, "--plot", str(place),
        ],
        at="picture.png",
    ),
    "convert.py import RUN": Door(
        lambda place, _, shared: ["scripts/convert.py", "import", f"{shared}/model", str(place)]
    ),
    "convert.py export DIR": Door(
        lambda place, _, shared: ["scripts/convert.py", "export", f"{shared}/run", str(place)]
    ),
    "convert.py export DIR, at DIR.partial": Door(
        lambda place, _, shared: [
            "scripts/convert.py", "export", f"{shared}/run", str(place.with_suffix(""))
        ],
        at="out.partial",
    ),
    "report.py --out": Door(
        lambda place, _, shared: ["scripts/report.py", f"{shared}/run", "--out", str(place)],
        at="picture.png",
    ),
    "report.py --html": Door(
        lambda place, _, shared: ["scripts/report.py", f"{shared}/run", "--html", str(place)],
        at="page.html",
    ),
    "sweep.py: dir and name of the sweep": Door(
        lambda place, fresh, _: sweep(place, fresh, "submit --here"), own=("sweep",)
    ),
    "sweep.py: sweep/ in it": Door(
        lambda place, fresh, _: sweep(place.parent, fresh, "table"), at="sweep", own=("sweep",)
    ),
    "eval.py --follow RUN": Door(
        lambda place, *_: [
            "scripts/eval.py", str(place), "--tasks=arc_easy", "--follow", "--check"
        ],
        own=("run",),
    ),
    "activations.py --out": Door(
        lambda place, _, shared: [
            "scripts/activations.py", f"{shared}/run", f"{shared}/data", "--layers=0",
            f"--out={place}",
        ]
    ),
    "serve.py --publish": Door(
        lambda place, _, shared: [
            "scripts/serve.py", f"{shared}/run", "--check", f"--publish={place.parent}"
        ],
        at="engine-0",
    ),
    "KEMPNER_STAGE": Door(
        lambda place, _, shared: [
            "-m", "kempner.data.prepare.stage", "--jobs=17", str(place), f"{shared}/data"
        ],
        at="kempner-17",
    ),
    "make gpu-check ARGS=--out": Door(
        lambda place, *_: [
            "-m", "benchmarks.gpu_check", "--device=cpu", "--seconds=0", f"--out={place}"
        ],
    ),
}  # fmt: skip
KINDS = {
    "home": "files of your own", "file": "a file", "run": "a run", "run of run.sh": "of run.sh",
    "data set": "a data set", "model": "a model", "checkpoints": "checkpoints", "sweep": "a sweep",
}  # fmt: skip
# Staging never ends a job: it warns, and the job reads what it would have copied.
EXIT_CODE = {"KEMPNER_STAGE": 0}


def fill(place: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as found:
        yield found


def call(forks: Forks, words: list[str], cwd: Path) -> Done:
    """Run a program of scripts/, or -m and a module, with its arguments."""
    if words[0] == "scripts/program.py":  # it watches all its descendants
        command = [sys.executable, str(ROOT / words[0]), *words[1:]]
        done = subprocess.run(
            command, cwd=cwd, env=clean_env(), capture_output=True, text=True, timeout=120
        )
        return Done(done.returncode, done.stdout, done.stderr)
    return forks.run(words[0].removeprefix("scripts/").removesuffix(".py"), *words[1:], cwd=cwd)


@pytest.fixture(scope="module")
def shared(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of each kind, made by the programs themselves."""
    place = tmp_path_factory.mktemp("kinds")
    make_kinds(forks, place)
    return place


def make_kinds(forks: Forks, place: Path) -> None:
    fill(place / "text", {"a.txt": "some text\n" * 100, "b.txt": "more text\n" * 100})
    fill(place / "home", FILES)
    (place / "home/latest").symlink_to("step_00000001")
    (place / "home/to-notes").symlink_to("notes.txt")
    (place / "home/dangling").symlink_to("nowhere")
    (place / "home/.bashrc").chmod(0o600)
    fresh = place / "run"
    for words in (
        ["scripts/prepare_data.py", str(place / "text"), "--out", str(place / "data")],
        train("--run.dir=FRESH")(fresh, fresh, place),
        ["scripts/convert.py", "export", str(place / "run"), str(place / "model")],
        DOORS["program.py --run-dir (run.sh)"].words(place / "run of run.sh", fresh, place),
        sweep(place / "sweep", fresh, "submit --here"),
        [*prepare("--train-bpe=270")(place / "data set", fresh, place)],
    ):
        done = call(forks, words, place)
        assert done.code == 0, (words, done)
    shutil.copytree(place / "run/checkpoints", place / "checkpoints", symlinks=True)
    (place / "file").write_text("a file\n")


def snapshot(place: Path) -> dict[str, str]:
    """Every name below, with its mode, and its content or where it leads."""
    found = {}
    for folder, folders, names in os.walk(place):
        for path in (Path(folder, name) for name in (*folders, *names)):
            mode = path.lstat().st_mode
            what = os.readlink(path) if path.is_symlink() else ""
            if path.is_file() and not what:
                what = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path.relative_to(place))] = f"{mode:o} {what}"
    return found


def lay_out(shared: Path, kind: str, door: Door, user: Path) -> Path:
    """Put the kind where the door leads to; returns the path that the program is given."""
    user.mkdir()
    a_file = ("." in door.at and not door.at.endswith(".partial")) or door.at == "engine-0"
    place = user / (door.at if not a_file else "place") if door.at else user / "place"
    if kind == "file":
        target = user / door.at if door.at else place
        target.write_text("a file\n")
        return target
    shutil.copytree(shared / kind, place, symlinks=True)
    fill(place, EXTRA)
    return place / door.at if a_file else place


def walk(forks: Forks, shared: Path, name: str, kind: str, user: Path) -> tuple[bool, str]:
    """Whether all is as before, and what the program has said."""
    door, scratch = DOORS[name], user.with_name(f"{user.name}-scratch")
    given = lay_out(shared, kind, door, user)
    scratch.mkdir()
    before, kinds = snapshot(user), snapshot(shared)
    words = door.words(given, scratch / "fresh", shared)
    done = call(forks, words, scratch)
    assert snapshot(shared) == kinds, "a program has written where it only reads"
    return snapshot(user) == before, f"exit code {done.code}: {done.out}{done.err}"


@pytest.mark.parametrize("name", DOORS)
def test_nothing_of_others_changes(name: str, forks: Forks, shared: Path, tmp_path: Path) -> None:
    for number, kind in enumerate(KINDS):
        if kind not in DOORS[name].own:
            same, said = walk(forks, shared, name, kind, tmp_path / str(number))
            assert same, (kind, said)
            assert said.startswith(f"exit code {EXIT_CODE.get(name, 2)}: "), (kind, said)
            assert str(tmp_path / str(number)) in said and "Traceback" not in said, (kind, said)


@pytest.mark.parametrize("door", ["train.py --run.dir", "program.py --run-dir (run.sh)"])
def test_a_run_begins_beside_notes(door: str, forks: Forks, shared: Path, tmp_path: Path) -> None:
    """Its user has made the directory, and put a few texts there: they stay as they are."""
    place = tmp_path / "run"
    fill(place, {"notes.md": "try this", "mine.toml": "", "job.sh": "sbatch", "plan.yaml": "a: 1"})
    before = snapshot(place)
    done = call(forks, DOORS[door].words(place, place, shared), tmp_path)
    assert done.code == 0 and (place / "attempts.jsonl").is_file(), done
    assert snapshot(place).items() > before.items()


@pytest.mark.soak
def test_a_sweep_keeps_to_its_directory(forks: Forks, shared: Path, tmp_path: Path) -> None:
    """Where another has its files every command is refused; before submit none writes anything; a
    few notes are nobody's, and stay."""
    commands = ("plan", "status", "table", "cancel", "resubmit", "submit")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "git/.git").mkdir(parents=True)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/attempts.jsonl").touch()
    for kind in ("run", "model"):
        shutil.copytree(shared / kind, tmp_path / kind, symlinks=True)
    before = snapshot(tmp_path)
    for name in ("file", "file/in-it", "link", "link/in-it", "git", "begun", "run", "model"):
        words = sweep(tmp_path / name, shared / "words/x", "")
        for command in commands:
            done = call(forks, [*words, command], shared)
            assert (done.code, done.out) == (2, ""), (name, command, done)
            assert f"x.toml: dir/name = {tmp_path / name}" in done.err, done
    assert snapshot(tmp_path) == before
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/plan.md").write_text("try this")
    before = snapshot(tmp_path)
    for name in ("new", "notes"):
        words = sweep(tmp_path / name, shared / "words/x", "")
        for command in commands[:-1]:
            assert call(forks, [*words, command], shared).code == 0, command
        assert snapshot(tmp_path) == before
    assert call(forks, [*words, "submit", "--here"], shared).code == 0
    assert snapshot(tmp_path).items() > before.items()


def test_a_table_of_a_sweep(forks: Forks, shared: Path, tmp_path: Path) -> None:
    """It replaces its own files alone, and by way of a link what that leads to."""
    place = shutil.copytree(shared / "sweep", tmp_path / "lr", symlinks=True)
    words = sweep(place, tmp_path / "x", "table")
    for name, told in (("table.csv", "the table"), ("table.png", "the picture")):
        file, mine = place / "sweep" / name, tmp_path / f"mine-{name}"
        mine.write_text("my own notes")
        for make in (lambda: shutil.copy(mine, file), lambda: file.symlink_to(mine)):  # noqa: B023
            make()
            before = snapshot(tmp_path)
            done = call(forks, words, tmp_path)
            assert (done.code, done.out) == (2, ""), done
            assert f"{told} = {file} exists, and was not made by this program" in done.err
            assert snapshot(tmp_path) == before
            file.unlink()
    assert call(forks, words, tmp_path).code == 0
    own = (place / "sweep/table.csv").rename(tmp_path / "own.csv")
    (place / "sweep/table.csv").symlink_to(own)
    own.write_text(own.read_text().partition("\n")[0] + "\n")
    assert call(forks, words, tmp_path).code == 0
    assert own.read_text().count("\n") == 2 and (place / "sweep/table.csv").is_symlink()


# --- No path is forgotten -----------------------------------------------------------------------

# Options of the configuration whose value is text, and not a path that is written to.
READ = {
    "run.fork": "read", "model.init_from": "read", "data.dataset_path": "read",
    "data.sources[].path": "read", "data.sources[].tokenizer": "read", "eval.sets[].path": "read",
    "rl.tokenizer": "read", "rl.env[].id": "read", "rl.env[].args": "JSON for an environment",
    "rl.inference.urls": "not a path", "rl.inference.args": "words for an engine",
    "data.sources[].name": "a name", "data.sources[].column": "a name",
    "eval.sets[].name": "a name", "rl.env[].name": "a name", "optimizer.groups[].names": "names",
    "freeze.stages[].patterns": "names",
    "trackers.wandb_project": "a name",
    "rl.sampling.stop": "text", "bench.compare": "words for train.py",
}  # fmt: skip
WRITTEN = {
    "run.dir": "train.py --run.dir",
    "checkpoint.dir": "train.py --checkpoint.dir",
    "bench.output_json": "train.py --bench.output_json",
}
# Words of the programs' command lines, by file.
ARGUMENTS = {
    "activations.py model": "read", "activations.py data": "read",
    "activations.py --layers": "numbers", "activations.py --steps": "numbers",
    "activations.py --parts": "names", "activations.py --out": "activations.py --out",
    "audit.py run": "its own names in a run with audit.json: REPLAY, attempts/HOST.jsonl",
    "convert.py source": "read", "convert.py run": "convert.py import RUN",
    "convert.py out": "convert.py export DIR", "convert.py --max-shard-size": "not a path",
    "convert.py directory": "read", "convert.py name": "a name on the hub",
    "convert.py words": "read; the hub's library keeps its own cache",
    "eval.py model": "eval.py --follow RUN", "eval.py --tasks": "names",
    "eval.py --include-path": "read", "generate.py --prompt": "text", "generate.py --stop": "text",
    "generate.py source": "read", "generate.py --prompts": "read",
    "prepare_data.py inputs": "read", "prepare_data.py --out": "prepare_data.py --out",
    "prepare_data.py --tokenizer": "read", "prepare_data.py --eod": "text",
    "prepare_data.py --bos": "text",
    "prepare_data.py --text-key": "a name",
    "report.py runs": "its own names in a run: report.png, timeline.png, report.html",
    "report.py --out": "report.py --out", "report.py --html": "report.py --html",
    "report.py --watch": "a number", "report.py --refresh": "a number",
    "arguments.py source": "read", "arguments.py --weights": "read",
    "arguments.py --host": "not a path",
    "arguments.py --token-file": "read", "arguments.py --publish": "serve.py --publish",
    "status.py paths": "read; --notify adds RUN/notified",
    "sweep.py sweep": "sweep.py: dir and name of the sweep", "sweep.py command": "not a path",
    "sweep.py --gpu": "a name", "sweep.py --x": "a name",
    "metadata.py checkpoint": "its own name in a checkpoint, which it reads first",
    "chat.py --loss-on": "names", "chat.py --chat-template": "read", "chat.py --date": "a date",
    "stage.py --jobs": "numbers", "stage.py root": "KEMPNER_STAGE", "stage.py datasets": "read",
    "judge.py note": "a name of this job in its run", "judge.py --log": "a name in its run",
    "judge.py address": "not a path",
    "preflight/__main__.py --nodes": "names", "preflight/__main__.py --slow": "numbers",
    "preflight/__main__.py --dir": "holds temporary files of this job",
    "preflight/__main__.py --history": "its own names, in no link and no other user's directory",
    "preflight/__main__.py --json": "preflight.sh gives it, with the job's number",
    "preflight/__main__.py --meet": "check_nodes.sh gives it, with the job's number",
    "node.py --job": "a number", "node.py --nodes": "names", "node.py --ports": "numbers",
    "node.py --logs": "ray.sh gives it, with the job's number",
    "ports.py nodes": "names", "ready.py nodes": "names", "placement.py --names": "names",
    "vllm_engine.py --weights": "read; .engine-K in it is its own",
    "vllm_engine.py --publish": "as serve.py --publish",
    "vllm_engine.py --token-file": "read", "vllm_engine.py --host": "not a path",
    "trackers/__main__.py run": "its own names in a run",
    "trackers/__main__.py names": "names",
}  # fmt: skip
RUN_SH = {
    "run-dir": "program.py --run-dir (run.sh)", "code": "read", "checkpoints": "read",
    "steps": "a pattern", "heartbeat": "a number", "signal": "a name",
}  # fmt: skip
VARIABLES = {
    "ROOT": "read", "SITE": "read", "PYTHON": "run", "TRAIN": "run", "MAX_CRASHES": "a number",
    "RESTARTS": "a number", "SPARES": "a number", "SPARE_COMMAND": "run", "EXCLUDE": "a number",
    "CHAIN": "a number", "SIGNAL_LEAD": "a number", "PREFLIGHT": "0 or 1",
    "PREFLIGHT_LEAST": "numbers", "PREFLIGHT_SECONDS": "a number", "PREFLIGHT_SLOW": "numbers",
    "CODE": "0 or 1", "STAGE": "KEMPNER_STAGE",
    "STAGE_ENVIRONMENT": "0 or 1", "CONTAINER": "read", "MOUNTS": "what the container sees",
    "CONTAINER_RUNTIME": "a name", "SECRETS": "read", "MAIL": "addresses", "NOTIFY": "run",
    "WEBHOOK": "a URL", "PAGE": "a number", "SRUN": "options of srun", "MPI": "a name",
    "NPROC": "a number", "NSYS": "numbers", "NUMA": "0 or 1", "MAX_WAIT": "a number",
    "IDLE_LIMIT": "a number",
    "MEMORY_GIB": "a number", "PORTS": "two numbers",
    "ORCHESTRATE": "run", "SERVE": "run", "SERVE_TOKEN": "a token", "VLLM": "run",
}  # fmt: skip


def test_every_option_of_the_configuration_is_in_the_table() -> None:
    texts = set()
    for options in whole_schema(RunConfig).values():
        for option in options.values():
            columns = option.keys.values() if option.keys else [option]
            texts |= {each.name for each in columns if each.item is str and not each.choices}
    assert texts == READ.keys() | WRITTEN.keys()
    assert {*WRITTEN.values()} <= DOORS.keys()


def arguments() -> set[str]:
    """The words that programs take by argparse and that may be a path."""
    found = set()
    for path in [*ROOT.glob("scripts/*.py"), *ROOT.glob("src/**/*.py")]:
        name = f"{path.parent.name}/{path.name}" if path.name == "__main__.py" else path.name
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = ast.unparse(node.func)
            if called != "add" and not called.endswith(".add_argument"):
                continue
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            flag = given.get("action", "'append'") != "'append'"
            if flag or given.get("type") in ("int", "float") or "choices" in given:
                continue
            word = node.args[0]
            if isinstance(word, ast.Constant) and isinstance(word.value, str):
                found.add(f"{name} {word.value}")
    return found


def test_every_argument_of_a_program_is_in_the_table() -> None:
    assert arguments() == ARGUMENTS.keys()


def test_every_option_of_run_sh_is_in_the_table() -> None:
    assert OPTION_NAMES.keys() == RUN_SH.keys() and RUN_SH["run-dir"] in DOORS


def test_every_variable_is_in_the_table() -> None:
    text = (ROOT / "scripts/slurm/lib/variables.sh").read_text()
    found = re.search(r"KP_VARIABLES=\(([^)]*)\)", text)
    assert found and set(found[1].split()) == VARIABLES.keys()


def as_table() -> str:
    """DOORS as docs/reference/checkpoints.md has it."""
    lines = ["| | " + " | ".join(KINDS.values()) + " |", "|---" * (len(KINDS) + 1) + "|"]
    for name, door in DOORS.items():
        cells = ("written" if kind in door.own else "refused" for kind in KINDS)
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_page_has_the_table() -> None:
    assert as_table() in (ROOT / "docs/reference/checkpoints.md").read_text()
