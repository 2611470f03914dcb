"""A version of the weights straight from the ranks of the trainer into an engine.

Each rank copies the part that it would write into a checkpoint to the host's memory, and offers it
in the background while the training goes on. An engine asks every rank for its part, through a
store on rank 0, and each answer is a process group of its own, of these two: whoever dies breaks
its own groups and nobody else's. No rank ever holds more than its part, and an engine nothing but
its model and a few buckets.

The groups are gloo's, also where the weights are on GPUs: a broken NCCL communicator can take its
process down, and the trainer must outlive its engines.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kempner import slurm
from kempner.checkpoint.layout import (
    Box,
    Table,
    chunks_of,
    dtype_of,
    from_json,
    make_table,
    slices,
    to_json,
)
from kempner.checkpoint.ranks import Ranks
from kempner.checkpoint.writer import local
from kempner.model.decoder import Decoder
from kempner.parallel.build import parameter_names
from kempner.rl.exchange import Exchange

Address = tuple[str, int]

BUCKET = 1 << 24  # bytes that are sent at once
TIMEOUT_S = 20.0  # for one bucket, or for the other side to come
SENDERS = 4  # ranks that one engine reads from at a time
LOOK_S = 0.1  # between two looks whether an engine has asked
PROBE_S = 3.0  # to see whether the trainer is there at all


class Gone(Exception):
    """The version is not offered, or not any more; the model is as it was."""


# --- What goes over the wire, in which order: both sides compute it ---


class Piece(NamedTuple):
    name: str
    box: Box

    @property
    def elements(self) -> int:
        return math.prod(length for _, length in self.box)


def parts_of(table: Table, rank: int) -> list[Piece]:
    """What a rank sends: what it would write, but of small tensors, which each rank has, one."""
    chunks = (Piece(*chunk) for chunk in chunks_of(table, rank))
    first = {name for name, stored in table.items() if stored.everywhere and rank > 0}
    return [piece for piece in chunks if piece.elements and piece.name not in first]


def buckets_of(pieces: Iterable[Piece], itemsize: int) -> Iterator[list[Piece]]:
    """In order, at most BUCKET bytes each; a larger piece is cut into rows."""
    bucket: list[Piece] = []
    left = most = BUCKET // itemsize
    for piece in pieces:
        for one in _rows(piece, most):
            if bucket and one.elements > left:
                yield bucket
                bucket, left = [], most
            bucket.append(one)
            left -= one.elements
    if bucket:
        yield bucket


def _rows(piece: Piece, most: int) -> Iterator[Piece]:
    (start, count), *rest = piece.box
    step = max(1, most * count // piece.elements)
    for at in range(0, count, step):
        yield Piece(piece.name, ((start + at, min(step, count - at)), *rest))


# --- A group of one rank and one engine ---


def tcp_store(place: Address, master: bool) -> dist.TCPStore:
    limit = timedelta(seconds=TIMEOUT_S)
    return dist.TCPStore(*place, None, master, limit, wait_for_workers=False)


def open_store(place: Address, token: str) -> dist.PrefixStore:
    """Its keys begin with what only those know who have the attempt's token."""
    return dist.PrefixStore(hashlib.sha256(token.encode()).hexdigest(), tcp_store(place, False))


def pair(store: dist.Store, name: str, rank: int) -> dist.ProcessGroup:
    """Rank 0 sends, rank 1 is the engine. Raises RuntimeError when the other one does not come."""
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave out what a device is
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=slurm.own_address())]
    options._timeout, options._threads = timedelta(seconds=TIMEOUT_S), 1
    group: dist.ProcessGroup = gloo(dist.PrefixStore(name, store), rank, 2, options)
    return group


# --- The engine ---


def receive(model: Decoder, manifest: Mapping[str, Any], token: str) -> None:
    """Fill the model. Raises Gone before anything has changed; after any other error it is of no
    use."""
    table, dtype = from_json(manifest["table"]), dtype_of(manifest["dtype"])
    targets = parameter_names(model)
    found = {name: stored.shape for name, stored in table.items()}
    if found != {name: p.shape for name, p in targets.items()}:
        raise Gone("its tensors are not those of the model here")
    host, _, port = manifest["address"].rpartition(":")
    place, begun = (host, int(port)), threading.Event()
    try:
        socket.create_connection(place, PROBE_S).close()  # a store would try for long
        store = open_store(place, token)
    except (OSError, RuntimeError) as error:
        raise Gone(f"nobody offers it at {host}:{port} ({error})") from None

    def read_from(rank: int) -> None:
        pieces = parts_of(table, rank)
        if not pieces:
            return
        name = f"{rank}/{store.add(f'{rank}/asked', 1)}"
        store.set(f"{name}/comes", "1")
        group = pair(store, name, 1)
        buffer = torch.empty(BUCKET // dtype.itemsize, dtype=dtype)
        for bucket in buckets_of(pieces, dtype.itemsize):
            begun.set()
            group.recv([buffer[: sum(piece.elements for piece in bucket)]], 0, 0).wait()
            unpack(buffer, bucket, targets)
        group.send([torch.ones(1)], 0, 1).wait()  # all of it is here

    senders = range(manifest["senders"])
    try:
        with ThreadPoolExecutor(min(SENDERS, len(senders))) as pool:
            list(pool.map(read_from, senders))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if begun.is_set():
            raise OSError(f"the transfer has broken off ({reason})") from None
        raise Gone(f"its ranks do not answer ({reason})") from None


def unpack(flat: Tensor, bucket: Iterable[Piece], targets: Mapping[str, Tensor]) -> None:
    at = 0
    for piece in bucket:
        part = flat[at : at + piece.elements].view([length for _, length in piece.box])
        targets[piece.name].data[slices(piece.box)].copy_(part)
        at += piece.elements


# --- A rank of the trainer ---


class GroupPublisher:
    """Versions that engines read from the ranks' memory. The first version of an attempt and the
    last one of the run are files: engines start from the one, and the other one is still there when
    the trainer has ended."""

    def __init__(
        self,
        by_files: Callable[[int], None],
        model: Decoder,
        exchange: Exchange,
        dtype: torch.dtype,
        last: int,
    ) -> None:
        """`by_files`: publishes a version as files; `dtype`: of what is sent. All ranks of the
        trainer."""
        self._by_files, self._exchange, self._dtype = by_files, exchange, dtype
        self._ranks, self._last = Ranks(dist.new_group(backend="gloo")), last
        self._model, self._offer = model, Offer([], None)
        self._first = True

    def publish(self, version: int) -> None:
        """All ranks call it. Returns when the training may change the weights; one that is offered
        already stays."""
        if version == self._offer.version:
            return
        self._offer.withdraw()
        if self._first or version == self._last:
            self._first = False
            return self._by_files(version)
        began = time.monotonic()
        parameters = parameter_names(self._model)
        table = make_table(parameters, {}, self._ranks.size)
        token = _token(self._exchange)
        store: list[dist.TCPStore] = []

        def open_here() -> Address:
            store.append(tcp_store((slurm.own_address(), 0), True))
            return slurm.own_address(), store[0].port

        place = self._ranks.on_first(open_here)
        parts = pack(parameters, table, self._ranks.rank, self._dtype)
        self._offer = Offer(parts, version, self._ranks.rank, place, token, store)
        self._ranks.on_all(self._offer.start)
        facts = {
            "version": version,
            "transport": "group",
            "address": ":".join(map(str, place)),
            "senders": self._ranks.size,
            "bytes": sum(math.prod(stored.shape) for stored in table.values())
            * self._dtype.itemsize,
            "seconds": round(time.monotonic() - began, 3),
            "dtype": str(self._dtype).removeprefix("torch."),
            "table": to_json(table),
        }
        self._ranks.on_first(lambda: self._tell(version, facts))

    def _tell(self, version: int, facts: dict[str, Any]) -> None:
        folder, beside = self._exchange.version(version), self._exchange.root / "beside"
        folder.mkdir(parents=True, exist_ok=True)
        if beside.is_dir():  # an engine that starts needs more than the tensors
            shutil.copytree(beside, folder, dirs_exist_ok=True)
        self._exchange.publish(version, facts)


def _token(exchange: Exchange) -> str:
    try:
        return exchange.token.read_text().strip()
    except FileNotFoundError:
        return ""


def pack(
    parameters: Mapping[str, Tensor], table: Table, rank: int, dtype: torch.dtype
) -> list[Tensor]:
    """What this rank sends, a bucket each, on the host: a copy, so that the training can go on."""
    pieces, parts = parts_of(table, rank), []
    starts = {name: [start for start, _ in box] for name, box in pieces}
    for bucket in buckets_of(pieces, dtype.itemsize):
        flat = torch.empty(sum(piece.elements for piece in bucket), dtype=dtype)
        at = 0
        for name, box in bucket:
            here = [(a - first, n) for (a, n), first in zip(box, starts[name], strict=True)]
            source = local(parameters[name])[slices(tuple(here))]
            flat[at : at + source.numel()].view(source.shape).copy_(source)
            at += source.numel()
        parts.append(flat)
    return parts


class Offer:
    """What one rank sends of one version to whoever asks, until it is withdrawn."""

    def __init__(
        self,
        parts: list[Tensor],
        version: int | None,
        rank: int = 0,
        place: Address = ("", 0),
        token: str = "",
        store: Sequence[dist.Store] = (),
    ) -> None:
        """`store`: kept open by rank 0 as long as the offer stands."""
        self.version, self._parts, self._rank = version, parts, rank
        self._place, self._token, self._store = place, token, store
        self._sending, self._changed = 0, threading.Condition()

    def start(self) -> None:
        store = open_store(self._place, self._token)
        threading.Thread(target=self._listen, args=(store,), daemon=True).start()

    def withdraw(self) -> None:
        """Those who are reading may finish, as long as a bucket may take."""
        with self._changed:
            self.version = None
            self._changed.wait_for(lambda: self._sending == 0, TIMEOUT_S)
            self._parts, self._store = [], ()

    def _listen(self, store: dist.Store) -> None:
        number = 1
        while self.version is not None:
            name = f"{self._rank}/{number}"
            try:
                comes = store.check([f"{name}/comes"])  # wait() would fill the log with timeouts
            except RuntimeError:  # rank 0 has withdrawn it
                return
            if not comes:
                time.sleep(LOOK_S)
                continue
            number += 1
            with self._changed:
                if self.version is None:
                    return
                self._sending += 1
                work = threading.Thread(target=self._send, args=(name, self._parts), daemon=True)
            work.start()

    def _send(self, name: str, parts: list[Tensor]) -> None:
        version = self.version
        try:
            group = pair(open_store(self._place, self._token), name, 0)
            for part in parts:
                group.send([part], 1, 0).wait()
            group.recv([torch.empty(1)], 1, 1).wait()
        except RuntimeError as error:  # the engine says so, too, and is told again
            reason = str(error).splitlines()[0]
            print(f"weights: an engine has not taken version {version} ({reason})", flush=True)
        finally:
            with self._changed:
                self._sending -= 1
                self._changed.notify_all()
