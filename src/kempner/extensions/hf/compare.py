"""Compare our reading of config.json with that of transformers: its defaults, and where its
version places the keys."""

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
    the same file. Returns a one-line summary; raises ConfigError with the differences."""
    try:
        import transformers
    except ImportError:
        return "transformers is not installed: how it reads config.json was not compared"
    file = directory / CONFIG_FILE
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # it warns about unknown keys
            hf_config = transformers.AutoConfig.from_pretrained(directory).to_dict()
    except Exception as error:  # any error of its versions
        text = " ".join(str(error).split())
        raise ConfigError(f"{file}: transformers cannot read it: {text}") from None
    # to_dict() fills in the defaults of transformers; the same function reads both.
    values = model_values(hf_config, f"{file}, as transformers {transformers.__version__} reads it")
    if differ := [key for key in own_config if own_config[key] != values.get(key)]:
        problems = [
            f"{file}: model.{key} is {format_value(own_config[key])} here, but "
            f"{format_value(values.get(key))} for transformers {transformers.__version__}; set "
            "the key explicitly"
            for key in differ
        ]
        raise ConfigError(problems)
    return f"transformers {transformers.__version__} reads the same shape"
