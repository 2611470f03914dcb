"""Which checkpoints a run refuses, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kempner.checkpoint.choose import check
from kempner.config.option import ConfigError


def facts(tokens: str, dataset: str) -> dict[str, Any]:
    return {"run": "a", "fixed": {"data": {"seed": 0, "tokens": tokens}}, "dataset": dataset}


def test_other_data_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        check(Path("step_00000002"), facts("x", "/data/old"), facts("y", "/data/new"))
    assert "data.dataset_path = /data/new holds other tokens than /data/old" in str(caught.value)
