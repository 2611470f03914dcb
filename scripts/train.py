"""Train a decoder: one process per GPU, started by srun, by torchrun, or by hand.

    python scripts/train.py configs/train/quickstart.toml --train.max_steps=50
    sbatch scripts/slurm/multinode.sh configs/train/7b.toml

The whole program is here: build the parts, load the newest checkpoint, step until the last step or
a request to leave. Exit code 0 after any orderly end, 2 on bad input; status.json says more.
"""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(__file__))  # PYTHONSAFEPATH leaves it out
    import first

    first.start_program()  # before anything that may be missing or slow

import gc
import sys

from kempner.train import lookup
from kempner.train.configure import configure, reject_input
from kempner.train.resilience import requests
from kempner.train.resilience.requests import GO_ON, StopRequests, Verdict
from kempner.train.sections import RunConfig

if __name__ == "__main__":
    gc.disable()  # saves a tenth of the import time; collect_garbage() handles the steps
    STOP = StopRequests()  # first of all: a signal during the imports must not kill us
    CFG = configure(sys.argv[1:], STOP)  # --help, --check and bad input end here

# Only now, as it takes seconds: the exits above do not need it.
import torch

from kempner.config.option import ConfigError
from kempner.jobs.ranks import process_group
from kempner.jobs.system.front_door import BadPortRange, NoFreePort
from kempner.train.parts import prepare_torch
from kempner.train.recording.run_directory import Run
from kempner.train.step import (
    PendingStep,
    StepSums,
    collect_garbage,
    forward_backward,
    reduce_step,
    update_weights,
)
from kempner.train.training import join_ranks, open_training


def train(cfg: RunConfig, stop: StopRequests, run: Run, device: torch.device) -> Verdict:
    """Train until the last step or a request to leave; returns the state to leave the run in."""
    at = open_training(cfg, stop, run, device)
    verdict, pending, long_steps = GO_ON, [], False
    gradients_of = at.replay or forward_backward  # resilience.replay_every: some steps twice
    if at.has_missed_validation():
        verdict = at.validate()

    while at.progress.step < at.last_step and not verdict.state:
        # One step. Nothing here makes the host wait for the device.
        with at.clock.part("data"):
            batches = next(at.loader)
        if not isinstance(batches, Verdict):  # from all ranks, while they waited for it
            sums = StepSums(at.loader.names, device)
            # Only in long steps do ranks query each other in between, each time by a collective.
            leave = stop if long_steps else None
            step_tokens = at.loader.tokens  # if all count
            batches = gradients_of(at.model, at.objective, batches, sums, step_tokens, leave)
        if isinstance(batches, Verdict):  # or in the middle of a long step
            verdict = batches
            break
        sums = {
            **at.layout.once(batches),
            "grad_norm_sq": at.layout.norm_sq(at.freezer.trained(at.progress.step)),
            **at.own_work(),
            # The others add 0: the sum over all ranks is rank 0's time.
            "step_time": 0.0 if run.world.rank else at.watchdog.step_time,
            **stop.take_flags(),
            **at.saves.flags(),
        }
        lr, sums = at.learning_rate(), reduce_step(sums, at.layout)
        numbers = update_weights(
            at.optimizer, sums, step_tokens, lr, cfg.train.grad_clip, at.phase()
        )
        at.loader.after_update()
        at.progress = at.progress.after_step(at.loader.position, step_tokens, at.loader.state)
        numbers = at.replicas.after_step(at.progress, numbers)
        pending.append(PendingStep(at.progress, lr, numbers, at.clock))
        run.step = step = at.progress.step
        at.watchdog.beat(step)
        at.saves.after_step(step, at.watchdog.step_time)
        collect_garbage(step)

        # Reports of all earlier steps but the newest. Before a save also the newest, so that no
        # checkpoint is ahead of its line in metrics.jsonl; before a validation, after which a
        # request to leave may save at once; and in long steps, where waiting for the device costs
        # nothing and a request to leave must not wait for another step.
        last = step == at.last_step
        save_due = last or cfg.checkpoint.is_due(step)
        at_once, verdict = save_due or at.loader.at_once or at.is_validation_due(), GO_ON
        while not verdict.final and pending[0 if at_once or long_steps else 1 :]:
            result = pending.pop(0).read()
            long_steps = result.values["step_time"] > requests.LONG_STEP_S
            verdict = at.judge(result) or requests.requested_verdict(result.values, verdict)
            at_once = at_once or verdict.save or verdict.save_due

        # Roll back, save, validate.
        if verdict.go_back:
            verdict, pending = at.go_back(verdict, result, pending), []
            continue
        # After a skipped step the weights may be bad: keep the last good checkpoint.
        save_due = (save_due or verdict.save_due) and (last or not at.nonfinite.in_a_row)
        if (save_due or verdict.save) and verdict.state != "failed":
            at.save()
        if at.is_validation_due() and not verdict.state:
            verdict = at.validate()

    for late in pending:
        at.recorder.step(late.read())
    return at.end(verdict)


def main(cfg: RunConfig, stop: StopRequests) -> int:
    """Join the other ranks, train, and record how it ended; returns the exit code."""
    try:
        cfg, world, device = join_ranks(cfg)
        run = Run(cfg, world)
    except (ConfigError, BadPortRange, NoFreePort) as error:
        reject_input(error, stop, requests.end_process)
    try:
        prepare_torch(cfg, run, device)
        verdict = train(cfg, stop, run, device)
        # The record first: a rank that fails in the meeting below does not change the run's end.
        run.end(verdict)
        if verdict.state != "failed":
            process_group.leave_process_group(world)
    except BaseException as error:
        return run.crashed(error, lookup.advise)
    return 1 if verdict.state == "failed" else 0


if __name__ == "__main__":
    requests.end_process(main(CFG, STOP))
