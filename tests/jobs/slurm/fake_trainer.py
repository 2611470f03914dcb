"""Stands in for scripts/train.py where a test is about the batch script alone.

It keeps the same contract, without torch. What an attempt does is the word of `--plan=A,B,...` at
its number, that of the starts before it (the last one from there on):

    done, stop, fail  that state in status.json; exit code 0, 0, 1
    wait              until a signal: SIGINT makes it stopped, SIGTERM saved and interrupted; 0
    save              a checkpoint, then a crash: exit code 1, nothing in status.json
    crash, input      exit code 1, 2, nothing in status.json
    crash-later       the same a second later
    kill              dies of SIGKILL
    nothing           exit code 0, nothing in status.json
    oom               exit code 1 and a fault that is final in attempts.jsonl

A file as the first argument stands for the words in it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

signals: list[int] = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda n, _: signals.append(n))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})


if len(sys.argv) > 1 and Path(sys.argv[1]).is_file():
    sys.argv[1:2] = Path(sys.argv[1]).read_text().split()


def option(name: str, default: str) -> str:
    given = [a.split("=", 1)[1] for a in sys.argv if a.startswith(f"--{name}=")]
    return given[-1] if given else default


def check(run_dir: Path) -> None:
    print(f"[run]\ndir = {json.dumps(str(run_dir))}")
    sys.exit(0)


def save(run_dir: Path, attempt: int) -> None:
    link = run_dir / "checkpoints/new"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(f"step_{10 * attempt + 10:08d}")
    link.rename(link.with_name("latest"))


def act(word: str, run_dir: Path, attempt: int) -> int:
    """What rank 0 does; returns the exit code."""
    while word == "wait" and not signals:
        time.sleep(0.05)
    if word == "crash-later":
        time.sleep(1)
    if word == "save" or signal.SIGTERM in signals:
        save(run_dir, attempt)
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "oom":
        event = {"event": "fault", "kind": "oom", "final": True, "reason": "CUDA out of memory"}
        event |= {"time": time.time(), "attempt_id": os.environ["KEMPNER_ATTEMPT_ID"]}
        (run_dir / "attempts.jsonl").write_text(json.dumps(event) + "\n")
    states = {"done": "done", "stop": "stopped", "fail": "failed"}
    if word == "wait":
        print("got", signal.Signals(signals[0]).name)
        states["wait"] = "stopped" if signals[0] == signal.SIGINT else "interrupted"
    if word in states:
        record = {"state": states[word], "attempt_id": os.environ["KEMPNER_ATTEMPT_ID"]}
        (run_dir / "status.json").write_text(json.dumps(record))
    return {"fail": 1, "save": 1, "crash": 1, "crash-later": 1, "oom": 1, "input": 2}.get(word, 0)


def main() -> int:
    run_dir = Path(option("run.dir", "runs/fake"))
    if "--check" in sys.argv:
        check(run_dir)
    left = run_dir / f"left-{os.environ['KEMPNER_ATTEMPT_ID']}"
    if os.environ.get("SLURM_PROCID", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # srun's, when rank 0 has crashed
        while not left.exists():  # srun would end rank 0 when another one crashes first
            time.sleep(0.05)
        return int(left.read_text())
    with (run_dir / "seen.jsonl").open("a+") as file:
        file.seek(0)
        attempt = len(file.readlines())
        file.write(json.dumps({"argv": sys.argv[1:], "env": dict(os.environ)}) + "\n")
    plan = option("plan", "done").split(",")
    word = plan[min(attempt, len(plan) - 1)]
    print(f"here is attempt {attempt}", flush=True)
    code = act(word, run_dir, attempt)
    left.with_suffix(".new").write_text(str(code))
    left.with_suffix(".new").rename(left)
    return code


sys.exit(main())
