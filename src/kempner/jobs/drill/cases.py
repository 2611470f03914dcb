"""The cases of the drill, and the rules by which a promise is kept. Reads only a run's records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kempner.jobs.records.run_history import History, load_history

DRILL_STEPS, SAVE_INTERVAL = 40, 10  # steps of each run, and between its checkpoints
# The step at which a fault strikes: between two saves, so that steps must be repeated.
STRIKE_CALL = 15
# The last step under the small quota: the save of step 20 fails, that of step 30 does not.
LAST_CALL = 25
HANG_S = 30  # timeout of the watchdog
PACE_S = 0.2  # seconds of a step, so that a fault strikes between two saves


@dataclass(frozen=True)
class Case:
    """One promise. `fault`: a fault of scripts/slurm/lib/drill_train.py; `slow`: seconds per step
    of the first start, for faults from outside; `ask`: a question for the site's staff if the
    promise does not hold."""

    name: str
    promise: str
    ask: str
    fault: str = ""
    slow: float = PACE_S
    options: tuple[str, ...] = ()
    minutes: int = 15  # the time limit of its job
    usual: float = 2.0  # minutes of its nodes, for the estimate


@dataclass
class CaseOutcome:
    """The events of a case. `run`: its directory; `struck`: unix time of the fault, if any;
    `not_tried`: why it could not be tried; `broken`: what ended it, besides the run's records."""

    case: Case
    run: Path
    struck: float | None = None
    started: bool = False
    not_tried: str = ""
    broken: str = ""


@dataclass(frozen=True)
class PromiseRow:
    """A line of the table. `holds`: None if it was not tried."""

    name: str
    promise: str
    holds: bool | None
    because: str
    ask: str = ""


REQUEUE = (
    "may users requeue their own batch jobs, also from inside the job (`scontrol requeue`)? If"
    " not, KEMPNER_CHAIN=K submits the next job instead: docs/reference/slurm.md"
)
CASES = (
    Case(
        "unbroken",
        "A job trains from its first step to its last",
        "what does the batch log say? The nodes must see this directory and this Python, and reach"
        " each other over the network",
    ),
    Case(
        "kill",
        "A rank that is killed (kill -9) costs the steps since the last checkpoint",
        "does srun end a step whose task has died (--kill-on-bad-exit), and may the job start"
        " another one?",
        "kill",
    ),
    Case(
        "freeze",
        f"A rank that is frozen is found after {HANG_S} s, and the run goes on",
        "do SIGKILLs reach a stopped process in a job here, and does its step end?",
        "freeze",
    ),
    Case(
        "node",
        "All processes of a node end at once, as when it is lost: the run goes on",
        "what does Slurm do with the step of a lost node: is SlurmdTimeout short, and are jobs with"
        " --requeue started again?",
        "node",
    ),
    Case(
        "disk",
        "A save that finds the disk full is left out: the run trains on, its last checkpoint whole",
        "does the file system of this directory report a full quota as an error of the write?",
        "disk",
    ),
    Case(
        "requeue",
        "A job that is requeued by its user or an operator continues by itself",
        REQUEUE,
        slow=1.0,
    ),
    Case(
        "limit",
        "At its time limit a job saves, is requeued, and repeats no step",
        "do jobs get their --signal before the time limit here? And " + REQUEUE,
        # 40 steps of 4 s take over two minutes; the warning comes within two.
        slow=4.0,
        options=("--signal=B:SIGTERM@60",),
        minutes=3,
        usual=4.0,
    ),
    Case(
        "preempt",
        "A job that is preempted saves in the grace time, and continues by itself",
        "does preemption requeue a job here (PreemptMode=REQUEUE), and how long is its grace time?"
        " If it cancels, set KEMPNER_CHAIN=K: docs/reference/slurm.md",
        # 75 s from step 15 to the last one: longer than the drill waits for a preemption.
        slow=3.0,
    ),
)
OWN = Case(
    "own",
    "Your own program, killed once, is started again",
    "may the job start another step after one was ended?",
    usual=3.0,
)


def losses_of(run: History) -> dict[int, float]:
    """Return the final loss of each step."""
    return {line["step"]: line["loss"] for line in run.losses}


def repeated_steps(run: History) -> int:
    """Count the steps that were repeated after a restart."""
    pairs = zip(run.attempts, run.attempts[1:], strict=False)
    return sum(max(0, a.last_step - b.first_step) for a, b in pairs if b.began is not None)


def judge_case(seen: CaseOutcome, unbroken: dict[int, float]) -> PromiseRow:
    """Judge a case of the trainer by the records of its run. `unbroken`: the losses of the
    undisturbed run, {} if it did not finish."""
    case, run = seen.case, load_history(seen.run)
    holds: bool | None = None
    if seen.not_tried:
        because = seen.not_tried
    elif seen.broken and not seen.started:
        holds, because = False, seen.broken
    elif not seen.struck and case.name != "unbroken" and run.state.word == "done":
        because = "the run was over before the fault could strike"
    elif case.name == "disk" and run.state.word == "done" and not save_was_refused(seen):
        because = "no save has hit the quota"
    else:
        wrong = what_is_wrong(seen, run, unbroken)
        holds = not wrong
        because = wrong or describe_outcome(seen, run)
    return PromiseRow(
        case.name, case.promise, holds, because, "" if holds is not False else case.ask
    )


def what_is_wrong(seen: CaseOutcome, run: History, unbroken: dict[int, float]) -> str:
    """Return why the promise was not kept; "" if it was."""
    if run.status.get("state") != "done":
        return how_it_ended(seen, run)
    losses, starts = losses_of(run), count_starts(run)
    if seen.case.name in ("requeue", "limit", "preempt") and starts < 2:
        return "the run finished without another start"
    if sorted(losses) != list(range(1, DRILL_STEPS + 1)):
        return f"only {len(losses)} of {DRILL_STEPS} steps are on record"
    if seen.case.name == "limit" and (again := repeated_steps(run)):
        return f"the save before the limit came too late: {again} steps were done again"
    if seen.case.name == "disk" and starts > 1:
        return f"the run has started {starts} times"
    # Bitwise: the runs are deterministic, and so is a resume on the same number of ranks.
    if unbroken and (other := [step for step in losses if losses[step] != unbroken.get(step)]):
        return (
            f"{len(other)} losses are not those of the unbroken run, the first that of step"
            f" {other[0]}: {losses[other[0]]!r} for {unbroken.get(other[0])!r}"
        )
    return ""


def save_was_refused(seen: CaseOutcome) -> bool:
    """Return whether the log says that the save under the small quota failed."""
    step = STRIKE_CALL // SAVE_INTERVAL * SAVE_INTERVAL + SAVE_INTERVAL
    try:
        log = seen.run.with_suffix(".out").read_text(errors="replace")
    except OSError:
        return False
    return f"the checkpoint of step {step} failed" in log


def count_starts(run: History) -> int:
    return sum(attempt.began is not None for attempt in run.attempts)


def how_it_ended(seen: CaseOutcome, run: History) -> str:
    """Describe a run that did not reach its last step."""
    parts = [seen.broken] if seen.broken else []
    last = run.attempts[-1] if run.attempts else None
    if run.refusal is not None:
        parts.append(run.refusal.text)
    elif last is not None:
        parts.append(f"{last.state} at step {last.last_step}")
        parts += [last.reason] if last.reason else []
        parts += [f"{last.decision}: {last.why}"] if last.decision else []
    else:
        parts.append(first_error(seen.run.with_suffix(".out")) or "no start is on record")
    return "; ".join(dict.fromkeys(parts))


def first_error(log: Path) -> str:
    """Return the first line of a batch log with an error, or else the last line."""
    try:
        lines = log.read_text(errors="replace").split("\n")
    except OSError:
        return ""
    lines = [line.strip() for line in lines if line.strip()]
    return next((x for x in lines if "error" in x), lines[-1] if lines else "")[:300]


def describe_outcome(seen: CaseOutcome, run: History) -> str:
    """Describe how a run kept its promise."""
    starts, again = count_starts(run), repeated_steps(run)
    parts = [f"{starts} start{'s' * (starts > 1)}"]
    answers = [a.decision for a in run.attempts[:-1] if a.decision]
    names = {"restart": "in place", "requeue": "by a requeue", "leave": "by Slurm's own requeue",
             "chain": "by the next job of a chain"}  # fmt: skip
    parts += [f"again {names[each]}" for each in dict.fromkeys(answers) if each in names]
    if starts > 1:
        parts.append(f"{again} steps done again")
    after = [a.stepped for a in run.attempts if seen.struck and (a.stepped or 0) > seen.struck]
    # For "limit", `struck` is the first look at the steps: the time of the limit is unknown.
    if starts > 1 and seen.struck and after and seen.case.name != "limit":
        parts.append(f"{(after[0] or 0) - seen.struck:.0f} s from the fault to the next step")
    if seen.case.name == "disk":
        parts.append("the save of step 20 was refused")
    return ", ".join(parts) + ("; all losses equal" if seen.case.name != "unbroken" else "")


def judge_own(seen: CaseOutcome) -> PromiseRow:
    """Judge the user's own program: it must start again after the kill."""
    run = load_history(seen.run)
    if seen.not_tried or not seen.struck:
        over = run.status.get("state") == "done"
        why = seen.not_tried or (
            "the program was over before it could be killed" if over else how_it_ended(seen, run)
        )
        return PromiseRow(
            OWN.name, OWN.promise, None if seen.not_tried or over else False, why, OWN.ask
        )
    again = [a for a in run.attempts if (a.began or 0) > seen.struck]
    if not again:
        return PromiseRow(OWN.name, OWN.promise, False, how_it_ended(seen, run), OWN.ask)
    because = f"started again {(again[0].began or 0) - seen.struck:.0f} s after the kill"
    done = run.status.get("state") == "done"
    because += "; it has finished" if done else "; the drill has then ended it"
    return PromiseRow(OWN.name, OWN.promise, True, because)


def judge_all(
    seen: Sequence[CaseOutcome], say: Callable[[PromiseRow], None] = lambda row: None
) -> list[PromiseRow]:
    """Judge all cases, each against the unbroken run."""
    first = next((load_history(s.run) for s in seen if s.case.name == "unbroken"), None)
    unbroken = losses_of(first) if first and first.status.get("state") == "done" else {}
    rows = [judge_own(s) if s.case is OWN else judge_case(s, unbroken) for s in seen]
    for row in rows:
        say(row)
    return rows
