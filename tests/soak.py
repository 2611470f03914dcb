"""The tests that are too slow for every day, part after part, and a table at the end:

    python -m tests.soak [--only NAME ...] [-- WORDS OF PYTEST]

A part that fails does not keep the next ones from running; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PYTEST = (sys.executable, "-m", "pytest")
# Most of the time these tests wait: for time limits, requeues and hangs. A file is not one
# worker's, because that of the pages alone takes an hour.
WORKERS = ("-n", "4", "--dist", "worksteal")


def find_tests(*kinds: str) -> list[str]:
    """Return the directories of these kinds in all three parts."""
    found = [path for kind in kinds for path in sorted(ROOT.glob(f"tests/*/{kind}"))]
    return [str(path.relative_to(ROOT)) for path in found]


FAULTS = (sys.executable, "-m", "benchmarks.soak")


class Part(NamedTuple):
    """`beside`: it waits three quarters of its time, and runs beside the others, one such part
    after the other."""

    command: tuple[str, ...]
    beside: bool = False


PARTS = {
    "tests": Part((*PYTEST, "-m", "soak", *WORKERS)),
    "as-user": Part((*PYTEST, *find_tests("slurm", "fault", "ray"), "--as-user", *WORKERS)),
    "faults": Part((*FAULTS, "--faults", "30", "--seed", "1", "--pattern", "kit", "spares"), True),
    "site": Part((*FAULTS, "--site", "hostile", "--faults", "40", "--seed", "1"), True),
    "replicas": Part((*FAULTS[:2], "benchmarks.soak_replicas", "--faults", "30", "--seed", "1"),
                     True),
    "rl": Part((*FAULTS[:2], "benchmarks.soak_rl", "--faults", "20", "--seed", "1"), True),
}  # fmt: skip


class Result(NamedTuple):
    name: str
    seconds: float
    code: int


class Runner:
    """Runs parts; `words` go to those that are pytest's."""

    def __init__(self, words: Sequence[str], say: Callable[[str], None] = print) -> None:
        self.words, self.say = words, say
        self.results: list[Result] = []
        self._interrupted = threading.Event()

    def run(self, parts: Mapping[str, Part]) -> list[Result]:
        beside = threading.Thread(target=self._run_beside, args=(parts,))
        beside.start()
        for name, part in parts.items():
            if not part.beside and not self._interrupted.is_set():
                self._run_one(name, part)
        beside.join()
        return sorted(self.results, key=lambda result: list(parts).index(result.name))

    def leave_out_the_rest(self, *_: object) -> None:
        """Handle Ctrl-C: the parts that run have it from the terminal, too."""
        self._interrupted.set()

    def _run_beside(self, parts: Mapping[str, Part]) -> None:
        for name, part in parts.items():
            if part.beside and not self._interrupted.is_set():
                with tempfile.TemporaryFile("w+", prefix=f"soak-{name}-") as output:
                    self._run_one(name, part, output)

    def _run_one(self, name: str, part: Part, output: IO[str] | None = None) -> None:
        more = self.words if part.command[1:3] == PYTEST[1:] else ()
        title = f"\n== {name}: {shlex.join([*part.command, *more])}"
        self.say(f"{title}{'  (its output follows at its end)' if output else ''}")
        begin = time.monotonic()
        code = subprocess.run(
            [*part.command, *more], cwd=ROOT, stdout=output, stderr=output
        ).returncode
        self.results.append(Result(name, time.monotonic() - begin, code))
        if output:
            output.seek(0)
            self.say(f"\n== {name} has ended: exit code {code}\n{output.read()}")


def table(results: Sequence[Result], left_out: Sequence[str], seconds: float) -> str:
    """`seconds`: of all parts together."""
    lines = [f"{'part':<14}{'seconds':>9}  result"]
    for name, part_seconds, code in results:
        lines.append(f"{name:<14}{part_seconds:>9.0f}  {f'exit code {code}' if code else 'passed'}")
    lines += [f"{name:<14}{'':>9}  not run" for name in left_out]
    lines.append(f"{'together':<14}{seconds:>9.0f}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=PARTS, default=list(PARTS))
    end = argv.index("--") if "--" in argv else len(argv)
    args, words = parser.parse_args(argv[:end]), argv[end + 1 :]
    chosen = {name: PARTS[name] for name in PARTS if name in args.only}
    begin = time.monotonic()
    runner = Runner(words, lambda text: print(text, flush=True))
    signal.signal(signal.SIGINT, runner.leave_out_the_rest)
    results = runner.run(chosen)
    left_out = [name for name in PARTS if name not in {result.name for result in results}]
    print("\n" + table(results, left_out, time.monotonic() - begin))
    return int(any(result.code for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
