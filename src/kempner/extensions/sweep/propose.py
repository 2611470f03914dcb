"""[propose]: choose the next points of a sweep from the results so far, by optuna's TPE. No torch.

Proposed points are in the journal, and results in the run directories; optuna's study is rebuilt in
memory from both each time. The method: J. Bergstra et al., "Algorithms for Hyper-Parameter
Optimization", NeurIPS 2011.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from kempner.config.option import ConfigError
from kempner.extensions.sweep.early_stop import read_validations
from kempner.extensions.sweep.file import Sweep
from kempner.extensions.sweep.journal import Journal
from kempner.extensions.sweep.keys import RUN_OPTIONS, PointValues
from kempner.extensions.sweep.look import PointStatus
from kempner.extensions.sweep.points import SweepPoint, load_bases, make_point
from kempner.extensions.sweep.results import loss_of

ENDED = ("done", "stopped", "failed")  # others run, will run, or need somebody's attention
PROPOSAL_FAILURES = (
    3  # consecutive failures after which no more is proposed; never fewer than run at once
)
POINT_DRAWS = 100  # for one point, until it is new and fulfils the conditions


def proposed_points(sweep: Sweep, journal: Journal) -> list[SweepPoint]:
    """Return the points proposed so far, in order, without those that an edit of the
    file has changed."""
    (base,) = load_bases(sweep).items()
    points = []
    for name, values in journal.proposed.items():
        if values.keys() != sweep.space.keys():
            continue
        try:
            point = _point(sweep, *base, values)
        except (ConfigError, ValueError):  # it was valid when it was proposed
            continue
        points += [point] if point is not None and point.name == name else []
    return points


def _point(sweep: Sweep, name: str, base: Any, values: PointValues) -> SweepPoint | None:
    own = {key: RUN_OPTIONS[key].convert(value) if key in RUN_OPTIONS else value
           for key, value in values.items()}  # fmt: skip
    return make_point(sweep, base, {"base": name, **own})


def proposal_room(sweep: Sweep, looks: Sequence[PointStatus]) -> tuple[int, str]:
    """Return how many more points may be proposed now, and why none may, for the time being."""
    assert sweep.propose is not None
    end_states = [each.state.word for each in looks if each.state.word in ENDED]
    limit = max(PROPOSAL_FAILURES, sweep.max_running)
    # Points that ran at once were all proposed before the first failure.
    if end_states[-limit:] == ["failed"] * limit:
        return 0, f"the last {limit} points have failed: fix what is wrong, then resubmit"
    free = sweep.max_running - (len(looks) - len(end_states))
    return max(0, min(sweep.propose.points - len(looks), free)), ""


def propose_values(
    sweep: Sweep, looks: Sequence[PointStatus], journal: Journal, count: int
) -> dict[str, PointValues]:
    """Propose values of the next `count` points, by point name; fewer if no others are left. The
    same results give the same points. Raises ConfigError."""
    try:
        import optuna
    except ModuleNotFoundError:
        fix = ".venv/bin/pip install -c constraints.txt -e '.[optuna]'"
        raise ConfigError(f"{sweep.file}: propose: optuna is not installed; run {fix}") from None
    rule, state = sweep.propose, optuna.trial.TrialState
    assert rule is not None
    (base,) = load_bases(sweep).items()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {name: _distribution(optuna, spec) for name, spec in sweep.space.items()}
    study = optuna.create_study(direction="minimize")
    for status in looks:
        if params := _params(sweep, journal.proposed[status.point.name]):
            result = _result(state, status)
            study.add_trial(optuna.trial.create_trial(params=params, distributions=space, **result))

    tried_values = [journal.proposed[status.point.name] for status in looks]
    known_hashes, proposals = {_hash(status.point) for status in looks}, {}
    for number in range(len(looks), len(looks) + count):
        for draw in range(POINT_DRAWS):
            # A generator for each draw: the same results give the same points in any process, and
            # the next draw differs from a refused one.
            seed = random.Random(f"{rule.seed} {number} {draw}").getrandbits(32)
            # constant_liar: running points count as bad ones, so that new points keep
            # away from them.
            study.sampler = optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=rule.startup, constant_liar=True
            )
            trial = study.ask(space)
            values = {name: _value(spec, trial.params[name]) for name, spec in sweep.space.items()}
            # A repeated draw would be refused again, for the same reason.
            point = None if values in tried_values else _point(sweep, *base, values)
            tried_values.append(values)
            if point is not None and _hash(point) not in known_hashes:
                known_hashes.add(_hash(point))
                proposals[point.name] = values
                break
            # Otherwise it would count as running.
            study.tell(trial, state=state.FAIL)
        else:
            break
    if not proposals and not looks:
        raise ConfigError(
            f"{sweep.file}: propose: none of {POINT_DRAWS} draws satisfies all conditions of "
            "where; widen the ranges"
        )
    return proposals


def _hash(point: SweepPoint) -> str:
    return point.name.rpartition("-")[2]


def _range(spec: Mapping[str, Any]) -> tuple[float, float, bool]:
    """Return the ends, and whether only integers count, as in axes.py."""
    low, high = spec["log"] if "log" in spec else spec["linear"]
    return low, high, "linear" in spec and isinstance(low, int) and isinstance(high, int)


def _distribution(optuna: Any, spec: Any) -> Any:
    kinds = optuna.distributions
    if isinstance(spec, list):  # by index: a value may be a list itself
        return kinds.CategoricalDistribution(range(len(spec)))
    low, high, whole = _range(spec)
    if whole:
        return kinds.IntDistribution(low, high)
    return kinds.FloatDistribution(low, high, log="log" in spec)


def _value(spec: Any, param: Any) -> Any:
    """Convert optuna's parameter to the value of an axis, with six digits as in axes.py."""
    if isinstance(spec, list):
        return spec[param]
    low, high, whole = _range(spec)
    return param if whole else min(max(float(f"{param:.6g}"), low), high)


def _params(sweep: Sweep, values: PointValues) -> dict[str, Any]:
    """Convert a point's values to optuna's parameters; none if they are outside
    the current ranges."""
    params: dict[str, Any] = {}
    for name, spec in sweep.space.items():
        value = values[name]
        if isinstance(spec, list):
            if value not in spec:
                return {}
            params[name] = spec.index(value)
        else:
            low, high, whole = _range(spec)
            # create_trial() raises ValueError for a value outside its distribution.
            sound = isinstance(value, int if whole else (int, float)) and low <= value <= high
            if not sound:
                return {}
            params[name] = value
    return params


def _result(state: Any, look: PointStatus) -> dict[str, Any]:
    """Return a point's result for optuna. A stopped point has its last validation; a failed one,
    for example a diverged one, is worse than any other."""
    loss, step = loss_of(look.run, "val_loss", None)
    if look.state.word == "done" and loss is not None:
        return {"state": state.COMPLETE, "value": loss}
    if look.state.word == "failed":
        # TPE ranks complete trials before pruned ones, and pruned ones without a value last.
        return {"state": state.PRUNED, "intermediate_values": {}}
    if look.state.word == "stopped":
        # The tail of a long file may hold no validation.
        losses = read_validations(look.point.run_dir) if step is None else {step: loss}
        return {"state": state.PRUNED, "intermediate_values": losses}
    return {"state": state.RUNNING}
