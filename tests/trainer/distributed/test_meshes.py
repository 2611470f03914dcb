"""What is saved on one mesh is loaded on any other: every weight and every moment, bit for bit."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests import zygote
from tests.conftest import ROOT, clean_env
from tests.trainer.distributed.meshes import MODELS


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of one world of four ranks that goes through all meshes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    program = ["-m", "tests.trainer.distributed.meshes", str(tmp_path_factory.mktemp("meshes"))]
    done = zygote.run(
        [sys.executable, *launcher, *program],
        cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("model", MODELS)
def test_every_mesh_loads_what_every_other_has_saved(
    results: list[dict[str, Any]], model: str
) -> None:
    meshes = set(MODELS[model][1])
    assert len(results) == 4
    for found in (of_rank[model] for of_rank in results):
        assert set(found) == {"one process", "engines", *meshes}
        for target, sources in found.items():
            assert sources == {source: [] for source in meshes}, target
