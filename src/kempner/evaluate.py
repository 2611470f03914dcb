"""Validation: the mean loss over the held-out tokens of each set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from kempner.data.batch import MicroBatch
from kempner.data.source import IGNORE
from kempner.objective import Objective
from kempner.parallel.layout import Layout
from kempner.resilience.requests import StopRequests
from kempner.step import reduce_step


@torch.no_grad()
def validate(
    model: nn.Module,
    objective: Objective,
    sets: Mapping[str, Iterable[MicroBatch]],
    layout: Layout,
    device: torch.device,
    stop: StopRequests,
) -> dict[str, tuple[float, int]]:
    """For each set, by its name, the mean loss over the held-out tokens of all ranks, and how many
    they are; when a request to leave comes in between, of those until then."""
    found = {}
    for name, batches in sets.items():
        totals = torch.zeros(3, dtype=torch.float64)
        for batch in batches:
            loss, _, batch = objective(model, batch.to(device))
            ours = layout.once({"loss": loss, "tokens": (batch.targets != IGNORE).sum()})
            sums = reduce_step({**ours, "leave": stop.wants_to_leave()}, layout)
            totals += torch.stack([*sums.values()]).cpu()
            if totals[2] > 0:
                break
        found[name] = ((totals[0] / totals[1]).item(), int(totals[1].item()))
        if totals[2] > 0:
            break
    return found
