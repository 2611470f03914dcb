"""How soon a lost replica is noticed, and how long it holds up the others.

    .venv/bin/python -m benchmarks.islands --times 3 --million 25

Three replicas without a trainer on this machine, each a process with a vector of so many million
numbers; one of them is killed before, in or after the all-reduce of a round, or stopped. Noticed:
until its judge has declared it gone. Pause: until the others have that round's weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ("kill before", "kill in", "kill after", "stop in")
AT = 3  # the round


def play(fault: str, size: int, folder: Path) -> None:
    scenario = {"faults": {"1": f"{fault} {AT}"}, "rounds": AT + 2, "size": size}
    program = [
        sys.executable,
        "-m",
        "tests.distributed.islands",
        folder,
        json.dumps({"x": scenario}),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(program, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL, timeout=120)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def measure(fault: str, size: int) -> tuple[float, float]:
    """Seconds until it is noticed, and of the pause."""
    with tempfile.TemporaryDirectory() as name:
        play(fault, size, Path(name))
        folder = Path(name, "x")
        wall, clock = map(float, (folder / "struck").read_text().split())
        gone = next(line for line in lines(folder / "replicas.jsonl") if line["event"] == "gone")
        others = [
            line["time"]
            for slot in (0, 2)
            for line in lines(folder / f"{slot}.1-0.jsonl")
            if line["round"] == AT
        ]
        return float(str(gone["time"])) - wall, max(float(str(at)) for at in others) - clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--million", type=float, default=25.0, help="numbers of a vector")
    given = parser.parse_args()
    print(f"{'fault':12} {'noticed, s':>18} {'pause, s':>18}   median (most) of {given.times}")
    for fault in FAULTS:
        found = [measure(fault, int(given.million * 5e5)) for _ in range(given.times)]
        cells = [f"{statistics.median(x):.2f} ({max(x):.2f})" for x in zip(*found, strict=True)]
        print(f"{fault:12} {cells[0]:>18} {cells[1]:>18}", flush=True)


if __name__ == "__main__":
    main()
