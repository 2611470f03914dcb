"""Reinforcement learning from a Ray program: engines, trainer ranks and the orchestrator are
actors, each running its script in its own process.

    COMMAND="python scripts/ray_rl.py configs/rl/arithmetic.toml" \\
        sbatch --nodes=2 scripts/slurm/ray.sh

Takes the arguments of scripts/rl.py. A lost engine is restarted; when another program fails, the
run ends, and the same command resumes it. scripts/slurm/rl.sh needs no Ray: docs/extensions/rl.md.
"""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(__file__))  # PYTHONSAFEPATH leaves it out
    import first

    first.start_program()  # before anything that may be missing or slow

import contextlib
import os
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import ray

from kempner.config.command_line import parse_command
from kempner.config.option import ConfigError
from kempner.extensions.planner.placement import Placement, engine_words, place_processes
from kempner.extensions.rl.config import DeploymentConfig, InferenceConfig, RlConfig
from kempner.extensions.rl.exchange import EXCHANGE_SILENCE_S, Listener, RolloutExchange
from kempner.extensions.rl.extension import RlExtension
from kempner.jobs.ray.programs import exit_code_of, place_programs, rank_variables_of
from kempner.jobs.system.front_door import run_program
from kempner.train.configure import check_directories, load_config
from kempner.train.help import help_of
from kempner.train.sections import RunConfig

PROGRAM_FOLDER = Path(__file__).resolve().parent
PROGRAM_POLL_S = 5.0
ENGINE = ["-m", "kempner.extensions.rl.engines.vllm_engine"]


def main(argv: list[str]) -> int:
    command = parse_command(argv, {"help": bool})
    if command.flags["help"]:
        print(help_of(argv, RlExtension, __doc__ or ""))
        return 0
    cfg = load_config(command.files, command.overrides, command.problems)
    if not cfg.of(RlConfig).on:
        raise ConfigError("rl.env: is not set; ray_train.py trains without it")
    problems = check_directories(cfg, 0)
    if problems:
        raise ConfigError(problems)
    ray.init()
    gpus = max(int(node["Resources"].get("GPU", 0)) for node in ray.nodes())
    deployment = cfg.of(DeploymentConfig)
    nodes = deployment.num_train_nodes + deployment.num_infer_nodes
    inference = cfg.of(InferenceConfig)
    parts = place_processes(deployment, inference, nodes, max(gpus, 1), 0)  # Ray chooses the GPUs
    attempt = f"ray-{os.environ.get('SLURM_JOB_ID', '0')}-{os.getpid()}-{int(time.time())}"
    os.environ["KEMPNER_ATTEMPT_ID"] = attempt
    exchange = RolloutExchange(cfg.run.dir)
    exchange.engines.mkdir(parents=True)
    # Set the mode before writing the secret: write_text() alone would make it readable for all.
    exchange.token.touch(0o600)
    exchange.token.write_text(secrets.token_hex(24))
    code = 1
    try:
        code = RayRun(cfg, exchange, parts, argv, gpus > 0).follow()
    finally:  # the token must not stay, whatever Ray raises
        shutil.rmtree(exchange.root if code else exchange.root.parent, ignore_errors=True)
    return code


class RayRun:
    """All programs of one attempt. `running` has a future of each one's exit code."""

    def __init__(
        self,
        cfg: RunConfig,
        exchange: RolloutExchange,
        parts: Placement,
        argv: list[str],
        gpu: bool,
    ) -> None:
        self.cfg, self.exchange = cfg, exchange
        self.variables = {"KEMPNER_ATTEMPT_ID": os.environ["KEMPNER_ATTEMPT_ID"]}
        self.tries = [0] * parts.engines
        # Engines first: on a single node they get the first GPUs, as under rl.sh.
        each = cfg.of(InferenceConfig).tp * gpu
        self.engines = place_programs(parts.engines, each) if parts.engines else []
        trainers = place_programs(parts.train_nodes * parts.train_tasks, int(gpu))
        self.running: dict[Any, str] = {}
        for engine in range(parts.engines):
            self.start_engine(engine)
        for actor, variables in zip(trainers, rank_variables_of(trainers), strict=True):
            env = self.variables | variables
            self.running[actor.run.remote([str(PROGRAM_FOLDER / "rl.py"), *argv], env)] = "trainer"
        [self.orchestrator] = place_programs(1, 0)
        words = [str(PROGRAM_FOLDER / "orchestrate.py"), *argv]
        self.running[self.orchestrator.run.remote(words, self.variables)] = "orchestrator"

    def start_engine(self, engine: int) -> None:
        place, inference = self.exchange, self.cfg.of(InferenceConfig)
        words = [str(PROGRAM_FOLDER / "serve.py")] if inference.engine == "kit" else ENGINE
        words = [*words, f"--weights={place.weights.resolve()}", "--host=0.0.0.0", "--port=0"]
        words += [f"--token-file={place.token.resolve()}", f"--publish={place.engines.resolve()}"]
        train = self.cfg.train
        words.append(f"--slots={inference.resolved_slots}")
        words += engine_words(inference, train.seq_len, train.deterministic)
        if inference.engine == "kit":
            words.append(f"--device={self.cfg.distributed.device}")
        env = self.variables | {"KEMPNER_ENGINE": str(engine)}
        self.running[self.engines[engine].run.remote(words, env)] = f"engine {engine}"

    def follow(self) -> int:
        """Wait until trainer and orchestrator have ended; returns their exit code. The last
        evaluation, after the trainer's end, has no time limit."""
        orchestrator = Listener(self.exchange, "orchestrator")
        while self.left("trainer") or self.left("orchestrator"):
            ready, _ = ray.wait(list(self.running), timeout=PROGRAM_POLL_S)
            if self.left("orchestrator") and orchestrator.silent() > EXCHANGE_SILENCE_S:
                message = (
                    f"ray_rl: the orchestrator has done nothing for {EXCHANGE_SILENCE_S:.0f} s: "
                    "ending it"
                )
                print(message, file=sys.stderr)
                return 1
            if not ready:
                continue
            name, code = self.running.pop(ready[0]), exit_code_of(ready[0])
            if name.startswith("engine"):
                self.engine_ended(int(name.split()[1]), code)
            elif code is None:
                print(f"ray_rl: the actor of the {name} is lost", file=sys.stderr)
                return 1
            elif code:
                print(f"ray_rl: the {name} has ended with exit code {code}", file=sys.stderr)
                return code
        for end in [engine.end.remote() for engine in self.engines]:
            with contextlib.suppress(ray.exceptions.RayActorError):  # already lost
                ray.get(end)
        return 0

    def left(self, name: str) -> bool:
        return name in self.running.values()

    def engine_ended(self, engine: int, code: int | None) -> None:
        """Handle the end of an engine. `code`: None if its actor, and so a restart, is lost."""
        self.tries[engine] += 1
        if code is None or self.tries[engine] > self.cfg.of(InferenceConfig).restarts:
            print(f"ray_rl: engine {engine} is not started again", file=sys.stderr)
            return
        print(f"ray_rl: engine {engine} has ended with {code}; starting it again", file=sys.stderr)
        self.start_engine(engine)


if __name__ == "__main__":
    run_program(main)
