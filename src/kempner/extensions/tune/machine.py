"""The device of a rank, queried in a separate process: a CUDA context of the tune itself would take
memory from its measurements.

    python -m kempner.extensions.tune.machine auto|cpu|cuda

prints one JSON object.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from kempner.config.option import ConfigError
from kempner.extensions.tune.space import RankDevice
from kempner.jobs.system.front_door import run_module

MACHINE_S = 600  # for importing torch from a slow file system, and for the driver


def main(device: str) -> None:
    from kempner.extensions.bench.measure import describe_machine
    from kempner.extensions.planner.memory import GIB

    if device == "cpu":
        # Before torch is imported below, because it asks the driver only once.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    facts = describe_machine() | {"host": platform.node(), "cpus": os.cpu_count(), "fp8": False}
    if facts["device"] == "CPU":
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        facts["memory_gib"] = pages * size / GIB
    else:
        import torch

        has_torchao = importlib.util.find_spec("torchao") is not None
        # 8.9 (Ada) is the first with products of 8-bit floats, 10.0 (Blackwell) with a scale
        # per 32 numbers.
        capability = torch.cuda.get_device_capability()
        facts["fp8"] = has_torchao and capability >= (8, 9)
        facts["mxfp8"] = has_torchao and capability >= (10, 0)
    print(json.dumps(facts))


def ask_machine(device: str) -> dict[str, Any]:
    """Return the facts of this process's device. `device`: distributed.device. Raises ConfigError
    if it does not answer."""
    # First in the path: this process's package, not another installed copy.
    source = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "kempner.extensions.tune.machine", device]
    env = {**os.environ, "PYTHONPATH": path}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=MACHINE_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"distributed.device = {device}: torch has not answered in {MACHINE_S} s: does "
            "nvidia-smi answer?"
        ) from None
    # The last line, because libraries may print before it.
    lines = (done.stdout if done.returncode == 0 else done.stderr).splitlines() or ["no output"]
    if done.returncode:
        raise ConfigError(f"distributed.device = {device}: torch does not answer: {lines[-1]}")
    facts: dict[str, Any] = json.loads(lines[-1])
    return facts


def machine_of(facts: dict[str, Any], per_node: int) -> RankDevice:
    """Return the facts that the choices depend on; ranks of a host share its memory."""
    from kempner.jobs.system.compiler import missing_compiler

    gpu = facts["device"] != "CPU"
    return RankDevice(
        facts["device"],
        facts["memory_gib"] / (1 if gpu else per_node),
        missing_compiler("cuda" if gpu else "cpu") is None,
        facts["fp8"],
        facts.get("mxfp8", False),
    )


if __name__ == "__main__":
    run_module(main, __doc__, 1)
