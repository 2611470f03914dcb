"""The outer optimizer: combines the weights that the replicas have trained separately.

DiLoCo (arXiv:2311.08105): every replica starts a round at the same anchor and takes H steps on its
own. d = anchor - weights; its mean over the replicas is the gradient for a step of SGD with
Nesterov momentum on the anchor, from which the replicas continue. Streaming DiLoCo
(arXiv:2501.18512) does this for one fragment of the layers after another, each once in H steps;
data that are sent arrive tau steps later, while the replicas train on, and a replica keeps alpha of
its own weights.

Everything here works on this rank's part of each parameter, so anchors and momentum are sharded as
FSDP shards the parameters, and rank i of a replica exchanges with rank i of the others only. If a
replica has copies of the weights (HSDP), each copy sends some rows, and gets the others from its
peers over the fast network. How replicas communicate is up to ReplicaExchange.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kempner.checkpoint.format.plan import StoredTensor, local_part
from kempner.extensions.lowcomm.compress import Raw, codec_of, is_raw
from kempner.extensions.lowcomm.config import LowcommConfig
from kempner.extensions.lowcomm.copies import Copies, copies_of, pieces_of, rows_of
from kempner.optim.optimizer import as_part_of

Decode = Callable[[Tensor], Tensor]


class Handle(Protocol):
    """An exchange in flight."""

    def wait(self) -> Tensor:
        """Return the mean over the replicas that contributed, fp32 [n], bit-identical on
        all of them."""


class ReplicaExchange(Protocol):
    """Communication of this rank with the same rank of other replicas."""

    sent: int
    """Bytes so far, without network headers."""

    def start(self, ours: Tensor, name: str, decode: Decode | None = None) -> Handle:
        """Send, and return at once. All replicas start the same names in the same order; a name is
        used once, and tells a late replica which exchange it has missed. From now on the exchange
        owns `ours`, and may send it again if a replica is lost.

        Without `decode`, `ours` is fp32 [n], and may be summed on the way. With it, `ours` is uint8
        [b]: the bytes of all contributors are gathered; decode() turns each into fp32 [n], which
        are summed in the order of the replicas.
        """
        ...


class Alone:
    """The exchange of a single replica."""

    sent = 0

    def start(self, ours: Tensor, name: str, decode: Decode | None = None) -> Handle:
        return Arrived(ours if decode is None else decode(ours))


class Arrived:
    def __init__(self, mean: Tensor) -> None:
        self._mean = mean

    def wait(self) -> Tensor:
        return self._mean


class Fragment:
    """Parameters that are averaged together, with their anchors and momenta. Lists are parallel;
    all tensors are this rank's part, fp32."""

    def __init__(
        self, parameters: Mapping[str, Tensor], cfg: LowcommConfig, copies: Copies | None = None
    ) -> None:
        self.cfg, self.names, self.parameters = cfg, list(parameters), list(parameters.values())
        self.anchors = [self._copy(p) for p in self.parameters]
        self.momenta = [torch.zeros_like(x) for x in self.anchors] if cfg.momentum else []
        codec, raw = codec_of(cfg), Raw()
        self._codecs = [raw if is_raw(n, p.ndim, cfg) else codec for n, p in parameters.items()]
        self.errors = {  # of the compression, by the parameter's index in the lists
            # Contiguous even if the anchor is not, so that contiguous() in send() does not copy.
            i: torch.zeros(anchor.shape, device=anchor.device)
            for i, anchor in enumerate(self.anchors)
            if cfg.feedback and self._codecs[i] is not raw
        }
        self._copies = copies or copies_of(self.parameters[0])
        count = self._copies.count
        self._pieces = [pieces_of(self.anchors, copy, count) for copy in range(count)]
        self._own = self._pieces[self._copies.index]
        self._sizes = [self._codecs[piece.i].size(*piece.shape) for piece in self._own]
        self.handle: Handle | None = None  # of the exchange in flight
        self.spoilt = torch.zeros((), dtype=torch.bool, device=self.anchors[0].device)

    @staticmethod
    def _copy(p: Tensor) -> Tensor:
        return local_part(p.detach()).to(torch.float32, copy=True)

    def begin(self) -> None:
        """Set the anchors to the weights: at a start, and after loading a checkpoint."""
        for anchor, p in zip(self.anchors, self.parameters, strict=True):
            anchor.copy_(local_part(p.detach()))
        self.handle = None

    def send(self, exchange: ReplicaExchange, name: str) -> None:
        """Start to exchange the changes of the weights. A non-finite number counts as unchanged,
        since one replica would spoil the weights of all; `spoilt` records it."""
        changes = []
        for i, (anchor, p) in enumerate(zip(self.anchors, self.parameters, strict=True)):
            d = anchor - local_part(p.detach())
            finite = torch.isfinite(d)
            self.spoilt |= ~finite.all()
            # Not a product with the mask: infinity times 0 is NaN.
            d = torch.where(finite, d, 0.0)
            if i in self.errors:
                # In place: the encoding below leaves its error in this tensor.
                d = self.errors[i].mul_(self.cfg.feedback).add_(d)
            changes.append(d.contiguous())
        if self.cfg.compress == "none":
            ours = torch.cat([rows_of(changes, piece).flatten() for piece in self._own])
            self.handle = exchange.start(ours, name)
            return
        codes = []
        for pieces in self._pieces:
            own = pieces is self._own
            for piece in pieces:
                feedback = piece.i in self.errors
                # Rows of other copies are encoded only to keep their errors here, too.
                if not own and not feedback:
                    continue
                codec, d = self._codecs[piece.i], rows_of(changes, piece)
                code = codec.encode(d)
                if own:
                    codes.append(code)
                if feedback:  # all copies have the same errors; `changes` holds these tensors
                    d.sub_(codec.decode(code, *piece.shape))
        self.handle = exchange.start(torch.cat(codes), name, self._decode)

    def _decode(self, data: Tensor) -> Tensor:
        parts = zip(self._own, torch.split(data, self._sizes), strict=True)
        return torch.cat(
            [self._codecs[piece.i].decode(code, *piece.shape).flatten() for piece, code in parts]
        )

    def _whole(self, mean: Tensor) -> list[Tensor]:
        """Assemble each parameter's mean from the means of the pieces that the copies sent."""
        counts = [[math.prod(piece.shape) for piece in pieces] for pieces in self._pieces]
        parts = self._copies.gather(mean, [sum(each) for each in counts])
        if len(parts) == 1:
            split = zip(self.anchors, torch.split(mean, counts[0]), strict=True)
            return [part.view_as(anchor) for anchor, part in split]
        tensors = [mean.new_empty(anchor.shape) for anchor in self.anchors]
        for pieces, part, each in zip(self._pieces, parts, counts, strict=True):
            for piece, numbers in zip(pieces, torch.split(part, each), strict=True):
                rows_of(tensors, piece).copy_(numbers.view(piece.shape))
        return tensors

    def receive(self) -> None:
        """Wait for the mean, move the anchors, and let the weights follow.

        u = mu u + d; anchor -= lr (d + mu u): the learning rate is outside the momentum, so that it
        may change from round to round.
        """
        assert self.handle is not None, "nothing was sent"
        mean, self.handle = self.handle.wait(), None
        lr, mu, alpha = self.cfg.lr, self.cfg.momentum, self.cfg.alpha
        for i, d in enumerate(self._whole(mean)):
            anchor, weights = self.anchors[i], local_part(self.parameters[i].detach())
            if mu:
                u = self.momenta[i].mul_(mu).add_(d)
                d = d + mu * u
            anchor.sub_(d, alpha=lr)
            if alpha:
                mixed = anchor + alpha * (weights - anchor)
                # Non-finite weights are replaced by the anchor: here the replica recovers.
                weights.copy_(torch.where(torch.isfinite(mixed), mixed, anchor))
            else:
                weights.copy_(anchor)


class OuterOptimizer:
    """The fragments of a model, and the steps at which each leaves and arrives."""

    def __init__(
        self, cfg: LowcommConfig, parameters: Mapping[str, Tensor], exchange: ReplicaExchange
    ) -> None:
        """`parameters`: those that train, by name."""
        self.cfg, self.exchange = cfg, exchange
        parts: list[dict[str, Tensor]] = [{} for _ in range(cfg.fragments)]
        for name, p in parameters.items():
            parts[fragment_of(name, cfg.fragments)][name] = p
        self.fragments = [Fragment(part, cfg) for part in parts]
        self.turn_steps = cfg.interval // cfg.fragments

    @property
    def apart(self) -> bool:
        """True if a replica's weights differ from the anchors even at the end of a round."""
        return self.cfg.fragments > 1 or self.cfg.alpha > 0

    def begin(self) -> None:
        for fragment in self.fragments:
            fragment.begin()

    def take_spoilt(self) -> Tensor:
        """Return whether this rank has had non-finite numbers since the last call, bool []."""
        found = torch.stack([fragment.spoilt for fragment in self.fragments]).any()
        for fragment in self.fragments:
            fragment.spoilt.zero_()
        return found

    def published(self) -> dict[Tensor, Callable[[], Tensor]]:
        """Map each parameter to a function that returns its anchor, which is evaluated, saved
        and continued from."""
        return {
            p: partial(as_part_of, p, anchor)
            for fragment in self.fragments
            for p, anchor in zip(fragment.parameters, fragment.anchors, strict=True)
        }

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Send and receive the fragments due after `step` steps: turn t handles fragment t mod P;
        it ends with step (t + 1) H / P, and its exchange starts tau steps earlier. At the end of a
        round nothing is in flight."""
        turn, rest = divmod(step + self.cfg.tau, self.turn_steps)
        # Send first: with tau = 0, a fragment leaves and arrives in the same call.
        if rest == 0 and turn:
            fragment = self.fragments[(turn - 1) % len(self.fragments)]
            fragment.send(self.exchange, f"turn {turn - 1}")
        turn, rest = divmod(step, self.turn_steps)
        if rest == 0:
            fragment = self.fragments[(turn - 1) % len(self.fragments)]
            # The run resumed in the last tau steps of the turn, after the time to send.
            if fragment.handle is None:
                fragment.send(self.exchange, f"turn {turn - 1}")
            fragment.receive()


def fragment_of(name: str, fragments: int) -> int:
    """Return a parameter's fragment: every P-th block; the embedding goes with the first, the final
    norm and the output with the last."""
    if found := re.match(r"blocks\.(\d+)\.", name):
        return int(found[1]) % fragments
    return 0 if "embed" in name else fragments - 1


class OuterState:
    """The outer state in checkpoints: momentum, equal on all replicas, and this replica's
    compression errors. The anchors are the weights that the model's own provider saves."""

    per_rank = False

    def __init__(self, outer: OuterOptimizer) -> None:
        self.outer = outer
        self.loaded = False

    def tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for fragment in self.outer.fragments:
            for i, name in enumerate(fragment.names):
                for key, values in (("momentum", dict(enumerate(fragment.momenta))),
                                    ("error", fragment.errors)):  # fmt: skip
                    if i in values:
                        tensors[f"{name}.{key}"] = as_part_of(fragment.parameters[i], values[i])
        return tensors

    def restore(self, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        """Return the stored tensors; others start at 0, because the checkpoint may come from a run
        without replicas or with another outer optimizer."""
        return {name: tensor for name, tensor in self.tensors().items() if name in stored}

    def restored(self) -> None:
        """Set the anchors. Runs after the model's provider, which loads them, and before the
        optimizer's, which may replace the weights."""
        self.loaded = True
        self.outer.begin()
