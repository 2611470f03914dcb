"""A Ray that knows no tokens takes commands from every user of the network: ray.sh refuses it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.jobs.shell.test_lib import ROOT
from tests.waiting import LIMIT_S

NODE = ROOT / "scripts/slurm/lib/ray_node.sh"


def node(tmp_path: Path, version: str, metadata: bool = False, **env: str) -> str:
    """What a node tells ray.sh, with a Ray of that version."""
    package = tmp_path / "site/ray"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    if metadata:
        about = tmp_path / "site/ray-1.dist-info/METADATA"
        about.parent.mkdir()
        about.write_text(f"Metadata-Version: 2.1\nName: ray\nVersion: {version}\n")
    elif version:
        (package / "_version.py").write_text(f'version = "{version}"\ncommit = "abc"\n')
    fixed = {
        "PATH": "/usr/bin:/bin",
        "SLURM_NODEID": "0",
        "SLURMD_NODENAME": "n1",
        "KEMPNER_PYTHON": "python3",
        "PYTHONPATH": str(tmp_path / "site"),
    }
    words = ["bash", NODE, tmp_path, "", "--no-such-option"]
    done = subprocess.run(words, env=fixed | env, capture_output=True, text=True, timeout=LIMIT_S)
    log = (tmp_path / "ray-head.log").read_text()
    started = "kempner.jobs.ray.node" in log or "Traceback" in log
    assert started == (not done.stdout), done.stdout + log
    return done.stdout


@pytest.mark.parametrize("version", ["1.13.0", "2.9.3", "2.51.1", ""])
def test_one_that_ignores_tokens_is_refused(tmp_path: Path, version: str) -> None:
    told = node(tmp_path, version)
    assert told.startswith("FAULT 75 n1: Ray ") and "export RAY_AUTH_MODE=disabled" in told


@pytest.mark.parametrize("version", ["2.52.0", "2.100.1", "3.0.0.dev0"])
def test_one_that_knows_tokens_is_not(tmp_path: Path, version: str) -> None:
    assert node(tmp_path, version) == ""


def test_a_version_from_the_package(tmp_path: Path) -> None:
    assert "Ray 2.40 of " in node(tmp_path, "2.40.0", metadata=True)


def test_who_asks_for_it_gets_it(tmp_path: Path) -> None:
    assert node(tmp_path, "2.9.3", RAY_AUTH_MODE="disabled") == ""
