"""A training script that was started by `torchrun --nproc-per-node=8 train.py`: it reads
LOCAL_RANK, and torch.distributed.elastic records its errors. Three lines make it leave when it is
asked to (level 2 of docs/start/any-program.md)."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from kempner.jobs import slurm  # 1

STEPS, OUT = int(sys.argv[1]), Path("out")


@record
def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = sorted(OUT.glob("step_*.pt"))
    step = 0
    if found:
        state = torch.load(found[-1])
        model.load_state_dict(state["model"])
        step = state["step"]
    if dist.get_rank() == 0:
        OUT.mkdir(exist_ok=True)
        print(f"from step {step}; seconds left: {slurm.seconds_left()}")

    while step < STEPS:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        time.sleep(0.15)
        slurm.beat(step)
        leave = torch.tensor(float(slurm.stop_requested()))  # 2
        dist.all_reduce(leave, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}")
            if step % 20 == 0 or leave:
                fresh = OUT / "new"
                torch.save({"model": model.state_dict(), "step": step}, fresh)
                fresh.rename(OUT / f"step_{step:06d}.pt")
        if leave:  # 3
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
