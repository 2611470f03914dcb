"""The program of one rank: its environment, processes and signals. No torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kempner.config.option import ConfigError
from kempner.jobs.program.copy import CodeCopy
from kempner.jobs.program.launchers import uses_torchrun
from kempner.jobs.program.options import Options
from kempner.jobs.ranks.own_device import own_instance
from kempner.jobs.ranks.peers import PEER_KEY_VARIABLE
from kempner.jobs.ranks.placement import World
from kempner.jobs.ray.processes import Processes

WARNINGS = (signal.SIGTERM, signal.SIGUSR1)  # the first of these that the program handles
# Ends the child if this process is killed. Slurm does that too; without Slurm nothing does.
DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--") if shutil.which("setpriv") else ()
STACKS_S = 2.0  # for the stacks of a hang
NAMED_PROCESSES = 8  # in a message


class RankPlace:
    """Messages between this rank and its program: small files on the node's local disk, cheap
    enough to check in every step.

    heartbeat   touched by the program; its text is the step, if the program writes it
    stop        exists once the program is asked to leave
    asks        exists if the program checks for `stop` and so needs no signal
    end         end of the job, unix seconds
    held        locked while this process lives
    """

    def __init__(self, rank: int) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"kempner-rank{rank}-"))
        self._held = open(self.path / "held", "w")  # noqa: SIM115
        fcntl.flock(self._held, fcntl.LOCK_EX)  # see rendezvous.forget_copy
        self.heartbeat, self.stop = self.path / "heartbeat", self.path / "stop"
        self.asks, self.end = self.path / "asks", self.path / "end"

    def remove(self) -> None:
        self._held.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def beat(self) -> tuple[float | None, int | None]:
        """Return the time of the last heartbeat, in unix seconds, and its step; None if never."""
        step = None
        try:
            at = self.heartbeat.stat().st_mtime
            step = int(self.heartbeat.read_text())
        except FileNotFoundError:
            return None, None
        except (OSError, ValueError):
            pass
        return at, step

    def write(self, path: Path, text: str) -> None:
        """Write a file and ignore errors: a full disk must not end the rank."""
        with contextlib.suppress(OSError):
            path.write_text(text)


def rank_variables(
    world: World, start: Mapping[str, Any], options: Options, place: RankPlace
) -> dict[str, str]:
    """Return torchrun's and the kit's environment variables. TORCHELASTIC_RUN_ID makes Lightning
    and others read these, not Slurm's. Raises ConfigError if this rank has no MIG instance."""
    local_rank, per_node = world.local_rank, world.per_node
    node = os.environ.get("SLURM_NODEID", world.rank // per_node)
    # With one process per node, a launcher may give each of its ranks another instance.
    instance = own_instance(local_rank) if per_node > 1 else None
    gpus = instance or os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if per_node > 1 and gpus and "," not in gpus:
        # A rank that sees one GPU is presented as a separate node: programs select the GPU number
        # LOCAL_RANK, or RANK % LOCAL_WORLD_SIZE.
        local_rank, per_node, node = 0, 1, world.rank
    values: dict[str, object] = {
        "RANK": world.rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world.size,
        "LOCAL_WORLD_SIZE": per_node,
        "GROUP_RANK": node,
        "NODE_RANK": node,
        "GROUP_WORLD_SIZE": -(-world.size // per_node),
        "ROLE_RANK": world.rank,
        "ROLE_WORLD_SIZE": world.size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": start["address"],
        "MASTER_PORT": start["port"],
        "TORCHELASTIC_RUN_ID": os.environ.get("KEMPNER_ATTEMPT_ID", "kempner"),
        "TORCHELASTIC_RESTART_COUNT": start["attempt"],
        "TORCHELASTIC_MAX_RESTARTS": os.environ.get("KEMPNER_MAX_CRASHES", "3"),
        # With "True" torch expects the store in torchrun's agent, and rank 0 starts none.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "KEMPNER_RUN_DIR": options.run_dir,
        "KEMPNER_HEARTBEAT": place.heartbeat,
        "KEMPNER_STOP_FILE": place.stop,
        PEER_KEY_VARIABLE: "",  # hidden: a program may log its environment
        # Lets crashes, and the end of a hang, leave the stacks of all threads in the log.
        "PYTHONFAULTHANDLER": os.environ.get("PYTHONFAULTHANDLER", "1"),
    }
    if instance:
        values["CUDA_VISIBLE_DEVICES"] = instance
    if world.per_node == 1:  # options of torchrun, which runs once per node
        values |= {
            "PET_NNODES": world.size,
            "PET_NODE_RANK": world.rank,
            "PET_MASTER_ADDR": start["address"],
            "PET_MASTER_PORT": start["port"],
            "PET_RDZV_ENDPOINT": f"{start['address']}:{start['port']}",
            "PET_RDZV_ID": os.environ.get("KEMPNER_ATTEMPT_ID", "kempner"),
        }
    if copy := CodeCopy.given():
        values["PYTHONPATH"] = copy.python_path(os.environ.get("PYTHONPATH", ""))
    return {name: str(value) for name, value in values.items()}


class Child:
    """The running program and all its processes."""

    def __init__(self, options: Options, environment: dict[str, str], output: int) -> None:
        """`output`: the file descriptor for its output. Raises ConfigError if it cannot start."""
        self.options, self._processes = options, Processes()
        self.code: int | None = None
        self.ended_at = 0.0  # monotonic, once it has ended
        try:
            words = [*DIES_WITH_US, *options.command]
            self.pid = self._processes.start(words, (), output, **environment)
        except OSError as error:
            raise ConfigError(f"{options.command[0]}: {error.strerror}") from None

    def poll(self) -> int | None:
        """Return its exit code once it has ended, negative for a signal."""
        if self.code is None:
            self.code = self._processes.exit_code(self.pid)
            self.ended_at = time.monotonic()
        return self.code

    def tell(self, number: signal.Signals) -> bool:
        """Send a signal to the outermost processes that handle it. It would kill wrappers such as a
        shell, and data loader workers; torchrun would end its processes. Returns False if no
        process handles it."""
        pids = list(self._handlers(self.pid, number))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(pids)

    def _handlers(self, pid: int, number: signal.Signals) -> Iterator[int]:
        # The signal's default action would kill a process that does not handle it.
        if _handles(pid, number) and not _is_torchrun(pid):
            yield pid
        else:
            for child in self._processes.children(pid):
                yield from self._handlers(child, number)

    def warn(self) -> bool:
        """Ask it to save and leave. Returns False if it handles no signal for this."""
        own_signal = self.options.signal
        return any(self.tell(n) for n in ((own_signal,) if own_signal else WARNINGS))

    def condition(self) -> str:
        """State of its main process: R running, S sleeping, D waiting for a disk, T stopped."""
        with contextlib.suppress(OSError):
            # The name before the state may contain blanks and parentheses.
            text = Path(f"/proc/{self.pid}/stat").read_text(errors="replace")
            return text.rpartition(")")[2].split()[0]
        return ""

    def write_stacks(self) -> None:
        """Send SIGABRT, on which Python writes the stacks of its threads (PYTHONFAULTHANDLER),
        without a core dump."""
        pids = list(self._handlers(self.pid, signal.SIGABRT))
        for pid in pids:
            with contextlib.suppress(OSError):
                _, most = resource.prlimit(pid, resource.RLIMIT_CORE)
                # SIGABRT would also dump core: all its memory, which takes minutes.
                resource.prlimit(pid, resource.RLIMIT_CORE, (0, most))
                os.kill(pid, signal.SIGABRT)
        end = time.monotonic() + STACKS_S
        while pids and self.poll() is None and time.monotonic() < end:
            time.sleep(0.05)

    def left_behind(self) -> list[str]:
        """List the processes that remain after it has ended, such as daemons."""
        names = []
        for pid in self._processes.descendants(os.getpid()):
            with contextlib.suppress(OSError):
                place = Path(f"/proc/{pid}")
                # Only the program's processes have its variables, not other children of this one.
                if b"KEMPNER_HEARTBEAT=" in (place / "environ").read_bytes():  # not our scontrol
                    # A name is cut at 15 bytes, possibly within a character.
                    name = (place / "comm").read_text(errors="replace")
                    names.append(f"{name.strip()} ({pid})")
        return names[:NAMED_PROCESSES]

    def end(self) -> None:
        """End it and all its processes."""
        # If it has ended, poll() has reaped it and its id may be another process's.
        self._processes.terminate(0 if self.poll() is not None else self.pid)
        self.poll()


def _is_torchrun(pid: int) -> bool:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return uses_torchrun(words)
    return False


def _handles(pid: int, number: signal.Signals) -> bool:
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
        caught = int(text.split("SigCgt:")[1].split()[0], 16)
        # proc(5): bit 0 is signal 1.
        return bool(caught >> (number - 1) & 1)
    return False
