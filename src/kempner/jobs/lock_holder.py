"""The holder of a lock, as this host and Slurm know it: is it gone, or has it to make room?"""

from __future__ import annotations

from typing import Any

from kempner.jobs import this_job
from kempner.jobs.system.process import birth_ticks


def is_gone(me: dict[str, Any], holder: dict[str, Any]) -> bool:
    """Return whether the holder is provably gone: under the kernel that this process runs under,
    too, there is no such process any more."""
    place = ("cluster", "host", "kernel")
    if holder.get("kernel") is None or any(holder.get(name) != me[name] for name in place):
        return False
    # The kernel gives the id of a dead process to another one; its time of birth tells them apart.
    return birth_ticks(holder.get("pid", 0)) != holder.get("born")


def _is_of_mine(me: dict[str, Any], holder: dict[str, Any]) -> bool:
    """Return whether Slurm, as this process may ask it, knows the holder's job: it hides other
    users' jobs, and another cluster on this file system has numbers of its own."""
    are_jobs = me["slurm_id"] is not None and isinstance(holder.get("slurm_id"), str)
    return are_jobs and all(holder.get(name) == me[name] for name in ("cluster", "uid"))


def follows(me: dict[str, Any], holder: dict[str, Any]) -> bool:
    """Return whether the holder is of an earlier start of this job, or of an earlier step of this
    batch script: it has to make room, even if it lives. Slurm starts a job again when it believes a
    host to be lost, and the ranks of a step may outlive their srun."""
    if not _is_of_mine(me, holder) or holder["slurm_id"] != me["slurm_id"]:
        return False
    then, now = _number(holder.get("restart")), _number(me["restart"])
    if then != now:
        return then is not None and now is not None and then < now
    # JOB.RESTART.PID of the batch script, then the number of the restart in place: restart.sh.
    script = str(me["attempt"]).split(".")[:3]
    before, here = _step(holder.get("step")), _step(me["step"])
    same = me["attempt"] is not None and str(holder.get("attempt")).split(".")[:3] == script
    return same and before is not None and here is not None and before < here


def has_ended(me: dict[str, Any], holder: dict[str, Any]) -> bool:
    """Return whether Slurm says that the holder's job or step has ended. Its processes may live
    on."""
    if not _is_of_mine(me, holder):
        return False
    from kempner.jobs import slurm

    if holder["slurm_id"] != me["slurm_id"]:
        return slurm.is_running(holder["slurm_id"]) is False
    return slurm.step_runs(_step(holder.get("step"))) is False


def _number(text: Any) -> int | None:
    return int(text) if isinstance(text, str) and text.isdecimal() else None


def _step(text: Any) -> int | None:
    """Return the number of a step, None for steps with a name, such as batch, which have no
    order."""
    number = _number(text)
    return number if number is not None and number <= this_job.LAST_STEP else None
