"""A program that knows nothing of this kit, as run.sh's tests start it; without torch.

    foreign.py WHAT     what each rank does, by the number of the attempt: WORD[@RANK],...

A word with a rank is for that rank alone, the others wait; the last one stands for all attempts
after it:

    done            prints three steps, and ends
    exit=N, kill    ends with this code, or by SIGKILL
    wait            prints steps until it is killed
    leave           the same, but leaves with exit code 0 when it gets SIGTERM
    ask             the same, but looks for kempner.jobs.slurm.stop_requested()
    usr1            the same, on SIGUSR1
    save            deaf to signals; saves out/ckpt-N, N ten more than the newest one, at step 5
                    and at step 100
    beat            touches its heartbeat in every step
    stop            the same, with the others, until it is suspended after three steps
    early           ends at once, with exit code 0; the others are done three steps later
"""

import os
import signal
import sys
import time
from pathlib import Path

from kempner.jobs import slurm

rank = int(os.environ["RANK"])
plan = sys.argv[1].split(",")
word, _, whose = plan[min(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), len(plan) - 1)].partition(
    "@"
)
if whose and int(whose) != rank:
    word = {"stop": "beat", "early": "done"}.get(word, "wait")
asked: list[int] = []
if word == "leave":
    signal.signal(signal.SIGTERM, lambda n, _: asked.append(n))
elif word == "usr1":
    signal.signal(signal.SIGUSR1, lambda n, _: asked.append(n))
name, _, value = word.partition("=")
print(f"rank {rank} of {os.environ['WORLD_SIZE']}: {word}", flush=True)

for step in range(1, 10**6):
    print(f"step {step}", flush=True)
    time.sleep(0.2)
    if word == "beat" or (word == "stop" and step < 4):
        slurm.beat(step)
    if word == "stop" and step == 4:
        os.kill(os.getpid(), signal.SIGSTOP)
    if word == "save" and step in (5, 100) and rank == 0:
        newest = max((int(p.name[5:]) for p in Path("out").glob("ckpt-*")), default=0)
        Path("out").mkdir(exist_ok=True)
        Path(f"out/ckpt-{newest + 10}").write_text("weights")
    if step == 3 and name == "exit":
        sys.exit(int(value))
    if step == 3 and name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    over = word == "early" or (step == 3 and word == "done")
    if over or asked or (word == "ask" and slurm.stop_requested()):
        print(f"rank {rank} leaves", flush=True)
        break
