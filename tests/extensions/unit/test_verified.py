"""configs/verified: each entry is whole, its command is taken, and the planner believes its
figure."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_checks
from benchmarks.gpu_job import Job
from kempner.config.command_line import parse_command
from kempner.config.option import ConfigError
from kempner.extensions.tune import verified
from kempner.extensions.tune.space import RankDevice, Space
from kempner.extensions.tune.trials import Measurement, Trial
from kempner.jobs.ranks.placement import World
from kempner.train.configure import check_world, load_config
from tests import zygote
from tests.conftest import ROOT, clean_env
from tests.waiting import LIMIT_S

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
        cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=LIMIT_S,
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
    path.write_text('shape = "7b\n')
    with pytest.raises(ConfigError, match=r"7b-h100.toml: not a TOML file: .* correct or remove"):
        verified.read_entry("7b", "H100")


def test_the_command_of_several_nodes() -> None:
    file = str(ROOT / "configs/train/7b.toml")
    new = verified.new_entry([file], ["--train.micro_batch=2"], "H100", 4, 8)
    assert shlex.split(new.command)[:3] == ["sbatch", "--nodes=4", "scripts/slurm/multinode.sh"]
    assert new.words == ["configs/train/7b.toml", "--train.micro_batch=2", "--bench"]
    assert new.changes == ["--train.micro_batch=2"]
    one = new._replace(command=new.command.replace("multinode", "singlenode"))
    assert one.words == new.words
    with pytest.raises(ConfigError, match="the table covers the shapes of configs/"):
        verified.new_entry([file, file], [], "H100", 1, 8)


def test_a_tune_and_a_check_of_a_gpu_add_their_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words of the user's own are in the command, but for directories and data."""
    monkeypatch.setattr(verified, "VERIFIED", tmp_path)
    file = str(ROOT / "configs/train/7b.toml")
    words = ["--run.dir=here", "--data.dataset_path=fake:", "--train.global_batch_tokens=4194304"]
    cfg = load_config([file], words)
    space = Space(cfg, 8, 8, RankDevice(FACTS["device"], 79.1), check_world)
    best = Trial({"train.micro_batch": 2}, 1.0, runs=[Measurement((50.0,) * 5, 40.0, 0.4)])
    world = World(0, 0, 8, "torchrun", per_node=8)
    path = verified.record(parse_command([file, *words], {}), best, space, FACTS, world)
    found = verified.read_entry("7b", "H100")
    assert found and path == tmp_path / "7b-h100.toml" and not verified.entry_problems(found)
    assert found.changes == ["--train.global_batch_tokens=4194304", "--train.micro_batch=2"]
    assert found.measured["tokens_per_s_per_gpu"] == round(4194304 / 50 / 8, 1)

    machine = {**FACTS, "memory_gib": 79.1}
    monkeypatch.setattr("kempner.extensions.bench.measure.describe_machine", lambda: machine)
    job = Job(tmp_path, "cuda", False, 8)
    gpu_checks.verify(job, "configs/train/7b.toml", ["--train.micro_batch=1"], 11e3, 0.5, 30.0)
    found = verified.read_entry("7b", "H100")
    assert found and found.measured["mfu"] == 0.5
    assert found.changes == ["--train.micro_batch=1"] and not verified.entry_problems(found)
