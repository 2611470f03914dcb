"""A real Slurm of four hosts, and Ray jobs that run side by side on it.

Booting Ray is most of a test's time, and one job leaves two hosts idle. So a test whose job needs
no quiet machine says how to submit it, and takes it as `job`:

    @pytest.mark.job(make=lambda submit: submit(1, "exit 3"))
    def test_the_exit_code(job: RayJob) -> None:
        assert job.end() == 3

The jobs of all such tests up to the next one without the mark are submitted at once, and Slurm
starts each as soon as there are hosts for it. Tests with the same `make` share one job. A test that
kills hosts, or measures time, uses `submit` in its own body, and then nothing else is running.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from tests.cluster import Cluster, boot
from tests.jobs.ray.ray_job import RayJob, Submit, processes
from tests.waiting import until


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "job(make): make(submit, **params) submits the job")


@pytest.fixture(scope="session")
def four_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if importlib.util.find_spec("ray") is None:
        hint = ".venv/bin/pip install -c constraints.txt -e '.[ray]'"
        reason = f"Ray is not installed for {sys.executable}: {hint}"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    with boot(4, 2, tmp_path_factory) as cluster:
        before = set(processes(cluster))
        yield cluster
        # Jobs of tests that did not run: one has failed, and pytest has -x.
        cluster.ask("scancel", f"--user={cluster.user}")
        until(lambda: not cluster.ask("squeue", "-h"), lambda: cluster.ask("squeue"))
        assert not set(processes(cluster)) - before  # whatever environment they have


@pytest.fixture
def submit(four_hosts: Cluster, tmp_path: Path) -> Iterator[Submit]:
    submit = Submit(four_hosts, tmp_path)
    yield submit
    submit.cancel()


Key = tuple[object, str]


def key(item: pytest.Item) -> Key | None:
    """What its job is made of, or None. Tests with the same key share a job."""
    if (mark := item.get_closest_marker("job")) is None:
        return None
    return mark.kwargs["make"], repr(item.callspec.params if hasattr(item, "callspec") else {})


@pytest.fixture(scope="session")
def submitted() -> dict[Key, Submit]:
    return {}


@pytest.fixture
def job(
    request: pytest.FixtureRequest,
    four_hosts: Cluster,
    submitted: dict[Key, Submit],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RayJob]:
    """This test's job. By now it, and those of the tests that follow, have been submitted."""
    items = request.session.items
    following = items[items.index(request.node) :]
    for item in takewhile(key, following):
        if key(item) not in submitted:
            submit = Submit(four_hosts, tmp_path_factory.mktemp("job"))
            params = item.callspec.params if hasattr(item, "callspec") else {}
            item.get_closest_marker("job").kwargs["make"](submit, **params)
            submitted[key(item)] = submit
    mine = submitted[key(request.node)]
    yield mine.jobs[0]
    if key(request.node) not in map(key, following[1:]):
        mine.cancel()
