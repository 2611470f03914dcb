"""Steps that are computed twice: resilience.replay_every.

Between the backward pass of such a step and the optimizer, all ranks recompute the step,
alternately with their own batch and with that of a rank on another host: a device that is always
wrong agrees with itself. If results differ, the ranks recompute until it is known which one is at
fault. (Megatron-core's rerun state machine and torchtitan's replay do this for a rank's own batch.)
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kempner.data.batch import MicroBatch
from kempner.jobs.this_job import host_name
from kempner.model.decoder import Decoder
from kempner.parallel.layout import Layout
from kempner.train.integrity.fingerprint import NO_PLACE, Trace, Witness
from kempner.train.integrity.peers import Peers
from kempner.train.integrity.state import StateChecks, WrongNumbers, changed
from kempner.train.integrity.votes import Ballot, Difference, difference, relative, suspects
from kempner.train.resilience.requests import StopRequests, Verdict
from kempner.train.step import StepSums, forward_backward

if TYPE_CHECKING:
    from kempner.checkpoint.checkpointer import Checkpointer
    from kempner.train.integrity.first_steps import FirstSteps
    from kempner.train.objective import Objective
    from kempner.train.recording.run_directory import Run
    from kempner.train.sections import RunConfig

MARGIN = 10.0  # times the scatter of sound devices: a larger difference is a fault
MOST_HOSTS = 2  # that a fault may exclude
ATTEMPT_ENDS = "this attempt ends, and the next one goes on from the last checkpoint"
COST_REPLAYS = 3  # after so many the log reports their cost

Numbers = dict[str, "Tensor | float"]


class _Step(NamedTuple):
    """The arguments of forward_backward() that all computations of a step share."""

    model: Decoder
    objective: Objective
    sums: StepSums
    step_tokens: int
    random: tuple[Tensor, ...]  # the generators' states before the step


class Replay:
    """A forward_backward() that computes some steps twice. Raises WrongNumbers on all ranks if
    recomputing cannot mend a fault."""

    def __init__(
        self,
        cfg: RunConfig,
        run: Run,
        layout: Layout,
        model: Decoder,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        patient: Callable[[float], AbstractContextManager[None]],
        checkpointer: Checkpointer,
    ) -> None:
        """`patient`: the watchdog's, because a step computed several times is not late."""
        self._cfg, self._run, self._device, self._patient = cfg, run, device, patient
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._peers = Peers(layout, host_name(), name)
        self._witness = Witness(model, cfg.model.n_layers)
        self._state = StateChecks(model, optimizer, layout)
        self._parameters = list(model.parameters())
        # Otherwise they are also summed over replicas, or rounded, or groups have one rank.
        self._sums_are_gradients = (
            layout.sizes.replicate == 1
            and cfg.train.weights == "fp32"
            and layout.parameter_mesh.size() > 1
            and layout.expert_parameter_mesh.size() > 1
        )
        # 0: bitwise. None: the first replay measures it.
        self._tolerance: float | None = 0.0 if cfg.train.deterministic else None
        self._seconds: list[float] = []  # of replays
        self.verdict: Verdict | None = None  # once a fault is mended: leave its host
        self._asked, self._suspect = False, -1  # to compare the next step
        self._first_steps: FirstSteps | None = None
        if os.environ.get("KEMPNER_IDLE"):  # the job's spares may be auditors
            from kempner.train.integrity.first_steps import FirstSteps, obstacle

            self._first_steps = None if obstacle(cfg) else FirstSteps(run, device, checkpointer)
        self.begin(run.step, is_loaded=True)

    def __call__(
        self,
        model: Decoder,
        objective: Objective,
        micro_batches: list[MicroBatch],
        sums: StepSums,
        step_tokens: int,
        leave: StopRequests | None,
    ) -> Numbers | Verdict:
        """Run forward_backward(), and compare if this step is due."""
        step, every = self._run.step + 1, self._cfg.resilience.checksum_every
        replays = self._is_due(step)
        checks = replays or (every is not None and step % every == 0)
        state = self._state.take() if checks else {}
        at = _Step(model, objective, sums, step_tokens, self._random() if replays else ())
        if self._first_steps is not None:
            self._first_steps.write()
        recorded = self._first_steps if self._tolerance is not None else None
        if recorded is not None and not recorded.is_due(step):
            recorded = None
        # The first pass already takes fingerprints, so that a replay costs one step, not two.
        trace = Trace()
        with self._witness.into(trace if replays or recorded else None):
            numbers = forward_backward(model, objective, micro_batches, sums, step_tokens, leave)
        if isinstance(numbers, Verdict):
            return numbers
        if replays or recorded:
            self._finish(trace, numbers)
            rows = trace.rows()
        if recorded:
            recorded.add(micro_batches, rows, self._tolerance or 0.0)
        if replays:
            with self._patient(0.0):
                numbers = self._replay(step, at, micro_batches, rows, state)
            if self._asked and self.verdict is None:
                self._run.announce(f"replay: all computations of step {step} agree")
            self._asked, self._suspect = False, -1
        if checks:
            self._check_state(step, state)
        return numbers

    def ask(self, suspect: int) -> None:
        """Request a replay of the next step, also by a rank on another host. `suspect`: the rank
        that a spare disagrees with; -1: none."""
        self._asked, self._suspect = True, suspect

    def begin(self, step: int, is_loaded: bool) -> None:
        """Note that the weights are those of the checkpoint of `step`: see FirstSteps."""
        if self._first_steps is not None:
            self._first_steps.begin(step, is_loaded)

    def before_save(self) -> None:
        """Compare the replicas: one that differs must not be saved."""
        self.begin(self._run.step, is_loaded=False)
        if self._state.copies > 1:
            self._check_copies(self._run.step, self._state.take())

    # --- Which steps, and with whom ---

    def _is_due(self, step: int) -> bool:
        """Return whether to compute this step twice: every replay_every-th step, and each step that
        is saved, so that no checkpoint holds errors of a device that failed since the last one."""
        every = self._cfg.resilience.replay_every
        saved = self._cfg.checkpoint.is_due(step) or step == self._cfg.train.max_steps
        if every is None:
            return self._asked
        return step % every == 0 or (saved and self._cfg.checkpoint.save) or self._asked

    def _shift(self, step: int) -> int:
        """Return how many data ranks further the batch is recomputed: every second time 0, its own
        rank, otherwise each of the other shifts in turn."""
        # From the step number alone, so that all ranks agree, also after a resume.
        shifts = self._peers.shifts
        turn, own = divmod(step // (self._cfg.resilience.replay_every or 1), 2)
        if not shifts or (own and not (self._asked or self._cfg.checkpoint.is_due(step))):
            return 0
        return shifts[turn % len(shifts)]

    # --- One computation ---

    def _random(self) -> tuple[Tensor, ...]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return tuple(states)

    def _finish(self, trace: Trace, numbers: Numbers) -> None:
        sums = [numbers[name] for name in ("loss_sum", "tokens")]
        self._witness.finish(trace, [part for part in sums if isinstance(part, Tensor)])

    def _again(self, at: _Step, batches: list[MicroBatch]) -> tuple[Numbers, Tensor]:
        """Compute these batches from clean gradients; returns the sums and the fingerprints."""
        for parameter in self._parameters:
            parameter.grad = None
        # Random numbers must repeat those of the first computation.
        torch.set_rng_state(at.random[0])
        for state in at.random[1:]:
            torch.cuda.set_rng_state(state, self._device)
        trace, sums = Trace(), at.sums.fresh()
        with self._witness.into(trace):
            numbers = forward_backward(at.model, at.objective, batches, sums, at.step_tokens, None)
        assert not isinstance(numbers, Verdict)
        self._finish(trace, numbers)
        return numbers, trace.rows()

    def _opinion(self, at: _Step, batches: list[MicroBatch], shift: int) -> Tensor:
        """Return the fingerprints of this rank's batch, as computed by the rank `shift` data ranks
        before it, while this rank computes another one's."""
        theirs = self._peers.exchange(batches, -shift)
        _, rows = self._again(at, theirs)
        answer: Tensor = self._peers.exchange(rows, shift)
        return answer

    # --- Comparing ---

    def _replay(
        self, step: int, at: _Step, batches: list[MicroBatch], rows: Tensor, state: dict[str, int]
    ) -> Numbers:
        """Recompute a step; returns the sums of the last computation, whose gradients are kept. It
        is of this rank's own batch, so that the optimizer sees gradients that were compared."""
        began = time.perf_counter()
        if self._tolerance is None:
            self._measure(at, batches, rows)
        shift, opinions, shifts = self._shift(step), [rows], [0]
        if shift:
            opinions.append(self._opinion(at, batches, shift))
            shifts.append(shift)
        numbers, last = self._again(at, batches)
        opinions.append(last)
        shifts.append(0)
        ballot = self._ballot(opinions, shifts, sums=True)
        # If one rank has found a difference, all continue: recomputation is collective.
        if self._peers.least(min(found.place for found in ballot.differences)) < NO_PLACE:
            self._check_state(step, state)  # a changed state would explain it
            if shift:
                others = [other for other in self._peers.shifts if other != shift]
                shifts.append((others or [shift])[0])
                opinions.append(self._opinion(at, batches, shifts[-1]))
            numbers, last = self._again(at, batches)
            self._vote(step, [*opinions, last], [*shifts, 0])
        self._check_messages(step)
        self._account(time.perf_counter() - began)
        return numbers

    def _ballot(self, opinions: Sequence[Tensor], shifts: Sequence[int], sums: bool) -> Ballot:
        """Compare all computations of this rank's batch. `sums`: also compare the gradients summed
        over ranks, between two computations by this rank: all ranks see one rank's fault in them,
        and they depend on which rank has which batch."""
        ranks = tuple(self._peers.at(-shift) for shift in shifts)
        place, tolerance = self._witness.places.summed_gradient, self._tolerance or 0.0
        apart = [rows[rows[:, 0] != place] for rows in opinions]
        differences = [
            difference(opinions[a], opinions[b], tolerance)
            if sums and ranks[a] == ranks[b] == self._peers.rank
            else difference(apart[a], apart[b], tolerance)
            for a, b in itertools.combinations(range(len(ranks)), 2)
        ]
        return Ballot(ranks, tuple(differences))

    def _vote(self, step: int, opinions: Sequence[Tensor], shifts: Sequence[int]) -> None:
        """Decide which rank is at fault. Raises WrongNumbers unless the last computation is
        confirmed by another one of this rank and, if one computed the batch, by another rank."""
        whole = self._ballot(opinions, shifts, sums=True)
        last = len(opinions) - 1
        confirmed = {
            whole.ranks[a] for a, b, found in whole.pairs() if b == last and found.place == NO_PLACE
        }
        mended = len(confirmed) > 1 or confirmed == {*whole.ranks}
        # Every rank must be confirmed: the optimizer sees the sum of all.
        mended = self._peers.least(int(mended)) == 1
        # All ranks see one's fault in the summed gradients: these count if nothing else differs.
        ballot = self._ballot(opinions, shifts, sums=False)
        if self._peers.least(min(found.place for found in ballot.differences)) == NO_PLACE:
            ballot = whole
        votes = self._peers.gather((ballot, self._peers.unit))
        found = suspects([ballot for ballot, _ in votes], [unit for _, unit in votes])
        if self._suspect in found:  # a spare votes for it, too
            found = frozenset({self._suspect})
        differences = [d for b, _ in votes for d in b.differences if found.intersection(b.ranks)]
        telling = min((d for d in differences if d.place < NO_PLACE), default=Difference())
        what = telling.describe(self._witness.places, "once", "once")
        self._blame(step, found, what, mended)

    def _measure(self, at: _Step, batches: list[MicroBatch], rows: Tensor) -> None:
        """Find out, with two more computations, whether the kernels are bitwise deterministic: if
        not, most ranks differ from themselves."""
        computed = [rows, self._again(at, batches)[1], self._again(at, batches)[1]]
        # The scatter is the largest difference between any two of the three computations.
        pairs = list(itertools.combinations(computed, 2))
        comparable = all(a.shape == b.shape for a, b in pairs)
        worst = max(float(relative(a, b).max()) for a, b in pairs) if comparable else 1.0
        own = self._ballot(computed, (0, 0, 0), sums=False)
        exact = min(found.place for found in own.differences) == NO_PLACE
        # The median of all ranks: a broken one cannot hide behind its own scatter.
        answers = sorted(self._peers.gather(0.0 if exact else worst))
        half = len(answers) // 2
        differ = sum(answer > 0 for answer in answers) > half
        self._tolerance = MARGIN * answers[half] if differ else 0.0
        how = "bit for bit"
        if differ:
            how = (
                f"to {self._tolerance:.1e} of each norm, as kernels of this run are not exact to "
                "the bit; with --train.deterministic they are"
            )
        who = "its own rank alone"
        if self._peers.shifts:
            far = self._peers.hosts[self._peers.at(self._peers.shifts[0])]
            place = "the same" if far == self._peers.hosts[self._peers.rank] else "another"
            who = f"its own rank, and in turn by a rank of {place} host"
        self._run.announce(f"replay: compares {how}; a step is computed again by {who}")

    def _blame(
        self, step: int, ranks: Sequence[int] | frozenset[int], what: str, mended: bool
    ) -> None:
        """Record a fault; raises WrongNumbers unless it is mended."""
        ranks = tuple(sorted(ranks))
        hosts = tuple(dict.fromkeys(self._peers.hosts[rank] for rank in ranks))
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} on {', '.join(hosts)}"
        if len(ranks) > 1:
            who = f"one of {who}"
        then = "it was computed again, and is right" if mended else ATTEMPT_ENDS
        reason = f"wrong numbers in step {step} by {who}: {what}; {then}"
        # Exclude nodes only if the fault is on one of two: more would cost too many sound nodes.
        self._run.wrong_numbers(reason, ranks, hosts if len(hosts) <= MOST_HOSTS else ())
        if not mended:
            raise WrongNumbers(reason, ranks)
        if os.environ.get("KEMPNER_ATTEMPT_ID"):  # else nothing would restart the run elsewhere
            self.verdict = Verdict(save=True, state="interrupted", reason=reason)

    # --- What does not change from one computation to the next ---

    def _check_messages(self, step: int) -> None:
        parameters = self._parameters if self._sums_are_gradients else ()
        # Gather instead of raising here: other ranks would wait in the next collective.
        answers = self._peers.gather(self._witness.messages.are_wrong(parameters))
        if ranks := [rank for rank, wrong in enumerate(answers) if wrong]:
            what = "the sum of its gradients is not the sum of those that were sent to it"
            self._blame(step, ranks, what, mended=False)

    def _check_state(self, step: int, before: dict[str, int]) -> None:
        """Raise WrongNumbers if the state has changed since `before`, or copies of it differ."""
        after = self._state.take()
        names = changed(before, after)
        answers = self._peers.gather(names[0] if names else "")
        if ranks := [rank for rank, name in enumerate(answers) if name]:
            what = f"{answers[ranks[0]]} has changed in memory while the step was computed"
            self._blame(step, ranks, what, mended=False)
        if self._state.copies > 1:
            self._check_copies(step, after)

    def _check_copies(self, step: int, sums: dict[str, int]) -> None:
        if ranks := self._state.odd_copies(sums, self._peers):
            self._blame(
                step, ranks, "the copies of weights and optimizer state differ", mended=False
            )

    def _account(self, seconds: float) -> None:
        self._seconds.append(seconds)
        if len(self._seconds) == COST_REPLAYS:
            every = self._cfg.resilience.replay_every
            usual = sorted(self._seconds)[COST_REPLAYS // 2]
            often = f"every {every} steps" if every else "each"  # requested by RUN/REPLAY alone
            self._run.announce(f"replay: costs {usual:.2f} s {often}")
