"""The job of this process according to its environment: names, addresses, and the time that a run
needs to leave. Makes no queries; slurm.py asks the controller."""

from __future__ import annotations

import fcntl
import math
import os
import re
import shutil
import socket
import struct
import time
from collections.abc import Mapping

SIOCGIFADDR = 0x8915
# Slurm numbers named steps (batch, extern, interactive) from 0xfffffffd downwards (slurm.h), others
# from 0 upwards.
LAST_STEP = 0xFFFFFF00


def job_name(env: Mapping[str, str] = os.environ) -> str | None:
    """Return this job as users name it (`12`, or `12_3` in an array); None outside SLURM."""
    if "SLURM_ARRAY_JOB_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env.get('SLURM_ARRAY_TASK_ID', '?')}"
    return env.get("SLURM_JOB_ID")


def is_here() -> bool:
    """Return whether this is a host of a cluster, whose jobs may run on other hosts: it has sbatch,
    or a batch script started this process in a container without sbatch."""
    return shutil.which("sbatch") is not None or "KP_UNMOUNTED" in os.environ


def on_node() -> bool:
    """Return whether this process is on a node of its job; salloc's shell may be elsewhere."""
    return "SLURMD_NODENAME" in os.environ


def start_name() -> str:
    """Return the name of this start, unique among all steps of all jobs."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    return ".".join(os.environ.get(name, "0") for name in names)


def attempt_name() -> str:
    """Return the name of this attempt, valid as a file name: the batch script's, or else one of
    this process, which must then pass it to the other ranks."""
    own = f"{socket.gethostname()}.{os.getpid()}.{int(time.time())}"
    return re.sub(r"[^\w.-]", "_", os.environ.get("KEMPNER_ATTEMPT_ID") or own)


def tasks_per_node(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the tasks per node of this step from SLURM_STEP_TASKS_PER_NODE (`4(x2)` or `4`); None
    if the nodes differ or it is not set."""
    counts = set(re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", env.get("SLURM_STEP_TASKS_PER_NODE", "")))
    return int(counts.pop()) if len(counts) == 1 else None


def own_address() -> str:
    """Return this host's address for the job's other hosts: that of the interface that routes to
    the host of srun."""
    peer = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    if peer:
        family = socket.AF_INET6 if ":" in peer else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # UDP: sends nothing, the kernel only picks the route
            address = str(probe.getsockname()[0])
        if not address.startswith("127."):
            return address
    return socket.gethostname()


def fast_address() -> str | None:
    """Return this host's IPv4 address on the fast network: that of the first interface that
    lib/network.sh chose for gloo. None if it chose none or the interface has no IPv4 address."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # struct ifreq: a name of 15 bytes and a NUL, then a sockaddr_in with its address at 20.
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])
        except OSError:
            return None


def signal_lead() -> float | None:
    """Return the seconds between the warning signal and the end of the job, from the batch script;
    None without a signal, or if the user set it."""
    try:
        return float(os.environ.get("KEMPNER_SIGNAL_LEAD", ""))
    except ValueError:
        return None


def short_window(save: float, step: float) -> str | None:
    """Return a warning if the time between the warning signal and the end of the job
    (KEMPNER_SIGNAL_LEAD, from the batch script) is shorter than the run needs to leave.

    It needs twice the `save` seconds of a checkpoint and three times `step`, the longest time until
    it acts on a request: for the step in flight, the next one, and one slower than the median. The
    suggested lead includes 30 s more for the exit.
    """
    lead = signal_lead()
    needed = time_to_leave(save, step)
    if lead is None or lead >= needed:
        return None
    enough = 30 * math.ceil((needed + 30) / 30)
    return (
        f"WARNING: a checkpoint takes {save:.1f} s and a step {step:.1f} s, and the signal comes "
        f"only {lead:.0f} s before the end of the job: export SBATCH_SIGNAL=B:SIGTERM@{enough} "
        "before sbatch, or change the line #SBATCH --signal of the script"
    )


def time_to_leave(save: float, step: float) -> float:
    """Return the seconds from a request to leave until a run's last checkpoint is durable."""
    return 2 * save + 3 * step


def own_job() -> str | None:
    return os.environ.get("SLURM_JOB_ID")


def host_name() -> str:
    """Return Slurm's name of this host, valid in ExcNodeList; outside Slurm its own name, which may
    have a domain that Slurm's lacks."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
