"""Evaluate a checkpoint with lm-evaluation-harness (extra `eval`), without exporting it.

    python scripts/eval.py runs/7b --tasks hellaswag,arc_easy
    python scripts/eval.py runs/7b@1000 --tasks mine --include-path tasks/ --limit 100
    python scripts/eval.py some-model/ --tasks mine           a directory in Hugging Face format
    sbatch scripts/slurm/eval.sh runs/7b --tasks hellaswag    follows the newest checkpoint

Prints the harness's table. The figures of a run are added to its metrics.jsonl as eval/TASK/METRIC
of the step, even while it trains. Retention does not delete a checkpoint while it is read. The
tasks' data sets come from the hub's cache or from files: on a node without network set
HF_HUB_OFFLINE=1. Exit code 0, or 2 on bad input.
"""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(__file__))  # PYTHONSAFEPATH leaves it out
    import first

    first.start_program()  # before anything that may be missing or slow

import argparse
import os
import signal
import time
from pathlib import Path
from typing import NoReturn

from kempner.checkpoint import named
from kempner.checkpoint.history import latest_checkpoint
from kempner.config.command_line import argument_parser
from kempner.config.option import ConfigError
from kempner.extensions.hf.source import held_weights, run_of
from kempner.jobs import slurm
from kempner.jobs.records import results
from kempner.jobs.records.run_history import is_run, load_history
from kempner.jobs.records.state import LIVE_STATES
from kempner.jobs.system.directories import Kind, directory_kind
from kempner.jobs.system.files import step_of_name, write_atomic
from kempner.jobs.system.front_door import run_program

NEW_CHECKPOINT_POLL_S = 10.0


def main(argv: list[str]) -> None:
    options = parse(argv)
    if options.check:
        return
    if options.follow:
        follow_checkpoints(options)
    else:
        evaluate_once(options, options.model)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argument_parser("eval.py", __doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="RUN[@STEP], a checkpoint, or a Hugging Face directory")
    add("--tasks", required=True, help="lm-eval tasks, separated by commas")
    include = "directory of your own tasks, as YAML files; may be given several times"
    add("--include-path", action="append", default=[], metavar="DIR", help=include)
    add("--num-fewshot", type=int, metavar="N", help="examples before each question")
    add("--limit", type=int, metavar="N", help="only the first N documents of each task")
    add("--batch", type=int, default=8, help="texts at a time (default: 8)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to run the model")
    follow = "evaluate each checkpoint that becomes the newest one, until the run has ended"
    add("--follow", action="store_true", help=follow)
    add("--check", action="store_true", help="only check the command line")
    options = parser.parse_args(argv)
    for name in ("limit", "batch"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} {value}: must be at least 1")
    for path in options.include_path:
        if not Path(path).is_dir():
            parser.error(f"--include-path {path}: no such directory")
    if options.follow and not Path(options.model).is_dir():
        parser.error(f"--follow {options.model}: no such directory; name a run")
    kind = directory_kind(options.model)
    if options.follow and kind not in (Kind.RUN, Kind.STARTED, Kind.EMPTY):
        parser.error(f"--follow: {options.model} is {kind.value}; name a run")
    return options


def evaluate_once(options: argparse.Namespace, name: str) -> None:
    """Evaluate one model, and record the figures if it is a checkpoint of a run."""
    # The imports below take ten seconds; a wrong name is reported before them.
    with held_weights(name):
        pass
    try:
        from kempner.extensions.generate.harness import HarnessModel, run_harness
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        fix = ".venv/bin/pip install -c constraints.txt -e '.[eval]'"
        raise ConfigError(f"the package lm-eval is not installed; run {fix}") from None
    from kempner.extensions.generate.load import load_model_and_tokenizer

    with held_weights(name) as source:
        # By path: the newest checkpoint of this name may have changed.
        loaded = load_model_and_tokenizer(
            str(source.path) if source.is_checkpoint else name, options.device
        )
    print(f"{loaded.about}, {loaded.model.cfg.count_parameters():,} parameters", flush=True)
    model = HarnessModel(loaded, options.batch)
    tasks = options.tasks.split(",")
    figures, table = run_harness(
        model, tasks, options.include_path, options.num_fewshot, options.limit
    )
    print(table, flush=True)
    if not source.is_checkpoint:
        return
    step, run_dir = step_of_name(source.path.name), run_of(source.path)
    if step is not None and is_run(run_dir):
        results.record_result(run_dir, step, options.tasks, figures)
        print(f"recorded as step {step} in {run_dir / 'metrics.jsonl'}", flush=True)


def follow_checkpoints(options: argparse.Namespace) -> None:
    """Evaluate the newest checkpoint each time a new one appears; the last one is never missed,
    because it is looked up after the run has ended."""
    run_dir = Path(options.model)
    leave_on_request(run_dir)
    while True:
        run = load_history(run_dir, slurm.my_jobs())
        starts = run.attempts or run.refusals
        is_over = starts and run.state.word not in LIVE_STATES  # without one it has not started yet
        checkpoint = newest_complete(run_dir)
        done = results.evaluated_steps(run_dir, options.tasks)
        if checkpoint is not None and step_of_name(checkpoint.name) not in done:
            evaluate_once(options, options.model)  # may be newer by now
        elif is_over:
            break
        else:
            results.add_without_trainer(run_dir)
            time.sleep(NEW_CHECKPOINT_POLL_S)
    results.add_without_trainer(run_dir)
    say_state(run_dir, "done")


def newest_complete(run_dir: Path) -> Path | None:
    try:
        return latest_checkpoint(named.find_checkpoint(str(run_dir)).parent)
    except ConfigError:  # none yet
        return None


def leave_on_request(run_dir: Path) -> None:
    """End when the batch script asks near the job's time limit: only the running evaluation is
    lost, and the next attempt repeats it."""

    def leave(number: int, _: object) -> NoReturn:
        say_state(run_dir, "interrupted")
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGUSR1, leave)


def say_state(run_dir: Path, state: str) -> None:
    """Record for eval.sh how this attempt has ended."""
    attempt = os.environ.get("KEMPNER_ATTEMPT_ID")
    if attempt:
        record = f'{{"state": "{state}", "attempt_id": "{attempt}"}}\n'
        write_atomic(run_dir / "eval" / "status.json", record)


if __name__ == "__main__":
    run_program(main)
