"""scripts/train.py with faults put in, for the tests alone: started in its place by KEMPNER_TRAIN.

FAULTS holds one fault a line. With `once=FILE` it strikes a single time in the life of a run, with
`rank=R` on that rank alone:

    kill at=MODULE:FUNCTION:before nth=2    SIGKILL to itself at the nth call (also :after)
    stop at=MODULE:FUNCTION:before nth=2    SIGINT to itself, the user's request to stop
    hold at=MODULE:FUNCTION:before s=3      that call takes so much longer
    fail at=MODULE:FUNCTION:before          that call raises OSError
    nan from=64 to=96                       the loss of these samples is NaN
    ignore from=64 to=96                    every label of these samples is ignored
    slow ms=30                              every step waits so long for its data
    slow_forward ms=900                     and every forward of a micro-batch
    slow_validation ms=30                   and every batch of a validation
"""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRAIN = Path(__file__).parents[2] / "scripts" / "train.py"
POISON = 256  # end of document: no batch of real text has nothing else


def strikes(fault: dict[str, str]) -> bool:
    """Is it this rank's, and the first time?"""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    if fault.get("rank", rank) != rank:
        return False
    if "once" in fault:
        try:
            Path(fault["once"]).touch(exist_ok=False)
        except FileExistsError:
            return False
    return True


def at_call(fault: dict[str, str], act: Callable[[], None]) -> None:
    """Act before or after the nth call of a function."""
    module_name, function, when = fault["at"].split(":")
    owner: Any = importlib.import_module(module_name)
    *classes, name = function.split(".")
    for part in classes:
        owner = getattr(owner, part)
    real, calls = getattr(owner, name), []

    @functools.wraps(real)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        due = len(calls) == int(fault.get("nth", "1"))
        if due and when == "before" and strikes(fault):
            act()
        result = real(*args, **kwargs)
        if due and when == "after" and strikes(fault):
            act()
        return result

    setattr(owner, name, faulty)


def kill(fault: dict[str, str]) -> None:
    at_call(fault, lambda: os.kill(os.getpid(), signal.SIGKILL))


def stop(fault: dict[str, str]) -> None:
    def ask() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)  # a thread of the trainer hears it

    at_call(fault, ask)


def hold(fault: dict[str, str]) -> None:
    at_call(fault, lambda: time.sleep(float(fault["s"])))


def fail(fault: dict[str, str]) -> None:
    def broken() -> None:
        raise OSError("the test has broken this call")

    at_call(fault, broken)


def change_labels(fault: dict[str, str], label: int) -> None:
    from kempner.data import loader

    real = loader.TrainLoader._read

    def read(self: Any, position: int, step: int) -> Any:
        micro_batches = real(self, position, step)
        if int(fault["from"]) <= position < int(fault["to"]) and strikes(fault):
            for batch in micro_batches:
                batch.targets.fill_(label)
        return micro_batches

    loader.TrainLoader._read = read  # type: ignore[method-assign]


def nan(fault: dict[str, str]) -> None:
    from kempner.parallel import build

    real = build.cross_entropy

    def loss(x: Any, weight: Any, targets: Any, **options: Any) -> Any:
        poisoned = bool((targets == POISON).all())
        total, terms = real(x, weight, targets, **options)
        return total * (float("nan") if poisoned else 1.0), terms

    build.cross_entropy = loss
    change_labels(fault, POISON)


def slow(fault: dict[str, str]) -> None:
    from kempner.data import loader

    real = loader.TrainLoader.__next__

    def following(self: Any) -> Any:
        if strikes(fault):
            time.sleep(float(fault["ms"]) / 1000)
        return real(self)

    loader.TrainLoader.__next__ = following  # type: ignore[method-assign]


def slow_forward(fault: dict[str, str]) -> None:
    """For the whole of the process that it strikes."""
    from kempner.model.decoder import Decoder

    real, struck = Decoder.forward, []

    def forward(*args: Any, **kwargs: Any) -> Any:
        if struck or strikes(fault):
            struck.append(True)
            time.sleep(float(fault["ms"]) / 1000)
        return real(*args, **kwargs)

    Decoder.forward = forward  # type: ignore[method-assign]


def slow_validation(fault: dict[str, str]) -> None:
    from kempner import evaluate

    real = evaluate.validate

    def wait(batch: Any) -> Any:
        time.sleep(float(fault["ms"]) / 1000)
        return batch

    def slowly(model: Any, objective: Any, sets: Any, *rest: Any) -> Any:
        if strikes(fault):
            sets = {name: map(wait, batches) for name, batches in sets.items()}
        return real(model, objective, sets, *rest)

    evaluate.validate = slowly


KINDS = {
    "kill": kill,
    "stop": stop,
    "hold": hold,
    "fail": fail,
    "nan": nan,
    "slow": slow,
    "slow_forward": slow_forward,
    "slow_validation": slow_validation,
}


def main() -> None:
    if "--check" not in sys.argv:
        for line in filter(None, map(str.strip, os.environ.get("FAULTS", "").splitlines())):
            kind, *words = line.split()
            fault = dict(word.split("=", 1) for word in words)
            if kind == "ignore":
                change_labels(fault, -100)
            else:
                KINDS[kind](fault)
    sys.argv[0] = str(TRAIN)
    runpy.run_path(str(TRAIN), run_name="__main__")


if __name__ == "__main__":
    main()
