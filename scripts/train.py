"""Train a decoder: one process per GPU, started by srun, by torchrun, or by hand.

    python scripts/train.py configs/train/quickstart.toml --train.max_steps=50
    sbatch scripts/slurm/multinode.sh configs/train/7b.toml

The whole program is here: make the parts, load the newest checkpoint, step until the last step or
until a request to leave. Exit code 0 after any orderly end, 2 on bad input; status.json says more.
"""

import sys

from kempner import process_group
from kempner.configure import configure, reject
from kempner.parallel import mesh
from kempner.progress import Progress, go_back, open_loaders, seed_everything
from kempner.resilience import requests
from kempner.run import RunConfig

if __name__ == "__main__":
    STOP = requests.StopRequests()  # first of all: a signal during the imports must not kill us
    CFG = configure(sys.argv[1:], STOP)  # --help, --check and bad input end here

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kempner.checkpoint.dcp import Checkpointer
from kempner.config.option import ConfigError
from kempner.evaluate import validate
from kempner.loss import IGNORE
from kempner.optim.build import build_optimizer, set_learning_rate
from kempner.optim.config import learning_rate
from kempner.parallel.build import build_model
from kempner.recorder import Recorder
from kempner.resilience.straggler import BlockClock
from kempner.resilience.watchdog import Watchdog
from kempner.run_directory import Run
from kempner.step import PendingStep, guard_update, reduce_step


def train(
    cfg: RunConfig, stop: requests.StopRequests, run: Run, device: torch.device
) -> requests.Verdict:
    """Train until the last step or a request to leave; returns the state to leave the run in."""
    seed_everything(cfg.train)
    axes = mesh.build(cfg.distributed, run.world.size, device.type)
    model = build_model(cfg.model, axes, cfg.train)
    optimizer = build_optimizer(model, cfg.optimizer)
    checkpointer = Checkpointer(
        cfg.checkpoint, cfg.checkpoint_dir, model, optimizer, run.contents(), run.announce
    )
    at = Progress.of(checkpointer.load(), run.gone_back)
    batch = cfg.train.sequences
    step_tokens = batch * cfg.train.seq_len  # tokens of a step, if every one counts
    loader, val_batches = open_loaders(cfg, run.world, device.type == "cuda", at)
    run.begin(at.step)
    clock, recorder = BlockClock(model.blocks, device), Recorder(run, device)
    recorder.begin(at.step, at.tokens)
    watchdog = Watchdog(
        cfg.resilience.hang_timeout, cfg.distributed.start_timeout, run.log_file, run.hangs
    )
    stop.begin(run.world.rank, run.announce, lambda: 2 * (checkpointer.seconds or 10.0) + 10.0)
    verdict, waiting = requests.GO_ON, []

    while at.step < cfg.train.max_steps and not verdict.state:
        with recorder.clock.part("data"):
            micro_batches = next(loader)
        loss_sum, tokens = forward_backward(model, micro_batches, device, step_tokens)
        work = clock.take() + recorder.clock.last["data"]
        flags = stop.take_flags(run.dir if run.world.rank == 0 else None)
        totals = reduce_step(loss_sum, tokens, model, axes, flags, work)
        result = guard_update(optimizer, totals, step_tokens, cfg.train.grad_clip)
        lr = learning_rate(cfg.schedule, cfg.optimizer.lr, at.step, cfg.train.max_steps)
        set_learning_rate(optimizer, lr)
        optimizer.step()
        optimizer.zero_grad()
        run.step = step = at.step + 1
        at = Progress(step, loader.position, at.tokens + step_tokens, at.skip)
        watchdog.beat(step)
        checkpointer.poll()

        if not waiting:
            process_group.shorten_timeout(
                axes, cfg.distributed.timeout
            )  # the slow first step is done
        last = step == cfg.train.max_steps
        due = cfg.checkpoint.interval and step % cfg.checkpoint.interval == 0
        waiting, verdict = (
            [*waiting, PendingStep(at.record(), lr, result, recorder.clock)],
            requests.GO_ON,
        )
        # Read a step late, when they have arrived, but before a save: its step has a line, then.
        while verdict == requests.GO_ON and len(waiting) > (0 if due and not last else 1):
            numbers = waiting.pop(0).read()
            recorder.step(numbers, loader)
            verdict = stop.decide(numbers, cfg.resilience.max_skipped, may_go_back=not at.skip)
        if verdict.go_back:
            bad = [stop.bad_since - batch, loader.position]
            (at, verdict), waiting = go_back(at, bad, verdict, checkpointer, loader, run), []
            recorder.begin(at.step, at.tokens)
            continue
        due = due and not stop.skipped_in_a_row  # spoilt weights, perhaps: keep what is there
        if (due or last or verdict.save) and verdict.state != "failed":
            with recorder.clock.part("checkpoint"), watchdog.patient():
                checkpointer.save(step, at.record())
        validation_due = cfg.eval.interval and (last or step % cfg.eval.interval == 0)
        if validation_due and not verdict.state:
            with recorder.clock.part("eval"), watchdog.patient():
                recorder.validation(step, *validate(model, val_batches(), device, stop))

    for later in waiting:
        recorder.step(later.read(), loader)
    loader.close()
    with watchdog.patient():
        checkpointer.wait(stop.seconds_left(run.world.rank))
    watchdog.stop()
    return requests.final_verdict(verdict, at.step, checkpointer)


def forward_backward(
    model: nn.Module,
    micro_batches: list[tuple[Tensor, Tensor]],
    device: torch.device,
    step_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Add up this rank's gradients of (sum of losses) / step_tokens; returns the sum of losses, and
    the number of tokens that count, fp32 []."""
    loss_sum, tokens = torch.zeros((), device=device), torch.zeros((), device=device)
    for i, (inputs, targets) in enumerate(micro_batches):  # int64 [B, T] each
        model.set_requires_all_reduce(i == len(micro_batches) - 1)
        targets = targets.to(device, non_blocking=True)
        loss = model(inputs.to(device, non_blocking=True), targets)
        (loss / step_tokens).backward()
        loss_sum += loss.detach()
        tokens += (targets != IGNORE).sum()
    return loss_sum, tokens


def main(cfg: RunConfig, stop: requests.StopRequests) -> int:
    """Join the other ranks, train, and say how it ended; returns the exit code."""
    try:
        world = process_group.discover()
        device = process_group.pick_device(cfg.distributed.device, world.local_rank)
        process_group.start(world, device, cfg.run.dir, cfg.distributed.start_timeout)
        run = Run(cfg, world)
    except ConfigError as error:
        reject(error, stop)
    try:
        verdict = train(cfg, stop, run, device)
        run.end(verdict)
        dist.barrier()  # srun takes a rank that leaves before the others for a failed one
    except BaseException as error:
        return run.crashed(error)
    return 1 if verdict.state == "failed" else 0


if __name__ == "__main__":
    requests.end_process(main(CFG, STOP))
