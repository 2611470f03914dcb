"""Memory snapshots of a GPU, whose functions are stood in for; traces:
tests/trainer/distributed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kempner.config.option import ConfigError
from kempner.extensions.planner.out_of_memory import explain_memory
from kempner.extensions.planner.search import Check
from kempner.jobs.ranks.placement import World
from kempner.train.configure import check_world, load_config
from kempner.train.recording.config import ProfileConfig
from kempner.train.recording.profiling import Profiler

GPU = torch.device("cuda")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the allocator was told, in order."""
    found: list[str] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(
        memory, "_record_memory_history", lambda on, **_: found.append(f"record {on}")
    )
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: found.append(Path(path).name))
    return found


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("always", [False, True])
def test_a_profile_of_a_gpu_has_a_snapshot(tmp_path: Path, calls: list[str], always: bool) -> None:
    said: list[str] = []
    cfg = ProfileConfig(steps=2, allocations=always)
    profiler = Profiler(cfg, tmp_path, 0, GPU, said.append)
    assert calls == ["record all"] * always
    for step in range(1, 6):
        profiler.step(step, asked=step == 2)
    name = "steps-3-4-rank-0"
    expected = ["record all", f"{name}.pickle", *([] if always else ["record None"])]
    assert calls[always:] == expected
    assert (tmp_path / f"profile/{name}.json.gz").is_file() and len(said) == 2


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "profile").touch()  # in place of a full disk
    profiler = Profiler(ProfileConfig(steps=1), tmp_path, 0, torch.device("cpu"), said.append)
    for step in range(1, 6):
        profiler.step(step, asked=step == 2)
    assert len(said) == 1 and said[0].startswith(f"profile: cannot be written: {tmp_path}/profile")


def test_the_end_of_the_run_ends_a_profile(tmp_path: Path) -> None:
    said: list[str] = []
    profiler = Profiler(ProfileConfig(steps=9), tmp_path, 0, torch.device("cpu"), said.append)
    for step in range(1, 5):
        profiler.step(step, asked=step == 2, last=step == 4)
    assert said == [f"profile: {tmp_path}/profile/steps-3-4-rank-0.json.gz"]
    profiler.step(5, asked=True, last=True)
    assert said[1] == "profile: the run ends here, and no step is left to record"


def test_nsight_systems_records_these_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any rank that nsys has started. Its interface is stood in for."""
    found, said = [], []  # type: list[str], list[str]
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: found.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: found.append("stop"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: found.append("wait"))

    class Names:
        def __enter__(self) -> None:
            found.append("names")

        def __exit__(self, *_: object) -> None:
            found.append("no names")

    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", Names)
    monkeypatch.setenv("KEMPNER_UNDER_NSYS", "1")
    profiler = Profiler(ProfileConfig(steps=2), tmp_path, 8, GPU, said.append)
    for step in range(1, 9):
        profiler.step(step, asked=step in (2, 6))
        found.append(str(step))
    once = ["names", "no names", "wait", "stop"]
    assert found == [
        *("1", "start", "names", "2", "3", *once[1:], "4", "5"),
        *("start", "names", "6", "7", *once[1:], "8"),
    ]
    assert said[0] == "profile: Nsight Systems has recorded steps 3 to 4"


def test_out_of_memory_leaves_a_snapshot_and_a_word(
    tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words = ["--data.dataset_path=fake:", f"--run.dir={tmp_path}"]

    def told(check: Check) -> str:
        return explain_memory(load_config([], words), World(3, 3, 4, "slurm", 4), check)

    text = told(check_world)
    assert calls == ["out-of-memory-rank-3.pickle"]
    assert f"{tmp_path}/profile/out-of-memory-rank-3.pickle shows what filled it" in text
    assert "; try --" in text
    assert told(lambda *_: ["refused"]).endswith("use more GPUs")  # what a run refuses is no help
    with pytest.raises(ConfigError):
        load_config([], [*words, "--profile.steps=0"])
