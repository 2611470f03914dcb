"""Who may import whom, read from the source: the direction of ARCHITECTURE.md, and no torch where
none is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from kempner.train.extensions import Extension
from kempner.train.lookup import INDEX, extension_index, load_extension
from tests.layers import LAYERS, LEVEL, ROOT, SOURCE, docstring, drawn, folders

MOST_MODULES = 15  # of a folder: what a reader keeps in mind
MOST_DOORS = 10
MODULES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): path
    for path in sorted(SOURCE.rglob("*.py"))
    if path.name not in ("__init__.py", "moved.py")  # the latter names modules of all layers
}


def imports(tree: ast.AST, types: bool = True) -> Iterator[str]:
    """Names that the code imports, also within functions and, with `types`, for annotations."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif types or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from imports(node, types)


def own_imports(path: Path, types: bool = True) -> set[str]:
    """The kempner modules that a file imports."""
    found = set()
    for name in imports(ast.parse(path.read_text()), types):
        if name.split(".")[0] == "kempner" and name != "kempner.__version__":
            module = name if name in MODULES else name.rpartition(".")[0]
            assert module in MODULES, f"{path}: {name} is no module, nor a name in one"
            found.add(module)
    return found


def level(module: str) -> int:
    name = module.split(".")[1]
    assert name in LEVEL, f"{module} is in no layer: give it a place in LAYERS"
    return LEVEL[name]


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    upward = {other for other in own_imports(MODULES[module]) if level(other) > level(module)}
    assert not upward, f"{module} imports {upward} from a layer above"


def test_the_trainer_finds_its_extensions_by_the_index_alone() -> None:
    """No string below the extensions names one of their modules, but that of the index."""
    for name, path in MODULES.items():
        nodes = ast.walk(ast.parse(path.read_text()))
        texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
        above = {text for text in texts & {*MODULES} if level(text) > level(name)}
        assert above == ({INDEX} if name == "kempner.train.lookup" else set()), name
    targets = {
        *extension_index().SECTIONS.values(),
        *extension_index().KEYS.values(),
        *extension_index().FLAGS.values(),
    }
    for target in {*targets, extension_index().ADVICE}:
        assert isinstance(load_extension(target), Extension)
        assert level(target.partition(":")[0]) == len(LAYERS) - 1


def test_no_module_imports_itself_around_a_corner() -> None:
    order = TopologicalSorter({name: own_imports(path, False) for name, path in MODULES.items()})
    assert len(list(order.static_order())) == len(MODULES)  # CycleError names the circle


def test_the_page_lists_the_folders() -> None:
    """`python -m tests.layers` prints the list."""
    assert drawn() in (ROOT / "ARCHITECTURE.md").read_text()


def test_folders_are_small_and_say_what_lives_there() -> None:
    doors = [path for depth, path in folders() if not depth]
    assert len(doors) <= MOST_DOORS and not [
        path.name for path in SOURCE.glob("*.py") if path.name not in ("__init__.py", "moved.py")
    ]
    for _, folder in folders():
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert docstring(folder) and len(modules) <= MOST_MODULES, folder


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("kempner.model.")])
def test_the_model_knows_neither_meshes_nor_files(module: str) -> None:
    standard = ("functools", "math", "collections", "dataclasses", "typing", "__future__")
    own = ("kempner.model", "kempner.config", "kempner.jobs.system.compiler", "kempner.data.source")
    allowed = ("torch", "torch.nn", *own, *standard)
    for name in imports(ast.parse(MODULES[module].read_text())):
        assert name.startswith(tuple(f"{package}." for package in allowed)) or name in allowed
        assert not name.startswith(("torch.distributed", "torch.utils", "torch.cuda")), name


def test_no_module_re_exports() -> None:
    """A package's __init__ holds a sentence, no imports: each name has one home. kempner's own has
    load_model for notebooks, which imports when it is called."""
    for path in SOURCE.rglob("__init__.py"):
        if path.parent != SOURCE:
            assert not list(imports(ast.parse(path.read_text()))), path


def test_modules_without_torch_stay_without_it() -> None:
    """What runs before a GPU is asked for, on a login node, or in workers that only prepare
    data."""
    light = [
        "kempner.train.sections",
        "kempner.train.configure",
        "kempner.jobs.ranks.process_group",
        "kempner.train.parts",
        "kempner.train.progress",
        "kempner.config.command_line",
        "kempner.train.resilience.requests",
        "kempner.train.recording.metrics",
        "kempner.jobs.records.state",
        "kempner.jobs.lock",
        "kempner.jobs.slurm",
        "kempner.jobs.ray.node",
        "kempner.jobs.ray.ready",
        "kempner.jobs.gpu.sampler",
        "kempner.jobs.gpu.watch",
        "kempner.jobs.program.start",
        "kempner.jobs.trackers.follow",
        "kempner.jobs.trackers.start",
        "kempner.checkpoint.commit",
        "kempner.data.formats.shards",
        "kempner.data.formats.dataset",
        "kempner",
        "kempner.extensions.generate.load",
        "kempner.extensions.bench.measure",
        "kempner.extensions.planner.search",
        "kempner.extensions.sweep.submit",
        "kempner.extensions.sweep.look",
        "kempner.extensions.sweep.cost",
        "kempner.extensions.sweep.results",
        *(name for name in MODULES if name.endswith(".config")),
    ]
    code = f"import sys, {', '.join(light)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_help_and_check_do_not_import_torch() -> None:
    command = [sys.executable, "-X", "importtime", "scripts/train.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "kempner.train.sections" in done.stderr
    assert not [text for text in done.stderr.splitlines() if text.endswith("| torch")]
