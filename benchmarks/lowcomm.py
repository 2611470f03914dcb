"""What replicas over a slow link cost: DiLoCo, streaming DiLoCo and data parallelism, beside the
same replicas without any communication.

    sudo python -m benchmarks.lowcomm --out docs/lowcomm.png

Two network namespaces stand for two islands with a GPU each. Between them is a link of 100 Mbit/s
whose packets arrive 20 ms later: a TUN device in each, and a process that carries packets from one
to the other and counts their bytes. A step of a real model takes a GPU longer than a CPU takes for
this small one, so each step waits for --step-ms. The ways take turns, and a table has the medians.
On a machine with other work tokens/s vary more than communication costs, so the cost is taken from
one and the same run: the time that a replica spends on the outer steps.
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
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRAINER = ROOT / "tests/fault/faulty_train.py"
RATE, DELAY_S = 100e6 / 8, 0.020  # bytes/s, one way
PACKET = 16_000  # bytes: few, because each costs the carrier some 50 us of a shared core
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
NAMES = ("kempner-a", "kempner-b")
STEPS, ROUND = 60, 30

MODEL = (
    *("--model.dim=192", "--model.n_layers=4", "--model.n_heads=6", "--model.ffn_dim=512"),
    *(
        "--train.seq_len=32",
        f"--train.max_steps={STEPS}",
        "--no-checkpoint.save",
        "--checkpoint.interval=0",
    ),
    *("--eval.interval=0", "--metrics.log_interval=1", "--distributed.device=cpu"),
    *("--distributed.dp_replicate=-1", "--distributed.dp_shard=1"),
)
LOW = ("--lowcomm.replicas=2", f"--lowcomm.interval={ROUND}")
STREAM = ("--lowcomm.fragments=2", "--lowcomm.tau=5", "--lowcomm.alpha=0.5", "--lowcomm.lr=0.4")
FOUR_BITS = ("--lowcomm.compress=linear", "--lowcomm.bits=4", "--lowcomm.raw=[]")
WAYS: dict[str, tuple[str, ...] | None] = {
    "no communication": None,
    "data parallel": (),
    "DiLoCo": LOW,
    "DiLoCo, 4 bits": (*LOW, *FOUR_BITS),
    "streaming": (*LOW, *STREAM),
    "streaming, 4 bits": (*LOW, *STREAM, *FOUR_BITS),
}


def sh(command: str) -> None:
    subprocess.run(shlex.split(command), check=True, capture_output=True)


def enter(namespace: str) -> None:
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def tun() -> int:
    """The packets of a new device `slow0` of this namespace."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
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
            free[way] = max(free[way], time.monotonic()) + len(packet) / RATE
            order += 1
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


def run(way: str, words: tuple[str, ...] | None, work: Path, step_ms: int, link: Link) -> Any:
    """tokens/s of both islands, bytes a step in both directions, and the share of its time that a
    replica had for its own work."""
    shutil.rmtree(work, ignore_errors=True)
    apart = words is None
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
        command += [batch, run_dir, *(words or ())]
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
    found = [rate(each) for each in sorted(work.rglob("metrics.jsonl"))]
    # A run counts the tokens of all its replicas.
    tokens = sum(r for r, _ in found) if apart else found[0][0]
    return tokens, (link.bytes.value - before) / STEPS, min(own for _, own in found)


def rate(metrics: Path) -> tuple[float, float]:
    """tokens/s of the second round, since the first one also warms up; and the share of its time
    in which the replica did its own work: what it did not spend on the outer steps."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    at = {line["step"]: line for line in lines if "loss" in line}
    spent = sum(at[step]["step_time"] for step in range(ROUND + 1, STEPS + 1))
    outer = sum(line["outer_time"] for line in lines if line.get("round") == 2)
    return (at[STEPS]["tokens"] - at[ROUND]["tokens"]) / spent, 1 - outer / spent


def draw(table: dict[str, float], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 2.8))
    names = list(table)[::-1]
    axes.barh(names, [table[name] for name in names], color="tab:blue")
    axes.bar_label(axes.containers[0], [f"{table[name]:.1%}" for name in names], padding=3)
    axes.set_xlim(0, 1.15)
    axes.set_xlabel("share of the time that is left for the replicas' own work")
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--step-ms", type=int, default=200)
    parser.add_argument("--out", type=Path, help="picture")
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in WAYS}
    with Link() as link, tempfile.TemporaryDirectory() as folder:
        for _ in range(options.turns):
            for name, words in WAYS.items():
                result = run(name, words, Path(folder) / "work", options.step_ms, link)
                found[name].append(result)
                print(name, *(f"{x:.3f}" for x in result), flush=True)
    middle = {
        name: [statistics.median(x) for x in zip(*f, strict=True)] for name, f in found.items()
    }
    whole = middle["no communication"][0]
    table = {}
    print("\n| | time for own work | MB over the link in a step | tokens/s |\n|---|---|---|---|")
    for name, (tokens, count, own) in middle.items():
        # Data parallelism communicates within its steps: there only the rates say what it costs.
        table[name] = tokens / whole if WAYS[name] == () else own
        print(f"| {name} | {table[name]:.1%} | {count / 1e6:.3f} | {tokens:.0f} |")
    if options.out:
        draw(table, options.out)


if __name__ == "__main__":
    main()
