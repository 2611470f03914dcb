"""The environments: what they ask, what they pay, and how they are opened."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kempner.config.option import ConfigError
from kempner.extensions.rl.config import EnvConfig, RlConfig
from kempner.extensions.rl.environments.opening import (
    BUILT_IN,
    Tasks,
    make_environment,
    open_environments,
)
from kempner.extensions.rl.environments.protocol import Environment, Message, Task
from tests.conftest import ROOT

OURS = [name for name in BUILT_IN if name not in ("reasoning_gym", "verifiers")]
OWN = ROOT / "tests/own_environment.py"


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    rows = [{"question": f"{n} + 1 = ?", "answer": f"Add.\n#### {n + 1}"} for n in range(200)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def opened(identifier: str, seed: int = 0, **args: Any) -> Tasks:
    return Tasks(EnvConfig(identifier, args=json.dumps(args)), seed)


def args_of(identifier: str, questions: Path) -> dict[str, Any]:
    return {"file": str(questions)} if identifier == "qa" else {}


def evaluated(env: Tasks, count: int) -> list[str]:
    """The prompts of an evaluation."""
    return [task.key for task in env.evaluation(count) if isinstance(task, Task)]


@pytest.mark.parametrize("identifier", [*OURS, f"{OWN}:Vowels"])
def test_tasks_are_those_of_seed_and_number_and_held_out_ones_are_apart(
    identifier: str, questions: Path
) -> None:
    args = args_of(identifier, questions)
    first, again, other = (opened(identifier, seed, **args) for seed in (0, 0, 1))
    tasks = [first.task(number) for number in range(60)]
    assert tasks == [again.task(number) for number in reversed(range(60))][::-1]
    assert tasks != [other.task(number) for number in range(60)]
    assert [task.number for task in tasks] == list(range(60))
    # Of another seed, too: what one run holds out no other trains on.
    held_out = {key for env in (first, other) for key in evaluated(env, 20)}
    trained = {env.task(number).key for env in (first, other) for number in range(60)}
    assert len(held_out) > 4 and len(trained) > 4 and not held_out & trained
    assert len(set(evaluated(first, 20))) == len(evaluated(first, 20))


def test_each_line_of_a_file_is_asked_once_before_any_is_asked_again(questions: Path) -> None:
    env = opened("qa", file=str(questions))
    held_out = len(env.evaluation(1000))
    assert 5 < held_out < 50
    once = 200 - held_out
    epochs = [
        [env.task(epoch * once + number).prompt for number in range(once)] for epoch in (0, 1)
    ]
    assert len(set(epochs[0])) == once
    assert set(epochs[0]) == set(epochs[1]) and epochs[0] != epochs[1]


class Counted(list[int]):
    """Numbers of tasks, and how often one was looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        self.looks += len(self)
        return super().__iter__()


def test_a_task_of_a_large_file_costs_one_look(tmp_path: Path) -> None:
    """No shuffle of the whole file for each task."""
    lines = (json.dumps({"question": f"{n}?", "answer": str(n)}) for n in range(200))
    (tmp_path / "qa.jsonl").write_text("\n".join(lines))
    args = json.dumps({"file": str(tmp_path / "qa.jsonl")})
    env = Tasks(EnvConfig("qa", args=args), 0)
    part = Counted(env._parts[0])
    env.__dict__["_parts"] = (part, [])
    first = [env.task(number).prompt for number in range(20)]
    assert part.looks == 20 == len(set(first))


SUM = "```python\ndef f(x):\n    return sum(x)\n```"
TEST = "assert f([1, 2]) == 3"
RULES = [("words", "3"), ("ends", "lamp")]


@pytest.mark.parametrize(
    ("identifier", "answer", "completion", "reward"),
    [
        ("arithmetic", "7", "7", 1.0),
        ("arithmetic", "7", " 7\n", 1.0),
        ("arithmetic", "7", "", 0.0),
        ("arithmetic", "7", "8", 0.0),
        ("arithmetic", "7", "７", 0.0),
        ("arithmetic", "7", "7" * 1_000_000, 0.0),
        ("reverse", "cba", "cba", 1.0),
        ("reverse", "cba", "abc", 0.0),
        ("sort", "abc", "abc", 1.0),
        ("copy", "abc", "abd", 0.0),
        ("format", RULES, "Buy one lamp.", 1.0),
        ("format", RULES, "lamp", 0.5),
        ("format", RULES, "", 0.0),
        ("format", RULES, "é " * 100_000, 0.0),
        ("code", TEST, SUM, 1.0),
        ("code", TEST, "f = sum", 1.0),
        ("code", TEST, "Text.\n```\nf = max\n```", 0.0),
        ("code", TEST, "", 0.0),
        ("code", TEST, "f = sum; print('\\ud800é')", 0.0),
        ("code", TEST, "import os; os._exit(0)", 0.0),
        ("code", TEST, "while True: pass", 0.0),
        ("code", TEST, "f = sum; print('x' * 10_000)", 1.0),
        ("guess", 7, "I say 7", 1.0),
        ("guess", 7, "7 or 8", 0.0),
        ("guess", 7, "9" * 100_000, 0.0),
        ("calculator", "56088", "56,088", 1.0),
        ("calculator", "56088", "calc: 123*456", 0.0),
        ("calculator", "56088", "", 0.0),
    ],
)
def test_rewards(identifier: str, answer: Any, completion: str, reward: float) -> None:
    env = make_environment(identifier, '{"seconds": 1.0}' if identifier == "code" else "")
    assert env.score(Task("", answer), completion) == reward


def test_what_is_nearly_right_has_a_part_of_the_reward() -> None:
    env = make_environment("reverse", '{"partial": 0.5}')
    rewards = [env.score(Task("", "cba"), text) for text in ("cba", "cbx", "cb", "xba", "cbaxyz")]
    assert rewards == [1.0, pytest.approx(1 / 3), pytest.approx(1 / 3), 0.0, 0.25]


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("1000", "so it is #### $1,000.00", 1.0),
        ("1000", "\\boxed{1000} of 7", 1.0),
        ("1000", "first 7, then 1000.", 1.0),
        ("1000", "1000 or 7", 0.0),
        ("1000", "", 0.0),
        ("0.5", "#### 1/2", 1.0),
        ("0.5", "#### 1/0", 0.0),
        ("-3", "it is -3", 1.0),
        ("Zürich", "It is\nzürich.", 1.0),
        ("Zürich", "#### Bern", 0.0),
        ("Zürich", "\\boxed{hcirüZ}", 0.0),  # no product of letters
        ("18", "#### 18 eggs in 3 days", 1.0),
        ("18", "#### 3 days for 18 eggs", 0.0),
        (r"\frac{1}{2}", r"so \boxed{\frac{1}{2}}.", 1.0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        ("1/2", r"\boxed{\dfrac{1}{2}}", 1.0),
        ("0.5", r"\boxed{-\frac{1}{2}}", 0.0),
        ("5", r"\boxed{5 \text{ apples}}", 1.0),
        ("5", r"\boxed{5^\circ}", 1.0),
        ("3", r"\boxed{2\sqrt{3}}", 0.0),
        ("12", r"\boxed{3 \cdot 4", 0.0),  # cut
        (r"x^{2}+1", r"first \boxed{7}, then \boxed{x^{2}+1}", 1.0),
        (r"2\sqrt{3}", r"$\boxed{2 \sqrt{3}}$", 1.0),
        (r"2\sqrt{3}", r"\boxed{\sqrt{3}}", 0.0),
        (r"\left(3, \frac{\pi}{2}\right)", r"\boxed{(3,\dfrac{\pi}{2})}", 1.0),
        (r"Thus \boxed{\frac{a}{b}} is it.", r"\boxed{\frac{a}{b}}", 1.0),  # a solution
        ("-3", "#### \u22123", 1.0),
        ("-3", "it is \u22123", 1.0),
        ("-0.5", r"\boxed{-\dfrac12}", 1.0),
        ("10,000", r"\boxed{10{,}000}", 1.0),
        ("10000", r"\boxed{10\,000}", 1.0),
        ("10000", "#### 10 000", 1.0),
        ("1234", "#### 1,234", 1.0),
        ("12", "1,2", 0.0),
        ("10000", "#### 100,00", 0.0),
        ("1234", r"\boxed{(1,234)}", 0.0),  # a pair
        ("(1,234)", r"\boxed{(1, 234)}", 1.0),
        ("1000", "1e3", 1.0),
        ("1000", "#### 1.0e3", 1.0),
        ("1", "#### 1e999999999", 0.0),  # takes no time
        ("7/2", r"\boxed{3\frac{1}{2}}", 1.0),
        ("-3.5", r"\boxed{-3\frac12}", 1.0),
        ("12", r"\boxed{12 \text{ cm}^2}", 1.0),
        ("Evelyn", r"\boxed{\text{Evelyn}}", 1.0),
        (r"\text{Evelyn}", r"\boxed{Evelyn}", 1.0),
        ("A", r"\boxed{\text{(A)}}", 1.0),
        ("B", r"\boxed{\text{(A)}}", 0.0),
        ("7", r"\boxed{x=7}", 1.0),
        ("50", r"\boxed{50\%}", 1.0),
        ("2024", "In 2024-05 we had 2024", 1.0),
        ("5", "#### --5", 0.0),
        ("5", "so **5**", 1.0),
        ("5", "it is 5,", 1.0),
        ("2", "2.0000000001", 0.0),
        ("18", "#### 18 (eggs)", 1.0),
        ("1", "9" * 100_000, 0.0),
    ],
)
def test_answers_in_a_file(tmp_path: Path, answer: str, completion: str, reward: float) -> None:
    path = tmp_path / "qa.jsonl"
    answer = answer if "boxed" in answer else f"Because.\n#### {answer}"
    path.write_text(json.dumps({"prompt": "?", "answer": answer}) + "\n\n")
    env = make_environment("qa", json.dumps({"file": str(path)}))
    task = Tasks(EnvConfig("qa", args=json.dumps({"file": str(path), "held_out": 1})), 0).task(
        0, held_out=True
    )
    assert env.score(task, completion) == reward


def test_formulas_are_the_same_in_other_words(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    path = tmp_path / "qa.jsonl"
    for answer, completion, reward in [
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1.0),
        ("x^2+1", r"\boxed{1+x^{2}}", 1.0),
        ("x^2+1", r"\boxed{x^2-1}", 0.0),
        ("4", r"\boxed{\sqrt{16}}", 1.0),
        ("4", r"\boxed{\sqrt{", 0.0),
        ("1000", r"\boxed{10^3}", 1.0),
        ("x=7", r"\boxed{7}", 1.0),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1.0),
        ("(1,2)", r"\boxed{(2,1)}", 0.0),
        ("1", r"\boxed{\sum_{i=1}^{1000000000} 1/i}", 0.0),  # is not left out
    ]:
        path.write_text(json.dumps({"prompt": "?", "answer": answer}))
        env = make_environment("qa", json.dumps({"file": str(path)}))
        assert env.score(Task("?", answer), completion) == reward, completion


def test_tests_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "programs.jsonl"
    one = {"prompt": "Write one().", "tests": "assert one() == 1"}
    two = {"prompt": "Write sum().", "tests": "assert sum() == 1", "entry_point": "sum"}
    bad = {"prompt": "Write f().", "tests": "import sys\nf(sys)"}
    path.write_text("\n".join(map(json.dumps, (one, two, bad))))
    env = make_environment("code", json.dumps({"file": str(path)}))
    tasks = [env.task(number, Random()) for number in range(3)]
    assert env.score(tasks[0], "def one(): return 1") == 1.0
    assert env.score(tasks[1], "def sum(): return 1") == 1.0
    with pytest.raises(BaseException, match=f"row 3 of {path}: tests: .* handed a module"):
        env.score(tasks[2], "def f(x): pass")


def talk(env: Environment, task: Task, turns: Sequence[str]) -> list[Message]:
    messages = task.messages
    for number, text in enumerate(turns, 1):
        messages.append({"role": "assistant", "content": text})
        reply = env.reply(task, messages)
        assert (reply is None) == (number == len(turns))
        if reply:
            messages.append({"role": reply.role, "content": reply.content})
    return messages


def test_turns() -> None:
    guess, task = make_environment("guess", ""), Task("Guess.", 5)
    messages = talk(guess, task, ["hm", "2", "7", "5"])
    assert [m["content"].strip() for m in messages[2::2]] == [
        "A number, please.",
        "Higher.",
        "Lower.",
    ]
    assert guess.judge(task, messages) == 1.0
    calculator, task = make_environment("calculator", ""), Task("What?", "56088")
    messages = talk(calculator, task, ["calc: 123*456", "calc: __import__('os')", "56088"])
    assert messages[2]["content"] == "\n56088\n" and "only numbers" in messages[4]["content"]
    assert calculator.judge(task, messages) == 1.0
    for wrong in ("1/0", "1e308*10", "1e308*10-1e308*10", "True+1"):
        answer = calculator.reply(task, [*messages, {"content": f"calc: {wrong}"}])
        assert answer is not None and "error" in answer.content


@pytest.mark.parametrize(
    ("identifier", "args", "said"),
    [
        ("arithmetik", "", "did you mean arithmetic?"),
        ("arithmetic", '{"digts": 2}', "unknown argument digts"),
        ("arithmetic", '{"below": "9"}', 'below must be an int, not "9"'),
        ("arithmetic", '{"below": true}', "below must be an int, not true"),
        ("arithmetic", '{"below": 1}', "below must be at least 2"),
        ("arithmetic", '{"operations": "^"}', "operations must be some of +-*"),
        ("arithmetic", "[1]", "args must be a JSON object"),
        ("arithmetic", "{", "args is not JSON"),
        ("format", '{"instructions": 9}', "instructions must be from 1 to 6"),
        ("qa", "", "the argument file is required"),
        ("qa", '{"file": "/no/such"}', "/no/such: No such file or directory"),
        ("/no/such.py:Env", "", "No such file or directory"),
        (f"{OWN}:Vowel", "", "has no class Vowel that derives from Environment"),
        (f"{ROOT}/README.md:Env", "", "is not a .py file"),
    ],
)
def test_what_is_wrong_is_one_error(identifier: str, args: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        open_environments(RlConfig(env=(EnvConfig(identifier, args=args),)))
    assert len(error.value.problems) == 1
    assert said in error.value.problems[0] and identifier in error.value.problems[0]


def test_environments_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"prompt": "a"}\n')
    twice = EnvConfig("copy")
    none = EnvConfig("copy", name="short", args='{"length": 1, "alphabet": 2}', use="both")
    with pytest.raises(ConfigError) as error:
        bad = EnvConfig("qa", args=json.dumps({"file": str(path)}))
        open_environments(RlConfig(env=(twice, twice, bad, none)))
    said = "\n".join(error.value.problems)
    assert "one.jsonl, line 1: must be a JSON object with question or prompt, and answer" in said
    assert 'two are called "copy"' in said
    assert 'rl.env "short": no task is held out for evaluation' in said
    assert len(error.value.problems) == 3


@pytest.mark.parametrize(
    ("identifier", "row", "said"),
    [
        ("qa", '{"question": 5, "answer": "1"}', "question must be a string or"),
        ("qa", '{"question": [], "answer": "1"}', "question must be a string or"),
        ("qa", '{"question": [{"role": "user"}], "answer": "1"}', "question must be a string or"),
        ("qa", '{"question": "a", "answer": null}', "answer must be a string or a number"),
        ("qa", '{"question": "a\\ud800", "answer": "1"}', "is not Unicode text"),
        ("code", '{"prompt": "a", "tests": ["assert f()"]}', "tests must be a string"),
        ("code", '{"prompt": "a", "tests": "assert f("}', "tests are not Python: "),
    ],
)
def test_a_row_that_is_none_is_named(tmp_path: Path, identifier: str, row: str, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "a", "answer": 1, "tests": "assert 1"}}\n\n{row}\n')
    env = EnvConfig(identifier, args=json.dumps({"file": str(path)}))
    with pytest.raises(ConfigError) as error:
        open_environments(RlConfig(env=(env,)))
    (problem,) = error.value.problems
    assert f"{path}, line 3: " in problem and said in problem


NAMED = """
from typing import NamedTuple
from kempner.extensions.rl.environments.protocol import Environment, Task

class Answer(NamedTuple):
    file: str

class One(Environment):
    def task(self, number, rng):
        return Task(f"{rng.random()}", Answer(__file__))

class Two(One):
    pass
"""


def test_files_of_any_name(tmp_path: Path) -> None:
    """Two classes of one file, two files of one name, which is one of a module of Python's."""
    import queue

    entries = []
    for folder, name in (("a", "One"), ("a", "Two"), ("b", "One")):
        path = tmp_path / folder / "queue.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(NAMED)
        entries.append(EnvConfig(f"{path}:{name}", name=f"{folder}{name}"))
    for env in open_environments(RlConfig(env=tuple(entries))):
        task = env.task(0)
        assert pickle.loads(pickle.dumps(task)) == task and env.cfg.id.startswith(task.answer.file)
    assert sys.modules["queue"] is queue


def test_an_own_environment_and_the_page_that_shows_it() -> None:
    env = make_environment(f"{OWN}:Vowels", '{"length": 3}')
    assert env.score(Task("Vowels in abe: ", 2), " 2 ") == 1.0
    assert env.score(Task("Vowels in abe: ", 2), "3") == 0.0
    code = OWN.read_text().split('"""\n\n', 1)[1].strip()
    assert len(code.splitlines()) <= 15 and code in (ROOT / "docs/extensions/rl.md").read_text()


@pytest.mark.parametrize("name", ["arithmetic", "mixed"])
def test_configurations_that_need_no_file_open(name: str) -> None:
    command = ["scripts/orchestrate.py", f"configs/rl/{name}.toml", "--check"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_all_prompts_are_evaluated_where_that_is_asked_for() -> None:
    """Also those that another entry trains on."""
    args = '{"below": 5, "held_out": 1}'
    every = Tasks(EnvConfig("arithmetic", name="sums", args=args, use="eval"), 0)
    every.check()
    assert len(every.evaluation(64)) == 25
    trained = Tasks(EnvConfig("arithmetic", args='{"below": 5}'), 0)
    assert {trained.task(n).key for n in range(200)} < set(evaluated(every, 64))
