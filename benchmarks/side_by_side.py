"""The trainer beside a bare loop and other frameworks, on a CPU: the same Llama from the same
weights, on the same batches, with the same updates.

    python -m benchmarks.side_by_side                         all that are installed
    python -m benchmarks.side_by_side --only kempner hf       these, and the bare loop

Each is a process of its own, and they take turns of some steps: one works, the others wait. CPU
seconds of the main thread count, which computes, so that other jobs on the machine matter little.
Beside them are those of all threads, among them some that wake up a hundred times a second by the
clock, however long a step takes on a busy machine; and the ratios by the clock.
docs/reference/benchmarks.md has figures, and the settings.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace, TracebackType

from benchmarks.frameworks import FRAMEWORKS, WARM_UP, Job
from benchmarks.trainer import ROOT, machine
from kempner.config.option import ConfigError

REFERENCE = "bare"
INSTALL = "pip install -c constraints.txt -e '.[bench]'"
Turn = dict[str, float]  # seconds: frameworks.clocks()


def main(argv: list[str]) -> int:
    options = parse(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):  # what is started here never ends by itself
        signal.signal(number, lambda *_: sys.exit(1))
    print(f"$ python -m benchmarks.side_by_side {shlex.join(argv)}\n{machine()}", flush=True)
    names = choose(options.only)
    print(f"threads: {options.threads}; {versions(names)}\n", flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-") as work:
            job = prepare(options, Path(work))
            turns, losses = take_turns(names, job, options.threads)
    except (ConfigError, FrameworkError) as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print(table(turns, losses, job))
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    about, _, more = (__doc__ or "").partition("\n\n")
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "benchmarks.side_by_side", None, about, more, formatter_class=as_it_is
    )
    names = [name for name in FRAMEWORKS if name != REFERENCE]
    shown = ", ".join(names)
    parser.add_argument("--only", nargs="+", choices=list(FRAMEWORKS), metavar="NAME", help=shown)
    parser.add_argument("--turns", type=int, default=15, help="default: 15")
    parser.add_argument("--steps", type=int, default=10, help="of a turn (default: 10)")
    parser.add_argument("--threads", type=int, default=1, help="of each process (default: 1)")
    parser.add_argument("--config", default="configs/train/quickstart.toml")
    parser.add_argument("overrides", nargs="*", help="after --: overrides for shape and data")
    options = parser.parse_args(argv)
    if min(options.turns, options.steps, options.threads) < 1:
        parser.error("--turns, --steps and --threads: at least 1")
    return options


def choose(only: Sequence[str] | None) -> list[str]:
    """Names in the order of FRAMEWORKS, with the bare loops that they are compared with; those
    whose packages are missing are left out, with a line that says so."""
    names = only or list(FRAMEWORKS)
    wanted = {REFERENCE, *names, *(FRAMEWORKS[name].beside for name in names)}
    found = []
    for name in FRAMEWORKS:
        missing = [each for each in FRAMEWORKS[name].packages if util.find_spec(each) is None]
        if name in wanted and missing:
            print(f"{name} is left out: no {', '.join(missing)} here; {INSTALL}")
        elif name in wanted:
            found.append(name)
    return found


def versions(names: Sequence[str]) -> str:
    packages = ["torch", *(each for name in names for each in FRAMEWORKS[name].packages)]
    return ", ".join(f"{each} {metadata.version(each)}" for each in dict.fromkeys(packages))


def prepare(options: argparse.Namespace, work: Path) -> Job:
    """Write the weights and the rows of all steps. Raises ConfigError."""
    import numpy as np
    import torch
    from safetensors.torch import save_file

    from benchmarks.decoder import decoder
    from kempner.extensions.hf.families import config_json
    from kempner.extensions.hf.tensors import tensor_names
    from kempner.train.configure import load_config
    from kempner.train.parts import open_loader
    from kempner.train.progress import Progress

    cfg = load_config([options.config], options.overrides)
    train = cfg.train
    job = Job(
        str(work), options.config, options.overrides, options.steps, options.turns,
        train.sequences, train.seq_len,
    )  # fmt: skip
    torch.manual_seed(0)
    model = decoder(cfg.model)
    job.model.mkdir()
    config = config_json(cfg.model, None, "float32", None)
    (job.model / "config.json").write_text(json.dumps(config))
    names, tensors = tensor_names(cfg.model, "llama"), dict(model.named_parameters())
    weights = {theirs: tensors[own].detach() for own, theirs in names.items()}
    save_file(weights, job.model / "model.safetensors", metadata={"format": "pt"})
    # A stand-in with as much of a layout as a loader asks for.
    alone = SimpleNamespace(data_rank=0, share=0, shares=1)
    loader = open_loader(cfg, alone, False, Progress())  # type: ignore[arg-type]
    steps = [batch for _ in range(job.total) for batch in next(loader)]
    loader.close()
    rows = [torch.cat((batch.inputs, batch.targets[:, -1:]), 1) for batch in steps]
    np.save(work / "rows.npy", torch.cat(rows).numpy())
    return job


class FrameworkError(Exception):
    """A framework has ended before its last turn."""


class Worker:
    """The process of one framework. Its output is in a file, which is shown if it fails."""

    def __init__(self, name: str, job: Job, threads: int) -> None:
        self._name, self._log = name, Path(job.directory, f"{name}.log")
        command = [sys.executable, "-m", "benchmarks.frameworks", name, f"{job.directory}/job.json"]
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        pipe = subprocess.PIPE
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=log, text=True
            )
        self._answer()  # it is warm

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()

    def turn(self) -> dict[str, float]:
        """Let it work for a turn; returns the seconds of it, or the loss after the last one."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return dict(json.loads(line))
        log = "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])
        raise FrameworkError(f"{self._name} has ended early: {self._process.wait()}\n{log}")


def take_turns(
    names: Sequence[str], job: Job, threads: int
) -> tuple[dict[str, list[Turn]], dict[str, float]]:
    """Return the turns of each, and the losses of the last step. Another one begins each round."""
    Path(job.directory, "job.json").write_text(json.dumps(asdict(job)))
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(name, job, threads)) for name in names}
        for number in range(job.turns):
            print(f"round {number + 1} of {job.turns}", file=sys.stderr)
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                turns[name].append(workers[name].turn())
        return turns, {name: worker.turn()["loss"] for name, worker in workers.items()}


def table(turns: dict[str, list[Turn]], losses: dict[str, float], job: Job) -> str:
    """The ratios as a table of Markdown."""
    lines = [
        f"turns: {job.turns} of {job.steps} steps, after {WARM_UP} that do not count. A ratio over "
        "1 is faster than the bare loop: the median, and in brackets the quartiles.\n",
        "| | bare loop / it | CPU of all threads | by the clock | bare loop over its model / it | "
        "tokens/s | loss |",
        "|---|---|---|---|---|---|---|",
    ]
    tokens = job.steps * job.batch * job.seq_len
    for name, own in turns.items():
        reference, beside = turns[REFERENCE], turns[FRAMEWORKS[name].beside]
        cells = [
            FRAMEWORKS[name].title,
            *(quartiles(reference, own, clock) for clock in ("main", "all", "wall")),
            quartiles(beside, own, "main"),
            f"{tokens / statistics.median(turn['main'] for turn in own):,.0f}",
            f"{losses[name]:.6f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def quartiles(others: Sequence[Turn], own: Sequence[Turn], clock: str) -> str:
    if others is own:
        return "1"
    ratios = [other[clock] / turn[clock] for other, turn in zip(others, own, strict=True)]
    if len(ratios) == 1:
        return f"{ratios[0]:.3f}"
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
