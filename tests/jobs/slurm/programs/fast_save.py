"""A program that saves after every step, three times a second, always in the same file.
usage: fast_save.py STEPS"""

import json
import os
import sys
import time
from pathlib import Path

out, rank = Path("out"), int(os.environ["RANK"])
out.mkdir(exist_ok=True)
file = out / "state.json"
step = json.loads(file.read_text()) if file.exists() else 0
if rank == 0 and step:
    print(f"resumed at {step}", flush=True)
while step < int(sys.argv[1]):
    time.sleep(0.3)
    step += 1
    if rank == 0:
        fresh = file.with_suffix(".tmp")
        fresh.write_text(json.dumps(step))
        fresh.replace(file)
        print(f"step {step}", flush=True)
