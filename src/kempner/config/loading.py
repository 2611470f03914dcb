"""TOML files and command-line overrides -> frozen dataclasses. Names no section, imports no torch.

    @dataclass(frozen=True)
    class RunConfig:
        train: TrainConfig = field(default_factory=TrainConfig)

    command = parse_command(sys.argv[1:], {"check": bool, "nodes": int})
    cfg = load(RunConfig, command.files, command.overrides, command.problems)

Anything unknown is an error, and all errors of a configuration are raised together.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kempner.config import toml
from kempner.config.option import (
    REQUIRED_OPTION,
    ConfigError,
    Option,
    Schema,
    Sections,
    config_schema,
    from_text,
    section_options,
    sections_of,
)
from kempner.config.values import format_value, to_text

OTHER_KITS = "; those of other kits are in docs/start/coming-from.md"
NO_SLURM = (  # as in files of prime-rl
    "the request is made to sbatch; give its options, SBATCH_* variables or site.env, and leave "
    "this out (docs/reference/slurm.md)"
)
MOST_BASES = 100  # in one chain: far below Python's recursion limit
_T = TypeVar("_T")
SectionValues = dict[str, dict[str, Any]]  # section -> key -> value; only the values given


def load_config_files(
    root: type[_T],
    files: Sequence[str | os.PathLike[str]],
    overrides: Sequence[str] = (),
    problems: Iterable[str] = (),
    complete: Callable[[SectionValues], list[str]] = lambda values: [],
    check: Callable[[_T], list[str]] = lambda cfg: [],
) -> _T:
    """Load a `root`: defaults, overridden by the files from left to right, then by `overrides`.

    Raises ConfigError with all problems, the given `problems` (of the command line) first. A
    section may have a method `problems() -> list[str]`, called if its values are valid; `check`
    returns problems across sections and is called if all sections are valid. `complete` adds values
    that follow from the given ones, and returns problems.
    """
    loader = _Loader(root, list(problems))
    loader.complete = bool(files) or not loader.problems  # a bad word may have been a file
    for file in files:
        loader.read(Path(file), str(file), children=())
    for word in overrides:
        loader.override(word)
    return loader.build(root, complete, check)


class _Loader:
    """Collects values and problems."""

    def __init__(self, root: type, problems: list[str]) -> None:
        self.sections: Schema = dict(config_schema(root))
        self.problems = problems
        self.values: dict[str, dict[str, Any]] = {section: {} for section in self.sections}
        self.finds = root if issubclass(root, Sections) else Sections
        self.groups: list[Mapping[str, type]] = []  # of sections found by name
        self.unsound: set[str] = set()  # sections with a problem: not checked any further
        self.complete = True  # all files were read

    def knows(self, name: str) -> bool:
        """Return whether a section has this name, and register its options."""
        group = {} if name in self.sections else self.finds.find_sections(name)
        if group.keys() - self.sections.keys():
            self.groups.append(group)
            for section, cls in group.items():
                self.sections[section] = section_options(section, cls)
                self.values[section] = {}
        return name in self.sections

    def read(self, path: Path, where: str, children: tuple[str, ...]) -> None:
        """Read the files that `base` names, then the file itself."""
        try:
            if path.exists() and not (path.is_file() or path.is_dir()):
                raise OSError(errno.EINVAL, "not a regular file")  # a FIFO may block for ever
            text = path.read_bytes().decode("utf-8")
            if text.startswith("\ufeff"):
                raise ValueError("it begins with a byte order mark; save it as UTF-8 without one")
            table = toml.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            from kempner.config.mistakes import why_not_read

            self._unread(f"{where}: {why_not_read(path, error)}")
            return
        # By the real path: a file may be its own base under another name.
        children = (*children, os.path.realpath(path))
        for base in self._bases(table.pop("base", []), where):
            parent = path.parent / base
            if os.path.realpath(parent) in children:
                fix = "a file cannot be its own base; remove it"
                self._unread(f"{where}: base = {format_value(base)}: {fix}")
            elif len(children) > MOST_BASES:
                fix = f"over {MOST_BASES} files, each the base of the one before; merge some"
                self._unread(f"{path}: base = {format_value(base)}: {fix}")
            else:
                self.read(parent, f"{parent} (base of {where})", children)
        for section, keys in table.items():
            self._read_section(section, keys, where)

    def _bases(self, value: Any, where: str) -> list[str]:
        bases = [value] if isinstance(value, str) else value
        if isinstance(bases, list) and all(isinstance(b, str) and "\0" not in b for b in bases):
            return bases
        fix = 'must be a file name or a list of them; write base = "7b.toml"'
        self._unread(f"{where}: base = {format_value(value)}: {fix}")
        return []

    def _read_section(self, section: str, keys: Any, where: str) -> None:
        name = section.replace("-", "_")
        if not self.knows(name):
            what = "section" if isinstance(keys, dict) else "key"
            problem = f"unknown {what}{self._nearest(name)}"
            if name == "slurm":
                problem = NO_SLURM
            elif what == "section" and problem.endswith("lists all"):
                problem += OTHER_KITS
            self._wrong(name, f"{where}: {section}: {problem}")
            return
        if not isinstance(keys, dict):
            fix = f"{section} is a section; write [{section}] and its keys below it"
            self._wrong(name, f"{where}: {section} = {format_value(keys)}: {fix}")
            return
        spelled: dict[str, str] = {}
        for key, value in keys.items():
            inner = f"{name}.{key.replace('-', '_')}"
            # A table in a table may be a section: [rl.inference].
            if self.knows(inner):
                self._read_section(inner, value, where)
                continue
            other = spelled.setdefault(key.replace("-", "_"), key)
            if other != key:
                self._wrong(name, f"{where}: {section}.{key}: repeats {other}; keep one of them")
            self._set(
                name,
                key.replace("-", "_"),
                value,
                f"{where}: {section}.{key} = {format_value(value)}",
            )

    def override(self, word: str) -> None:
        """Take one `--section.key=value`, `--section.flag` or `--no-section.flag`."""
        name, equals, text = word.removeprefix("--").partition("=")
        where, name = _one_line(word), name.replace("-", "_")
        if negated := name.startswith("no_"):
            name = name.removeprefix("no_")
        # A section may have a dot in its name, as rl.inference.
        section, _, key = (name, "", "") if self.knows(name) else name.rpartition(".")
        # Registers the options of a section found by name.
        self.knows(section)
        option = self.sections.get(section, {}).get(key)
        if section in self.sections and not key:
            fix = f"{section} is a section; write --{section}.key=value"
            self._wrong(section, f"{where}: {fix}")
        elif option is None:
            problem = f"unknown option{self._nearest(name, '--no-' if negated else '--')}"
            if problem.endswith("lists all"):
                problem = NO_SLURM if section == "slurm" else problem + OTHER_KITS
            self._wrong(section, f"{where}: {problem}")
        elif equals and negated:
            fix = f"no-{name}" if option.item is bool else f"{name}={text}"
            self._wrong(section, f"{where}: --no- takes no value; write --{fix}")
        elif equals:
            self._set(section, key, from_text(option, text), where)
        elif option.item is bool and option.size is None:
            self._set(section, key, not negated, where)
        else:
            fix = "only true or false can be negated" if negated else "a value is missing"
            self._wrong(section, f"{where}: {fix}; write --{name}={option.example}")

    def _set(self, section: str, key: str, value: Any, where: str) -> None:
        option = self.sections[section].get(key)
        if option is None:
            above = "; base goes above the first [section]"
            fix = above if key == "base" else self._nearest(f"{section}.{key}")
            self._wrong(section, f"{where}: unknown key{fix}")
            return
        self.values[section][key] = None  # a wrong value is not also missing
        try:
            self.values[section][key] = option.convert(value)
        except ValueError as error:
            self._wrong(section, f"{where}: {error}")
        except ConfigError as error:
            file_or_word = where.partition(f": {section}.")[0]
            for problem in error.problems:
                self._wrong(section, f"{file_or_word}: {problem}")

    def _unread(self, problem: str) -> None:
        self.problems.append(problem)
        self.complete = False

    def _wrong(self, section: str, problem: str) -> None:
        self.problems.append(problem)
        self.unsound.add(section)

    def _nearest(self, name: str, dashes: str = "") -> str:
        # Imported only for mistakes.
        from kempner.config.mistakes import nearest_option

        others = self.finds.all_sections().items()
        sections = self.sections | {each: section_options(each, cls) for each, cls in others}
        return nearest_option(name, self.sections, sections, dashes)

    def build(
        self,
        root: type[_T],
        complete: Callable[[SectionValues], list[str]],
        check: Callable[[_T], list[str]],
    ) -> _T:
        """Return the configuration. Raises ConfigError with all problems found so far and here."""
        if not self.complete:  # the rest may need values of the missing file
            raise ConfigError(self.problems)
        if not self.unsound and (problems := complete(self.values)):
            raise ConfigError(self.problems + problems)
        sections: dict[str, Any] = {}
        for section, cls in sections_of(root).items():
            sections[section] = self._section(section, cls)
        more = [
            [(section, self._section(section, cls)) for section, cls in group.items()]
            for group in self.groups
        ]
        if self.unsound:
            raise ConfigError(self.problems)
        # A group with only defaults counts as not given: an older file lists all sections.
        used = [group for group in more if any(each != type(each)() for _, each in group)]
        if used:
            sections["more"] = tuple(sorted((pair for group in used for pair in group), key=_name))
        cfg = root(**sections)
        self.problems += check(cfg)
        if self.problems:
            raise ConfigError(self.problems)
        return cfg

    def _section(self, section: str, cls: type) -> Any:
        """Build the section; None if something is wrong with it."""
        values = self.values[section]
        for key, option in self.sections[section].items():
            if option.default is REQUIRED_OPTION and key not in values:
                fix = f"write --{option.name}={option.example}, or {key} under [{section}]"
                self._wrong(section, f"{option.name}: is required ({option.type_name}); {fix}")
        if section in self.unsound:
            return None
        built = cls(**values)
        for problem in _own_problems(built):
            self._wrong(section, problem)
        return built


def _name(pair: tuple[str, Any]) -> str:
    return pair[0]


def _own_problems(part: Any) -> list[str]:
    return list(part.problems()) if hasattr(part, "problems") else []


def _one_line(word: str) -> str:
    return word if word.isprintable() and len(word) <= 120 else format_value(word, 120)


# --- A configuration as text ------------------------------------------------------------------


def as_dict(cfg: Any) -> dict[str, dict[str, Any]]:
    """Convert a configuration to {section: {key: value}} of JSON's and TOML's types and None."""
    plain: dict[str, dict[str, Any]] = {}
    for section, options in config_schema(type(cfg)).items():
        plain[section] = _plain_table(getattr(cfg, section), options)
    for section, section_values in cfg.more if isinstance(cfg, Sections) else ():
        cls: type = type(section_values)
        plain[section] = _plain_table(section_values, section_options(section, cls))
    return plain


def _plain_table(table: Any, options: Mapping[str, Option]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, option in options.items():
        value = option.convert(getattr(table, key))
        if option.keys is not None:
            value = [_plain_table(item, option.keys) for item in value]
        plain[key] = list(value) if isinstance(value, tuple) else value
    return plain


def to_toml(cfg: Any) -> str:
    """Format the whole configuration, defaults included, as TOML. load_config_files() reads it back
    as an equal one."""
    blocks = []
    for section, values in as_dict(cfg).items():
        lines = [f"{key} = {_lines(value)}\n" for key, value in values.items()]
        blocks.append(f"[{section}]\n" + "".join(lines))
    return "\n".join(blocks)


def _lines(value: Any) -> str:
    """Format `value` as TOML, one line per table of a list."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + "".join(f"    {to_text(table)},\n" for table in value) + "]"
    return to_text(value)


def config_hash(cfg: Any) -> str:
    """Hash a configuration to 12 hex digits, equal for equal configurations on any machine."""
    return hashlib.sha256(to_toml(cfg).encode()).hexdigest()[:12]
