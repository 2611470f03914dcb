"""configs/verified: each entry is whole, its command is taken, and the planner believes its
figure."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from kempner.config.option import ConfigError
from kempner.extensions.tune import verified
from tests import zygote
from tests.conftest import ROOT, clean_env

FILES = sorted((ROOT / "configs/verified").glob("*.toml"))
FACTS = {"commit": "abc", "device": "NVIDIA H100 80GB HBM3", "driver": "580.65.06"}
FACTS |= {"torch": "2.13.0", "cuda": "13.0", "kempner": "0.2.0"}


def entry(speed: float = 10_000.0, mfu: float = 0.45, gib: float = 30.0) -> verified.Entry:
    """A figure that nobody has measured."""
    file = str(ROOT / "configs/train/7b.toml")
    new = verified.new_entry([file], ["--train.micro_batch=1"], "H100", 1, 8)
    return new._replace(measured=verified.measured_by(FACTS, speed, mfu, gib))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_entry_of_the_table(path: Path) -> None:
    shape, _, gpu = path.stem.rpartition("-")
    found = verified.read_entry(shape, gpu)
    assert found and found.path == path and found.text() == path.read_text()
    assert not verified.entry_problems(found)
    words = ["--check", f"--nodes={found.nodes}", f"--gpus-per-node={found.gpus_per_node}"]
    done = zygote.run(
        [sys.executable, "scripts/train.py", *found.words, *words],
        cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (entry(speed=90_000.0), "tokens_per_s_per_gpu = 90,000.0: the planner says"),
        (entry(gib=2.0), "memory_gib = 2.0: the planner says"),
        (entry(mfu=1.2), "mfu = 1.2: must be between 0 and 1"),
        (entry()._replace(gpu="H1000"), "gpu = H1000: is not known"),
        (entry()._replace(gpus_per_node=7), "7 ranks"),
    ],
)
def test_what_is_not_plausible(wrong: verified.Entry, says: str) -> None:
    assert says in verified.entry_problems(wrong)[0]
    assert not verified.entry_problems(entry())


def test_a_figure_is_replaced_by_a_faster_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified, "VERIFIED", tmp_path / "verified")
    bare = entry()._replace(measured={})
    for new, written in ((bare, True), (bare, False), (entry(), True), (entry(9e3), False)):
        assert bool(verified.add_entry(new)) == written
    assert verified.read_entry("7b", "H100") == entry()
    assert verified.add_entry(entry(11_000.0))
    path = tmp_path / "verified/7b-h100.toml"
    path.write_text(path.read_text().replace("mfu = ", "mfU = "))
    with pytest.raises(ConfigError, match="mfu, mfU: not as in other entries"):
        verified.read_entry("7b", "H100")


def test_the_command_of_several_nodes() -> None:
    file = str(ROOT / "configs/train/7b.toml")
    new = verified.new_entry([file], ["--train.micro_batch=2"], "H100", 4, 8)
    assert shlex.split(new.command)[:3] == ["sbatch", "--nodes=4", "scripts/slurm/multinode.sh"]
    assert new.words == ["configs/train/7b.toml", "--train.micro_batch=2", "--bench"]
    assert new.changes == ["--train.micro_batch=2"]
    with pytest.raises(ConfigError, match="the table has the shapes of configs/"):
        verified.new_entry([file, file], [], "H100", 1, 8)
