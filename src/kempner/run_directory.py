"""The run directory as one rank sees it: its lock, logs, status.json and attempts.jsonl."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from kempner.config.loading import config_hash, to_toml
from kempner.config.option import ConfigError
from kempner.data.sidecar import copy_tokenizer, open_sidecar
from kempner.files import swap_link, write_atomic
from kempner.process_group import World, forget_rendezvous, job_name
from kempner.resilience.lock import RunLock
from kempner.resilience.requests import Verdict
from kempner.run import RunConfig

# What an error says on a rank that only lost a peer: that one is to blame.
LOST_PEER = ("Connection closed by peer", "Connection reset", "Connection refused", "remote")


class Run:
    """The run directory as this rank sees it: logs, status.json and attempts.jsonl."""

    def __init__(self, cfg: RunConfig, world: World) -> None:
        """Open the directory as a new attempt. All ranks call it, once the process group stands.

        Raises ConfigError on all ranks when another live job works in it.
        """
        self.cfg, self.world = cfg, world
        self.dir = Path(cfg.run.dir)
        self.step = 0
        self._bar: Any = None
        self._stepped = False
        self._lock: RunLock | None = None
        opened: list[Any] = [None, []]  # the attempt's number, or what is wrong
        if world.rank == 0:
            try:
                self.dir.mkdir(parents=True, exist_ok=True)
                self._lock = RunLock(self.dir)
                opened[0] = count_attempts(self.dir)
            except ConfigError as error:
                opened[1] = error.problems
        dist.broadcast_object_list(opened, src=0)
        if opened[1]:
            raise ConfigError(opened[1])
        self.attempt: int = opened[0]
        self.hosts: list[str] = [""] * world.size  # of each rank
        dist.all_gather_object(self.hosts, socket.gethostname())
        self._open_log()

    def begin(self, step: int) -> None:
        """The state is loaded and the first step comes: record the start."""
        self.step = step
        nodes = list(dict.fromkeys(self.hosts))
        if self.world.rank == 0:
            forget_rendezvous(self.dir)
            write_atomic(self.dir / "config.toml", to_toml(self.cfg))
            copy_tokenizer(self.cfg.data.dataset_path, self.dir)  # generate.py needs the run alone
            self.event(
                "start",
                nodes=nodes,
                world_size=self.world.size,
                process_began=process_began(),
                batch_began=float(os.environ.get("KEMPNER_BATCH_BEGAN") or 0) or None,
            )
            self.status("running", "")
        source = f"continues after step {step}" if step else "starts"
        self.say(
            f"run {self.dir} {source}: attempt {self.attempt}, world size {self.world.size} "
            f"on {', '.join(nodes)}, {self.cfg.model.count_parameters():,} parameters"
        )
        if step >= self.cfg.train.max_steps:
            self.say(
                f"the run is complete: {step} of {self.cfg.train.max_steps} steps; "
                "raise train.max_steps to go on"
            )
        elif self.world.rank == 0 and sys.stdout.isatty():
            from tqdm import tqdm  # comes with huggingface-hub

            steps = self.cfg.train.max_steps
            self._bar = tqdm(total=steps, initial=step, unit="step", file=sys.stdout)

    def say(self, text: str) -> None:
        """A line in this rank's log, and on rank 0 on the console too."""
        self.log(text)
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        elif self.world.rank == 0:
            with contextlib.suppress(OSError):  # a closed terminal must not end the training
                print(text, flush=True)

    def progress(self, step: int) -> None:
        """The numbers of a step have arrived."""
        if self.world.rank == 0 and not self._stepped:
            self.event("first_step", step=step)  # the start-up ends here
            self._stepped = True
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def end(self, verdict: Verdict) -> None:
        """Record how the attempt ends; the batch script reads status.json."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self.world.rank == 0:
            self.say(f"{verdict.state} after step {self.step}: {verdict.reason}")
            self.event("end", state=verdict.state, reason=verdict.reason)
            self.status(verdict.state, verdict.reason)
        if self._lock is not None:
            self._lock.release()

    def contents(self) -> tuple[dict[str, str], dict[str, Any]]:
        """What a checkpoint holds beside tensors: files by name, and facts for its manifest. Those
        under "fixed" make the meaning of its weights and its position: a checkpoint of others is
        refused."""
        sidecar = open_sidecar(self.cfg.data.dataset_path)
        shards = json.dumps([asdict(shard) for shard in sidecar.splits["train"]])
        return {"config.toml": to_toml(self.cfg)}, {
            "config_hash": config_hash(self.cfg),
            "fixed": {
                "model": asdict(self.cfg.model),
                "train": {"seq_len": self.cfg.train.seq_len},
                "data": {
                    "seed": self.cfg.data.seed,
                    "tokens": hashlib.sha256(shards.encode()).hexdigest()[:16],
                },
            },
        }

    def status(self, state: str, reason: str) -> None:
        record = {
            "state": state,
            "step": self.step,
            "max_steps": self.cfg.train.max_steps,
            "reason": reason,
            "attempt": self.attempt,
            "attempt_id": os.environ.get("KEMPNER_ATTEMPT_ID"),
            "job": job_name(),
            "time": round(time.time(), 3),
        }
        write_atomic(self.dir / "status.json", json.dumps(record) + "\n")

    @property
    def log_file(self) -> IO[str]:
        return self._log

    def log(self, text: str) -> None:
        """A line in this rank's log."""
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def crashed(self, error: BaseException) -> int:
        """Write down an exception that ends this rank; returns the exit code: 2 for bad input, else
        1."""
        self.log("".join(traceback.format_exception(error)).rstrip())
        where = f"rank {self.world.rank} on {socket.gethostname()}"
        detail = (
            f"{error}" if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        )
        with open(self._stderr, "w", closefd=False) as stderr:
            print(f"error: {where}: {detail}\n  (traceback in {self._log.name})", file=stderr)
        reason = f"{where}: {detail.splitlines()[0]}"
        lost_peer = any(words in detail for words in LOST_PEER)
        with contextlib.suppress(OSError):  # on a full disk the message above is what is left
            self.event(
                "fault",
                kind="crash",
                ranks=[self.world.rank],
                hosts=[socket.gethostname()],
                lost_peer=lost_peer,
                reason=reason,
            )
            if isinstance(error, ConfigError):
                self.status("failed", reason)  # another start would end in the same way
        if self._lock is not None:
            self._lock.release()
        return 2 if isinstance(error, ConfigError) else 1

    def hangs(self, reason: str, silent: list[int]) -> None:
        """The watchdog is about to end this process: the ranks that did not answer are to blame."""
        self.log(reason)
        with open(self._stderr, "w", closefd=False) as stderr:
            print(f"error: {reason} (stacks in {self._log.name})", file=stderr)
        hosts = sorted({self.hosts[rank] for rank in silent})
        with contextlib.suppress(OSError):
            self.event("fault", kind="hang", ranks=silent, hosts=hosts, reason=reason)

    def event(self, event: str, **more: Any) -> None:
        record = {
            "event": event,
            "attempt": self.attempt,
            "time": round(time.time(), 3),
            "job": job_name(),
            "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
            "attempt_id": os.environ.get("KEMPNER_ATTEMPT_ID"),
            "step": self.step,
            **more,
        }
        with open(self.dir / "attempts.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")

    def _open_log(self) -> None:
        """logs/attempt-K/rank-R.log; rank 0 keeps the console too, the other ranks' output goes to
        their log."""
        logs = self.dir / "logs" / f"attempt-{self.attempt}"
        logs.mkdir(parents=True, exist_ok=True)
        self._log = open(logs / f"rank-{self.world.rank}.log", "a", buffering=1)  # noqa: SIM115
        self._stderr = os.dup(2)
        if self.world.rank == 0:
            swap_link(self.dir / "logs" / "latest", logs.name)
        else:
            os.dup2(self._log.fileno(), 1)
            os.dup2(self._log.fileno(), 2)


def process_began() -> float | None:
    """Unix time when this process was started, to some 10 ms; None where /proc does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return round(time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK"), 3)


def count_attempts(run_dir: Path) -> int:
    """Starts of this run so far, from its logs: a start that died before its first step counts
    too."""
    logs = run_dir / "logs"
    numbers = [p.name[8:] for p in logs.glob("attempt-*")] if logs.is_dir() else []
    return max((int(n) for n in numbers if n.isdigit()), default=-1) + 1
