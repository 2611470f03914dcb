"""What a run survives, on every mesh: a request to leave, a gradient that is not finite on a single
rank, a way back, and a rank that is slow."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from kempner.checkpoint.format.reader import read_tensors
from tests.conftest import TINY, losses, start_train, status
from tests.trainer.distributed.test_tensor import begun

MESHES = {
    "tp": (2, ("--distributed.tp=2",)),
    "cp, ring": (2, ("--distributed.cp=2",)),
    "cp, ulysses": (2, ("--distributed.cp=2", "--distributed.cp_method=ulysses")),
    "ep": (2, ("--distributed.ep=2", "--model.n_experts=4", "--model.ffn_dim=32")),
    "hsdp": (4, ("--distributed.dp_replicate=2",)),
}
COPIES = {"tp", "hsdp"}  # where several ranks hold the same part of a weight
SETTINGS = (
    "--train.max_steps=1000",
    "--schedule.name=constant",
    "--checkpoint.interval=4",
    "--checkpoint.keep_last_n=99",
    "--resilience.max_skipped=2",
    "--resilience.spike_sigma=50",
    "--resilience.spike_window=8",
)
# All on rank 1, which is not the first of its group, and not the one that writes: step 6 is bad,
# then steps 10 and 11; step 17 is a spike, and some ten steps later the rank is asked to leave.
BAD, SPIKE = ((40, 48), (72, 88)), (152, 160)
FAULTS = "slow_products ms=1 rank=1\n" + "\n".join(
    f"bad_gradient from={start} to={end} rank=1" for start, end in BAD
)
FAULTS += f"\nloud from={SPIKE[0]} to={SPIKE[1]} by=100 rank=1"
LEAVE = "kill at=kempner.parallel.layout:Layout.norm_sq:before nth=34 rank=1 signal=SIGTERM"


class World:
    """A run on one mesh that was interrupted, and what its ranks' weights were."""

    def __init__(self, name: str, data: Path, path: Path) -> None:
        self.nproc, mesh = MESHES[name]
        self.words = [*TINY, *SETTINGS, *mesh, f"--data.dataset_path={data}"]
        self.dir, self.digests = path / "run", path / "digests"
        self.digests.mkdir()
        self.out = self.train(self.dir, f"{FAULTS}\n{LEAVE}\ndigest to={self.digests}")

    def train(self, run_dir: Path, faults: str, *more: str) -> str:
        words = (*self.words, f"--run.dir={run_dir}", *more)
        program = "tests/trainer/fault/faulty_train.py"
        process = start_train(*words, nproc=self.nproc, program=program, FAULTS=faults)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, out + err
        return out

    def weights(self) -> list[tuple[int, dict[str, set[int]]]]:
        """Before each update: the samples so far, and the values of each part of a weight on the
        ranks that hold it."""
        ranks = [
            [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(self.digests.glob("rank-*"))
        ]
        assert len(ranks) == self.nproc
        found = []
        for lines in zip(*ranks, strict=True):
            values: dict[str, set[int]] = defaultdict(set)
            for samples, parts in lines:
                assert samples == lines[0][0]
                for part, value in parts.items():
                    values[part].add(value)
            found.append((samples, values))
        return found


EVERY_DAY = [
    pytest.param(name, marks=pytest.mark.soak if "ulysses" in name else []) for name in MESHES
]


@pytest.fixture(scope="module", params=EVERY_DAY)
def world(request: Any, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(request.param, data_dir, tmp_path_factory.mktemp("axes"))


def test_a_bad_gradient_of_one_rank_changes_no_weight_on_any(world: World, request: Any) -> None:
    seen = world.weights()
    held = sum(len(json.loads(p.read_text().splitlines()[0])[1]) for p in world.digests.iterdir())
    assert (held > len(seen[0][1])) == (request.node.callspec.params["world"] in COPIES)
    for (samples, before), (_, after) in itertools.pairwise(seen):
        assert all(len(values) == 1 for values in before.values()), samples
        bad = any(start < samples <= end for start, end in (*BAD, SPIKE))
        assert (before == after) == bad, samples


def test_two_in_a_row_send_all_ranks_back(world: World) -> None:
    lines = [json.loads(text) for text in (world.dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("not_finite")] == [6, 10, 11]
    assert [line["step"] for line in lines if line.get("spike")] == [17]
    assert "2 steps in a row were not finite (resilience.max_skipped): back to step 8" in world.out
    # Step 9 comes twice, and is followed by other samples the second time.
    seen = world.weights()
    first, second = (i for i, (samples, _) in enumerate(seen) if samples == 72)
    assert seen[first][1] == seen[second][1]
    assert seen[first + 1][0] == 80 and seen[second + 1][0] > BAD[-1][1]


def test_the_slow_rank_is_named(world: World) -> None:
    host = re.escape(status(world.dir).get("host") or "") or r"\S+"
    named = set(re.findall(rf"straggler: (rank \d+) on {host} is .* times slower", world.out))
    assert named == {"rank 1"}, world.out
    assert "ms a step): it computes slower" in world.out


@pytest.mark.parametrize(
    "world",
    [pytest.param(name, marks=[] if name == "ep" else pytest.mark.soak) for name in MESHES],
    indirect=True,
)
def test_a_signal_to_one_rank_saves_and_the_run_goes_on_bit_for_bit(
    world: World, tmp_path: Path
) -> None:
    """What was saved then is what a run has there that begins at an earlier checkpoint."""
    end = status(world.dir)
    assert end["state"] == "interrupted"
    run = begun(world.dir.parent, "run", tmp_path / "run", 16)
    world.train(run, FAULTS, f"--train.max_steps={end['step']}")
    assert losses(run) == losses(world.dir) and max(losses(run)) == end["step"]
    first, second = (read_tensors(path / "checkpoints/latest") for path in (world.dir, run))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
