"""The environment of docs/extensions/rl.md."""

from kempner.extensions.rl.environments.protocol import Environment, Task


class Vowels(Environment):
    def __init__(self, length: int = 5):
        self.length = length

    def task(self, number, rng):
        word = "".join(rng.choices("abcdefghi", k=self.length))
        return Task(f"Vowels in {word}: ", answer=sum(letter in "aei" for letter in word))

    def score(self, task, completion):
        return float(completion.strip() == str(task.answer))
