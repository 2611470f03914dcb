"""Offloading of activations to the host's memory until the backward pass.

A block's saved activations are copied to the host during computation, and freed on the device; in
the backward pass they are copied back, some blocks ahead. A bound limits the number of blocks whose
copies may be under way: that many blocks' activations stay on the device, and the computation waits
before it runs further ahead.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kempner.model.decoder import Decoder

SMALLEST_OFFLOAD = 1 << 16  # bytes: below this a copy costs more than the memory is worth


class OffloadedBlock:
    """Tensors that one block has saved in one forward pass."""

    def __init__(self, previous: OffloadedBlock | None) -> None:
        self.previous = previous
        self.kept: list[weakref.ref[Kept]] = []  # the autograd graph owns them
        self.copied: torch.Event | None = None  # to the host


class Kept:
    """The memory of one or several tensors that autograd saves, on the device or on the host."""

    def __init__(self, storage: torch.UntypedStorage, group: OffloadedBlock) -> None:
        self.size, self.device = storage.nbytes(), storage.device
        self.storage: torch.UntypedStorage | None = storage
        self.group = group
        self.host: Tensor | None = None
        self.fetched: torch.Event | None = None


class Offload:
    """Hooks on the blocks of a model. `in_flight`: blocks whose copies may be under way."""

    def __init__(self, model: Decoder, in_flight: int) -> None:
        self._in_flight = in_flight
        self._first = model.blocks[0]
        self._leaving: deque[OffloadedBlock] = deque()
        self._group: OffloadedBlock | None = None
        self._stream: torch.cuda.Stream | None = None
        self._stays: set[int] = set()
        self._here: dict[int, Kept] = {}  # of the block that runs now, by address
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        # Called, not used as decorators, which import the compiler, a second of every start.
        enter = torch._dynamo.disable(self._enter)  # type: ignore[no-untyped-call]
        leave = torch._dynamo.disable(self._leave)  # type: ignore[no-untyped-call]
        for block in model.blocks:
            # Inside fully_shard's hooks: the gathered weights exist, and are excluded below.
            block.register_forward_pre_hook(enter)
            block.register_forward_hook(leave, always_call=True)

    def _enter(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        if block is self._first:
            self._group = None
            self._leaving.clear()
            if self._stream is None and inputs[0].is_cuda:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._group = OffloadedBlock(self._group)
        # Not offloaded: weights, which stay or are freed by fully_shard, and inputs without
        # gradients, which serve all blocks.
        shared = [x for x in inputs if isinstance(x, Tensor) and not x.requires_grad]
        self._stays = {data_address(x) for x in (*weights_of(block), *block.buffers(), *shared)}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def _leave(self, *_: object) -> None:
        if self._hooks is None:
            return
        self._hooks.__exit__()
        self._hooks = None
        # Keyed by address: after this block the memory may be reused by another tensor.
        self._here.clear()
        group = self._group
        assert group is not None
        if self._stream is not None:
            # All copies of this block are enqueued by now.
            group.copied = self._stream.record_event()
        self._leaving.append(group)
        # Wait for the oldest copies here, which bounds the memory in flight.
        while len(self._leaving) > self._in_flight:
            self._free(self._leaving.popleft())

    def _free(self, group: OffloadedBlock) -> None:
        """Free the group's memory on the device once its copies have ended, so that later
        computation may reuse it."""
        if group.copied is not None:
            torch.cuda.current_stream().wait_event(group.copied)
        for ref in group.kept:
            if (entry := ref()) is not None:
                entry.storage = None

    def _pack(self, x: Tensor) -> Any:
        """Replace a tensor that autograd saves by its storage and its shape."""
        if type(x) is not Tensor or not x.is_floating_point():
            return x
        storage = x.untyped_storage()
        if storage.nbytes() < SMALLEST_OFFLOAD or storage.data_ptr() in self._stays:
            return x
        # Autograd saves several views of the same memory: copy it once.
        entry = self._here.get(storage.data_ptr())
        if entry is None:
            entry = self._here[storage.data_ptr()] = self._send(storage)
        return entry, x.dtype, x.storage_offset(), x.shape, x.stride()

    def _send(self, storage: torch.UntypedStorage) -> Kept:
        assert self._group is not None
        entry = Kept(storage, self._group)
        self._group.kept.append(weakref.ref(entry))
        entry.host = allocate_host_memory(entry.size, pin=self._stream is not None)
        if self._stream is None:
            entry.host.copy_(flat_bytes(storage))
        else:
            # The device may still be computing the tensor.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                entry.host.copy_(flat_bytes(storage), non_blocking=True)
        return entry

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        entry, dtype, *place = packed
        ahead: OffloadedBlock | None = entry.group
        # The backward pass needs this group now and the preceding ones next.
        for _ in range(1 + self._in_flight):
            if ahead is not None:
                self._fetch(ahead)
                ahead = ahead.previous
        if entry.fetched is not None:
            torch.cuda.current_stream().wait_event(entry.fetched)
        return torch.empty(0, dtype=dtype, device=entry.device).set_(entry.storage, *place)

    def _fetch(self, group: OffloadedBlock) -> None:
        """Start copying back tensors that are not on the device."""
        for ref in group.kept:
            if (entry := ref()) is None or entry.storage is not None:
                continue
            there = torch.empty(entry.size, dtype=torch.uint8, device=entry.device)
            assert entry.host is not None
            if self._stream is None:
                there.copy_(entry.host)
            else:
                # The memory belongs to the compute stream, which may still use it, and returns
                # there even if autograd drops this tensor unread: both streams must know.
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    there.copy_(entry.host, non_blocking=True)
                    entry.fetched = self._stream.record_event()
                there.record_stream(self._stream)
            entry.storage = there.untyped_storage()


def weights_of(block: nn.Module) -> Iterator[Tensor]:
    """Yield the weights that a block computes with, which may differ from its parameters."""
    for module in block.modules():
        for name, _ in module.named_parameters(recurse=False):
            yield getattr(module, name)


def data_address(x: Tensor) -> int:
    return (x.to_local() if isinstance(x, DTensor) else x).untyped_storage().data_ptr()


def allocate_host_memory(size: int, pin: bool) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=pin)


def flat_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
