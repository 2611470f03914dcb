"""Mode steps: a srun step for each replica. One may be lost, and comes back at the end of a round.

Who takes part in an exchange is decided in membership.py; here is what they exchange, and what a
replica that joins makes of it. It runs when its result is needed: an exchange that has to be
repeated without somebody cannot be on its way behind the steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kempner.lowcomm.door import Door
from kempner.lowcomm.membership import Epoch, Group, Membership, TooFew
from kempner.lowcomm.outer import Decode, Fragment, Handle
from kempner.lowcomm.replicas import LowcommReplicas, Numbers
from kempner.optim.optimizer import local
from kempner.resilience.requests import FLAGS, INTERRUPT

if TYPE_CHECKING:
    from kempner.process_group import World
    from kempner.progress import Progress
    from kempner.run import RunConfig

DOOR = "KEMPNER_DOOR"  # the file with the address of the judge

T = TypeVar("T")


class Ending(NamedTuple):
    """Of a round: replicas may join then, and are sent `state`."""

    number: int
    about: dict[str, Any]
    state: list[Tensor]
    joinable: bool


class StepsExchange:
    """Each exchange is one epoch, or several when replicas are lost in it."""

    def __init__(
        self, membership: Membership, waiting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """`waiting()`: the watchdog's patient()."""
        self.membership, self.waiting, self.sent = membership, waiting, 0
        self.ending: Ending | None = None  # of a round, by the next exchange
        self.last: Epoch | None = None  # that was committed
        self.seconds = 0.0  # of it

    def start(self, ours: Tensor, name: str, decode: Decode | None = None) -> Handle:
        return _Later(self, ours, decode)


class _Later:
    def __init__(self, exchange: StepsExchange, ours: Tensor, decode: Decode | None) -> None:
        self._exchange, self._ours, self._decode = exchange, ours, decode

    def wait(self) -> Tensor:
        exchange, began = self._exchange, time.monotonic()
        ending = exchange.ending
        state = ending.state if ending else []
        run = partial(_exchange, self._ours, self._decode, state)
        number, about = (ending.number, ending.about) if ending else (0, {})
        joinable = ending is not None and ending.joinable
        with exchange.waiting():  # a slow replica is no hang: the judge knows who is lost
            exchange.last, (mean, sent) = exchange.membership.round(number, about, run, joinable)
        exchange.seconds = time.monotonic() - began
        exchange.sent += sent
        return mean


class _Nothing:
    """What a replica that joins sends: it has changed nothing. It is told the mean later."""

    def __init__(self, fragment: Fragment) -> None:
        self.sent, self.mean = 0, torch.empty(0)
        fragment.send(self, "")

    def start(self, ours: Tensor, name: str, decode: Decode | None = None) -> Handle:
        self.ours, self.decode = ours, decode
        return self

    def wait(self) -> Tensor:
        return self.mean


def _exchange(
    ours: Tensor, decode: Decode | None, state: list[Tensor], group: Group
) -> tuple[Tensor, int]:
    """What a member does; returns the mean of all members, and the bytes that this rank sent."""
    shared = 0
    if (joiners := len(group.epoch.joiners)) and group.place == 0:
        group.share([_on_host(tensor) for tensor in state])
        shared = joiners * sum(tensor.nbytes for tensor in state)
    mean, sent = _mean(ours, decode, group)
    return mean, sent + shared


def _mean(ours: Tensor, decode: Decode | None, group: Group) -> tuple[Tensor, int]:
    if decode is None:
        mean = group.mean(_on_host(ours)).to(ours.device)
        return mean, 2 * (group.size - 1) * ours.nbytes // group.size
    parts = [decode(part.to(ours.device)) for part in group.gather(_on_host(ours))]
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total / len(parts), (group.size - 1) * ours.nbytes


def _on_host(tensor: Tensor) -> Tensor:
    """A copy: an exchange may be left in its middle, and repeated. On the host, where a group can
    be left behind; islands have slow links, which the copy does not slow down."""
    return tensor.detach().to("cpu", copy=True).contiguous()


class StepsReplicas(LowcommReplicas):
    def __init__(
        self,
        cfg: RunConfig,
        world: World,
        named: Mapping[str, nn.Parameter],
        membership: Membership,
    ) -> None:
        self.membership = membership
        self._exchange = StepsExchange(membership, lambda: self.waiting())
        super().__init__(cfg, world, named, self._exchange)
        self._last_step = cfg.train.max_steps
        self._leaving, self._samples = False, 0

    def begin(self, progress: Progress) -> Progress:
        """Meet the others. A replica that is behind them, or comes later, goes on where they are,
        with their state."""
        progress = super().begin(progress)
        number, self._samples = self._round_of(progress), progress.samples
        received = [_on_host(tensor) for tensor in self._state_tensors()]
        enter = partial(self._enter, received)
        about = {**self._about(progress), "weights": self._checksum()}
        done = self._or_too_few(lambda: self.membership.enter(number, about, enter))
        if done is None:  # the run ended while this replica waited to join it
            self.membership.close()
            self._start_nobody()
            os._exit(0)
        epoch, joined = done
        if self.membership.me in epoch.joiners:
            for tensor, value in zip(self._state_tensors(), received, strict=True):
                tensor.copy_(value)
            self._to_anchors()
            if joined is not None:
                self._last_fragment.receive()
            self.forget_errors()
            progress = type(progress).of(epoch.about["progress"])
            self._samples = epoch.about["began"]
        self._tell(epoch, progress)
        self._samples = progress.samples
        return progress

    def _enter(self, received: list[Tensor], group: Group) -> _Nothing | None:
        """Fills `received`. In the end of a round the mean of the others, too."""
        if group.epoch.joiners:
            group.share(received)
        if group.epoch.entry:
            return None
        self._to_anchors()
        nothing = _Nothing(self._last_fragment)
        nothing.mean, _ = _mean(nothing.ours, nothing.decode, group)
        return nothing

    def after_step(self, progress: Progress, numbers: Numbers) -> Numbers:
        ends = progress.step % self.cfg.interval == 0
        if ends:
            state = self._state_tensors()
            done, stay = self._round_of(progress), not self._leaving
            self._exchange.ending = Ending(done, self._about(progress), state, stay)
        found = self._or_too_few(lambda: super(StepsReplicas, self).after_step(progress, numbers))
        self._exchange.ending = None
        self._leaving = self._leaving or any(found[flag] > 0 for flag in FLAGS[INTERRUPT:])
        if ends:
            assert self._exchange.last is not None
            self._tell(self._exchange.last, progress)
            self._samples = progress.samples
            if self._leaving or progress.step == self._last_step:
                self.membership.over()
                self.membership.close()
        return found

    def _or_too_few(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except TooFew:  # the batch script requeues the job
            self._start_nobody()
            raise

    def _start_nobody(self) -> None:
        """The batch script is to start no replica again."""
        if self.world.rank == 0:
            Path(f"{os.environ[DOOR]}.over").touch()

    def _about(self, progress: Progress) -> dict[str, Any]:
        """For replicas that join: where the run is, and the sample that the round began with."""
        return {"progress": progress.record(), "began": self._samples}

    def _round_of(self, progress: Progress) -> int:
        """How many are done."""
        return progress.step // self.cfg.interval

    @property
    def _last_fragment(self) -> Fragment:
        """That arrives at the end of a round."""
        return self.outer.fragments[-1]

    def _state_tensors(self) -> list[Tensor]:
        return [x for part in self.outer.fragments for x in (*part.anchors, *part.momenta)]

    def _to_anchors(self) -> None:
        for part in self.outer.fragments:
            for parameter, anchor in zip(part.parameters, part.anchors, strict=True):
                local(parameter.detach()).copy_(anchor)

    def _tell(self, epoch: Epoch, progress: Progress) -> None:
        """For the log of the replicas: who took part, and with which weights all go on."""
        weights = self._checksum()
        if self.world.rank:
            return
        here = {_slot(name) for name in epoch.members}
        away = sorted(set(range(self.world.replicas)) - here)
        text = f"replicas {_list(here)}"
        if epoch.joiners:
            text += f", joined by {_list(map(_slot, epoch.joiners))}"
        if away and not epoch.entry:
            text += f"; left out are the samples of {_list(away)} among {self._samples} to "
            text += f"{progress.samples - 1}"
        self.membership.door.tell(
            {
                "round": epoch.round,
                "entry": epoch.entry,
                "step": progress.step,
                "members": epoch.members,
                "joiners": epoch.joiners,
                "samples": [self._samples, progress.samples],
                "left_out": [] if epoch.entry else away,
                "weights": weights,
                "seconds": round(self._exchange.seconds, 3),
                "bytes": self._exchange.sent * self.world.size,
                "text": text,
            }
        )

    def _checksum(self) -> str:
        """Of the bits of the anchors of this replica: a sum, at the speed of memory."""
        anchors = [x for part in self.outer.fragments for x in part.anchors]
        sums = torch.stack([x.view(torch.int32).sum(dtype=torch.int64) for x in anchors]).tolist()
        if self.world.size > 1:
            parts: list[Any] = [None] * self.world.size
            dist.all_gather_object(parts, sums)
            sums = [number for part in parts for number in part]
        total = 0
        for number in sums:
            total = (1_000_003 * total + number) % (1 << 64)
        return f"{total:016x}"


def _slot(name: str) -> int:
    return int(name.partition(".")[0])


def _list(numbers: Any) -> str:
    return ", ".join(map(str, sorted(numbers)))


def open_steps(cfg: RunConfig, world: World, named: Mapping[str, nn.Parameter]) -> StepsReplicas:
    limit = cfg.distributed.start_timeout
    door = Door(Path(os.environ[DOOR]), None if world.rank else world.replica, limit)
    membership = Membership(door, world.replicas, cfg.lowcomm.min_replicas, limit)
    return StepsReplicas(cfg, world, named, membership)
