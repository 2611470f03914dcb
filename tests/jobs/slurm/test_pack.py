"""Several runs side by side on one node, each with its own end."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.cluster import FAKE_TRAINER, SCRIPTS, Cluster, calls_of

FAKE = {"KEMPNER_TRAIN": str(FAKE_TRAINER)}


class Pack:
    """A job of up to four runs with the fake trainer; `plans`: see there."""

    def __init__(self, cluster: Cluster, folder: Path, *options: str, **plans: str) -> None:
        self.cluster, self.folder = cluster, folder
        for name, plan in plans.items():
            (folder / f"{name}.txt").write_text(f"--run.dir={folder / name} --plan={plan}")
        (folder / "all.txt").write_text("".join(f"{folder / name}.txt\n" for name in plans))
        env = {**FAKE, **calls_of("scontrol", folder / "bin")}
        words = ["4", f"@{folder}/all.txt"]
        self.job = cluster.sbatch("pack.sh", *words, options=options, cwd=folder, env=env)

    @property
    def asked(self) -> list[str]:
        """Of the controller, but for questions."""
        calls = (self.folder / "calls-scontrol").read_text().splitlines()
        return [call.split()[-1] if call.startswith("update") else "requeue"
                for call in calls if call.startswith(("update", "requeue"))]  # fmt: skip

    def decisions(self, name: str) -> list[str]:
        lines = (self.folder / name / "attempts.jsonl").read_text().splitlines()
        return [line["decision"] for line in map(json.loads, lines) if line["event"] == "decision"]

    def seen(self, name: str) -> list[dict[str, str]]:
        """The environment of each start."""
        lines = (self.folder / name / "seen.jsonl").read_text().splitlines()
        return [json.loads(line)["env"] for line in lines]


def gpus(starts: Iterable[dict[str, str]]) -> set[str]:
    return {env["CUDA_VISIBLE_DEVICES"] for env in starts}


def test_each_run_ends_for_itself(cluster: Cluster, tmp_path: Path) -> None:
    """One is done, one fails, one ends without a result until its limit, each without the others;
    after the warning the job starts again for the one that was interrupted, and for no other."""
    pack = Pack(
        cluster, tmp_path, "--gpus-per-node=4", a="done", b="fail", c="nothing", d="wait,done"
    )
    log = tmp_path / f"kempner-{pack.job}.out"
    for name in "abc":
        cluster.wait_for(f"{name}.txt: has ended", log)
    cluster.ask("scancel", "--batch", "--signal=TERM", pack.job)  # what --signal=B:SIGTERM@N does
    assert cluster.wait(pack.job) == 1
    assert pack.decisions("a") == pack.decisions("b") == ["end"]
    assert pack.decisions("c") == ["requeue", "requeue", "end"]  # in its place, while d runs
    assert pack.decisions("d") == ["requeue", "end"]
    assert pack.asked == ["requeue", "Requeue=0"]
    starts = {name: len(pack.seen(name)) for name in "abcd"}
    assert starts == {"a": 1, "b": 1, "c": 3, "d": 2}
    others = [env for name in "abc" for env in pack.seen(name)]
    assert gpus(others) <= {"0", "1", "2", "3"}
    assert {env["SLURM_NTASKS"] for env in others} == {"1"}
    own = (tmp_path / "d/logs" / f"batch-{pack.job}.log").read_text()
    assert "got SIGTERM" in own and "requeue: interrupted and saved" in own
    assert "a.txt" not in own


def test_a_host_that_fails_twice_is_left_out(cluster: Cluster, tmp_path: Path) -> None:
    """By a run that dies on it twice; the job goes on with the other host."""
    pack = Pack(cluster, tmp_path, "--gpus-per-node=4", a="kill,kill,done")
    first = "node1"
    assert cluster.wait(pack.job) == 0, (tmp_path / f"kempner-{pack.job}.out").read_text()
    assert cluster.field(pack.job, "ExcNodeList") == first
    assert pack.asked == ["requeue", f"ExcNodeList={first}", "Requeue=0"]


def test_what_does_not_fit(cluster: Cluster, tmp_path: Path) -> None:
    """One line each, and nothing is started."""
    for words, options, problem in (
        (["4"], [], "0 configuration(s) for 4 runs"),
        (["a.toml"], [], "'a.toml' is not a number of runs"),
        (["3", "a", "b"], ["--gpus-per-node=4"], "4 task(s) for 3 runs"),
        (["2", "a", "b"], ["--nodes=2"], "pack.sh on 2 nodes"),
    ):
        command = ["salloc", "--quiet", "--exclusive", *options, "bash"]
        done = cluster.run(*command, "scripts/slurm/pack.sh", *words, env=FAKE)
        assert done.returncode == 2 and problem in done.stderr, done.stdout + done.stderr


def test_dry_run(cluster: Cluster, tmp_path: Path) -> None:
    """Shows the part of one run."""
    (tmp_path / "a.txt").write_text(f"--run.dir={tmp_path}/a")
    words = ["2", f"{tmp_path}/a.txt", f"{tmp_path}/b.txt", "--dry-run", "--gpus-per-node=4"]
    done = cluster.run("bash", SCRIPTS / "pack.sh", *words, cwd=tmp_path, env=FAKE)
    assert done.returncode == 0, done.stderr
    assert "1 node(s) x 2 task(s) = world size 2" in done.stdout
    assert "--gpus-per-node=2 " in done.stdout and " --exact --mem=0" in done.stdout
    assert not (tmp_path / "a").exists()


@contextlib.contextmanager
def kill_wait(cluster: Cluster, seconds: int) -> Iterator[None]:
    """Let Slurm wait so long between SIGTERM and SIGKILL."""
    conf = Path(cluster.env["SLURM_CONF"])
    before = conf.read_text()
    conf.write_text(re.sub(r"^KillWait=.*", f"KillWait={seconds}", before, flags=re.MULTILINE))
    cluster.ask("scontrol", "reconfigure")
    try:
        yield
    finally:
        conf.write_text(before)
        cluster.ask("scontrol", "reconfigure")


@pytest.mark.soak
def test_the_time_limit_itself(cluster: Cluster, tmp_path: Path) -> None:
    """Without a warning: the runs themselves ask for another start, while there is time."""
    with kill_wait(cluster, 30):  # Slurm's default; on a busy machine the test bed's is too short
        pack = Pack(
            cluster, tmp_path, "--gpus-per-node=4", "--time=1", "--signal=B:USR2@1",
            a="wait,done", b="done", c="wait,done", d="wait,done",
        )  # fmt: skip
        for name in "acd":
            cluster.wait_for("here is", tmp_path / name / f"logs/batch-{pack.job}.log")
        cluster.ask("scontrol", "update", f"JobId={pack.job}", "EndTime=now")
        assert cluster.wait(pack.job) == 0
    assert {name: len(pack.seen(name)) for name in "abcd"} == {"a": 2, "b": 1, "c": 2, "d": 2}
    assert len(gpus(pack.seen(name)[0] for name in "acd")) == 3


@pytest.mark.soak
def test_a_host_that_crashes(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm starts the job on the other one: with the runs that had not ended."""
    pack = Pack(cluster, tmp_path, "--gpus-per-node=4", a="wait,done", b="fail", c="wait,done")
    cluster.wait_for("b.txt: has ended", tmp_path / f"kempner-{pack.job}.out")
    for name in "ac":
        cluster.wait_for("here is", tmp_path / name / f"logs/batch-{pack.job}.log")
    node = cluster.ask("squeue", "-h", "-j", pack.job, "-o", "%N")
    try:
        cluster.testbed("crash", node)
        assert cluster.wait(pack.job) == 1
    finally:
        cluster.testbed("revive", node)
    assert {name: len(pack.seen(name)) for name in "abc"} == {"a": 2, "b": 1, "c": 2}
