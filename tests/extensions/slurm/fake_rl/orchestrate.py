"""Stands in for scripts/orchestrate.py, as rl.py beside it: two tasks a step, each asked of some
engine. Its last evaluation takes FAKE_EVALUATION_S. With FAKE_ORCHESTRATOR=CODE it ends at once."""

import contextlib
import itertools
import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path

from kempner.extensions.rl.exchange import Batch, RolloutExchange
from kempner.train.configure import load_config

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
if code := os.environ.get("FAKE_ORCHESTRATOR"):
    sys.exit(int(code))
words = [word for word in sys.argv[1:] if word.startswith("--") and "." in word]
files = [word for word in sys.argv[1:] if word.endswith(".toml")]
cfg = load_config(files, words)
exchange = RolloutExchange(cfg.run.dir)
while (start := exchange.started()) is None:
    time.sleep(0.02)
position = start.state["position"] if start.state else 0


def ask(task: int) -> int:
    for turn in itertools.count(task):
        urls = [path.read_text().strip() for path in sorted(exchange.engines.glob("engine-*"))]
        with contextlib.suppress(OSError):
            if urls:
                url = f"{urls[turn % len(urls)]}/{task}"
                headers = {"Authorization": exchange.token.read_text()}
                with urllib.request.urlopen(
                    urllib.request.Request(url, headers=headers), timeout=2
                ) as reply:
                    assert json.loads(reply.read()) == f"/{task}"
                    return task
        time.sleep(0.02)
    raise AssertionError


for step in range(start.step + 1, cfg.train.max_steps + 1):
    while (exchange.newest() or 0) < step - 1:
        time.sleep(0.02)
    tasks = [ask(position), ask(position + 1)]
    position += 2
    exchange.rollouts(step).mkdir(parents=True)
    exchange.hand_over(Batch(step, 2, {}, {"position": position, "tasks": tasks}))
    print(f"batch {step}", flush=True)
while exchange.newest() != cfg.train.max_steps:
    time.sleep(0.02)
time.sleep(float(os.environ.get("FAKE_EVALUATION_S", "0")))
Path(cfg.run.dir, "evaluated").touch()
