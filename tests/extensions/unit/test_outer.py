"""The outer optimizer and the compression, on numbers that were computed apart."""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kempner.config.option import ConfigError
from kempner.extensions.lowcomm.compress import Raw, codec_of, is_raw, pack_bits, unpack_bits
from kempner.extensions.lowcomm.config import LowcommConfig
from kempner.extensions.lowcomm.copies import Copies
from kempner.extensions.lowcomm.outer import (
    Alone,
    Arrived,
    Decode,
    Fragment,
    Handle,
    OuterOptimizer,
    OuterState,
)
from kempner.extensions.lowcomm.replicas import LowcommReplicas
from kempner.extensions.lowcomm.steps import StepsReplicas
from kempner.train.configure import check_world, load_config
from kempner.train.progress import Progress
from kempner.train.resilience.requests import REQUEST_FLAGS

ROOT = Path(__file__).parents[3]
FILES = sorted(ROOT.glob("configs/train/lowcomm/*.toml"))


class Room:
    """Replicas that are threads, and meet in memory."""

    def __init__(self, count: int) -> None:
        self.count, self.barrier = count, threading.Barrier(count)
        self.sent: dict[str, dict[int, Tensor]] = {}

    def member(self, number: int) -> Member:
        return Member(self, number)

    def run(self, replica: Callable[[int], list[float]]) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in range(self.count)]

        def go(number: int) -> None:
            try:
                found[number] = replica(number)
            except BaseException:
                self.barrier.abort()
                raise

        threads = [threading.Thread(target=go, args=(i,)) for i in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return found


class Member:
    def __init__(self, room: Room, number: int) -> None:
        self.room, self.number = room, number

    def start(self, ours: Tensor, name: str, decode: Decode | None = None) -> Handle:
        self.room.sent.setdefault(name, {})[self.number] = ours.clone()
        self.room.barrier.wait(30)
        parts = [self.room.sent[name][i] for i in range(self.room.count)]
        self.room.barrier.wait(30)
        parts = [decode(part) for part in parts] if decode else parts
        return Arrived(torch.stack(parts).sum(0) / len(parts))


def quadratics(
    centres: list[float], interval: int, lr: float, momentum: float, rounds: int
) -> list[list[float]]:
    """SGD 0.1 on (x - c)^2 / 2 of each replica, from x = 1; x after each round."""
    room = Room(len(centres))
    cfg = LowcommConfig(replicas=len(centres), interval=interval, lr=lr, momentum=momentum)

    def replica(number: int) -> list[float]:
        x = torch.ones(1)
        outer = OuterOptimizer(cfg, {"x": x}, room.member(number))
        found = []
        for step in range(1, interval * rounds + 1):
            x -= 0.1 * (x - centres[number])
            outer.after_step(step)
            if step % interval == 0:
                found.append(x.item())
        return found

    return room.run(replica)


def test_two_replicas_with_nesterov_momentum() -> None:
    both = quadratics([0.0, -1.0], 2, 0.7, 0.9, 4)
    assert both[0] == both[1]
    assert both[0] == pytest.approx([0.62095, 0.176090935, -0.2609526878, -0.6337711192], abs=1e-6)


def test_one_replica_with_nesterov_momentum() -> None:
    (found,) = quadratics([0.0], 2, 0.7, 0.6, 4)
    assert found == pytest.approx([0.7872, 0.57180384, 0.3837048468, 0.234823006], abs=1e-6)


def test_one_step_a_round_is_data_parallel_sgd() -> None:
    found = quadratics([0.0, -1.0], 1, 1.0, 0.0, 3)
    assert found[0] == found[1] == pytest.approx([0.85, 0.715, 0.5935], abs=1e-6)


STREAMS = {
    (0, 0.0): [[-11, -5], [-17, -23], [-35, -29], [-41, -47]],
    (0, 0.5): [[-8, -5], [-14, -17], [-24.5, -23], [-30.5, -32]],
    (1, 0.0): [[-7, -5], [-13, -19], [-27, -25], [-33, -39]],
    (1, 0.5): [[-6, -5], [-12, -15], [-21.5, -21], [-27.5, -29]],
    (0, 1.0): [[-5, -5], [-11, -11], [-17, -17], [-23, -23]],
}


@pytest.mark.parametrize(("tau", "alpha"), STREAMS)
def test_streaming(tau: int, alpha: float) -> None:
    cfg = LowcommConfig(
        replicas=1, interval=6, fragments=2, tau=tau, alpha=alpha, lr=2.0, momentum=0.0
    )
    weights = {f"blocks.{i}.w": torch.ones(1) for i in range(2)}
    outer = OuterOptimizer(cfg, weights, Alone())
    found = []
    for step in range(1, 13):
        for weight in weights.values():
            weight -= 2
        outer.after_step(step)
        if step % 3 == 0:
            found.append([weight.item() for weight in weights.values()])
    assert found == STREAMS[tau, alpha]


def test_a_number_that_is_not_finite_counts_as_unchanged() -> None:
    room = Room(2)
    cfg = LowcommConfig(replicas=2, interval=1, lr=1.0, momentum=0.0)

    def replica(number: int) -> list[float]:
        x = torch.tensor([1.0, 1.0])
        outer = OuterOptimizer(cfg, {"x": x}, room.member(number))
        x -= torch.tensor([0.5, 0.5 if number else float("nan")])
        outer.after_step(1)
        return x.tolist()

    assert room.run(replica) == [[0.5, 0.75]] * 2


def test_steps_within_a_round_do_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor on the meta device stands for one that is not computed yet: a look at it raises."""
    flags = dict.fromkeys(REQUEST_FLAGS, torch.zeros((), device="meta"))
    monkeypatch.setattr(LowcommReplicas, "after_step", lambda self, progress, numbers: numbers)
    replicas = StepsReplicas.__new__(StepsReplicas)
    replicas.cfg, replicas._leaving = LowcommConfig(replicas=1, interval=4), False
    replicas._exchange = SimpleNamespace(round=0)
    for step in (1, 2):
        assert replicas.after_step(Progress(step=step), flags) is flags
    replicas.after_step(Progress(step=3), dict.fromkeys(REQUEST_FLAGS, torch.ones(())))
    assert replicas._leaving


class OneOfTwo(Copies):
    """Beside another one in this process, which has sent before."""

    count = 2

    def __init__(self, index: int, sent: list[torch.Tensor]) -> None:
        self.index, self.sent = index, sent

    def gather(self, ours: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        self.sent.append(ours)
        assert [len(x) for x in self.sent[:2]] == list(sizes)[: len(self.sent)]
        return self.sent[:2] if len(self.sent) > 1 else [ours, torch.zeros(sizes[1])]


@pytest.mark.parametrize("kind", ["none", "linear", "statistical"])
def test_copies_send_what_one_would(kind: str) -> None:
    """Two copies, each of some rows: the weights and errors of a replica without copies, and the
    bytes in two parts."""
    cfg = LowcommConfig(
        replicas=1, interval=1, compress=kind, feedback=0.0 if kind == "none" else 0.9
    )
    sent: list[torch.Tensor] = []
    found = []
    # The first one takes its turn again, when the second has sent.
    for copies in (Copies(), OneOfTwo(0, sent), OneOfTwo(1, sent), OneOfTwo(0, sent)):
        torch.manual_seed(0)
        named = {"blocks.0.w": torch.randn(5, 8), "norm": torch.randn(8), "b": torch.randn(3)}
        fragment = Fragment(named, cfg, copies)
        for p in named.values():
            p += torch.randn(p.shape)
        counted = Counted()
        fragment.send(counted, "")
        fragment.receive()
        found.append((named, fragment.errors, counted.bytes))
    (alone, errors, whole), (_, _, first), *both = found
    for named, own_errors, _ in both:
        assert all(torch.equal(named[name], alone[name]) for name in alone)
        assert all(torch.equal(own_errors[i], errors[i]) for i in errors)
    assert first + both[0][2] == whole and 0 < both[0][2] < whole


class Counted(Alone):
    def start(self, ours: torch.Tensor, name: str, decode: Decode | None = None) -> Handle:
        self.bytes = ours.nbytes
        return super().start(ours, name, decode)


# --- Compression: relative error and cosine for normal numbers of 256 x 512 ---

# The statistical one is more exact than published implementations, whose 2-bit bins are not
# centred: these have .422 and .907.
ERRORS = {
    ("linear", 8): (0.0069, 1.0),
    ("linear", 4): (0.118, 0.993),
    ("linear", 2): (0.593, 0.864),
    ("statistical", 2): (0.402, 0.9155),
}


@pytest.mark.parametrize(("kind", "bits"), ERRORS)
def test_errors_of_the_codes(kind: str, bits: int) -> None:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) * 1e-3
    codec = codec_of(LowcommConfig(compress=kind, bits=bits))
    data = codec.encode(x)
    assert data.dtype is torch.uint8 and len(data) == codec.size(256, 512)
    heads = 256 * 4 * (2 if kind == "linear" else 2**bits)
    assert len(data) - heads == x.nbytes * bits / 32
    y = codec.decode(data, 256, 512)
    error, cosine = ERRORS[kind, bits]
    assert ((y - x).norm() / x.norm()).item() == pytest.approx(error, rel=0.01)
    assert F.cosine_similarity(x.flatten(), y.flatten(), dim=0).item() == pytest.approx(
        cosine, abs=1e-3
    )


@pytest.mark.parametrize("scale", ["row", "tensor"])
@pytest.mark.parametrize("kind", ["linear", "statistical", "top-k"])
@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (0, 7), (4, 64)])
def test_any_shape_survives(kind: str, scale: str, shape: tuple[int, int]) -> None:
    """With as many codes as there are numbers, or all equal ones, nothing is lost."""
    codec = codec_of(LowcommConfig(compress=kind, bits=4, scale=scale, top_k=1.0))
    for x in (torch.zeros(shape), torch.full(shape, -2.5)):
        data = codec.encode(x)
        assert len(data) == codec.size(*shape)
        torch.testing.assert_close(codec.decode(data, *shape), x)


def test_top_k_keeps_the_largest() -> None:
    x = torch.tensor([[0.1, -3.0, 0.2, 2.0]])
    codec = codec_of(LowcommConfig(compress="top-k", top_k=0.5))
    assert codec.decode(codec.encode(x), 1, 4).tolist() == [[0.0, -3.0, 0.0, 2.0]]


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_codes_are_packed(bits: int) -> None:
    codes = torch.arange(22).view(2, 11) % 2**bits
    packed = pack_bits(codes, bits)
    assert packed.shape == (2, -(-11 * bits // 8))
    assert unpack_bits(packed, bits)[:, :11].tolist() == codes.tolist()


def test_norms_and_embeddings_stay_raw() -> None:
    names = {"embed.weight": 2, "blocks.0.attention_norm.weight": 1, "blocks.0.wq.weight": 2}
    cfg = LowcommConfig(compress="linear")
    assert [is_raw(name, ndim, cfg) for name, ndim in names.items()] == [True, True, False]
    everything = LowcommConfig(compress="linear", raw=())
    assert not any(is_raw(name, ndim, everything) for name, ndim in names.items())


def feedback_error(decay: float) -> float:
    """How far the anchor is from where exact changes would have brought it."""
    cfg = LowcommConfig(
        replicas=1, interval=1, lr=1.0, momentum=0.0, compress="linear", bits=2, feedback=decay
    )
    generator = torch.Generator().manual_seed(1)
    w, change = torch.zeros(4, 64), torch.randn(4, 64, generator=generator)
    outer = OuterOptimizer(cfg, {"w": w}, Alone())
    for step in range(1, 21):
        w += change
        outer.after_step(step)
    return float((w / 20 - change).norm() / change.norm())


def test_feedback_sends_what_was_lost() -> None:
    """Without it 2 bits lose the same part of the same change in every round."""
    assert feedback_error(1.0) < 0.1 < 0.4 < feedback_error(0.0)


def test_the_state_goes_into_a_checkpoint() -> None:
    cfg = LowcommConfig(replicas=1, interval=1, compress="linear", feedback=0.9)
    w, norm = torch.zeros(2, 8), torch.zeros(8)
    state = OuterState(outer := OuterOptimizer(cfg, {"w": w, "norm": norm}, Alone()))
    assert sorted(state.tensors()) == ["norm.momentum", "w.error", "w.momentum"]
    assert state.restore({}) == {}
    w.fill_(3.0)
    state.restored()
    assert outer.fragments[0].anchors[0].tolist() == w.tolist()
    assert isinstance(codec_of(LowcommConfig()), Raw)


# --- How many replicas ---


@pytest.mark.parametrize(
    ("given", "world", "replicas"),
    [
        ({}, (8, 4), 1),
        ({"replicas": 2}, (8, 4), 2),
        ({"replicas": 8}, (8, 4), 8),
        ({"gpus_per_replica": 2}, (8, 4), 4),
        ({"nodes_per_replica": 1}, (8, 4), 2),
        ({"nodes_per_replica": 2}, (16, 4), 2),
    ],
)
def test_replicas_of_a_world(given: dict[str, int], world: tuple[int, int], replicas: int) -> None:
    assert LowcommConfig(**given).count(*world) == replicas


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"replicas": 3}, "lowcomm.replicas = 3: must divide the world of 8 ranks"),
        ({"gpus_per_replica": 16}, "must divide the world of 8 ranks"),
        ({"nodes_per_replica": 3}, "lowcomm.nodes_per_replica = 3 x 4 ranks a node = 12"),
        (
            {"nodes_per_replica": 1, "mode": "steps", "min_replicas": 3},
            "more than the 2 of the job",
        ),
    ],
)
def test_replicas_that_do_not_divide(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LowcommConfig(**given).count(8, 4)


def test_a_replica_on_parts_of_nodes() -> None:
    with pytest.raises(ConfigError, match="neither whole nodes nor a part of one"):
        LowcommConfig(gpus_per_replica=6).count(12, 4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"interval": 30, "fragments": 4}, "must be a multiple of lowcomm.fragments = 4"),
        ({"interval": 6, "fragments": 2, "tau": 3}, "give at most 2"),
        ({"replicas": 2, "gpus_per_replica": 1}, "give only one"),
        ({"feedback": 0.9}, "nothing is compressed"),
        ({"bits": 2}, "lowcomm.bits = 2: nothing is compressed"),
        ({"scale": "tensor"}, "leave scale out"),
        ({"top_k": 0.5}, "leave top_k out"),
        ({"raw": ()}, "lowcomm.raw = []: nothing is compressed"),
        ({"min_replicas": 2}, "all replicas are always needed"),
        ({"silence": 20.0}, "give --lowcomm.mode=steps, or leave it out"),
    ],
)
def test_bad_sections(given: dict[str, Any], words: str) -> None:
    (problem,) = LowcommConfig(**given).problems()
    assert words in problem


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--train.max_steps=45", "train.max_steps = 45: must be a multiple of lowcomm.interval"),
        ("--eval.interval=45", "eval.interval = 45: must be a multiple"),
        ("--checkpoint.interval=45", "checkpoint.interval = 45: must be a multiple"),
        ("--checkpoint.keep_every=100", "100: must be a multiple of lowcomm.interval = 30"),
        (
            "--checkpoint.interval=20min",
            "checkpoint.interval = 20min: replicas are saved at",
        ),
        ("--lowcomm.fragments=5", "the model has 4; give at most that"),
        ("--optimizer.name=schedule_free --schedule.name=constant", "averages weights itself"),
        ("--train.weights=bf16 --train.dtype=bf16", "not built for train.weights = bf16"),
    ],
)
def test_what_cannot_be_combined(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["configs/train/lowcomm/diloco.toml"], words.split())
    (problem,) = caught.value.problems
    assert message in problem


# --- What is shipped ---


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_shipped_files_fit_any_world(path: Path) -> None:
    cfg = load_config([str(path)], [])
    assert cfg.of(LowcommConfig).on != path.stem.startswith("dp-")
    for world in ((1, 1), (2, 2), (8, 4)):
        if world[0] // world[1] >= cfg.of(LowcommConfig).min_replicas:
            assert check_world(cfg, *world) == []


def test_the_page_names_the_files_and_its_commands_are_valid() -> None:
    page = (ROOT / "docs/extensions/lowcomm.md").read_text()
    assert all(f"`{path.name}`" in page for path in FILES)
    node = re.search(r'NODE="(.*)"', page)
    assert node is not None
    commands = re.findall(r"(configs/train/lowcomm/\S+)(.*)", page.replace("$NODE", node[1]))
    assert len(commands) == 4
    for file, words in commands[:3]:
        cfg = load_config([file], shlex.split(words))
        assert cfg.of(LowcommConfig).count(16, 4) == (4 if "nodes" in words else 16)
