"""Training without torch's compiler, which is then not imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


class _LateCompiler(ModuleType):
    """Stand-in for torch._dynamo until more than its no-op markers is needed."""

    config: ModuleType

    @staticmethod
    def disable(fn: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        return fn

    @staticmethod
    def graph_break() -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        # Step aside, or the import below would find this stand-in again.
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def leave_compiler_out() -> None:
    """Import torch's compiler only when something is compiled.

    Every optimizer and every FSDP hook imports it, which takes a second of each start, only to mark
    itself as not to be traced; the hooks do so again at each call.
    """
    if "torch._dynamo" in sys.modules:
        return
    import torch

    # DTensor reads the compiler's options, which can be imported alone.
    options, folder = "torch._dynamo.config", Path(torch.__file__).parent / "_dynamo"
    spec = importlib.util.spec_from_file_location(options, folder / "config.py")
    assert spec is not None and spec.loader is not None
    sys.modules["torch._dynamo"] = late = _LateCompiler("torch._dynamo")
    late.__file__ = str(folder / "__init__.py")  # inspect asks every module, in imports of torch
    sys.modules[options] = late.config = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(late.config)
