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

from kempner.extensions import Extension, extension
from kempner.lookup import INDEX, extension_index

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "kempner"

# From the bottom up: options; the kit, for any program under Slurm; the parts of a trainer; the
# trainer; what is built on it. A module imports its own layer and those below, also in functions
# and for annotations. A name is a module, a package, or a module of a package that is elsewhere.
LAYERS = {
    "config": "config",
    "jobs": """
        background check code compiler directories files front_door gpu history hosts hub
        nccl_transport peers picture port_range preflight private process process_group program ray
        rendezvous resilience.lock run_log run_records signals slurm startup trackers
    """,
    "parts": "checkpoint data loss model optim parallel resilience.spikes",
    "train": """
        combinations configure contents evaluate extensions lookup metrics objective parts profiling
        progress recorder replicas resilience resuming run run_directory step training
    """,
    "extensions": """
        activations bench bench_config extensions_index generate harness hf inspection load lowcomm
        planner preference rl serve sweep
    """,
}
LEVEL = {name: i for i, names in enumerate(LAYERS.values()) for name in names.split()}
MODULES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): path
    for path in sorted(SOURCE.rglob("*.py"))
    if path.name != "__init__.py"
}


def imports(tree: ast.AST, types: bool = False) -> Iterator[str]:
    """Names that the code imports, also within functions; with `types` those for annotations
    alone, too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif types or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from imports(node, types)


def own_imports(path: Path, types: bool = False) -> set[str]:
    """The kempner modules that a file imports."""
    found = set()
    for name in imports(ast.parse(path.read_text()), types):
        if name.split(".")[0] == "kempner" and name != "kempner.__version__":
            module = name if name in MODULES else name.rpartition(".")[0]
            assert module in MODULES, f"{path}: {name} is no module, nor a name in one"
            found.add(module)
    return found


def level(module: str) -> int:
    names = module.split(".")[1:3]
    name = ".".join(names) if ".".join(names) in LEVEL else names[0]
    assert name in LEVEL, f"{module} is in no layer: give it a place in LAYERS"
    return LEVEL[name]


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    names = own_imports(MODULES[module], types=True)
    upward = {other for other in names if level(other) > level(module)}
    assert not upward, f"{module} imports {upward} from a layer above"


def test_the_trainer_finds_its_extensions_by_the_index_alone() -> None:
    """No string below the extensions names one of their modules, but that of the index."""
    for name, path in MODULES.items():
        texts = (
            x.value for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Constant)
        )
        named = {text for text in texts if isinstance(text, str) and text in MODULES}
        above = {text for text in named if level(text) > level(name)}
        assert above == ({INDEX} if name == "kempner.lookup" else set()), name
    targets = {
        *extension_index().SECTIONS.values(),
        *extension_index().KEYS.values(),
        *extension_index().FLAGS.values(),
    }
    for target in {*targets, extension_index().ADVICE}:
        assert isinstance(extension(target), Extension)
        assert level(target.partition(":")[0]) == len(LAYERS) - 1


def test_no_module_imports_itself_around_a_corner() -> None:
    """Not for annotations either: what a class is told of another one is a Protocol beside it."""
    order = TopologicalSorter({n: own_imports(path, types=True) for n, path in MODULES.items()})
    assert len(list(order.static_order())) == len(MODULES)  # CycleError names the circle


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("kempner.model.")])
def test_the_model_knows_neither_meshes_nor_files(module: str) -> None:
    allowed = ("torch", "torch.nn", "kempner.model", "kempner.loss", "kempner.config",
               "kempner.compiler", "functools", "math", "collections", "dataclasses", "typing",
               "__future__")  # fmt: skip
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
        "kempner.run", "kempner.configure", "kempner.process_group", "kempner.parts",
        "kempner.progress",
        "kempner.config.command_line", "kempner.resilience.requests",
        "kempner.metrics", "kempner.history.state", "kempner.resilience.lock", "kempner.slurm",
        "kempner.ray.node", "kempner.ray.ready", "kempner.gpu.sampler", "kempner.gpu.watch",
        "kempner.program.start",
        "kempner.trackers.follow", "kempner.trackers.start",
        "kempner.checkpoint.commit", "kempner.data.shards", "kempner.data.dataset",
        "kempner", "kempner.load", "kempner.bench", "kempner.planner.search",
        "kempner.sweep.submit", "kempner.sweep.look", "kempner.sweep.cost", "kempner.sweep.results",
        *(name for name in MODULES if name.endswith(".config")),
    ]  # fmt: skip
    code = f"import sys, {', '.join(light)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_help_and_check_do_not_import_torch() -> None:
    command = [sys.executable, "-X", "importtime", "scripts/train.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "kempner.run" in done.stderr
    assert not [text for text in done.stderr.splitlines() if text.endswith("| torch")]
