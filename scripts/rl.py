"""Train a decoder by reinforcement learning: the trainer among the programs of such a run.

    sbatch scripts/slurm/rl.sh configs/rl/arithmetic.toml
    python scripts/rl.py configs/rl/arithmetic.toml         one process of it, by hand

It is started as scripts/train.py is, and is as that one, but for where its batches come from and
its weights go to: step n waits for the batch that the orchestrator has made of samples of version
n - 1 or, with rl.max_async, of earlier ones, trains on it, and publishes version n to the engines.
Exit code 0 after any orderly end, 2 on bad input; status.json says more.
"""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(__file__))  # PYTHONSAFEPATH leaves it out
    import first

    first.begin()  # before anything that may be missing or slow

import sys
from dataclasses import replace

from kempner import compiler, process_group
from kempner.configure import configure, reject
from kempner.parts import open_checkpointer, open_layout, open_objective, prepare_torch
from kempner.progress import resume
from kempner.resilience import requests
from kempner.resilience.requests import GO_ON, StopRequests, Verdict
from kempner.run import RunConfig
from kempner.slurm import time_to_leave

if __name__ == "__main__":
    STOP = StopRequests()  # first of all: a signal during the imports must not kill us
    CFG = configure(sys.argv[1:], STOP, rewards=True)  # --help, --check and bad input end here

import torch

from kempner.config.option import ConfigError
from kempner.lowcomm.opening import open_replicas
from kempner.optim.config import learning_rate
from kempner.parallel.build import build_model
from kempner.port_range import BadPortRange, NoFreePort
from kempner.recorder import Recorder
from kempner.resilience.nonfinite import NonFinite
from kempner.resilience.straggler import BlockClock, Stragglers
from kempner.resilience.watchdog import start_watchdog
from kempner.rl.exchange import Exchange, Start
from kempner.rl.feed import open_feed
from kempner.rl.publish import open_publisher
from kempner.run_directory import Run
from kempner.step import (
    PendingStep,
    StepSums,
    collect_garbage,
    forward_backward,
    reduce_step,
    update,
)


def train(cfg: RunConfig, stop: StopRequests, run: Run, device: torch.device) -> Verdict:
    """Train until the last step or a request to leave; returns the state to leave the run in."""
    watchdog, layout = start_watchdog(cfg, run), open_layout(cfg, run.world, device)
    model = build_model(cfg.model, layout, cfg.train, cfg.distributed, cfg.lora)
    optimizer, replicas = open_replicas(cfg, run.world, model, watchdog.patient)
    checkpointer = open_checkpointer(cfg, run, model, optimizer, replicas)
    progress = resume(cfg, run, layout, model, checkpointer, replicas)
    objective = open_objective(cfg, layout, model, run, device)
    exchange = Exchange(run.dir)
    publisher = open_publisher(cfg, model, exchange, device)
    feed = open_feed(cfg, exchange, layout, stop, publisher, progress.samples, run.announce)
    run.begin(progress)
    recorder, nonfinite = Recorder(run, device, progress, feed), NonFinite(cfg.resilience)
    work = BlockClock(model, device, layout.blocks_apart)
    stragglers = Stragglers(run.hosts, device, run.announce)
    watchdog.begin(progress.step, layout.groups)
    feed.waiting = watchdog.patient
    stop.begin(run, lambda: time_to_leave(checkpointer.seconds or 10.0, watchdog.step_time) + 10.0)
    with watchdog.patient():
        feed.publish(progress.step)
    if run.world.rank == 0:
        exchange.begin(Start(progress.step, layout.data_ranks, progress.orchestrator))
    verdict, long_step = GO_ON, False

    while progress.step < cfg.train.max_steps and not verdict.state:
        step = progress.step + 1
        with recorder.clock.part("data"):
            micro_batches = feed.next(step)
        if isinstance(micro_batches, Verdict):  # of all ranks, while they waited
            verdict = micro_batches
            break
        sums = forward_backward(
            model,
            objective,
            micro_batches,
            StepSums(feed.names, device),
            feed.tokens,
            leave=stop if long_step else None,
        )
        if isinstance(sums, Verdict):  # in the middle of a long step
            verdict = sums
            break
        sums = {
            **layout.once(sums),
            "grad_norm_sq": layout.norm_sq(model.parameters()),
            "work": stragglers.contribution(work.take()),
            "step_time": 0.0 if run.world.rank else watchdog.step_time,
            **stop.take_flags(),
        }
        lr = learning_rate(cfg.schedule, cfg.optimizer.lr, progress.step, cfg.train.max_steps)
        numbers = update(optimizer, reduce_step(sums, layout), feed.tokens, lr, cfg.train.grad_clip)
        # Publish first: the engines wait for it, and the weights go through the host anyway.
        with recorder.clock.part("publish"), watchdog.patient():
            feed.publish(step)
        progress = progress.after_step(feed.position, feed.tokens)
        progress = replace(progress, orchestrator=feed.state)
        result = PendingStep(progress, lr, numbers, recorder.clock).read()
        run.step = step
        watchdog.beat(step)
        checkpointer.poll(watchdog.step_time)
        collect_garbage(step)

        recorder.step(result, feed)
        stragglers.update(step, result.values["work"])
        long_step = result.values["step_time"] > requests.LONG_STEP_S
        verdict = nonfinite.judge(result, may_go_back=True) or requests.asked(result.values)
        if verdict.go_back:  # with the orchestrator, which is ahead, too: in a new attempt
            raise RuntimeError(verdict.reason)

        last = step == cfg.train.max_steps
        save_due = last or cfg.checkpoint.is_due(step)
        # After a non-finite step the weights may be bad: keep the last good checkpoint.
        save_due = save_due and (last or not nonfinite.in_a_row)
        if save_due or verdict.save:
            with recorder.clock.part("checkpoint"), watchdog.patient():
                checkpointer.save(step, progress.record())

    with watchdog.patient():
        verdict = requests.final_verdict(
            verdict, progress, checkpointer, stop.seconds_left(run.world.rank)
        )
    watchdog.stop()
    return verdict


def main(cfg: RunConfig, stop: StopRequests) -> int:
    """Join the other ranks, train, and say how it ended; returns the exit code."""
    try:
        world = process_group.discover()
        device = process_group.pick_device(cfg.distributed.device, world.local_rank)
        process_group.stay_near(device, world)
        compiler.need(cfg.train.compile, device.type)
        limit = cfg.distributed.start_timeout
        world = process_group.start(world, device, cfg.run.dir, limit)
        run = Run(cfg, world)
    except (ConfigError, BadPortRange, NoFreePort) as error:
        reject(error, stop, requests.end_process)
    try:
        prepare_torch(cfg, run, device)
        verdict = train(cfg, stop, run, device)
        run.end(verdict)
        if verdict.state != "failed":
            process_group.leave(world)
    except BaseException as error:
        return run.crashed(error)
    return 1 if verdict.state == "failed" else 0


if __name__ == "__main__":
    requests.end_process(main(CFG, STOP))
