"""scripts/slurm/lib without Slurm: what a request means, and the srun command that it becomes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[3]
LIB = ROOT / "scripts/slurm/lib/all.sh"

# What `scontrol show job -d` says; the parts that differ are filled in.
JOB = """JobId=7 JobName=kempner
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   NodeList=node[1-2]
   NumNodes={nodes} NumCPUs={cpus} NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   Socks/Node=* NtasksPerN:B:S:C={tasks}:0:*:* CoreSpec=*
   JOB_GRES={total}
{allocated}
   MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0
   Command=/a path/with spaces/multinode.sh --x=NumNodes=9
{asked}
"""


def test_an_old_bash_is_told(tmp_path: Path) -> None:
    """As old as a copy of all.sh makes this one."""
    (tmp_path / "all.sh").write_text(LIB.read_text().replace(">= 404", ">= 9904"))
    done = subprocess.run(["bash", tmp_path / "all.sh"], capture_output=True, text=True)
    assert done.returncode == 2 and "is too old: 4.4 is needed" in done.stderr


def job(
    *gres: str, nodes: int = 2, tasks: int = 0, cpus: int = 128, asked: str = "", total: str = ""
) -> str:
    """The record of a job; `gres` are the GRES= of its nodes, one a line."""
    lines = [f"     Nodes=node{i} CPU_IDs=0-3 Mem=0 GRES={g}" for i, g in enumerate(gres, 1)]
    return JOB.format(
        nodes=nodes,
        cpus=cpus,
        tasks=tasks,
        total=total,
        asked=f"   {asked}",
        allocated="\n".join(lines),
    )


def bash(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A piece of bash with lib/all.sh sourced, under the options of the launch scripts."""
    return subprocess.run(
        ["bash", "-c", f'set -euo pipefail; source "{LIB}"\n{script}'],
        env={"PATH": "/usr/bin:/bin", **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        start_new_session=True,
    )


def test_the_variables_are_those_of_the_docs() -> None:
    page = (ROOT / "docs/reference/slurm.md").read_text()
    rows = re.findall(r"^\| (`KEMPNER_.*?) \|", page, re.M)
    told = set(re.findall(r"`KEMPNER_(\w+)`", " ".join(rows)))
    told |= {"ORCHESTRATE", "SERVE", "SERVE_TOKEN", "VLLM"}  # docs/extensions/
    assert set(bash('echo "${KP_VARIABLES[@]}"').stdout.split()) == told


def test_a_function_replaces_another_only_on_purpose() -> None:
    """One that a launch script defines after all.sh takes the place of the one of that name."""
    base = [LIB.parent / name for name in re.findall(r"lib/(\w+\.sh)$", LIB.read_text(), re.M)]
    names = [name for file in base for name in functions(file)]
    assert len(names) == len(set(names)) and "kp_on_signal" in names
    for file in {*LIB.parent.glob("*.sh"), *LIB.parents[1].glob("*.sh")} - {*base}:
        for name, comment in functions(file).items():
            assert name not in names or "in place of" in comment, f"{file.name}: {name}"


def functions(file: Path) -> dict[str, str]:
    """The comment of each."""
    return dict(re.findall(r"^(\w+)\(\) \{(.*)$", file.read_text(), re.M))


def tasks(text: str, **env: str) -> str:
    """Nodes, tasks and GPUs of a node, CPUs of a task; or the error. Slurm's record has what the
    variables say."""
    text = text.replace("NumTasks=2", f"NumTasks={env.get('SLURM_NTASKS', '2')}")
    text = text.replace("/Task=1", f"/Task={env.get('SLURM_CPUS_PER_TASK', '1')}")
    return tasks_of(text, **env)


def tasks_of(text: str, **env: str) -> str:
    script = """
        KP_BESIDE='' SLURM_JOB_ID=7
        kp_tasks >/dev/null
        echo $KP_NODES $KP_TASKS $KP_GPUS $KP_CPUS
    """
    done = bash(script, KP_JOB=text, **env)
    assert done.returncode == (2 if done.stderr else 0), done.stderr
    return (done.stdout or done.stderr).strip()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("gpu", 1),
        ("gpu:4", 4),
        ("gpu:4(IDX:0-3)", 4),
        ("gpu:h100:8(IDX:0-7)", 8),
        ("gres:gpu:2", 2),
        ("gres/gpu=4", 4),
        ("gres/gpu:a100=4", 4),
        ("gres/gpu:nvidia_a100-sxm4-80gb:4", 4),
        ("gpu:a100:2(IDX:0-1),gpu:v100:2(IDX:2-3)", 4),
        ("gpu:1g.10gb:2(IDX:0-1)", 2),  # instances of MIG
        ("gres/gpu:nvidia_a100_1g.5gb=7", 7),
        ("gpu:1g.10gb:2(IDX:0-1)", 2),  # instances of MIG
        ("gres/gpu:nvidia_a100_1g.5gb=7", 7),
        ("nic:2(IDX:0-1),gpu:3(IDX:0-2)", 3),
        ("nic:2(IDX:0-1)", 0),
        ("", 0),
    ],
)
def test_counting_gpus(text: str, count: int) -> None:
    assert bash('kp_count_gpus "$TEXT"; echo $count', TEXT=text).stdout.strip() == str(count)


def test_the_gpus_of_many_nodes_are_counted_without_a_process_each() -> None:
    """Slurm has a line for each node whose CPUs differ: 10 s of every start at 2,000 nodes."""
    script = """
        copy=$(declare -f kp_count_gpus)
        eval "counts${copy#kp_count_gpus}"
        kp_count_gpus() { [[ $BASHPID == "$$" ]] || echo "a process for $1" >&2; counts "$1"; }
        kp_gpus
        echo $KP_GPUS
    """
    done = bash(script, KP_JOB=job("gpu:8(IDX:0-7)", "gpu:8(IDX:0-7)"), KP_NODES="2")
    assert (done.stdout, done.stderr) == ("8\n", "")


FOUR = ("gpu:h100:4(IDX:0-3)", "gpu:h100:4(IDX:0-3)")


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (job(*FOUR, total="gpu:h100:8"), "2 4 4 16"),  # a whole node: all of its GPUs
        (job(*FOUR, asked="TresPerNode=gres:gpu:h100:4"), "2 4 4 16"),
        (job(*FOUR, asked="TresPerNode=gres/gpu:2"), "2 2 2 32"),  # fewer than the whole node has
        (job(*FOUR, asked="TresPerJob=gres:gpu:4"), "2 2 2 32"),
        (job(*FOUR, tasks=4, asked="TresPerTask=gres:gpu:1"), "2 4 4 16"),
        (job(*FOUR, tasks=2, asked="TresPerTask=gres:gpu:1"), "2 2 2 32"),  # two stay unused
        (job(*FOUR, tasks=4, asked="TresPerNode=gres:gpu:4"), "2 4 4 16"),
        (job(*FOUR, tasks=2), "2 2 2 32"),  # GPUs that nobody asked for need not be used
        (job("", ""), "2 1 0 64"),
        (job("", "", tasks=3), "2 3 0 21"),
    ],
)
def test_what_a_request_means(text: str, meaning: str) -> None:
    assert tasks(text) == meaning


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        (job(*FOUR, tasks=2, asked="TresPerNode=gres:gpu:4"), "give --ntasks-per-node=4"),
        (job(*FOUR, tasks=8), "give --ntasks-per-node=4"),
        (job(*FOUR, tasks=2, asked="TresPerTask=gres:gpu:2"), "(--gpus-per-task=2)"),
        (job("gpu:3", "gpu:1", asked="TresPerJob=gres:gpu:4"), "(3 1): give --gpus-per-node=N"),
        (job("gpu:2", "gpu:1", asked="TresPerJob=gres:gpu:3"), "--gpus=3 on 2 nodes"),
        (job("gpu:4", "gpu:4", cpus=2), "--cpus-per-task=N"),
    ],
)
def test_requests_that_contradict_themselves(text: str, advice: str) -> None:
    error = tasks(text)
    assert error.startswith("kempner: error: ") and advice in error
    assert "\n" not in error


def test_ntasks_is_spread_over_the_nodes() -> None:
    assert tasks(job("", ""), SLURM_NTASKS="8") == "2 4 0 16"
    assert "--ntasks-per-node=N" in tasks(job("", ""), SLURM_NTASKS="5")
    eight = ("gpu:h100:8(IDX:0-7)", "gpu:h100:8(IDX:0-7)")
    assert tasks(job(*eight, asked="TresPerTask=gres/gpu:1"), SLURM_NTASKS="4") == "2 2 2 32"
    assert "give --ntasks-per-node=4" in tasks(
        job(*FOUR, asked="TresPerNode=gres:gpu:4"), SLURM_NTASKS="2"
    )


def test_gpus_of_sockets() -> None:
    """Slurm makes the sockets the tasks; a task drives one GPU all the same."""
    text = job(*FOUR, asked="TresPerSocket=gres:gpu:h100:2").replace("Node=*", "Node=2")
    assert tasks(text, SLURM_NTASKS="4") == "2 4 4 16"
    assert "(--gpus-per-socket=2)" in tasks(text.replace("B:S:C=0", "B:S:C=2"))


def test_cpus_that_were_asked_for_stay() -> None:
    assert tasks(job(*FOUR), SLURM_CPUS_PER_TASK="6") == "2 4 4 6"


def test_nodes_of_different_sizes(tmp_path: Path) -> None:
    """srun starts nothing with more CPUs than the smallest node has."""
    text = job(*FOUR, cpus=36).replace("node1 CPU_IDs=0-3", "node1 CPU_IDs=0-7,16-23,30-35,40,41")
    text = text.replace("node2 CPU_IDs=0-3", "node[2-3] CPU_IDs=0-7")
    text = text.replace("NumNodes=2 NumCPUs=36", "NumNodes=3 NumCPUs=40")
    assert tasks(text) == "3 4 4 2"
    script = """
        source "$LIB/prepare_job.sh"
        kp_mount() { :; }
        kp_note_progress() { :; }
        KP_BESIDE='' SLURM_JOB_ID=7
        kp_prepare_in --out "$OUT" >/dev/null
        echo $KP_NODES $KP_TASKS $KP_CPUS
    """
    done = bash(script, KP_JOB=text, LIB=str(LIB.parent), OUT=str(tmp_path), HOME="/")
    assert done.stdout == "3 1 8\n", done.stderr


def test_the_request_of_a_job_around_this_one_is_not_its_own() -> None:
    """In a shell of `salloc --ntasks=3 --cpus-per-task=1` sbatch hands both on."""
    around = {"SLURM_NTASKS": "3", "SLURM_CPUS_PER_TASK": "1"}
    assert tasks_of(job(*FOUR, asked="TresPerNode=gres:gpu:4"), **around) == "2 4 4 16"


def slurm(tmp_path: Path, scontrol: str) -> dict[str, str]:
    """The variables of a job whose scontrol is this script."""
    (tmp_path / "scontrol").write_text(f'#!/bin/bash\necho "$*" >>{tmp_path}/asked\n{scontrol}\n')
    (tmp_path / "scontrol").chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "75"}


@pytest.mark.parametrize(
    ("parent", "child", "name"),
    [
        ("JobId=73 ArrayJobId=72 ArrayTaskId=3", "JobId=75 JobName=child", "75"),
        ("", "JobId=75 JobName=child", "75"),  # the parent has left the queue
        ("JobId=75 ArrayJobId=72 ArrayTaskId=3", "", "72_3"),  # a task of the array itself
    ],
)
def test_a_job_submitted_in_a_task_of_an_array_is_its_own(
    tmp_path: Path, parent: str, child: str, name: str
) -> None:
    """sbatch hands on the variables of the task: with its name the parent would be requeued."""
    scontrol = f"""
        case $* in *72_3) said='{parent}' ;; *75) said='{child}' ;; esac
        [[ -n $said ]] && echo "$said"
    """
    env = slurm(tmp_path, scontrol)
    env |= {"SLURM_ARRAY_JOB_ID": "72", "SLURM_ARRAY_TASK_ID": "3"}
    script = 'kp_show_job; kp_job_id; kp_field JobId; echo "task=${SLURM_ARRAY_TASK_ID:-}"'
    task = name.partition("_")[2]
    assert bash(script, **env).stdout.split() == [name, "75", f"task={task}"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 1 or name == "75", asked  # no question more of an ordinary job
    # The line of an array's task in a file of configurations.
    (tmp_path / "list").write_text("a.toml\nb.toml\nc.toml\nd.toml\n")
    done = bash(f"kp_take @{tmp_path}/list >&2; echo ${{KP_ARGUMENTS[0]}}", **env)
    assert done.stdout == ("d.toml\n" if task else "a.toml\n")


@pytest.mark.parametrize("name", ["singlenode.sh", "multinode.sh", "replicas.sh", "rl.sh"])
def test_the_script_of_such_a_job_finds_its_own_repository(tmp_path: Path, name: str) -> None:
    parent, child = f"/another/scripts/slurm/{name}", f"{tmp_path}/code/scripts/slurm/{name}"
    scontrol = f"""
        case $* in
            *72_3) echo "JobId=73 ArrayJobId=72 Command={parent}" ;;
            *) echo "JobId=75 JobName=child Command={child}" ;;
        esac
    """
    env = slurm(tmp_path, scontrol) | {"SLURM_ARRAY_JOB_ID": "72", "SLURM_ARRAY_TASK_ID": "3"}
    (tmp_path / "slurm_script").write_text((ROOT / "scripts/slurm" / name).read_text())
    (tmp_path / "code/scripts/slurm/lib").mkdir(parents=True)
    (tmp_path / "code/scripts/slurm/lib/all.sh").write_text("echo found; exit")
    words = ["bash", tmp_path / "slurm_script"]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.stdout == "found\n", done.stderr


GONE = "the copy of the code that this job runs is gone: "


@pytest.mark.parametrize("name", ["singlenode.sh", "multinode.sh", "replicas.sh", "rl.sh"])
@pytest.mark.parametrize("by", ["Command", "Comment", "JSON"])
def test_other_code_does_not_replace_a_copy_that_is_gone(
    tmp_path: Path, name: str, by: str
) -> None:
    """Neither the checkout as it is today, from where the job was submitted."""
    copy = f"{tmp_path}/run/code/0123456789ab"
    told = f"JobId=75 Command={copy}/scripts/slurm/{name}"
    if by == "Comment":
        command = f"BatchFlag=1 Command={ROOT}/scripts/slurm/{name}"
        told = f"JobId=75 {command}\n   Comment=mine kempner-code={copy}"
    if by == "JSON":
        command = f"BatchFlag=1 Command={ROOT}/scripts/slurm/{name}"
        told = f'JobId=75 {command}\n   Comment={{"a": 1, "kempner": "kempner-code={copy}"}}'
    env = slurm(tmp_path, f"echo '{told}'") | {"SLURM_SUBMIT_DIR": str(ROOT)}
    (tmp_path / "slurm_script").write_text((ROOT / "scripts/slurm" / name).read_text())
    words = ["bash", tmp_path / "slurm_script", "configs/train/debug.toml"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2 and f"{GONE}{copy}: put it back, or submit" in done.stderr, done


JSON = '{"APS": {"auto_resume_mode": "requeue"}}'


@pytest.mark.parametrize("own", [JSON, "{}", "", "mine", "{mine}", '{"a": "kempner"} '])
def test_a_comment_that_is_json_stays_so(tmp_path: Path, own: str) -> None:
    """NVIDIA Mission Control reads the job's Comment as JSON."""
    script = """
        told=$OWN
        for words in "kempner-chain=7.2" "kempner-chain=7.3 kempner-code=/runs/x y/code/1"; do
            told=$(kp_comment_with "$(kp_comment_of_user "$told")" "$words")
            echo "$told"
        done
        kp_comment_of_user "$told"
        KP_JOB="JobId=7"$'\n'"   Comment=$told "$'\n'"   Requeue=1" kp_code_of_job
        kp_ask() { KP_ANSWER="8 other"$'\n'"9 $told"; }
        KP_CHAIN=7 KP_LINK=2 kp_chain_find && echo "$KP_SUCCESSOR"
        KP_CHAIN=7 KP_LINK=1 kp_chain_find || echo none
    """
    done = bash(script, OWN=own)
    first, second, user, code, successor, none = done.stdout.splitlines()
    assert (user, code, successor, none) == (own.strip(), "/runs/x y/code/1", "9", "none")
    if own.strip().endswith('"}') or own in (JSON, "{}"):
        added = {"kempner": "kempner-chain=7.3 kempner-code=/runs/x y/code/1"}
        assert json.loads(second) == json.loads(own) | added
    else:
        assert first == f"{own} kempner-chain=7.2".strip()


REQUEUED = [
    path.name
    for path in sorted((ROOT / "scripts/slurm").glob("*.sh"))
    if "\n#SBATCH --requeue\n" in path.read_text()
]


def test_every_launch_script_finds_the_kit_in_the_same_words() -> None:
    """A copy of it runs as it is written: no script knows its own name."""
    jobs = [p for p in (ROOT / "scripts/slurm").glob("*.sh") if "\n#SBATCH" in p.read_text()]
    heads = {
        re.findall(r"^kit=(?:.*\n)+?source .*all.sh\"\n", p.read_text(), re.M)[0] for p in jobs
    }
    tails = {p.read_text().partition("\n# --- the kit")[2] for p in jobs}
    assert len(jobs) == 11 and len(heads) == len(tails) == 1
    (head,) = heads
    assert len([line for line in head.splitlines() if line[0] != "#"]) == 3


def test_every_header_has_a_line_for_the_time_limit() -> None:
    for path in (ROOT / "scripts/slurm").glob("*.sh"):
        header = re.findall(r"^#+SBATCH --(\w[\w-]*)", path.read_text(), re.M)
        assert not header or "time" in header, path.name


@pytest.mark.parametrize("name", REQUEUED)
def test_a_batch_host_that_does_not_see_the_shared_directory(tmp_path: Path, name: str) -> None:
    """An earlier start was there. Nothing is known to be wrong with the run: it goes on elsewhere;
    at a first start it is the user's words that are wrong."""
    told = "JobId=75 Partition=gpu NodeList=node4 NumNodes=2 ExcNodeList=$(cat out)"
    told = f"{told}\n   Command=/unseen/scripts/slurm/{name}"
    once = f"[[ $1 != requeue ]] || mkdir {tmp_path}/pending"  # then it is refused
    partition = "[[ $2 != partition ]] || { echo TotalNodes=$(cat total); exit; }"
    partition += '\n[[ $2 != hostnames ]] || { [[ -n $3 ]] && tr , "\\n" <<<$3; exit; }'
    shim = f"cd {tmp_path} && {partition}\n{once} || exit\ncat <<END\n{told}\nEND"
    (tmp_path / "out").write_text("(null)")
    (tmp_path / "total").write_text("3")
    env = slurm(tmp_path, shim)
    env |= {"SLURM_SUBMIT_DIR": "/unseen"}
    env |= {"SLURMD_NODENAME": "node4", "SLURM_RESTART_COUNT": "3"}
    env |= {"SLURM_JOB_PARTITION": "gpu", "SLURM_JOB_NUM_NODES": "2"}
    (tmp_path / "slurm_script").write_text((ROOT / "scripts/slurm" / name).read_text())
    words = ["bash", tmp_path / "slurm_script"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0 and "node4 does not see /unseen: " in done.stderr, done
    asked = (tmp_path / "asked").read_text()
    order = "update JobId=75 StartTime=now+10minutes"
    assert asked.index("requeue 75") < asked.index(f"{order} ExcNodeList=node4")
    # Beside others; where too few are left; and where the user does not want it.
    for out, total, most, excluded in (
        ("node2", "4", "2", " ExcNodeList=node2,node4"),
        ("node2", "3", "2", ""),
        ("(null)", "2", "2", ""),
        ("(null)", "3", "0", ""),
    ):
        (tmp_path / "out").write_text(out)
        (tmp_path / "total").write_text(total)
        (tmp_path / "asked").unlink()
        (tmp_path / "pending").rmdir()
        more = {"KEMPNER_EXCLUDE": most}
        done = subprocess.run(
            words, env=env | more, capture_output=True, text=True, timeout=LIMIT_S
        )
        asked = (tmp_path / "asked").read_text()
        assert done.returncode == 0 and f"{order}{excluded}\n" in asked, (asked, done)
    env["SLURM_RESTART_COUNT"] = "0"
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2 and "no kit beside this script" in done.stderr, done
    (tmp_path / "pending").rmdir()
    env["KEMPNER_CHAIN_LINK"] = "70 1 74"  # the job before it in its chain was there
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0 and "node4 does not see /unseen: " in done.stderr, done


@pytest.mark.parametrize("later", [{}, {"KEMPNER_CHAIN_LINK": "70 1 74"}], ids=["start", "job"])
def test_nor_one_that_does_not_see_the_run(tmp_path: Path, later: dict[str, str]) -> None:
    """It sees the repository. The run and its records are on another file system."""
    record = job(asked="Partition=gpu ExcNodeList=(null)")
    record = record if later else record.replace("Restarts=0", "Restarts=2")
    told = record.replace("JobId=7 ", "JobId=75 ")
    partition = "[[ $2 != partition ]] || { echo TotalNodes=3; exit; }"
    partition += "\n[[ $2 != hostnames ]] || exit 0"
    env = slurm(tmp_path, f"{partition}\ncat <<'END'\n{told}\nEND") | {"SLURMD_NODENAME": "node4"}
    env |= later
    script = "kp_is_batch() { true; }; kp_ask_requeue() { scontrol requeue 75; }\n"
    copy = "/unseen/run/code/0123456789ab"
    done = bash(f"{script}kp_code_is_there {copy}; echo on", **env)
    assert done.returncode == 0 and "on" not in done.stdout.split(), done
    assert "node4 does not see /unseen/run: " in done.stdout + done.stderr
    asked = (tmp_path / "asked").read_text()
    assert "ExcNodeList=node4" in asked and "StartTime=now+10minutes" in asked
    (tmp_path / "run").mkdir()
    done = bash(f"{script}kp_code_is_there {tmp_path}/run/code/0123456789ab", **env)
    assert done.returncode == 2 and GONE in done.stderr, done


OF_PROGRAMS = 'source "$KP_LIB/program.sh"; kp_program_directory() { echo /p; }; kp_check_program'


@pytest.mark.parametrize("starts", ["kp_code", OF_PROGRAMS])
def test_nor_where_a_script_of_the_users_own_starts_the_run(tmp_path: Path, starts: str) -> None:
    script = f"KP_ROOT={ROOT} KP_ORIGIN={ROOT} KP_WORDS=() KP_BESIDE='' KP_JOB=$TEXT; {starts}"
    text = f"{job('')}\n   Comment=mine kempner-code={tmp_path}/x "
    done = bash(script, TEXT=text, SLURM_JOB_ID="7")
    assert done.returncode == 2 and f"{GONE}{tmp_path}/x: put it back" in done.stderr, done


def test_a_run_directory_that_is_gone_ends_no_batch_script(tmp_path: Path) -> None:
    """At a restart in place; what srun says is kept in another file, and the decision is in the
    batch log."""
    script = f"""
        KP_RUN_DIR={tmp_path}/file/gone KEMPNER_ATTEMPT_ID=1.0.7 SLURM_JOB_ID=1 KP_COMMITTED=3
        touch {tmp_path}/file
        kp_notify() {{ :; }}
        kp_open_srun_log
        echo "srun: error: n1: task 0: Killed" >>"$KP_SRUN_LOG"
        KP_SRUN_LOG={tmp_path}/file/srun.log
        sleep 0.1 & KP_CHILD=$!
        kp_await
        kp_record restart "the step ended"
        echo "went on"
    """
    done = bash(script, TMPDIR=str(tmp_path))
    assert done.returncode == 0 and done.stdout.endswith("went on\n"), done
    assert "the decision cannot be recorded" in done.stdout
    (log,) = tmp_path.glob("kempner-srun.*")
    assert f"it is {log}" in done.stdout and log.read_text() == "srun: error: n1: task 0: Killed\n"


def test_a_chain_outlives_a_change_of_its_site(tmp_path: Path) -> None:
    """Whose first job was submitted with words that cannot be repeated is told at once; after that
    a default that has changed, or a job_submit plugin, ends no run."""
    there = job().replace("NumNodes=2", "NumNodes=3")
    env = slurm(tmp_path, f"cat <<'END'\n{there}\nEND")
    script = f"""
        KP_JOB='{job()}' KP_CHAIN_SAME=() KP_SUCCESSOR=8
        kp_chain_cancel() {{ echo cancelled; }}
        KP_LINK=3; kp_chain_compare
        KP_LINK=0; kp_chain_compare
    """
    done = bash(script, **env)
    later = done.stdout.split("cancelled\n")[0]
    assert "job 8, which is to continue this one, has another request: NumNodes=2 here" in later
    assert done.returncode == 2 and "(NumNodes=2 here and 3 there)" in done.stderr, done


def test_a_copy_of_the_code_is_not_older_than_its_run(tmp_path: Path) -> None:
    """File systems that are purged by age would take it from under a run of weeks."""
    root, outside = tmp_path / "checkout", tmp_path / "outside.toml"
    root.mkdir()
    for file in (root / "train.py", outside):
        file.write_text("x = 1\n")
        os.utime(file, (1e9, 1e9))
    begun = time.time() - 2
    script = f"""
        KP_ROOT={root} KP_JOB="SubmitTime=2020-01-01T00:00:00"
        kp_code_copy {tmp_path}/run/code "" {outside} && kp_code_later "$KP_COPY"
        echo "copy $KP_COPY"
        touch {root}/train.py {outside}
        kp_code_later "$KP_COPY"
    """
    first, second = bash(script).stdout.split("\n", 1)
    copy = Path(first.removeprefix("copy "))
    files = [path for path in copy.rglob("*") if path.is_file()]
    assert len(files) == 3 and all(path.stat().st_mtime >= begun for path in files)
    assert f"note: 2 file(s) changed since sbatch ({outside} train.py): " in second


def test_the_shell_of_the_user_does_not_answer_for_slurm(tmp_path: Path) -> None:
    names = ("SQUEUE_STATES", "SQUEUE_FORMAT", "SINFO_PARTITION", "SACCT_FORMAT", "SCONTROL_ALL")
    names = (*names, "SCANCEL_STATE", "SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN")
    env = slurm(tmp_path, "env; echo JobId=75") | dict.fromkeys(names, "relative")
    seen = bash("kp_show_job; echo $KP_ANSWER", **env).stdout
    assert "SLURM_JOB_ID=75" in seen and not [name for name in names if name in seen]


def test_nodes_that_users_may_not_see(tmp_path: Path) -> None:
    """PrivateData=nodes: `scontrol show job -d` of Slurm 22.05 dies."""
    told = job("", "").replace("JobId=7 ", "JobId=75 ")
    told = "\n".join(line for line in told.splitlines() if "Nodes=node" not in line)
    env = slurm(tmp_path, f"[[ $* != *-d* ]] || kill -SEGV $$\ncat <<'END'\n{told}\nEND")
    script = "kp_show_job; kp_tasks >/dev/null; kp_show_job; echo $KP_NODES $KP_TASKS $KP_GPUS"
    assert bash(script, **env, SLURM_GPUS_ON_NODE="2").stdout == "2 2 2\n"
    assert (tmp_path / "asked").read_text().count("-d") == 1


SRUN = """--job-name=kempner-7.0.1
--nodes=2
--ntasks=8
--ntasks-per-node=4
--cpus-per-task=16
--kill-on-bad-exit=1
--wait=300
--mpi=none
--immediate=300
--export=ALL
--gpus-per-node=4
--distribution=block:block
env
--block-signal=TERM,INT,USR1,USR2
KEMPNER_SIGNALS_WAIT=1
bash
LIB/task.sh
python
train.py
a b
$HOME
*
"""


def srun(**env: str) -> str:
    script = """
        kp_start() { [[ $1 == srun ]]; printf '%s\\n' "${@:2}"; }
        KP_SRUN_NAME=kempner-7.0.1 KP_NODES=2 KP_TASKS=4 KP_CPUS=16 SLURM_JOB_ID=7
        KEMPNER_ATTEMPT_ID=7.0.1 KP_ROOT=ROOT KP_PYTHON=python
        mkdir "$KP_RUN_DIR/logs"
        kp_srun train.py 'a b' '$HOME' '*'
        echo "${!SLURM_GPU@} ${!SLURM_TRES@} ${SLURM_NTASKS:-}" \\
            "$SRUN_CPUS_PER_TASK $OMP_NUM_THREADS" >&2
    """
    given = {"SLURM_GPUS_PER_TASK": "1", "SLURM_GPU_BIND": "single:1", "SLURM_NTASKS": "3"}
    given["SLURM_TRES_PER_TASK"] = "gres/gpu:h100:1"
    with tempfile.TemporaryDirectory() as run_dir:
        done = bash(script, **given, **env, KP_RUN_DIR=run_dir)
    assert done.returncode == 0
    assert done.stderr.split() == ["16", env.get("OMP_NUM_THREADS", "16")]
    return done.stdout.replace(str(LIB.parent), "LIB")


def test_srun_command() -> None:
    """Whole, so that no flag comes or goes unseen."""
    assert srun(KP_GPUS="4", KP_BESIDE="") == SRUN
    cpu = SRUN.replace("--gpus-per-node=4\n--distribution=block:block\n", "")
    assert srun(KP_GPUS="0", KP_BESIDE="", OMP_NUM_THREADS="3") == cpu
    beside = SRUN.replace("block\nenv", "block\n--jobid=7\n--overlap\nenv")
    assert srun(KP_GPUS="4", KP_BESIDE="1") == beside
    given = SRUN.replace("--distribution=block:block\n", "")  # of sbatch: srun reads it
    assert srun(KP_GPUS="4", KP_BESIDE="", SLURM_DISTRIBUTION="cyclic") == given
    site = SRUN.replace("block\nenv", "block\n--cpu-bind=cores\n--hint=nomultithread\nenv")
    flags = "--cpu-bind=cores --hint=nomultithread"
    assert srun(KP_GPUS="4", KP_BESIDE="", KEMPNER_SRUN=flags) == site


def test_a_step_names_what_it_has_of_its_own() -> None:
    """By arguments: they win over those of every step, and KEMPNER_SRUN over both."""
    script = """
        KP_SRUN_NAME=stage KP_NODES=1 KP_TASKS=1 KP_GPUS=0 KP_CPUS=1 KP_PYTHON=python
        kp_srun_command --kill-on-bad-exit=0 --mem=0 -- a 'b c'
        printf '%s\n' "${KP_SRUN[@]}"
    """
    words = bash(script, KEMPNER_SRUN="--mem=1G", KP_BESIDE="").stdout.splitlines()
    own = words.index("--kill-on-bad-exit=0")
    assert words.index("--kill-on-bad-exit=1") < own
    assert words[own + 1 : own + 3] == ["--mem=0", "--mem=1G"] and words[-2:] == ["a", "b c"]


def test_the_task_of_an_array_is_named() -> None:
    script = "KP_BESIDE='' kp_job_id"
    assert bash(script, SLURM_JOB_ID="9").stdout == "9\n"
    array = {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "0"}
    assert bash(script, SLURM_JOB_ID="9", **array).stdout == "9_0\n"


def test_the_time_between_warning_and_end() -> None:
    for name in ("singlenode.sh", "multinode.sh"):
        script = f'kp_signal_lead "{ROOT}/scripts/slurm/{name}"'
        assert bash(script).stdout == "120\n"
        assert bash(script, SBATCH_SIGNAL="TERM@300").stdout == "300\n"
    assert bash("kp_signal_lead /dev/null").stdout == ""


@pytest.mark.parametrize(
    ("visible", "count"), [("0,1,2", 3), ("GPU-aa,GPU-bb", 2), ("", 0), ("-1", 0)]
)
def test_gpus_of_this_machine(visible: str, count: int) -> None:
    assert bash("kp_gpus_here", CUDA_VISIBLE_DEVICES=visible).stdout == f"{count}\n"


def test_a_signal_does_not_hide_the_exit_code() -> None:
    """`wait` ends early at every trapped signal; the code is still the child's."""
    script = """
        trap ':' TERM
        (sleep 0.1; kill -TERM $$; sleep 0.1; kill -TERM $$) &
        kp_start bash -c 'sleep 0.5; exit 7'
        kp_wait
        echo $KP_CODE
    """
    assert bash(script).stdout == "7\n"


def test_a_requeue_does_not_spoil_its_own_record(tmp_path: Path) -> None:
    """Slurm signals the batch shell and all below it while the decision is written down."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        '#!/bin/bash\n[[ $1 == requeue ]] || { echo "$TEXT"; exit; }\n'
        "(for i in {1..200}; do kill -TERM -- -$GROUP; sleep 0.001; done) &>/dev/null &\n"
    )
    scontrol.chmod(0o755)
    script = f"""
        GROUP=$$ KP_BESIDE='' KP_COMMITTED_BEFORE=-1 KP_RUN_DIR={tmp_path} KP_CHECKPOINTS={tmp_path}
        KP_PYTHON={sys.executable} KP_SRUN_LOG=none
        export GROUP PYTHONPATH={ROOT}/src
        trap 'true' TERM
        for attempt in 1 2 3; do KP_DECIDED='' && kp_decide "the step ended" >/dev/null; done
    """
    env = {"TEXT": job(""), "SLURM_JOB_ID": "7", "KEMPNER_ATTEMPT_ID": "7.0.1", "KP_CODE": "1"}
    path = f"{tmp_path}:/usr/bin:/bin"
    assert bash(script, **env, PATH=path, KEMPNER_MAX_CRASHES="9").returncode == 0
    lines = map(json.loads, (tmp_path / "attempts.jsonl").read_text().splitlines())
    made = [(line["decision"], line["job"], line["no_progress"]) for line in lines]
    assert made == [("requeue", "7", n) for n in (1, 2, 3)]


IN_JOB = {"SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"KEMPNER_SPARES": "one"}, "KEMPNER_SPARES=one: must be a number of nodes"),
        ({"KEMPNER_SPARES": "2"}, "but the job has 2 node(s): give --nodes=N"),
        ({"KEMPNER_SPARES": "1"}, "export SBATCH_NO_KILL=set before sbatch"),
        ({"KEMPNER_SPARES": "1", "KEMPNER_RESTARTS": "0"}, "KEMPNER_RESTARTS must not be 0"),
        ({"KEMPNER_SPARES": "1", "OWN": "rl.sh"}, "rl.sh uses no spare nodes"),
        ({"KEMPNER_RESTARTS": "-1"}, "KEMPNER_RESTARTS=-1: must be a number of restarts"),
        ({"KEMPNER_SPARE_COMMAND": "true"}, "runs on spare nodes, and there are none"),
    ],
)
def test_spares_that_make_no_sense(given: dict[str, str], why: str) -> None:
    own = f"kp_own_steps() {{ echo {given.pop('OWN', '')}; }}"
    done = bash(f"{own}; KP_BESIDE=''; kp_tasks", KP_JOB=job(*FOUR), **IN_JOB, **given)
    assert done.returncode == 2 and why in done.stderr


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"KEMPNER_MAX_CRASHES": "0"}, "KEMPNER_MAX_CRASHES=0: must be a whole number from 1"),
        ({"KEMPNER_PORTS": "15000"}, "KEMPNER_PORTS=15000: must be the first and the last port of"),
        ({"KEMPNER_PORTS": "20000-15000"}, "from 1024 to 65535, such as 15000-20000"),
        ({"KEMPNER_PORTS": "15000-70000"}, "from 1024 to 65535, such as 15000-20000"),
        ({"KEMPNER_EXCLUDE": "all"}, "KEMPNER_EXCLUDE=all: must be a whole number from 0"),
        ({"KEMPNER_SIGNAL_LEAD": "2m"}, "KEMPNER_SIGNAL_LEAD=2m: must be a whole number from 0"),
        ({"KEMPNER_PREFLIGHT_LEAST": "nan"}, "LEAST=nan: must be a number from 0, such as 12.5"),
        ({"KEMPNER_MEMORY_GIB": "0.0"}, "MEMORY_GIB=0.0: must be a number of GiB over 0"),
        ({"KEMPNER_NUMA": "off"}, "KEMPNER_NUMA=off: must be 0, or 1"),
        ({"KEMPNER_PREFLIGHT": "off"}, "KEMPNER_PREFLIGHT=off: must be 1, or 0"),
        ({"KEMPNER_STAGE": "local"}, "KEMPNER_STAGE=local: must be an absolute path"),
        ({"KEMPNER_STAGE_ENVIRONMENT": "yes"}, "KEMPNER_STAGE_ENVIRONMENT=yes: must be 1, or 0"),
        ({"KEMPNER_STAGE_ENVIRONMENT": "1"}, "KEMPNER_STAGE_ENVIRONMENT=1 needs KEMPNER_STAGE"),
    ],
)
def test_values_that_make_no_sense(given: dict[str, str], why: str) -> None:
    """At the start, through the real script: in the middle of a run they would end the job."""
    script = ["bash", ROOT / "scripts/slurm/singlenode.sh", "a.toml", "--dry-run"]
    env = {"PATH": "/usr/bin:/bin", "KEMPNER_SITE": "/dev/null", **given}
    done = subprocess.run(script, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and why in done.stderr, done.stderr


SHIM = """#!/bin/bash
echo "$0 $*" >>"$CALLS"
case $0,$* in
    */sleep,*) (($(grep -c /sleep "$CALLS") < 3)) ;;
    *show\\ job*) echo "$TEXT" ;;
    *hostnames*) echo node2 ;;
    *requeue*) exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    ("restarts", "requeue", "words", "asked"),
    [
        ("0", "1", [], ["scontrol requeue 7"] * 2),  # another guard was first: never cancelled
        ("0", "0", ["CHAIN", "5", "1"], ["scancel 7"] * 2),
        ("0", "0", [], ["scancel 7"] * 2),
        ("1", "1", [], []),  # a guard of an earlier start
    ],
)
def test_the_guard(
    tmp_path: Path, restarts: str, requeue: str, words: list[str], asked: list[str]
) -> None:
    """Of a job that has lost the host of its batch script."""
    for name in ("sleep", "scontrol", "scancel"):
        (tmp_path / name).write_text(SHIM)
        (tmp_path / name).chmod(0o755)
    text = job("").replace("Restarts=0", f"Restarts={restarts}\n   BatchHost=node1")
    journal = tmp_path / "chain.jsonl"
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(tmp_path / "calls")}
    env["TEXT"] = text.replace("Requeue=1", f"Requeue={requeue}")
    words = [word.replace("CHAIN", str(journal)) for word in words]
    subprocess.run(["bash", LIB.with_name("guard.sh"), "7", "0", *words], env=env, check=False)
    calls = (tmp_path / "calls").read_text().replace(f"{tmp_path}/", "").splitlines()
    assert [call for call in calls if "sleep" not in call and "show" not in call] == asked
    if words:
        line = json.loads(journal.read_text().splitlines()[0])
        assert (line["event"], line["chain"], line["link"], line["job"]) == ("lost", "5", 1, "7")


@pytest.mark.parametrize(
    ("line", "ends"),
    [("Killed", True), ("Exited with exit code 75", False), ("Terminated", False)],
)
def test_who_was_asked_to_leave_has_a_bound(tmp_path: Path, line: str, ends: bool) -> None:
    """A rank was killed meanwhile, and another one is frozen: srun would wait until the time limit.
    Others may be in a long save."""
    (tmp_path / "srun.log").write_text(f"srun: error: node2: task 1: {line}\n")
    script = f"""
        KP_RUN_DIR={tmp_path} KP_SRUN_LOG={tmp_path}/srun.log KEMPNER_ATTEMPT_ID=7.0.1
        KP_BESIDE='' KP_SIGNAL=TERM KP_LEAVING_S=1
        kp_find_lost() {{ :; }}
        (trap '' TERM; exec sleep 9) & KP_CHILD=$!
        kp_await
        echo "$KP_CODE"
    """
    done = bash(script)
    told = (tmp_path / "srun.log").read_text()
    assert ("ending the other ranks" in told) == ends, done.stderr
    assert done.stdout.split()[-1] == ("137" if ends else "0"), done


@pytest.mark.parametrize(
    ("ends", "said", "lost", "stuck"),
    [
        (20, "", "", ""),  # the driver takes time to release a rank's memory
        (99, "", "", "no restart in place: srun has not killed all ranks within 30 s"),
        (99, "", "node2", ""),  # it became known only after the other rank's end
        # The host was started again meanwhile: srun gives up first, after KillWait.
        (17, "Timed out waiting for job step to complete", "", "all ranks within 12 s"),
    ],
)
def test_killed_ranks_have_time_to_go(
    tmp_path: Path, ends: int, said: str, lost: str, stuck: str
) -> None:
    """Before a restart in place is given up, which the log says. The clock runs faster."""
    (tmp_path / "srun.log").write_text(f"srun: error: node2: task 1: Killed\nsrun: error: {said}\n")
    script = f"""
        KP_RUN_DIR={tmp_path} KP_SRUN_LOG={tmp_path}/srun.log KEMPNER_ATTEMPT_ID=7.0.1
        KP_BESIDE='' KP_RESTARTS=3 SECONDS=0
        sleep() {{
            SECONDS=$((SECONDS + 1))
            command sleep 0.02
            ((SECONDS < {ends})) || {{ kill -KILL "$KP_CHILD" && wait "$KP_CHILD" || true; }}
        }}
        kp_find_lost() {{ KP_LOST=${{heard:+{lost}}} heard=1; }}
        (trap '' TERM; exec sleep 60) &>/dev/null & KP_CHILD=$!
        kp_await
        echo "$KP_CODE,$KP_STUCK,$KP_LOST"
    """
    done = bash(script)
    *lines, result = done.stdout.splitlines()
    assert result == f"137,{1 if stuck else ''},{lost}", done
    assert len(lines) == (1 if stuck else 0) and stuck in "".join(lines), lines


@pytest.mark.parametrize(
    ("log", "code", "found"),
    [
        ("n1: task 0: Exited with exit code 2\nsrun: error: n2: task 1: Terminated", 143, 2),
        ("n1: tasks 0-3: Exited with exit code 2\nsrun: error: n2: task 4: Killed", 137, 2),
        ("n2: task 1: Killed\nsrun: error: n1: task 0: Exited with exit code 2", 137, 137),
        ("n1: task 0: Exited with exit code 1\nsrun: error: n2: task 1: Terminated", 143, 143),
        ("n1: task 0: Exited with exit code 2\nsrun: error: n2: task 1: Exited", 77, 77),
        ("Unable to create step", 143, 143),
    ],
)
def test_bad_input_that_one_task_finds_first(
    tmp_path: Path, log: str, code: int, found: int
) -> None:
    """srun ends the other tasks, and its exit code is theirs."""
    (tmp_path / "srun.log").write_text(f"a line of the program\nsrun: error: {log}\n")
    script = f"KP_SRUN_LOG={tmp_path}/srun.log KP_CODE={code}; kp_find_bad_input; echo $KP_CODE"
    assert bash(script).stdout.split() == [str(found)]


def test_a_guard_that_hears_no_names_of_hosts_waits(tmp_path: Path) -> None:
    """The batch host is not lost because scontrol has failed."""
    shim = SHIM.replace("*hostnames*) echo node2", "*hostnames*) exit 1")
    for name in ("sleep", "scontrol", "scancel"):
        (tmp_path / name).write_text(shim)
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(tmp_path / "calls")}
    env["TEXT"] = job("").replace("Restarts=0", "Restarts=0\n   BatchHost=node1")
    subprocess.run(["bash", LIB.with_name("guard.sh"), "7", "0"], env=env, check=False)
    calls = (tmp_path / "calls").read_text()
    assert calls.count("show job") == 2 and "requeue" not in calls and "scancel" not in calls


def test_a_suspended_rl_job_blames_nobody() -> None:
    """Its script stood still as well: the silence of that time counts for no engine."""
    told = bash(
        """source "$KP_LIB/rl_watch.sh"
        SECONDS=100 awake='' orchestrator_seen_at=95 engine_seen=([0]=90 [3]=99)
        kp_see_absence
        SECONDS=101 && kp_see_absence
        SECONDS=500 && kp_see_absence >/dev/null
        echo $orchestrator_seen_at ${engine_seen[0]} ${engine_seen[3]}"""
    )
    assert told.stdout.split() == ["494", "489", "498"], told


LAST_EVALUATION = """
source "$KP_LIB/rl_watch.sh"
kp_verdict() { KP_STATE='done'; }
kp_tell() { echo told; }
kp_end_guard() { :; }
kp_end_engines() { :; }
declare -A KP_RL=([exchange]=$PWD/rl/7.0 [job_nodes]=1 [engines]=0)
KP_RUN_DIR=$PWD KP_TASKS=1 KP_GPUS=0
KP_SIGNAL='' KP_SRUN_NAME=x looks=0
listened=0 last_beat='' orchestrator_seen_at=0 waits='' awake='' bad_input='' # of kp_run_rl
engine_pids=() engine_seen=()
mkdir -p "${KP_RL[exchange]}"
touch "${KP_RL[exchange]}/orchestrator"
command sleep 100 >/dev/null 2>&1 &
orchestrator=$!
sleep() { # in place of a moment, 9 s; the evaluation takes 60 of them
    SECONDS=$((SECONDS + 9)) looks=$((looks + 1))
    ((looks > BEATS)) || touch -d "@$looks" "${KP_RL[exchange]}/orchestrator"
    ((looks < 60)) || { kill "$orchestrator" && wait "$orchestrator"; } || true
}
kp_end_others
echo "looks: $looks"
"""


@pytest.mark.parametrize("beats", [60, 20])
def test_the_last_evaluation_takes_as_long_as_it_takes(tmp_path: Path, beats: int) -> None:
    """While the orchestrator gives a sign of life."""
    told = bash(f"cd '{tmp_path}'\n{LAST_EVALUATION}", BEATS=f"{beats}").stdout
    looks = int(told.rpartition("looks: ")[2])
    assert "told" not in told and not (tmp_path / "rl").exists()
    if beats == 60:
        assert looks == 60 and "ending it" not in told
    else:
        assert "the orchestrator has done nothing for 120 s: ending it" in told and 30 < looks < 40


def test_a_later_start_of_the_job_is_let_alone(tmp_path: Path) -> None:
    """The script of an earlier start, whose host was cut off meanwhile, neither requeues nor ends
    it."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/bash\n[[ $1 == show ]] || echo "$*" >&2\ncat "$TEXT"\n')
    scontrol.chmod(0o755)
    (tmp_path / "1").write_text(job(""))
    (tmp_path / "2").write_text(job("").replace("Restarts=0", "Restarts=1"))
    script = f"""
        KP_BESIDE='' KP_COMMITTED_BEFORE=-1 KP_RUN_DIR={tmp_path} KP_CHECKPOINTS={tmp_path}
        KP_PYTHON={sys.executable} KP_SRUN_LOG=none KP_RESTARTS=$GIVEN
        export TEXT={tmp_path}/1
        kp_show_job
        TEXT={tmp_path}/2
        kp_decide "the step ended" || true
        kp_stay_ended
    """
    env = {"SLURM_JOB_ID": "7", "KEMPNER_ATTEMPT_ID": "7.0.1", "KP_CODE": "1"}
    for restarts in ("0", "10"):
        done = bash(script, **env, PATH=f"{tmp_path}:/usr/bin:/bin", GIVEN=restarts)
        assert "leave: Slurm is ending the job (RESTARTED)" in done.stdout and not done.stderr


@pytest.mark.parametrize(
    ("state", "reason", "restarts", "ends"),
    [
        ("COMPLETING", "None", 1, "cancelled"),  # by scancel
        ("CANCELLED", "None", 1, "cancelled"),
        ("COMPLETING", "None", 2, "ending"),  # requeued
        ("COMPLETING", "NodeDown", 1, "ending"),
        ("PREEMPTED", "None", 1, "ending"),
        ("COMPLETING", "TimeLimit", 1, ""),  # as any other end: it may be requeued
        ("RUNNING", "None", 1, ""),
    ],
)
def test_how_slurm_ends_the_job(state: str, reason: str, restarts: int, ends: str) -> None:
    job = f"KP_JOB='JobState={state} Reason={reason} Restarts={restarts}' KP_START=1"
    told = bash(f"{job} KP_JOB_STATE={state}; kp_see_end; echo $KP_ENDING; kp_in_words").stdout
    ending, words = told.splitlines()
    assert ending == ends and words.startswith(state)


HOSTS_SHIM = """#!/bin/bash
case $* in
    *config) echo "SlurmdPort = 7777" ;;
    *show\\ job*) echo "$TEXT" ;;
    *hostnames*) printf 'node%s\\n' 1 2 ;;
    *) printf 'NodeName=node%s NodeAddr=127.0.0.1 Port=7777\\n' 1 2 3 ;;
esac
"""


def lost(folder: Path, script: str) -> str:
    """What kp_find_lost says of two nodes that train and one that waits, all of which answer."""
    for name, text in (("scontrol", HOSTS_SHIM), ("timeout", "#!/bin/bash\nsleep 0.3\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "TEXT": job("")}
    begin = f"KP_PLACES=(node1 node2) KP_SPARES=(node3) KP_SRUN_LOG={folder}/log\n{script}"
    done = bash(f'{begin}\nkp_find_lost; echo "lost: $KP_LOST; spares: ${{KP_SPARES[*]}}"', **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_signal_makes_no_host_look_lost(tmp_path: Path) -> None:
    """It ends a wait early, for the answer of a host as for a step."""
    script = """
        KP_SPARES=()
        trap ':' USR2
        (sleep 0.1; kill -USR2 $$; sleep 0.1; kill -USR2 $$) &
    """
    assert lost(tmp_path, script) == "lost: ; spares: "


def test_silent_hosts_among_many(tmp_path: Path) -> None:
    """bash reads an answer byte by byte: it gets no more of each node than it needs. And it asks
    some at a time, or a large job would start thousands of processes at once."""
    record = "NodeName=n$n Arch=x86_64 \\n   NodeAddr=10.0.0.$n NodeHostName=x Port=7$n Version=1"
    env = slurm(
        tmp_path,
        f"""
        [[ $2 == node ]] || {{ echo SlurmdPort = 6818; exit; }}
        for n in {{100..319}}; do printf "{record}\\n   Reason=Port=1%0999d\\n\\n" 0; done
    """,
    )
    script = f"""
        gone=() KP_DEADLINE=$((SECONDS + 60))
        kp_shielded() {{ echo "${{*: -2}}" >>{tmp_path}/probes; [[ ${{*: -2:1}} != *.[23]07 ]]; }}
        wait() {{ echo "${{#pids[@]}}" >>{tmp_path}/at-a-time; builtin wait "$@"; }} # 0: kp_until
        kp_find_silent n{{100..319}}
        echo "${{gone[*]}}" ${{#KP_ANSWER}}
    """
    done = bash(script, **env)
    *gone, size = done.stdout.split()
    assert sorted(gone) == ["n207", "n307"], done
    probes = sorted((tmp_path / "probes").read_text().splitlines())
    assert probes == [f"10.0.0.{n} 7{n}" for n in range(100, 320)]
    assert set((tmp_path / "at-a-time").read_text().split()) == {"0", "100", "20"}
    assert int(size) < 220 * 100


def test_a_host_that_answers_may_be_lost_to_the_job(tmp_path: Path) -> None:
    """Slurm has taken it out of the job, or starts no task there: credentials of the job were
    revoked by the late end of its earlier start."""
    assert lost(tmp_path, "") == "lost: ; spares: "
    error = "srun: error: Task launch for StepId=7.3 failed on node node2: Job credential revoked"
    (tmp_path / "log").write_text(f"{error}\nsrun: error: Application launch failed\n")
    assert lost(tmp_path, "") == "lost: node2; spares: "


def test_spares_do_not_train(tmp_path: Path) -> None:
    """The last ones of the job."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/bash\nprintf 'node%s\\n' 1 2\n")
    scontrol.chmod(0o755)
    script = "KP_BESIDE=''; kp_tasks; echo $KP_NODES ${KP_PLACES[*]} - ${KP_SPARES[*]} $KP_RESTARTS"
    given = {"KEMPNER_SPARES": "1", "SBATCH_NO_KILL": "set", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = bash(script, KP_JOB=job(*FOUR), **IN_JOB, **given)
    assert done.stdout == "1 node1 - node2 10\n", done.stderr


def test_site_file(tmp_path: Path) -> None:
    """What it sets is exported, also when it fails in the middle as module scripts do."""
    site = tmp_path / "site.env"
    site.write_text('A="x y"\nfalse\n: $UNSET_NAME\nB=2\n')
    script = 'kp_read_site; env | grep -E "^(A|B)="; false; echo not reached'
    done = bash(script, KEMPNER_SITE=str(site))
    assert sorted(done.stdout.splitlines()) == ["A=x y", "B=2"] and done.returncode == 1
    missing = bash("kp_read_site", KEMPNER_SITE=str(tmp_path / "no"))
    assert missing.returncode == 2 and "cannot be read" in missing.stderr


def test_a_site_file_does_not_change_how_bash_reads_words(tmp_path: Path) -> None:
    site = tmp_path / "site.env"
    for line in ("IFS=,", "set -f", "shopt -s nullglob dotglob", "GLOBIGNORE='*'"):
        site.write_text(f"{line}\nA=1\n")
        script = 'kp_read_site; read -ra words <<<"--a --b"; cd "$1"; echo ${#words[@]} *.env *.no'
        done = bash(f"set -- {tmp_path}; {script}", KEMPNER_SITE=str(site))
        assert done.stdout == "2 site.env *.no\n", (line, done)


def test_a_user_who_writes_turkish(tmp_path: Path) -> None:
    """Where the small letter of I has no dot, and the capital letter of i has one."""
    if subprocess.run(
        ["localedef", "-i", "tr_TR", "-f", "UTF-8", tmp_path / "tr_TR.UTF-8"], capture_output=True
    ).returncode:
        pytest.skip("localedef cannot make the locale tr_TR")
    script = """
        source "$KP_LIB/dry_run.sh"
        KP_REQUEST=() BASH_ARGV0=/dev/null # $0
        kp_dry_request
        kp_chain_variables
        ! kp_is_secret a_credential || echo secret
        echo "${!KP_ASKED[@]} ${KP_CHAIN_OPTIONS[@]}"
    """
    declared = "declare -A KP_ASKED=() KP_FROM=(); KP_CHAIN_OPTIONS=()"
    env = {"LOCPATH": str(tmp_path), "SLURM_HINT": "compute_bound"}
    for locale, warnings in (("tr_TR.UTF-8", 0), ("xx_XX.UTF-8", 1)):  # bash's own, at its start
        env["LC_ALL"] = locale
        done = bash(f"{declared}\n{script}", SBATCH_PARTITION="gpu", **env)
        assert done.stdout == "secret\npartition --hint=compute_bound\n", done
        assert done.stderr.count("setlocale") == warnings, done.stderr


def test_programs_of_the_repository_are_those_of_the_copy(tmp_path: Path) -> None:
    """What KEMPNER_TRAIN, _ORCHESTRATE and _SERVE name, by whichever path, also when it is gone."""
    (tmp_path / "code/a b").mkdir(parents=True)
    (tmp_path / "code/a b/train.py").touch()
    words = ("origin/a b/train.py", f"{tmp_path}/origin/a b/../a b/train.py", "other/train.py")
    ask = "; ".join(f"kp_of_copy '{word}'" for word in (*words, "origin/b.py"))
    done = bash(f"cd '{tmp_path}'; KP_ORIGIN=$PWD/origin KP_ROOT=$PWD/code; {ask}")
    copy = f"{tmp_path}/code/a b/train.py"
    assert done.stdout.splitlines() == [copy, copy, "other/train.py", "origin/b.py"], done.stderr


@pytest.mark.parametrize("name", ["singlenode.sh", "multinode.sh", "interactive.sh"])
def test_launch_scripts_are_short(name: str) -> None:
    text = (ROOT / "scripts/slurm" / name).read_text().partition("\n# --- the kit")[0]
    assert len(text.splitlines()) < 45


def test_secrets_file(tmp_path: Path) -> None:
    """Nobody else may read it; what it sets is exported and known to be secret."""
    file = tmp_path / "my secrets"
    file.write_text("# mine\nexport HF_TOKEN=hf_1\nPLAIN='two words'\n")
    script = 'kp_read_secrets; env | grep -E "^(HF_TOKEN|PLAIN)="; echo "$KP_SECRET_NAMES"'
    file.chmod(0o640)
    done = bash(script, KEMPNER_SECRETS=str(file))
    assert done.returncode == 2 and "chmod 600" in done.stderr and "640" in done.stderr
    file.chmod(0o600)
    done = bash(script, KEMPNER_SECRETS=str(file))
    assert sorted(done.stdout.splitlines()) == [
        "HF_TOKEN PLAIN",
        "HF_TOKEN=hf_1",
        "PLAIN=two words",
    ]
    done = bash(script, KEMPNER_SECRETS=str(tmp_path / "no"))
    assert done.returncode == 2 and "cannot be read" in done.stderr


def test_the_next_job_gets_the_variables_of_the_user(tmp_path: Path) -> None:
    """None of ours, none of Slurm's, no secret; and no value on a command line of any program."""
    for name in ("env", "grep"):
        (tmp_path / name).write_text(
            f'#!/bin/bash\nprintf "%s\\n" "$*" >>{tmp_path}/said\nexec /usr/bin/{name} "$@"\n'
        )
        (tmp_path / name).chmod(0o755)
    given = {"MINE": "of mine\nin two lines", "NAMED": "secret", "SBATCH_WAIT": "1", "KP_X": "1"}
    given |= {"SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/s.conf", "BASH_FUNC_f%%": "() {  echo it; }"}
    done = bash(
        "KP_SECRET_NAMES=NAMED; export LATER=1; MINE=changed\n"
        "kp_as_submitted env LINK=2 bash -c 'env; f'",
        **given | {"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "MINE=of mine\nin two lines\n" in done.stdout and "LINK=2\n" in done.stdout
    assert "SLURM_CONF=/etc/s.conf\n" in done.stdout and done.stdout.endswith("\nit\n")
    assert not re.search("NAMED|SBATCH_WAIT|KP_X|SLURM_JOB_ID|LATER", done.stdout)
    assert "LINK=2" in (said := (tmp_path / "said").read_text()) and "of mine" not in said


def test_container_runtime_is_found(tmp_path: Path) -> None:
    """pyxis where srun has it, else the one that is installed; a variable decides over all."""
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\necho '--container-image=IMAGE'\n")
    srun.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    ask = "kp_container_runtime"
    assert bash(ask, KEMPNER_CONTAINER="a/b:1", PATH=path).stdout == "pyxis\n"
    assert bash(ask, KEMPNER_CONTAINER="/x/a.sif", PATH=path).stdout == "apptainer\n"
    assert bash(ask, KEMPNER_CONTAINER="a/b:1").stdout == "apptainer\n"
    srun.rename(tmp_path / "ch-run")
    assert bash(ask, KEMPNER_CONTAINER=str(tmp_path), PATH=path).stdout == "charliecloud\n"
    given = {"KEMPNER_CONTAINER": "a/b:1", "KEMPNER_CONTAINER_RUNTIME": "singularity"}
    assert bash(ask, PATH=path, **given).stdout == "singularity\n"
    bad = bash("KP_ROOT=/r; kp_choose_python", **{**given, "KEMPNER_CONTAINER_RUNTIME": "docker"})
    assert bad.returncode == 2 and "singularity, charliecloud or pyxis" in bad.stderr


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ([], "no configuration given: name one after the script"),
        (["x.toml", "--nodes=4"], "'--nodes=4' is an option of sbatch: put it before the script"),
        (["x.toml", "-N", "4"], "'-N' is an option of sbatch"),
    ],
)
def test_arguments_that_the_trainer_would_misread(words: list[str], fix: str) -> None:
    done = subprocess.run(
        ["bash", ROOT / "scripts/slurm/multinode.sh", *words], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kempner: error: ") and done.stderr.count("\n") == 1
    assert fix in done.stderr


@pytest.mark.parametrize("name", ["singlenode.sh", "multinode.sh", "preflight.sh"])
def test_a_script_that_was_copied_elsewhere(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text((ROOT / "scripts/slurm" / name).read_text())
    env = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", tmp_path / name, "x.toml"], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "export KEMPNER_ROOT=" in done.stderr


def test_a_clone_without_its_python(tmp_path: Path) -> None:
    """Without .venv it is the machine's python3, which may lack what the kit needs."""
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # no site-packages
    python.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    done = bash(f"KP_ROOT={tmp_path}; kp_choose_python; kp_check x.toml", PATH=path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert f"'python3' lacks torch, numpy: run make .venv/train in {tmp_path}" in done.stderr


def test_a_wrapper_of_python(tmp_path: Path) -> None:
    """KEMPNER_PYTHON="uv run python": the interpreter behind it is what runs."""
    tools = tmp_path / "some tools"
    tools.mkdir()
    wrapper = f'#!/bin/sh\n[ "$1 $2" = "run python" ] && shift 2 && exec {sys.executable} "$@"\n'
    (tools / "uv").write_text(wrapper)
    (tools / "uv").chmod(0o755)
    ask = 'kp_choose_python; echo "$KP_PYTHON"; kp_python -c "print(6 * 7)"'
    path = f"{tools}:/usr/bin:/bin"
    done = bash(ask, PATH=path, KEMPNER_PYTHON="uv run python")
    assert done.stdout == f"{sys.executable}\n42\n", done.stderr
    (tools / "python").symlink_to(sys.executable)
    plain = bash('kp_choose_python; echo "$KP_PYTHON"', KEMPNER_PYTHON=f"{tools}/python")
    assert plain.stdout == f"{tools}/python\n", "a path with a blank is one word"
    missing = bash("kp_choose_python", KEMPNER_PYTHON="nosuch run python")
    assert missing.returncode == 2 and "there is no 'nosuch'" in missing.stderr
    broken = bash("kp_choose_python", PATH=path, KEMPNER_PYTHON="uv walk python")
    assert broken.returncode == 2 and "does not start Python" in broken.stderr


def test_requests_to_a_program_do_not_stay_behind(tmp_path: Path) -> None:
    """Those of all attempts of a job, and not of another one."""
    for name in ("7.0.1", "7.0.1.2", "70.0.1"):
        (tmp_path / f".ask-{name}").touch()
    script = f"""
        source {LIB.with_name("program.sh")}
        KP_RUN_DIR={tmp_path} KEMPNER_ATTEMPT_ID=7.0.1.2
        kp_run() {{ :; }}
        kp_run_program
    """
    assert bash(script, SLURM_JOB_ID="7").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == [".ask-70.0.1"]


def test_a_request_does_not_replace_one_that_is_not_read_yet(tmp_path: Path) -> None:
    """TERM of a preemption, and USR2 within a second of it: both reach the program."""
    script = f"""
        KP_ASKS=1 KP_BESIDE='' KP_RUN_DIR={tmp_path} KEMPNER_ATTEMPT_ID=7.0.1 KP_CHILD=4194399
        kp_ask() {{ false; }}
        kp_signal TERM
        kp_signal USR2
    """
    assert bash(script, SLURM_JOB_ID="7").returncode == 0
    assert (tmp_path / ".ask-7.0.1").read_text() == "TERM\nUSR2\n"


def test_a_short_time_limit_and_its_warning() -> None:
    """Passed on a quarter of the limit before the end, not in the first second of the job; but a
    user's wish, a preemption (which moves the end) and a long limit are as they were."""

    def told(limit: str, seconds: int, lead: int, ran: int, moved: int = 0) -> list[str]:
        script = f"""
printf -v now '%(%s)T' -1
at() {{ date -d "@$((now + $1))" +%Y-%m-%dT%H:%M:%S; }}
KP_JOB="TimeLimit={limit} StartTime=$(at -{ran}) EndTime=$(at {seconds - ran + moved})"
sleep() {{ :; }}
kill() {{ echo "$*" | sed "s/$$/us/"; }}
kp_cap_lead
kp_postpone && echo postponed || echo passed on
wait
kp_postpone || echo passed on
echo "$KEMPNER_SIGNAL_LEAD\""""
        lines = bash(script, KEMPNER_SIGNAL_LEAD=str(lead)).stdout.splitlines()
        assert any("a second one at once" in line for line in lines) == ("postponed" in lines)
        return [line for line in lines if not line.startswith("[")]

    late = ["passed on", "passed on"]
    again = ["postponed", "-TERM us", "passed on"]
    assert sorted(told("00:01:00", 60, 35, 1)) == sorted([*again, "15"])
    assert sorted(told("00:02:00", 120, 120, 1)) == sorted([*again, "30"])
    assert told("00:01:00", 60, 35, 46) == [*late, "15"]  # it is time
    assert told("00:08:00", 480, 200, 1) == [*late, "120"]  # somebody's wish
    assert told("00:02:00", 120, 120, 1, moved=-60) == [*late, "30"]  # a preemption
    assert told("00:09:00", 540, 120, 1) == [*late, "120"]
    assert told("1-00:00:00", 86400, 120, 1) == [*late, "120"]


@pytest.mark.parametrize(
    ("signal", "ends", "preempted", "started", "spared"),
    [
        ("TERM", "Unknown", "None", False, True),  # a person, while the container was made
        ("TERM", "now + 1 day", "None", False, True),
        ("TERM", "now + 100 seconds", "None", False, False),  # the next start has no more time
        ("TERM", "now + 20 seconds", "now", False, True),  # the grace time
        ("TERM", "now + 1 day", "None", True, False),
        ("USR2", "now + 1 day", "None", False, False),
        ("", "now + 1 day", "None", False, False),
    ],
)
def test_a_start_that_was_cut_short_is_no_crash(
    tmp_path: Path, signal: str, ends: str, preempted: str, started: bool, spared: bool
) -> None:
    event = '{"event": "start", "nodes": ["a"], "attempt_id": "7.0.1"}\n'
    (tmp_path / "attempts.jsonl").write_text(event if started else "")
    ends, preempted = (
        when if when in ("None", "Unknown") else f"$(date -d '{when}' +%FT%T)"
        for when in (ends, preempted)
    )
    job = f"EndTime={ends} PreemptTime={preempted}"
    ask = f'KP_JOB="{job}"; KP_SIGNAL={signal} KP_RUN_DIR={tmp_path} KEMPNER_ATTEMPT_ID=7.0.1'
    done = bash(f"{ask}; if kp_was_cut_short; then echo yes; else echo no; fi")
    assert done.stdout == ("yes\n" if spared else "no\n"), done.stderr


AWAY = "slurm_load_jobs error: Socket timed out on send/recv operation"


@pytest.mark.parametrize(
    ("answers", "after", "asked", "ends"),
    [
        (["timeout", "timeout", "ok"], "RUNNING", 3, "requeue"),
        (["timeout"], "PENDING", 1, "requeue"),  # the order was carried out, its answer was lost
        (["backup", "munge", "munge", "odd", "ok"], "RUNNING", 5, "requeue"),
        (["denied"] * 3, "RUNNING", 3, "refused: Access denied"),
    ],
)
def test_a_requeue_is_asked_for_again(
    tmp_path: Path, answers: list[str], after: str, asked: int, ends: str
) -> None:
    """A busy controller's "Socket timed out" is no refusal, nor are words that nobody knows."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"""#!/bin/bash
        [[ $1 == requeue ]] || {{ cat {tmp_path}/job; exit; }}
        echo asked >>{tmp_path}/asked
        sed -i 's/JobState=[A-Z]*/JobState={after}/' {tmp_path}/job
        case $(sed -n "$(wc -l <{tmp_path}/asked)p" {tmp_path}/answers) in
            ok) exit 0 ;;
            timeout) echo "{AWAY}" >&2 ;;
            backup) echo "slurm_requeue error: Slurm backup controller in standby mode" >&2 ;;
            munge) echo "slurm_requeue error: Protocol authentication error" >&2 ;;
            odd) echo "slurm_requeue error: Unspecified error" >&2 ;;
            denied) echo "Access denied" >&2 ;;
        esac
        exit 1
    """)
    scontrol.chmod(0o755)
    (tmp_path / "answers").write_text("\n".join(answers) + "\n")
    (tmp_path / "job").write_text(job(""))
    script = """
        KP_BESIDE=''
        kp_shielded() { [[ $1 == sleep ]] || "$@"; }
        kp_show_job
        if kp_requeue; then echo requeue; else echo "refused: ${KP_DECISION[refused]}"; fi
    """
    done = bash(script, SLURM_JOB_ID="7", PATH=f"{tmp_path}:/usr/bin:/bin")
    assert done.stdout.splitlines()[-1] == ends, done.stderr
    assert (tmp_path / "asked").read_text().count("asked") == asked


def test_a_controller_that_is_away_is_waited_for(tmp_path: Path) -> None:
    """No answer is no state: the decision is made once it is back."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"""#!/bin/bash
        echo "$*" >>{tmp_path}/asked
        (($(wc -l <{tmp_path}/asked) > 40)) || {{ echo "{AWAY}" >&2; exit 1; }}
        [[ $1 == requeue ]] || echo "$TEXT"
    """)
    scontrol.chmod(0o755)
    script = f"""
        KP_BESIDE='' KP_COMMITTED_BEFORE=-1 KP_RUN_DIR={tmp_path} KP_CHECKPOINTS={tmp_path}
        KP_PYTHON={sys.executable} KP_SRUN_LOG=none KP_AWAY_S=0 KP_JOB=$TEXT KP_START=0
        kp_shielded() {{ [[ $1 == sleep ]] || (exec "$@"); }}
        kp_decide "the step ended" || true
    """
    env = {"TEXT": job(""), "SLURM_JOB_ID": "7", "KEMPNER_ATTEMPT_ID": "7.0.1", "KP_CODE": "1"}
    done = bash(script, **env, PATH=f"{tmp_path}:/usr/bin:/bin", PYTHONPATH=f"{ROOT}/src")
    assert done.stdout.count("Slurm does not answer") == 1
    assert "requeue: the step ended (no checkpoint yet)" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("batch", [True, False])
def test_a_start_waits_for_the_controller(tmp_path: Path, batch: bool) -> None:
    """Nothing is known of the job yet. Whoever has typed salloc is there, and is told at once."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"""#!/bin/bash
        echo "$*" >>{tmp_path}/asked
        (($(wc -l <{tmp_path}/asked) > 25)) || {{ echo "{AWAY}" >&2; exit 1; }}
        case $2 in hostnames) printf '%s\\n' node1 node2 ;; *) echo "$TEXT" ;; esac
    """)
    scontrol.chmod(0o755)
    script = f"""
        KP_BESIDE='' KP_AWAY_S=0 KP_ROOT={ROOT} KP_ORIGIN={ROOT}
        kp_shielded() {{ [[ $1 == sleep ]] || (exec "$@"); }}
        kp_choose_python() {{ :; }}
        kp_enter
        echo "in job $(kp_field JobState), $(kp_hostnames 'node[1-2]' | paste -sd,)"
    """
    env = {"TEXT": job(""), "SLURM_JOB_ID": "7"} | ({"ENVIRONMENT": "BATCH"} if batch else {})
    done = bash(script, **env, PATH=f"{tmp_path}:/usr/bin:/bin")
    if batch:
        assert done.stdout.count("Slurm does not answer") == 1, done.stderr
        assert done.stdout.endswith("in job RUNNING, node1,node2\n")
    else:
        assert done.returncode == 2 and "scontrol knows no job 7" in done.stderr


@pytest.mark.parametrize(
    ("restarts", "before", "decided"),
    [
        (1, '{"event": "first_step", "time": 1, "job": "7", "attempt_id": "7.0.1"}', "requeue"),
        (0, '{"event": "first_step", "time": 1, "job": "7", "attempt_id": "7.0.1"}', ""),
        (1, '{"event": "decision", "decision": "requeue", "time": 1, "job": "7"}', "end"),
    ],
)
def test_a_start_that_ends_before_its_step(
    tmp_path: Path, restarts: int, before: str, decided: str
) -> None:
    """An earlier start of the job has come further: the host has a fault. Else it is bad input."""
    (tmp_path / "attempts.jsonl").write_text(f"{before}\n")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"""#!/bin/bash
        echo "$*" >>{tmp_path}/asked
        [[ $1 != show ]] || echo "$TEXT"
    """)
    scontrol.chmod(0o755)
    script = f"""
        kp_is_whole_script() {{ :; }}
        KP_BESIDE='' KP_ROOT={ROOT} KP_ORIGIN={ROOT} KP_RUN_DIR={tmp_path}
        trap 'kp_stay_ended $? || true' EXIT
        kp_die "the data are not mounted here"
    """
    text = job("").replace("Restarts=0", f"Restarts={restarts}")
    env = {"TEXT": text, "SLURM_JOB_ID": "7", "KEMPNER_ATTEMPT_ID": "7.1.2"}
    done = bash(script, **env, PATH=f"{tmp_path}:/usr/bin:/bin", PYTHONPATH=f"{ROOT}/src")
    last = json.loads((tmp_path / "attempts.jsonl").read_text().splitlines()[-1])
    asked = (tmp_path / "asked").read_text()
    assert last.get("decision", "") == decided, done.stdout + done.stderr
    assert ("requeue 7" in asked) == (decided == "requeue") != ("Requeue=0" in asked)
    assert done.returncode == (0 if decided == "requeue" else 2)


def test_a_crash_loop_has_a_bound_without_python(tmp_path: Path) -> None:
    """The judge fails each time, as in a container that takes too long to start. Where no Python
    starts at all, nothing can be recorded: then all starts of the job count."""
    (tmp_path / "bin").mkdir()
    judge = f'[[ "$*" != *judge* && ! -e {tmp_path}/none ]] && exec {sys.executable} "$@"; exit 1'
    for name, text in (("scontrol", 'echo "$TEXT"'), ("python3", judge)):
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    script = f"""
        KP_BESIDE='' KP_COMMITTED_BEFORE=-1 KP_RUN_DIR={tmp_path} KP_CHECKPOINTS={tmp_path}
        KP_PYTHON=false KP_SRUN_LOG=none
        for i in 1 2 3 4; do KP_DECIDED='' && kp_decide "the step ended" >/dev/null; done
    """
    env = {"TEXT": job(""), "SLURM_JOB_ID": "7", "KEMPNER_ATTEMPT_ID": "7.0.1", "KP_CODE": "1"}
    bash(script, **env, PATH=f"{tmp_path}/bin:/usr/bin:/bin")
    lines = map(json.loads, (tmp_path / "attempts.jsonl").read_text().splitlines())
    made = [(line["decision"], line["no_progress"]) for line in lines]
    assert made == [("requeue", 1), ("requeue", 2), ("end", 3), ("end", 4)]
    (tmp_path / "none").touch()
    script = script.replace("1 2 3 4", "1").replace(">/dev/null", "")
    for starts, decision in (("1", "requeue: "), ("2", "end: ")):
        env["TEXT"] = job("").replace("Restarts=0", f"Restarts={starts}")
        done = bash(script, **env, PATH=f"{tmp_path}/bin:/usr/bin:/bin")
        assert decision in done.stdout and "cannot be recorded" in done.stdout, done


def test_the_judge_is_asked_outside_of_the_container(tmp_path: Path) -> None:
    """To start one takes longer than there is time: no host was ever blamed then."""
    (tmp_path / "bin").mkdir()
    for name, text in (
        ("scontrol", 'echo "$TEXT"'),
        ("container", f"touch {tmp_path}/started; exit 1"),
        ("python3", f'exec {sys.executable} "$@"'),
    ):
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    script = f"""
        KP_BESIDE='' KP_COMMITTED_BEFORE=-1 KP_RUN_DIR={tmp_path} KP_CHECKPOINTS={tmp_path}
        KP_PYTHON=python KP_INSIDE=(container) KP_ORIGIN={tmp_path} KP_SRUN_LOG={tmp_path}/srun.log
        kp_decide "the step ended"
    """
    (tmp_path / "srun.log").write_text("srun: error: node2: task 3: Killed\n")
    env = {"TEXT": job(""), "SLURM_JOB_ID": "7", "KEMPNER_ATTEMPT_ID": "7.0.1", "KP_CODE": "1"}
    done = bash(script, **env, PATH=f"{tmp_path}/bin:/usr/bin:/bin", PYTHONPATH=f"{ROOT}/src")
    (made,) = map(json.loads, (tmp_path / "attempts.jsonl").read_text().splitlines())
    assert (made["decision"], made["blamed"]) == ("requeue", "node2"), done
    assert not (tmp_path / "started").exists()


def test_crashes_are_counted_without_the_judge(tmp_path: Path) -> None:
    """As kempner.jobs.records.judge counts them: null is one more, a number is the number."""
    kinds = [(12, "2"), (12, "0"), (13, "9"), (12, "null"), (12, "null")]
    lines = [
        f'{{"event": "decision", "job": "{job}", "restart": 0, "no_progress": {count}}}\n'
        for job, count in kinds
    ]
    (tmp_path / "attempts.jsonl").write_text("".join(lines) + '{"event": "end", "job": "12"}\n')
    ask = f"KP_RUN_DIR={tmp_path} SLURM_JOB_ID=12; kp_count_crashes"
    assert bash(ask).stdout == "2\n"
