"""What replicas over a slow link cost: DiLoCo, streaming DiLoCo and data parallelism, beside the
same replicas without any communication.

    sudo python -m benchmarks.lowcomm --turns 3 --out docs/pictures/lowcomm.png  # about 12 minutes

Two network namespaces stand for two islands with a GPU each. Between them is a link of 100 Mbit/s
whose packets arrive 20 ms later: a TUN device in each, and a process that carries packets from one
to the other and counts their bytes. A step of a real model takes a GPU longer than a CPU takes for
this small one, so each step waits for --step-ms. What decides is how long a round is, in times of
what its fp32 numbers take on the link; that is printed, and docs/extensions/lowcomm.md says what it
means.

The ways take turns; each tokens/s is divided by that of the replicas without communication in the
same turn, and the table has the median of the turns, the lowest and the highest. Other work on the
machine shows in that spread. Blocked: the share of its time that a replica has waited for outer
steps, by its own metrics. Bytes: what the link has carried, with all headers, and beside it what
the replicas say that they have sent.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import json
import multiprocessing
import os
import select
import shlex
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TRAINER = ROOT / "tests/trainer/fault/faulty_train.py"
RATE, DELAY_S = 100e6 / 8, 0.020  # bytes/s, one way
PACKET = 16_000  # bytes: few, because each costs the carrier some 50 us of a shared core
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
NAMES = ("kempner-a", "kempner-b")
ROUND = 30

MODEL = (
    *("--model.dim=192", "--model.n_layers=4", "--model.n_heads=6", "--model.ffn_dim=512"),
    *("--train.seq_len=32", "--no-checkpoint.save", "--checkpoint.interval=0"),
    *("--eval.interval=0", "--metrics.log_interval=1", "--distributed.device=cpu"),
    *("--distributed.dp_replicate=-1", "--distributed.dp_shard=1"),
)
LOW = ("--lowcomm.replicas=2", f"--lowcomm.interval={ROUND}")
STREAM = ("--lowcomm.fragments=2", "--lowcomm.tau=5", "--lowcomm.alpha=0.5", "--lowcomm.lr=0.4")
FOUR_BITS = ("--lowcomm.compress=linear", "--lowcomm.bits=4", "--lowcomm.raw=[]")
APART, DATA_PARALLEL = "no communication", "data parallel"
WAYS: dict[str, tuple[str, ...]] = {
    APART: (),
    DATA_PARALLEL: (),
    "DiLoCo": LOW,
    "DiLoCo, 4 bits": (*LOW, *FOUR_BITS),
    "streaming": (*LOW, *STREAM),
    "streaming, 4 bits": (*LOW, *STREAM, *FOUR_BITS),
}


class Found(NamedTuple):
    """Of one run."""

    rate: float  # tokens/s of both islands
    sent: float  # bytes over the link in a step, both ways, with all headers
    blocked: float  # share of the time
    computed: float  # bytes that the replicas have counted, in the same unit as sent
    parallel: float  # and what data parallelism would have sent


def steps_of(way: str) -> tuple[int, int]:
    """How many steps are measured, and how many warm up before them: whole rounds where there are
    any. Those of data parallelism take longer."""
    return (30, 10) if way == DATA_PARALLEL else (2 * ROUND, ROUND)


def sh(command: str) -> None:
    subprocess.run(shlex.split(command), check=True, capture_output=True)


def enter(namespace: str) -> None:
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def tun() -> int:
    """The packets of a new device `slow0` of this namespace."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    # A struct ifreq: the name, flags, and what is left of its 40 bytes.
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", b"slow0", IFF_TUN | IFF_NO_PI))
    return fd


def carry(ready: Any, count: Synchronized[int]) -> None:
    """The link: packets leave one after another at its rate, and arrive after its delay."""
    ends = []
    for name in NAMES:
        enter(name)
        ends.append(tun())
    ready.set()
    free, order = [0.0, 0.0], 0
    coming: list[tuple[float, int, int, bytes]] = []
    while True:
        now = time.monotonic()
        wait = max(0.0, coming[0][0] - now) if coming else 1.0
        for fd in select.select(ends, [], [], wait)[0]:
            packet, way = os.read(fd, 1 << 16), ends.index(fd)
            # A packet waits until those before it are on the line.
            free[way] = max(free[way], time.monotonic()) + len(packet) / RATE
            order += 1
            # `order` keeps packets that arrive at one time in their sequence.
            heapq.heappush(coming, (free[way] + DELAY_S, order, ends[1 - way], packet))
            count.value += len(packet)
        while coming and coming[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(coming)
            with contextlib.suppress(OSError):  # the device there is not up yet
                os.write(to, packet)


class Link:
    def __enter__(self) -> Link:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            sh(f"ip netns add {name}")
        ready = multiprocessing.Event()
        self.bytes = multiprocessing.Value("q", 0)
        self._carrier = multiprocessing.Process(target=carry, args=(ready, self.bytes), daemon=True)
        self._carrier.start()
        assert ready.wait(20), "no TUN device: this needs root, and /dev/net/tun"
        # Only now: the devices exist once the carrier has made them.
        for number, name in enumerate(NAMES, 1):
            inside = f"ip netns exec {name} ip"
            sh(f"{inside} link set lo up")
            sh(f"{inside} addr add 10.99.0.{number}/24 dev slow0")
            sh(f"{inside} link set slow0 mtu {PACKET} txqueuelen 1000 up")
        return self

    def __exit__(self, *_: object) -> None:
        self._carrier.terminate()
        self._carrier.join()
        for name in NAMES:
            sh(f"ip netns delete {name}")


def run(way: str, work: Path, step_ms: int, link: Link) -> Found:
    shutil.rmtree(work, ignore_errors=True)
    apart, steps = way == APART, sum(steps_of(way))
    before = link.bytes.value
    started = []
    for rank, name in enumerate(NAMES):
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "FAULTS": f"slow ms={step_ms}",
            "GLOO_SOCKET_IFNAME": "slow0",
        }
        if not apart:
            env |= {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
            }
            env |= {"MASTER_ADDR": "10.99.0.1", "MASTER_PORT": "29600"}
        batch = f"--train.global_batch={2 if apart else 4}"
        run_dir = f"--run.dir={work / (str(rank) if apart else 'run')}"
        command = [sys.executable, str(TRAINER), "configs/train/quickstart.toml", *MODEL]
        command += [batch, run_dir, f"--train.max_steps={steps}", *WAYS[way]]
        started.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command],
                cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    try:
        for process in started:
            out = process.communicate(timeout=600)[0]
            assert process.returncode == 0, f"{way}: {out}"
    finally:
        for process in started:
            process.kill()
    found = [rate(each, way) for each in sorted(work.rglob("metrics.jsonl"))]
    # A run counts the tokens of all its replicas.
    tokens = sum(each.rate for each in found) if apart else found[0].rate
    blocked = max(each.blocked for each in found)
    computed, parallel = (sum(column) for column in list(zip(*found, strict=True))[3:])
    sent = (link.bytes.value - before) / steps
    return Found(tokens, sent, blocked, computed, parallel)


def rate(metrics: Path, way: str) -> Found:
    """Of one replica: after the warm-up, but the bytes of all rounds."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    at = {line["step"]: line for line in lines if "loss" in line}
    measured, warm_up = steps_of(way)
    last = warm_up + measured
    spent = sum(at[step]["step_time"] for step in range(warm_up + 1, last + 1))
    rounds = [line for line in lines if "round" in line]
    outer = sum(line["outer_time"] for line in rounds if line["round"] > 1)
    sent, parallel = (
        sum(line[f"bytes_{name}"] for line in rounds) / last for name in ("sent", "data_parallel")
    )
    tokens = at[last]["tokens"] - at[warm_up]["tokens"]
    return Found(tokens / spent, 0.0, outer / spent, sent, parallel)


def draw(ratios: dict[str, list[float]], out: Path) -> None:
    """A bar for the median of the turns, a line from the lowest to the highest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    figure, axes = pyplot.subplots(figsize=(7, 2.8))
    for name, found in reversed(ratios.items()):
        middle, low, high = statistics.median(found), min(found), max(found)
        axes.barh(name, middle, xerr=[[middle - low], [high - middle]], color="tab:blue", capsize=3)
        axes.text(high + 0.02, name, f"{middle:.1%}", va="center")
    axes.set_xlim(0, 1.25)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("tokens/s, relative to the same replicas without communication")
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1%} ({min(values):.1%} to {max(values):.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--step-ms", type=int, default=250)
    parser.add_argument("--out", type=Path, help="picture")
    options = parser.parse_args()
    found: dict[str, list[Found]] = {name: [] for name in WAYS}
    with Link() as link, tempfile.TemporaryDirectory() as folder:
        for _ in range(options.turns):
            for name in WAYS:
                found[name].append(run(name, Path(folder) / "work", options.step_ms, link))
                print(name, *(f"{x:.3f}" for x in found[name][-1]), flush=True)
    ratios = {
        name: [ours.rate / alone.rate for ours, alone in zip(turns, found[APART], strict=True)]
        for name, turns in found.items()
    }
    parallel = found["DiLoCo"][0].parallel
    tokens = 2 * 2 * 32  # of both replicas in a step
    round_s = ROUND * statistics.median(tokens / x.rate for x in found[APART])
    print(
        f"\na round: {round_s:.1f} s, {round_s / (parallel / 2 / RATE):.1f} times its fp32 numbers"
    )
    print("\n| | tokens/s | blocked | MB over the link in a step | as counted by replicas |")
    print("|---|---|---|---|---|")
    for name, turns in found.items():
        blocked = spread([x.blocked for x in turns]) if WAYS[name] else "-"
        sent = statistics.median(x.sent for x in turns) / 1e6
        computed = (parallel if name == DATA_PARALLEL else turns[0].computed) / 1e6
        print(f"| {name} | {spread(ratios[name])} | {blocked} | {sent:.3f} | {computed:.3f} |")
    if options.out:
        draw(ratios, options.out)


if __name__ == "__main__":
    main()
