"""A start that ends before its step, in the launch scripts themselves: an earlier start of the job
has left in its Comment where the run is. Slurm and the kit's Python are stand-ins."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.shell.test_lib import ROOT, bash
from tests.waiting import LIMIT_S

SCRIPTS = ROOT / "scripts/slurm"
# The batch script is the child of a process of this name.
STEPD = """
import subprocess, sys
with open("/proc/self/comm", "w") as file:
    file.write("slurmstepd")
sys.exit(subprocess.call(sys.argv[1:]))
"""
RECORD = """JobId=7 JobName=kempner
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=$(cat restarts) BatchFlag=1 Reboot=0 ExitCode=0:0
   TimeLimit=1-00:00:00 Partition=gpu NodeList=node1 NumNodes=1 NumCPUs=4 NumTasks=1 CPUs/Task=1
   MinMemoryNode=0 ExcNodeList=(null)
   Command=COMMAND
   WorkDir=/tmp
   Comment=$(cat comment) """
SCONTROL = f"""
case "$1 $2" in
    "show job") cat <<END
{RECORD}
END
    ;;
    "show hostnames") [[ -z $3 ]] || printf '%s\\n' "$3" ;;
    "show partition") echo "TotalNodes=3 PreemptMode=OFF" ;;
    "show node") echo "NodeName=node1 NodeAddr=127.0.0.1" ;;
    update*) [[ $3 != Comment=* ]] || echo "${{3#*=}}" >comment ;;
esac
"""
STEP = '{"event": "first_step", "time": 1, "job": "7", "attempt_id": "7.0.1"}'


class Batch:
    """A job of one node with a launch script. In its first start the check passes and the step
    crashes; `broken`: Python ends with exit code 2, as it may on a host without a mount."""

    def __init__(self, folder: Path, script: str, *words: str, **env: str) -> None:
        self.folder, self.dir = folder, folder / "a b/run"
        self.words = [script, *words]
        (folder / "restarts").write_text("0")
        (folder / "comment").write_text("mine\n")
        self.dir.mkdir(parents=True)
        self.records = self.dir / ("eval" if script == "eval.sh" else "") / "attempts.jsonl"
        run = shlex.quote(str(self.dir))
        self.program("scontrol", f"cd {folder}\n{SCONTROL.replace('COMMAND', 'none')}")
        self.program("squeue", "echo 8")
        self.program("sbatch", "echo 8")
        self.program("srun", f"echo '{STEP}' >>{run}/attempts.jsonl; exit 1")
        kit = f"""
            [[ "$*" != *judge* && "$*" != *records.py* ]] || exec {sys.executable} "$@"
            [[ ! -e {folder}/broken ]] || exit 2
            case "$*" in
                *program.py*) printf '%s\\0' kempner-answer {run} '' '' '' c0ffee ;;
                *eval.py*--check) ;;
                *eval.py*) touch {run}/eval/step_1.json; exit 1 ;;
                *jobs.check*) printf '%s\\0' kempner-answer 'x = 1' {run} '' cpu ;;
                *) printf '%s\\0' kempner-answer '' ;;
            esac
        """
        path = f"{folder / 'bin'}:/usr/bin:/bin"
        self.env = {"PATH": path, "HOME": str(folder), "KEMPNER_SITE": "/dev/null"}
        self.env |= {"KEMPNER_PYTHON": self.program("kit", kit), "KEMPNER_RESTARTS": "0"}
        self.env |= {"SLURM_JOB_ID": "7", "ENVIRONMENT": "BATCH", "SLURMD_NODENAME": "node1"}
        self.env |= env

    def program(self, name: str, text: str) -> str:
        file = self.folder / "bin" / name
        file.parent.mkdir(exist_ok=True)
        log = f'echo "{name} $*" >>{self.folder}/asked'
        file.write_text(f"#!/bin/bash\n{log}\n{text}\n")
        file.chmod(0o755)
        return str(file)

    def start(self, restarts: int, broken: bool = False) -> tuple[int, str]:
        """Exit code and log. Afterwards `asked` has the calls of this start."""
        (self.folder / "restarts").write_text(str(restarts))
        if broken:
            (self.folder / "broken").touch()
        (self.folder / "asked").write_text("")
        done = subprocess.run(
            [sys.executable, "-c", STEPD, "bash", SCRIPTS / self.words[0], *self.words[1:]],
            env=self.env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        return done.returncode, done.stdout

    @property
    def asked(self) -> str:
        return (self.folder / "asked").read_text()

    def last(self) -> dict[str, object]:
        return json.loads(self.records.read_text().splitlines()[-1])  # type: ignore[no-any-return]


@pytest.fixture(params=["run.sh", "eval.sh", "singlenode.sh"])
def batch(request: pytest.FixtureRequest, tmp_path: Path) -> Batch:
    words = {
        "run.sh": ["--steps=step (\\d+)", "--", "true"],
        "eval.sh": [f"{tmp_path}/a b/run", "--tasks", "mine"],
        "singlenode.sh": ["x.toml"],
    }[request.param]
    return Batch(tmp_path, request.param, *words, KEMPNER_CODE="0")


def test_a_later_start_knows_the_run_of_the_first(batch: Batch) -> None:
    code, log = batch.start(0)
    assert code == 0 and batch.last()["decision"] == "requeue", log
    told = (batch.folder / "comment").read_text()
    assert told == f"mine kempner-run={batch.records.parent}\n", log
    code, log = batch.start(1, broken=True)
    assert code == 0 and "requeue 7" in batch.asked and "Requeue=0" not in batch.asked, log
    last = batch.last()
    assert (last["decision"], last["no_progress"]) == ("requeue", 2 - ("eval" in told)), log
    assert "this start has ended with exit code 2 before its step" in str(last["why"])
    assert f"StartTime=now+{5 - 4 * ('eval' in told)}minutes" in batch.asked
    assert "Comment=" not in batch.asked, "it is told once"


def test_a_first_start_with_bad_input_ends(batch: Batch) -> None:
    code, log = batch.start(0, broken=True)
    assert code == 2 and not batch.records.exists(), log
    assert "requeue 7" not in batch.asked and "JobId=7 Requeue=0" in batch.asked
    # nor where an earlier job has trained
    batch.records.parent.mkdir(exist_ok=True)
    batch.records.write_text(STEP + "\n")
    code, log = batch.start(0)
    code, log = batch.start(0, broken=True)
    assert code == 2 and "requeue 7" not in batch.asked, log


def test_nor_does_a_host_without_the_file_system_of_the_run_end_it(batch: Batch) -> None:
    """More than the run is missing: nobody has removed it."""
    batch.start(0)
    (batch.folder / "a b").rename(batch.folder / "away")
    code, log = batch.start(1, broken=True)
    assert code == 0 and f"node1 does not see {batch.records.parent}: " in log
    assert "requeue 7" in batch.asked and "StartTime=now+10minutes" in batch.asked
    (batch.folder / "a b").mkdir()
    code, log = batch.start(1, broken=True)
    assert code == 2 and "requeue 7" not in batch.asked, log


@pytest.fixture(params=["run.sh", "singlenode.sh"])
def chain(request: pytest.FixtureRequest, tmp_path: Path) -> Batch:
    """Job 7, the third of the chain of job 5, which has trained."""
    words = ["--", "true"] if request.param == "run.sh" else ["x.toml"]
    more = {"KEMPNER_CODE": "0", "KEMPNER_CHAIN": "5", "KEMPNER_CHAIN_LINK": "5 2 6"}
    found = Batch(tmp_path, request.param, *words, **more)
    (tmp_path / "comment").write_text(f"mine kempner-chain=5.2 kempner-run={found.dir}\n")
    found.records.write_text(STEP.replace('"7"', '"5"') + "\n")
    line = {"event": "submitted", "chain": "5", "link": 2, "job": "7"}
    (found.dir / "chain.jsonl").write_text(json.dumps(line) + "\n")
    return found


def test_a_later_job_of_a_chain_is_no_first_start(chain: Batch) -> None:
    """It ends before it has submitted the next one."""
    code, log = chain.start(0, broken=True)
    assert code == 0 and chain.last()["decision"] == "chain", log
    assert "this start has ended with exit code 2 before its step" in str(chain.last()["why"])
    order = chain.asked
    comment = f"--comment=mine kempner-chain=5.3 kempner-run={chain.dir} "
    assert order.count("sbatch --parsable --dependency=afterany:7 ") == 1 and comment in order
    assert order.index("JobId=7 Requeue=0") < order.index("sbatch ")
    assert "update JobId=8 StartTime=now+1minutes" in order and "requeue 7" not in order


def test_a_chain_that_is_over_stays_so(chain: Batch) -> None:
    """Its first job has bad input; its last job fails; the job before has ended for good; another
    job continues."""
    link = chain.env.pop("KEMPNER_CHAIN_LINK")
    code, log = chain.start(0, broken=True)
    assert code == 2 and "sbatch" not in chain.asked and "JobId=7 Requeue=0" in chain.asked, log
    chain.env["KEMPNER_CHAIN_LINK"] = link
    chain.env["KEMPNER_CHAIN"] = "2"
    code, log = chain.start(0, broken=True)
    assert code == 2 and "sbatch" not in chain.asked and chain.last()["decision"] == "end", log
    chain.env["KEMPNER_CHAIN"] = "5"
    (chain.folder / "broken").unlink()
    line = {"event": "submitted", "chain": "5", "link": 3, "job": "8"}
    with open(chain.dir / "chain.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    for broken in (False, True):
        code, log = chain.start(0, broken)
        assert code == 2 and "sbatch" not in chain.asked, log
        assert log.count("job 8 already continues") == 1
    with open(chain.records, "a") as file:
        file.write('{"event": "decision", "decision": "end", "job": "6", "time": 2}\n')
    code, log = chain.start(0, broken=True)
    assert code == 2 and "sbatch" not in chain.asked, log
    assert "end: job 6, which this one was to continue, has ended for good" in log


NOTE = """
    KP_BESIDE='' SLURM_JOB_ID=7 KP_ROOT=/kit KP_ORIGIN=/kit KP_RUN_DIR="/runs/x y"
    KP_JOB="JobId=7 BatchFlag=1"$'\\n'"   Comment=$OWN "$'\\n'"   Requeue=1"
    kp_is_whole_script() { :; }
    kp_shielded() { printf '%s\\n' "$@"; }
"""


@pytest.mark.parametrize(
    ("own", "set_up", "told"),
    [
        ("mine", "", "mine kempner-run=/runs/x y"),
        ("", "", "kempner-run=/runs/x y"),
        ("on kempner-run=3", "", "on kempner-run=3 kempner-run=/runs/x y"),
        ("mine kempner-chain=7.2", "", "mine kempner-chain=7.2 kempner-run=/runs/x y"),
        ("mine kempner-run=/runs/z", "", "mine kempner-run=/runs/x y"),
        ('{"a": 1}', "", '{"a": 1, "kempner": "kempner-run=/runs/x y"}'),
        ('{"kempner": "kempner-run=/z"}', "", '{"kempner": "kempner-run=/runs/x y"}'),
        ("mine kempner-run=/runs/x y", "", None),
        ("mine kempner-code=/runs/x y/code/1", "", None),
        ("mine kempner-code=/z/code/1", "", "mine kempner-run=/runs/x y kempner-code=/z/code/1"),
        ("mine", 'KEMPNER_COPY="/runs/x y/code/1"', None),
        ("mine", 'KP_ROOT="/runs/x y/code/1"', None),
        ("mine", "kp_is_whole_script() { false; }", None),
        ("mine", 'source "$KP_LIB/pack.sh"', None),
    ],
)
def test_what_the_comment_says(own: str, set_up: str, told: str | None) -> None:
    """Beside the user's own; not if the copy of the code says it, nor for the runs of a pack."""
    done = bash(f"{NOTE}\n{set_up}\nkp_run_note", OWN=own)
    said = [line for line in done.stdout.splitlines() if line.startswith("Comment=")]
    assert said == ([] if told is None else [f"Comment={told}"]), done
    if told is not None:
        read = 'echo $(kp_run_of_job); echo $(kp_code_of_job); kp_comment_of_user "$OWN"'
        run, code, user = bash(f"{NOTE}\n{read}", OWN=told).stdout.splitlines()
        assert (run, code) == ("/runs/x y", "/z/code/1" if "/z/" in told else "")
        assert user == re.sub(r"(^| |\"kempner\": \")kempner-(run=/|ch|co).*[^}]", "", own)
