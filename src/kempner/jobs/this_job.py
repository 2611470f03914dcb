"""The job of this process, as its environment describes it: names, addresses, and the time that a
run needs to leave. Asks nobody; slurm.py asks the controller."""

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
# Slurm numbers the steps that have a name (batch, extern, interactive) from 0xfffffffd downwards:
# slurm.h. The others count up from 0.
LAST_STEP = 0xFFFFFF00


def job_name(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the job of this process as users name it (`12`, or `12_3` in an array), None outside
    SLURM."""
    if "SLURM_ARRAY_JOB_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env.get('SLURM_ARRAY_TASK_ID', '?')}"
    return env.get("SLURM_JOB_ID")


def is_here() -> bool:
    """Return whether this is a host of a cluster, whose jobs may run on other ones: it has sbatch,
    or a batch script has started this process in a container, which has none."""
    return shutil.which("sbatch") is not None or "KP_UNMOUNTED" in os.environ


def on_node() -> bool:
    """Return whether this process is on a node of its job: a shell of salloc may be on a login
    node."""
    return "SLURMD_NODENAME" in os.environ


def start_name() -> str:
    """Return the name of this start: no other step, of this job or of another, has it."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    return ".".join(os.environ.get(name, "0") for name in names)


def attempt_name() -> str:
    """Return the name of this attempt, fit for a file: the batch script's; without one that of this
    process, which then has to tell the others."""
    own = f"{socket.gethostname()}.{os.getpid()}.{int(time.time())}"
    return re.sub(r"[^\w.-]", "_", os.environ.get("KEMPNER_ATTEMPT_ID") or own)


def tasks_per_node(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the tasks on each node of this step, from SLURM_STEP_TASKS_PER_NODE (`4(x2)`, or `4`);
    None if the nodes differ or nothing is set."""
    counts = set(re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", env.get("SLURM_STEP_TASKS_PER_NODE", "")))
    return int(counts.pop()) if len(counts) == 1 else None


def own_address() -> str:
    """Return the address of this host that the other hosts of the job reach: that of the interface
    which routes to the host of srun."""
    peer = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    if peer:
        family = socket.AF_INET6 if ":" in peer else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # UDP: nothing is sent, the kernel only picks the route
            address = str(probe.getsockname()[0])
        if not address.startswith("127."):
            return address
    return socket.gethostname()


def fast_address() -> str | None:
    """Return the IPv4 address of this host on the fast network: that of the first interface that
    lib/network.sh has chosen for gloo. None if none is named, or it has no such address."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # struct ifreq: a name of 15 bytes and a NUL, then a sockaddr_in, its address at 20.
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])
        except OSError:
            return None


def signal_lead() -> float | None:
    """Return the seconds between the warning signal and the end of the job, from the batch script;
    None if there is none, or it is the user's own."""
    try:
        return float(os.environ.get("KEMPNER_SIGNAL_LEAD", ""))
    except ValueError:
        return None


def short_window(save: float, step: float) -> str | None:
    """Return a warning if the time between the warning signal and the end of the job
    (KEMPNER_SIGNAL_LEAD, from the batch script) is shorter than the run needs in order to leave.

    It needs twice the `save` seconds of a checkpoint, and three times `step`, the longest time that
    passes before a request is acted on: the step in flight, the one after it, and one that is
    slower than the median. The size that the warning suggests has 30 s more, for the exit.
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
    """Return the seconds that a run needs from a request to leave until its last checkpoint is
    durable."""
    return 2 * save + 3 * step


def own_job() -> str | None:
    return os.environ.get("SLURM_JOB_ID")


def host_name() -> str:
    """Return this host as Slurm names it, so that it may go into ExcNodeList; outside Slurm its own
    name, which may have a domain that Slurm's lacks."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
