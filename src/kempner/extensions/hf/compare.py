"""Comparison of our reading of config.json with that of transformers: its defaults, and its
version's places of keys."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

from kempner.config.option import ConfigError
from kempner.config.values import format_value
from kempner.extensions.hf.families import model_values
from kempner.extensions.hf.source import CONFIG_FILE


def compare_with_transformers(directory: Path, own_config: dict[str, Any]) -> str:
    """Compare `own_config`, the [model] section from a config.json, with transformers' reading of
    the same file. Returns a line about it; raises ConfigError with the differences."""
    try:
        import transformers
    except ImportError:
        return "transformers is not installed: how it reads config.json was not compared"
    file = directory / CONFIG_FILE
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # it warns of keys that it does not know
            hf_config = transformers.AutoConfig.from_pretrained(directory).to_dict()
    except Exception as error:  # whatever its versions raise
        text = " ".join(str(error).split())
        raise ConfigError(f"{file}: transformers cannot read it: {text}") from None
    # to_dict() has the defaults of transformers filled in; the same function reads both.
    values = model_values(hf_config, f"{file}, as transformers {transformers.__version__} reads it")
    if differ := [key for key in own_config if own_config[key] != values.get(key)]:
        problems = [
            f"{file}: model.{key} is {format_value(own_config[key])} here, and "
            f"{format_value(values.get(key))} for transformers {transformers.__version__}; give "
            "the key that says so explicitly"
            for key in differ
        ]
        raise ConfigError(problems)
    return f"transformers {transformers.__version__} reads the same shape"
