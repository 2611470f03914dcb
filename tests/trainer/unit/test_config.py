"""Configuration: files, overrides, errors, help and the way back to TOML."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kempner.config.command_line import parse_command
from kempner.config.help import help_text
from kempner.config.loading import as_dict, config_hash, load_config_files, to_toml
from kempner.config.option import (
    REQUIRED_OPTION,
    ConfigError,
    Sections,
    config_schema,
    from_text,
    option,
    whole_schema,
)
from kempner.train.configure import load_config
from kempner.train.sections import RunConfig

REPO = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Train:
    max_steps: int = option(1000, "optimizer steps of the whole run", minimum=1)
    compile: bool = option(False, "compile the model")
    note: str = option("", "any text")
    clip: float | None = option(1.0, "limit of the gradient norm", minimum=0)
    resume: str | None = option(None, "checkpoint to start from")

    def problems(self) -> list[str]:
        return ["train.note = bad: must be good; change it"] if self.note == "bad" else []


@dataclass(frozen=True)
class Optimizer:
    name: str = option("adamw", "the method", choices=("adamw", "muon"))
    lr: float = option(3e-4, "peak learning rate", minimum=0, maximum=1)
    betas: tuple[float, float] = option([0.9, 0.95], "decay of the two means", maximum=1)
    milestones: tuple[int, ...] = option((), "steps at which the rate drops", minimum=0)
    skip: tuple[str, ...] = option([], "parameters without decay")
    bound: float = option(math.inf, "largest update")


@dataclass(frozen=True)
class Config:
    train: Train = field(default_factory=Train)
    optimizer: Optimizer = field(default_factory=Optimizer)


def check(cfg: Any) -> list[str]:
    """Problems across sections."""
    train = getattr(cfg, "train", Train())
    fits = train.max_steps != 13 or not train.compile
    return [] if fits else ["train.max_steps = 13: not with train.compile; drop one"]


@dataclass(frozen=True)
class Data:
    path: str = option(REQUIRED_OPTION, "directory of the shards")
    seed: int = option(0, "seed")


@dataclass(frozen=True)
class NeedsData:
    my_data: Data = field(default_factory=Data)


def read(*words: str, root: type[Any] = Config) -> Any:
    """The configuration that the words of a command line give."""
    command = parse_command(words, {"check": bool, "nodes": int})
    return load_config_files(root, command.files, command.overrides, command.problems, check=check)


def problems(*words: str, root: type[Any] = Config) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(*words, root=root)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def problem(*words: str, root: type[Any] = Config) -> str:
    """The one problem of the command line; more than one is a failure."""
    [line] = problems(*words, root=root)
    assert "\n" not in line
    return line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- What is read -----------------------------------------------------------------------------


def test_files_merge_left_to_right_under_the_overrides(folder: Path) -> None:
    Path("a.toml").write_text('[train]\nmax_steps = 1\nnote = "a"\n[optimizer]\nlr = 1\n')
    Path("b.toml").write_text("train.max-steps = 2\noptimizer.betas = [0, 0.5]\n")
    cfg = read("a.toml", "b.toml", "--optimizer.name=muon", "--train.max_steps=3")
    assert (cfg.train.max_steps, cfg.train.note, cfg.optimizer.name) == (3, "a", "muon")
    assert cfg.optimizer.betas == (0.0, 0.5) and type(cfg.optimizer.lr) is float
    assert read("a.toml", "b.toml").train.max_steps == 2
    assert read("b.toml", "a.toml").train.max_steps == 1


def test_base_is_relative_to_its_file_and_below_it(folder: Path) -> None:
    for name in ("configs/deep", "configs/small"):
        Path(name).mkdir(parents=True)
    Path("configs/a.toml").write_text('[train]\nmax_steps = 1\nnote = "a"\ncompile = true\n')
    Path("configs/b.toml").write_text('base = "a.toml"\n[train]\nmax_steps = 2\nnote = "b"\n')
    Path("configs/c.toml").write_text("[train]\nmax_steps = 3\n")
    child = 'base = ["../b.toml", "../c.toml"]\n[optimizer]\nlr = 0.5\n'
    Path("configs/deep/d.toml").write_text(child)
    cfg = read("configs/deep/d.toml")
    assert (cfg.train.max_steps, cfg.train.note, cfg.train.compile) == (3, "b", True)
    assert cfg.optimizer.lr == 0.5


@pytest.mark.parametrize("name", ["train.max_steps", "train.max-steps"])
def test_an_override_has_two_spellings(name: str) -> None:
    assert read(f"--{name}=50").train.max_steps == 50
    assert read(f"--{name}", "50").train.max_steps == 50
    assert read(f"--{name}", "50", f"--{name}=1_000").train.max_steps == 1000


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("--optimizer.lr=1e-4", "lr", 1e-4),
        ("--optimizer.lr=1", "lr", 1.0),
        ("--optimizer.betas=[0.9, 0.95]", "betas", (0.9, 0.95)),
        ("--optimizer.milestones=[]", "milestones", ()),
        ("--optimizer.skip=['norm', \"a b\"]", "skip", ("norm", "a b")),
        ("--optimizer.name=muon", "name", "muon"),
        ('--optimizer.name="muon"', "name", "muon"),
        ("--optimizer.bound=inf", "bound", math.inf),
    ],
)
def test_the_value_of_an_override_is_toml(word: str, key: str, value: Any) -> None:
    given = getattr(read(word).optimizer, key)
    assert given == value and type(given) is type(value)


@pytest.mark.parametrize(
    "text",
    ["", "50", "true", "a b", "it's", '"', "$HOME/*", "[1, 2]", "a=b", "x\ny = 1", "--no", "ü"],
)
def test_a_bare_word_is_a_string_where_the_field_is_one(text: str) -> None:
    assert read(f"--train.note={text}").train.note == text


def test_a_flag_alone_is_true_and_its_no_is_false() -> None:
    assert read("--train.compile").train.compile is True
    assert read("--train.compile", "--no-train.compile").train.compile is False
    assert read("--train.compile", "--no_train.compile", "--train.max_steps", "2") == read(
        "--train.max_steps=2"
    )
    assert read("--train.compile", "false").train.compile is False


def test_none_unsets_an_optional_value(folder: Path) -> None:
    assert read().train.clip == 1.0
    assert read("--train.clip=none").train.clip is None
    Path("a.toml").write_text('[train]\nclip = "none"\nresume = "x"\n')
    assert read("a.toml").train.clip is None
    assert read("a.toml", "--train.resume", "none").train.resume is None
    assert read("--train.note=none").train.note == "none"


def test_a_negative_number_is_a_value_and_not_an_option() -> None:
    command = parse_command(["--a.b", "-1", "--a.c", "-1e-3", "--a.d", "--a.e", "-inf"], {})
    assert command.overrides == ["--a.b=-1", "--a.c=-1e-3", "--a.d", "--a.e=-inf"]
    assert command.problems == []


def test_a_no_takes_no_value() -> None:
    command = parse_command(["--no-a.b", "a.toml"], {})
    assert (command.overrides, command.files) == (["--no-a.b"], ["a.toml"])


def test_the_command_line_is_sorted(folder: Path) -> None:
    Path("settings").write_text("[train]\nmax_steps = 7\n")
    words = ["a.toml", "--nodes", "2", "settings", "--a.b=a.toml", "--gpus_per_node=4", "--check"]
    command = parse_command(
        words, {"check": bool, "help": bool, "nodes": int, "gpus-per-node": int}
    )
    assert command.files == ["a.toml", "settings"]
    assert command.overrides == ["--a.b=a.toml"]
    assert command.flags == {"check": True, "help": False, "nodes": 2, "gpus-per-node": 4}
    assert command.problems == []
    assert read("settings").train.max_steps == 7
    assert parse_command(["-h"], {"help": bool}).flags == {"help": True}


# --- What is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("compile = 'ture'", "must be true or false, not a string; did you mean true?"),
        ("compile = 1", "must be true or false, not an int"),
        ("max_steps = 0.5", "must be an int, not a float; write a whole number"),
        ("max_steps = 1e4", "must be an int, not a float; write 10000"),
        ("max_steps = true", "must be an int, not true or false"),
        ("max_steps = '5'", "must be an int, not a string"),
        ("max_steps = 0", "must be at least 1"),
        ("max_steps = 2026-01-01", "must be an int, not a date"),
        ("max_steps = [1]", "must be an int, not a list"),
        ("max_steps.x = 1", "must be an int, not a table"),
        ("clip = nan", "must be a finite number"),
        ("clip = inf", "must be a finite number"),
        ("clip = false", "must be a float, not true or false"),
        ("note = 5", "must be a string, not an int; write it in quotes"),
        ("note = 'none of\\n'\nmax_step = 5", "unknown key; did you mean train.max_steps?"),
        ("lr = 5", "unknown key; did you mean optimizer.lr?"),
        ('"a\\nb" = 5', "a\\nb = 5: unknown key"),
        ("xyzzy = 5", "unknown key; --help train lists all"),
        ("base = 'b.toml'", "unknown key; base goes above the first [section]"),
        ("max_steps = 1\nmax-steps = 1", "repeats max_steps"),
    ],
)
def test_a_wrong_line_of_a_file(folder: Path, line: str, expected: str) -> None:
    Path("a.toml").write_text(f"[train]\n{line}\n")
    message = problem("a.toml")
    assert message.startswith("a.toml: train.") and expected in message


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("--train.compile=ture", "must be true or false, not a string; did you mean true?"),
        ("--train.compile=True", "did you mean true?"),
        ("--train.compile=1", "must be true or false"),
        ("--train.max_steps=0.5", "must be an int, not a float"),
        ("--train.max_steps=true", "must be an int, not true or false"),
        ("--train.max_steps=", "must be an int"),
        ("--train.max_steps=-3", "must be at least 1"),
        ("--train.max_steps=" + "9" * 5000, "must be an int"),
        ("--train.max_steps=" + "[" * 5000, "must be an int"),
        ("--train.max_steps=1\ncompile = true", "must be an int"),
        ("--train.max_steps", "a value is missing; write --train.max_steps=1000"),
        ("--no-train.max_steps", "only true or false can be negated"),
        ("--no-train.max_steps=5", "--no- takes no value; write --train.max_steps=5"),
        ("--no-train.compile=true", "--no- takes no value; write --no-train.compile"),
        ("--no-train.compil", "unknown option; did you mean --no-train.compile?"),
        ("--optimizer.lr=1.5", "must be from 0 to 1"),
        ("--optimizer.lr=nan", "must be a finite number"),
        ("--optimizer.lr=1" + "0" * 400, "must be a finite number"),
        ("--optimizer.bound=-inf", "must be a finite number"),
        ("--optimizer.name=adam", 'must be one of "adamw", "muon"; did you mean adamw?'),
        ("--optimizer.betas=[0.9]", "must have 2 items, not 1; write '[0.9, 0.95]'"),
        ("--optimizer.betas=0.9", "must be a list, not a float"),
        ("--optimizer.betas=[0.9, true]", "must be a float, not true or false"),
        ("--optimizer.betas=[0.9, 1.5]", "must be at most 1"),
        ("--optimizer.milestones=[1, -1]", "must be at least 0"),
        ("--train.note=\udcff", "must be valid UTF-8"),
        ("--train.max_step=5", "unknown option; did you mean --train.max_steps?"),
        ("--lr=5", "unknown option; did you mean --optimizer.lr?"),
        ("--trian.max_steps=5", "unknown option; did you mean --train.max_steps?"),
        ("--max_steps=5", "unknown option; did you mean --train.max_steps?"),
        ("--optimizer.max-steps=5", "unknown option; did you mean --train.max_steps?"),
        ("--train.max_steps.x=5", "unknown option"),
        ("--train=5", "train is a section; write --train.key=value"),
        ("--train", "train is a section"),
        ("--", "unknown option"),
        ("--chek", "unknown option; did you mean --check?"),
        ("--check=true", "--check takes no value"),
        ("--nodes=two", "must be a whole number from 1 to 100,000"),
        ("--nodes=0", "must be a whole number from 1 to 100,000"),
        ("--nodes", "a value is missing"),
        ("word", "unexpected argument"),
        ("", "unexpected argument"),
        ("x" * 5000, "unexpected argument"),
        ("0.95]", "in quotes, '--section.key=[1, 2]'"),
        ("train.max_steps=5", "did you mean --train.max_steps=5?"),
        ("-train.max_steps=5", "did you mean --train.max_steps=5?"),
        ("\u2014train.max_steps", "did you mean --train.max_steps?"),
        ("@", "name the file alone, without @"),
        ("@a.toml", "name the file alone, a.toml"),
    ],
)
def test_a_wrong_word_of_the_command_line(word: str, expected: str) -> None:
    message = problem(word)
    assert expected in message and len(message) < 300


def test_the_value_of_a_misspelled_flag_is_no_stray_word() -> None:
    assert problem("--node", "2") == "--node: unknown option; did you mean --nodes?"


def test_a_file_after_a_flag_is_said_to_be_its_value(folder: Path) -> None:
    assert "files before the overrides" in problem("--train.compile", "a.toml")


def test_a_wrong_section(folder: Path) -> None:
    Path("a.toml").write_text("train = 5\n")
    assert "train is a section; write [train]" in problem("a.toml")
    Path("a.toml").write_text("[[train]]\nmax_steps = 5\n")
    assert "train is a section; write [train]" in problem("a.toml")
    Path("a.toml").write_text("[trian]\nmax_steps = 5\n")
    assert problem("a.toml") == "a.toml: trian: unknown section; did you mean train?"
    Path("a.toml").write_text('[slurm]\npartition = "gpu"\n')
    assert "slurm: the request is made to sbatch; give its options" in problem("a.toml")
    Path("a.toml").write_text("[vlm]\nx = 5\n")
    assert "those of other kits are in docs/start/coming-from.md" in problem("a.toml")
    Path("a.toml").write_text("max_steps = 5\n")
    assert problem("a.toml") == "a.toml: max_steps: unknown key; did you mean train.max_steps?"


def test_a_missing_file_names_the_path_and_its_neighbours(folder: Path) -> None:
    Path("configs").mkdir()
    Path("configs/debug.toml").touch()
    Path("configs/7b.toml").touch()
    message = problem("configs/debgu.toml")
    assert str(folder / "configs/debgu.toml") in message
    assert message.endswith("did you mean configs/debug.toml?")
    assert problem("configs/zzz.toml").endswith("configs/ has 7b.toml, debug.toml")
    assert f"the directory {folder}/config does not exist;" in problem("config/debug.toml")
    assert "did you mean configs/debug.toml?" in problem("configs/debug")
    Path("run.toml").mkdir()
    assert "run.toml: is a directory" in problem("run.toml")
    Path("run.toml/config.toml").touch()
    Path("run.toml").rename("run")
    assert "the configuration of that run is run/config.toml" in problem("run")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[train]\nmax_steps = = 5\n", "at line 2, column 13"),
        (b"[train]\nmax_steps = 1\nmax_steps = 1\n", "at line 3"),
        (b"\xff\xfe[train]\n", "not UTF-8"),
        (b"x = " + b"[" * 9000, "not a TOML file"),
        (b"x = " + b"9" * 9000, "not a TOML file"),
    ],
)
def test_not_a_toml_file(folder: Path, content: bytes, expected: str) -> None:
    Path("a.toml").write_bytes(content)
    message = problem("a.toml", root=NeedsData)  # and not: my_data.path is missing as well
    assert message.startswith("a.toml: not a TOML file: ") and expected in message


def test_a_file_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)  # as root, the mode of a file refuses nothing
    assert "a.toml: cannot be read: Permission denied" in problem("a.toml")


def test_a_path_that_cannot_be_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "x.toml: cannot be read: File name too long" in problem("x" * 300 + ".toml")

    def refuse(path: Path, **_: bool) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    for name in ("stat", "read_bytes"):  # in another user's directory that is closed
        monkeypatch.setattr(Path, name, refuse)
    assert "theirs/a.toml: cannot be read: Permission denied" in problem("theirs/a.toml")


def test_a_base_that_is_missing_wrong_or_circular(folder: Path) -> None:
    Path("a.toml").write_text('base = "sub/b.toml"\n')
    assert problem("a.toml").startswith("sub/b.toml (base of a.toml): no such file")
    Path("sub").mkdir()
    Path("sub/b.toml").write_text('base = "../sub/../a.toml"\n')
    message = problem("a.toml")
    assert message.startswith("sub/b.toml (base of a.toml): base = ") and "own base" in message
    for wrong in ("5", "[5]", '"a\\u0000"', "{x = 1}"):
        Path("a.toml").write_text(f"base = {wrong}\n")
        assert "must be a file name or a list of them" in problem("a.toml")


def test_a_chain_of_bases_has_an_end(folder: Path) -> None:
    Path("0.toml").touch()
    for number in range(1, 1500):
        Path(f"{number}.toml").write_text(f'base = "{number - 1}.toml"\n')
    assert "each the base of the one before; merge some" in problem("1499.toml")


def test_all_problems_are_reported_together(folder: Path) -> None:
    Path("a.toml").write_text("[train]\nmax_step = 5\ncompile = 'ture'\n[modle]\ndim = 1\n")
    Path("b.toml").write_text("[train]\nmax_steps = 0\n")
    lines = problems("a.toml", "b.toml", "c.toml", "stray", "--chek", "--optimizer.lr=-1")
    wheres = ["stray", "--chek", "a.toml: train.max_step", "a.toml: train.compile"]
    wheres += ["a.toml: modle", "b.toml: train.max_steps", "c.toml", "--optimizer.lr=-1"]
    assert len(lines) == len(wheres)
    assert all(where in line for where, line in zip(wheres, lines, strict=True))


def test_a_required_value(folder: Path) -> None:
    message = problem(root=NeedsData)
    assert message.startswith("my_data.path: is required (str); write --my_data.path=")
    assert len(problems("--my_data.seed=x", root=NeedsData)) == 2
    Path("a.toml").write_text("[my-data]\npath = 5\n")
    assert "must be a string" in problem("a.toml", root=NeedsData)
    assert read("--my-data.path=x", root=NeedsData).my_data.path == "x"


def test_sections_and_then_the_check_are_asked_for_problems() -> None:
    both = ["--train.note=bad", "--train.compile", "--train.max_steps=13"]
    assert problem("--train.note=bad") == "train.note = bad: must be good; change it"
    assert len(problems("--train.note=bad", "--optimizer.lr=-1")) == 2
    assert "not with train.compile" in problem(*both[1:])
    assert "must be good" in problem(*both)  # no check across an unsound section
    assert len(problems(*both[1:], "stray")) == 1  # perhaps that was to be a file, with the rest
    # A section with a typing error has a default in place of what was meant: it is not asked.
    assert "unknown option" in problem("--train.note=bad", "--train.notes=good")


# --- The way back, and the help ---------------------------------------------------------------

ODD = st.text(alphabet="\"'\\\n\r\t\x01\x7f\x85\u2028$*#[]{}=, ab", max_size=8)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")) | ODD
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
CONFIGS = st.builds(
    Config,
    train=st.builds(
        Train,
        max_steps=st.integers(1, 2**63 - 1),
        compile=st.booleans(),
        note=TEXT.filter(lambda text: text != "bad"),
        clip=st.none() | st.floats(0, 1e300),
        resume=st.none() | TEXT.filter(lambda text: text != "none"),
    ),
    optimizer=st.builds(
        Optimizer,
        name=st.sampled_from(["adamw", "muon"]),
        lr=st.floats(0, 1),
        betas=st.tuples(st.floats(-1, 1), st.floats(-1, 1)),
        milestones=st.lists(st.integers(0, 2**63 - 1)).map(tuple),
        skip=st.lists(TEXT).map(tuple),
        bound=FLOAT | st.just(math.inf),
    ),
).filter(lambda cfg: not check(cfg))


@settings(deadline=None)  # a busy machine takes longer than 0.2 s
@given(CONFIGS)
def test_toml_round_trip(tmp_path_factory: pytest.TempPathFactory, cfg: Config) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.toml"
    path.write_bytes(to_toml(cfg).encode())
    again = load_config_files(Config, [path])
    assert again == cfg and repr(again) == repr(cfg)  # repr: 0 is no 0.0
    assert config_hash(again) == config_hash(cfg)


@given(CONFIGS)
def test_a_line_of_the_toml_is_an_override(cfg: Config) -> None:
    words, section = [], ""
    for line in to_toml(cfg).split("\n"):
        section = line[1:-1] if line.startswith("[") else section
        words += [f"--{section}.{line.replace(' = ', '=', 1)}"] if " = " in line else []
    assert load_config_files(Config, [], words) == cfg


def test_the_toml_is_whole_and_plain() -> None:
    cfg = Config(Train(clip=None, note='a "b"\n$*'), Optimizer(lr=1))
    assert to_toml(cfg) == (
        "[train]\n"
        "max_steps = 1000\n"
        "compile = false\n"
        'note = "a \\"b\\"\\n$*"\n'
        'clip = "none"\n'
        'resume = "none"\n'
        "\n"
        "[optimizer]\n"
        'name = "adamw"\n'
        "lr = 1.0\n"
        "betas = [0.9, 0.95]\n"
        "milestones = []\n"
        "skip = []\n"
        "bound = inf\n"
    )
    assert (
        as_dict(cfg)["optimizer"]["betas"] == [0.9, 0.95] and as_dict(cfg)["train"]["clip"] is None
    )


def test_the_hash_is_stable_and_follows_the_values() -> None:
    assert config_hash(Config()) == "0e8629719130"
    assert config_hash(read("--optimizer.lr=1")) == config_hash(Config(optimizer=Optimizer(lr=1)))
    assert config_hash(read("--optimizer.lr=1")) != config_hash(Config())


def test_help_lists_every_option_on_lines_that_fit() -> None:
    text = help_text(config_schema(Config), "usage: train.py CONFIG.toml")
    assert text.startswith(
        "usage: train.py CONFIG.toml\n\n[train]\n  --train.max_steps int [1000]  "
    )
    for section, options in config_schema(Config).items():
        assert all(f"\n  --{section}.{key} " in text for key in options)
    for part in (
        "(at least 1)",
        ' adamw|muon ["adamw"] ',
        "float or none [1.0]",
        " [float, float] [0.9, 0.95]",
    ):
        assert part in text
    assert "[required]" in help_text(config_schema(NeedsData), "")
    assert max(map(len, text.splitlines())) <= 100
    columns = [
        line.find(word) for word in ("compile the", "any text") for line in text.splitlines()
    ]
    assert len(set(columns)) == 2  # one column, and -1 for the other lines


def test_the_example_of_each_option_is_a_value_of_it() -> None:
    """Messages end with it, as what to write."""
    known = [one for keys in whole_schema(RunConfig).values() for one in keys.values()]
    for each in known + [inner for one in known for inner in (one.keys or {}).values()]:
        each.convert(from_text(each, each.example))


def test_help_wraps_a_long_option_and_a_long_meaning() -> None:
    long = make_dataclass("Long", [("x" * 60, int, option(1, "word " * 30))], frozen=True)
    root = make_dataclass("Root", [("s", long, field(default_factory=long))], frozen=True)
    _, _, _, name, *meaning = help_text(config_schema(root), "usage").splitlines()
    assert name == f"  --s.{'x' * 60} int [1]"
    assert " ".join(meaning).split() == ["word"] * 30 and max(map(len, meaning)) <= 100


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (dict[str, int], None),
        (int | float, 1),
        (tuple[int, str], (1, "a")),
        (int, 0.5),
        (bytes, b""),
    ],
)
def test_a_wrong_declaration_is_our_own_mistake(hint: Any, value: Any) -> None:
    section = make_dataclass("Section", [("x", hint, option(value, "x"))], frozen=True)
    root = make_dataclass("Root", [("s", section, field(default_factory=section))], frozen=True)
    with pytest.raises(AssertionError, match=r"s\.x"):
        config_schema(root)


# --- Through the program ----------------------------------------------------------------------


def train(*words: str, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *python, str(REPO / "scripts/train.py"), *words]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)


def test_train_reports_all_problems_and_exits_with_2() -> None:
    result = train(
        "configs/train/debug.toml",
        "configs/train/nix.toml",
        "--train.max_stps=5",
        "--optimizer.lr=fast",
        "--check",
    )
    assert result.returncode == 2 and result.stdout == ""
    for part in (
        "nix.toml: no such file",
        "did you mean --train.max_steps?",
        "--optimizer.lr=fast: must be a float",
    ):
        assert part in result.stderr
    assert "Traceback" not in result.stderr


def test_check_prints_a_configuration_that_check_prints_again(tmp_path: Path) -> None:
    shards, again = tmp_path / "shards", tmp_path / "again.toml"
    prepare = [sys.executable, str(REPO / "scripts/prepare_data.py"), str(REPO / "src/kempner")]
    subprocess.run(
        [*prepare, "--val-fraction=0.2", "--out", str(shards)], check=True, capture_output=True
    )
    run = f'--run.dir={tmp_path}/it\'s "$HOME" [*]'
    words = [f"--data.dataset-path={shards}", "--train.max_steps", "7", run, "--check"]
    first = train("configs/train/debug.toml", *words)
    assert first.returncode == 0 and "max_steps = 7\n" in first.stdout, first.stderr
    again.write_text(first.stdout)
    assert train(str(again), "--check").stdout == first.stdout
    assert sorted(tmp_path.iterdir()) == [again, shards]  # --check creates nothing


def test_the_configuration_of_a_run_serves_another_run(tmp_path: Path) -> None:
    kept = tmp_path / "config.toml"
    files = [str(REPO / "configs/train/debug.toml")]
    kept.write_text(to_toml(load_config(files, ["--run.dir=runs/old"])))
    cfg = load_config([str(kept)], ["--run.dir=runs/new"])
    assert "runs/new" in to_toml(cfg) and "runs/old" not in to_toml(cfg)


def test_help_needs_no_torch() -> None:
    result = train("--help", python=("-X", "importtime"))
    assert result.returncode == 0 and "--train.max_steps int" in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "kempner.config.loading" in imported and not imported & {"torch", "numpy"}


def test_the_examples_of_the_page_are_true(tmp_path: Path) -> None:
    page = (REPO / "docs/start/configuration.md").read_text()
    command, _, shown = page.partition("\n$ python scripts/train.py ")[2].partition("\n")
    shown = shown.partition("\n```")[0].replace("/home/me/kempner", str(REPO))
    assert train(*shlex.split(command)).stderr.strip() == shown.strip()

    rows = re.findall(r"^\| `.+?` \| `(.+)` \| `(.+)` \|$", page, re.MULTILINE)
    assert len(rows) == 7
    for words, line in rows:
        spellings = [parse_command(shlex.split(word), {}) for word in words.split("`, `")]
        cfgs = [load_run(override.overrides) for override in spellings]
        section = spellings[0].overrides[0][2:].partition(".")[0]
        (tmp_path / "row.toml").write_text(f"[{section}]\n{line}\n")
        assert load_run([], tmp_path / "row.toml") == cfgs[0]


def load_run(overrides: list[str], *files: Path) -> RunConfig:
    return load_config_files(RunConfig, files, ["--data.dataset_path=x", *overrides])


# --- Lists of tables --------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    path: str = option(REQUIRED_OPTION, "a directory")
    weight: float | None = option(None, "its share", minimum=0)
    sizes: tuple[int, ...] = option((), "any numbers")


@dataclass(frozen=True)
class Mix:
    seed: int = option(0, "seed")
    parts: tuple[Part, ...] = option((), "several of them")


@dataclass(frozen=True)
class Mixed:
    mix: Mix = field(default_factory=Mix)


PARTS = (Part("a b"), Part("b", 0.5, (1, 2)))


def test_a_list_of_tables_is_read_replaced_and_written_again(folder: Path) -> None:
    Path("a.toml").write_text(
        '[mix]\nseed = 1\n[[mix.parts]]\npath = "a b"\n'
        '[[mix.parts]]\npath = "b"\nweight = 0.5\nsizes = [1, 2]\n'
    )
    cfg = read("a.toml", root=Mixed)
    assert cfg.mix == Mix(1, PARTS)
    Path("b.toml").write_text(to_toml(cfg))
    assert read("b.toml", root=Mixed) == cfg and "\n    {path = " in Path("b.toml").read_text()
    assert as_dict(cfg)["mix"]["parts"][1] == {"path": "b", "weight": 0.5, "sizes": [1, 2]}
    given = read("a.toml", "--mix.parts=[{path = 'c', weight = 1}]", root=Mixed)
    assert given.mix.parts == (Part("c", 1.0),) and type(given.mix.parts[0].weight) is float
    shown = help_text(config_schema(Mixed), "")
    assert "--mix.parts [table, ...] []" in shown and "weight float or none [none]" in shown


def test_all_that_is_wrong_with_a_list_of_tables_is_said_with_its_place(folder: Path) -> None:
    Path("a.toml").write_text(
        '[[mix.parts]]\nwieght = 1\n[[mix.parts]]\npath = 3\nweight = -1\nsizes = ["x"]\n'
    )
    assert [re.split(" must| is required", x)[0] for x in problems("a.toml", root=Mixed)] == [
        "a.toml: mix.parts[0].wieght: unknown key; did you mean weight?",
        "a.toml: mix.parts[0].path:",
        "a.toml: mix.parts[1].path = 3:",
        "a.toml: mix.parts[1].weight = -1:",
        'a.toml: mix.parts[1].sizes = ["x"]:',
    ]
    for word in ("--mix.parts=3", "--mix.parts=[3]", "--mix.parts={path = 'a'}"):
        assert """write '[{path = "a"}]'""" in problem(word, root=Mixed)


# --- Sections within sections -----------------------------------------------------------------


@dataclass(frozen=True)
class Nested(Sections):
    """Its sections [rl] and [rl.my_data] are no fields, and found by their names."""

    train: Train = field(default_factory=Train)

    @classmethod
    def find_sections(cls, name: str) -> dict[str, type]:
        return cls.all_sections() if name.partition(".")[0] == "rl" else {}

    @classmethod
    def all_sections(cls) -> dict[str, type]:
        return {"rl": Optimizer, "rl.my_data": Data}


def test_a_section_within_another_is_read_overridden_and_written_again(folder: Path) -> None:
    Path("a.toml").write_text('[train]\nnote = "a"\n[rl.my-data]\npath = "p"\nseed = 1\n')
    cfg = read("a.toml", "--rl.my_data.seed=2", "--train.compile", root=Nested)
    more = (("rl", Optimizer()), ("rl.my_data", Data("p", 2)))
    assert cfg == Nested(more, Train(note="a", compile=True))
    assert cfg.of(Data) == Data("p", 2) and read(root=Nested).of(Optimizer) == Optimizer()
    Path("b.toml").write_text(to_toml(cfg))
    assert read("b.toml", root=Nested) == cfg
    assert as_dict(cfg)["rl.my_data"] == {"path": "p", "seed": 2}
    assert "--rl.my_data.seed int [0]" in help_text(whole_schema(Nested), "")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("--rl.my_data=1", "rl.my_data is a section; write --rl.my_data.key=value"),
        ("--rl.my_data.sed=1", "unknown option; did you mean --rl.my_data.seed?"),
        ("--rl.my_dta.seed=1", "unknown option; did you mean --rl.my_data.seed?"),
    ],
)
def test_a_wrong_word_of_a_section_within_another(folder: Path, word: str, expected: str) -> None:
    Path("a.toml").write_text('[rl.my_data]\npath = "p"\n')
    assert problem("a.toml", word, root=Nested) == f"{word}: {expected}"


def test_a_required_key_of_a_section_within_another_is_named_whole() -> None:
    assert problem("--rl.lr=0.5", root=Nested).startswith("rl.my_data.path: is required")


def test_sections_at_their_defaults_are_as_none_at_all(folder: Path) -> None:
    """The config.toml of an older run has all sections."""

    @dataclass(frozen=True)
    class Found(Sections):
        train: Train = field(default_factory=Train)

        @classmethod
        def find_sections(cls, name: str) -> dict[str, type]:
            return {"rl": Optimizer} if name == "rl" else {}

    Path("a.toml").write_text("[rl]\nlr = 0.0003\n")
    assert read("a.toml", root=Found) == Found() and "[rl]" not in to_toml(Found())


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--slurm.nodes=2", "the request is made to sbatch; give its options"),
        ("--output_dir=x", "--help --all lists all; those of other kits are in docs/start/"),
        ("--vlm.freeze=1", "--help --all lists all; those of other kits are in docs/start/"),
        ("--train.max_step=3", "did you mean --train.max_steps?"),
    ],
)
def test_an_option_of_another_kit_is_answered_by_the_way(word: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config_files(RunConfig, [], [word])
    assert hint in str(error.value)
