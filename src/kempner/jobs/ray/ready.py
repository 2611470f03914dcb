"""Wait for every node of a Ray cluster to be alive with all CPUs and GPUs; exit with 75 on timeout.

    python -m kempner.jobs.ray.ready NAME=ADDRESS:PORT ... --cpus 8 --gpus 4 --began T --deadline T

The ports are those of the node managers, the head comes first, and --cpus and --gpus are those of
each node. Reports to ray.sh through file descriptor 3 (see kempner.jobs.ray.node).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator

from kempner.jobs.ray.node import NODE_TICK_S, NOT_UP_EXIT, emit_line

Census = dict[str, tuple[float, float]]  # CPUs and GPUs of each live node, by address:port


def alive_nodes(address: str) -> Census:
    """Ask the GCS which nodes are alive. `ray status` prints text, late, without a node's CPUs."""
    # Unlike ray.init() this works before any raylet is up, and registers no driver.
    from ray._raylet import GcsClient

    client = GcsClient(address=address)
    # 0 is GcsNodeInfo.ALIVE; dead nodes stay in the list.
    alive = [node for node in client.get_all_node_info(timeout=5).values() if node.state == 0]
    return {
        f"{node.node_manager_address}:{node.node_manager_port}": (
            node.resources_total.get("CPU", 0.0),
            node.resources_total.get("GPU", 0.0),
        )
        for node in alive
    }


def missing_nodes(nodes: dict[str, str], target: Census, census: Census) -> Iterator[str]:
    """Yield what the cluster lacks: nodes, and CPUs and GPUs of a node."""
    for name, place in nodes.items():
        if place not in census:
            yield name
            continue
        for kind, have, want in zip(("CPUs", "GPUs"), census[place], target[place], strict=True):
            if have < want:
                yield f"{kind} of {name} ({have:.0f} of {want:.0f})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="kempner.jobs.ray.ready")
    parser.add_argument("nodes", nargs="+")
    for name in ("cpus", "gpus", "began", "deadline"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--dedicated-head", action="store_true")
    options = parser.parse_args()
    nodes = dict(word.split("=", 1) for word in options.nodes)
    target: Census = dict.fromkeys(nodes.values(), (options.cpus, options.gpus))
    if options.dedicated_head:
        target[next(iter(target))] = (0.0, 0.0)
    error, lacks = "", list(nodes)
    # Wall clock: the deadline comes from the batch script, another process.
    while time.time() < options.deadline:
        try:
            lacks = list(missing_nodes(nodes, target, alive_nodes(os.environ["RAY_ADDRESS"])))
            error = ""
        except Exception as problem:  # Ray raises many types, and most only mean "not yet"
            error = f"; Ray says {str(problem) or repr(problem)}"[:300].replace("\n", " ")
        if not lacks:
            cpus, gpus = (sum(column) for column in zip(*target.values(), strict=True))
            took = time.time() - options.began
            text = f"{len(nodes)} node(s), {cpus:.0f} CPUs, {gpus:.0f} GPUs, after {took:.1f} s"
            emit_line("READY", text)
            return 0
        time.sleep(NODE_TICK_S)
    took = options.deadline - int(options.began)
    text = f"not complete after {took:.0f} s (START_TIMEOUT); missing: {', '.join(lacks)}{error}"
    emit_line("FAULT", NOT_UP_EXIT, text)
    return NOT_UP_EXIT


if __name__ == "__main__":
    sys.exit(main())
