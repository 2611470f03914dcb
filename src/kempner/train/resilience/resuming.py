"""Return to an earlier state of the run itself, or of another run that it forks. Loaded on use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kempner.checkpoint.fits import fact_differences
from kempner.checkpoint.fork import fork_generation, load_fork
from kempner.data.stages import step_of_sample
from kempner.train import lookup
from kempner.train.parts import open_mixture
from kempner.train.progress import Progress
from kempner.train.resilience.requests import GO_ON, Verdict
from kempner.train.sections import RunConfig

if TYPE_CHECKING:
    from kempner.checkpoint.checkpointer import Checkpointer
    from kempner.data.mixture import Mixture
    from kempner.model.decoder import Decoder
    from kempner.train.extensions import Loader
    from kempner.train.recording.run_directory import Run
    from kempner.train.replicas import Replicas


def begin_fork(
    cfg: RunConfig, run: Run, checkpointer: Checkpointer, replicas: Replicas
) -> Progress:
    """Load the checkpoint that run.fork names, and save it as the first one of this run. All
    replicas begin with it."""
    names = tuple(name for name in checkpointer.providers if name not in ("rng", "spikes"))
    names = names if cfg.run.fork_optimizer == "keep" else ("model",)
    path, manifest, table = load_fork(checkpointer, cfg.run.fork, names)
    if run.world.rank == 0:
        for each in lookup.used(cfg):
            each.forked(path, run)
    keeps_state = "optim" in names and any(name.startswith("optim.") for name in table)
    lineage = fork_generation(cfg.run.fork, manifest, "keep" if keeps_state else "fresh")
    progress, changed = fork_position(manifest, checkpointer.about)
    progress = replace(progress, lineage=lineage).plan(cfg)
    run.announce(
        f"a fork of {lineage[0]['from']}: the weights, "
        + ("the optimizer's state, " if keeps_state else "a fresh optimizer, ")
        + (f"its own {', '.join(changed)}: " if changed else "the same data: ")
        + f"from sample {progress.samples} on"
    )
    if run.world.replica:
        replicas.forget_errors()  # the first replica sends them
    checkpointer.save(0, progress.record())  # from here on the fork does not need the other run
    return progress


def fork_position(manifest: dict[str, Any], about: dict[str, Any]) -> tuple[Progress, list[str]]:
    """Return where a fork of the checkpoint begins, and which of its facts differ. `about`:
    of the fork."""
    # With the same samples in the same order the fork continues where the other run was.
    changed = list(fact_differences(manifest, about, ("model.*",)))
    if not manifest["fixed"].get("data", {}).get("mixture"):  # imported, or of an older version
        changed.append("data.sources")
    # Schedule and totals begin anew; the position in the data is kept if it means the same.
    progress = Progress() if changed else Progress.of(manifest)
    # Samples that the other run left out long ago do not count: the fork may go back, too.
    ahead = [samples for samples in progress.skip if samples[1] > progress.samples]
    return replace(progress, step=0, tokens=0, skip=ahead), changed


def go_back(
    progress: Progress,
    since: Progress,
    verdict: Verdict,
    checkpointer: Checkpointer,
    loader: Loader,
    run: Run,
) -> tuple[Progress, Verdict]:
    """Go back to the last checkpoint and leave out the samples of the bad steps from then on;
    returns the new progress and verdict. `since`: the progress after the first of these steps."""
    # The source of batches is ahead of this run: both go back together, in a new attempt.
    if loader.at_once:
        raise RuntimeError(verdict.reason)
    # Numbers arrive a step late: all batches up to the loader's position were drawn since.
    bad = [since.samples - run.cfg.train.stage(since.step - 1).batch, loader.position]
    manifest = checkpointer.load()
    if manifest is None:
        reason = f"{verdict.reason}; no checkpoint to go back to"
        return progress, Verdict(state="failed", reason=reason)
    progress = replace(Progress.of(manifest), skip=[bad]).plan(run.cfg)
    checkpointer.remember_skip(progress.skip)  # a restart also leaves them out
    # The samples left out move the starts of later phases: see Progress.plan().
    mixture = open_mixture(run.cfg, loader.sources, progress)
    loader.seek(progress.samples, progress.step, progress.skip, mixture)
    run.went_back(progress.step, bad, verdict.reason)
    return progress, GO_ON


def repeat_step(
    before: Progress, loader: Loader, model: Decoder, run: Run, verdict: Verdict
) -> Progress:
    """Go back to before a step in which tokens did not reach their experts, and let the next steps
    send rows without buffers; returns the progress. There was no update since: the count of such
    rows stays on the device until here, and makes every step bad (guard_update)."""
    steps = model.routings.repeat()
    loader.seek(before.samples, before.step, before.skip, None)
    run.announce(
        f"step {before.step + 1} is repeated: {verdict.reason} for experts had no place in the "
        f"buffers of experts.spare = {run.cfg.experts.spare:g}; no token is lost, and the next "
        f"{steps} steps do without buffers"
    )
    return before


def find_last_step(
    cfg: RunConfig, loader: Loader, progress: Progress, announce: Callable[[str], None]
) -> int:
    """Return the step after which the run ends: train.max_steps, unless the samples that it has
    left out since it went back are now missing at the end of the data. That is announced."""
    last = cfg.train.max_steps
    mixture: Mixture | None = getattr(loader, "mixture", None)  # None: an extension's batches
    if mixture is None or mixture.end is None:
        return last
    here, skip = progress.samples, progress.skip
    ahead = sum(max(0, min(end, mixture.end) - max(begin, here)) for begin, end in skip)
    # The step before the first one that has more samples than there are.
    more = mixture.end - here - ahead + 1
    most = step_of_sample(cfg.train.stages, progress.step, more) - 1
    if most >= last:
        return last
    announce(
        f"WARNING: the run ends after step {most}, not {last}: it leaves out "
        f"{sum(end - begin for begin, end in skip)} samples since it went back, and max_epochs "
        "allows no others; to train all steps, raise max_epochs or add a source"
    )
    return most
