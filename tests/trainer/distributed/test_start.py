"""What the first step of a plain run has imported: a start is as quick as its imports are few."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.forks import ROOT

# Modules by which a start grows by tenths of a second, and which a process alone has no use for.
LATE = (
    "sympy",
    "torch._dynamo.convert_frame",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)
MOST = 50  # modules but those of `import torch` and of this kit; 40 with Python 3.11
PROGRAM = """
import json, os, runpy, sys
import torch
before = set(sys.modules)
from kempner.train import step
update = step.update_weights
def report(*words):
    update(*words)
    print("loaded", json.dumps(sorted(set(sys.modules) - before)), flush=True)
    os._exit(0)
step.update_weights = report
sys.argv, sys.path[0] = sys.argv[1:], "scripts"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_what_is_imported_until_the_first_step_has_ended(tmp_path: Path) -> None:
    """A true start, not a fork: what a parent had imported would count."""
    command = [sys.executable, "-c", PROGRAM, "scripts/train.py", "configs/train/debug.toml"]
    command += ["--data.dataset_path=fake:", "--distributed.device=cpu", "--train.global_batch=1"]
    command += [f"--run.dir={tmp_path}/run", "--train.seq_len=16"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("loaded ")]
    assert lines, done.stdout + done.stderr
    loaded = json.loads(lines[0].removeprefix("loaded "))
    assert not {name for name in LATE if name in loaded}
    others = [name for name in loaded if not name.startswith("kempner")]
    assert len(others) <= MOST, others
