"""Memory of this host that a rank may use; imported only by features that need much. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kempner.jobs.ranks.placement import discover_world

USABLE = 0.8  # of the available memory: the rest of the job grows, too
CGROUPS = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
OWN_CGROUPS = Path("/proc/self/cgroup")
OWN_STATUS = Path("/proc/self/status")


def memory_of_rank() -> int:
    """Return the bytes that each rank of this host may allocate now, between two steps, and keep.
    Excludes the memory that steps allocate and free."""
    share = int(USABLE * available_memory()) // discover_world().per_node
    return max(0, share - peak_above_now())


def peak_above_now() -> int:
    """Return the bytes by which this process's peak memory exceeds its current memory."""
    sizes = dict(line.split(":", 1) for line in OWN_STATUS.read_text().splitlines())
    peak, now = (int(sizes[key].split()[0]) * 1024 for key in ("VmHWM", "VmRSS"))
    return max(0, peak - now)


def available_memory() -> int:
    """Return the bytes that can be allocated without swapping: the host's available memory or the
    rest of the job's cgroup, whichever is less. The page cache counts as available."""
    host = host_memory("MemAvailable")
    left = [limit - used for limit, used in _limits()]
    return max(0, min([host, *left]))


def host_memory(name: str = "MemTotal") -> int:
    """Return a figure of /proc/meminfo in bytes."""
    for line in MEMINFO.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def job_memory() -> int:
    """Return the bytes that the processes of this job may use on this host."""
    return min([host_memory(), *(limit for limit, _ in _limits())])


def _limits() -> Iterator[tuple[int, int]]:
    """Yield (limit, usage without page cache) of this process's cgroup and its parents."""
    with contextlib.suppress(OSError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            # A cgroup v2 line names no controllers ("0::/path"); each v1 line does.
            if kinds and "memory" not in kinds.split(","):
                continue
            root = CGROUPS / "memory" if kinds else CGROUPS
            # In v1 only the figures total_* include child groups.
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            own = root / path.lstrip("/")
            # Slurm sets the limit on the job's or the step's group, above the task's.
            for folder in (own, *own.parents):
                if not folder.is_relative_to(root):
                    break
                yield from _limit(folder, names if kinds else ("memory.max", "memory.current", ""))


def _limit(folder: Path, names: tuple[str, str, str]) -> Iterator[tuple[int, int]]:
    limit, used, prefix = names
    with contextlib.suppress(OSError, ValueError):  # "max", or a folder without the file
        figures = dict(
            line.split(maxsplit=1) for line in (folder / "memory.stat").read_text().splitlines()
        )
        # Not the figure "file", which includes shared memory: that cannot be dropped.
        cached = sum(int(figures[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
        yield (
            int((folder / limit).read_text()),
            max(0, int((folder / used).read_text()) - cached),
        )
