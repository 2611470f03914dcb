"""Mode steps: one srun step per replica. A replica may be lost, and rejoins at the end of a round.

membership.py decides who takes part in an exchange; this module defines the contents, and how a
joining replica uses them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kempner.checkpoint.format.plan import local_part
from kempner.extensions.lowcomm.config import LowcommConfig
from kempner.extensions.lowcomm.door import Door, slot_of
from kempner.extensions.lowcomm.membership import Epoch, Membership, ReplicaGroup, TooFew
from kempner.extensions.lowcomm.outer import Decode, Handle
from kempner.extensions.lowcomm.replicas import LowcommReplicas
from kempner.train.replicas import ReplicaNumbers
from kempner.train.resilience.requests import INTERRUPT_REQUEST, REQUEST_FLAGS

if TYPE_CHECKING:
    from kempner.jobs.ranks.placement import World
    from kempner.train.progress import Progress
    from kempner.train.sections import RunConfig

DOOR = "KEMPNER_DOOR"  # the file with the address of the judge
JOIN_S = 7 * 86400.0  # until the others end their round: the judge knows who is lost

_T = TypeVar("_T")


class StepsExchange:
    """Exchanges run on a separate thread while the replicas train on, one after another in the
    order of their start, which is the same everywhere. Each takes one epoch, or several if replicas
    are lost in it: it counts for all members or for none before anybody takes its result."""

    def __init__(
        self, membership: Membership, waiting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """`waiting()`: the watchdog's patient()."""
        self.membership, self.waiting, self.sent = membership, waiting, 0
        self.round = 0  # the current one
        self.last: Epoch | None = None  # of the last result taken
        self.seconds = 0.0  # duration of that exchange
        self._started: SimpleQueue[_Started] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="exchange").start()

    def start(self, ours: Tensor, name: str, decode: Decode | None = None) -> Handle:
        started = _Started(self, ours, decode)
        self._started.put(started)
        return started

    def _work(self) -> None:
        problem: Exception | None = None
        while True:
            started = self._started.get()
            try:
                if problem:  # too few replicas are left
                    raise problem
                started.run()
            except Exception as error:
                problem = error
                # wait() raises it on the trainer's thread.
                started.done.set_exception(error)


class _Started:
    """An exchange in progress. `done`: the epoch, the mean, the bytes that this rank sent, and the
    seconds it took."""

    def __init__(self, exchange: StepsExchange, ours: Tensor, decode: Decode | None) -> None:
        self._exchange, self._ours, self._decode = exchange, ours, decode
        self._round = exchange.round
        # `ours` is ready only when the steps' stream gets there, and another stream reads it.
        self._ready = torch.cuda.Event() if ours.is_cuda else None  # type: ignore[no-untyped-call]
        if self._ready is not None:
            self._ready.record()
        self.done: Future[tuple[Epoch, Tensor, int, float]] = Future()

    def run(self) -> None:
        began = time.monotonic()
        epoch, (mean, byte_count) = self._exchange.membership.round(self._round, self._with_others)
        self.done.set_result((epoch, mean, byte_count, time.monotonic() - began))

    def wait(self) -> Tensor:
        exchange = self._exchange
        # Not a hang to the watchdog: a replica may be slow, and the judge knows which are lost.
        with exchange.waiting():
            exchange.last, mean, byte_count, exchange.seconds = self.done.result()
        exchange.sent += byte_count
        if mean.is_cuda:
            # Made on another stream: it must not be freed while this stream uses it.
            mean.record_stream(torch.cuda.current_stream())
        return mean

    def _with_others(self, group: ReplicaGroup) -> tuple[Tensor, int]:
        """Return the mean of all members, and the bytes that this rank sent."""
        with self._beside_the_steps():
            ours = self._ours
            if self._decode is None:
                mean = group.mean(_on_host(ours)).to(ours.device)
                return mean, 2 * (group.size - 1) * ours.nbytes // group.size
            parts = group.gather(_on_host(ours))
            total = self._decode(parts[0].to(ours.device))
            for part in parts[1:]:
                total += self._decode(part.to(ours.device))
            return total / len(parts), (group.size - 1) * ours.nbytes

    @contextmanager
    def _beside_the_steps(self) -> Iterator[None]:
        """Use a separate stream on a GPU: a copy on the steps' stream would wait for them."""
        if self._ready is None:
            yield
            return
        stream = torch.cuda.Stream(self._ours.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self._ready.wait(stream)
            yield
            # The result goes to a thread whose stream does not wait for this one.
            stream.synchronize()


def _on_host(tensor: Tensor) -> Tensor:
    """Copy to the host: an exchange may be abandoned midway and repeated, and a group can be left
    behind only there. Links between islands are slow; beside them the copy costs little."""
    return tensor.detach().to("cpu", copy=True).contiguous()


class StepsReplicas(LowcommReplicas):
    def __init__(
        self,
        cfg: RunConfig,
        world: World,
        parameters: Mapping[str, nn.Parameter],
        membership: Membership,
    ) -> None:
        self.membership = membership
        # Looked up at each use, because `waiting` is set after the replicas are made.
        self._exchange = StepsExchange(membership, lambda: self.waiting())
        super().__init__(cfg, world, parameters, self._exchange)
        self._last_step = cfg.train.max_steps
        self._leaving, self._samples = False, 0

    def begin(self, progress: Progress) -> Progress:
        """Meet the others. A replica that is behind, or late, continues where they are,
        with their state."""
        progress = super().begin(progress)
        number, self._samples = self._round_of(progress), progress.samples
        # Replicas that resume the same round may have different weights: see Membership._first.
        about = {**self._about(progress), "weights": self._checksum()}
        with self.waiting(JOIN_S):
            done = self._or_too_few(lambda: self.membership.enter(number, about, self._share))
        if done is None:  # the run ended while this replica waited to join it
            self.membership.close()
            self._start_nobody()
            os._exit(0)
        epoch, received = done
        if self.membership.me in epoch.joiners:
            for tensor, value in zip(self._state_tensors(), received, strict=True):
                tensor.copy_(value)
            self._to_anchors()
            self.forget_errors()
            progress = type(progress).of(epoch.about["progress"])
            self._samples = epoch.about["began"]
        self._tell(epoch, epoch.about["members"], progress)
        self._samples = progress.samples
        return progress

    def _share(self, group: ReplicaGroup) -> list[Tensor]:
        """Send anchors and momenta from the members to the joiners; returns them on the joiners."""
        # Only the first member sends: the others need no host copy of their state.
        if not group.epoch.joiners or not (group.joins or group.place == 0):
            return []
        state = [_on_host(tensor) for tensor in self._state_tensors()]
        self._exchange.sent += group.share(state)
        return state

    def after_step(self, progress: Progress, numbers: ReplicaNumbers) -> ReplicaNumbers:
        # Before super(), which starts this step's exchanges: each belongs to a round.
        number = self._exchange.round = -(-progress.step // self.cfg.interval)
        result = self._or_too_few(lambda: super(StepsReplicas, self).after_step(progress, numbers))
        # In this step the flags of all arrive; in others the host would wait for the device.
        if -progress.step % self.cfg.interval == 1:
            self._leaving |= any(result[flag] > 0 for flag in REQUEST_FLAGS[INTERRUPT_REQUEST:])
        if progress.step % self.cfg.interval:
            return result
        epoch = self._exchange.last  # the last fragment's; all members know the same about it
        assert epoch is not None
        members, over = epoch.members, self._leaving or progress.step == self._last_step
        # A run that ends admits nobody.
        if epoch.waiting and not over:
            about = self._about(progress, members)
            with self.waiting():
                epoch, _ = self._or_too_few(
                    lambda: self.membership.admit(number, about, self._share)
                )
        self._tell(epoch, members, progress)
        self._samples = progress.samples
        if over:
            self.membership.over()
            self.membership.close()
        return result

    def _or_too_few(self, act: Callable[[], _T]) -> _T:
        try:
            return act()
        except TooFew:  # the batch script requeues the job
            self._start_nobody()
            raise

    def _start_nobody(self) -> None:
        """Tell the batch script not to restart any replica."""
        if self.world.rank == 0:
            Path(f"{os.environ[DOOR]}.over").touch()

    def _about(self, progress: Progress, members: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return facts for replicas that join: where the run is, the sample that the round
        began with, and which replicas contributed to it; none, if the round precedes this start
        of the job."""
        return {"progress": progress.record(), "began": self._samples, "members": members}

    def _round_of(self, progress: Progress) -> int:
        """Return the number of rounds done."""
        return progress.step // self.cfg.interval

    def _state_tensors(self) -> list[Tensor]:
        return [x for part in self.outer.fragments for x in (*part.anchors, *part.momenta)]

    def _to_anchors(self) -> None:
        for part in self.outer.fragments:
            for parameter, anchor in zip(part.parameters, part.anchors, strict=True):
                local_part(parameter.detach()).copy_(anchor)

    def _tell(self, epoch: Epoch, members: Sequence[str], progress: Progress) -> None:
        """Report the round for the log of the replicas: who contributed to it, who joined in the
        `epoch` after it, and with which weights all continue."""
        weights = self._checksum()
        if self.world.rank:
            return
        entry, members = not members, members or epoch.members
        away = sorted(set(range(self.world.replicas)) - {slot_of(name) for name in members})
        text = f"replicas {_list(members)}"
        if epoch.joiners:
            text += f", joined by {_list(epoch.joiners)}"
        if away and not entry:
            text += f"; left out are the samples of {', '.join(map(str, away))} among "
            text += f"{self._samples} to {progress.samples - 1}"
        self.membership.door.tell(
            {
                "round": epoch.round,
                "entry": entry,
                "step": progress.step,
                "members": members,
                "joiners": epoch.joiners,
                "samples": [self._samples, progress.samples],
                "left_out": [] if entry else away,
                "weights": weights,
                "seconds": round(self._exchange.seconds, 3),
                "bytes": self._exchange.sent * self.world.size,
                "text": text,
            }
        )

    def _checksum(self) -> str:
        """Return a checksum of the bits of this replica's anchors: a sum, at memory speed."""
        anchors = [x for part in self.outer.fragments for x in part.anchors]
        # Integers, because their sum does not depend on the order in which a GPU adds.
        sums = torch.stack([x.view(torch.int32).sum(dtype=torch.int64) for x in anchors]).tolist()
        if self.world.size > 1:
            parts: list[Any] = [None] * self.world.size
            dist.all_gather_object(parts, sums)
            sums = [number for part in parts for number in part]
        total = 0
        for number in sums:
            # The factor makes the order of the tensors matter.
            total = (1_000_003 * total + number) % (1 << 64)
        return f"{total:016x}"


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(str, sorted(map(slot_of, names))))


def open_steps(
    cfg: RunConfig, world: World, parameters: Mapping[str, nn.Parameter]
) -> StepsReplicas:
    limit = cfg.distributed.start_timeout
    door, least = Door(Path(os.environ[DOOR]), limit), cfg.of(LowcommConfig).min_replicas
    membership = Membership(door, world.replica, world.replicas, least, limit)
    return StepsReplicas(cfg, world, parameters, membership)
