"""How soon a lost replica is noticed, and how long it holds up the others; and how long replicas
wait for their exchanges.

    .venv/bin/python -m benchmarks.islands --times 3 --million 25

Three replicas without a trainer on this machine, each a process with a vector of so many million
numbers; one of them is killed before, in or after the all-reduce of a round, or stopped. Noticed:
until its judge has declared it gone. Pause: until the others have that round's weights.

Then two replicas with a trainer, whose steps take 0.3 s and whose exchanges, as if over a slow
link, 0.5 s and more, with several `tau`: seconds of a round in which a replica waits.
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

from kempner.jobs.system.reading import read_jsonl
from tests.cluster import make_data
from tests.conftest import clean_env
from tests.extensions.distributed.test_steps import judging

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ("kill before", "kill in", "kill after", "stop in")
AT = 3  # the round


def play(fault: str, size: int, folder: Path) -> None:
    scenario = {"faults": {"1": f"{fault} {AT}"}, "rounds": AT + 2, "size": size}
    program = [
        sys.executable,
        "-m",
        "tests.extensions.distributed.islands",
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
        # replicas.jsonl has the time of day; the islands' own lines have time.monotonic().
        wall, clock = map(float, (folder / "struck").read_text().split())
        gone = next(line for line in lines(folder / "replicas.jsonl") if line["event"] == "gone")
        others = [
            line["time"]
            for slot in (0, 2)
            for line in lines(folder / f"{slot}.1-0.jsonl")
            if line["round"] == AT
        ]
        return float(str(gone["time"])) - wall, max(float(str(at)) for at in others) - clock


def waited(tau: int, data: Path, folder: Path) -> list[float]:
    """Of each round but the first."""
    program = [
        sys.executable,
        "tests/trainer/fault/faulty_train.py",
        "configs/train/debug.toml",
        f"--data.dataset_path={data}",
        f"--run.dir={folder / 'run'}",
        *("--model.dim=64", "--model.n_layers=2", "--model.ffn_dim=96", "--train.seq_len=32"),
        *("--train.global_batch=4", "--train.max_steps=48", "--checkpoint.interval=0"),
        *("--eval.interval=0", "--metrics.log_interval=1", "--distributed.device=cpu"),
        *("--lowcomm.mode=steps", "--lowcomm.replicas=2", "--lowcomm.interval=8"),
        f"--lowcomm.tau={tau}",
    ]
    mean = "kempner.extensions.lowcomm.membership:ReplicaGroup.mean"
    faults = f"slow ms=300\nhold at={mean}:before s=0.5 nth=0"
    with judging(folder / "run") as door:
        env = clean_env(
            FAULTS=faults, GLOO_SOCKET_IFNAME="lo", KEMPNER_DOOR=str(door), KEMPNER_REPLICAS="2"
        )
        started = [
            subprocess.Popen(
                program,
                cwd=ROOT,
                env={**env, "KEMPNER_REPLICA": str(replica)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for replica in range(2)
        ]
        for process in started:
            if process.wait(timeout=240):
                sys.exit(f"error: a replica ended with exit code {process.returncode}")
    lines = read_jsonl(folder / "run/metrics.jsonl")
    return [line["outer_time"] for line in lines if "outer_time" in line][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--million", type=float, default=25.0, help="numbers of a vector")
    given = parser.parse_args()
    print(f"{'fault':12} {'noticed, s':>18} {'pause, s':>18}   median (most) of {given.times}")
    for fault in FAULTS:
        # What is sent is [2, size]: see delta() in tests/extensions/distributed/islands.py.
        found = [measure(fault, int(given.million * 5e5)) for _ in range(given.times)]
        cells = [f"{statistics.median(x):.2f} ({max(x):.2f})" for x in zip(*found, strict=True)]
        print(f"{fault:12} {cells[0]:>18} {cells[1]:>18}", flush=True)
    print("\ntau   waited in a round, s   median (most)")
    with tempfile.TemporaryDirectory() as name:
        data = make_data(Path(name))
        for tau in (0, 1, 2, 4):
            folder = Path(name, str(tau))
            folder.mkdir()
            times = waited(tau, data, folder)
            print(f"{tau:3} {statistics.median(times):14.2f} ({max(times):.2f})", flush=True)


if __name__ == "__main__":
    main()
