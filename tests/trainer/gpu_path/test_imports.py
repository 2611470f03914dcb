"""What an import does, which any program of the kit may do before it forks or starts another one:
it asks for no GPU and sets no variable. And processes are never forked by default."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT
from tests.trainer.gpu_path.test_host import python

OURS = ("PYTORCH_", "CUDA_", "NCCL_", "TORCH_", "KEMPNER_", "OMP_")  # libraries may set theirs
# What sets variables for itself alone: programs, which nobody else imports.
SETS = {"kempner.jobs.preflight.task": ["TORCH_CPP_LOG_LEVEL"]}


def modules() -> list[str]:
    paths = [path.relative_to(ROOT / "src") for path in (ROOT / "src/kempner").rglob("*.py")]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return sorted(name for name in names if not name.endswith("__main__"))


def test_no_module_asks_for_cuda_or_sets_a_variable() -> None:
    """A process that has asked has no child that can use a GPU; and vLLM's engines, or what run.sh
    starts, would have the variables of the trainer's allocator."""
    python(f"""if True:
        import importlib, os
        for name in [name for name in os.environ if name.startswith({OURS!r})]:
            del os.environ[name]  # the imports of this test's own process
        import torch
        asked = []
        def count(*_):
            asked.append(name)
            return 1
        for name in ("_cuda_getDeviceCount", "_cuda_init", "_cuda_getDevice"):
            setattr(torch._C, name, count)
        assert torch.cuda._is_compiled()
        left, found = [], {{}}
        for name in {modules()!r}:
            before = dict(os.environ)
            try:
                importlib.import_module(name)
            except ImportError:  # an extra that is not installed
                left.append(name)
            more = sorted(key for key in os.environ if os.environ[key] != before.get(key))
            if more := [key for key in more if key.startswith({OURS!r})]:
                found[name] = more
        assert asked == [], f"they ask for CUDA: {{asked}}"
        assert found == {SETS!r}, found
        assert len(left) < 12, left
        name = "it is seen"
        torch.cuda.is_available()
        assert asked == ["it is seen"]
    """)


# --- Processes ------------------------------------------------------------------------------------

MODULES = ("multiprocessing", "mp", "_mp")
PROCESSES = ("Process", "Pool", "Manager", "Queue", "set_start_method", "ProcessPoolExecutor")


def forked_by_default(source: str) -> Iterator[str]:
    """Calls that fork, or do so on Linux before Python 3.14 where no way is named."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name, words = ast.unparse(node.func), [ast.unparse(x) for x in node.args]
        words += [ast.unparse(x.value) for x in node.keywords]
        module, _, function = name.rpartition(".")
        way = any("get_context" in word or word in ("fork", "spawn") for word in words)
        if (
            function == "forkpty"
            or name == "pty.fork"
            or function == "set_start_method"
            or (function == "ProcessPoolExecutor" and not way)
            or (module.split(".")[-1] in MODULES and function in PROCESSES)
            or (function == "get_context" and not words)
            or (function == "DataLoader" and "num_workers" in ast.unparse(node))
        ):
            yield name


def imports(source: str) -> set[str]:
    """Names that are taken out of multiprocessing itself."""
    return {
        name.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("multiprocessing")
        for name in node.names
    }


@pytest.mark.parametrize("folder", ["src/kempner", "scripts"])
def test_no_process_is_forked_by_default(folder: str) -> None:
    """What forks says so: see FORKS in test_host."""
    for path in (ROOT / folder).rglob("*.py"):
        source = path.read_text()
        assert [*forked_by_default(source)] == [], path
        assert not imports(source) & set(PROCESSES), path


@pytest.mark.parametrize(
    "source",
    [
        "multiprocessing.Process(target=f)", "mp.set_start_method('fork')", "os.forkpty()",
        "torch.multiprocessing.Pool(2)", "concurrent.futures.ProcessPoolExecutor(2)",
        "multiprocessing.get_context()", "DataLoader(x, num_workers=2)",
    ],
)  # fmt: skip
def test_such_a_call_is_seen(source: str) -> None:
    assert [*forked_by_default(source)] != []


def test_those_that_name_their_way_may_be() -> None:
    assert not [*forked_by_default("ProcessPoolExecutor(2, multiprocessing.get_context('spawn'))")]
