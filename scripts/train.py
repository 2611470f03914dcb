"""Train a decoder: one process per GPU, started by srun, by torchrun, or by hand.

    python scripts/train.py configs/train/quickstart.toml --train.max_steps=50
    sbatch scripts/slurm/multinode.sh configs/train/7b.toml

The whole program is here: make the parts, load the newest checkpoint, step until the last step or
until a request to leave. Exit code 0 after any orderly end, 2 on bad input; status.json says more.
"""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(__file__))  # PYTHONSAFEPATH leaves it out
    import first

    first.begin()  # before anything that may be missing or slow

import sys

from kempner import compiler, process_group
from kempner.configure import configure, reject
from kempner.parts import (
    open_checkpointer,
    open_layout,
    open_loaders,
    open_objective,
    prepare_torch,
)
from kempner.progress import go_back, resume
from kempner.resilience import requests
from kempner.resilience.requests import GO_ON, StopRequests, Verdict
from kempner.run import RunConfig
from kempner.slurm import time_to_leave

if __name__ == "__main__":
    STOP = StopRequests()  # first of all: a signal during the imports must not kill us
    CFG = configure(sys.argv[1:], STOP)  # --help, --check and bad input end here

import torch

from kempner.config.option import ConfigError
from kempner.evaluate import validate
from kempner.lowcomm.opening import open_replicas
from kempner.optim.build import published_weights
from kempner.optim.config import learning_rate
from kempner.optim.freezing import Freezer
from kempner.parallel.build import build_model
from kempner.port_range import BadPortRange, NoFreePort
from kempner.recorder import Recorder
from kempner.resilience.nonfinite import NonFinite
from kempner.resilience.straggler import BlockClock, Stragglers
from kempner.resilience.watchdog import start_watchdog
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
    loader, val_batches = open_loaders(cfg, layout, device.type == "cuda", progress)
    objective = open_objective(cfg, layout, model, run, device)
    run.begin(progress)
    recorder, nonfinite = Recorder(run, device, progress, loader), NonFinite(cfg.resilience)
    work, freezer = BlockClock(model, device, layout.blocks_apart), Freezer(model, cfg.freeze)
    stragglers = Stragglers(run.hosts, device, run.announce)
    watchdog.begin(progress.step, layout.groups)
    stop.begin(
        run,
        lambda: (
            time_to_leave(checkpointer.seconds or 10.0, watchdog.step_time * replicas.patience)
            + 10.0
        ),
    )
    verdict, pending, long_steps = GO_ON, [], False

    while progress.step < cfg.train.max_steps and not verdict.state:
        # One step. Nothing here makes the host wait for the device.
        step_tokens = cfg.train.stage(progress.step).batch * cfg.train.seq_len  # if all count
        with recorder.clock.part("data"):
            micro_batches = next(loader)
        sums = forward_backward(
            model,
            objective,
            micro_batches,
            StepSums(loader.names, device),
            step_tokens,
            leave=stop if long_steps else None,
        )
        if isinstance(sums, Verdict):  # of all ranks, in the middle of a long step
            verdict = sums
            break
        sums = {
            **layout.once(sums),
            "grad_norm_sq": layout.norm_sq(freezer.trained(progress.step)),
            "work": stragglers.contribution(work.take() + recorder.clock.last["data"]),
            "step_time": 0.0 if run.world.rank else watchdog.step_time,
            **stop.take_flags(),
        }
        lr = cfg.data.lr_scales[loader.phase] * learning_rate(
            cfg.schedule, cfg.optimizer.lr, progress.step, cfg.train.max_steps
        )
        numbers = update(
            optimizer,
            reduce_step(sums, layout),
            step_tokens,
            lr,
            cfg.train.grad_clip,
            loader.phase + freezer.phase(progress.step),
        )
        progress = progress.after_step(loader.position, step_tokens)
        pending.append(
            PendingStep(progress, lr, replicas.after_step(progress, numbers), recorder.clock)
        )
        run.step = step = progress.step
        watchdog.beat(step)
        checkpointer.poll(watchdog.step_time)
        collect_garbage(step)

        # What earlier steps have said, all but the newest one. Before a save that one too, so that
        # no checkpoint is ahead of its line in metrics.jsonl; and in long steps, where the wait for
        # the device costs nothing and a request to leave must not wait for another step.
        last = step == cfg.train.max_steps
        save_due = last or cfg.checkpoint.is_due(step)
        verdict = GO_ON
        while not verdict.final and pending[0 if save_due or long_steps or verdict.save else 1 :]:
            result = pending.pop(0).read()
            recorder.step(result, loader)
            stragglers.update(result.step, result.values["work"])
            long_steps = result.values["step_time"] > requests.LONG_STEP_S
            verdict = nonfinite.judge(result, replicas.may_go_back(progress)) or requests.asked(
                result.values, verdict
            )

        # Go back, save, validate.
        if verdict.go_back:
            with watchdog.patient():
                progress, verdict = go_back(
                    progress, nonfinite.since, verdict, checkpointer, loader, run
                )
            recorder.begin(progress)
            pending = []
            continue
        # After a skipped step the weights may be bad: keep the last good checkpoint.
        save_due = save_due and (last or not nonfinite.in_a_row)
        if (save_due or verdict.save) and verdict.state != "failed":
            with recorder.clock.part("checkpoint"), watchdog.patient():
                checkpointer.save(step, progress.record())
        if cfg.eval.interval and (last or step % cfg.eval.interval == 0) and not verdict.state:
            weights = published_weights(model, optimizer)
            with recorder.clock.part("eval"), watchdog.patient(), weights:
                recorder.validation(
                    step, validate(model, objective, val_batches(), layout, device, stop)
                )

    for late in pending:
        recorder.step(late.read(), loader)
    loader.close()
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
        replicas = cfg.lowcomm.in_step(world.size, world.per_node)
        run_dir = cfg.of_replica(world.replica).run.dir
        limit = cfg.distributed.start_timeout
        world = process_group.start(world, device, run_dir, limit, replicas)
        cfg = cfg.of_replica(world.replica)
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
