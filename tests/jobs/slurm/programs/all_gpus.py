"""Batch inference as vLLM does it: one program on each node starts a worker for each of its GPUs,
and hands them prompts; every 20 answers become a file. usage: all_gpus.py PROMPTS"""

import multiprocessing
import os
import sys
import time
from pathlib import Path

RANK, SIZE, PROMPTS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[1])


def answer(gpu, prompts, answers):
    while (prompt := prompts.get()) is not None:
        time.sleep(0.3)
        answers.put(f"{prompt} on GPU {gpu}")


if __name__ == "__main__":
    out = Path("out")
    out.mkdir(exist_ok=True)
    done = 20 * len([*out.glob(f"answers-{RANK}-*[0-9]")])
    gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    if done:
        print(f"resumed at {done}", flush=True)
    print(f"rank {RANK} of {SIZE} drives GPUs {','.join(gpus)}", flush=True)
    spawn = multiprocessing.get_context("spawn")
    prompts, answers = spawn.Queue(), spawn.Queue()
    workers = [spawn.Process(target=answer, args=(g, prompts, answers), daemon=True) for g in gpus]
    for worker in workers:
        worker.start()
    for prompt in range(done, PROMPTS):
        prompts.put(prompt)
    found = []
    for step in range(done + 1, PROMPTS + 1):
        found.append(answers.get())
        print(f"step {step}", flush=True)
        if step % 20 == 0:
            fresh = out / f"answers-{RANK}-{step}.tmp"
            fresh.write_text("\n".join(found))
            fresh.rename(fresh.with_suffix(""))
            found = []
    for _ in gpus:
        prompts.put(None)
