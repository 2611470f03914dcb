"""GPUs that a test makes up: a shim for nvidia-smi, and the lines of a kernel log."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

SHIM = """#!{python} -SE
import json, os, sys, time
folder = {folder!r}
host = os.path.join(folder, os.uname().nodename + ".json")
state = json.load(open(host if os.path.exists(host) else os.path.join(folder, "all.json")))
if state.get("hangs"):
    time.sleep(1000)
if state.get("says"):
    print(state["says"])
    sys.exit(2)
if "--query-compute-apps=gpu_uuid,pid" in sys.argv:
    print("\\n".join(state.get("processes", [])))
    sys.exit()
names = next(w for w in sys.argv if w.startswith("--query-gpu=")).partition("=")[2].split(",")
if unknown := [name for name in names if name in state.get("unknown", [])]:
    print(f'Field "{{unknown[0]}}" is not a valid field to query.')
    sys.exit(2)
for gpu in state["gpus"]:
    print(", ".join(gpu.get(name, "[N/A]") for name in names))
"""


def gpu(index: int, **changed: str) -> dict[str, str]:
    """A healthy one, in nvidia-smi's words; in the names of `changed` __ stands for a dot."""
    healthy = {
        "index": str(index),
        "uuid": f"GPU-{index}",
        "pci.bus_id": f"00000000:{0x3B + index:02X}:00.0",
        "serial": f"16{index}",
        "temperature.gpu": "61",
        "power.draw": "512.50",
        "utilization.gpu": "98",
        "ecc.errors.uncorrected.volatile.total": "0",
        "pcie.link.width.current": "16",
        "pcie.link.width.max": "16",
        "pcie.link.gen.current": "5",
        "pcie.link.gen.max": "5",
        "remapped_rows.failure": "No",
        "remapped_rows.pending": "No",
        "clocks_event_reasons.hw_slowdown": "Not Active",
        "clocks_event_reasons.sw_thermal_slowdown": "Not Active",
        "clocks_event_reasons.hw_thermal_slowdown": "Not Active",
        "clocks_event_reasons.hw_power_brake_slowdown": "Not Active",
    }
    return healthy | {name.replace("__", "."): value for name, value in changed.items()}


class Shim:
    """nvidia-smi of all hosts, until one gets its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "kernel.log"
        (folder / "bin").mkdir(parents=True)
        program = folder / "bin/nvidia-smi"
        program.write_text(SHIM.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o755)
        self.log.touch()
        self.say(gpu(0), gpu(1))

    @property
    def env(self) -> dict[str, str]:
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        return {"PATH": path, "KEMPNER_KERNEL_LOG": str(self.log)}

    def say(self, *gpus: dict[str, str], host: str = "all", **more: object) -> None:
        new = self.folder / "new"
        new.write_text(json.dumps({"gpus": gpus, **more}))
        new.rename(self.folder / f"{host}.json")

    def xid(self, number: int, index: int, text: str = "pid=7, name=python, so it is") -> None:
        with self.log.open("a") as file:
            file.write(f"NVRM: Xid (PCI:0000:{0x3B + index:02x}:00): {number}, {text}\n")
