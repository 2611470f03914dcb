"""Loading of the state of a run. Imported only if there is a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from kempner.checkpoint.format.plan import Table, local_part, make_table, own_box
from kempner.checkpoint.format.reader import Want
from kempner.checkpoint.state import StateProvider
from kempner.config.option import ConfigError


def read_targets(
    providers: Mapping[str, StateProvider], table: Table, stored_world: int, rank: int, world: int
) -> list[Want]:
    """List what this rank must read, with its targets. `stored_world`: number of ranks that
    wrote the checkpoint.

    Raises ConfigError if a provider wants a tensor that is not stored in this shape.
    """
    wants = []
    for prefix, provider in providers.items():
        start = f"{prefix}.*." if provider.per_rank else f"{prefix}."
        stored = {key.removeprefix(start): of for key, of in table.items() if key.startswith(start)}
        # The world has grown: this rank starts with its own random state.
        if provider.per_rank and rank >= stored_world:
            stored = {}
        destinations = provider.restore(stored)
        here = make_table(destinations, {}, world)
        for name, tensor in destinations.items():
            # The layout may differ: any mesh can read what another has written.
            shape, dtype = here[name][:2]
            if name not in stored or stored[name][:2] != (shape, dtype):
                raise ConfigError(
                    f"the checkpoint has no {start}{name} of shape {tuple(shape)} and {dtype}: it "
                    "was written by another version of this program, or with another model or "
                    "optimizer"
                )
            disk = f"{prefix}.{rank}.{name}" if provider.per_rank else f"{prefix}.{name}"
            wants.append(Want(start + name, disk, local_part(tensor), own_box(here[name], rank)))
    return wants
