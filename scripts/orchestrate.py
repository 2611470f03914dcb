"""Turn tasks into batches for scripts/rl.py: prompts to the engines, rewards, groups, packing.

    python scripts/orchestrate.py CONFIG.toml [MORE.toml ...] [--section.key=value ...]

  --help       this list
  --check      print the resolved configuration as TOML and exit
  --bench      measure the engines alone, with the tasks of the configuration

scripts/slurm/rl.sh starts it beside the trainer and the engines; all three take the same arguments.
SIGTERM ends it: the next one repeats its open requests. Exit code 0 after any orderly end, 1 if it
cannot continue, 2 on bad input.
"""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(__file__))  # PYTHONSAFEPATH leaves it out
    import first

    first.start_program()  # before anything that may be missing or slow

import contextlib
import os
import sys
import threading
import time

from kempner.config.command_line import parse_command
from kempner.config.loading import to_toml
from kempner.config.option import ConfigError
from kempner.extensions.generate.load import Words
from kempner.extensions.rl.config import RlConfig
from kempner.extensions.rl.engines.client import Closed, Lost, NoEngines, Rejected
from kempner.extensions.rl.environments.opening import Tasks
from kempner.extensions.rl.environments.sandbox.scorer import NoRewards, Scorer
from kempner.extensions.rl.exchange import RolloutExchange
from kempner.extensions.rl.extension import RlExtension
from kempner.extensions.rl.opening import check_isolation, open_curriculum, open_parts, open_router
from kempner.extensions.rl.orchestrate.batches import Failed
from kempner.extensions.rl.orchestrate.conversation import DialogueWriter
from kempner.extensions.rl.orchestrate.measure import Bench
from kempner.extensions.rl.orchestrate.orchestrator import Orchestrator
from kempner.extensions.rl.orchestrate.rollout import RolloutSampler
from kempner.jobs.system.front_door import run_program
from kempner.jobs.system.signals import leave_event
from kempner.train.configure import check_directories, load_config
from kempner.train.help import help_of
from kempner.train.sections import RunConfig

ORCHESTRATE_FLAGS = {"help": bool, "check": bool, "bench": bool}


def main(argv: list[str]) -> int:
    stop = leave_event()
    command = parse_command(argv, ORCHESTRATE_FLAGS)
    if command.flags["help"]:
        print(help_of(argv, RlExtension, __doc__ or ""))
        return 0
    cfg = load_config(command.files, command.overrides, command.problems)
    if not cfg.of(RlConfig).on:
        raise ConfigError("rl.env: is not set; scripts/train.py trains without it")
    problems = check_directories(cfg, 0)
    if problems:
        raise ConfigError(problems)
    envs, words = open_parts(cfg, servers=command.flags["check"] or command.flags["bench"])
    if command.flags["check"]:
        check_isolation(envs.values())
        print(to_toml(cfg), end="")
        return 0
    return run_orchestrator(cfg, envs, words, stop, command.flags["bench"])


def run_orchestrator(
    cfg: RunConfig, envs: dict[str, Tasks], words: Words, stop: threading.Event, bench: bool
) -> int:
    judges = max(2, len(os.sched_getaffinity(0)))  # one for each core of this task
    exchange, scorer = (
        RolloutExchange(cfg.run.dir),
        NoRewards() if bench else Scorer(judges, print_line),
    )
    scorer.check([*envs.values()])
    router = open_router(cfg, exchange, words.ends, print_line, bench)
    sampler = RolloutSampler(cfg, envs, DialogueWriter(words), router, scorer, print_line)
    curriculum = open_curriculum(cfg, envs, print_line)
    router.start()
    try:
        if bench:
            Bench(cfg, sampler, router, curriculum, stop).run()
        else:
            Orchestrator(cfg, exchange, envs, curriculum, sampler, router, print_line, stop).run()
            print_line("done")
        router.release()
        return 0
    except Closed:
        print_line("ends, as asked")
        return 0
    except (Failed, NoEngines, Rejected, Lost, ValueError, OSError) as error:
        print_line(f"error: {error}")
        return 1
    finally:
        router.close()
        scorer.close()


def print_line(text: str) -> None:
    with contextlib.suppress(OSError):  # the log may be on a full disk
        print(f"{time.strftime('%H:%M:%S')} orchestrate: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    # os._exit: threads waiting for an engine or a reward would keep the process alive.
    run_program(main, leave=os._exit)
