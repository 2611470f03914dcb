"""The [resources] section: the Slurm request of each point of a sweep; and a site's
profile. No torch."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kempner.config.option import ConfigError, option

SWEEP_REPOSITORY = Path(__file__).parents[4]
SLURM_SCRIPTS = SWEEP_REPOSITORY / "scripts/slurm"


@dataclass(frozen=True)
class Resources:
    """Unset values are left to the profile, SBATCH_* variables and the script's header."""

    nodes: int = option(1, "nodes of a run", minimum=1)
    gpus_per_node: int = option(0, "GPUs of each node, one process each; 0: CPUs", minimum=0)
    tasks_per_node: int = option(1, "without GPUs: processes of each node", minimum=1)
    cpus_per_task: int | None = option(None, "CPUs of each process", minimum=1)
    share: bool = option(False, "take only this part of a node, so that several runs fit on one")
    pack: int = option(1, "runs side by side on a node that Slurm gives as a whole", minimum=1)
    mem: str = option("", "memory of each shared node, such as 64G")
    time: str = option("", "time limit, as sbatch takes it")
    partition: str = option("", "partition")
    account: str = option("", "account")
    qos: str = option("", "quality of service")
    options: tuple[str, ...] = option((), "more options of sbatch, one word each")
    tokens_per_s: float | None = option(
        None, "tokens per second and GPU, for the cost that plan prints", minimum=0.0
    )

    @property
    def per_node(self) -> int:
        """Processes per node."""
        return self.gpus_per_node or self.tasks_per_node

    @property
    def world_size(self) -> int:
        return self.nodes * self.per_node

    @property
    def script(self) -> Path:
        if self.pack > 1:
            return SLURM_SCRIPTS / "pack.sh"
        return SLURM_SCRIPTS / ("singlenode.sh" if self.nodes == 1 else "multinode.sh")

    def problems(self) -> list[str]:
        problems = []
        if self.gpus_per_node and self.tasks_per_node > 1:
            problems.append(
                f"resources.tasks_per_node = {self.tasks_per_node}: one process drives one GPU; "
                "leave it out beside gpus_per_node"
            )
        if self.share and not (self.mem and self.cpus_per_task):
            problems.append(
                "resources.share: Slurm must know how much of a node a run takes; give "
                "resources.cpus_per_task and resources.mem"
            )
        if self.pack > 1 and self.nodes > 1:
            problems.append(
                f"resources.pack = {self.pack}: a run on {self.nodes} nodes does not fit on a part "
                "of one; leave it out"
            )
        if self.pack > 1 and self.share:
            problems.append(
                f"resources.pack = {self.pack}: with resources.share = true Slurm itself puts "
                "several runs on a node; leave one of them out"
            )
        if self.mem and not self.share:
            problems.append(
                "resources.mem: has no effect on whole nodes; set resources.share = true"
            )
        return problems

    def words(self) -> list[str]:
        """Return sbatch's options, also the signature that the points of one array share."""
        words = [f"--nodes={self.nodes}"]
        tasks = self.pack * self.per_node
        words.append(f"--{'gpus' if self.gpus_per_node else 'ntasks'}-per-node={tasks}")
        if self.cpus_per_task:
            words.append(f"--cpus-per-task={self.cpus_per_task}")
        if self.share:  # beside the header's --exclusive, newer Slurm takes no --oversubscribe
            words += ["--exclusive=oversubscribe", f"--mem={self.mem}"]
        for name in ("time", "partition", "account", "qos"):
            if value := getattr(self, name):
                words.append(f"--{name}={value}")
        return [*words, *self.options]


def profile_environment(profile: str) -> dict[str, str]:
    """Return the environment of sbatch with a profile, site.d/PROFILE.env, read by the batch
    script's own function; this process's variables win. Raises ConfigError."""
    site = os.environ.get("KEMPNER_SITE", "")
    if profile and site and site != profile:
        raise ConfigError(
            f"profile = {profile!r}: KEMPNER_SITE={site} is set too; unset one of them"
        )
    env = {**os.environ, **({"KEMPNER_SITE": profile} if profile else {})}
    if not env.get("KEMPNER_SITE"):
        return env
    # The site's output must not mix with the variables, whose values may contain line ends.
    script = 'source "$1/lib/all.sh"; KP_ROOT=$2; kp_read_site >&2; env -0'
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script, "bash", SLURM_SCRIPTS, SWEEP_REPOSITORY],
        env=env, capture_output=True, text=True, errors="surrogateescape",  # as in os.environ
    )  # fmt: skip
    if done.returncode:
        raise ConfigError(done.stderr.strip().removeprefix("kempner: error: "))
    variables = dict(entry.split("=", 1) for entry in done.stdout.split("\0") if "=" in entry)
    # Only sbatch's variables: the batch script reads the profile again, in the job.
    return env | {name: text for name, text in variables.items() if name.startswith("SBATCH_")}
