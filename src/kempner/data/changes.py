"""Checks that a run continuing from a checkpoint has not changed its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kempner.data.mixture import Mixture
from kempner.data.opening import DataFacts, mixture_of


def data_changes(
    there: DataFacts, here: DataFacts, starts: Sequence[int], samples: int, same_length: bool = True
) -> list[str]:
    """List the reasons why a run with the facts `here` may not continue from a checkpoint with the
    facts `there` after `samples` samples, in which the phases begin at `starts`: samples already
    read must stay the same.

    Phases that have not begun and unused sources may change. Samples of another length are numbered
    differently: then only the tokens they are cut from are compared."""
    phase_count = sum(start < samples for start in starts)
    old = mixture_of({**there, "phases": there["phases"][:phase_count]}, starts[:phase_count])
    problems = [
        f"data.phases[{i}] has begun; "
        + (f"its start is {_start(now[0])} here, {_start(was)} there" if now else "it is missing")
        for i, was in enumerate(there["phases"][:phase_count])
        if not (now := here["phases"][i : i + 1]) or _start(now[0]) != _start(was)
    ]
    if problems:
        return problems
    new = mixture_of({**here, "phases": here["phases"][:phase_count]}, starts[:phase_count])
    here_by_name = {one["name"]: one for one in here["sources"]}
    own = {"path", "weight", "max_epochs"}  # may differ while the samples are the same
    # Another length cuts the same tokens into other samples, in another number.
    own |= set() if same_length else {"size", "seq_len"}
    for one in there["sources"]:
        now = here_by_name.get(one["name"], {})
        same = all(now.get(key) == value for key, value in one.items() if key not in own)
        if old.uses(one["name"], samples) and not same:
            what = f"{now['path']} holds other tokens than" if now else "is missing; it was"
            moved = "" if now else "; if it has moved, name it so in [[data.sources]]"
            problems.append(
                f"data source {one['name']}: {what} {one['path']}, on which it was trained{moved}"
            )
    # The weights may differ, as long as they yield the same order so far.
    if same_length and not problems and old.past(samples) != new.past(samples):
        problems.append(
            f"the mixture of the first {samples} samples is {_told(new, samples)} here, "
            f"{_told(old, samples)} there; past samples cannot change: append a [[data.phases]] "
            "to change the weights from now on"
        )
    elif same_length and not problems and _named(old, samples) != _named(new, samples):
        # Where two sources have the same claim to a sample, the first one gets it.
        were = [one["name"] for one in there["sources"]]
        problems.append(
            f"the sources are {', '.join(here_by_name)} here, {', '.join(were)} there: another "
            "order of sources is another order of samples; list them as there"
        )
    return problems


def _named(mixture: Mixture, samples: int) -> list[list[str]]:
    """Return the sources of each segment, in their order."""
    return [list(shares) for _, shares in mixture.past(samples)]


def _start(phase: Mapping[str, Any]) -> str:
    kind = "start_step" if phase["start_token"] is None else "start_token"
    return f"{kind} = {phase[kind]}"


def _told(mixture: Mixture, samples: int) -> str:
    return ", then ".join(
        " : ".join(f"{share:.3g} {name}" for name, share in shares.items())
        for _, shares in mixture.past(samples)
    )
