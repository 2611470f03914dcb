"""The parts used by the loop of scripts/train.py, opened from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from kempner.checkpoint.checkpointer import Checkpointer
from kempner.data.batch import MicroBatch
from kempner.jobs.ranks import hosts, own_device, placement, process_group, startup
from kempner.jobs.ranks.placement import World
from kempner.jobs.this_job import time_to_leave
from kempner.model.decoder import Decoder
from kempner.optim.build import published_weights
from kempner.optim.config import learning_rate
from kempner.optim.freezing import Freezer
from kempner.optim.optimizer import Optimizer
from kempner.parallel.build import build_model
from kempner.parallel.layout import Layout
from kempner.train import lookup
from kempner.train.objective import Objective
from kempner.train.parts import (
    expect_batches,
    open_held_out_batches,
    open_layout,
    open_loader,
    open_objective,
    open_replicas,
)
from kempner.train.progress import Progress
from kempner.train.recording.contents import checkpoint_contents
from kempner.train.recording.metrics import Clock
from kempner.train.recording.recorder import Recorder, has_validation
from kempner.train.recording.run_directory import Run
from kempner.train.recording.saves import Saves
from kempner.train.replicas import Replicas
from kempner.train.resilience import requests
from kempner.train.resilience.nonfinite import NonFinite
from kempner.train.resilience.requests import GO_ON, StopRequests, Verdict
from kempner.train.resilience.watchdog import Watchdog, start_watchdog
from kempner.train.sections import RunConfig
from kempner.train.step import PendingStep, StepResult, reduce_step

if TYPE_CHECKING:
    from kempner.train.extensions import Loader
    from kempner.train.integrity.replay import Replay
    from kempner.train.resilience.straggler import BlockClock, Stragglers


def join_ranks(cfg: RunConfig) -> tuple[RunConfig, World, torch.device]:
    """Meet the other ranks; returns the configuration of this rank's replica. Raises
    ConfigError, BadPortRange, NoFreePort."""
    world = placement.discover_world()
    device = own_device.pick_device(cfg.distributed.device, world.local_rank)
    if device.type == "cuda":
        from kempner.jobs.gpu import affinity

        affinity.bind_to_socket(device, world)
    if cfg.train.compile:
        from kempner.jobs.system import compiler

        compiler.require_compiler(device.type)
    used = lookup.used(cfg)
    counts = [each.replicas_in_step(cfg, world.size, world.per_node) for each in used]
    run_dir = lookup.of_replica(cfg, world.replica).run.dir
    limit = cfg.distributed.start_timeout
    world = process_group.start_process_group(world, device, run_dir, limit, max(counts, default=1))
    return lookup.of_replica(cfg, world.replica), world, device


@dataclass
class Training:
    """A run that is ready to step. `progress`: where it is."""

    cfg: RunConfig
    run: Run
    device: torch.device
    stop: StopRequests
    watchdog: Watchdog
    layout: Layout
    model: Decoder
    optimizer: Optimizer
    replicas: Replicas
    checkpointer: Checkpointer
    saves: Saves
    progress: Progress
    judged: Progress  # after the last step that judge() has seen
    last_step: int  # see resuming.find_last_step()
    loader: Loader
    val_batches: Callable[[], dict[str, Iterator[MicroBatch]]]
    objective: Objective
    recorder: Recorder
    clock: Clock
    nonfinite: NonFinite
    freezer: Freezer
    stragglers: tuple[BlockClock, Stragglers] | None  # of several ranks
    replay: Replay | None  # forward_backward(), which computes some steps twice

    def learning_rate(self) -> float:
        """Return the rate of the next update: the schedule's, times the factor of
        the data's phase."""
        cfg = self.cfg
        rate = learning_rate(
            cfg.schedule, cfg.optimizer.lr, self.progress.step, cfg.train.max_steps
        )
        return cfg.data.lr_scales[self.loader.phase] * rate

    def phase(self) -> int:
        """Return a number that grows when the level of the losses may change: with the data's
        phase, and with what is frozen."""
        return self.loader.phase + self.freezer.phase(self.progress.step)

    def own_work(self) -> dict[str, float]:
        """Return the seconds of this rank's own work in a step, as terms of its sum. Waits that all
        ranks share do not count."""
        if self.stragglers is None:
            return {}
        work, stragglers = self.stragglers
        waited = 0.0 if self.loader.waits_for_all else self.clock.last["data"]
        return stragglers.contribution(work.take(), waited)

    def judge(self, result: StepResult) -> Verdict | None:
        """Record a step; returns its consequence, if any."""
        # Not recorded: the step is repeated and gets its line then.
        if rows := result.values.get("rows_over"):
            return Verdict(go_back=True, repeat=True, reason=f"{rows:.0f} rows")
        self.judged = result.after
        self.recorder.step(result)
        if self.stragglers is not None:
            self.stragglers[1].update(result.step, result.values)
        if (asked := result.values[requests.ASKS_REPLAY]) > 0:
            if self.replay is None:
                self.run.announce("REPLAY file: no effect without resilience.replay_every")
            else:
                self.replay.ask(int(asked) - 2)
        if self.replay is not None and self.replay.verdict is not None:
            return self.replay.verdict
        return self.nonfinite.judge(result, self.replicas.may_go_back(self.progress))

    def go_back(
        self, verdict: Verdict, result: StepResult, unread: Sequence[PendingStep]
    ) -> Verdict:
        """Return to the last checkpoint, without the samples of the bad steps; returns the next
        verdict. `result`: of the step with this verdict; `unread`: the steps after it. The
        requests in them are made again."""
        from kempner.train.resilience.resuming import go_back, repeat_step

        if self.run.world.rank == 0:
            # Those to profile or replay were seen, unless the step was not judged.
            self.stop.ask_again(result.values, only_save=not verdict.repeat)
            for late in unread:
                self.stop.ask_again(late.read().values)
        with self.watchdog.patient():
            if verdict.repeat:
                self.progress = repeat_step(self.judged, self.loader, self.model, self.run, verdict)
                self.run.step = self.progress.step
                return GO_ON
            self.progress, verdict = go_back(
                self.progress,
                self.nonfinite.since,
                verdict,
                self.checkpointer,
                self.loader,
                self.run,
            )
        self.judged = self.progress
        self.run.step = self.progress.step
        if not verdict.state:
            self.last_step = _last_step(self.cfg, self.run, self.loader, self.progress)
        if self.replay is not None:
            self.replay.begin(self.progress.step, is_loaded=True)
        self.recorder.begin(self.progress)
        return verdict

    def save(self) -> None:
        if self.replay is not None:
            self.replay.before_save()
        self.saves.save(self.progress)

    def validate(self) -> Verdict:
        """Measure the loss on the held-out data with the weights that a user would get; returns the
        verdict if a request to leave ended it."""
        from kempner.train.evaluate import validate

        weights = published_weights(self.model, self.optimizer)
        with self.clock.part("eval"), self.watchdog.patient(), weights:
            sets = validate(
                self.model,
                self.objective,
                self.val_batches(),
                self.layout,
                self.device,
                self.stop,
                self.watchdog.part,
            )
            if isinstance(sets, Verdict):
                # A replica of [lowcomm] leaves with its round.
                return sets if self.replicas.patience == 1.0 else GO_ON
            if sets:
                self.recorder.validation(self.progress.step, sets)
        return requests.GO_ON

    def is_validation_due(self) -> bool:
        """Return whether the last step is to be validated."""
        interval, step = self.cfg.eval.interval, self.progress.step
        return bool(interval) and (step == self.last_step or step % interval == 0)

    def has_missed_validation(self) -> bool:
        """Return whether an earlier attempt ended before it could validate the step that the run
        continues from. All ranks must call it."""
        if not self.progress.step or not self.is_validation_due():
            return False
        # Rank 0 looks into the file, so that all ranks validate or none does.
        missing = not self.run.world.rank and not has_validation(self.run.dir, self.progress.step)
        flag = {"missing": torch.tensor(float(missing), device=self.device)}
        return bool(reduce_step(flag, self.layout)["missing"] > 0)

    def end(self, verdict: Verdict) -> Verdict:
        """Make the last step durable; returns how the run ends."""
        with self.watchdog.patient():
            seconds = partial(self.stop.seconds_left, self.run.world.rank)
            verdict = requests.final_verdict(verdict, self.progress, self.checkpointer, seconds)
        self.loader.close()  # after the save: its thread may be reading
        self.watchdog.stop()
        return verdict


def open_checkpointer(
    cfg: RunConfig,
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    replicas: Replicas,
) -> Checkpointer:
    """Open the checkpointer of the weights, the optimizer's state, and each rank's random state."""
    startup.mark_start("model")
    if not cfg.checkpoint.save:
        from kempner.checkpoint.unsaved import Unsaved

        return Unsaved()
    from kempner.checkpoint.state import run_state

    state = replicas.with_outer(run_state(model, optimizer))
    parts = (
        cfg.checkpoint,
        cfg.checkpoint_dir,
        state,
        checkpoint_contents(cfg, run.world, run.dir),
    )
    return replicas.checkpointer(*parts, run.announce, run.lock)


def resume_progress(
    cfg: RunConfig,
    run: Run,
    layout: Layout,
    model: Decoder,
    checkpointer: Checkpointer,
    replicas: Replicas,
) -> Progress:
    """Load the newest checkpoint; without one, that of the run to be forked, or an extension's
    weights. With checkpoint.powers_of_two a new run saves its initial state, as a fork always does.
    The compiler is told which batches to expect."""
    manifest = checkpointer.load()
    forks = manifest is None and bool(cfg.run.fork)
    for each in lookup.used(cfg):
        each.start(cfg, run, model, begun=manifest is not None or forks)
    if forks:
        from kempner.train.resilience.resuming import begin_fork

        progress = begin_fork(cfg, run, checkpointer, replicas)
    else:
        progress = Progress.of(manifest).plan(cfg)
    if manifest is None and not forks and cfg.checkpoint.powers_of_two:
        checkpointer.save(progress.step, progress.record())
    expect_batches(cfg, layout, model, progress.step)
    return replicas.begin(progress)


def warn_of_different_gpus(run: Run, name: str) -> None:
    """Warn if ranks have GPUs of different models; `name`: this rank's. All ranks must call it."""
    if found := hosts.different_devices(run.world, name):
        run.announce(
            f"warning: the GPUs of this run differ: {found}; all wait for the slowest, and since "
            "random numbers depend on the GPU's model, copies of initial weights (dp_replicate) "
            "may differ; request one model, e.g. by #SBATCH --constraint"
        )


def _last_step(cfg: RunConfig, run: Run, loader: Loader, progress: Progress) -> int:
    if not progress.skip:
        return cfg.train.max_steps
    from kempner.train.resilience.resuming import find_last_step

    return find_last_step(cfg, loader, progress, run.announce)


def open_training(cfg: RunConfig, stop: StopRequests, run: Run, device: torch.device) -> Training:
    """Create the parts, load the newest checkpoint, and start the watchers."""
    # The watchdog first: it also ends a stalled start.
    watchdog, layout = start_watchdog(cfg, run), open_layout(cfg, run.world, device)
    if device.type == "cuda":
        warn_of_different_gpus(run, torch.cuda.get_device_name(device))
    train = cfg.train
    if train.recompute == "auto":
        from kempner.train.resilience.room import choose_recompute

        with watchdog.patient():
            train = choose_recompute(cfg, run, layout, device)
    model = build_model(cfg.model, layout, train, cfg.distributed, cfg.lora, experts=cfg.experts)
    optimizer, replicas = open_replicas(cfg, run.world, model, watchdog.patient)
    checkpointer = open_checkpointer(cfg, run, model, optimizer, replicas)
    progress = resume_progress(cfg, run, layout, model, checkpointer, replicas)
    bringer = lookup.bringer(cfg)
    if bringer is None:
        loader: Loader = open_loader(cfg, layout, device.type == "cuda", progress)
    else:
        loader = bringer.loader(cfg, run, layout, model, progress, stop)
    objective = open_objective(cfg, layout, model, run, device)
    run.begin(progress)
    recorder = Recorder(run, device, progress, loader, objective, replicas, optimizer.spikes)
    replay = stragglers = None
    if dist.get_world_size() > 1:
        from kempner.train.resilience.straggler import BlockClock, Stragglers

        clock = BlockClock(model, device, layout.blocks_apart)
        stragglers = (clock, Stragglers(run.hosts, device, run.announce))
    if cfg.resilience.replay_every or cfg.resilience.checksum_every:
        from kempner.train.integrity.replay import Replay

        replay = Replay(cfg, run, layout, model, optimizer, device, watchdog.patient, checkpointer)
    watchdog.begin(progress.step, layout.groups)

    def seconds_to_leave() -> float:
        step = watchdog.step_time * replicas.patience
        return time_to_leave(checkpointer.seconds or 10.0, step) + 10.0

    stop.begin(run, seconds_to_leave)
    loader.begin(progress, recorder.clock, watchdog.patient)
    return Training(
        cfg,
        run,
        device,
        stop,
        watchdog,
        layout,
        model,
        optimizer,
        replicas,
        checkpointer,
        Saves(run, checkpointer, recorder, partial(watchdog.patient, save=True)),
        progress,
        progress,
        _last_step(cfg, run, loader, progress),
        loader,
        open_held_out_batches(cfg, layout),
        objective,
        recorder,
        recorder.clock,
        NonFinite(cfg.resilience),
        Freezer(model, cfg.freeze),
        stragglers,
        replay,
    )
