"""A client of NCCL's RAS: the ranks that NCCL misses, and those with fewer launched collectives.

NCCL 2.24 and newer listen on NCCL_RAS_ADDR (localhost:28028); JSON is spoken from 2.28.7 on
(userguide, troubleshooting/ras.rst; src/ras/client_support.cc). One request per line; the status
ends with the connection. It is only a hint: counts differ even in a healthy run, so only a count
that has not moved between two looks is significant.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any

ADDRESS = "localhost:28028"
ASK_S = 3  # that NCCL waits for its peers
CONNECT_S = 2.0


def ask_ras(address: str = "") -> dict[str, Any] | None:
    """Return the status of the job's communicators from NCCL's RAS; None if no answer comes within
    ASK_S and a few seconds, or if NCCL does not speak JSON."""
    # From the right: an IPv6 address in brackets contains colons.
    host, _, port = (address or os.environ.get("NCCL_RAS_ADDR") or ADDRESS).rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S) as line:
            # RAS waits ASK_S for silent processes before it sends its status.
            line.settimeout(ASK_S + CONNECT_S)
            with line.makefile("rwb") as file:
                for words in ("CLIENT PROTOCOL 2", f"TIMEOUT {ASK_S}", "SET FORMAT json"):
                    file.write(f"{words}\n".encode())
                    file.flush()
                    said = file.readline().decode()
                    if not said.startswith(("SERVER PROTOCOL", "OK")):
                        return None
                file.write(b"STATUS\n")
                file.flush()
                found = json.loads(file.read())
        return found if isinstance(found, dict) else None
    return None


class RasCounts:
    """Successive looks at the counts of the communicators that all ranks share."""

    def __init__(self, world_size: int) -> None:
        self._size = world_size
        self._counts: dict[tuple[str, int], int] = {}

    def behind(self, status: dict[str, Any] | None) -> frozenset[int]:
        """Return the ranks that NCCL misses, or whose count is below another's and has not moved
        since the last look; none if these are more than half."""
        found: set[int] = set()
        counts: dict[tuple[str, int], int] = {}
        for comm in (status or {}).get("communicators", []):
            if comm.get("size") != self._size:
                continue
            name = str(comm.get("hash"))
            of_rank = {
                int(each["rank"]): sum(each.get("collective_counts", {}).values())
                for each in comm.get("ranks", [])
            }
            counts |= {(name, rank): count for rank, count in of_rank.items()}
            most = max(of_rank.values(), default=0)
            found |= {
                rank
                for rank, count in of_rank.items()
                if count < most and self._counts.get((name, rank)) == count
            }
            found |= {
                int(each["rank"])
                for each in comm.get("missing_ranks", [])
                if each.get("status", {}).get("unresponsive")
            }
        self._counts = counts
        return frozenset(found if 2 * len(found) <= self._size else ())
