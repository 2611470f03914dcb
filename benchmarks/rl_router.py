"""How long the router takes to look for an engine for each group that waits.

    python -m benchmarks.rl_router

Engines that are full, and groups of 16 samples that wait: what each change costs. Each beat of an
engine was one, and there are half as many a second as engines; now it is one when something is new.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from kempner.extensions.rl.engines.members import Member, Waiter
from kempner.extensions.rl.engines.router import BEAT_EVERY_S, Router
from kempner.jobs.report.tables import align_table


def full(engines: int, groups: int) -> Router:
    """A router without threads, whose engines have all that they can take."""
    nothing: Any = None
    router = Router(dict, lambda url: nothing, 64, 32, print, 600.0)
    for number in range(engines):
        member = Member(f"engine-{number}", nothing, version=1, alive=True, load=10**6)
        router._members[member.name] = member
    for _ in range(groups):
        router._waiting.append(Waiter(16, 0, threading.Condition(router._change)))
    return router


def main() -> None:
    rows = [["engines", "groups", "ms a change", "beats, % of a core"]]
    for engines, groups in ((64, 1024), (128, 2048), (256, 4096)):
        router, spent = full(engines, groups), []
        with router._change:
            for _ in range(5):
                began = time.perf_counter()
                router._hand_out()
                spent.append(time.perf_counter() - began)
        best = min(spent)
        share = f"{engines / BEAT_EVERY_S * best:.1%}"
        rows.append([str(engines), str(groups), f"{1e3 * best:.3f}", share])
    print(align_table(rows, 2, range(4)))


if __name__ == "__main__":
    main()
