"""scripts/orchestrate.py as a program: its words, exit codes, and the way it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kempner.config.option import ConfigError
from kempner.extensions.rl.config import InferenceConfig
from kempner.extensions.rl.exchange import ExchangeStart, RolloutExchange
from kempner.extensions.rl.opening import open_parts
from tests import fake_engine, rl_loop
from tests.conftest import ROOT
from tests.fake_engine import TOKEN, FakeEngine
from tests.waiting import LIMIT_S, until

PROGRAM = [sys.executable, str(ROOT / "scripts" / "orchestrate.py")]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    found = FakeEngine()
    yield found
    found.end()


def words(folder: Path, *more: str) -> list[str]:
    rl_loop.config(folder)  # writes the file
    return [
        str(folder / "rl.toml"), f"--run.dir={folder / 'run'}", "--rl.tokenizer=bytes",
        "--rl.group_size=4", "--rl.batch_samples=12", "--rl.max_async=0", "--train.seq_len=96",
        "--train.max_steps=2", "--model.vocab_size=257", "--rl.sampling.max_tokens=8", *more,
    ]  # fmt: skip


def run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, timeout=LIMIT_S)


def test_check_is_light(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", *PROGRAM[1:], *words(tmp_path), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0 and "batch_samples = 12" in done.stdout
    assert not [line for line in done.stderr.splitlines() if line.endswith("| torch")]
    assert not (tmp_path / "run").exists()


def test_bad_input_is_told_at_once(tmp_path: Path) -> None:
    given = words(tmp_path, "--rl.tokenizer=nowhere", "--rl.sampling.max_tokens=90")
    (tmp_path / "rl.toml").write_text(
        '[[rl.env]]\nid = "arithmetik"\n[[rl.env]]\nid = "arithmetic"\n'
    )
    done = run(given)
    assert done.returncode == 2
    for text in ("did you mean arithmetic", "nowhere: has neither tokenizer.json"):
        assert text in done.stderr
    more = ("--rl.sampling.max_tokens=90", "--model.vocab_size=100")
    done = run(words(tmp_path, *more))
    assert done.returncode == 2
    for text in ("exceed train.seq_len = 96", "has 257 tokens"):
        assert text in done.stderr


def test_an_environment_without_any_task_is_told_at_once(tmp_path: Path) -> None:
    for env, said in (
        ("AllHoles", "none of the first 32 tasks can be asked: task 0: KeyError: 'answer'"),
        ("NotMade", "KeyError: 'HOME'"),
    ):
        given = words(tmp_path, "--check")
        file = tmp_path / "rl.toml"
        file.write_text(file.read_text().replace("Digits", env))
        done = run(given)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def problems(folder: Path, *urls: str, **more: object) -> str:
    """Of a check with engines that run already."""
    cfg = rl_loop.config(folder)
    inference = replace(cfg.of(InferenceConfig), urls=urls, **more)  # type: ignore[arg-type]
    try:
        open_parts(cfg.with_section("rl.inference", inference), servers=True)
    except ConfigError as error:
        return "\n".join(error.problems)
    return ""


def test_servers_that_are_no_engines_of_this_run_are_refused(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any node is held. One that is silent may come."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"
        assert "no engine answers: /health: [Errno 111]" in problems(tmp_path, nobody)
    assert f"{engine.url}: /health: 401" in problems(tmp_path, engine.url, nobody)
    monkeypatch.setenv("KEMPNER_SERVE_TOKEN", TOKEN)
    assert problems(tmp_path, engine.url, nobody) == problems(tmp_path, engine.url) == ""
    assert "this vLLM has no /" in problems(tmp_path, engine.url, engine="vllm")
    engine.fault = lambda engine, path: 404
    assert f"{engine.url}: /health: 404" in problems(tmp_path, engine.url)
    engine.fault = lambda engine, path: None
    engine.about["shape"]["dim"] = 32
    assert "its model has model.dim = 32, that of the run 256; serve" in problems(
        tmp_path, engine.url
    )
    engine.about["shape"]["dim"] = 256
    monkeypatch.setattr(fake_engine, "END", 2)
    assert "257 tokens, of which [2] end a text" in problems(tmp_path, engine.url)
    done = run(words(tmp_path, f"--rl.inference.urls=['{nobody}']", "--check"))
    assert done.returncode == 2 and "start it first" in done.stderr
    engine.fault, engine.holder = lambda engine, path: None, "/runs/other#7.0"
    done = run(words(tmp_path, f"--rl.inference.urls=['{engine.url}']", "--check"))
    assert done.returncode == 2 and f"{engine.url}: it has weights of another run" in done.stderr
    assert "/runs/other#7.0, which uses it; end that run, or start another" in done.stderr


def test_a_job_that_is_started_again_waits_for_the_engine_of_another_run(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had the engine before, and bad input would end it for good."""
    monkeypatch.setenv("KEMPNER_SERVE_TOKEN", TOKEN)
    engine.holder = "/runs/other#1"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert "another run, /runs/other#1, which uses it; end" in problems(tmp_path, engine.url)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert problems(tmp_path, engine.url) == ""


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:80",
        "https://x:1",
        "http://x",
        "http://x:y",
        "http://x:1/v1",
        "http://x:1','http://X:01/",
    ],
)
def test_urls_of_engines(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="must be http://HOST:PORT, each once"):
        rl_loop.config(tmp_path, **{"inference.urls": f"['{url}']"})


def test_a_run_and_its_end(tmp_path: Path, engine: FakeEngine) -> None:
    """Batches of engines that run already; SIGTERM is an orderly end."""
    given = words(tmp_path, f"--rl.inference.urls=['{engine.url}']")
    exchange = RolloutExchange(tmp_path / "run")
    exchange.version(0).mkdir(parents=True)
    exchange.publish(0, {"version": 0, "transport": "directory"})
    exchange.begin(ExchangeStart(0, 1, None))
    env = {**os.environ, "KEMPNER_SERVE_TOKEN": TOKEN}
    command = [*PROGRAM, *given]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: exchange.batch(1) is not None, alive=(process,))
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and "ends, as asked" in said
    assert engine.updates == [0]  # a server that runs already has other weights
    assert TOKEN not in said


def test_bench(tmp_path: Path, engine: FakeEngine) -> None:
    engine.delay = 0.01
    exchange = RolloutExchange(tmp_path / "run")
    exchange.engines.mkdir(parents=True)
    exchange.token.write_text(TOKEN)
    (exchange.engines / "engine-0").write_text(engine.url)
    done = run(words(tmp_path, "--bench"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run" / "bench-engines.json").read_text())
    assert found["engines"] == 1 and found["tokens_per_s"] > 0 and found["straggler_loss"] < 1
    assert found["prefix_reuse"] == 1.0  # it counts no tokens of prompts
    assert "lost to stragglers" in done.stdout


def test_bench_of_engines_that_another_run_has_used(tmp_path: Path, engine: FakeEngine) -> None:
    """Whose weights they are does not matter, unless that run uses the engine."""
    given = words(tmp_path, "--bench", f"--rl.inference.urls=['{engine.url}']")
    env = {**os.environ, "KEMPNER_SERVE_TOKEN": TOKEN}

    def bench() -> subprocess.CompletedProcess[str]:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        command = [*PROGRAM, *given]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)

    engine.owner = {"run": "/elsewhere/runs/other"}
    done = bench()
    assert done.returncode == 0 and "lost to stragglers" in done.stdout, done.stderr
    engine.requests.clear()
    engine.owner["leased"] = True
    done = bench()
    assert done.returncode == 2 and "which uses it; end that run" in done.stderr, done.stderr
    assert not engine.requests
    engine.owner["leased"], engine.about["shape"]["dim"] = False, 32
    assert "its model has model.dim = 32" in bench().stderr  # that of a run that has ended
    engine.about["shape"]["dim"] = 256

    engine.owner = {}
    engine.fault = lambda engine, path: 500 if path == "/v1/completions" else None
    done = bench()
    assert done.returncode == 1 and "groups has come back: see" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
