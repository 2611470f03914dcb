"""The program of one rank: its variables, its processes, the signals that it wants. No torch."""

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
# Ends the child when this process is killed. Slurm does that, too; elsewhere nobody does.
DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--") if shutil.which("setpriv") else ()
STACKS_S = 2.0  # for the stacks of a hang
NAMED_PROCESSES = 8  # processes, in a message


class RankPlace:
    """Messages between this rank and its program: small files on the node's own disk, cheap enough
    to look at in every step.

        heartbeat   touched by the program; its text is the step, if the program writes it
    stop        exists once the program is asked to leave
    asks        exists if the program looks for `stop`: it needs no signal then
    end         when the job ends, unix seconds
    held        locked for as long as this process lives
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
        """Return when the program touched its heartbeat, unix seconds, and its step; None:
        never."""
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
        """Write a file, if there is room: a full disk must not end the rank."""
        with contextlib.suppress(OSError):
            path.write_text(text)


def rank_variables(
    world: World, start: Mapping[str, Any], options: Options, place: RankPlace
) -> dict[str, str]:
    """Return torchrun's variables, and the kit's own. With TORCHELASTIC_RUN_ID, Lightning and
    others read these rather than Slurm's. Raises ConfigError if this rank has no MIG instance.
    """
    local_rank, per_node = world.local_rank, world.per_node
    node = os.environ.get("SLURM_NODEID", world.rank // per_node)
    # A launcher of one process per node may give each of its own ranks another instance.
    instance = own_instance(local_rank) if per_node > 1 else None
    gpus = instance or os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if per_node > 1 and gpus and "," not in gpus:
        # A rank that sees one GPU is described as a node of its own: programs take the GPU with
        # the number LOCAL_RANK, or RANK % LOCAL_WORLD_SIZE.
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
        # With "True" torch leaves the store to torchrun's agent, and rank 0 serves none.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "KEMPNER_RUN_DIR": options.run_dir,
        "KEMPNER_HEARTBEAT": place.heartbeat,
        "KEMPNER_STOP_FILE": place.stop,
        PEER_KEY_VARIABLE: "",  # the key of the job: a program may log all its environment
        # With it a crash, and the end of a hang, leave the stacks of all threads in the log.
        "PYTHONFAULTHANDLER": os.environ.get("PYTHONFAULTHANDLER", "1"),
    }
    if instance:
        values["CUDA_VISIBLE_DEVICES"] = instance
    if world.per_node == 1:  # torchrun's own options, of which each node has one
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
    """The running program, and all that it starts."""

    def __init__(self, options: Options, environment: dict[str, str], output: int) -> None:
        """`output`: the descriptor that it writes to. Raises ConfigError if it cannot start."""
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
        """Send a signal to the outermost processes that handle it: a shell or another wrapper
        around the program would die of it, and so would its data loader's workers. torchrun would
        end its processes. Returns False if none handles it."""
        pids = list(self._handlers(self.pid, number))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(pids)

    def _handlers(self, pid: int, number: signal.Signals) -> Iterator[int]:
        # The default action of the signal would kill a process that does not handle it.
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
        """State of its main process, from /proc: R runs, S sleeps, D waits for a disk, T is
        stopped."""
        with contextlib.suppress(OSError):
            # The name before the state, in parentheses, may have blanks and parentheses itself.
            text = Path(f"/proc/{self.pid}/stat").read_text(errors="replace")
            return text.rpartition(")")[2].split()[0]
        return ""

    def write_stacks(self) -> None:
        """Send SIGABRT, on which Python writes the stacks of its threads (PYTHONFAULTHANDLER),
        without a core: one of all its memory would take minutes."""
        pids = list(self._handlers(self.pid, signal.SIGABRT))
        for pid in pids:
            with contextlib.suppress(OSError):
                _, most = resource.prlimit(pid, resource.RLIMIT_CORE)
                # SIGABRT would also dump a core, which may be all of its memory.
                resource.prlimit(pid, resource.RLIMIT_CORE, (0, most))
                os.kill(pid, signal.SIGABRT)
        end = time.monotonic() + STACKS_S
        while pids and self.poll() is None and time.monotonic() < end:
            time.sleep(0.05)

    def left_behind(self) -> list[str]:
        """List the processes that remain once it has ended, daemons and others."""
        names = []
        for pid in self._processes.descendants(os.getpid()):
            with contextlib.suppress(OSError):
                place = Path(f"/proc/{pid}")
                # This process also has children of its own; only the program's have its variables.
                if b"KEMPNER_HEARTBEAT=" in (place / "environ").read_bytes():  # not our scontrol
                    # A name is cut at 15 bytes, perhaps within a letter.
                    name = (place / "comm").read_text(errors="replace")
                    names.append(f"{name.strip()} ({pid})")
        return names[:NAMED_PROCESSES]

    def end(self) -> None:
        """End it, and all that it has started."""
        # poll() has reaped one that has ended: its id may be another process's.
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
        # proc(5): bit 0 is of signal 1.
        return bool(caught >> (number - 1) & 1)
    return False
