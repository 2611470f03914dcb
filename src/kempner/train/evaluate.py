"""Validation: the mean loss over the held-out tokens of each set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from kempner.data.batch import MicroBatch
from kempner.model.decoder import Decoder
from kempner.parallel.layout import Layout
from kempner.parallel.passes import at_once, forward_passes
from kempner.train.objective import Objective
from kempner.train.resilience.requests import (
    INTERRUPT_REQUEST,
    StopRequests,
    Verdict,
    leaving_verdict,
)
from kempner.train.step import StepSums, reduce_step


@torch.no_grad()
def validate(
    model: Decoder,
    objective: Objective,
    sets: Mapping[str, Iterable[MicroBatch]],
    layout: Layout,
    device: torch.device,
    stop: StopRequests,
    part: Callable[[str], AbstractContextManager[None]],
) -> dict[str, tuple[float, int]] | Verdict:
    """Return, by the name of the set, the mean loss over the held-out tokens of all ranks and their
    number. Returns the verdict instead if a request to leave arrives meanwhile: a mean over some of
    the tokens is not comparable with the others, and the next attempt measures the whole set.
    `part(name)`: the watchdog's part(), entered for each batch."""
    results = {}
    for name, batches in sets.items():
        totals = torch.zeros(2, dtype=torch.float64)
        rest = iter(batches)
        # All ranks have equally many batches (val_batches), so they meet in each reduce_step().
        while True:
            with part(name):
                if not (some := [*islice(rest, at_once(model))]):
                    break
                ours = StepSums((), device)
                forward_passes(model, partial(_loss, objective, ours), some, device)
                flags = dict(zip(("leave", "end"), stop.flags[INTERRUPT_REQUEST:], strict=True))
                sums = reduce_step({**layout.once(ours.numbers()), **flags}, layout)
                values = torch.stack([*sums.values()]).cpu()
            if (verdict := leaving_verdict(values[2:].tolist())).state:
                return verdict
            totals += values[:2]
        results[name] = ((totals[0] / totals[1]).item(), int(totals[1].item()))
    return results


def _loss(objective: Objective, sums: StepSums, model: nn.Module, batch: MicroBatch) -> Tensor:
    loss, terms, batch = objective(model, batch)
    sums.add(batch, loss, terms)
    return loss
