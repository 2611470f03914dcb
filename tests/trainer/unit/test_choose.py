"""Which checkpoints a run refuses, and what it says."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kempner.checkpoint import commit, fork, history, named
from kempner.checkpoint.choose import remember_skip
from kempner.checkpoint.commit import prune_checkpoints
from kempner.checkpoint.fits import check_compatible, fact_differences
from kempner.checkpoint.fork import hold_checkpoint
from kempner.checkpoint.ownership import claim_directory
from kempner.config.option import ConfigError

PATH = Path("step_00000002")


def source(name: str, **more: Any) -> dict[str, Any]:
    about = {
        "name": name,
        "path": f"/data/{name}",
        "size": 100,
        "max_epochs": None,
        "ordered": False,
    }
    return {**about, "weight": 1.0, "tokens": name, **more}


def phase(step: int, *weights: float) -> dict[str, Any]:
    return {"start_step": step, "start_token": None, "weights": weights, "lr_scale": 1.0}


def facts(*sources: dict[str, Any], phases: Any = (), **more: Any) -> dict[str, Any]:
    """Of a run with steps of 10 samples, after 5 of them."""
    mixture = {"sources": list(sources), "phases": list(phases), "temperature": 1.0}
    starts = [10 * each["start_step"] for each in phases]
    about = {"run": "a", "samples": 50, "phases": starts}
    return {**about, "fixed": {"data": {"seed": 0, "mixture": mixture, **more}}}


def refused(there: dict[str, Any], here: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_compatible(PATH, there, here)
    return str(caught.value)


WEB, CODE = source("web"), source("code")


def test_other_data_are_named() -> None:
    moved = source("web", path="/new", tokens="web")
    check_compatible(PATH, facts(WEB), facts(moved))
    other = source("web", path="/new", tokens="x")
    said = refused(facts(WEB), facts(other))
    assert "data source web: /new holds other tokens than /data/web, on which it was" in said
    assert (
        "source code: is missing; it was /data/code, on which it was trained; if it has moved"
        in refused(facts(WEB, CODE), facts(WEB))
    )
    assert "data.seed is 0 there, 1 here" in refused(facts(WEB), facts(WEB, seed=1))


def test_what_is_past_stays_and_what_comes_may_change() -> None:
    plain = facts(WEB)
    fresh = source("new", weight=0.0)
    check_compatible(PATH, plain, facts(WEB, fresh, phases=[phase(5, 1, 1)]))  # from now on
    check_compatible(PATH, plain, facts(WEB, phases=[phase(9, 1)]))
    two = facts(WEB, CODE, phases=[phase(3, 1, 3), phase(8, 0, 1)])
    check_compatible(PATH, two, two)
    check_compatible(PATH, two, facts(WEB, CODE, phases=[phase(3, 1, 3)]))
    check_compatible(PATH, two, facts(WEB, CODE, phases=[phase(3, 1, 3), phase(7, 1, 1)]))
    check_compatible(PATH, two, facts(WEB, CODE, phases=[phase(3, 0.25, 0.75)]))


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (facts(WEB, CODE), "data.phases[0] has begun; it is missing"),
        (facts(WEB, CODE, phases=[phase(4, 1, 3)]), "start_step = 4 here, start_step = 3 there"),
        (facts(WEB, CODE, phases=[phase(3, 1, 2)]), "0.25 web : 0.75 code there; past samples"),
        (facts(WEB, source("code", weight=2.0), phases=[phase(3, 1, 3)]), "append a [[data.phases"),
        (facts(CODE, WEB, phases=[phase(3, 3, 1)]), "another order of sources is another order of"),
    ],
)
def test_a_change_of_the_past_is_refused_with_the_way_out(here: dict[str, Any], said: str) -> None:
    assert said in refused(facts(WEB, CODE, phases=[phase(3, 1, 3)]), here)


def test_a_limit_may_change_until_it_was_reached() -> None:
    free, capped = facts(WEB, CODE), facts(WEB, source("code", max_epochs=1))
    check_compatible(PATH, free, capped)
    used_up = source("code", size=20, max_epochs=1)
    assert "0.5 web : 0.5 code, then 1 web there" in refused(
        facts(WEB, used_up), facts(WEB, source("code", size=20))
    )


def test_a_checkpoint_of_before_there_were_mixtures_is_taken() -> None:
    old = {"run": "a", "fixed": {"data": {"seed": 0, "tokens": "web"}}}
    check_compatible(PATH, old, facts(WEB))


def test_an_option_that_came_later_had_its_default() -> None:
    now = {"dim": 64, "qkv_bias": False, "tie_embeddings": True}
    older = {"run": "a", "fixed": {"model": {"dim": 64}}}
    found = fact_differences(older, {"run": "a", "fixed": {"model": now}}, ())
    assert list(found) == ["model.tie_embeddings"]


@pytest.fixture
def forked(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 1 and 2; retention keeps one."""
    root = tmp_path / "run/checkpoints"
    claim_directory(root, "a")
    for step, parent in ((1, -1), (2, 1)):
        commit.partial_of(root, step).mkdir(parents=True)
        fixed = {"data": {"seed": 0}, "model": {"dim": 64, "max_seq_len": 128}}
        about = {"run": "a", "parent": parent, "fixed": fixed}
        commit.commit_save(root, step, {"tensors.json": b'{"layouts": [], "tensors": {}}'}, about)
    return root


FORK = {"fixed": {"data": {"seed": 1}, "model": {"dim": 64, "max_seq_len": 256}}, "run": "b"}


def test_retention_leaves_a_checkpoint_that_is_being_forked(forked: Path) -> None:
    with contextlib.ExitStack() as held:
        path, manifest, _ = hold_checkpoint(f"{forked.parent}@1", FORK, held)
        prune_checkpoints(forked, 1, 0)
        assert path.is_dir() and manifest["step"] == 1
    prune_checkpoints(forked, 1, 0)
    assert not path.is_dir()


def test_one_that_is_deleted_at_that_moment_is_refused(
    forked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention has looked whether anybody reads it, and nobody did: whoever comes now waits for
    it, and then finds no checkpoint."""
    found, threads = fork.find_fork(f"{forked.parent}@1"), []

    def find(source: str) -> Path:
        entered = threading.Event()

        def delete() -> None:
            with commit.deletion_lock(found) as free:
                entered.set()
                time.sleep(0.2)
                assert free
                commit.mark_for_deletion(found)

        threads.append(threading.Thread(target=delete))
        threads[0].start()
        entered.wait()
        return found

    monkeypatch.setattr(fork, "find_fork", find)
    with pytest.raises(history.Damaged), contextlib.ExitStack() as held:
        hold_checkpoint(f"{forked.parent}@1", FORK, held)
    threads[0].join()


def test_samples_that_the_other_run_leaves_out(forked: Path) -> None:
    remember_skip(forked, 2, [[8, 16]])
    for step, skip in ((1, None), (2, [[8, 16]])):
        with contextlib.ExitStack() as held:
            assert hold_checkpoint(f"{forked.parent}@{step}", FORK, held)[1].get("skip") == skip


def test_where_a_run_keeps_its_checkpoints(tmp_path: Path) -> None:
    """A step is digits after the last @: a directory may have an @ in its name."""
    run = tmp_path / "a@b"
    run.mkdir()
    (run / "config.toml").write_text(f'[checkpoint]\ndir = "{tmp_path}/elsewhere"\n')
    assert named.split_name(f"{run}@12") == (run, 12) and named.split_name(str(run)) == (run, None)
    assert named.checkpoints_of(run) == tmp_path / "elsewhere"
    assert named.checkpoints_of(tmp_path) == tmp_path
    (run / "checkpoints").mkdir()
    assert named.checkpoints_of(run) == run / "checkpoints"
