"""scripts/slurm/rl.sh on a real Slurm with its own programs: whatever is killed, and whenever, the
run has the losses, rewards and samples of the unbroken one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kempner.jobs.system.reading import read_jsonl
from tests.cluster import SCRIPTS, Cluster, boot
from tests.conftest import ROOT, status
from tests.extensions.fault.rl_run import ROLES, THREE, RlRun
from tests.jobs.ray.ray_job import processes
from tests.waiting import until

STEPS = 8
FAULTY = ROOT / "tests/extensions/fault/faulty_rl"
CONFIG = """
model = {vocab_size = 257, dim = 32, n_layers = 2, n_heads = 2, ffn_dim = 64, max_seq_len = 64}
train = {max_steps = 8, seq_len = 64, micro_batch = 8, deterministic = true}
optimizer = {lr = 3e-3}
schedule = {warmup_steps = 2}
checkpoint = {interval = 3}
metrics = {log_interval = 1}

[rl]
tokenizer = "bytes"
group_size = 4
batch_samples = 32
max_async = 0
eval_interval = 4
eval_samples = 4
sampling = {max_tokens = 4}
"""
LEARNER, ASKER = (
    "kempner.extensions.rl.trainer.feed:Feed",
    "kempner.extensions.rl.orchestrate.orchestrator:Orchestrator",
)
PUBLISH = "kempner.extensions.rl.trainer.publish:DirectoryPublisher.publish"
SAVE = "kempner.checkpoint.checkpointer:Checkpointer"
EXCHANGE = "kempner.extensions.rl.exchange:RolloutExchange"
WEIGHTS = "kempner.extensions.serve.weights"
KILLS = {
    "the trainer before it begins": ("rl", f"{EXCHANGE}.begin:before", 1),
    "the trainer while it waits": ("rl", f"{LEARNER}.next:before", 3),
    "the trainer with a batch": ("rl", f"{LEARNER}.next:after", 5),
    "the trainer before it publishes": ("rl", f"{PUBLISH}:before", 4),
    "the trainer when it has published": ("rl", f"{PUBLISH}:after", 5),
    "the trainer while it saves": ("rl", f"{SAVE}._commit:before", 1),
    "the trainer at its end": ("rl", f"{SAVE}.close:before", 1),
    "the orchestrator at its start": ("orchestrate", f"{ASKER}._begin:before", 1),
    "the orchestrator before a batch": ("orchestrate", f"{ASKER}._hand_over:before", 5),
    "the orchestrator within a batch": (
        "orchestrate", "kempner.extensions.rl.exchange:RolloutExchange.hand_over:before", 6),
    "the orchestrator after a batch": (
        "orchestrate", "kempner.extensions.rl.exchange:RolloutExchange.hand_over:after", 2),
    "the orchestrator in an evaluation": ("orchestrate", f"{ASKER}._evaluate:before", 2),
    "an engine at its start": ("serve", f"{WEIGHTS}:first_version:before", 1),
    "an engine with its weights": ("serve", f"{WEIGHTS}:first_version:after", 1),
    "an engine before new weights": ("serve", f"{WEIGHTS}:replace_weights:before", 3),
    "an engine after new weights": ("serve", f"{WEIGHTS}:replace_weights:after", 4),
    "an engine at work": ("serve", "kempner.extensions.serve.worker:Worker._take:after", 20),
}  # fmt: skip
EVERY_DAY = {"the trainer when it has published"}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with boot(3, 2, tmp_path_factory) as cluster:
        yield cluster


def words(folder: Path, steps: int = STEPS, what: str = "") -> list[object]:
    """`what`: the reward of some completions does."""
    args = f"'{json.dumps({'what': what})}'"
    file = folder / "ascii.toml"
    reward = json.dumps(f"{ROOT}/tests/extensions/fault/ascii_reward.py:Ascii")
    env = f"env = [{{id = {reward}, name = 'ascii', use = 'both', timeout = 2.0, args = {args}}}]\n"
    file.write_text(f"{CONFIG}{env}")
    return [file, f"--train.max_steps={steps}"]


def figures(run_dir: Path) -> dict[int, tuple[float, float, float]]:
    """Of each step, what depends on its samples alone. A full disk may have cut a line off."""
    return {
        line["step"]: (line["loss"], line["reward"], line["length"])
        for line in read_jsonl(run_dir / "metrics.jsonl")
        if "reward" in line
    }


@pytest.fixture(scope="module")
def unbroken(
    three: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[float, float, float]]:
    """Without Slurm."""
    folder = tmp_path_factory.mktemp("unbroken")
    more = [f"--run.dir={folder}/run", "--distributed.device=cpu"]
    done = three.run("bash", SCRIPTS / "rl.sh", *words(folder), *more, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = figures(folder / "run")
    assert list(found) == list(range(1, STEPS + 1))
    return found


@pytest.fixture
def run(three: Cluster, tmp_path: Path) -> Iterator[RlRun]:
    found = RlRun(three, tmp_path)
    yield found
    found.end()


def start(
    run: RlRun,
    *more: object,
    options: tuple[str, ...] = ("--nodes=1",),
    what: str = "",
    **env: str,
) -> None:
    env |= {name: str(FAULTY / file) for name, file in ROLES.values()}
    run.start(*words(run.folder, what=what), *more, options=options, fake=False, **env)


def assert_equal(run: RlRun, unbroken: dict[int, tuple[float, float, float]]) -> None:
    assert status(run.dir)["state"] == "done", run.log
    found = dict(sorted(figures(run.dir).items()))
    assert found == unbroken, run.log  # to the last bit
    run.assert_nothing_left()


@pytest.mark.parametrize(
    "who",
    [pytest.param(w, marks=() if w in EVERY_DAY else pytest.mark.soak) for w in KILLS],
)
def test_kill(run: RlRun, unbroken: dict[int, tuple[float, float, float]], who: str) -> None:
    program, at, nth = KILLS[who]
    fuse = run.folder / "once"
    start(run, FAULTS=f"kill program={program} at={at} nth={nth} once={fuse}")
    assert run.wait() == 0, run.log
    assert fuse.exists(), "it was not killed"
    assert run.decisions() == (["end"] if program == "serve" else ["requeue", "end"]), run.log
    assert_equal(run, unbroken)


@pytest.mark.soak
@pytest.mark.parametrize("what", ["warning", "time limit"])
def test_a_run_that_is_stopped_equals_the_unbroken_one(
    run: RlRun, unbroken: dict[int, tuple[float, float, float]], what: str
) -> None:
    more = (
        ("--nodes=1",) if what == "warning" else ("--nodes=1", "--time=2", "--signal=B:SIGTERM@20")
    )
    held = 8 if what == "warning" else 16  # the first attempt has no time for all steps
    at = "kempner.extensions.rl.trainer.feed:Feed.next:before"
    start(run, options=more, FAULTS=f"hold program=rl at={at} nth=0 s={held}")
    if what == "warning":
        run.wait_for_step(4)
        run.cluster.ask("scancel", "--batch", "--signal=TERM", run.job)
    assert run.wait() == 0, run.log
    assert run.decisions()[0] == "requeue"
    assert_equal(run, unbroken)
    steps = [line["step"] for line in run.lines()]
    assert len(steps) == len(set(steps)), "none is done twice"


@pytest.mark.soak
@pytest.mark.parametrize("what", ["fork", "hang", "memory"])
def test_a_reward_that_misbehaves(run: RlRun, what: str) -> None:
    """On three hosts, asynchronous: it is left out and counted, and the others learn."""
    start(run, "--rl.max_async=1", "--rl.inference.slots=32", options=THREE, what=what)
    assert run.wait() == 0, run.log
    assert status(run.dir)["state"] == "done", run.log
    lines = run.lines()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    if what != "fork":  # a child that stays is ended, and its parent's reward counts
        assert sum(line["failed_rewards"] for line in lines) > 0
    run.assert_nothing_left()
    assert not left_in(run), "processes of the verifier"


HELD = {  # so that the disk is full when it goes on
    "orchestrator": ("orchestrate", f"{ASKER}._hand_over:before", 4),
    "trainer": ("rl", f"{PUBLISH}:before", 5),
}


@pytest.mark.soak
@pytest.mark.parametrize("part", ["orchestrator", "trainer"])
def test_a_full_disk(
    run: RlRun, unbroken: dict[int, tuple[float, float, float]], part: str
) -> None:
    """The run waits until there is room, and says so where there is: in the batch log."""
    disk = run.cluster.small_disk
    run.dir, ballast, mark = disk / "run", disk / "ballast", run.folder / "held"
    program, at, nth = HELD[part]
    more = f"--checkpoint.dir={run.folder}/checkpoints"
    start(run, more, FAULTS=f"hold program={program} at={at} nth={nth} s=4 once={mark}")
    try:
        until(mark.exists)
        until(lambda: filled(ballast) and f"{part}.full" in names(run.dir))
        run.wait_for("is full: waiting up to 10 minutes for room: " + part)
        told = run.cluster.run("bash", SCRIPTS / "status.sh", run.dir).stdout
        assert f"! disk full: {part} waits" in told, told
        ballast.unlink()
        assert run.wait() == 0, run.log
        assert run.decisions() == ["end"], run.log
        found = figures(run.dir)  # a line may be lost on the full disk
        assert all(found[step] == unbroken[step] for step in found)
        assert status(run.dir)["state"] == "done" and STEPS in found
        run.assert_nothing_left()
    finally:
        run.end()
        ballast.unlink(missing_ok=True)
        shutil.rmtree(run.dir, ignore_errors=True)


def filled(file: Path) -> bool:
    """To the last byte; what is removed meanwhile makes room again."""
    with contextlib.suppress(OSError), open(file, "ab", buffering=0) as out:
        while out.write(bytes(1 << 12)):
            pass
    return True


def names(run_dir: Path) -> list[str]:
    return [path.name for path in run_dir.glob("rl/*/*")]


@pytest.mark.soak
def test_an_orchestrator_that_hangs(
    run: RlRun, unbroken: dict[int, tuple[float, float, float]]
) -> None:
    """It is ended; the trainer saves, and the job goes on."""
    start(
        run,
        FAULTS="hold program=rl at=kempner.extensions.rl.trainer.feed:Feed.next:before nth=0 s=2",
    )
    run.wait_for_step(2)
    run.strike("orchestrator", number=signal.SIGSTOP)
    run.wait_for("the orchestrator has done nothing for 120 s: ending it")
    assert run.wait() == 0, run.log
    assert run.decisions() == ["requeue", "end"], run.log
    assert_equal(run, unbroken)


def left_in(run: RlRun) -> list[str]:
    """Processes for rewards on the hosts of the cluster, which know no job."""
    return [each for each in processes(run.cluster) if "kempner.extensions.rl.environments" in each]


@pytest.mark.soak
def test_a_cut_cable_and_an_engine_that_is_stopped(run: RlRun) -> None:
    start(run, "--rl.max_async=1", options=THREE, FAULTS="hold program=rl "
          "at=kempner.extensions.rl.trainer.feed:Feed.next:before nth=0 s=2")  # fmt: skip
    run.wait_for("engine 3 at http://")
    run.wait_for_step(2)
    (stopped,) = run.strike("engine", 1, signal.SIGSTOP)
    try:
        run.cluster.testbed("cut", "node3")
        assert run.wait() == 0, run.log
    finally:
        run.cluster.testbed("join", "node3")
    assert status(run.dir)["state"] == "done", run.log
    run.assert_nothing_left()
    until(lambda: not Path(f"/proc/{stopped}").exists())


@pytest.mark.soak
def test_it_learns_on_three_hosts(run: RlRun) -> None:
    """From reward alone."""
    run.start("configs/rl/arithmetic.toml", "--metrics.log_interval=1", fake=False)
    assert run.wait() == 0, run.log
    rewards = [line["reward"] for line in run.lines()]
    assert rewards[0] < 0.1 and max(rewards) > 0.6, rewards
    assert os.path.exists(run.dir / "rl-samples.jsonl")
