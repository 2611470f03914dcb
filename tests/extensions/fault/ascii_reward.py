"""An environment whose rewards differ from the first step on, for tests of faults."""

import os
import random
import time

from kempner.extensions.rl.environments.protocol import Environment, Task


class Ascii(Environment):
    """The share of ASCII characters; `what` is what the reward of one completion in eight does."""

    runs_code = False

    def __init__(self, what: str = "") -> None:
        self.what = what

    def task(self, number: int, rng: random.Random) -> Task:
        return Task("".join(rng.choices("abcdefgh", k=4)))

    def score(self, task: Task, completion: str) -> float:
        if self.what and completion and ord(completion[0]) % 8 == 0:
            misbehave(self.what)
        return sum(c.isascii() for c in completion) / max(len(completion), 1)


def misbehave(what: str) -> None:
    if what == "hang":
        time.sleep(1000)
    elif what == "memory":
        kept = []
        while True:
            kept.append(bytearray(1 << 24))
    elif what == "fork" and os.fork() == 0:
        time.sleep(1000)
