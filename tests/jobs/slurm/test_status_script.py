"""scripts/slurm/status.sh beside a job."""

from __future__ import annotations

from pathlib import Path

from tests.cluster import SCRIPTS, Cluster
from tests.waiting import until


def test_status_of_a_run_through_a_requeue(cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "a run"

    def told() -> list[str]:
        """The words of the run with its reason, which has a line of its own when it is long."""
        table = cluster.run("bash", SCRIPTS / "status.sh", run_dir).stdout
        return table.partition("\n")[2].split()

    arguments = cluster.debug_run(run_dir, "--train.max_steps=300")
    options = ["--gpus-per-node=1", "--time=10"]
    job = cluster.sbatch("singlenode.sh", *arguments, options=options, cwd=tmp_path)
    cluster.wait_for('"step": 3,', run_dir / "metrics.jsonl")
    state, step, *_, left = told()[2:]
    assert state == "running" and step.endswith("/300") and left.startswith("9:")
    cluster.ask("scancel", "--batch", "--signal=TERM", job)
    cluster.wait_for('"decision": "requeue"', run_dir / "attempts.jsonl")
    until(lambda: cluster.state(job) == "PENDING")
    assert told()[2] == "waiting" and f"job {job}: " in " ".join(told())
    cluster.ask("scancel", job)
    cluster.wait(job)
    assert told()[2] == "interrupted" and f"job {job} has left the queue" in " ".join(told())
