"""A Ray program for the tests: writes what it finds on each node to a JSON file.

python ray_driver.py REPORT [--exit CODE] [--stay] [--hand-on]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

SIZE = 5 << 20


@ray.remote(num_cpus=1)
def look() -> dict[str, object]:
    names = [n for n in os.environ if n.startswith(("SLURM", "PMI", "SRUN_", "SBATCH_"))]
    others = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "COMMAND", "DASHBOARD_PORT", "PORT")
    names += [n for n in others if n in os.environ]
    return {
        "host": socket.gethostname(),
        "foreign": names,
        "token": os.environ.get("HF_TOKEN"),
        "wandb": os.environ.get("WANDB_API_KEY"),
        "pythonpath": os.environ.get("PYTHONPATH"),
        "marker": os.environ.get("MARKER"),
        "auth": [os.environ.get("RAY_AUTH_MODE"), os.environ.get("RAY_AUTH_TOKEN")],
        "uv": os.environ.get("UV_CACHE_DIR"),
        "gloo": os.environ.get("GLOO_SOCKET_IFNAME"),
    }


@ray.remote(num_cpus=1)
def make() -> tuple[str, bytes]:
    return socket.gethostname(), os.urandom(16) * (SIZE // 16)


@ray.remote(num_cpus=1)
def measure(made: tuple[str, bytes]) -> tuple[str, str, int]:
    """Where an object was made, where it is read, and its size."""
    return made[0], socket.gethostname(), len(made[1])


@ray.remote(num_cpus=1)
class Stubborn:
    """An actor that ignores SIGTERM, with a daemon that does, too."""

    def start(self) -> str:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)
        return socket.gethostname()

    def stay(self) -> None:
        time.sleep(600)


def is_open(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), 2):
        return True
    return False


def connect_as_nemo_rl() -> None:
    """Its drivers want a cluster that exists, and hand their whole environment on to each actor."""
    for name in [n for n in os.environ if n.startswith(("SLURM_", "PMI", "MPI_", "OMPI_"))]:
        del os.environ[name]
    environment = {"env_vars": dict(os.environ)}
    ray.init("auto", log_to_driver=True, include_dashboard=False, runtime_env=environment)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("--exit", type=int, default=0)
    parser.add_argument("--stay", action="store_true")
    parser.add_argument("--hand-on", action="store_true")
    given = parser.parse_args()
    if given.hand_on:
        connect_as_nemo_rl()
    else:
        ray.init()
    nodes = [node for node in ray.nodes() if node["Resources"].get("CPU")]
    ids = [node["NodeID"] for node in nodes]
    seen = ray.get([look.options(scheduling_strategy=On(k, soft=False)).remote() for k in ids])
    made = [make.options(scheduling_strategy=On(k, soft=False)).remote() for k in ids]
    moved = [
        measure.options(scheduling_strategy=On(k, soft=False)).remote(made[n - 1])
        for n, k in enumerate(ids)
    ]
    report: dict[str, object] = {
        "seen": seen,
        "moved": ray.get(moved),
        "ports": [node["NodeManagerPort"] for node in ray.nodes()],
        "resources": ray.cluster_resources(),
        "foreign": [name for name in os.environ if name.startswith("PMI")],
        "dashboard": [is_open(a, 8265) for a in ("127.0.0.1", ray.util.get_node_ip_address())],
        "job": os.environ.get("SLURM_JOB_ID"),
    }
    if given.stay:
        actors = [Stubborn.options(scheduling_strategy=On(k, soft=False)).remote() for k in ids]
        report["stubborn"] = ray.get([actor.start.remote() for actor in actors])
    fresh = given.report.with_suffix(".new")
    fresh.write_text(json.dumps(report))
    fresh.replace(given.report)
    if given.stay:
        ray.get([actor.stay.remote() for actor in actors])
    return given.exit


if __name__ == "__main__":
    sys.exit(main())
