"""Check the nodes of a job; kp_prove_nodes in scripts/slurm/lib starts this on the batch host.

    python -m kempner.jobs.preflight --nodes node1,node2 --tasks 4 --gpus 4 --device auto \\
        --dir RUN --json FILE --meet DIR

Writes its port and the directory to DIR/port, for the tasks (kempner.jobs.preflight.task) that srun
then starts; DIR/ended appears when srun has ended. Queries the tasks
(kempner.jobs.preflight.channel), prints a table and writes it as JSON, too. Exit code 0: no faults;
1: faults, with the faulty nodes in "bad" of the JSON; 2: bad input; 3: preflight itself failed. """

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kempner.jobs.system.front_door import print_problems, run_program

if __name__ == "__main__" and find_spec("torch") is None:  # first check inside a container image
    fix = "name an image that has it (KEMPNER_CONTAINER), or run make .venv/train"
    sys.exit(print_problems("preflight", [f"{sys.executable} lacks torch: {fix}"]))

from kempner.config.command_line import argument_parser
from kempner.jobs.preflight.allreduce import MEASURE_S, connect_limit
from kempner.jobs.preflight.channel import Driver, NodeAnswer, token_file
from kempner.jobs.preflight.devices import SlowLimits, ask_devices, judge_devices, slow_limits
from kempner.jobs.preflight.history import keep_speeds
from kempner.jobs.preflight.storage import ask_storage, judge_storage
from kempner.jobs.preflight.verdict import NodeResult, Report, blame_late, compare_nodes, slow_nodes
from kempner.jobs.ranks.process_group import allow_open_files
from kempner.jobs.system.files import FULL, try_to_write, write_atomic
from kempner.jobs.system.front_door import NoFreePort

CHECK_IN_S = 120.0  # for half of the tasks to start and to import torch,
NODE_S = 0.5  # plus this for each node: with a cold cache the file system serves them in turn,
LONGEST_PREFLIGHT_S = 900.0
STRAGGLERS_S = 30.0  # and then for the other half, or twice as long as the first half took
LONGEST_MEASUREMENT_S = 600.0
NOTHING_PROVED = 3  # exit code if preflight itself has failed


def main(argv: list[str]) -> int:
    parser = argument_parser("python -m kempner.jobs.preflight", __doc__)
    parser.add_argument("--nodes", required=True, help="their Slurm names, in Slurm's order")
    parser.add_argument("--tasks", type=int, required=True, help="tasks on each node")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs on each node")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--dir", type=Path, required=True, help="must be shared and writable")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--least", type=float, default=12.5, metavar="MB/S",
        help="bus bandwidth that every node must reach (default: 12.5, which is 100 Mbit/s)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=1.0, metavar="S",
        help="how long each device multiplies and copies, and each file is written and read "
        "(default: 1; 0: not at all)",
    )  # fmt: skip
    parser.add_argument(
        "--slow", type=slow_limits, default=SlowLimits(), metavar="PERCENT,PERCENT",
        help="percentages below the median of its kind at which a GPU is named, and is faulty "
        "(default: 5,15)",
    )  # fmt: skip
    parser.add_argument("--history", type=Path, help="where the figures of each node are kept")
    parser.add_argument("--meet", type=Path, required=True, help="directory for the port file")
    options = parser.parse_args(argv)
    if not 0 <= options.seconds <= LONGEST_MEASUREMENT_S:
        parser.error(f"--seconds {options.seconds:g}: must be 0 to {LONGEST_MEASUREMENT_S:.0f}")
    if not 0 <= options.least < math.inf:
        parser.error(f"--least {options.least:g}: must be a number of MB/s from 0")
    try:
        try_to_write(options.dir)
    except OSError as error:
        if error.errno not in FULL:  # a full disk is reported below
            fix = "give an existing, writable directory that all nodes share"
            parser.error(f"--dir {options.dir}: {error.strerror}: {fix}")
    try:
        return run_preflight(options)
    except OSError as error:  # a full disk is neither a node's fault nor bad input
        fix = ": make room" if error.errno in FULL else ""
        where = "" if isinstance(error, NoFreePort) else f"{error.filename or options.json}: "
        print_problems("preflight", [f"{where}{error.strerror}{fix}"])
        return NOTHING_PROVED


def run_preflight(options: argparse.Namespace) -> int:
    began = time.monotonic()
    allow_open_files()  # one connection per task
    driver = Driver()
    # Written once it listens: a task that is refused assumes that the driver has ended.
    write_atomic(options.meet / "port", f"{driver.port} {options.dir.absolute()}\n")
    nodes = await_tasks(driver, options.meet / "ended", options.nodes.split(","), options.tasks)
    failed = (options.meet / "ended").exists()  # later it always exists
    report = Report(nodes)
    if any(node.answered for node in nodes):
        check_clocks(driver, nodes)
        check_shared_directory(driver, nodes, options.dir)
        report = measure_all(driver, nodes, pick_kind(options, nodes), options.least * 1e6)
        if options.seconds:
            ask_devices(driver, report, options.seconds)
            ask_storage(driver, report, options.dir, options.seconds)
    driver.end(rank for node in nodes for rank in node.ranks)
    report.gpus = options.gpus if options.device != "cpu" else 0
    blame_late(report, failed)
    compare_nodes(report)
    judge_devices(report, options.slow)
    judge_storage(report)
    if options.history is not None:
        keep_speeds(report, options.history)
    report.seconds = time.monotonic() - began
    print(report.table(), flush=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report.record(), indent=1) + "\n")
    return 1 if report.faulty else 0


def pick_kind(options: argparse.Namespace, nodes: list[NodeResult]) -> str:
    """Choose cuda or cpu as the trainer does; the GPUs of a test cluster exist only in Slurm."""
    if options.device == "cpu" or not options.gpus:
        return "cpu"
    real = any(node.facts.get("real_gpus") for node in nodes)
    return "cuda" if options.device == "cuda" or real else "cpu"


def await_tasks(driver: Driver, end_file: Path, names: list[str], tasks: int) -> list[NodeResult]:
    """Wait for the tasks; `end_file` exists once srun has ended."""
    everyone = range(len(names) * tasks)
    keys = driver.ask(everyone, {"what": "node"})
    began = time.monotonic()
    deadline = began + min(LONGEST_PREFLIGHT_S, CHECK_IN_S + NODE_S * len(names))
    answers: dict[int, NodeAnswer] = {}
    half_here = False
    while len(answers) < len(keys) and time.monotonic() < deadline and not end_file.exists():
        missing = {rank: key for rank, key in keys.items() if rank not in answers}
        answers |= driver.answers(missing, time.monotonic() + 0.2)
        if not half_here and 2 * len(answers) >= len(keys):
            # The first half shows how long a start takes here.
            now, half_here = time.monotonic(), True
            deadline = min(deadline, now + max(STRAGGLERS_S, 2 * (now - began)))
    nodes = []
    for k, name in enumerate(names):
        # srun fills the nodes in order: these are the ranks of node k.
        ranks = range(k * tasks, (k + 1) * tasks)
        node = NodeResult(name, [rank for rank in ranks if rank in answers])
        if len(node.ranks) < tasks:
            why = " before srun ended" if end_file.exists() else ""
            node.late = f"{tasks - len(node.ranks)} of {tasks} task(s) did not answer{why}"
        for rank in node.ranks:
            node.facts = answers[rank] if answers[rank]["local_rank"] == 0 else node.facts
        nodes.append(node)
    return nodes


def check_clocks(driver: Driver, nodes: list[NodeResult]) -> None:
    """Measure each node's clock minus this host's, estimated as in NTP: the answer is assumed to be
    from the middle of the round trip."""
    for node in filter(lambda node: node.answered, nodes):
        # One node at a time: the driver's own delay would count as part of the round trip.
        ask_time = time.time()
        keys = driver.ask([node.first], {"what": "time"})
        answer = driver.answers(keys, time.monotonic() + 2.0).get(node.first)
        if answer:
            node.clock_s = answer["time"] - (ask_time + time.time()) / 2


def check_shared_directory(driver: Driver, nodes: list[NodeResult], folder: Path) -> None:
    """Check that a token written by the first node is visible on all. The tasks know directory and
    token from the batch script."""
    here = [node for node in nodes if node.answered]
    for what, group in (("write", here[:1]), ("read", here)):
        keys = driver.ask([node.first for node in group], {"what": what})
        answers = driver.answers(keys, time.monotonic() + 15.0)
        for node in group:
            error = answers.get(node.first, {"error": f"{folder}: no answer within 15 s"})
            # The first node is asked twice; if it could not write the token, report that once.
            if "error" in error and not node.faults:
                node.faults.append(f"run directory: {error['error']}")
    token_file(folder).unlink(missing_ok=True)


def measure_all(driver: Driver, nodes: list[NodeResult], kind: str, least: float) -> Report:
    """Measure all-reduces inside each node, between neighbours and across all tasks."""
    report = Report(nodes, kind=kind, least=least)
    here = [node for node in nodes if node.answered]
    if any(len(node.ranks) > 1 for node in here):
        groups = [node.ranks for node in here]
        figures = measure_groups(driver, "inside", groups, kind)
        for node, figure in zip(here, figures, strict=True):
            node.inside = figure
            take_transport(figure, [node])
            if "error" in figure:
                node.faults.append(f"all-reduce inside the node: {figure['error']}")
    for number, pairs in enumerate(pair_rounds(len(here))):
        groups = [here[a].ranks + here[b].ranks for a, b in pairs]
        figures = measure_groups(driver, f"round{number}", groups, kind)
        for (a, b), figure in zip(pairs, figures, strict=True):
            take_transport(figure, [here[a], here[b]])
            report.add_pair(here[a], here[b], figure)
    # A node that was slow while other pairs were busy is measured again with the best node alone.
    suspects = slow_nodes(report)
    good = [node for node in here if node not in suspects]
    # Only if most are good: otherwise the suspects are not the exception.
    if len(good) * 2 > len(here):
        best = max(good, key=lambda node: node.best)
        for node in suspects:
            ranks = [best.ranks + node.ranks]
            figure = measure_groups(driver, f"again-{node.name}", ranks, kind)[0]
            take_transport(figure, [best, node])
            report.add_pair(best, node, figure)
    if len(here) > 1:
        everyone = [rank for node in here for rank in node.ranks]
        report.whole = measure_groups(driver, "whole", [everyone], kind)[0]
        take_transport(report.whole, here)
    return report


def take_transport(figure: dict[str, Any], nodes: list[NodeResult]) -> None:
    """Record the transport that NCCL uses on the nodes of a measured group."""
    used = iter(figure.pop("transports", []))
    for node in nodes:
        # Ranks whose neighbours are inside the node name none.
        node.transport = next(filter(None, [next(used, "") for _ in node.ranks]), node.transport)


def pair_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Pair neighbours on a ring of `count` nodes (3 or more), in rounds with at most one partner
    per node. Each node meets two others, so one bad partner does not make it look bad."""
    if count < 3:
        return []
    edges = [(k, (k + 1) % count) for k in range(count)]
    # On an odd ring the last edge shares a node with an edge of each half.
    last = [edges.pop()] if count % 2 else []
    return [part for part in (edges[::2], edges[1::2], last) if part]


def measure_groups(
    driver: Driver, name: str, groups: list[list[int]], kind: str
) -> list[dict[str, Any]]:
    """Measure all groups at once. Returns for each group the figures of its first rank, or its
    first error; "transports" has the transport that NCCL uses on each rank."""
    keys: dict[int, str] = {}
    limit = MEASURE_S + max(connect_limit(len(ranks), kind) for ranks in groups)
    for number, ranks in enumerate(groups):
        question = {"what": "measure", "name": f"{name}-{number}", "ranks": ranks, "kind": kind}
        keys |= driver.ask(ranks, question | {"store_port": driver.store.port})
    # Longer than the tasks' own limit: their error says more than their silence.
    answers = driver.answers(keys, time.monotonic() + limit + 3.0)
    figures = []
    for ranks in groups:
        silent = {"error": f"no answer after {limit:.0f} s"}
        results = [answers.get(rank, silent) for rank in ranks]
        errors = [figure for figure in results if "error" in figure]
        used = [figure.pop("transport", "") for figure in results]
        figures.append(errors[0] if errors else {**results[0], "transports": used})
    return figures


if __name__ == "__main__":
    run_program(main, "preflight")
