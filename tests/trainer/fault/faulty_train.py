"""scripts/train.py with faults put in, for the tests alone: started in its place by KEMPNER_TRAIN.

FAULTS holds one fault a line. With `once=FILE` it strikes a single time in the life of a run, with
`rank=R` on that rank alone, with `start=N` in that start of the job by Slurm, from 0, with
`replica=R` on that replica alone, with `host=NAME` on that node of Slurm's alone, with
`program=NAME` in that program of rl.sh alone (faulty_rl/):

    kill at=MODULE:FUNCTION:before nth=2    SIGKILL to itself at the nth call (also :after; 0: any)
    kill at=... signal=SIGTERM              or another signal
    hold at=MODULE:FUNCTION:before s=3      that call takes so much longer
    wait at=MODULE:FUNCTION:before path=P   that call waits until the path exists, a minute at most,
                                            or s=300
    read at=MODULE:FUNCTION:before s=3      before that call a file is read so long, again and again
    fail at=MODULE:FUNCTION:before          that call raises OSError; errno=5: as the system would
    keep_gil at=...                         that call never ends, and no other thread runs
    open at=... path=FIFO                   before that call a file is opened, which never returns
    collective at=...                       before that call the rank joins a barrier alone
    shape at=...                            before that call it sums a tensor without elements
    out_of_memory at=MODULE:FUNCTION:before that call raises torch's OutOfMemoryError
    nan from=64 to=96                       the loss of these samples is NaN
    loud from=64 to=96 by=100               the loss of these samples is so many times higher
    ignore from=64 to=96                    every label of these samples is ignored
    bad_gradient from=64 to=96              a number of a gradient of such a step is NaN
    spoil rank=1 step=2                     a weight is NaN after this step
    flip of=activation from=64 to=96        a bit of it is another one: see flips.py
    digest to=DIR                           what the weights are before each update, by rank
    hasty                                   a hang is judged within seconds
    slow ms=30                              every step waits so long for its data
    slow_forward ms=900                     and every forward of a micro-batch
    slow_products ms=1                      and every product of a linear layer
    slow_validation ms=30                   and every batch of a validation
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import re
import runpy
import signal
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRAIN = Path(__file__).parents[3] / "scripts" / "train.py"
POISON = 256  # end of document: no batch of real text has nothing else


def strikes(fault: dict[str, str]) -> bool:
    """Is it this rank's, and the first time?"""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    if fault.get("rank", rank) != rank:
        return False
    starts = os.environ.get("SLURM_RESTART_COUNT") or "0"
    if fault.get("start", starts) != starts:
        return False
    host = os.environ.get("SLURMD_NODENAME", "")
    if fault.get("host", host) != host:
        return False
    replica = os.environ.get("KEMPNER_REPLICA", "0")
    if fault.get("replica", replica) != replica:
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
        due = int(fault.get("nth", "1")) in (0, len(calls))
        if due and when == "before" and strikes(fault):
            act()
        result = real(*args, **kwargs)
        if due and when == "after" and strikes(fault):
            act()
        return result

    setattr(owner, name, faulty)


def kill(fault: dict[str, str]) -> None:
    number = signal.Signals[fault.get("signal", "SIGKILL")]
    at_call(fault, lambda: os.kill(os.getpid(), number))


def hold(fault: dict[str, str]) -> None:
    at_call(fault, lambda: time.sleep(float(fault["s"])))


def wait(fault: dict[str, str]) -> None:
    def waits() -> None:
        until = time.monotonic() + float(fault.get("s", "60"))
        while not os.path.exists(fault["path"]) and time.monotonic() < until:
            time.sleep(0.01)

    at_call(fault, waits)


def read(fault: dict[str, str]) -> None:
    def reads() -> None:
        until = time.monotonic() + float(fault["s"])
        while time.monotonic() < until:
            with open("/dev/zero", "rb") as file:
                file.read(2 << 20)
            time.sleep(0.2)

    at_call(fault, reads)


def fail(fault: dict[str, str]) -> None:
    def broken() -> None:
        if number := int(fault.get("errno", 0)):
            raise OSError(number, os.strerror(number))
        raise OSError("the test has broken this call")

    at_call(fault, broken)


def keep_gil(fault: dict[str, str]) -> None:
    at_call(fault, lambda: re.match("(a|a)*b", "a" * 60))  # doubles with each letter


def open_(fault: dict[str, str]) -> None:
    def opens() -> None:
        if not os.path.exists(fault["path"]):
            os.mkfifo(fault["path"])
        with open(fault["path"]):  # waits for somebody who writes into it
            pass

    at_call(fault, opens)


def collective(fault: dict[str, str]) -> None:
    import torch.distributed as dist

    at_call(fault, lambda: dist.barrier())


def shape(fault: dict[str, str]) -> None:
    import torch
    import torch.distributed as dist

    at_call(fault, lambda: dist.all_reduce(torch.ones(0, dtype=torch.float64)))


def out_of_memory(fault: dict[str, str]) -> None:
    import torch

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")

    at_call(fault, full)


def change_labels(fault: dict[str, str], label: int) -> None:
    from kempner.data import loader

    real = loader.TrainLoader._read

    def read(self: Any, position: int, step: int) -> Any:
        micro_batches = real(self, position, step)
        # A position that is left out is read from behind the gap.
        first, _ = self._ranges(position, 1)[0]
        if int(fault["from"]) <= first < int(fault["to"]) and strikes(fault):
            for batch in micro_batches:
                batch.targets.fill_(label)
        return micro_batches

    loader.TrainLoader._read = read  # type: ignore[method-assign]


def change_loss(fault: dict[str, str]) -> None:
    from kempner.extensions.preference.losses import Preference
    from kempner.parallel import build

    real, of_pairs = build.cross_entropy, Preference.__call__
    factor = float(fault.get("by", "nan"))

    def loss(x: Any, weight: Any, targets: Any, **options: Any) -> Any:
        poisoned = bool((targets == POISON).all())
        total, terms = real(x, weight, targets, **options)
        return total * (factor if poisoned else 1.0), terms

    def loss_of_pairs(self: Any, model: Any, batch: Any) -> Any:
        poisoned = bool((batch.targets == POISON).all())
        total, terms, batch = of_pairs(self, model, batch)
        return total * (factor if poisoned else 1.0), terms, batch

    build.cross_entropy = loss
    Preference.__call__ = loss_of_pairs  # type: ignore[method-assign]
    change_labels(fault, POISON)


def flip(fault: dict[str, str]) -> None:
    sys.path.insert(0, str(TRAIN.parents[1]))
    from tests.trainer.fault.flips import Flips

    Flips(fault["of"], lambda n: int(fault["from"]) < n <= int(fault["to"]) and strikes(fault))


def before_update(act: Callable[[Any, int, list[Any]], None]) -> None:
    """Call act(layout, samples consumed, parameters) when the gradients of a step are there."""
    from kempner.data.loader import TrainLoader
    from kempner.parallel.layout import Layout

    following, norm_sq, at = TrainLoader.__next__, Layout.norm_sq, [0]

    def read(self: Any) -> Any:
        result = following(self)
        at[0] = self.position
        return result

    def faulty(self: Any, parameters: Any) -> Any:
        parameters = list(parameters)
        act(self, at[0], parameters)
        return norm_sq(self, parameters)

    TrainLoader.__next__ = read  # type: ignore[method-assign]
    Layout.norm_sq = faulty  # type: ignore[method-assign]


def bad_gradient(fault: dict[str, str]) -> None:
    """After all sums over ranks: no other rank can see it in its own gradients."""

    def act(_: Any, samples: int, parameters: list[Any]) -> None:
        from kempner.checkpoint.format.plan import local_part

        if int(fault["from"]) < samples <= int(fault["to"]) and strikes(fault):
            next(g for p in parameters if (g := local_part(p.grad)).numel()).view(-1)[0] = float(
                "nan"
            )

    before_update(act)


def spoil(fault: dict[str, str]) -> None:
    from kempner.checkpoint.format.plan import local_part
    from kempner.extensions.lowcomm.outer import OuterOptimizer

    real = OuterOptimizer.after_step

    def after_step(self: Any, step: int) -> None:
        if step == int(fault["step"]) and strikes(fault):
            local_part(self.fragments[0].parameters[0].detach()).view(-1)[0] = float("nan")
        real(self, step)

    OuterOptimizer.after_step = after_step  # type: ignore[method-assign]


def digest(fault: dict[str, str]) -> None:
    """A line of JSON each: the CRC-32 of each part of a parameter, by the number of that and by
    what it is a part of."""

    def act(layout: Any, samples: int, parameters: list[Any]) -> None:
        from kempner.checkpoint.format.plan import local_part, make_table, own_box

        named = {str(i): p.detach() for i, p in enumerate(parameters)}
        table = make_table(named, {}, math.prod(layout.sizes))
        found = {
            f"{name} {own_box(table[name], layout.rank)}": zlib.crc32(
                local_part(p).numpy().tobytes()
            )
            for name, p in named.items()
        }
        with Path(fault["to"], f"rank-{layout.rank}.jsonl").open("a") as file:
            print(json.dumps([samples, found]), file=file)

    before_update(act)


def hasty(fault: dict[str, str]) -> None:
    from kempner.train.resilience import inquiry, suspects, watchdog

    watchdog.LATE_S = inquiry.ROUND_S = inquiry.LOOK_S = inquiry.RAS_S = 1.0
    inquiry.QUIET_S, watchdog.TOLD_S = 0.5, 3.0
    suspects.HOLD_S |= dict.fromkeys(suspects.HOLD_S, 2.0)


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


def slow_products(fault: dict[str, str]) -> None:
    from torch import nn

    real = nn.Linear.forward

    def forward(self: Any, x: Any) -> Any:
        if strikes(fault):
            time.sleep(float(fault["ms"]) / 1000)
        return real(self, x)

    nn.Linear.forward = forward  # type: ignore[method-assign]


def slow_validation(fault: dict[str, str]) -> None:
    from kempner.train import evaluate

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
    "hold": hold,
    "wait": wait,
    "read": read,
    "fail": fail,
    "keep_gil": keep_gil,
    "open": open_,
    "collective": collective,
    "shape": shape,
    "out_of_memory": out_of_memory,
    "nan": change_loss,
    "loud": change_loss,
    "bad_gradient": bad_gradient,
    "spoil": spoil,
    "flip": flip,
    "digest": digest,
    "hasty": hasty,
    "slow": slow,
    "slow_forward": slow_forward,
    "slow_products": slow_products,
    "slow_validation": slow_validation,
}


def main(program: Path = TRAIN) -> None:
    if "--check" not in sys.argv:
        for line in filter(None, map(str.strip, os.environ.get("FAULTS", "").splitlines())):
            kind, *words = line.split()
            fault = dict(word.split("=", 1) for word in words)
            if fault.get("program", program.stem) != program.stem:
                continue
            if kind == "ignore":
                change_labels(fault, -100)
            else:
                KINDS[kind](fault)
    sys.argv[0] = str(program)
    sys.path.insert(0, str(program.parent))  # as Python does for a program
    runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    main()
