"""The decision at the end of a step; it is made only here. No I/O, no torch.

judge.py collects the facts and calls decide_next() once; the batch script (requeue.sh) obeys.
DECISION_RULES, in order, are the table of docs/reference/slurm.md;
tests/jobs/unit/test_decision.py compares them.

Every fact has a default for "unknown", and with the defaults the run goes on: only known facts end
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kempner.jobs.records.attempts import BAD_INPUT_REASON, CANCELLED_REASON

BatchAction = Literal["restart", "requeue", "chain", "end", "leave"]
Class = Literal["", "bad input", "program", "host", "site"]

LARGEST_SHARE = 0.05  # of the job's nodes may be excluded, if that is more than KEMPNER_EXCLUDE
SHORTEST_PAUSE, LONGEST_PAUSE = 1, 60  # minutes before the next start: see pause_of()


@dataclass(frozen=True, kw_only=True)
class StepEnd:
    """Facts about a step that has ended, or a start that ended before its step."""

    # The run.
    run: str = ""  # status.json of this attempt: done, stopped, failed, interrupted, running
    what: str = "the step has ended"  # in words
    refused: str = ""  # exit code 2: the program's message
    trained: bool = False  # an earlier start of this run with this command has done a step
    final: str = ""  # a fault that would recur, such as out of memory
    site: str = ""  # a fault of the site, such as an unavailable file system
    away: bool = False  # the controller was unavailable, and the step has not begun
    waited: float = 0.0  # hours since the site's first fault without progress afterwards
    no_progress: int = 0  # attempts in a row, including this one, without a new checkpoint

    # The job.
    job: Literal["running", "ending", "cancelled"] = "running"
    slurm: str = ""  # its state in Slurm's words
    batch: bool = True  # a batch job: no other job can be requeued
    interrupt: bool = False  # SIGINT between two attempts
    may_requeue: bool = True
    chain: Literal["", "next", "last"] = ""  # with KEMPNER_CHAIN: another job may follow, or not
    successor: str = ""  # the job waiting to continue it; "" if this job was cancelled

    # The nodes.
    faulty: tuple[str, ...] = ()  # nodes that the next attempt should avoid
    fault: str = ""  # their fault, in words
    lost: bool = False  # they do not answer: Slurm itself removes them
    broken: bool = False  # broken hardware, or the program is not visible: excluded beyond limits
    preflight: bool = False  # the preflight has failed
    # Faulty nodes that spares have replaced and that are still in the job.
    spent: tuple[str, ...] = ()
    spares: int = 0  # idle nodes of the job
    nodes: int = 1  # of the job, without spares
    needed: int = 1  # of the job, with spares
    others: int | None = None  # other nodes that could take this job; None: unknown
    excluded: int = 0  # nodes that the job has excluded in the last day
    in_vain: int = 0  # nodes that it has excluded since the last new checkpoint

    # Restarts in place.
    room: bool = False  # the job allows another step and was not asked to leave
    created: bool = True  # Slurm could create the step
    early: bool = False  # a start after the first one ended before its step
    left: float | None = None  # seconds until the time limit's warning; None: unknown
    start: float = 0.0  # seconds from a start to its first step

    # The settings.
    max_crashes: int = 3
    max_excluded: int = 2
    max_wait: float = 24.0  # hours


@dataclass(frozen=True, kw_only=True)
class BatchDecision:
    """Decision for the batch script. `pause`: minutes to the next start; `notes`: for the log."""

    answer: BatchAction
    why: str
    kind: Class = ""
    excluded: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    pause: int = 0
    notes: tuple[str, ...] = ()
    no_progress: int = 0  # the next attempt's count of attempts in a row starts here


@dataclass(frozen=True)
class DecisionRule:
    """One row of the table. `why` gets the facts and the nodes to avoid."""

    case: str  # for the docs
    holds: Callable[[StepEnd, Nodes], bool]
    answer: BatchAction
    why: Callable[[StepEnd, Nodes], str]
    kind: Class = ""


@dataclass(frozen=True)
class Nodes:
    """Nodes that the next attempt avoids, replaced or excluded. `note`: why a faulty node stays."""

    replaced: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    note: str = ""
    too_few: bool = False  # not enough other nodes
    anew: bool = False  # the count of attempts without progress restarts on the other nodes


def most_excluded(end: StepEnd) -> int:
    """Return how many nodes the job may exclude per day: KEMPNER_EXCLUDE or 5 % of its nodes,
    whichever is more; 0 with KEMPNER_EXCLUDE=0."""
    if end.max_excluded == 0:
        return 0
    return max(end.max_excluded, int(LARGEST_SHARE * end.nodes))


def leave_out(end: StepEnd) -> Nodes:
    """Choose the nodes that the next attempt avoids."""
    hosts, names = end.faulty, ", ".join(end.faulty)
    # Spares first: the job keeps its place, and nothing counts against KEMPNER_EXCLUDE.
    if hosts and len(hosts) <= end.spares and end.room:
        return Nodes(replaced=hosts)
    if end.lost:
        hosts = ()  # Slurm keeps the next start off them
    hosts = (*hosts, *(host for host in end.spent if host not in hosts))
    if not hosts or end.max_excluded == 0:
        return Nodes()
    if not (end.may_requeue or end.chain or end.broken):
        return Nodes()  # no next start
    names, most = ", ".join(hosts), most_excluded(end)
    stays = f"{names}: {end.fault}, not excluded: "
    # The node failed, not the program. The limit stops a program that fails on every node from
    # excluding one after the other.
    anew = (end.trained or end.broken) and end.in_vain + len(hosts) <= most
    # If the run would otherwise end, the number of earlier exclusions does not count.
    would_end = anew and end.no_progress >= end.max_crashes
    if not (end.broken or would_end) and end.excluded + len(hosts) > most:
        before = f"{end.excluded} were in the last day, " if end.excluded else ""
        return Nodes(note=f"{stays}{before}the limit is {most} (KEMPNER_EXCLUDE)")
    # A job that excludes too many nodes waits in the queue forever.
    if end.others is None:
        return Nodes(note=f"{stays}Slurm did not say whether there are enough other nodes")
    if end.others < end.needed:
        why = f"the other nodes that could take this job, {end.others}, are too few"
        return Nodes(note=f"{stays}{why}", too_few=True)
    return Nodes(excluded=hosts, anew=anew)


def may_restart(end: StepEnd, nodes: Nodes) -> bool:
    """Return whether the next attempt begins at once, as another step of the same job."""
    if not end.room or end.run in OVER or end.refused or (end.site and not end.away):
        return False
    # A node that is lost or to be excluded must be replaced.
    if (end.lost or end.preflight or nodes.excluded) and not nodes.replaced:
        return False
    # The warning would come before a restart has done much; a requeue gets a full time limit.
    if end.left is not None and end.left < 2 * end.start:
        return False
    # A run that fails at once would use up its attempts in seconds: a requeue may bring new nodes.
    requeue = end.may_requeue or bool(end.chain)
    if nodes.replaced or end.away or not requeue:
        return True
    return end.no_progress < 2 and end.created


OVER = ("done", "stopped", "failed")

# The first rule that holds decides: certain ends of the run, then Slurm's actions on the job, then
# faults that end it, then the place of the next attempt.
DECISION_RULES = (
    DecisionRule(
        "`status.json` of this attempt says done, stopped or failed",
        lambda e, n: e.run in OVER,
        "end",
        lambda e, n: f"the run is {e.run}",
    ),
    DecisionRule(
        "exit code 2, and no start with this command has done a step: bad input",
        # If a file system is unavailable, any program reports missing input.
        lambda e, n: bool(e.refused) and not e.trained and not e.site,
        "end",
        lambda e, n: BAD_INPUT_REASON + (f": {e.refused}" if e.refused.strip() else ""),
        "bad input",
    ),
    DecisionRule(
        "Slurm is ending the job, nobody has cancelled it, and the next job of its chain waits",
        lambda e, n: e.job != "running" and bool(e.successor),
        "chain",
        lambda e, n: f"Slurm is ending the job ({e.slurm}); job {e.successor} continues it",
    ),
    DecisionRule(
        "the job was cancelled",
        lambda e, n: e.job == "cancelled",
        "leave",
        lambda e, n: f"{CANCELLED_REASON} (Slurm: {e.slurm})",
    ),
    DecisionRule(
        "Slurm is ending the job (requeued, preempted, a lost node)",
        lambda e, n: e.job == "ending",
        "leave",
        lambda e, n: f"Slurm is ending the job ({e.slurm}), and decides whether it starts again",
    ),
    DecisionRule(
        "not a batch job (salloc, interactive.sh)",
        lambda e, n: not e.batch,
        "end",
        lambda e, n: f"{e.what}; only a batch job is requeued",
    ),
    DecisionRule(
        "SIGINT between two attempts",
        lambda e, n: e.interrupt,
        "end",
        lambda e, n: f"{e.what}; SIGINT between two attempts",
    ),
    DecisionRule(
        "a fault that would come again, such as out of memory",
        # A run that saved and left in order goes on, despite an error of one of its ranks.
        lambda e, n: bool(e.final) and e.run != "interrupted",
        "end",
        lambda e, n: f"{e.final}; another attempt would end in the same way",
        "program",
    ),
    DecisionRule(
        "a fault of the site for `KEMPNER_MAX_WAIT` hours without a new checkpoint",
        lambda e, n: bool(e.site) and e.waited >= e.max_wait,
        "end",
        lambda e, n: (
            f"{e.site} for {e.waited:.0f} h without a new checkpoint"
            f" (KEMPNER_MAX_WAIT={e.max_wait:g})"
        ),
        "site",
    ),
    DecisionRule(
        "`KEMPNER_MAX_CRASHES` attempts in a row without a new checkpoint, not by the site, and"
        " not by a node that is now excluded",
        lambda e, n: not e.site and not n.anew and e.no_progress >= e.max_crashes,
        "end",
        lambda e, n: (
            f"{e.what}; {e.no_progress} attempts in a row without progress"
            f" (KEMPNER_MAX_CRASHES={e.max_crashes})"
        ),
        "program",
    ),
    DecisionRule(
        "srun could not create the step, as the controller did not answer, and now it does",
        lambda e, n: e.away and may_restart(e, n),
        "restart",
        lambda e, n: f"{e.what}; {e.site}",
        "site",
    ),
    DecisionRule(
        "a crash, a hang, or a faulty or lost node that a spare replaces, with time left and"
        " no request to exit",
        may_restart,
        "restart",
        lambda e, n: e.what,
        "host",
    ),
    DecisionRule(
        "`--no-requeue`, without a chain",
        lambda e, n: not e.may_requeue and not e.chain,
        "end",
        lambda e, n: f"{e.what}; the job was submitted with --no-requeue",
    ),
    DecisionRule(
        "the last job of its chain",
        lambda e, n: e.chain == "last",
        "end",
        lambda e, n: f"{e.what}; it was the last job of its chain: submit it again to go on",
    ),
    DecisionRule(
        "the [preflight](../guide/preflight.md) found faulty nodes, and too few others could "
        "take the job",
        lambda e, n: e.preflight and n.too_few,
        "end",
        lambda e, n: f"{e.what}; no other nodes are available",
        "host",
    ),
    DecisionRule(
        "a fault of the site, such as an unavailable file system, or another job has the run now",
        lambda e, n: bool(e.site) and not e.chain,
        "requeue",
        lambda e, n: f"{e.site}: the next start waits {pause_of(e)} min",
        "site",
    ),
    DecisionRule(
        "anything else, with [`KEMPNER_CHAIN`](#where-requeue-is-forbidden)",
        lambda e, n: bool(e.chain),
        "chain",
        lambda e, n: e.what,
    ),
    DecisionRule(
        "anything else: interrupted, the time limit, a lost node, faulty nodes that are now"
        " excluded, a crash or a hang after `KEMPNER_RESTARTS` restarts, exit code 2 after a step"
        " was done",
        lambda e, n: True,
        "requeue",
        lambda e, n: e.what + exclude_list(e, n),
    ),
)


def exclude_list(end: StepEnd, nodes: Nodes) -> str:
    return f"; without {','.join(nodes.excluded)}: {end.fault}" if nodes.excluded else ""


def pause_of(end: StepEnd) -> int:
    """Return the minutes until the next start: after a fault of the site, a quarter of the time
    waited so far; after a start that ended before its step, 1, 5, 25, ...: its cause may pass."""
    minutes = 0.0
    if end.site:
        minutes = 60 * end.waited / 4
    elif end.early:
        minutes = 5.0 ** (end.no_progress - 1)
    else:
        return 0
    return round(min(max(minutes, SHORTEST_PAUSE), LONGEST_PAUSE))


def rule_of(end: StepEnd, nodes: Nodes) -> DecisionRule:
    """Return the first rule that holds; the last one always does."""
    return next(rule for rule in DECISION_RULES if rule.holds(end, nodes))


def decide_next(end: StepEnd) -> BatchDecision:
    """Decide by the first rule that holds."""
    nodes = leave_out(end)
    rule = rule_of(end, nodes)
    goes_on = rule.answer in ("requeue", "chain") and end.job == "running"
    notes = [nodes.note] if nodes.note else []
    if end.room and end.left is not None and end.left < 2 * end.start:
        notes.append(
            f"no restart in place: the warning before the time limit is due in"
            f" {max(0, end.left):.0f} s, the last start took {end.start:.0f} s"
        )
    return BatchDecision(
        answer=rule.answer,
        why=rule.why(end, nodes),
        kind=rule.kind or end_class(end),
        excluded=nodes.excluded if goes_on else nodes.replaced if rule.answer == "restart" else (),
        replaced=nodes.replaced if rule.answer == "restart" else (),
        pause=pause_of(end) if goes_on else 0,
        notes=tuple(notes),
        no_progress=0 if nodes.anew and goes_on else end.no_progress,
    )


def end_class(end: StepEnd) -> Class:
    """Return whose fault the end was, for rules that do not say."""
    if end.site:
        return "site"
    return "host" if end.faulty or end.refused else ""


def decision_table() -> str:
    """Format DECISION_RULES as in docs/reference/slurm.md."""
    rows = [f"| {rule.case} | {rule.answer} | {rule.kind or '-'} |" for rule in DECISION_RULES]
    return "\n".join(["| Case | Decision | Whose fault |", "|---|---|---|", *rows])
