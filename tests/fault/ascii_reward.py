"""An environment whose rewards differ from the first step on, for tests of faults."""

import os
import random
import time

from kempner.rl.environments.protocol import Environment, Task


class Ascii(Environment):
    """The share of ASCII characters; ASCII_REWARD is what one completion in eight does instead."""

    def task(self, number: int, rng: random.Random) -> Task:
        return Task("".join(rng.choices("abcdefgh", k=4)))

    def score(self, task: Task, completion: str) -> float:
        what = os.environ.get("ASCII_REWARD", "")
        if what and hash(completion.encode()[:1]) % 8 == 0:
            misbehave(what)
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
