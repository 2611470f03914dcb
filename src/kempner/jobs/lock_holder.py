"""State of a lock's holder, from this host and Slurm: is it gone, and must it give way?"""

from __future__ import annotations

from typing import Any

from kempner.jobs import this_job
from kempner.jobs.system.process import birth_ticks


def is_gone(me: dict[str, Any], holder: dict[str, Any]) -> bool:
    """Return whether the holder is provably gone: it ran under the same kernel as this process, and
    no longer exists there."""
    place = ("cluster", "host", "kernel")
    if holder.get("kernel") is None or any(holder.get(name) != me[name] for name in place):
        return False
    # The kernel reuses process ids; the start time tells the processes apart.
    return birth_ticks(holder.get("pid", 0)) != holder.get("born")


def _is_of_mine(me: dict[str, Any], holder: dict[str, Any]) -> bool:
    """Return whether this process can ask Slurm about the holder's job: Slurm may hide other users'
    jobs, and another cluster on this file system numbers its jobs separately."""
    are_jobs = me["slurm_id"] is not None and isinstance(holder.get("slurm_id"), str)
    return are_jobs and all(holder.get(name) == me[name] for name in ("cluster", "uid"))


def follows(me: dict[str, Any], holder: dict[str, Any]) -> bool:
    """Return whether the holder belongs to an earlier start of this job, or an earlier step of this
    batch script. It must then give way even if it is alive: Slurm restarts a job if it believes a
    host to be lost, and ranks of a step may outlive their srun."""
    if not _is_of_mine(me, holder) or holder["slurm_id"] != me["slurm_id"]:
        return False
    then, now = _number(holder.get("restart")), _number(me["restart"])
    if then != now:
        return then is not None and now is not None and then < now
    # JOB.RESTART.PID of the batch script, then the number of the in-place restart: restart.sh.
    script = str(me["attempt"]).split(".")[:3]
    before, here = _step(holder.get("step")), _step(me["step"])
    same = me["attempt"] is not None and str(holder.get("attempt")).split(".")[:3] == script
    return same and before is not None and here is not None and before < here


def has_ended(me: dict[str, Any], holder: dict[str, Any]) -> bool:
    """Return whether Slurm says that the holder's job or step has ended; it may still be alive."""
    if not _is_of_mine(me, holder):
        return False
    from kempner.jobs import slurm

    if holder["slurm_id"] != me["slurm_id"]:
        return slurm.is_running(holder["slurm_id"]) is False
    return slurm.step_runs(_step(holder.get("step"))) is False


def _number(text: Any) -> int | None:
    return int(text) if isinstance(text, str) and text.isdecimal() else None


def _step(text: Any) -> int | None:
    """Return the number of a step; None for named steps such as "batch", which have no order."""
    number = _number(text)
    return number if number is not None and number <= this_job.LAST_STEP else None
