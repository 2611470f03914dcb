"""Comparison of our reading of config.json with that of transformers: its defaults, and its
version's places of keys."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

from kempner.config.option import ConfigError
from kempner.config.values import shown
from kempner.hf.families import model_values
from kempner.hf.source import CONFIG


def compare_with_transformers(directory: Path, ours: dict[str, Any]) -> str:
    """Compare `ours`, the [model] section from a config.json, with transformers' reading of the
    same file. Returns a line about it; raises ConfigError with the differences."""
    try:
        import transformers
    except ImportError:
        return "transformers is not installed: how it reads config.json was not compared"
    file = directory / CONFIG
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # it warns of keys that it does not know
            theirs = transformers.AutoConfig.from_pretrained(directory).to_dict()
    except Exception as error:  # whatever its versions raise
        text = " ".join(str(error).split())
        raise ConfigError(f"{file}: transformers cannot read it: {text}") from None
    values = model_values(theirs, f"{file}, as transformers {transformers.__version__} reads it")
    if differ := [key for key in ours if ours[key] != values.get(key)]:
        problems = [
            f"{file}: model.{key} is {shown(ours[key])} here, and {shown(values.get(key))} for "
            f"transformers {transformers.__version__}; give the key that says so explicitly"
            for key in differ
        ]
        raise ConfigError(problems)
    return f"transformers {transformers.__version__} reads the same shape"
