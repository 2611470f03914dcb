"""torch.compile, for each block or for the whole model, or not at all."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kempner.model.decoder import Decoder


def compile_model(model: Decoder, scope: str) -> None:
    """Before the model is sharded, so that the hooks of FSDP stay outside of what is compiled.

    block: all blocks are alike and share one graph, which is compiled once, however deep the model
    is. model: one graph from the embedding to the loss, which takes as much longer to compile.
    """
    if scope == "model":
        model.compile()
        return
    for block in model.blocks:
        block.compile()
    model.loss = torch.compile(model.loss)


class _LateCompiler(ModuleType):
    """Stands for torch._dynamo until somebody needs more of it than to be left alone."""

    config: ModuleType

    @staticmethod
    def disable(fn: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        return fn

    @staticmethod
    def graph_break() -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def leave_compiler_out() -> None:
    """Import torch's compiler only when something is compiled.

    Every optimizer and every hook of FSDP imports it, a second of each start, to say that it shall
    not trace them; and the hooks say so again at each call.
    """
    if "torch._dynamo" in sys.modules:
        return
    # DTensor reads options of it, which need nothing of the rest.
    options = "torch._dynamo.config"
    spec = importlib.util.spec_from_file_location(
        options, Path(torch.__file__).parent / "_dynamo/config.py"
    )
    assert spec is not None and spec.loader is not None
    sys.modules["torch._dynamo"] = late = _LateCompiler("torch._dynamo")
    sys.modules[options] = late.config = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(late.config)
