"""Process groups as they are made on GPUs, in all products of axes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT, clean_env
from tests.trainer.gpu_path.ranks import WORLDS, products


def test_every_product_of_axes_with_a_device_bound(tmp_path: Path) -> None:
    """While a device is bound torch splits the world's group, which ends the process by SIGSEGV,
    and makes a group of some ranks wait for all of them (pytorch#192106, pytorch#145376)."""
    program = [sys.executable, "-m", "tests.trainer.gpu_path.ranks", str(tmp_path)]
    done = subprocess.run(
        program, cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=500
    )
    said = {line["world"]: line for line in map(json.loads, done.stdout.splitlines())}
    codes = {size: line["codes"] for size, line in said.items()}
    for line in said.values():  # NCCL may hang, or send what belongs to another group
        for groups in zip(*filter(None, line["asked"]), strict=False):
            assert groups.count(groups[0]) == len(groups), f"ranks ask for different {groups}"
    assert codes == {size: [0] * size for size in WORLDS}, done.stderr[-4000:]
    for size, line in said.items():
        assert len(line["made"]) == len(products(size))
        assert line["asked"][0] and line["asked"].count(line["asked"][0]) == size
