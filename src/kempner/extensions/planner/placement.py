"""Placement: the nodes and GPUs of a job that train, and those that run engines. No torch.

python -m kempner.extensions.planner.placement --nodes N --tasks T --gpus G --names A,B <CONFIG

prints, for the batch script, the numbers of a Placement, other values that it needs, and text for
its log. Exit code 2 if the job does not fit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kempner.config.option import ConfigError
from kempner.config.toml import loads
from kempner.extensions.planner.engine import EngineMemory, engine_memory
from kempner.extensions.planner.gpus import GPUS
from kempner.extensions.rl.config import DeploymentConfig, InferenceConfig
from kempner.jobs.system.front_door import ANSWER
from kempner.model.config import ModelConfig


class Placement(NamedTuple):
    """Numbers of nodes and GPUs. Training nodes come first: the batch script and the orchestrator
    run on the first, and losing a node that only has engines costs only engines."""

    train_nodes: int
    train_tasks: int  # per training node
    engines: int
    on_node: int  # engines on each node that has any
    first_node: int  # with any engine
    tasks: int  # per node, sharing its CPUs


def place_processes(
    deployment: DeploymentConfig, inference: InferenceConfig, nodes: int, tasks: int, gpus: int
) -> Placement:
    """Place a job; each of its `nodes` has `tasks` and `gpus` (0: no GPUs). Raises ConfigError."""
    own, tp = not inference.urls, inference.tp
    # The engines then share the only node with the trainer.
    both = deployment.num_infer_nodes == 0
    total = deployment.num_train_nodes + deployment.num_infer_nodes
    if not own and not both:
        raise ConfigError([
            f"rl.deployment.num_infer_nodes = {deployment.num_infer_nodes}: with "
            "rl.inference.urls the job has no engines; set it to 0"
        ])  # fmt: skip
    if own and both and deployment.num_train_nodes > 1:
        raise ConfigError([
            f"rl.deployment.num_train_nodes = {deployment.num_train_nodes} with num_infer_nodes = "
            "0: no node is left for engines; set num_infer_nodes"
        ])  # fmt: skip
    if nodes != total:
        raise ConfigError([
            f"the job has {nodes} node(s), and [rl.deployment] asks for {total} (num_train_nodes = "
            f"{deployment.num_train_nodes}, num_infer_nodes = {deployment.num_infer_nodes}): "
            f"submit with sbatch --nodes={total}, or change [rl.deployment]"
        ])  # fmt: skip
    per_node = deployment.gpus_per_node or tasks
    if gpus and per_node > gpus:
        raise ConfigError([
            f"rl.deployment.gpus_per_node = {per_node}: a node of the job has {gpus} GPU(s)"
        ])  # fmt: skip
    if total > 1:
        _check_tp(per_node if own else tp, tp, "tasks of a node")
        on_node = per_node // tp if own else 0
        return Placement(
            deployment.num_train_nodes,
            per_node,
            on_node * deployment.num_infer_nodes,
            on_node,
            deployment.num_train_nodes,
            per_node,
        )
    infer = deployment.num_infer_gpus if own else 0
    _check_tp(infer if own else tp, tp, "rl.deployment.num_infer_gpus")
    gpu_sum = deployment.num_train_gpus + infer
    if gpus and gpu_sum > per_node:
        raise ConfigError([
            f"rl.deployment: num_infer_gpus = {infer} + num_train_gpus = "
            f"{deployment.num_train_gpus} are more than the {per_node} GPU(s) of the node; use "
            "fewer of each, or several nodes (num_infer_nodes)"
        ])  # fmt: skip
    return Placement(1, deployment.num_train_gpus, infer // tp, infer // tp, 0, gpu_sum)


def engine_words(
    inference: InferenceConfig, seq_len: int, deterministic: bool = False
) -> list[str]:
    """Return further words for an engine's command line. No conversation exceeds a row of the
    trainer, so memory for all the 131,072 tokens that a model may see would be wasted."""
    if inference.engine == "vllm":
        return [f"--max-model-len={seq_len}", *inference.args]
    same = ["--deterministic"] if deterministic else []
    return [f"--window={seq_len}", *same, *inference.args]


def check_memory(memory: EngineMemory, inference: InferenceConfig, window: int) -> None:
    """Raise ConfigError if no known GPU has enough memory; which GPUs the job gets is
    not known yet."""
    largest = max(GPUS.values(), key=lambda gpu: gpu.usable)
    if memory.peak <= largest.usable:
        return
    fix = 'use more GPUs for each (rl.inference.engine = "vllm", rl.inference.tp)'
    room = int((largest.usable - memory.weights) * memory.texts / memory.cache)
    if inference.engine == "kit" and room > 0:
        fix = f"give --rl.inference.slots={room} or less, or a shorter train.seq_len, or {fix}"
    raise ConfigError([
        f"{memory.describe(window)}; no GPU has that much (rl.inference.slots = "
        f"{inference.resolved_slots}, train.seq_len = {window}): {fix}"
    ])  # fmt: skip


def _check_tp(count: int, tp: int, what: str) -> None:
    if count == 0 or count % tp:
        raise ConfigError([
            f"{what}: {count} cannot be shared by engines of rl.inference.tp = {tp}: it must be a "
            "positive multiple of that"
        ])  # fmt: skip


def describe_placement(
    placement: Placement, inference: InferenceConfig, gpus: int, names: Sequence[str]
) -> list[str]:
    """Describe each kind of process in one line; `names`: of all nodes."""
    first, per_node = placement.first_node, placement.on_node
    lines = [
        f"trainer: {placement.train_tasks} task(s) on {', '.join(names[: placement.train_nodes])}"
        + (" each" if placement.train_nodes > 1 else ""),
        f"orchestrator: on {names[0]}",
    ]
    kind = f"{inference.engine}, {inference.resolved_slots} slots"
    kind += f", {inference.tp} GPU(s) each" if gpus else ""
    for number in range(0, placement.engines, max(per_node, 1)):
        node = names[first + number // per_node]
        last = number + per_node - 1
        which = f"engine {number}" if per_node == 1 else f"engines {number} to {last}"
        lines.append(f"{which} ({kind}): on {node}")
    if inference.urls:
        lines.append(f"engines outside the job: {', '.join(inference.urls)}")
    return lines


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m kempner.extensions.planner.placement")
    for name in ("nodes", "tasks", "gpus"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--names", required=True, help="of the nodes, comma-separated")
    options = parser.parse_args(argv)
    values: Mapping[str, Any] = loads(sys.stdin.read())
    deployment = DeploymentConfig(**_known(values["rl"]["deployment"]))
    inference = InferenceConfig(**_known(values["rl"]["inference"]))
    train, window = values["train"], values["train"]["seq_len"]
    model = ModelConfig(**_known(values["model"]))
    memory = engine_memory(model, inference, window, train["dtype"])
    try:
        placement = place_processes(
            deployment, inference, options.nodes, options.tasks, options.gpus
        )
        if options.gpus and placement.engines:
            check_memory(memory, inference, window)
    except ConfigError as error:
        print("\n".join(f"kempner: error: {text}" for text in error.problems), file=sys.stderr)
        return 2
    # The script reads only the text between the markers; libraries may print before and after.
    print(ANSWER)
    print(*placement)
    print(inference.tp, inference.resolved_slots, inference.restarts, values["train"]["max_steps"])
    print(inference.engine)
    for line in describe_placement(placement, inference, options.gpus, options.names.split(",")):
        print(line)
    if options.gpus and placement.engines:
        print(memory.describe(window))
    print("--")
    print("\n".join(engine_words(inference, window, train["deterministic"])))
    print(ANSWER)
    return 0


def _known(section: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a section of a resolved configuration, in which "none" means None."""
    return {key: None if value == "none" else value for key, value in section.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
