"""An inquiry among the ranks while a step is late: who is where, who lags, who is stuck.

As long as steps arrive, this module is not loaded. When one is late, each rank's watchdog writes an
answer into the rendezvous store every few seconds: where its main thread is, its collectives in
flight by torch's flight recorder, and what the kernel reports of its process and of one other rank
on its node. Rank 0 (or rank 1, if rank 0 is silent) reads them, names the laggards, and ends the
run early if the judge (suspects.py) finds that two sources agree.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kempner.checkpoint.checkpointer import SAVE_GROUP, SAVE_THREAD
from kempner.jobs.system.process import birth_ticks
from kempner.train.resilience.hanging import (
    EXIT_CODE,
    HANG_AT,
    HANG_ORDER,
    STACKS_SIGNAL,
    WRITE_S,
    bytes_moved,
    own_process,
    within,
)
from kempner.train.resilience.suspects import (
    ANSWERS,
    GAP_S,
    Answer,
    Call,
    Judge,
    Look,
    Seen,
    Suspect,
    in_words,
)

if TYPE_CHECKING:
    from types import FrameType

    from kempner.train.resilience.nccl_ras import RasCounts
    from kempner.train.resilience.watchdog import Watchdog

HANG_ANSWERS, HANG_VERDICT = "hang/answers", "hang/verdict"
ROUND_S = 2.0  # between two answers of a rank
QUIET_S = 2.0  # beyond a round: then a rank is silent
ROUNDS_PER_S = 1000  # that the store can serve for all ranks; each is two requests
PATIENT_ROUNDS = 5  # a rank that saves or validates answers so many times less often
RECENT_CALLS, MOST_CALLS = 3, 32  # calls of a group, and of all groups, in an answer
LOOK_S = 1.0  # between two looks of the rank that reads the answers
RAS_S = 10.0  # between two questions to NCCL
NAMED_HUNG_RANKS = 16  # ranks in a message
LIBRARY = str(Path(os.__file__).parent)
TICKS = os.sysconf("SC_CLK_TCK")
COMPILER_FILES = (
    "_dynamo/convert_frame",
    "_inductor/compile_fx",
    "_inductor/async_compile",
    "torch/utils/cpp_extension",
    "triton/compiler/",
)


class Inquiry:
    """This rank's part. Its watchdog calls turn() every second while a step is late, over() when
    one has come, end() at the end."""

    def __init__(self, dog: Watchdog) -> None:
        self.leads = dog.rank == 0
        self._dog, self._number = dog, 0
        self._round = max(ROUND_S, dog.world_size / ROUNDS_PER_S)
        self._thread: threading.Thread | None = None
        self._patient = False  # this rank at its last answer
        self._hosts: dict[int, str] = {}
        self._sent = 0.0
        self._numbers: dict[int, int] = {}  # of each rank's last answer, in any inquiry
        self._begin()

    def _begin(self) -> None:
        self._judge, self._began, self._next, self._turned = Judge(), 0.0, 0.0, 0.0
        self._heard: dict[int, tuple[int, float]] = {}  # the number of an answer, and when
        self._stale = set[int]()  # ranks whose last answer is of an earlier inquiry
        self._named: set[tuple[int, str, bool]] = set()
        self._order, self._shown, self._signalled = "", set[int](), -1
        self._ras: threading.Thread | None = None
        self._behind, self._asked = frozenset[int](), 0.0
        self._counts: RasCounts | None = None
        self.suspects: list[Suspect] = []
        self.stuck: list[Suspect] = []
        self.reason = ""

    # --- while a step is late ---

    def turn(self) -> str:
        """Answer and, on the leading rank, look at all answers; returns the reason to end the run
        now, "" to continue. Takes at most 2 s, whatever the store does."""
        now = time.monotonic()
        if now - self._turned > GAP_S:  # this process was stopped, perhaps all were
            self._heard = {}
        self._began, self._turned = self._began or now, now
        # A request to the store may never return: one thread makes them, and only one is under way.
        if self._thread is not None and self._thread.is_alive():
            if self._dog.rank == 1:
                self._without_store(now)
        elif now >= self._next:
            self._sent = now
            self._thread = threading.Thread(target=self._exchange, args=(now,), daemon=True)
            self._thread.start()
            self._thread.join(2.0)
        return self.reason

    def over(self) -> None:
        """Reset: a step has arrived."""
        if not self._began:
            return
        if self._named:
            self._dog.say(
                f"watchdog: the step has come, {time.monotonic() - self._began:.0f} s late"
            )
        if self._order:
            # Withdraw the order: it would end the run at the next late step.
            within(ROUND_S, lambda: self._dog.store.set(HANG_ORDER, ""))
        self._begin()

    def _exchange(self, now: float) -> None:
        dog = self._dog
        with contextlib.suppress(RuntimeError, ValueError, TypeError, OSError):
            answer = self._answer(now)
            patient = self._patient = answer.patient
            dog.store.set(f"{HANG_AT}{dog.rank}", answer.write())
            order, _, words = dog.store.get(HANG_ORDER).decode().partition(" ")
            self._shown = {int(rank) for rank in words.split(",")} if order == "show" else set()
            if order == "end" and not self.stuck:
                self.reason = words
                return
            pause = self._round * (PATIENT_ROUNDS if patient else 1)
            # The store is a thread in C++ of rank 0's process, and answers while its GIL is held.
            if dog.rank == 1 and not patient:
                answers = self._hear(now, [0])
                self.leads = self._quiet(now, 0, answers[0]) > 0.0
            if self.leads and not patient:
                pause = max(LOOK_S, self._round / 4)
                self._lead(now)
            self._next = now + pause

    def _answer(self, now: float) -> Answer:
        dog = self._dog
        self._number += 1
        launched, recorded = recorded_calls(saves=dog.is_patient)
        answer = Answer(
            own_process(),
            self._number,
            dog.step,
            self.place(),
            dog.is_patient,
            _compiles(),
            launched,
            recorded,
            seen_process(os.getpid(), now),
            dog.beside,
            self._look_beside(now),
        )
        # A rank that writes may take long; one that waits for the others' part is as in a step.
        return replace(answer, patient=False) if dog.is_saving and answer.is_waiting else answer

    def _look_beside(self, now: float) -> Seen | None:
        """Return what the kernel reports of the other rank on this node and, if rank 0 has
        asked for it, its place in the code: a signal makes it write its stacks, even if the
        GIL is held."""
        pid, ticks, scope = self._dog.process_beside.split() or ("", "", "")
        # Pids are only valid within their namespace.
        if scope != own_process().split()[2]:
            return None  # there is none, or it is on another node or in another container
        # The pid has since been reused by another process.
        if birth_ticks(int(pid)) != ticks:
            return Seen("", now)
        seen = seen_process(int(pid), now)
        if self._dog.beside not in self._shown or seen.state not in ("R", "S", "D"):
            return seen
        log = Path(self._dog.log.name).with_name(f"rank-{self._dog.beside}.log")
        # Signal once, and read only later output: earlier stacks are of another time.
        if self._signalled < 0:
            self._signalled = log.stat().st_size
            os.kill(int(pid), STACKS_SIGNAL)
            # The other process needs time to write.
            time.sleep(0.5)
        with contextlib.suppress(OSError), open(log, errors="replace") as file:
            file.seek(self._signalled)
            return replace(seen, place=place_in(file.read(1 << 20)))
        return seen

    # --- on the rank that leads ---

    def _hear(self, now: float, ranks: list[int]) -> dict[int, Answer]:
        """Return the answers of these ranks, and note which are new."""
        values = self._dog.store.multi_get([f"{HANG_AT}{rank}" for rank in ranks])
        answers = {
            rank: Answer.parse(text.decode()) for rank, text in zip(ranks, values, strict=True)
        }
        for rank, answer in answers.items():
            last = self._heard.get(rank, (-1, now))[0]
            if answer.number != last:
                # An answer to an earlier inquiry does not count.
                seen = answer.number == self._numbers.get(rank, 0)
                stale = last < 0 and (seen or answer.step < self._dog.step - 1)
                self._heard[rank] = (answer.number, self._began if stale else now)
                (self._stale.add if stale else self._stale.discard)(rank)
            self._numbers[rank] = answer.number
        return answers

    def _quiet(self, now: float, rank: int, last: Answer) -> float:
        """Return the seconds without an answer, 0 if they are few."""
        # Measured by this rank's clock from when an answer was seen: clocks of nodes differ.
        rare = last.patient or self._dog.is_saving
        quiet, rounds = now - self._heard[rank][1], PATIENT_ROUNDS if rare else 1
        return quiet if quiet > rounds * self._round + QUIET_S else 0.0

    def _lead(self, now: float) -> None:
        ranks = list(range(self._dog.world_size))
        answers = self._hear(now, ranks)
        if not self._hosts:
            names = self._dog.store.multi_get([f"host/{rank}" for rank in ranks])
            self._hosts = {rank: name.decode() for rank, name in enumerate(names)}
        silent = {r: quiet for r, last in answers.items() if (quiet := self._quiet(now, r, last))}
        heard = {r: a for r, a in answers.items() if r not in silent and r not in self._stale}
        self._ask_ras(now)
        self._judge_look(now, Look(heard, silent, self._hosts, self._behind))
        show = [
            rank
            for rank in silent
            if (seen := Look(heard).seen(rank)) is not None and seen.state in ("R", "S", "D")
        ]
        order = f"show {','.join(map(str, show))}" if show else ""
        if self.stuck:
            order = f"end {self.reason}"
        if order != self._order:
            self._order = order
            self._dog.store.set(HANG_ORDER, order)

    def _judge_look(self, now: float, look: Look) -> None:
        """Name each suspect once per state; note those that are stuck."""
        self.suspects = self._judge.look(now, look)
        if now - self._began < self._round + 1.0:
            return  # not all have had the time to answer
        keys = {(s.rank, s.doing, " in " in s.words) for s in self.suspects}
        if keys - self._named:
            self._named |= keys
            for line in in_words(self.suspects):
                self._dog.say(f"watchdog: no step for {self._dog.age:.0f} s: {line}")
        self.stuck = [suspect for suspect in self.suspects if suspect.is_stuck]
        if any(suspect.doing != "differs" for suspect in self.stuck):
            # Other silent ranks, silent for a shorter time, are included.
            quiet = [s for s in self.suspects if not s.is_stuck and ANSWERS in s.sources]
            self.stuck = sorted([*self.stuck, *quiet], key=lambda suspect: suspect.rank)
        if self.stuck:
            sources = dict.fromkeys(name for s in self.stuck for name in s.sources)
            self.reason = (
                f"no step for {self._dog.age:.0f} s after step {self._dog.step}: "
                f"{'; '.join(in_words(self.stuck))} ({' and '.join(sources)} agree)"
            )

    def _without_store(self, now: float) -> None:
        """Judge on rank 1 alone: rank 0's process, which hosts the store, is silent."""
        if not self._is_store_silent(now) or self._patient:
            return
        # Its own wait tells nothing about the others, whose answers it lacks.
        heard = {1: replace(self._answer(now), calls=(), place="")}
        self._judge_look(now, Look(heard, {0: now - self._sent}))
        if self._dog.is_saving and not self.reason and now - self._sent > self._dog.step_limit:
            # The watchdog's own limit is long in a save.
            self.reason = f"no step for {self._dog.age:.0f} s after step {self._dog.step}"

    def _is_store_silent(self, now: float) -> bool:
        """Return whether a request to the store has waited for long."""
        waits = self._thread is not None and self._thread.is_alive()
        return waits and now - self._sent > self._round + QUIET_S

    def _ask_ras(self, now: float) -> None:
        """Ask NCCL's RAS in parallel to the inquiry, which does not wait for it."""
        wanted = torch.cuda.is_available() or "NCCL_RAS_ADDR" in os.environ
        if not wanted or now - self._asked < RAS_S or os.environ.get("NCCL_RAS_ENABLE") == "0":
            return
        self._asked = now
        from kempner.train.resilience.nccl_ras import RasCounts, ask_ras

        counts = self._counts = self._counts or RasCounts(self._dog.world_size)

        def ask() -> None:
            self._behind = counts.behind(ask_ras())

        self._ras = threading.Thread(target=ask, daemon=True)
        self._ras.start()

    def tell_wait(self) -> None:
        """Report how long a save or a validation takes so far, and where the ranks are; includes
        ranks that wait for others only if all do."""
        dog = self._dog
        places, waiting = dict[int, str](), dict[int, str]()
        if dog.world_size > 1 and not self._is_store_silent(time.monotonic()):
            ranks = list(range(dog.world_size))
            for rank, answer in self._hear(time.monotonic(), ranks).items():
                if rank not in self._stale:
                    (waiting if answer.is_waiting else places)[rank] = answer.place
        places = places or waiting or {dog.rank: self.place()}
        where = "; ".join(_lines(places, [])[:NAMED_HUNG_RANKS])
        dog.say(f"watchdog: no step for {dog.age:.0f} s, in a save or a validation: {where}")

    # --- the end ---

    def end(self, what: str) -> None:
        """Collect where all ranks are, record the hang, exit. Each part that may block (a store in
        a frozen process, a hanging file system) gets a bounded time."""
        # Before anything that may block, while the main thread is where it hangs.
        place, wait = self.place(), self._round + QUIET_S if self.stuck else 0.0
        within(WRITE_S, self._dump_recorder)
        answers = None
        if not self._is_store_silent(time.monotonic()):
            answers = within(2 * self._dog.patience + 1 + wait, lambda: self.ask(place, wait))
        within(WRITE_S, lambda: self._record(what, answers))
        os._exit(EXIT_CODE)

    def ask(self, place: str, wait: float = 0.0) -> dict[int, str]:
        """Return the answers received, by rank, on the leading rank. The others answer and wait
        until it has recorded the hang, because their exit would make srun end it. Raises if the
        store does not respond. `wait`: seconds for the others to notice the end."""
        dog, answers = self._dog, {self._dog.rank: place}
        if not self.leads:
            dog.store.append(HANG_ANSWERS, f"{dog.rank} {place}\n")
            # The store ends with the process of rank 0, which has then recorded the hang.
            with contextlib.suppress(RuntimeError):
                dog.store.wait([HANG_VERDICT])
            return answers
        # Create the key: get() would wait for a missing one.
        dog.store.append(HANG_ANSWERS, "")
        deadline = time.monotonic() + dog.patience + wait
        stuck = {suspect.rank for suspect in self.stuck}
        # Stuck ranks will not answer: do not wait for them.
        while len(answers.keys() | stuck) < dog.world_size and time.monotonic() < deadline:
            time.sleep(0.2)
            for line in dog.store.get(HANG_ANSWERS).decode().splitlines():
                rank, _, answer = line.partition(" ")
                answers[int(rank)] = answer
        return answers

    def _record(self, what: str, answers: dict[int, str] | None) -> None:
        """Record the hang on the leading rank, or on rank 1 if rank 0 and its store are silent."""
        dog = self._dog
        leads = self.leads or (answers is None and dog.rank == 1)
        if not leads and answers is not None:
            return
        # If the store does not answer, its process, rank 0's, is silent.
        silent = [0]
        if answers is not None:
            silent = [rank for rank in range(dog.world_size) if rank not in answers]
        for line in _lines(answers or {dog.rank: self.place()}, silent):
            print(f"watchdog: {line}", file=dog.log)
        if leads and self.stuck:
            # Ranks that make different calls run the same program: no host is to blame.
            blame = all(suspect.doing != "differs" for suspect in self.stuck)
            dog.on_hang(what, [suspect.rank for suspect in self.stuck], blame)
        elif leads:
            who = f"; ranks that do not answer: {_named(silent)}" if silent else ""
            if not silent and self.suspects:
                who = f"; {'; '.join(in_words(self.suspects))}"
            dog.on_hang(f"{what}{who}", silent, True)
        # The others wait for this in ask(): the record is written, and they may exit.
        if self.leads:
            dog.store.set(HANG_VERDICT, "")

    def place(self) -> str:
        """Return the main thread's place in the code and, if it may wait for a checkpoint, that of
        the writing thread."""
        frames, when = sys._current_frames(), "at the start"
        if not self._dog.starting:
            when = f"after step {self._dog.step}"
        place = f"{when} in {_place_of(frames.get(self._dog.main))}"
        if self._dog.is_patient:
            for thread in threading.enumerate():
                if thread.name.startswith(SAVE_THREAD) and thread.ident in frames:
                    place += f", writes in {_place_of(frames[thread.ident])}"
        return place

    def _dump_recorder(self) -> None:
        """Dump NCCL's flight recorder for torchfrtrace, if there is one."""
        dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
        if dump is None or not torch.cuda.is_available():
            return
        with contextlib.suppress(Exception):  # a broken driver must not keep the process alive
            path = Path(self._dog.log.name).with_name(f"nccl-trace-{self._dog.rank}")
            path.write_bytes(dump())
            print(f"watchdog: NCCL's flight recorder is in {path}", file=self._dog.log)


def recorded_calls(saves: bool) -> tuple[int, tuple[Call, ...] | None]:
    """Return how many collectives this process has launched, -1 if unknown, and the last calls of
    each group with all that are in flight, None if unknown: from torch's flight recorders, of NCCL
    and of gloo. `saves`: also those of saves, for which no step waits."""
    launched, by_group, known = 0, dict[tuple[str, bool], list[Call]](), False
    firsts = _first_ranks()
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is None:
            continue
        with contextlib.suppress(Exception):  # in another version of torch, or switched off
            trace: dict[str, Any] = pickle.loads(dump(True, False, False))  # without stacks
            status = trace.get("pg_status") or {}
            known = known or bool(status)
            launched += sum(max(0, int(s["last_enqueued_collective"])) for s in status.values())
            for entry in trace.get("entries", []):
                if not saves and entry["process_group"][1] == SAVE_GROUP:
                    continue
                call = _call(entry, firsts)
                by_group.setdefault((call.group, call.is_message), []).append(call)
    if not known:
        return -1, None
    # Calls in flight count however old they are: some rank may have waited there for long.
    last = (call for calls in by_group.values() for call in calls[-RECENT_CALLS:])
    flight = (c for calls in by_group.values() for c in calls[:-RECENT_CALLS] if not c.done)
    return launched, (*islice(flight, MOST_CALLS), *islice(last, MOST_CALLS))


def _call(entry: dict[str, Any], firsts: dict[str, int]) -> Call:
    message = bool(entry.get("is_p2p"))
    name = str(entry["process_group"][0])
    # Disjoint groups may have the same name.
    group = f"{name} of rank {firsts[name]}" if firsts.get(name) else name
    number = entry["p2p_seq_id" if message else "collective_seq_id"]
    sizes, kinds = entry.get("input_sizes") or [[]], entry.get("input_dtypes") or [""]
    call = str(entry["profiling_name"]).rpartition(":")[2]
    done = bool(entry.get("retired")) or entry.get("state") == "completed"
    return Call(group, int(number), call, f"{sizes[0]} {kinds[0]}".strip(), done, message)


def _first_ranks() -> dict[str, int]:
    """Return the first rank of each process group, by the group's name; none if unknown."""
    with contextlib.suppress(Exception):  # internal to torch, may change
        names = dict(dist.distributed_c10d._world.pg_names)
        return {name: min(dist.get_process_group_ranks(group)) for group, name in names.items()}
    return {}


def seen_process(pid: int, now: float) -> Seen:
    """Return what the kernel reports of a process on this node. `now`: seconds of its clock."""
    task = f"/proc/{pid}/task/{pid}"
    try:
        # Fields of proc(5)'s stat from the third on: the second, the name in (),
        # may contain blanks.
        main, every = (
            Path(path).read_text().rpartition(")")[2].split()
            for path in (f"{task}/stat", f"/proc/{pid}/stat")
        )
    except OSError:
        return Seen("", now)
    wchan = ""
    with contextlib.suppress(OSError):
        wchan = Path(f"{task}/wchan").read_text().strip("0\n")
    # utime and stime, fields 14 and 15.
    cpu, cpu_all = ((int(f[11]) + int(f[12])) / TICKS for f in (main, every))
    return Seen(main[0], now, cpu, cpu_all, bytes_moved(pid), wchan)


def place_in(text: str) -> str:
    """Return the main thread's place in stacks written by faulthandler: its innermost frame outside
    of torch and Python's library, and the innermost; "" if missing. The main thread comes last."""
    names, own = [], ""
    # "Thread 0x" or "Current thread 0x".
    for line in text[max(0, text.rfind("hread 0x")) :].splitlines():
        words = line.split('"')
        if line.startswith("  File ") and len(words) == 3:
            number, _, function = words[2].removeprefix(", line ").partition(" in ")
            names.append(f"{Path(words[1]).name}:{number} {function}")
            own = own or ("" if _is_library(words[1]) else names[-1])
    if not names:
        return ""
    own = own or names[0]
    return own + (f" > {names[0]}" if names[0] != own else "")


def _is_library(path: str) -> bool:
    return "torch" in path or path.startswith((LIBRARY, "<"))


def _place_of(frame: FrameType | None) -> str:
    """Return the innermost frame outside of torch and Python's library, and the innermost."""
    inner = own = None
    while frame is not None:
        name = _frame_name(frame)
        inner = inner or name
        if not _is_library(frame.f_code.co_filename):
            own = name
            break
        frame = frame.f_back
    return f"{own or inner}" + (f" > {inner}" if inner != own else "")


def _frame_name(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def _compiles() -> bool:
    """Return whether any thread is compiling: on a GPU the backward pass has its own thread."""
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if any(name in frame.f_code.co_filename for name in COMPILER_FILES):
                return True
            frame = frame.f_back
    return False


def _lines(answers: dict[int, str], silent: list[int]) -> list[str]:
    """Describe where the ranks are: one line per place in the code, so that thousands of ranks
    fit a screen."""
    at: dict[str, list[int]] = {}
    for rank, answer in sorted(answers.items()):
        at.setdefault(answer, []).append(rank)
    lines = [f"{_ranks(ranks)} {place}" for place, ranks in at.items()]
    do = "does" if len(silent) == 1 else "do"
    return lines + ([f"{_ranks(silent)} {do} not answer"] if silent else [])


def _named(ranks: list[int]) -> str:
    return (
        f"{ranks}"
        if len(ranks) <= NAMED_HUNG_RANKS
        else f"{ranks[:NAMED_HUNG_RANKS]} and {len(ranks) - NAMED_HUNG_RANKS} more"
    )


def _ranks(ranks: list[int]) -> str:
    """`rank 3`, or `ranks [0, 1, 2]`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_named(ranks)}"
