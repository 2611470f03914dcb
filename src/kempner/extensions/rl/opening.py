"""Open and check the parts of the orchestrator from the configuration. No torch."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kempner.checkpoint.history import has_checkpoint
from kempner.config.option import ConfigError
from kempner.extensions.hf.families import config_json, model_values
from kempner.extensions.hf.source import CONFIG_FILE
from kempner.extensions.rl.config import InferenceConfig, RlConfig, SamplingConfig
from kempner.extensions.rl.engines.client import (
    Busy,
    EngineLeased,
    KitEngine,
    Lost,
    Rejected,
    RouterEngine,
    Silent,
    VllmEngine,
)
from kempner.extensions.rl.engines.router import Router
from kempner.extensions.rl.environments.opening import Tasks, open_environments
from kempner.extensions.rl.environments.sandbox.scorer import Scorer
from kempner.extensions.rl.exchange import RolloutExchange
from kempner.extensions.rl.orchestrate.conversation import DialogueWriter, open_words
from kempner.extensions.rl.orchestrate.curriculum import Curriculum
from kempner.extensions.serve.arguments import TOKEN_VARIABLE, problem_of
from kempner.jobs import this_job
from kempner.model.config import ModelConfig

if TYPE_CHECKING:
    from kempner.extensions.generate.load import Words
    from kempner.train.sections import RunConfig

CHECKED_TASKS = 32  # tasks of each environment that are checked
QUEUED = 2  # groups that wait in an engine, so that it never runs out of work


def open_parts(cfg: RunConfig, servers: bool = False) -> tuple[dict[str, Tasks], Words]:
    """Open the environments, by label, and the tokenizer. Raises ConfigError with all problems,
    before any node is held; with `servers`, including those of engines that already run."""
    problems: list[str] = []
    rl = cfg.of(RlConfig)
    envs: list[Tasks] = []
    words = None
    try:
        envs = open_environments(rl)
    except ConfigError as error:
        problems += error.problems
    try:
        begun = Path(cfg.run.dir) if has_checkpoint(cfg.checkpoint_dir) else None
        words = open_words(rl.tokenizer, cfg.model.init_from, begun)
    except ConfigError as error:
        problems += error.problems
    if rl.eval_interval and all(env.use == "train" for env in rl.env):
        problems.append(
            f"rl.eval_interval = {rl.eval_interval}: no rl.env is for evaluation; give one "
            'use = "eval" or "both", or leave it out'
        )
    inference, sees = cfg.of(InferenceConfig), cfg.model.max_seq_len
    if inference.engine == "kit" and (
        problem := problem_of(inference.args, cfg.train.seq_len, sees)
    ):
        problems.append(f"rl.inference.args: {problem}")
    if words is not None:
        problems += check_words(cfg, words)
        for env in envs:
            problems += check_prompts(cfg, env, DialogueWriter(words))
        problems += check_servers(cfg, words) if servers and cfg.of(InferenceConfig).urls else []
    if problems:
        # If entries of [[rl.env]] share a fault, report it once.
        raise ConfigError(dict.fromkeys(problems))
    assert words is not None
    return {env.label: env for env in envs}, words


def check_isolation(envs: Iterable[Tasks]) -> None:
    """Raise ConfigError if programs written by a model would run here without isolation; warn if
    the job may run on another host."""
    exposed = [env for env in envs if env.environment.runs_code and not env.cfg.unsafe]
    if not exposed:
        return
    try:
        # Silent, because the problems already tell what the host lacks.
        with contextlib.closing(Scorer(1, lambda _: None)) as scorer:
            scorer.check(exposed)
    except OSError as error:
        raise ConfigError(f"rl.env: {error}") from None
    except ConfigError as error:
        if this_job.on_node() or not this_job.is_here():
            raise
        for problem in error.problems:
            more = "the nodes of a job may have what this host lacks"
            print(f"warning: {problem}; {more}", file=sys.stderr)


def check_words(cfg: RunConfig, words: Words) -> list[str]:
    size, own = words.tokenizer.vocab_size, cfg.model.init_from is None
    # Trained weights never sample ids that the tokenizer lacks; new ones would.
    if own and size < cfg.model.vocab_size:
        return [
            f"model.vocab_size = {cfg.model.vocab_size}: the engines sample only the {size} "
            f"tokens of rl.tokenizer, but the trainer sees all; give --model.vocab_size={size}"
        ]
    if size <= cfg.model.vocab_size:
        return []
    return [
        f"rl.tokenizer: has {size} tokens, and model.vocab_size is {cfg.model.vocab_size}; give "
        "the tokenizer of the weights"
    ]


def check_prompts(cfg: RunConfig, env: Tasks, writer: DialogueWriter) -> list[str]:
    """List problems of the first tasks: each must be writable as tokens, and leave
    room for completions."""
    held_out = env.cfg.use == "eval"
    most, room = cfg.of(SamplingConfig).max_tokens, cfg.train.seq_len
    count = (
        CHECKED_TASKS if env.environment.size is None else min(CHECKED_TASKS, env.environment.size)
    )
    longest, why = 0, ""
    for number in range(count):
        try:
            longest = max(longest, len(writer.prompt(env.task(number, held_out))))
        except ConfigError as error:
            return [f'rl.env "{env.label}": {error}']
        except Exception as error:  # a run counts such tasks, and replaces them
            why = why or f"task {number}: {type(error).__name__}: {error}"
    if not longest:
        return [f'rl.env "{env.label}": none of the first {count} tasks can be asked: {why}']
    if longest + most <= room:
        return []
    return [
        f'rl.env "{env.label}": a prompt of {longest} tokens and rl.sampling.max_tokens = {most} '
        f"exceed train.seq_len = {room}; shorten one of them, or raise train.seq_len"
    ]


def check_servers(cfg: RunConfig, words: Words) -> list[str]:
    """List problems of the engines at rl.inference.urls. A single silent engine may still come; if
    all are silent, they were not started. A restarted job waits for an engine that another run has
    taken meanwhile, as it waits for a lost one."""
    problems, silent = [], []
    # Refusing would end a requeued job as bad input, for a transient problem.
    again = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    run = RolloutExchange(cfg.run.dir).run
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    for url in cfg.of(InferenceConfig).urls:
        engine = make_engine(cfg, url, token, words.ends, run)
        try:
            problem = in_use(engine)
            if not problem:
                problem = other_model(cfg, engine, words)
            elif again:
                problem = ""
        except Silent as error:
            silent.append(f"rl.inference.urls: {url}: no engine answers: {error}; start it first")
            continue
        except (Lost, Rejected) as error:
            problem = f"{error}"
        problems += [f"rl.inference.urls: {url}: {problem}"] if problem else []
    if problems or len(silent) == len(cfg.of(InferenceConfig).urls):
        problems += silent
    return problems


def in_use(engine: KitEngine) -> str:
    """Return which other run uses the engine; "" if none. Raises Lost or Rejected."""
    try:
        engine.version()
    except EngineLeased as error:
        return f"{error}; end that run, or start another engine"
    except Busy:  # without weights, or with those of a run that has ended
        pass
    return ""


def other_model(cfg: RunConfig, engine: KitEngine, words: Words) -> str:
    """Return why it cannot take the run's weights, or why its texts would differ from those of the
    run's tokenizer; "" if neither. vLLM reports neither; it is told which tokens end a text."""
    if isinstance(engine, VllmEngine):
        return ""
    its, fix = engine.about(), "serve the model that the run starts from"
    for key, value in published_shape(cfg.model).items():
        if (found := its.shape.get(key)) != value:
            return f"its model has model.{key} = {found}, that of the run {value}; {fix}"
    if named := cfg.of(RlConfig).tokenizer:
        fix += f", with the tokenizer and the end-of-text tokens of rl.tokenizer = {named}"
    if (its.vocab_size, its.ends) != (words.tokenizer.vocab_size, words.ends):
        return (
            f"the tokenizer of its model has {its.vocab_size} tokens, of which {sorted(its.ends)} "
            f"end a text; that of the run has {words.tokenizer.vocab_size}, and "
            f"{sorted(words.ends)}; {fix}"
        )
    if its.tokenizer != words.fingerprint():
        return f"the token ids of its model mean different text than the run's; {fix}"
    return ""


def published_shape(cfg: ModelConfig) -> dict[str, Any]:
    """Return the shape as engines read it: a config.json omits values without effect, such as the
    bounds of a RoPE scaling that is off."""
    return ModelConfig(**model_values(config_json(cfg, None, "", None), CONFIG_FILE)).shape


def open_curriculum(
    cfg: RunConfig, envs: Mapping[str, Tasks], say: Callable[[str], None]
) -> Curriculum:
    weights = {label: env.cfg.weight for label, env in envs.items() if env.cfg.use != "eval"}

    def key(label: str, number: int) -> str:
        try:
            return envs[label].task(number).key
        except ConfigError:
            raise
        except Exception:  # treated like any other task, and counted
            return ""

    return Curriculum(weights, cfg.of(RlConfig).solve_rate, key, say)


def open_router(
    cfg: RunConfig,
    exchange: RolloutExchange,
    ends: Collection[int],
    say: Callable[[str], None],
    bench: bool = False,
) -> Router:
    """Open a router over the engines of this job, or over those that already run. `ends`: tokens
    that end a text. `bench`: engines are only measured, with any weights."""
    inference, urls = cfg.of(InferenceConfig), cfg.of(InferenceConfig).urls
    # Child processes do not inherit it.
    env_token = os.environ.pop(TOKEN_VARIABLE, "").strip()

    def token() -> str:
        if urls:
            return env_token
        # Read for each engine, because the trainer may make the token after this process starts.
        return exchange.token.read_text().strip() if exchange.token.exists() else ""

    def find() -> Mapping[str, str]:
        if urls:
            return {f"engine-{number}": url.rstrip("/") for number, url in enumerate(urls)}
        paths = sorted(exchange.engines.glob("engine-*"))
        return {path.name: url for path in paths if (url := read_if_there(path))}

    def make(url: str) -> RouterEngine:
        return make_engine(cfg, url, token(), ends, None if bench else exchange.run)

    # No patience with this job's engines: rl.sh restarts them, and ends the run when none is left.
    slots, queued = inference.resolved_slots, QUEUED * cfg.of(RlConfig).group_size
    silence = inference.timeout
    return Router(find, make, slots, queued, say, silence, silence if urls else None)


def make_engine(
    cfg: RunConfig, url: str, token: str, ends: Collection[int], run: str | None = ""
) -> KitEngine:
    if cfg.of(InferenceConfig).engine == "vllm":
        # In asynchronous training, samples depend on timing in spite of their seeds.
        return VllmEngine(url, token, ends, cfg.of(RlConfig).max_async == 0, run)
    return KitEngine(url, token, run)


def read_if_there(path: os.PathLike[str]) -> str:
    """Read a file that may be missing."""
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
