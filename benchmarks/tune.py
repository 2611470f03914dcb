"""The tune beside an exhaustive search: 20 candidates of the first model, on this machine's CPUs.

    python -m benchmarks.tune
    python -m benchmarks.tune --quick    two candidates, shortly: only shows that it works

The candidates are 5 micro-batches x recomputed or not x 2 sizes of the loss's chunks, without
torch.compile, which takes minutes on two cores. The exhaustive search measures each in several
rounds, so that a slow minute of the machine does not fall on one candidate alone; the tune has its
--minutes, and knows nothing of that. At the end the choices of the two run in turn: by how much is
the tune's slower? On a machine that others use, too, --cpu-time counts the CPU seconds of a step by
one thread in place of the time that passes.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from kempner.config.command_line import argument_parser, parse_command
from kempner.extensions.tune import report
from kempner.extensions.tune.journal import TuneJournal
from kempner.extensions.tune.runs import Orders, Runs
from kempner.extensions.tune.search import WARM_UP, Search
from kempner.extensions.tune.space import (
    LeverAxis,
    Overrides,
    RankDevice,
    Space,
    describe_candidate,
)
from kempner.extensions.tune.trials import LearnedMemory
from kempner.train.configure import check_world, load_config

FILE = "configs/train/quickstart.toml"
BASE = ["--train.global_batch=16", "--data.dataset_path=fake:", "--eval.interval=0"]
TINY = ["--model.dim=48", "--model.n_layers=1", "--model.ffn_dim=64", "--train.seq_len=32"]
AXES = [
    LeverAxis(tuple({"train.micro_batch": micro} for micro in (None, 8, 4, 2, 1))),
    LeverAxis(tuple({"train.recompute": blocks} for blocks in ("none", "selective"))),
    LeverAxis(tuple({"train.loss_chunk": rows} for rows in (None, 256))),
]
TURNS = 2  # of the two choices, at the end
CPU = RankDevice("CPU", 1024.0)


def every(space: Space) -> list[Overrides]:
    """All candidates, reached from one another by one lever at a time."""
    found: dict[str, Overrides] = {describe_candidate({}): {}}
    queue: list[Overrides] = [{}]
    while queue:
        for other in space.neighbours(queue.pop()):
            if describe_candidate(other) not in found:
                found[describe_candidate(other)] = other
                queue.append(other)
    return list(found.values())


def runs_in(folder: Path, words: list[str], seconds: float) -> tuple[Runs, float]:
    """Measurements in a directory, for so many seconds; and when they began."""
    began = time.monotonic()
    left = lambda: seconds - (time.monotonic() - began)  # noqa: E731
    journal, orders = TuneJournal(folder, "benchmark"), Orders(folder)
    runs = Runs(parse_command([FILE, *words], {}), folder, journal, orders, left, lambda: 0.0)
    return runs, began


def count_cpu_time(folder: Path) -> None:
    """Make the clock of the trainers, in processes that start from now on, one of CPU time."""
    folder.mkdir()
    # Python imports this module by itself at each start, before the trainer reads the clock.
    (folder / "sitecustomize.py").write_text("import time\ntime.perf_counter = time.process_time\n")
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def step_of(runs: Runs, overrides: Overrides, rung: int, steps: int) -> list[float]:
    result = runs(overrides, rung, WARM_UP, steps, math.inf)
    if result.failed:
        sys.exit(f"{describe_candidate(overrides)}: {result.failed}")
    return list(result.seconds)


def exhaust(space: Space, runs: Runs, rounds: int, steps: int) -> Overrides:
    """Measure all candidates in rounds; returns the fastest."""
    candidates, found = every(space), dict[str, list[float]]()
    for number in range(rounds):
        for each in candidates:
            seen = step_of(runs, each, number, steps)
            found.setdefault(describe_candidate(each), []).extend(seen)
    medians = {name: statistics.median(seen) for name, seen in found.items()}
    for name in sorted(medians, key=lambda name: medians[name]):
        print(f"{space.tokens / medians[name]:>10,.0f} tokens/s  {name}", flush=True)
    return min(candidates, key=lambda each: medians[describe_candidate(each)])


def tune_for(space: Space, folder: Path, words: list[str], seconds: float) -> Overrides:
    runs, began = runs_in(folder, words, seconds)
    search = Search(space, runs, lambda: seconds - (time.monotonic() - began))
    # Nothing is left out for want of memory: the exhaustive search has all, too.
    search.memory = LearnedMemory(math.inf, False)
    search.run()
    print(report.tune_table(search), flush=True)
    count = sum(len(one.runs) for one in search.trials.values())
    print(f"{len(search.trials)} candidates, {count} runs", flush=True)
    if search.best is None:
        sys.exit("the tune has measured nothing")
    return search.best.overrides


def main(argv: list[str]) -> int:
    parser = argument_parser("benchmarks.tune", __doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, help="of the exhaustive search")
    parser.add_argument("--steps", type=int, default=12, help="of each of its runs")
    parser.add_argument("--minutes", type=float, default=6.0, help="of the tune")
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, not the wall clock")
    options = parser.parse_args(argv)
    words, axes, rounds, minutes = list(BASE), AXES, options.rounds, options.minutes
    if options.quick:
        words, axes, rounds, minutes = [*BASE, *TINY], AXES[:1], 1, 0.05
        axes = [LeverAxis(axis.choices[:2]) for axis in axes]
    cfg = load_config([FILE], [*words, "--run.dir=unused"])
    space = Space(cfg, 1, 1, CPU, check_world)
    space.axes = axes
    with tempfile.TemporaryDirectory(prefix="tune-") as folder:
        if options.cpu_time:
            count_cpu_time(Path(folder, "clock"))
        began = time.monotonic()
        runs, _ = runs_in(Path(folder, "all"), words, math.inf)
        print(f"exhaustive: {len(every(space))} candidates", flush=True)
        fastest = exhaust(space, runs, rounds, options.steps)
        print(f"exhaustive: {time.monotonic() - began:.0f} s; the tune:", flush=True)
        chosen = tune_for(space, Path(folder, "tune"), words, 60 * minutes)
        print(f"exhaustive: {describe_candidate(fastest)}\ntune: {describe_candidate(chosen)}")
        if chosen == fastest:
            print("both have chosen the same")
            return 0
        pair: list[list[float]] = [[], []]
        for number in range(TURNS):
            for seen, overrides in zip(pair, (fastest, chosen), strict=True):
                seen += step_of(runs, overrides, rounds + number, 2 * options.steps)
    one, other = map(statistics.median, pair)
    print(f"in turn, the tune's choice takes {other / one - 1:+.1%} longer")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
