"""A crash or a hang does not cost the job its place: it starts again where it is, on a spare node
where one of the others is lost or to blame, and is requeued only when that cannot be."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster import FAKE_TRAINER, Cluster, boot
from tests.conftest import losses
from tests.trainer.fault.broken_run import BrokenRun
from tests.waiting import until

Submit = Callable[..., BrokenRun]
# Steps are saved every 10; those since then are done again, and what was in flight with them.
LOST = 12
STEP_14 = "at=kempner.train.step:reduce_step:before nth=14 rank=1"
HANGS = f"kill signal=SIGSTOP {STEP_14}"
SPARE = {"KEMPNER_SPARES": "1", "SBATCH_NO_KILL": "set"}


def assert_in_place(run: BrokenRun, story: list[str]) -> None:
    """Each loss is that of the unbroken run, bit by bit, and the job has never left its nodes."""
    assert run.wait() == 0, run.log
    run.assert_complete(attempts=len(story), recomputed=LOST * (len(story) - 1))
    assert losses(run.dir) == run.unbroken
    assert run.decisions() == story
    assert run.cluster.field(run.job, "Restarts") == "0"


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with boot(3, 2, tmp_path_factory) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def unbroken_pair(three: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Of two ranks on two nodes."""
    run = BrokenRun(three, {}, tmp_path_factory.mktemp("unbroken"))
    run.submit()
    assert run.wait() == 0, run.log
    return losses(run.dir)


@pytest.fixture
def pair(
    three: Cluster, unbroken_pair: dict[int, float], tmp_path: Path
) -> Iterator[Callable[..., BrokenRun]]:
    """Submit a run on two nodes, with what else is given."""
    runs = []

    def submit(*overrides: str, **more: object) -> BrokenRun:
        runs.append(BrokenRun(three, unbroken_pair, tmp_path))
        runs[-1].submit(*overrides, **more)  # type: ignore[arg-type]
        return runs[-1]

    yield submit
    for run in runs:
        run.end()


@pytest.mark.soak
@pytest.mark.parametrize(
    "fault",
    [
        f"kill {STEP_14}",
        pytest.param(f"fail {STEP_14}", marks=pytest.mark.soak),
        pytest.param(HANGS, marks=pytest.mark.soak),
    ],
    ids=["killed", "raises", "hangs"],
)
def test_a_rank_is_lost(pair: Submit, tmp_path: Path, fault: str) -> None:
    run = pair("--resilience.hang_timeout=6", faults=f"{fault} once={tmp_path}/once")
    assert_in_place(run, ["restart", "end"])
    assert run.events("decision")[0]["blamed"] == "node2"
    names = [event["attempt_id"] for event in run.events("start")]
    assert names[1] == f"{names[0]}.1"


def test_a_host_is_lost(pair: Submit) -> None:
    run = pair(options=["--nodes=3"], **SPARE)
    run.wait_for_step(13)
    assert run.events("start")[0]["spares"] == ["node3"]
    run.cluster.testbed("crash", "node2")
    try:
        assert_in_place(run, ["restart", "end"])
    finally:
        run.cluster.testbed("revive", "node2")
    nodes = [event["nodes"] for event in run.events("start")]
    assert nodes == [["node1", "node2"], ["node1", "node3"]]
    assert run.events("decision")[0]["excluded"] == "node2"


def test_no_spare_is_left(pair: Submit) -> None:
    """It is lost together with the host that it should replace. Not waited for: Slurm may still
    send the end of the job's first start to a host that comes back, and hit the second one."""
    run = pair(options=["--nodes=3"], **SPARE)
    run.wait_for_step(13)
    try:
        for host in ("node3", "node2"):
            run.cluster.testbed("crash", host)
        until(lambda: run.cluster.state(run.job) in ("PENDING", "COMPLETING"))
    finally:
        for host in ("node3", "node2"):
            run.cluster.testbed("revive", host)
    assert run.decisions() == ["requeue"]
    assert run.events("decision")[0]["blamed"] == "node2"
    assert "the spare node node3 does not answer: it is dropped" in run.log


@pytest.mark.soak
@pytest.mark.parametrize(
    ("nodes", "env"),
    [(3, SPARE), (2, {"KEMPNER_RESTARTS": "0", "SBATCH_NO_KILL": "set"})],
    ids=["spare", "no-restarts"],
)
def test_the_host_of_the_batch_script_is_lost(
    pair: Submit, nodes: int, env: dict[str, str]
) -> None:
    """Nobody is there to restart anything: another host of the job requeues it."""
    run = pair(options=[f"--nodes={nodes}"], **env)
    run.wait_for_step(13)
    # Not always node1: Slurm may not have it back yet from the test before.
    host = run.events("start")[0]["nodes"][0]
    run.cluster.testbed("crash", host)
    try:
        until(lambda: run.cluster.state(run.job) in ("PENDING", "COMPLETING"))
    finally:
        run.cluster.testbed("revive", host)
    assert run.wait() == 0
    run.assert_complete(attempts=2, recomputed=LOST)


@pytest.mark.soak
def test_a_host_that_fails_twice_is_replaced(pair: Submit, tmp_path: Path) -> None:
    """Until then the spare has had other work to do, at a low priority."""
    twice = "at=kempner.train.step:reduce_step:before rank=1 nth"
    work = f"echo $(uname -n) $(nice) $$ >>{tmp_path}/work; exec sleep 1013"
    run = pair(
        options=["--nodes=3"],
        faults=f"kill {twice}=4 once={tmp_path}/a\nkill {twice}=14 once={tmp_path}/b",
        KEMPNER_SPARE_COMMAND=work,
        **SPARE,
    )
    until(lambda: len(run.events("start")) == 3)
    assert not spare_works()  # the run has the spare to itself
    assert_in_place(run, ["restart", "restart", "end"])
    made = run.events("decision")
    assert [(d["blamed"], d["excluded"]) for d in made[:2]] == [("node2", ""), ("node2", "node2")]
    assert run.events("start")[-1]["nodes"] == ["node1", "node3"]
    (line,) = (tmp_path / "work").read_text().splitlines()
    assert line.startswith("node3 19 ")


@pytest.mark.soak
def test_a_spare_that_computes_wrong_numbers_takes_no_place(pair: Submit, tmp_path: Path) -> None:
    """As audit.py says of its own device. The run stays on the nodes that it has."""
    unfit = "touch $KEMPNER_RUN_DIR/.unfit-$SLURM_JOB_ID-$SLURMD_NODENAME; exit 3"
    twice = "at=kempner.train.step:reduce_step:before rank=1 nth"
    run = pair(
        options=["--nodes=3"],
        faults=f"kill {twice}=4 once={tmp_path}/a\nkill {twice}=14 once={tmp_path}/b",
        KEMPNER_SPARE_COMMAND=unfit,
        **SPARE,
    )
    assert run.wait() == 0, run.log
    assert "the spare node node3 computes wrong numbers (logs/spare.log): it is dropped" in run.log
    assert run.events("start")[1]["nodes"] == ["node1", "node2"]
    assert "is replaced by the spare node node3" not in run.log


def test_a_replaced_host_is_left_out_of_later_starts(three: Cluster, tmp_path: Path) -> None:
    """Slurm would give it to the job again."""
    words = (f"--run.dir={tmp_path}/run", "--plan=kill,kill,wait")
    env = {"KEMPNER_TRAIN": str(FAKE_TRAINER), **SPARE}
    options = ["--nodes=2", "--gpus-per-node=1"]
    job = three.sbatch("multinode.sh", *words, options=options, cwd=tmp_path, env=env)
    log = tmp_path / f"kempner-{job}.out"
    three.wait_for("here is attempt 2", log)
    three.ask("scancel", "--batch", "--signal=TERM", job)
    text = three.wait_for("excluded from the next starts", log)
    assert "node1 is replaced by the spare node node2" in text
    assert "without node1: was replaced by a spare node" in text
    until(lambda: three.field(job, "ExcNodeList") == "node1")
    three.ask("scancel", job)


def spare_works() -> bool:
    """Whether KEMPNER_SPARE_COMMAND, sleep 1013, runs."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(b"sleep\0001013\0"):
                return True
    return False


@pytest.mark.soak
def test_a_host_that_fails_the_preflight_is_replaced(three: Cluster, pair: Submit) -> None:
    three.testbed("cut", "node2")
    try:
        run = pair(options=["--nodes=3"], KEMPNER_PREFLIGHT="1", **SPARE)
        assert run.wait() == 0, run.log
    finally:
        three.testbed("join", "node2")
    run.assert_complete(attempts=1)
    assert losses(run.dir) == run.unbroken
    assert [(d["decision"], d["excluded"]) for d in run.events("decision")] == [
        ("restart", "node2"), ("end", ""),
    ]  # fmt: skip
    assert run.events("start")[0]["nodes"] == ["node1", "node3"]
    assert run.cluster.field(run.job, "Restarts") == "0"


@pytest.mark.soak
def test_a_spare_that_fails_the_preflight_is_dropped(three: Cluster, tmp_path: Path) -> None:
    words = (f"--run.dir={tmp_path}/run", "--plan=done")
    env = {"KEMPNER_TRAIN": str(FAKE_TRAINER), "KEMPNER_PREFLIGHT": "1", **SPARE}
    options = ["--nodes=3", "--gpus-per-node=1"]
    three.testbed("cut", "node3")
    try:
        job = three.sbatch("multinode.sh", *words, options=options, cwd=tmp_path, env=env)
        assert three.wait(job) == 0
    finally:
        three.testbed("join", "node3")
    text = (tmp_path / f"kempner-{job}.out").read_text()
    assert text.count("the spare node node3 failed the preflight: it is dropped\n") == 1, text
    seen = json.loads((tmp_path / "run/seen.jsonl").read_text())["env"]
    assert seen["KEMPNER_IDLE"] == "" and seen["SLURM_STEP_NODELIST"] == "node[1-2]"
