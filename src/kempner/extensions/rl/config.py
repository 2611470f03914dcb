"""The [rl] and [rl.*] sections. No torch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kempner.config.option import REQUIRED_OPTION, ConfigError, option
from kempner.data.config import FAKE
from kempner.extensions.bench.config import BenchConfig
from kempner.extensions.generate.config import Sampling
from kempner.extensions.hf.families import family_of
from kempner.extensions.lowcomm.config import LowcommConfig
from kempner.extensions.preference.config import PreferenceConfig
from kempner.extensions.rl.engines.client import SLOTS

if TYPE_CHECKING:
    from kempner.train.sections import RunConfig


@dataclass(frozen=True)
class EnvConfig:
    """One entry of [[rl.env]]."""

    id: str = option(
        REQUIRED_OPTION, "a built-in environment, or FILE.py:CLASS; see docs/extensions/rl.md"
    )
    name: str = option("", "its name in metrics; unset: id")
    args: str = option("", 'its arguments as a JSON object, such as {"below": 100}')
    weight: float = option(1.0, "share of the prompts, relative to all weights", minimum=0.0)
    use: str = option(
        "train", "train on its tasks, or only evaluate", choices=("train", "eval", "both")
    )
    timeout: float = option(10.0, "seconds that one reward may take", minimum=0.1)
    memory: int = option(1024, "MiB that the process of a reward may take", minimum=64)
    unsafe: bool = option(
        False,
        "run programs of the model even where the kernel cannot isolate them: they can then delete "
        "your files and use the network",
    )

    @property
    def label(self) -> str:
        return self.name or self.id


@dataclass(frozen=True)
class RlConfig:
    env: tuple[EnvConfig, ...] = option(
        (), "where prompts and rewards come from; [[rl.env]] in a file; unset: no RL"
    )
    tokenizer: str = option(
        "", "its directory, or bytes; unset: that of the weights in model.init_from"
    )
    group_size: int = option(8, "samples of each prompt", minimum=2)
    batch_samples: int | None = option(64, "samples of a step, over all ranks", minimum=2)
    batch_tokens: int | None = option(
        None, "sampled tokens of a step, at least; replaces batch_samples", minimum=1
    )
    max_async: int = option(
        16, "versions by which the weights of a rollout may lag behind those it trains", minimum=0
    )
    refill: float = option(
        4.0,
        "prompts that may be asked for one step, as a multiple of those in its batch, to replace "
        "groups whose rewards are all the same",
        minimum=1.0,
    )
    solve_rate: tuple[float, float] = option(
        (0.0, 1.0),
        "prompts whose mean reward was outside these bounds are not asked again",
        minimum=0.0,
        maximum=1.0,
    )
    eval_interval: int = option(0, "steps between evaluations; 0: none", minimum=0)
    eval_samples: int = option(64, "tasks of each environment in an evaluation", minimum=1)
    weights: str = option(
        "directory",
        "how engines get new weights: by files in the run directory, or straight from the ranks "
        "of the trainer",
        choices=("directory", "direct"),
    )
    seed: int = option(0, "seed of tasks and samples", minimum=0)

    @property
    def on(self) -> bool:
        return bool(self.env)


@dataclass(frozen=True)
class DeploymentConfig:
    num_train_nodes: int = option(1, "nodes that train", minimum=1)
    num_infer_nodes: int = option(0, "nodes with engines; 0: one node has both", minimum=0)
    gpus_per_node: int | None = option(
        None, "tasks of a node, one for each GPU; unset: as Slurm gives them", minimum=1
    )
    num_train_gpus: int = option(1, "on one node: its tasks that train", minimum=1)
    num_infer_gpus: int = option(
        1, "on one node: its tasks with engines, the first ones", minimum=0
    )


@dataclass(frozen=True)
class SamplingConfig:
    temperature: float = option(1.0, "of the samples, and of the trainer", minimum=0.01)
    top_p: float = option(
        1.0, "only the most likely tokens that together have this probability", maximum=1.0
    )
    top_k: int | None = option(None, "only the k most likely tokens", minimum=1)
    min_p: float = option(
        0.0, "only tokens with at least this fraction of the largest probability", maximum=1.0
    )
    max_tokens: int = option(256, "of a completion, or of each turn", minimum=1)
    stop: tuple[str, ...] = option((), "a completion ends before the first of these strings")

    def sampling(self, seed: int) -> Sampling:
        return Sampling(
            self.temperature, self.top_k, self.top_p, self.min_p, seed, self.max_tokens, self.stop
        )


@dataclass(frozen=True)
class LossConfig:
    name: str = option(
        "grpo",
        "grpo, dapo: the clipped ratio, normalised by each group's deviation or not; tis: "
        "importance weights, truncated at `is_cap`; masked: the same, without tokens whose "
        "probability has moved by more than `mask` in the direction of the advantage",
        choices=("grpo", "dapo", "tis", "masked"),
    )
    clip_low: float = option(0.2, "lower clip bound: 1 - this", minimum=0.0, maximum=1.0)
    clip_high: float = option(0.28, "upper clip bound: 1 + this", minimum=0.0)
    dual_clip: float = option(
        3.0, "name = grpo, dapo: bound of the ratio where the advantage is negative", minimum=1.0
    )
    is_cap: float = option(
        2.0, "name = tis, masked: largest importance weight of a token", minimum=1.0
    )
    mask_truncated: bool = option(
        False, "samples that were cut at max_tokens get advantage 0 (overlong filtering)"
    )
    mask: float = option(0.2, "name = masked: the most that a probability may move", minimum=0.0)
    kl: float = option(0.0, "weight of the squared log ratio to the sampler", minimum=0.0)
    length_penalty: float = option(
        0.0, "subtracted from the reward at max_tokens; in proportion if shorter", minimum=0.0
    )


@dataclass(frozen=True)
class InferenceConfig:
    engine: str = option("kit", "scripts/serve.py, or vLLM", choices=("kit", "vllm"))
    tp: int = option(1, "GPUs of an engine; over 1 only with vLLM", minimum=1)
    slots: int | None = option(
        None,
        "samples that an engine generates at a time; unset: 16, for which the kit's engine takes "
        "memory at its start, or 128 with vLLM, which takes what it finds",
        minimum=1,
    )
    urls: tuple[str, ...] = option(
        (), "running engines to use instead of any in this job, with KEMPNER_SERVE_TOKEN"
    )
    restarts: int = option(3, "restarts in a row of an engine that was lost", minimum=0)
    timeout: float = option(
        600.0,
        "seconds after which an engine that has work but generates no token is lost",
        minimum=1.0,
    )
    args: tuple[str, ...] = option((), "more arguments for the engine's command line")

    @property
    def resolved_slots(self) -> int:
        return SLOTS[self.engine] if self.slots is None else self.slots


def rl_problems(cfg: RunConfig) -> list[str]:
    """List options that cannot be combined with RL, one message each, with a remedy."""
    rl, inference, preference = cfg.of(RlConfig), cfg.of(InferenceConfig), cfg.of(PreferenceConfig)
    if not rl.on:
        return []
    problems = _sizes(cfg)
    problems += _trainer_problems(cfg)
    default = type(cfg.train)()
    axes, loss = cfg.distributed, cfg.of(LossConfig)
    others = {
        f"distributed.pp = {axes.pp}": axes.pp > 1,
        f"distributed.cp = {axes.cp}": axes.cp > 1,
        "distributed.fsdp_cpu_offload": axes.fsdp_cpu_offload,
        "train.compile_scope = model": cfg.train.compile_scope == "model",
        f"preference.loss = {preference.loss}": preference.loss != "none",
        "optimizer.name = schedule_free": cfg.optimizer.name == "schedule_free",
        "lowcomm": cfg.of(LowcommConfig).on,
        f"run.fork = {cfg.run.fork}": bool(cfg.run.fork),
        # Parameters are sent as stored: a base with separate adapters, not merged.
        f"lora.rank = {cfg.lora.rank} with rl.weights = direct": (
            cfg.lora.rank > 0 and rl.weights == "direct"
        ),
        "rl.weights = direct with rl.inference.engine = vllm": (
            rl.weights == "direct" and inference.engine == "vllm"
        ),
        # Ranks admit whoever has the attempt's token; running servers already have their own.
        "rl.weights = direct with rl.inference.urls": (
            rl.weights == "direct" and bool(inference.urls)
        ),
        f"rl.inference.tp = {inference.tp} with rl.inference.engine = kit": (
            inference.tp > 1 and inference.engine == "kit"
        ),
        "rl.sampling.stop with rl.inference.engine = vllm": (  # it has no tokenizer here
            bool(cfg.of(SamplingConfig).stop) and inference.engine == "vllm"
        ),
    }
    refused = [what for what, is_on in others.items() if is_on]
    problems += [f"{what}: is not built for [rl]; leave it out" for what in refused]
    batch = "the batch follows from rl.batch_samples or rl.batch_tokens"
    useless = {
        f"train.global_batch = {cfg.train.global_batch}: {batch}": (
            # complete() has set it to rl.batch_samples.
            cfg.train.global_batch not in (default.global_batch, rl.batch_samples)
        ),
        f"train.global_batch_tokens: {batch}": cfg.train.global_batch_tokens is not None,
        f"train.batch_ramp: {batch}": cfg.train.batch_ramp is not None,
        "train.seq_len_ramp: samples are never cut": cfg.train.seq_len_ramp is not None,
        "data: a run with [[rl.env]] learns from rewards, not from data": (
            bool(cfg.data.sources or cfg.data.phases) or cfg.data.dataset_path not in ("", FAKE)
        ),
        "eval.interval: validates on data; rl.eval_interval evaluates on tasks": (
            cfg.eval.interval > 0
        ),
        "bench.data = real: rollouts are made by a whole run": cfg.of(BenchConfig).data == "real",
    }
    useless |= _of_other_losses(loss)
    return problems + [f"{what}; leave it out" for what, is_on in useless.items() if is_on]


def _of_other_losses(loss: LossConfig) -> dict[str, bool]:
    """Map each option of another loss to whether it is given."""
    return {
        f"rl.loss.mask = {loss.mask}: is for rl.loss.name = masked": (
            loss.name != "masked" and loss.mask != LossConfig().mask
        ),
        f"rl.loss.is_cap = {loss.is_cap}: is for rl.loss.name = tis and masked": (
            loss.name in ("grpo", "dapo") and loss.is_cap != LossConfig().is_cap
        ),
        f"rl.loss.dual_clip = {loss.dual_clip}: is for rl.loss.name = grpo and dapo": (
            loss.name in ("tis", "masked") and loss.dual_clip != LossConfig().dual_clip
        ),
    }


def _trainer_problems(cfg: RunConfig) -> list[str]:
    """List problems of options that require a loss on data."""
    problems, sigma = [], cfg.resilience.spike_sigma
    if cfg.train.z_loss:
        problems.append(f"train.z_loss = {cfg.train.z_loss}: is not built for rl.env; leave it out")
    if cfg.freeze.stages:
        problems.append("freeze.stages: not built for rl.env; leave one of the two out")
    if sigma is not None:
        problems.append(
            f"resilience.spike_sigma = {sigma}: is not built for rl.env, whose loss has no level; "
            "leave it out"
        )
    return problems


def _sizes(cfg: RunConfig) -> list[str]:
    problems, rl, sampling = [], cfg.of(RlConfig), cfg.of(SamplingConfig)
    if rl.batch_tokens is None and rl.batch_samples is None:
        problems.append("rl.batch_samples = none: give it, or rl.batch_tokens")
    if rl.batch_tokens is None and (rl.batch_samples or 0) % rl.group_size:
        near = max(rl.group_size, (rl.batch_samples or 0) // rl.group_size * rl.group_size)
        problems.append(
            f"rl.batch_samples = {rl.batch_samples}: must be a multiple of rl.group_size = "
            f"{rl.group_size}, such as --rl.batch_samples={near}"
        )
    trained = [env.weight for env in rl.env if env.use != "eval"]
    if not trained:
        problems.append('rl.env: none is for training; give one use = "train" or "both"')
    elif not sum(trained):
        problems.append(
            "rl.env: the weights of those used for training sum to 0; give one a weight over 0"
        )
    if sampling.max_tokens >= cfg.train.seq_len:
        problems.append(
            f"rl.sampling.max_tokens = {sampling.max_tokens}: with a prompt of one token this "
            f"exceeds train.seq_len = {cfg.train.seq_len}, a row of the trainer; give less, or "
            "longer rows"
        )
    if rl.solve_rate[0] > rl.solve_rate[1]:
        problems.append(
            f"rl.solve_rate = {list(rl.solve_rate)}: the lower bound comes first; swap them"
        )
    try:
        family_of(cfg.model)
        if cfg.model.router_bias:
            problems.append(
                "model.router_bias: the biases of routers move with the weights, and are not sent "
                "to engines; leave it out, and balance the experts with --model.aux_loss"
            )
    except ConfigError as error:
        problems += [f"{text}, and engines get their weights that way" for text in error.problems]
    # https is refused, too: KitEngine speaks plain HTTP.
    places = [_server(url) for url in cfg.of(InferenceConfig).urls]
    problems += [
        f"rl.inference.urls: {url}: must be http://HOST:PORT, each once"
        for url, place in zip(cfg.of(InferenceConfig).urls, places, strict=True)
        if place is None or places.count(place) > 1
    ]
    if (problem := sampling.sampling(0).problem()) is not None:
        name, allowed = problem
        problems.append(f"rl.sampling.{name} = {getattr(sampling, name)}: {allowed}")
    return problems


def _server(url: str) -> tuple[str, int] | None:
    """Return host and port, the same for all spellings of the URL; None if it is not a server's."""
    with contextlib.suppress(ValueError):  # of the port
        parts = urlsplit(url)
        if parts.scheme == "http" and parts.hostname and parts.port and parts.path in ("", "/"):
            # One server under two names would count as two engines, each with all of its slots.
            return {"localhost": "127.0.0.1"}.get(parts.hostname, parts.hostname), parts.port
    return None
