"""Validation: the mean loss over the held-out tokens of each set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from kempner.data.batch import MicroBatch
from kempner.data.source import IGNORE
from kempner.preference.losses import Preference
from kempner.resilience.requests import StopRequests


@torch.no_grad()
def validate(
    model: nn.Module,
    sets: Mapping[str, Iterable[MicroBatch]],
    device: torch.device,
    stop: StopRequests,
    preference: Preference | None = None,
) -> dict[str, tuple[float, int]]:
    """For each set, by its name, the mean loss over the held-out tokens of all ranks, and how many
    they are; when a request to leave comes in between, of those until then."""
    found = {}
    for name, batches in sets.items():
        totals = torch.zeros(3, dtype=torch.float64)
        for batch in batches:
            batch = batch.to(device)
            if preference is None:
                loss = model(batch.inputs, batch.targets, batch.documents)
            else:
                loss, _, batch = preference(model, batch)
            leave = loss.new_tensor(stop.wants_to_leave())
            sums = torch.stack((loss, (batch.targets != IGNORE).sum(), leave)).double()
            dist.all_reduce(sums)
            totals += sums.cpu()
            if totals[2] > 0:
                break
        found[name] = ((totals[0] / totals[1]).item(), int(totals[1].item()))
        if totals[2] > 0:
            break
    return found
