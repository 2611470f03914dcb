"""Train a decoder: one process per GPU, started by srun, by torchrun, or by hand.

    python scripts/train.py configs/train/quickstart.toml --train.max_steps=50
    sbatch scripts/slurm/multinode.sh configs/train/7b.toml

The whole program is here: make the parts, load the newest checkpoint, step until the last step or
until a request to stop. Exit code 0 after any orderly end, 2 on bad input; status.json says more.
"""

import sys

from kempner import resilience
from kempner.run import Run, RunConfig, configure, micro_batch, seed_everything

if __name__ == "__main__":
    STOP = (
        resilience.StopRequests()
    )  # first of all: a signal during the imports must not kill Python
    CFG = configure(sys.argv[1:])  # --help, --check and bad input end here

import torch
import torch.distributed as dist
from kempner.data.dataset import TokenDataset
from kempner.data.loader import TrainLoader, val_batches
from torch import nn

from kempner import launch, mesh
from kempner.checkpoint.dcp import Checkpointer
from kempner.loss import IGNORE
from kempner.metrics import Recorder
from kempner.optim.build import build_optimizer
from kempner.optim.config import learning_rate
from kempner.parallel.build import build_model
from kempner.step import Later, guard_update, reduce_step


def train(
    cfg: RunConfig, stop: resilience.StopRequests, run: Run, device: torch.device
) -> resilience.Verdict:
    """Train until the last step or a request to stop; returns the state to leave the run in."""
    rank, world_size = run.place.rank, run.place.world_size
    micro = micro_batch(cfg.train, world_size)
    seed_everything(cfg.train)
    axes = mesh.build(cfg.distributed, world_size, device.type)
    model = build_model(cfg.model, axes, cfg.train)
    optimizer = build_optimizer(model, cfg.optimizer)
    data = TokenDataset.open(
        cfg.data.dataset_path, "train", cfg.train.seq_len, cfg.model.vocab_size
    )
    checkpointer = Checkpointer(
        cfg.checkpoint, cfg.checkpoint_dir, model, optimizer, run.contents(data), run.say
    )
    at = checkpointer.load() or {"step": 0, "samples": 0, "tokens": 0}
    step, tokens_seen = at["step"], at["tokens"]
    loader = TrainLoader(
        data,
        seed=cfg.data.seed,
        batch=cfg.train.sequences,
        rank=rank,
        world=world_size,
        micro=micro,
        position=at["samples"],
        prefetch=cfg.data.prefetch,
        pin=device.type == "cuda",
    )
    parameters, replicas = list(model.parameters()), axes["replicate"].size()
    budget = cfg.train.sequences * cfg.train.seq_len  # tokens of a step, if every one counts
    recorder = Recorder(cfg.metrics, run, cfg.model.flops_per_token(cfg.train.seq_len), device)
    run.begin(step)
    recorder.begin(step, tokens_seen)
    verdict, pending = resilience.GO_ON, None

    while step < cfg.train.max_steps and not verdict.state:
        with recorder.clock.part("data"):
            micro_batches = next(loader)
        loss_sum, tokens = torch.zeros((), device=device), torch.zeros((), device=device)
        for i, (inputs, targets) in enumerate(micro_batches):  # int64 [B, T] each
            model.set_requires_all_reduce(i == len(micro_batches) - 1)
            targets = targets.to(device, non_blocking=True)
            loss = model(inputs.to(device, non_blocking=True), targets)  # a sum, fp32 []
            (loss / budget).backward()
            loss_sum += loss.detach()
            tokens += (targets != IGNORE).sum()
        totals = reduce_step(
            loss_sum, tokens, parameters, replicas, stop.take_flags(run.dir if rank == 0 else None)
        )
        result = guard_update(optimizer, totals, budget, cfg.train.grad_clip)
        lr = learning_rate(cfg.schedule, cfg.optimizer.lr, step, cfg.train.max_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        step, tokens_seen = step + 1, tokens_seen + budget
        run.step = step

        if pending is not None:  # the numbers of the step before have arrived by now
            numbers = pending.read()
            recorder.step(numbers)
            verdict = stop.decide(numbers.bad, numbers.flags, cfg.train.max_skipped)
        else:
            launch.shorten_timeout(axes, cfg.distributed.timeout)  # the slow first step is done
        pending = Later(step, lr, tokens_seen, loader.position, result)
        last = step == cfg.train.max_steps or verdict.state
        with recorder.clock.part("checkpoint"):
            checkpointer.poll()
            due = cfg.checkpoint.interval and step % cfg.checkpoint.interval == 0
            if (due or verdict.save or last) and verdict.state != "failed":
                position = {"samples": loader.position, "tokens": tokens_seen}
                checkpointer.save(step, position)
        if cfg.eval.interval and (step % cfg.eval.interval == 0 or step == cfg.train.max_steps):
            with recorder.clock.part("eval"):
                recorder.validation(step, *validate(cfg, model, micro, run.place, device))

    if pending is not None:
        recorder.step(pending.read())
    loader.close()
    checkpointer.close()
    if verdict.state != "failed" and checkpointer.saved_step != step:
        return resilience.Verdict(False, "failed", "the last checkpoint could not be written")
    return verdict if verdict.state else resilience.DONE


@torch.no_grad()
def validate(
    cfg: RunConfig, model: nn.Module, micro: int, place: launch.Place, device: torch.device
) -> tuple[float, int]:
    """Mean loss over the held-out tokens of all ranks, and how many they are."""
    data = TokenDataset.open(cfg.data.dataset_path, "val", cfg.train.seq_len, cfg.model.vocab_size)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for inputs, targets in val_batches(
        data, samples=cfg.eval.samples or None, micro=micro, rank=place.rank, world=place.world_size
    ):
        loss = model(inputs.to(device), targets.to(device))
        sums += torch.stack((loss.double(), (targets != IGNORE).sum().to(loss.device)))
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item(), int(sums[1].item())


def main(cfg: RunConfig, stop: resilience.StopRequests) -> int:
    """Join the other ranks, train, and say how it ended; returns the exit code."""
    place = launch.discover()
    device = launch.pick_device(cfg.distributed.device, place.local_rank)
    launch.start(place, device, cfg.run.dir, cfg.distributed.start_timeout)
    run = Run(cfg, place)
    try:
        verdict = train(cfg, stop, run, device)
        run.end(verdict.state, verdict.reason)
        dist.barrier()  # srun takes a rank that leaves before the others for a failed one
    except BaseException as error:
        return run.crashed(error)
    return 1 if verdict.state == "failed" else 0


if __name__ == "__main__":
    resilience.end_process(main(CFG, STOP))
