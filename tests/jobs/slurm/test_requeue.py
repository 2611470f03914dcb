"""What the batch script decides when a run ends, on a real Slurm: requeue or not, the exit code,
the line."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.cluster import FAKE_TRAINER, Cluster, calls_of

FAKE = {"KEMPNER_TRAIN": str(FAKE_TRAINER)}


def submit(
    cluster: Cluster,
    tmp_path: Path,
    plan: str,
    *options: str,
    env: dict[str, str] | None = None,
) -> str:
    """The fake trainer; each call of scontrol is written down."""
    arguments = [f"--run.dir={tmp_path / 'run'}", f"--plan={plan}"]
    env = {**FAKE, **calls_of("scontrol", tmp_path / "bin"), **(env or {})}
    options = ("--gpus-per-node=2", *options)
    return cluster.sbatch("singlenode.sh", *arguments, options=options, cwd=tmp_path, env=env)


def changes(tmp_path: Path) -> list[str]:
    """What the batch script has asked of the controller, but for the run's name in the Comment.
    Requeue=0 before an end that is final: a job that was preempted would be requeued by Slurm 24.05
    and later at its next end, whatever that end is."""
    calls = (tmp_path / "calls-scontrol").read_text().splitlines()
    calls = [call for call in calls if " Comment=" not in call]
    return [call.split()[-1] if call.startswith("update") else "requeue"
            for call in calls if call.startswith(("update", "requeue"))]  # fmt: skip


def decisions(tmp_path: Path) -> list[dict[str, object]]:
    lines = (tmp_path / "run/attempts.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == "decision"]


@pytest.mark.parametrize(
    ("plan", "code", "before", "why"),
    [
        ("done", 0, [], "the run is done"),
        pytest.param("stop", 0, [], "the run is stopped", marks=pytest.mark.soak),
        pytest.param("fail", 1, [], "the run is failed", marks=pytest.mark.soak),
        ("input", 2, [], "bad input"),
        ("oom", 1, [], "CUDA out of memory; another attempt would end in the same way"),
        (
            "crash,crash,crash,crash",
            1,
            ["restart", "requeue"],  # what fails twice at once needs time, or other nodes
            "3 attempts in a row without progress (KEMPNER_MAX_CRASHES=3)",
        ),
        (
            "crash,crash,save,crash,done",  # progress starts the count anew
            0,
            ["restart", "requeue", "restart", "restart"],
            "the run is done",
        ),
    ],
)
def test_end_of_a_run(
    cluster: Cluster, tmp_path: Path, plan: str, code: int, before: list[str], why: str
) -> None:
    job = submit(cluster, tmp_path, plan)
    assert cluster.wait(job) == code
    made = decisions(tmp_path)
    assert [d["decision"] for d in made] == [*before, "end"]
    # The second crash in a row on this host
    requeued = ["requeue", "ExcNodeList=node1"] * before.count("requeue")
    assert changes(tmp_path) == [*requeued, "Requeue=0"]
    assert str(made[-1]["why"]).endswith(why)
    log = (tmp_path / f"kempner-{job}.out").read_text()
    assert (
        f"kempner: end: {made[-1]['why']}\n" in log
    )  # the same line, and the log of every attempt is there
    assert log.count("kempner: restart: ") == before.count("restart")


def test_restarts_in_place_and_requeues_count_together(cluster: Cluster, tmp_path: Path) -> None:
    """One restart in place a start of the job: crash, restart, crash, requeue, crash, the end."""
    env = {"KEMPNER_RESTARTS": "1"}
    job = submit(cluster, tmp_path, "crash,crash,crash,crash", env=env)
    assert cluster.wait(job) == 1
    made = [(d["decision"], d["no_progress"]) for d in decisions(tmp_path)]
    assert made == [("restart", 1), ("requeue", 2), ("end", 3)]
    assert changes(tmp_path) == ["requeue", "ExcNodeList=node1", "Requeue=0"]


def test_a_step_that_cannot_be_created(cluster: Cluster, tmp_path: Path) -> None:
    """As on a node that has just come back: the next try, at once, would fail in the same way."""
    refuse = f"""mkdir {tmp_path}/refused 2>/dev/null && {{
        echo "srun: error: Unable to create step for job 1: Invalid generic resource (gres)" >&2
        exit 1
    }}"""
    env = calls_of("srun", tmp_path / "bin", refuse)
    job = submit(cluster, tmp_path, "done", env=env)
    assert cluster.wait(job) == 0
    assert [d["decision"] for d in decisions(tmp_path)] == ["requeue", "end"]


@pytest.mark.parametrize("plan", ["crash", "nothing"])  # never 0: the run is not done
def test_without_requeue_all_restarts_are_in_place(
    cluster: Cluster, tmp_path: Path, plan: str
) -> None:
    job = submit(cluster, tmp_path, plan, "--no-requeue")
    assert cluster.wait(job) == 1
    assert [d["decision"] for d in decisions(tmp_path)] == ["restart", "restart", "end"]


def test_a_job_near_its_end_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    """The warning comes before another start could train."""
    job = submit(cluster, tmp_path, "crash,done", "--time=10", env={"KEMPNER_SIGNAL_LEAD": "610"})
    assert cluster.wait(job) == 0
    assert [d["decision"] for d in decisions(tmp_path)] == ["requeue", "end"]
    assert "no restart in place" in (tmp_path / f"kempner-{job}.out").read_text()


@pytest.mark.parametrize(
    ("signal", "story"),
    [("TERM", ["requeue", "end"]), ("INT", ["end"]), ("USR2", ["restart", "end"])],
)
def test_a_signal_between_two_attempts(
    cluster: Cluster, tmp_path: Path, signal: str, story: list[str]
) -> None:
    """It comes while the batch script decides, when no rank is there to hear it."""
    deciding = tmp_path / "deciding"
    go = tmp_path / "go"
    slowly = f"while [[ -e {go} && $1 == show ]]; do touch {deciding}; sleep 0.1; done"
    env = {**FAKE, **calls_of("scontrol", tmp_path / "bin", slowly)}
    arguments = [f"--run.dir={tmp_path / 'run'}", "--plan=crash-later,done"]
    job = cluster.sbatch(
        "singlenode.sh", *arguments, options=["--gpus-per-node=2"], cwd=tmp_path, env=env
    )
    cluster.wait_for("here is attempt 0", tmp_path / f"kempner-{job}.out")
    go.touch()
    while not deciding.exists():
        time.sleep(0.05)
    cluster.ask("scancel", "--batch", f"--signal={signal}", job)
    while not cluster.has_signalled(job, signal):
        time.sleep(0.05)
    go.unlink()  # the shell has it, and hears it when scontrol has answered
    cluster.wait(job)
    assert [d["decision"] for d in decisions(tmp_path)] == story


def test_warning_saves_and_requeues(cluster: Cluster, tmp_path: Path) -> None:
    """The time limit's warning reaches the batch shell alone, which asks the ranks."""
    job = submit(cluster, tmp_path, "wait,done")
    log = tmp_path / f"kempner-{job}.out"
    cluster.wait_for("here is attempt 0", log)
    cluster.ask("scancel", "--batch", "--signal=TERM", job)  # what --signal=B:SIGTERM@N does
    assert cluster.wait(job) == 0
    assert "got SIGTERM" in log.read_text()
    assert [d["decision"] for d in decisions(tmp_path)] == ["requeue", "end"]
    assert str(decisions(tmp_path)[0]["why"]).startswith("interrupted and saved")
    assert changes(tmp_path) == ["requeue", "Requeue=0"]


def test_bad_input_before_the_run_is_final_too(cluster: Cluster, tmp_path: Path) -> None:
    """The check of the configuration fails; there is no run directory to record a decision in."""
    env = calls_of("scontrol", tmp_path / "bin")
    job = cluster.sbatch("singlenode.sh", "nowhere.toml", cwd=tmp_path, env=env)
    assert cluster.wait(job) == 2
    assert changes(tmp_path) == ["Requeue=0"]


def test_a_controller_that_does_not_answer(cluster: Cluster, tmp_path: Path) -> None:
    """The warning comes while it is away: the ranks get it through srun, and save in time."""
    away = tmp_path / "away"
    wait = f"while [[ -e {away} ]]; do sleep 0.2; done"
    env = dict(FAKE)
    for name in ("scontrol", "squeue", "scancel"):
        env |= calls_of(name, tmp_path / "bin", wait)
    arguments = [f"--run.dir={tmp_path / 'run'}", "--plan=wait,done"]
    job = cluster.sbatch("singlenode.sh", *arguments, cwd=tmp_path, env=env)
    log = tmp_path / f"kempner-{job}.out"
    cluster.wait_for("here is attempt 0", log)
    away.touch()
    cluster.ask("scancel", "--batch", "--signal=TERM", job)
    cluster.wait_for("got SIGUSR1", log)
    away.unlink()
    assert cluster.wait(job) == 0
    assert [d["decision"] for d in decisions(tmp_path)] == ["requeue", "end"]


def test_the_time_limit_itself_requeues(cluster: Cluster, tmp_path: Path) -> None:
    """The warning did not come; there is the KillWait after the limit to ask for another start."""
    job = submit(cluster, tmp_path, "wait,done", "--time=1", "--signal=B:USR2@1")
    cluster.wait_for("here is attempt 0", tmp_path / f"kempner-{job}.out")
    cluster.ask("scontrol", "update", f"JobId={job}", "EndTime=now")
    assert cluster.wait(job) == 0
    assert cluster.field(job, "Restarts") == "1"


@pytest.mark.parametrize("late", [False, True])
def test_scancel_never_comes_back(cluster: Cluster, tmp_path: Path, late: bool) -> None:
    """Cancelled while it trains, and while it saves after a warning."""
    job = submit(cluster, tmp_path, "wait,done")
    cluster.wait_for("here is attempt 0", tmp_path / f"kempner-{job}.out")
    if late:
        cluster.ask("scancel", "--batch", "--signal=TERM", job)
    cluster.ask("scancel", job)
    cluster.wait(job)
    assert cluster.state(job) == "CANCELLED"
    assert "requeue" not in [d["decision"] for d in decisions(tmp_path)] or late
    assert "Requeue=0" not in changes(tmp_path)


def test_no_requeue_is_respected(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, "wait,done", "--no-requeue")
    cluster.wait_for("here is attempt 0", tmp_path / f"kempner-{job}.out")
    cluster.ask("scancel", "--batch", "--signal=USR1", job)
    assert cluster.wait(job) == 75
    assert "--no-requeue" in str(decisions(tmp_path)[-1]["why"])


def test_only_this_task_of_an_array_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    """The last task of an array has the array's own number."""
    script = tmp_path / "each.sh"
    launch = Path(__file__).parents[3] / "scripts/slurm/singlenode.sh"
    script.write_text(
        "#!/bin/bash\n"
        "plan=done; ((SLURM_ARRAY_TASK_ID < 2)) || plan=crash,done\n"
        f'exec bash {launch} "--run.dir=$PWD/run$SLURM_ARRAY_TASK_ID" --plan=$plan\n'
    )
    options = ["--array=1-2", "--requeue", "--gpus-per-node=1"]
    job = cluster.sbatch(
        script, options=options, cwd=tmp_path, env={**FAKE, "KEMPNER_RESTARTS": "0"}
    )
    codes = [cluster.wait(f"{job}_{task}") for task in (1, 2)]
    assert codes == [0, 0]
    assert [cluster.field(f"{job}_{task}", "Restarts") for task in (1, 2)] == ["0", "1"]
    assert json.loads((tmp_path / "run2/status.json").read_text())["state"] == "done"


def test_preemption_requeues(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm tells the ranks itself; they leave in good order within the grace time."""
    job = submit(cluster, tmp_path, "wait,done")
    cluster.wait_for("here is attempt 0", tmp_path / f"kempner-{job}.out")
    node = cluster.field(job, "NodeList")
    cluster.ask(
        "sbatch",
        "--partition=urgent",
        "--exclusive",
        f"--nodelist={node}",
        f"--output={tmp_path}/urgent",
        "--wrap=sleep 1",
    )
    assert cluster.wait(job) == 0
    assert cluster.field(job, "Restarts") == "1"


def test_a_job_that_slurm_requeues_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    """An operator's requeue: the script does not decide, and the next start comes."""
    job = submit(cluster, tmp_path, "wait,done")
    cluster.wait_for("here is attempt 0", tmp_path / f"kempner-{job}.out")
    cluster.ask("scontrol", "requeue", job)
    assert cluster.wait(job) == 0
    assert cluster.field(job, "Restarts") == "1"
    assert [d["decision"] for d in decisions(tmp_path)] == ["leave", "end"]
    assert changes(tmp_path) == ["Requeue=0"]
