"""Stands in for scripts/rl.py where a test is about the batch script alone: without torch, and with
the files of the exchange. Each of its steps takes FAKE_STEP_S. It saves every fifth step."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from kempner.config.loading import to_toml
from kempner.extensions.rl.exchange import ExchangeStart, RolloutExchange
from kempner.jobs.system.files import swap_link, write_atomic
from kempner.train.configure import load_config

signals: list[int] = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda n, _: signals.append(n))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})

words = [word for word in sys.argv[1:] if word.startswith("--") and "." in word]
files = [word for word in sys.argv[1:] if word.endswith(".toml")]
cfg = load_config(files, words)
if "--check" in sys.argv:
    print(to_toml(cfg), end="")
    sys.exit(0)
run, attempt = Path(cfg.run.dir), os.environ["KEMPNER_ATTEMPT_ID"]
if os.environ.get("SLURM_PROCID", os.environ.get("RANK", "0")) != "0":
    while not (run / f"left-{attempt}").exists():
        time.sleep(0.05)
    sys.exit(0)


def save(step: int, state: object) -> None:
    folder = run / f"checkpoints/step_{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text(json.dumps([step, state]))
    swap_link(run / "checkpoints/latest", folder.name)


def end(word: str) -> None:
    write_atomic(run / "status.json", json.dumps({"state": word, "attempt_id": attempt}))
    (run / f"left-{attempt}").touch()
    sys.exit(0)


logs = len(list((run / "logs").glob("attempt-*")))
(run / f"logs/attempt-{logs}").mkdir()
(run / f"logs/attempt-{logs}/rank-0.log").touch()
swap_link(run / "logs/latest", f"attempt-{logs}")
latest = run / "checkpoints/latest/state.json"
step, state = json.loads(latest.read_text()) if latest.exists() else (0, None)
exchange = RolloutExchange(run)


def publish() -> None:
    exchange.version(step).mkdir(parents=True)
    exchange.publish(step, {"version": step})


publish()
exchange.begin(ExchangeStart(step, 1, state))
print(f"continues after step {step}", flush=True)
while step < cfg.train.max_steps:
    while (batch := exchange.batch(step + 1)) is None:
        if signals:
            save(step, state)
            end("interrupted")
        time.sleep(0.02)
    time.sleep(float(os.environ.get("FAKE_STEP_S", "0.05")))
    step, state = batch.step, batch.state
    publish()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "tasks": state["tasks"], "attempt": attempt}) + "\n")
    print(f"step {step}", flush=True)
    if step % 5 == 0:
        save(step, state)
time.sleep(float(os.environ.get("FAKE_LAST_SAVE_S", "0")))
save(step, state)
end("done")
