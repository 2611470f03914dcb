"""KEMPNER_CHAIN on a real Slurm that requeues no job: JobRequeue=0, PreemptMode=CANCEL."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import ENDED, FAKE_TRAINER, SCRIPTS, Cluster, boot, calls_of, program
from tests.conftest import losses
from tests.trainer.fault.broken_run import STEPS, words
from tests.waiting import until

SOAK = pytest.mark.soak
HOSTILE = ["two words", "'single' \"double\"", "$HOME `id` *", ""]
SAME = ("NumNodes", "NumCPUs", "Partition", "TimeLimit", "OverSubscribe", "MinMemoryNode",
        "NtasksPerN:B:S:C", "TresPerNode", "Nice", "WorkDir", "MailUser", "MailType")  # fmt: skip


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three hosts of two GPUs; no job is requeued unless it asks for that."""
    with boot(3, 2, tmp_path_factory, "JobRequeue=0 PreemptMode=CANCEL") as cluster:
        yield cluster


class Chain:
    """Jobs of the fake trainer that continue each other; each works by the next word of the
    plan."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder, self.dir = cluster, folder, folder / "run"
        self.first = 0

    def submit(
        self, plan: str, *more: str, most: object = 5, script: str = "singlenode.sh",
        options: tuple[str, ...] = (), sbatch: str = "", **env: str,
    ) -> str:  # fmt: skip
        """`sbatch`: bash that jobs run in its place for the next one; $sbatch is the real one."""
        env = {"KEMPNER_TRAIN": str(FAKE_TRAINER), "KEMPNER_CHAIN": str(most)} | env
        env = {"KEMPNER_RESTARTS": "0", **env}  # in place: it is the next job that is tested
        if sbatch:
            text = f"#!/bin/bash\nsbatch={shutil.which('sbatch')}\n"
            text += f'[[ $KEMPNER_CHAIN_LINK ]] || exec $sbatch "$@"\n{sbatch}\n'
            env |= program(self.folder / "bin", "sbatch", text)
        arguments = [f"--run.dir={self.dir}", f"--plan={plan}", *more]
        options = ("--gpus-per-node=1", *options)
        job = self.cluster.sbatch(script, *arguments, options=options, cwd=self.folder, env=env)
        self.first = int(job)
        return job

    def log(self, job: object) -> str:
        file = self.folder / f"kempner-{job}.out"
        return file.read_text() if file.exists() else ""

    def runs(self, job: object) -> None:
        """Until the trainer of this job is there, and so is what comes before it."""
        self.cluster.wait_for("here is attempt", self.folder / f"kempner-{job}.out")

    def warn(self, job: object) -> None:
        """What --signal=B:SIGTERM@N does before the time limit."""
        self.runs(job)
        self.cluster.ask("scancel", "--batch", "--signal=TERM", job)

    def jobs(self) -> list[str]:
        """All since the first, in order, whatever became of them."""
        told = self.cluster.ask("squeue", "--states=all", "--noheader", "--format=%A").split()
        return sorted({job for job in told if int(job) >= self.first}, key=int)

    def over(self) -> None:
        """Until nothing is left in the queue."""
        until(lambda: self.cluster.ask("squeue", "--noheader") == "")

    def decisions(self) -> list[str]:
        path = self.dir / "attempts.jsonl"
        lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
        return [line["decision"] for line in lines if line["event"] == "decision"]

    def journal(self) -> list[tuple[str, int, str]]:
        lines = map(json.loads, (self.dir / "chain.jsonl").read_text().splitlines())
        return [(line["event"], line["link"], line["job"]) for line in lines]


@pytest.fixture
def chain(strict: Cluster, tmp_path: Path) -> Iterator[Chain]:
    found = Chain(strict, tmp_path)
    yield found
    strict.run("scancel", "--me")
    found.over()


def test_three_time_limits(chain: Chain) -> None:
    """Four jobs with one request and the same words; none is left when the run is done."""
    options = ("--comment=for us", "--nice=5", "--mail-user=me", "--mail-type=FAIL", "--time=10",
               "--no-requeue", "--exclusive=oversubscribe", "--mem=64M")  # fmt: skip
    job = chain.submit("wait,wait,wait,done", *HOSTILE, options=options, GREETING="hello\nthere")
    jobs = [str(int(job) + i) for i in range(4)]
    for job in jobs[:3]:
        chain.runs(job)
        waits = chain.cluster.field(str(int(job) + 1), "Dependency")
        assert waits == f"afterany:{job}(unfulfilled)"  # never two at once
        chain.warn(job)
    chain.over()
    assert chain.decisions() == ["chain"] * 3 + ["end"]
    assert chain.jobs() == [*jobs, str(int(jobs[3]) + 1)]  # the last one was not needed
    assert [chain.cluster.state(job) for job in chain.jobs()] == ["COMPLETED"] * 4 + ["CANCELLED"]
    for name in SAME:
        assert len({chain.cluster.field(job, name) for job in jobs}) == 1, name
    shown = [chain.cluster.ask("scontrol", "show", "job", job) for job in jobs]
    for job, record in zip(jobs, shown, strict=True):
        assert f"StdOut={chain.folder}/kempner-{job}.out" in record
    assert f"Comment=for us kempner-chain={jobs[0]}.3" in shown[3]
    seen = [json.loads(line) for line in (chain.dir / "seen.jsonl").read_text().splitlines()]
    assert [each["argv"][2:] for each in seen] == [HOSTILE] * 4
    assert {each["env"]["GREETING"] for each in seen} == {"hello\nthere"}
    events = [event for event, _, _ in chain.journal()]
    assert events == ["intent", "submitted"] * 4 + ["cancelled"]


@pytest.mark.parametrize(
    ("plan", "most", "starts", "code", "why"),
    [
        ("fail", 5, 1, 1, "the run is failed"),
        ("crash", 5, 3, 1, "3 attempts in a row without progress (KEMPNER_MAX_CRASHES=3)"),
        pytest.param(
            "save",
            1,
            2,
            1,
            "it was the last job of its chain: submit it again to go on",
            marks=SOAK,
        ),
    ],
)
def test_ends_that_are_final(
    chain: Chain, plan: str, most: int, starts: int, code: int, why: str
) -> None:
    job = chain.submit(plan, most=most)
    last = int(job) + starts - 1
    until(lambda: chain.decisions()[-1:] == ["end"])
    chain.over()
    assert chain.decisions() == ["chain"] * (starts - 1) + ["end"]
    assert why in chain.log(last) and chain.cluster.wait(str(last)) == code
    assert len(chain.jobs()) == min(starts, most) + 1
    if starts <= most:  # the one in the queue; left there, it would end by itself
        assert chain.cluster.state(chain.jobs()[-1]) == "CANCELLED"


def test_any_program(chain: Chain) -> None:
    """run.sh: the next job starts the program again, with the code that the first one had."""
    script = chain.folder / "code/program.sh"
    script.parent.mkdir()
    script.write_text(
        "[[ ! -e second ]] || exit 0; touch second; trap 'exit 1' TERM; echo here is attempt\n"
        "sleep 60 & wait\n"
    )
    words = ("run.sh", f"--run-dir={chain.dir}", "--code=code", "--", "bash", script)
    env = {"KEMPNER_CHAIN": "5", "KEMPNER_CODE": "1"}
    job = chain.cluster.sbatch(*words, options=("--gpus-per-node=1",), cwd=chain.folder, env=env)
    chain.first = int(job)
    chain.runs(job)
    script.write_text("exit 1")
    chain.warn(job)
    chain.over()
    assert chain.decisions() == ["chain", "end"], chain.log(job)
    assert [chain.cluster.state(job) for job in chain.jobs()] == ["COMPLETED"] * 2 + ["CANCELLED"]
    (copy,) = (path for path in (chain.dir / "code").iterdir() if path.is_dir())
    assert all(f"the program's code: {copy}" in chain.log(job) for job in chain.jobs()[:2])


def test_bad_input_leaves_nothing(chain: Chain) -> None:
    """Found before and after the successor is submitted."""
    assert chain.cluster.wait(chain.submit("done", most="many")) == 2
    assert "KEMPNER_CHAIN=many: must be the number of jobs" in chain.log(chain.first)
    assert chain.cluster.wait(chain.submit("input")) == 2
    chain.over()
    assert chain.decisions() == ["end"]


@pytest.mark.parametrize("away", ["", "scancel", pytest.param("scontrol", marks=SOAK)])
def test_scancel_leaves_nothing(chain: Chain, away: str) -> None:
    """Also when the script cannot cancel its successor, which then sees how that job ended: by
    Slurm's record or, when Slurm has forgotten the job, by the run's own."""
    env = calls_of("scancel", chain.folder / "bin", "exit 1") if away else {}
    if away == "scontrol":
        forgotten = '[[ $* != "show job "[0-9]* || $3 == "$SLURM_JOB_ID" ]] || exit 1'
        env = calls_of("scontrol", chain.folder / "bin", forgotten)
    job = chain.submit("wait,done", **env)
    chain.runs(job)
    chain.cluster.ask("scancel", job)
    until(lambda: chain.cluster.state(job) in ENDED)
    chain.over()
    assert len(chain.jobs()) == 2
    log = chain.log(int(job) + 1)
    how = {"": "", "scancel": "was cancelled", "scontrol": "has ended for good"}[away]
    assert "here is attempt" not in log
    assert not how or f"end: job {job}, which this one was to continue, {how}" in log


def test_the_user_cancels_the_successor(chain: Chain) -> None:
    """The job that runs goes on; after it nothing does, and nothing new is submitted."""
    job = chain.submit("wait,done")
    chain.runs(job)
    chain.cluster.ask("scancel", int(job) + 1)
    chain.warn(job)
    assert chain.cluster.wait(job) == 75
    chain.over()
    assert f"job {int(job) + 1}, which was to continue it, was cancelled" in chain.log(job)
    assert len(chain.jobs()) == 2


# Of those above this one, the topmost is the script itself; the others are its subshells.
KILL = """
pid=$$ script=
while ((pid > 1)); do
    ! tr '\\0' ' ' </proc/$pid/cmdline | grep -q slurm_script || script=$pid
    pid=$(awk '$1 == "PPid:" { print $2 }' /proc/$pid/status)
done
kill -KILL $script
"""


@pytest.mark.parametrize(("after", "jobs"), [pytest.param(False, 1, marks=SOAK), (True, 2)])
def test_kill_around_the_submission(chain: Chain, after: bool, jobs: int) -> None:
    """Between the two lines of the journal, before and after Slurm has the job: never two."""
    marker = chain.folder / "killed"
    kill = f"[[ -e {marker} ]] || {{ touch {marker}\n{KILL}}}"
    real = '$sbatch "$@"'
    text = f"{real}\n{kill}" if after else f"{kill}\n[[ -e {marker}.2 ]] && {real}"
    job = chain.submit("done", sbatch=text)
    until(lambda: chain.cluster.state(job) in ENDED)
    chain.over()
    started = (chain.dir / "seen.jsonl").read_text().count("\n") if after else 0
    assert started == int(after)
    ran = [each for each in chain.jobs() if "kempner: run directory" in chain.log(each)]
    assert len(ran) == jobs
    if after:  # what the killed script could not write, its successor did
        assert ("submitted", 1, str(int(job) + 1)) in chain.journal()


@pytest.mark.soak
def test_an_answer_of_sbatch_that_is_lost(chain: Chain) -> None:
    job = chain.submit("crash,done", most=1, sbatch='$sbatch "$@" >/dev/null; exit 1')
    until(lambda: chain.decisions() == ["chain", "end"])
    chain.over()
    assert chain.journal() == [("intent", 1, ""), ("submitted", 1, str(int(job) + 1))]
    assert len(chain.jobs()) == 2


def test_a_host_that_fails_twice_is_left_out(chain: Chain) -> None:
    job = chain.submit("kill,kill,done")
    until(lambda: chain.decisions()[-1:] == ["end"])
    assert chain.decisions() == ["chain", "chain", "end"]
    hosts = [chain.cluster.field(str(int(job) + i), "NodeList") for i in range(3)]
    assert hosts == ["node1", "node1", "node2"]
    assert chain.cluster.field(str(int(job) + 2), "ExcNodeList") == "node1"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("host", "env"),
    [("node2", {}), ("node1", {}), ("node1", {"SBATCH_NO_KILL": "set"})],
    ids=["worker", "batch", "batch-no-kill"],
)
def test_a_host_is_lost(chain: Chain, host: str, env: dict[str, str]) -> None:
    """The next job goes on, on the others: Slurm ends the first one or, where the job survives the
    loss, the guard does."""
    job = chain.submit("wait,done", script="multinode.sh", options=("--nodes=2",), **env)
    chain.runs(job)
    chain.cluster.testbed("crash", host)
    try:
        until(lambda: chain.decisions()[-1:] == ["end"])
        chain.over()
    finally:
        chain.cluster.testbed("revive", host)
    successor = str(int(job) + 1)
    assert '"state": "done"' in (chain.dir / "status.json").read_text(), chain.log(successor)
    nodes = chain.cluster.ask(
        "scontrol", "show", "hostnames", chain.cluster.field(successor, "NodeList")
    )
    assert len(nodes.split()) == 2 and host not in nodes.split()
    assert chain.decisions() == (["chain", "end"] if host == "node2" else ["end"])


def test_preemption_that_cancels(chain: Chain) -> None:
    """PreemptMode=CANCEL: the job is not started again, its successor is."""
    job = chain.submit("wait,done")
    chain.runs(job)
    words = ("--partition=urgent", "--exclusive", "--nodelist=node1", "--output=/dev/null")
    chain.cluster.ask("sbatch", *words, f"--chdir={chain.folder}", "--wrap=sleep 1")
    until(lambda: chain.decisions() == ["chain", "end"])
    assert '"state": "done"' in (chain.dir / "status.json").read_text()


def test_two_chains_of_one_run(chain: Chain) -> None:
    job = chain.submit("wait,done")
    chain.runs(job)
    second = chain.submit("wait,done")
    assert chain.cluster.wait(second) == 2
    assert f"job {int(job) + 1} already continues {chain.dir}" in chain.log(second)
    chain.first = int(job)
    assert len(chain.jobs()) == 3
    (chain.dir / "lock").touch()  # the stand-in keeps none
    table = chain.cluster.run("bash", SCRIPTS / "status.sh", chain.dir).stdout
    assert f"job {int(job) + 1} next" in table, table


def test_each_task_of_an_array_has_its_own_chain(chain: Chain) -> None:
    """The successor is a task with the same number: it reads the same line of the file."""
    files = [chain.folder / f"{k}.txt" for k in range(3)]
    for k, file in enumerate(files):
        file.write_text(f"--run.dir={chain.folder}/run{k} --plan={'crash,done' if k else 'done'}")
    (chain.folder / "all").write_text("".join(f"{file}\n" for file in files))
    env = {"KEMPNER_TRAIN": str(FAKE_TRAINER), "KEMPNER_CHAIN": "2", "KEMPNER_RESTARTS": "0"}
    more = {"cwd": chain.folder, "env": env}
    arguments = ["singlenode.sh", f"@{chain.folder}/all"]
    limited = chain.cluster.sbatch(*arguments, options=["--array=1-2%1"], **more)
    options = ["--array=1-2", "--gpus-per-node=1", "--output=log-%A_%a", "--job-name=two words"]
    job = chain.cluster.sbatch(*arguments, options=options, **more)
    done = [chain.folder / f"run{k}/status.json" for k in (1, 2)]
    until(lambda: all(file.exists() and "done" in file.read_text() for file in done))
    chain.over()
    decided = [(chain.folder / f"run{k}/attempts.jsonl").read_text() for k in (1, 2)]
    for k, text in enumerate(decided, 1):
        events = [json.loads(line) for line in text.splitlines()]
        assert [event["decision"] for event in events] == ["chain", "end"]
        assert events[0]["job"] == f"{job}_{k}" and events[1]["job"].endswith(f"_{k}")
        assert (chain.folder / f"log-{events[1]['job']}").exists()
    assert "(two words)" in (chain.folder / f"log-{events[1]['job']}").read_text()
    assert chain.cluster.wait(f"{limited}_1") == 2
    logs = [file.read_text() for file in chain.folder.glob("kempner-*.out")]
    assert len(logs) == 2
    assert all("would exceed its limit of 1 at once: leave %1 out" in log for log in logs)


def test_a_request_that_cannot_be_made_again(chain: Chain) -> None:
    """Slurm's record of the successor is compared with the job's own: nothing differs quietly."""
    job = chain.submit("done", most=1, sbatch='exec $sbatch "${@:1:2}" --nice=7 "${@:3}"')
    assert chain.cluster.wait(job) == 2
    chain.over()
    assert "would not have the request of this one (Nice=0 here and 7 there)" in chain.log(job)


def test_a_job_without_a_chain_is_told(chain: Chain) -> None:
    assert chain.cluster.wait(chain.submit("done", most=0, options=("--no-requeue",))) == 0
    assert "note: this job cannot be requeued" in chain.log(chain.first)
    assert chain.cluster.wait(chain.submit("done", most=0)) == 0  # the header asks for it
    assert "partition gpu cancels the jobs that it preempts" in chain.log(chain.first)


@pytest.mark.soak
def test_three_real_time_limits(strict: Cluster, tmp_path: Path) -> None:
    """The real trainer, Slurm's own limits and warnings: the losses are those of one unbroken
    run."""
    arguments = words(strict, tmp_path / "run")
    python = strict.env["KEMPNER_PYTHON"]
    strict.ask(python, "scripts/train.py", *words(strict, tmp_path / "unbroken"))
    env = {
        "KEMPNER_TRAIN": str(FAKE_TRAINER.parents[2] / "trainer/fault/faulty_train.py"),
        "FAULTS": "slow ms=2500",
        "KEMPNER_CHAIN": "30",
    }
    options = ["--gpus-per-node=1", "--time=1", "--signal=B:SIGTERM@20", f"--output={tmp_path}/%j"]
    root = SCRIPTS.parents[1]
    strict.sbatch("multinode.sh", *arguments, options=options, cwd=root, env=env)
    until(lambda: "done" in text_of(tmp_path / "run/status.json"))
    until(lambda: strict.ask("squeue", "--noheader") == "")
    events = map(json.loads, (tmp_path / "run/attempts.jsonl").read_text().splitlines())
    made = [event["decision"] for event in events if event["event"] == "decision"]
    assert made[:3] == ["chain"] * 3 and made[-1] == "end"
    found, unbroken = losses(tmp_path / "run"), losses(tmp_path / "unbroken")
    assert list(found) == list(unbroken) == list(range(1, STEPS + 1))
    assert list(found.values()) == pytest.approx(list(unbroken.values()), rel=1e-5)


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""
