"""Transfer of the weights directly from the trainer's ranks to an engine.

Each rank copies the part that it would write to a checkpoint into host memory, and offers it in the
background while the training goes on. An engine reads the parts of all ranks, each over a separate
connection: a process that dies breaks only its own connections. No rank ever holds more than its
part, and an engine only its model and a few buckets.

Sockets, not a process group: torch's gloo kills the process if the other side dies while the two
connect, and a broken NCCL communicator can; a trainer must outlive its engines.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kempner.checkpoint.format.plan import (
    Box,
    Table,
    box_slices,
    chunks_of,
    dtype_of,
    local_part,
    make_table,
    to_json,
)
from kempner.checkpoint.format.reader import from_json
from kempner.checkpoint.ranks import Ranks
from kempner.extensions.rl.exchange import RolloutExchange
from kempner.jobs import this_job
from kempner.jobs.ranks import peers
from kempner.jobs.ranks.port_range import listen_in_range
from kempner.jobs.system.files import write_atomic
from kempner.model.decoder import Decoder
from kempner.parallel.build import parameter_names

BUCKET = 1 << 24  # bytes sent at once
TIMEOUT_S = 20.0  # in which the other side must send or accept data
SENDERS = 4  # ranks that one engine reads from at a time
MOST_ASKED = 4096  # bytes of an engine's request


class Gone(Exception):
    """The version cannot be had; the model is unchanged."""


class Withdrawn(Gone, OSError):
    """The ranks do not, or no longer, offer the version."""


# --- The order of data on the wire, which both sides compute ---


class TransferPiece(NamedTuple):
    name: str
    box: Box

    @property
    def elements(self) -> int:
        return math.prod(length for _, length in self.box)


def pieces_of_rank(table: Table, rank: int) -> list[TransferPiece]:
    """List the pieces that a rank sends: those that it would write, except that only one rank sends
    the small tensors that each rank has."""
    chunks = (TransferPiece(*chunk) for chunk in chunks_of(table, rank))
    first = {name for name, spec in table.items() if spec.everywhere and rank > 0}
    return [piece for piece in chunks if piece.elements and piece.name not in first]


def buckets_of(pieces: Iterable[TransferPiece], itemsize: int) -> Iterator[list[TransferPiece]]:
    """Yield the pieces in order, in buckets of at most BUCKET bytes; a larger piece is cut."""
    bucket: list[TransferPiece] = []
    room = most = BUCKET // itemsize
    for piece in pieces:
        for one in _cut(piece, most):
            if bucket and one.elements > room:
                yield bucket
                bucket, room = [], most
            bucket.append(one)
            room -= one.elements
    if bucket:
        yield bucket


def _cut(piece: TransferPiece, most: int) -> Iterator[TransferPiece]:
    if piece.elements <= most:
        yield piece
        return
    # Even a single row may be too large: in a tensor of experts it is a whole matrix.
    box = piece.box
    at = next(dim for dim, (_, length) in enumerate(box) if length > 1)
    (start, count), step = box[at], max(1, most * box[at][1] // piece.elements)
    for first in range(0, count, step):
        part = (start + first, min(step, count - first))
        yield from _cut(piece._replace(box=(*box[:at], part, *box[at + 1 :])), most)


# --- A connection of one rank and one engine ---

YES = b"1"


def send_part(link: socket.socket, part: Tensor) -> None:
    link.sendall(part.view(torch.uint8).numpy().data)


def receive_into(link: socket.socket, part: Tensor) -> None:
    rest = part.view(torch.uint8).numpy().data
    while rest:
        rest = rest[_some(link.recv_into(rest)) :]


def _some(count: int) -> int:
    if not count:
        raise ConnectionResetError("the other side has closed the connection")
    return count


# --- The engine ---


def receive_weights(model: Decoder, manifest: Mapping[str, Any], token: str) -> None:
    """Fill the model. Raises Gone before anything has changed, Withdrawn if the ranks do not offer
    this version; after any other error the model is unusable."""
    table, dtype = from_json(manifest["table"]), dtype_of(manifest["dtype"])
    targets = parameter_names(model)
    shapes = {name: spec.shape for name, spec in table.items()}
    if shapes != {name: p.shape for name, p in targets.items()}:
        raise Gone("its tensors are not those of the model here")
    has_begun = threading.Event()
    request = json.dumps({"version": manifest["version"]}).encode()

    def read_from(rank: int) -> None:
        pieces = pieces_of_rank(table, rank)
        host, _, port = manifest["senders"][rank].rpartition(":")
        with peers.connect_peer(host, int(port), token, TIMEOUT_S) as link:
            link.sendall(request + b"\n")
            if link.recv(1) != YES:
                raise Withdrawn("it is not offered")
            buffer = torch.empty(BUCKET // dtype.itemsize, dtype=dtype)
            for bucket in buckets_of(pieces, dtype.itemsize):
                has_begun.set()
                receive_into(link, buffer[: sum(piece.elements for piece in bucket)])
                unpack_bucket(buffer, bucket, targets)
            link.sendall(YES)  # all of it has arrived

    senders = range(len(manifest["senders"]))
    try:
        with ThreadPoolExecutor(min(SENDERS, len(senders))) as pool:
            # list(): map() raises an error only when its result is consumed.
            list(pool.map(read_from, senders))
    except OSError as error:
        # Some weights may be overwritten: the model is neither the old nor the new one.
        if has_begun.is_set():
            raise OSError(f"the transfer has broken off ({error})") from None
        if isinstance(error, Withdrawn):
            raise
        raise Gone(str(error)) from None


def unpack_bucket(
    flat: Tensor, bucket: Iterable[TransferPiece], targets: Mapping[str, Tensor]
) -> None:
    at = 0
    for piece in bucket:
        part = flat[at : at + piece.elements].view([length for _, length in piece.box])
        targets[piece.name].data[box_slices(piece.box)].copy_(part)
        at += piece.elements


# --- A rank of the trainer ---


class DirectPublisher:
    """A publisher whose versions engines read from the ranks' memory. The first version of an
    attempt and the last one of the run are files: engines start from the first, and the last
    remains when the trainer has ended."""

    def __init__(
        self,
        by_files: Callable[[int], None],
        model: Decoder,
        exchange: RolloutExchange,
        dtype: torch.dtype,
        last: int,
    ) -> None:
        """`by_files`: publishes a version as files; `dtype`: of the data sent. All ranks of the
        trainer must make one."""
        self._by_files, self._exchange, self._dtype = by_files, exchange, dtype
        self._ranks, self._last = Ranks(dist.new_group(backend="gloo")), last
        self._model, self._first = model, True
        token = self._ranks.on_first(lambda: _token(exchange))
        self._offer = Offer(token)
        self._senders: list[Any] = [""] * self._ranks.size
        dist.all_gather_object(self._senders, self._offer.address, self._ranks.group)

    def publish(self, version: int) -> None:
        """Offer a version. All ranks must call it. Returns when the training may change the
        weights. Raises OSError on a full disk: the next call offers the version again."""
        # Before making the next copy, because the host needs room for only one version.
        self._offer.withdraw()
        if self._first or version == self._last:
            self._by_files(version)
            self._first = False
            return
        began = time.monotonic()
        parameters = parameter_names(self._model)
        table = make_table(parameters, {}, self._ranks.size)
        parts = pack_buckets(parameters, table, self._ranks.rank, self._dtype)
        # An engine that has read the manifest asks every rank: all must offer before it is written.
        self._ranks.on_all(lambda: self._offer.make(version, parts))
        count = sum(math.prod(spec.shape) for spec in table.values())
        facts = {
            "version": version,
            "transport": "direct",
            "senders": self._senders,
            "bytes": count * self._dtype.itemsize,
            "seconds": round(time.monotonic() - began, 3),
            "dtype": str(self._dtype).removeprefix("torch."),
            "table": to_json(table),
        }
        self._ranks.on_first(lambda: self._tell(version, facts))

    def _tell(self, version: int, facts: dict[str, Any]) -> None:
        folder, beside = self._exchange.version(version), self._exchange.root / "beside"
        folder.mkdir(parents=True, exist_ok=True)
        if beside.is_dir():  # a starting engine needs more than the tensors
            # Not copytree(), whose error has no errno to identify a full disk.
            for path in beside.iterdir():
                shutil.copyfile(path, folder / path.name)
        self._exchange.publish(version, facts)


def _token(exchange: RolloutExchange) -> str:
    """Return the token of the attempt; makes one if rl.sh has not."""
    if not (exchange.token.exists() and exchange.token.read_text().strip()):
        exchange.root.mkdir(parents=True, exist_ok=True)
        write_atomic(exchange.token, peers.new_key() + "\n", 0o600)
    return exchange.token.read_text().strip()


def pack_buckets(
    parameters: Mapping[str, Tensor], table: Table, rank: int, dtype: torch.dtype
) -> list[Tensor]:
    """Copy this rank's pieces to the host, bucket by bucket, so that the training can go on."""
    pieces, parts = pieces_of_rank(table, rank), []
    starts = {name: [start for start, _ in box] for name, box in pieces}
    for bucket in buckets_of(pieces, dtype.itemsize):
        flat = torch.empty(sum(piece.elements for piece in bucket), dtype=dtype)
        at = 0
        for name, box in bucket:
            here = [(a - first, n) for (a, n), first in zip(box, starts[name], strict=True)]
            source = local_part(parameters[name])[box_slices(tuple(here))]
            flat[at : at + source.numel()].view(source.shape).copy_(source)
            at += source.numel()
        parts.append(flat)
    return parts


class Offer:
    """One rank's part of one version, sent to every client until it is withdrawn."""

    def __init__(self, token: str) -> None:
        self._entrance = peers.Entrance(listen_in_range(), token)
        self.address = f"{this_job.fast_address() or this_job.own_address()}:{self._entrance.port}"
        self.version: int | None = None
        self._parts = list[Tensor]()
        self._sending, self._changed = 0, threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def make(self, version: int, parts: list[Tensor]) -> None:
        with self._changed:
            self.version, self._parts = version, parts

    def withdraw(self) -> None:
        """Withdraw the version. Clients that are reading may finish, within the time limit
        of a bucket."""
        with self._changed:
            self.version = None
            self._changed.wait_for(lambda: self._sending == 0, TIMEOUT_S)
            # A client that is still reading has its own reference.
            self._parts = []

    def _listen(self) -> None:
        arrivals = select.poll()
        arrivals.register(self._entrance, select.POLLIN)
        while True:
            arrivals.poll()
            for link in self._entrance.take():
                # A stalled client would keep the memory of a withdrawn version.
                link.settimeout(TIMEOUT_S)
                threading.Thread(target=self._answer, args=(link,), daemon=True).start()

    def _answer(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            request = json.loads(link.makefile("rb").readline(MOST_ASKED))
            with self._changed:
                if self.version is None or request["version"] != self.version:
                    return
                self._sending += 1
                parts = self._parts
            try:
                self._send(link, request["version"], parts)
            finally:
                with self._changed:
                    self._sending -= 1
                    self._changed.notify_all()

    def _send(self, link: socket.socket, version: int, parts: list[Tensor]) -> None:
        try:
            link.sendall(YES)
            for part in parts:
                send_part(link, part)
            # sendall() returns when the kernel has the bytes, not when the engine has them.
            _some(len(link.recv(1)))
        except OSError as error:  # the engine reports it, too, and is told again
            print(f"weights: an engine has not taken version {version} ({error})", flush=True)
