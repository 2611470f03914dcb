"""The network that NCCL uses between nodes, according to its log.

NCCL falls back to TCP without an error if its InfiniBand or libfabric plugin finds no device, and
training then runs at a tenth of its speed. Only the log shows it, with NCCL_DEBUG=INFO and
NCCL_DEBUG_SUBSYS=INIT,NET.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

# Make NCCL log what transport_of() parses; NCCL_DEBUG_FILE sends the log to a file.
LOG_SETTINGS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}

# The network of a connection ("Channel 00/02 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA"), and
# the choice before any connection ("Using network AWS Libfabric"). A line such as "NET/IB : No
# device found." only shows an attempt.
_CONNECTED = re.compile(r" via NET/([^/\n]+)/\d")
_CHOSEN = re.compile(
    r"NCCL INFO (?:Using network (.+?)|Assigned NET plugin (.+?) to comm)\s*$", re.M
)

_EXPECTED = {
    "InfiniBand": ("IB", "UCX"),
    "RoCE": ("IB", "UCX"),
    "EFA": ("OFI",),
    "Slingshot": ("OFI",),
}


def transport_of(text: str) -> str:
    """Parse NCCL's network transport from its log: IB (also RoCE), OFI (libfabric: EFA and
    Slingshot), Socket (TCP), or the name of another plugin; "" if the log names none."""
    if connected := _CONNECTED.findall(text):
        return _family(connected[-1])
    if choices := _CHOSEN.findall(text):
        return _family("".join(choices[-1]))
    return ""


def _family(name: str) -> str:
    """Map a plugin's name to its family: IBext_v8 is InfiniBand, AWS Libfabric is OFI."""
    lower_name = name.lower()
    if "libfabric" in lower_name or "ofi" in lower_name:
        return "OFI"
    if "ib" in lower_name:
        return "IB"
    return "Socket" if lower_name == "socket" else name


def expected_transports(network: str) -> tuple[str, ...]:
    """Return the transports for `network` (KEMPNER_NETWORK of task.sh); empty if any will do."""
    return _EXPECTED.get(network, ())


def chosen_by_user(env: Mapping[str, str] = os.environ) -> str:
    """Return the user's setting that overrides NCCL's choice, as NCCL_NET=Socket; "" if none."""
    for name, off in (("NCCL_NET", ""), ("NCCL_IB_DISABLE", "0")):
        if env.get(name, off) != off:
            return f"{name}={env[name]}"
    return ""
