"""scripts/train.py with steps that take time and one fault, for drill.sh alone: it starts this in
place of the trainer by KEMPNER_TRAIN. KEMPNER_DRILL is a JSON object:

    fault   kill, freeze, node or disk; "" for none
    call    the step of the attempt at which it strikes, once in the life of the run
    last    disk: the last step with the small quota
    pace    seconds that each step takes at the least; slow: the same in the job's first start
    mark    the file that says that it has struck

Each fault needs no right but the user's own, and touches the processes of this step alone.
"""

import json
import os
import resource
import runpy
import signal
import sys
import time
from pathlib import Path

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
QUOTA = 16 << 10  # bytes of a file: its checkpoints are larger, all other records smaller


def place(name):
    """Return a number that srun has given this task: PROCID, LOCALID, NODEID."""
    return int(os.environ.get("SLURM_" + name, 0))


def strikes_here(fault):
    """Return whether this is the rank that acts: the last one, or the first of the last node."""
    if fault == "disk":
        return True
    if fault == "node":
        nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", 1))
        return place("NODEID") == nodes - 1 and place("LOCALID") == 0
    return place("PROCID") == int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) - 1


def is_first(mark):
    """Return whether the fault has not struck before; from now on it has."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True


def end_node():
    """End all tasks of this step on this node, and what they have started: this one last."""
    job = ("SLURM_JOB_ID=" + os.environ["SLURM_JOB_ID"]).encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "environ").read_bytes().split(b"\0")
            of_step = any(word.startswith(b"SLURM_STEP_NUM_TASKS=") for word in words)
            if job in words and of_step and int(entry.name) != os.getpid():
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:  # it has just ended, or is another user's
            continue
    os.kill(os.getpid(), signal.SIGKILL)


def set_quota(size):
    """Let no file of this process grow over `size` bytes: a write beyond it fails, as on a full
    disk."""
    # The soft limit alone: it is raised again. Python ignores SIGXFSZ: the write fails by EFBIG.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def strike(fault, mark):
    if fault == "disk":
        if place("PROCID") == 0:
            is_first(mark)
        set_quota(QUOTA)
    elif not is_first(mark):
        return
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "node":
        end_node()


def put_in(drill):
    """Make the steps of this process take their time, and one of them strike."""
    from kempner.data.loader import TrainLoader

    following = TrainLoader.__next__
    again = int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0
    pace = drill["pace"] if again else drill.get("slow", drill["pace"])
    fault, calls = drill["fault"], [0]

    def paced(self):
        calls[0] += 1
        time.sleep(pace)
        if fault and calls[0] == drill["call"] and strikes_here(fault):
            strike(fault, drill["mark"])
        if fault == "disk" and calls[0] == drill["last"]:
            set_quota(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        return following(self)

    TrainLoader.__next__ = paced


def main():
    if "--check" not in sys.argv:
        put_in(json.loads(os.environ["KEMPNER_DRILL"]))
    sys.argv[0] = str(TRAIN)
    sys.path.insert(0, str(TRAIN.parent))  # as Python does for a program
    runpy.run_path(str(TRAIN), run_name="__main__")


if __name__ == "__main__":
    main()
