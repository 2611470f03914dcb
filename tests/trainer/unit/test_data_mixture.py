"""Mixtures: exact shares over any beginning, and an order that follows from the number alone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kempner.config.loading import load_config_files
from kempner.config.option import ConfigError
from kempner.data.changes import data_changes
from kempner.data.loader import TrainLoader
from kempner.data.mixture import Ingredient, Mixture, MixturePhase
from kempner.data.opening import mixture_of
from kempner.data.permute import shuffled_indices
from kempner.data.source import DataError
from kempner.train.configure import check_inputs
from kempner.train.parts import open_data, open_mixture
from kempner.train.progress import Progress
from kempner.train.resilience.resuming import find_last_step
from kempner.train.sections import RunConfig
from tests.trainer.unit.test_data_dataset import write_data

WEIGHTS = st.lists(st.floats(1, 1e3), min_size=1, max_size=8)  # no share under 1 in 16,384


def mixture(*phases: tuple[int, list[float]], sizes: list[int], caps: list[int | None]) -> Mixture:
    names = [Ingredient(f"s{i}", *rest) for i, rest in enumerate(zip(sizes, caps, strict=True))]
    return Mixture(
        names, [MixturePhase(start, tuple(weights)) for start, weights in phases], seed=3
    )


def free(*phases: tuple[int, list[float]]) -> Mixture:
    count = len(phases[0][1])
    return mixture(*phases, sizes=[10**6] * count, caps=[None] * count)


def largest_deviation(sources: np.ndarray, weights: list[float]) -> float:
    """Over all beginnings: the samples of a source, less its exact share."""
    exact = np.arange(1, len(sources) + 1)[:, None] * np.array(weights) / sum(weights)
    counts = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    return float(np.abs(counts - exact).max())


@settings(deadline=None, max_examples=12)
@given(WEIGHTS)
def test_counts_are_within_one_of_the_exact_share_over_any_beginning(weights: list[float]) -> None:
    assert largest_deviation(free((0, weights)).draw(0, 10_000)[0], weights) < 1 + 1e-6


@settings(deadline=None, max_examples=10)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 10**12))
def test_shares_in_whole_numbers_never_drift(weights: list[int], far: int) -> None:
    mixed = free((0, [float(weight) for weight in weights]))
    exact = np.array(weights) * far / sum(weights)
    assert np.abs(np.array(mixed.drawn(far)) - exact).max() < 1 + 1e-3
    assert sum(mixed.drawn(far)) == far


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 400), st.lists(st.floats(0, 9), min_size=3, max_size=3)),
             max_size=3),
    st.integers(0, 2000),
    st.integers(0, 300),
    st.lists(st.one_of(st.none(), st.integers(1, 4)), min_size=2, max_size=2),
)  # fmt: skip
def test_any_part_of_the_order_is_that_of_the_whole(
    changes: list[tuple[int, list[float]]], position: int, count: int, caps: list[int | None]
) -> None:
    """Phases, limits and epochs; each source's own order is that of a run on it alone."""
    starts = itertools.accumulate(start for start, _ in changes)
    later = [(start, w) for start, (_, w) in zip(starts, changes, strict=True) if any(w)]
    mixed = mixture((0, [1.0, 2.0, 1.5]), *later, sizes=[53, 71, 40], caps=[None, *caps])
    if mixed.end is not None and position + count > mixed.end:
        with pytest.raises(DataError, match="raise max_epochs"):
            mixed.draw(position, count)
        return
    sources, indices = mixed.draw(0, position + count)
    again = mixed.draw(position, count)
    assert again[0].tolist() == sources[position:].tolist()
    assert again[1].tolist() == indices[position:].tolist()
    for i, ingredient in enumerate(mixed.ingredients):
        mine = indices[sources == i]
        assert mine.tolist() == shuffled_indices(np.arange(len(mine)), ingredient.size, 3).tolist()
        assert mixed.drawn(position)[i] == (sources[:position] == i).sum()
        assert len(mine) <= ingredient.size * (ingredient.max_epochs or 99)


def test_each_phase_has_its_exact_shares() -> None:
    phases = [(0, [7.0, 2.0, 1.0]), (1003, [0.0, 1.0, 1.0]), (2500, [1.0, 0.5, 4.1])]
    sources, _ = free(*phases).draw(0, 12_500)
    ends = [*(start for start, _ in phases[1:]), 12_500]
    for (start, weights), end in zip(phases, ends, strict=True):
        assert largest_deviation(sources[start:end], weights) < 1


def test_a_source_that_is_used_up_leaves_its_share_to_the_others() -> None:
    mixed = mixture((0, [1.0, 1.0, 2.0]), sizes=[10, 100, 100], caps=[2, None, 1])
    sources, indices = mixed.draw(0, 1000)
    mine = indices[sources == 0]
    assert len(mine) == 20 and sorted(mine[:10]) == sorted(mine[10:]) == list(range(10))
    first = int(np.flatnonzero(sources == 0)[-1])
    assert 76 <= first < 80
    rest = sources[first + 1 : first + 61]  # 1 : 2 then
    assert abs((rest == 1).sum() - 20) <= 1 and abs((rest == 2).sum() - 40) <= 1
    assert (sources == 2).sum() == 100 and set(sources[400:]) == {1}
    assert mixed.end is None and len(mixed.segments) == 3


def test_when_all_are_used_up_the_mixture_ends() -> None:
    mixed = mixture((0, [1.0, 3.0]), sizes=[10, 10], caps=[1, 3])
    assert mixed.end == 40
    assert np.bincount(mixed.draw(0, 40)[0]).tolist() == [10, 30]
    with pytest.raises(DataError, match="have 40; raise max_epochs"):
        mixed.draw(30, 11)


def test_the_order_of_the_sources_that_were_used_may_not_change() -> None:
    """It decides which of two sources with the same claim to a sample gets it; one that has had no
    share may be anywhere."""

    def facts(*weights: tuple[str, float]) -> dict[str, Any]:
        each = {"size": 1000, "max_epochs": None, "ordered": False}
        sources = [{"name": name, "path": name, "weight": x, **each} for name, x in weights]
        return {"sources": sources, "phases": [], "temperature": 1.0}

    there = facts(("web", 7), ("code", 2), ("talk", 1))
    turned = facts(("talk", 1), ("code", 2), ("web", 7))
    both = [
        [each["sources"][i]["name"] for i in mixture_of(each, []).draw(0, 50)[0]]
        for each in (there, turned)
    ]
    assert both[0] != both[1]
    (problem,) = data_changes(there, turned, [], 50)
    assert "are talk, code, web here, web, code, talk there" in problem
    more = facts(("new", 0), ("web", 7), ("code", 2), ("talk", 1))
    assert data_changes(there, more, [], 50) == data_changes(there, turned, [], 0) == []
    assert data_changes(there, turned, [], 50, same_length=False) == []


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    for name in ("web", "code"):
        write_data(tmp_path / name, [np.arange(100) % 50])
    paths = [f"{{path = '{tmp_path / name}', max_epochs = 2}}" for name in ("web", "code")]
    return [
        f"--data.sources=[{', '.join(paths)}]", "--train.seq_len=9", "--train.max_steps=2",
        "--train.global_batch=8", f"--run.dir={tmp_path}/run",
    ]  # fmt: skip


def test_bad_mixtures_are_refused_before_any_work(words: list[str], tmp_path: Path) -> None:
    cases = {
        "--data.sources=[{path = 'web'}, {path = 'b/web'}]": "2 have the name web",
        "--data.sources=[{path = 'a', weight = 1}, {path = 'b'}]": "write all or none",
        "--data.sources=[{path = 'a', weight = 0}]": "all weights are 0",
        "--data.sources=[{path = 'no/1'}, {path = 'no/2'}]": "no/2: no such directory",
        "--data.dataset_path=a": "cannot be combined with data.sources",
        "--data.phases=[{start_step = 3, weights = [1]}]": "1 weights for 2 sources",
        "--data.phases=[{start_step = 3, weights = [0, 0]}]": "weights: all are 0",
        "--data.phases=[{lr_scale = 3}]": "either start_step or start_token",
        "--data.phases=[{start_step = 3}, {start_token = 200}]": "must be in the order",
        "--train.max_steps=6": "48 samples are requested, but with max_epochs the sources (web",
    }
    for word, said in cases.items():
        with pytest.raises(ConfigError) as caught:
            raise ConfigError(check_inputs(load_config_files(RunConfig, [], [*words, word]), 0))
        assert said in str(caught.value)


def test_weights_are_sizes_unless_given_and_a_temperature_evens_them_out(tmp_path: Path) -> None:
    facts = {
        "sources": [
            {"name": name, "size": size, "weight": None, "max_epochs": None, "ordered": False}
            for name, size in (("web", 900), ("code", 100))
        ],
        "phases": [{"weights": ()}, {"weights": (1.0, 16.0)}],
    }
    for temperature, shares in ((1.0, (0.1, 16 / 17)), (2.0, (0.25, 0.8))):
        mixed = mixture_of({**facts, "temperature": temperature}, [40, 50])
        code = [mixed.segment(n).shares[1] for n in (0, 45, 50)]
        assert code == pytest.approx([shares[0], *shares])


@pytest.mark.parametrize("weights", [(None, None), (1e-9, 3e-9)])
def test_a_small_temperature_leaves_the_range_of_no_float(
    weights: tuple[float | None, ...],
) -> None:
    """900,000 and 100 samples to the power of 1000, or weights whose powers are all 0."""
    sources = [
        {"name": name, "size": size, "weight": weight, "max_epochs": None, "ordered": False}
        for name, size, weight in zip(("a", "b"), (100, 900_000), weights, strict=True)
    ]
    mixed = mixture_of({"sources": sources, "phases": [], "temperature": 0.001}, [])
    assert mixed.end is None and mixed.segment(0).shares[1] == pytest.approx(1.0, abs=1e-3)


def test_sources_of_another_tokenizer_are_refused(words: list[str], tmp_path: Path) -> None:
    assert check_inputs(load_config_files(RunConfig, [], words), 0) == []
    sidecar = tmp_path / "code" / "dataset.json"
    about = '"kind": "tokenizer.json", "hash": "x"'
    sidecar.write_text(sidecar.read_text().replace('"kind": "bytes",\n  "hash": ""', about))
    open_data.cache_clear()
    (problem,) = check_inputs(load_config_files(RunConfig, [], words), 0)
    assert "a token id must mean the same in all sources" in problem and "--tokenizer" in problem


@pytest.mark.parametrize(("step", "samples"), [(0, 0), (2, 16), (3, 40), (6, 64)])
def test_a_run_that_has_gone_back_ends_where_its_data_end(
    tmp_path: Path, step: int, samples: int
) -> None:
    """One epoch has the samples of 10 steps, and those of two are left out: before, at and after
    these samples the run may start, and trains 8 steps."""
    write_data(tmp_path / "web", [np.arange(9 * 80 + 1) % 50])
    source = f"--data.sources=[{{path = '{tmp_path / 'web'}', max_epochs = 1}}]"
    words = [source, "--train.seq_len=9", "--train.global_batch=8", "--train.max_steps=10"]
    cfg = load_config_files(RunConfig, [], words)
    sources, _ = open_data(cfg, True)
    progress = Progress(step=step, samples=samples, skip=[[24, 40]])

    def loader(at: Progress) -> TrainLoader:
        order = {"position": at.samples, "step": at.step, "skip": at.skip, "prefetch": 0}
        how = {"stages": cfg.train.stages, "rank": 0, "world": 1, "micro": 8}
        return TrainLoader(sources, open_mixture(cfg, sources, at), **how, **order)

    said = list[str]()
    found = loader(progress)
    assert find_last_step(cfg, found, progress, said.append) == 8
    assert "ends after step 8, not 10: it leaves out 16 samples" in said[0]
    for _ in range(8 - step):
        next(found)
    with pytest.raises(DataError, match="raise max_epochs"):
        next(found)
    never = replace(progress, skip=[], samples=step * 8)
    assert find_last_step(cfg, loader(never), never, said.append) == 10 and len(said) == 1
    longer = load_config_files(RunConfig, [], [*words, "--train.max_steps=11"])
    with pytest.raises(ConfigError, match="88 samples are requested, but"):
        open_mixture(longer, sources, progress)


def test_phases_are_planned_from_where_the_run_is(words: list[str]) -> None:
    """What has begun stays; the rest is counted from here, over the samples that are left out."""
    phases = "[{start_step = 5}, {start_step = 20}, {start_token = 2300}]"
    cfg = load_config_files(RunConfig, [], [*words, f"--data.phases={phases}"])
    assert Progress().plan(cfg).phases == [40, 160, 256]  # a step has 72 tokens
    here = Progress(step=10, samples=100, tokens=900, phases=[55, 300, 400])
    assert here.plan(cfg).phases == [55, 180, 260]
    gone_back = Progress(step=10, samples=100, tokens=900, phases=[55], skip=[[116, 140]])
    assert gone_back.plan(cfg).phases == [55, 204, 284]
    with pytest.raises(ConfigError, match="begins in the future, at start_step = 10 or later"):
        Progress(step=10, samples=100, tokens=900).plan(cfg)
