"""scripts/slurm/serve.sh on a real Slurm: engines on two hosts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cluster import SCRIPTS, Cluster
from tests.served import Client, make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "a model")


def test_engines_on_two_hosts(cluster: Cluster, tmp_path: Path, model: Path) -> None:
    """Each has a URL; one that dies does not end the other; the signal before the time limit ends
    all, and no secret stays."""
    cwd = tmp_path / "a place"
    cwd.mkdir()
    options = ["--nodes=2", "--gpus-per-node=1"]
    words = [model, "--slots=2", "--device", "cpu"]
    job = cluster.sbatch("serve.sh", *words, options=options, cwd=cwd)
    log, run = cwd / f"serve-{job}.out", cwd / f"runs/serve-{job}"
    said = cluster.wait_for("2 of 2 engine(s) are up", log)
    urls = (run / "engines.txt").read_text().split()
    assert len(urls) == 2 and all(f"engine at {url}\n" in said for url in urls)
    assert (run / "token").stat().st_mode & 0o777 == 0o600
    token, engines = (run / "token").read_text(), []
    for url in urls:
        host, port = re.fullmatch(r"http://([\d.]+):(\d+)", url).groups()  # type: ignore[union-attr]
        engines.append(Client(int(port), token, host))
    assert len({engine.host for engine in engines}) == 2
    engines[0].ask("/pause", {})
    assert [engine.ask("/health")["status"] for engine in engines] == ["paused", "ok"]
    (choice,) = engines[1].complete([1, 2, 3], max_tokens=5, temperature=0)
    assert len(choice["token_ids"]) == 5
    Client(engines[1].port, host=engines[1].host).ask("/health", code=401)
    node = f"node{engines[0].host.rpartition('.')[2]}"
    found = cluster.testbed("exec", node, "pgrep", "-af", "scripts/serve.py").splitlines()
    (number,) = (line.split()[0] for line in found if "python" in line.split()[1])
    assert token not in "".join(found)
    cluster.testbed("exec", node, "kill", "-KILL", number)
    cluster.wait_for("Killed", log)
    assert engines[1].ask("/health")["status"] == "ok"
    cluster.ask("scancel", "--batch", "--signal=TERM", job)
    assert cluster.wait(job) == 137, log.read_text()  # of the one that was killed
    said = log.read_text() + (run / "logs/engine-1.log").read_text()
    assert "SIGTERM: ending the engines" in said and token not in said
    assert sorted(path.name for path in run.iterdir()) == ["logs"]


def test_a_dry_run_and_bad_input(cluster: Cluster, tmp_path: Path, model: Path) -> None:
    words = [model, "--slots=2", "--device", "cpu", "--dry-run"]
    request = ["--nodes=2", "--gpus-per-node=2"]
    done = cluster.run("bash", SCRIPTS / "serve.sh", *words, *request, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    command = shlex.split(done.stdout.split("the command:\n", 1)[1].split("\n\n", 1)[0])
    at = command.index(str(model))
    assert command[at - 1].endswith("scripts/serve.py")
    assert command[at + 1 : at + 5] == ["--slots=2", "--device", "cpu", "--host=0.0.0.0"]
    assert "2 node(s) x 2 task(s)" in done.stdout and "sbatch --test-only says" in done.stdout
    assert list(tmp_path.iterdir()) == []
    for wrong, problem in (
        ([tmp_path / "gone"], "gone"),
        ([model, "--script=x"], "takes neither --submit nor --script"),
        ([model, "--slots=0"], "--slots 0: must be at least 1"),
        ([model, "--slots=2", "--nodes=9"], "sbatch would refuse this request"),
    ):
        done = cluster.run(
            "bash", SCRIPTS / "serve.sh", *request, *wrong, "--dry-run", cwd=tmp_path
        )
        assert done.returncode == 2 and problem in done.stderr + done.stdout, done.stderr
