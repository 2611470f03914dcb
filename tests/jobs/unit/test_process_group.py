"""Who am I, which device is mine, and how ranks that share but a directory meet."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from kempner.config.option import ConfigError
from kempner.jobs.program.child import RankPlace
from kempner.jobs.ranks import process_group, proof, rendezvous, startup
from kempner.jobs.ranks.own_device import pick_device
from kempner.jobs.ranks.placement import World, discover_world
from kempner.jobs.this_job import job_name
from kempner.train import configure

# What a batch shell has; a salloc shell has the counts alone. SLURM_STEP_ID is -5 in newer ones.
BATCH = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = BATCH | {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "6"}
TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("env", "world"),
    [
        ({}, World(0, 0, 1, "single")),
        (STEP, World(5, 1, 6, "slurm")),  # the step's size, not the job's
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "3(x2)"}, World(5, 1, 6, "slurm", 3)),
        (BATCH, World(0, 0, 1, "single")),
        (BATCH | {"SLURM_STEP_ID": "-5"}, World(0, 0, 1, "single")),
        ({"SLURM_JOB_ID": "12", "SLURM_NTASKS": "8"}, World(0, 0, 1, "single")),
        (TORCHRUN, World(1, 1, 2, "torchrun")),
        (STEP | TORCHRUN, World(1, 1, 2, "torchrun")),
        ({"RANK": "3"}, World(0, 0, 1, "single")),  # left over in somebody's shell
    ],
    ids=[
        "nothing",
        "step",
        "nodes",
        "batch",
        "batch-26",
        "salloc",
        "torchrun",
        "torchrun-in-step",
        "rest",
    ],
)
def test_place(env: dict[str, str], world: World) -> None:
    assert discover_world(env) == world


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"])
@pytest.mark.parametrize("value", ["", "x", "1(x2)", None])
def test_garbage_is_named(name: str, value: str | None) -> None:
    env = {key: text for key, text in STEP.items() if key != name or value is not None}
    if value is not None:
        env[name] = value
    if "SLURM_STEP_NUM_TASKS" not in env:
        assert discover_world(env).source == "single"
        return
    with pytest.raises(ConfigError) as error:
        discover_world(env)
    (problem,) = error.value.problems
    assert f"{name}={'(unset)' if value is None else value}" in problem and "srun" in problem


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "0", "WORLD_SIZE": "2"},  # torch itself needs no LOCAL_RANK
        TORCHRUN | {"RANK": "2"},
        TORCHRUN | {"RANK": "-1"},
    ],
)
def test_ranks_that_cannot_be(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"unset them all for one process"):
        discover_world(env)


def test_job_as_users_name_it() -> None:
    assert job_name({}) is None
    assert job_name({"SLURM_JOB_ID": "12"}) == "12"
    array = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    assert job_name(array) == "12_3"


# --- The device ---------------------------------------------------------------------------------


def see(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


@pytest.mark.parametrize(
    ("count", "local_rank", "index"),
    [(4, 3, 3), (1, 3, 0), (1, 0, 0)],  # each task may see one GPU alone
)
def test_device_is_the_local_rank_or_the_only_one(
    monkeypatch: pytest.MonkeyPatch, count: int, local_rank: int, index: int
) -> None:
    see(monkeypatch, count)
    assert pick_device("auto", local_rank) == torch.device("cuda", index)
    assert pick_device("cpu", local_rank) == torch.device("cpu")


def test_a_task_without_a_gpu_is_told_which_flag_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 2)
    with pytest.raises(ConfigError, match="--ntasks-per-node must be 2"):
        pick_device("auto", 2)
    see(monkeypatch, 0)
    assert pick_device("auto", 2) == torch.device("cpu")
    with pytest.raises(ConfigError, match="--gpus-per-node"):
        pick_device("cuda", 0)


def test_a_binding_that_hides_gpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """--gpu-bind=closest shows the GPUs of a socket: four of eight."""
    see(monkeypatch, 4)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    with pytest.raises(ConfigError, match=r"it sees 4 of the 8.*leave --gpu-bind out") as error:
        pick_device("auto", 5)
    assert "--ntasks-per-node" not in str(error.value)  # that would halve the job


def test_each_rank_takes_an_instance_of_mig_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA shows a process the first one alone."""
    see(monkeypatch, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    assert pick_device("auto", 1) == torch.device("cuda", 0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-b"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    with pytest.raises(ConfigError, match="no MIG instance: 2 are visible"):
        pick_device("auto", 2)


def test_a_gpu_that_torch_cannot_use_is_an_error_in_a_job_with_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A broken driver, or a torch without CUDA: the run would train on the CPU for days."""
    see(monkeypatch, 0)
    card = tmp_path / "bus/pci/devices/0000:17:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    monkeypatch.setenv("KEMPNER_SYS", str(tmp_path))
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    for numbers in ("0,1", "0", ""):  # "0" is the first GPU, not none
        monkeypatch.setenv("SLURM_STEP_GPUS", numbers)
        with pytest.raises(ConfigError, match=r"has NVIDIA GPUs.*distributed\.device=cpu"):
            pick_device("auto", 0)
    assert pick_device("cpu", 0) == torch.device("cpu")
    (card / "class").write_text("0x020000\n")  # a network card of the same maker
    assert pick_device("auto", 0) == torch.device("cpu")
    (card / "class").write_text("0x030200\n")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "0")  # a job without GPUs
    assert pick_device("auto", 0) == torch.device("cpu")
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")  # a login node
    assert pick_device("auto", 0) == torch.device("cpu")


@pytest.mark.parametrize(
    ("used", "found", "user", "fits"),
    [
        ("IB", "InfiniBand", "", True),
        ("Socket", "InfiniBand", "", False),
        ("Socket", "InfiniBand", "Socket", True),
        ("Socket", "EFA", "", False),
        ("AWS Libfabric", "EFA", "", True),
        ("Socket", "Ethernet", "", True),
    ],
)
def test_a_fabric_that_nccl_does_not_use_is_an_error(
    used: str, found: str, user: str, fits: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("KEMPNER_NETWORK", found)
    monkeypatch.setenv("NCCL_NET", user) if user else monkeypatch.delenv("NCCL_NET", False)
    with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match="NCCL_NET=Socket"):
        proof.check_network(f"node1:1:1 [0] NCCL INFO Using network {used}\n")
    assert "NCCL uses NET/" in capsys.readouterr().err


@pytest.mark.parametrize(("found", "advice"), [("InfiniBand", True), ("Ethernet", False)])
def test_a_log_of_nccl_that_names_no_network_is_said(
    found: str, advice: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plugin may word it otherwise: silence was taken for the fast network."""
    monkeypatch.setenv("KEMPNER_NETWORK", found)
    proof.check_network("node1:1:1 [0] NCCL INFO The Net is chosen: FastNet\n")
    said = capsys.readouterr().err
    assert "NCCL did not say which network it uses" in said
    assert ("scripts/slurm/preflight.sh" in said) is advice


@pytest.mark.parametrize(("size", "per_node", "asked"), [(4, 2, True), (2, 2, False)])
def test_the_network_of_one_host_is_not_looked_at(
    size: int, per_node: int, asked: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NCCL names one at each start, also where it speaks over NVLink alone."""
    looked: list[World] = []
    monkeypatch.setattr(proof, "log_nccl", looked.append)
    quiet: Any = lambda *_: types.SimpleNamespace()  # noqa: E731
    for module, name in (
        (rendezvous, "open_store"), (rendezvous, "await_ranks"), (proof, "prove"),
        (process_group, "_init"), (process_group, "set_timeout"),
        (torch.distributed, "PrefixStore"), (torch.distributed, "destroy_process_group"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, quiet)
    world = World(0, 0, size, "slurm", per_node)
    process_group.start_process_group(world, torch.device("cuda", 0), tmp_path, 5.0)
    assert bool(looked) is asked


def test_nccls_log_is_asked_for_at_the_start_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the run starts later would write into a file that is gone."""
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    quiet: Any = lambda *_: types.SimpleNamespace()  # noqa: E731
    asked: list[str] = []
    for module, name in (
        (rendezvous, "open_store"), (rendezvous, "await_ranks"), (process_group, "set_timeout"),
        (torch.distributed, "PrefixStore"), (torch.distributed, "destroy_process_group"),
        (proof, "prove"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, quiet)
    monkeypatch.setattr(
        process_group, "_init", lambda *_: asked.append(os.environ.get("NCCL_DEBUG", ""))
    )
    process_group.start_process_group(
        World(0, 0, 4, "slurm", 2), torch.device("cuda", 0), tmp_path, 5.0
    )
    assert asked == ["", "INFO"]
    assert not [name for name in os.environ if name.startswith("NCCL_DEBUG")]


# --- The rendezvous -----------------------------------------------------------------------------

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "kempner.jobs.ranks.process_group"])


def join(rank: int, run_dir: Path, env: dict[str, str], timeout: float, said: Any) -> None:
    """One task of an srun step: meets the others, and adds up their ranks."""
    import torch.distributed as dist

    os.environ.update(env | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
    try:
        process_group.start_process_group(discover_world(), torch.device("cpu"), run_dir, timeout)
        total = torch.tensor(float(rank))
        dist.all_reduce(total)
        said.put((rank, total.item()))
    except RuntimeError as error:
        said.put((rank, str(error)))


def step(
    ranks: list[int], run_dir: Path, timeout: float, answers: int, **env: str
) -> dict[int, Any]:
    """Start these ranks of a step of SLURM_STEP_NUM_TASKS; what the first `answers` of them say."""
    said = CONTEXT.Queue()
    tasks = [CONTEXT.Process(target=join, args=(r, run_dir, env, timeout, said)) for r in ranks]
    for task in tasks:
        task.start()
        time.sleep(0.05)
    try:
        return dict(said.get(timeout=60) for _ in range(answers))
    except queue.Empty:
        raise AssertionError([task.exitcode for task in tasks]) from None
    finally:
        for task in tasks:
            task.kill()
            task.join()


def test_ranks_meet_by_a_file_in_the_run_directory(tmp_path: Path) -> None:
    """Also when rank 0 is the last to come, and beside a dead start's address."""
    run_dir = tmp_path / "a run"
    run_dir.mkdir()
    (run_dir / ".rendezvous-77.0.3").write_text("127.0.0.1 9\n")
    env = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1", "SLURM_STEP_ID": "3"}
    said = step([1, 2, 0], run_dir, 60, 3, SLURM_STEP_NUM_TASKS="3", **env)
    assert said == {0: 3.0, 1: 3.0, 2: 3.0}
    notes = {".rendezvous-77.0.3", ".rendezvous-77.1.3"}
    assert {path.name for path in run_dir.iterdir()} == notes
    startup.forget_rendezvous(run_dir)
    assert not list(run_dir.iterdir())


def depart(rank: int, run_dir: Path, said: Any) -> None:
    """One task of four that meet and leave; all but rank 0 are slow to come out of the barrier."""
    import torch.distributed as dist

    names = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": "4"}
    os.environ.update(names)
    world = process_group.start_process_group(discover_world(), torch.device("cpu"), run_dir, 60)
    barrier = dist.barrier

    def slow() -> None:
        barrier()
        if rank:  # the barrier connects pairs of ranks through the store of rank 0
            time.sleep(0.3)
            world.meeting.get("proved-cpu/0")

    dist.barrier = slow
    try:
        process_group.leave_process_group(world)
        said.put((rank, "left"))
    except RuntimeError as error:
        said.put((rank, str(error)))


def test_rank_0_leaves_last(tmp_path: Path) -> None:
    said = CONTEXT.Queue()
    tasks = [CONTEXT.Process(target=depart, args=(rank, tmp_path, said)) for rank in range(4)]
    for task in tasks:
        task.start()
    assert dict(said.get(timeout=60) for _ in tasks) == dict.fromkeys(range(4), "left")
    for task in tasks:
        task.join()
    assert [task.exitcode for task in tasks] == [0, 0, 0, 0]


def test_only_the_first_rank_of_a_host_asks_the_shared_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others read its copy on the host's own disk, and nothing is left of it."""
    monkeypatch.setattr(rendezvous, "LOCAL_COPY_S", 0.2)
    note, copy = tmp_path / "shared", tmp_path / "local"
    opened: list[Path] = []
    real = rendezvous._read_file

    def read_file(path: Path, own: bool) -> str:
        opened.append(path)
        return real(path, own)

    monkeypatch.setattr(rendezvous, "_read_file", read_file)
    copy.write_text("10.0.0.1 4711\n")
    assert rendezvous._read_note(note, copy, 3, 5.0) == ("10.0.0.1", 4711)
    assert opened == [copy]
    copy.unlink()
    note.write_text("10.0.0.2 4712\n")  # a container with a /tmp of its own
    assert rendezvous._read_note(note, copy, 3, 5.0) == ("10.0.0.2", 4712)
    copy.unlink()
    assert rendezvous._read_note(note, copy, 0, 5.0) == ("10.0.0.2", 4712)
    assert copy.read_text() == note.read_text()


def test_a_file_of_somebody_else_ends_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of the copy in /tmp is foreseeable: where it cannot be replaced, or leads elsewhere,
    the ranks of the host take the address from the run directory. 75 such files, for five job
    numbers, ended a run."""
    host = tmp_path / "tmp"
    host.mkdir()
    monkeypatch.setattr(rendezvous, "LOCAL_COPY_S", 0.2)
    monkeypatch.setattr("tempfile.tempdir", str(host))
    run_dir = tmp_path / "run"
    copy = rendezvous.copy_of(run_dir)
    copy.mkdir()  # as root no file of another user would do
    rendezvous.publish_address(run_dir, 4711)
    assert rendezvous.find_address(run_dir, 3, 30.0)[1] == 4711
    rendezvous.forget_copy(run_dir)
    copy.rmdir()
    (tmp_path / "mine").write_text("10.0.0.9 1")
    copy.symlink_to(tmp_path / "mine")
    assert rendezvous.find_address(run_dir, 3, 30.0)[1] == 4711
    rendezvous.publish_address(run_dir, 4712)
    assert not copy.is_symlink() and (tmp_path / "mine").read_text() == "10.0.0.9 1"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_what_another_user_has_written_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it removed: it is none of ours."""
    monkeypatch.setattr(rendezvous, "LOCAL_COPY_S", 0.2)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_dir = tmp_path / "run"
    rendezvous.publish_address(run_dir, 4711)
    copy = rendezvous.copy_of(run_dir)
    copy.write_text("10.6.6.6 1\n")
    os.chown(copy, 64_202, 64_202)
    assert rendezvous.find_address(run_dir, 3, 30.0)[1] == 4711
    os.chown(copy, 64_202, 64_202)
    rendezvous.forget_copy(run_dir)
    assert copy.exists()


@pytest.mark.parametrize("of_the_run", [False, True], ids=["copy", "note"])
def test_nobody_waits_for_a_fifo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_the_run: bool
) -> None:
    """The name of the copy is foreseeable."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(rendezvous, "LOCAL_COPY_S", 0.2)
    run_dir, found = tmp_path / "run", []
    copy = rendezvous.copy_of(run_dir)
    os.mkfifo(copy)
    if of_the_run:
        run_dir.mkdir()
        os.mkfifo(rendezvous._note_in(run_dir))

    def meet() -> None:
        for local_rank in (1, 0):
            publish = threading.Timer(0.5, rendezvous.publish_address, (run_dir, 4711))
            publish.start()
            found.append(rendezvous.find_address(run_dir, local_rank, 30.0)[1])
            publish.join()

    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    thread.join(20)
    assert found == [4711, 4711]


def test_what_killed_starts_have_left_in_tmp_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this run at once, of others when it is a day old and no process has it any more."""
    host = tmp_path / "tmp"
    host.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(host))
    ours = rendezvous.copy_of(tmp_path / "run").name.partition(".")[0]
    of_another = ours[:-8] + "0123abcd"
    gone = [f"{ours}.rendezvous-1.0.0", f"{of_another}.rendezvous-2.0.0", "kempner-nccl-old"]
    kept = [f"{of_another}.rendezvous-3.0.0", "kempner-nccl-new", "kempner-notes", "other"]
    for name in (*gone, *kept):
        (host / name).touch()
    places = RankPlace(0), RankPlace(1), RankPlace(2)
    places[0]._held.close()  # its process was killed
    (host / "kempner-rank9-mine").mkdir()
    old = [*gone[1:], "kempner-notes", "other", "kempner-rank9-mine"]
    for path in (*(host / name for name in old), places[0].path, places[1].path):
        os.utime(path, (0, 0))
    rendezvous.forget_copy(tmp_path / "run")
    left = {path.name for path in host.iterdir()}
    assert left == {*kept, "kempner-rank9-mine", places[1].path.name, places[2].path.name}
    for place in places:
        place.remove()


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    # Rank 2 is there first, and has all of that time to find rank 0.
    said = step([2, 0], tmp_path, 20.0, 2, SLURM_STEP_NUM_TASKS="4", SLURM_JOB_ID="78")
    assert "ranks [1, 3] of 4 did not arrive within 20 s" in said[0]
    assert "distributed.start_timeout" in said[0] and "likely causes" in said[0]


def test_a_rank_0_that_does_not_come_is_named(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 has published no address.*likely causes"):
        process_group.start_process_group(
            World(1, 1, 2, "slurm"), torch.device("cpu"), tmp_path / "never-made", 0.5
        )
    assert time.monotonic() - began < 5


def hang(log: Path) -> None:
    sys.stderr = open(log, "w")  # noqa: SIM115
    with proof.or_exit(0.1, lambda: "the network swallows it"):
        time.sleep(30)


def hang_in_nccl(log: Path) -> None:
    """As a rank of a CUDA run whose gloo works and whose NCCL never connects."""
    sys.stderr = open(log, "w")  # noqa: SIM115
    store = types.SimpleNamespace()
    quiet: Any = lambda *_: None  # noqa: E731
    rendezvous.open_store = lambda *_: store  # type: ignore[assignment,return-value]
    rendezvous.await_ranks = proof.prove = quiet
    torch.distributed.destroy_process_group = quiet
    torch.distributed.PrefixStore = quiet  # type: ignore[misc]

    def init(store: Any, world: Any, device: Any, seconds: float) -> None:
        if device is not None:
            time.sleep(30)

    process_group._init = init
    process_group.start_process_group(
        World(0, 0, 2, "slurm"), torch.device("cuda", 0), log.parent, 0.3
    )


@pytest.mark.parametrize(
    ("target", "words"),
    [(hang, "the network swallows it"), (hang_in_nccl, "NCCL does not connect the ranks")],
)
def test_a_start_that_hangs_ends_the_process_and_says_why(
    tmp_path: Path, target: Any, words: str
) -> None:
    process = CONTEXT.Process(target=target, args=(tmp_path / "log",))
    process.start()
    process.join(timeout=25)
    assert process.exitcode == 1
    said = (tmp_path / "log").read_text()
    assert words in said and "likely causes" in said


@pytest.mark.parametrize(("rank", "told", "speaks"), [(0, 1, True), (1, 0, True), (1, 1, False)])
def test_one_rank_speaks_of_bad_input(
    rank: int,
    told: float,
    speaks: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The launcher's SIGTERM may come before this rank knows that its input is bad."""
    for name, value in (TORCHRUN | {"RANK": str(rank)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(configure, "RANK_0_SPEAKS_S", 0.0)
    monkeypatch.setattr(configure.signal, "signal", lambda *_: None)
    stop = types.SimpleNamespace(wants_to_leave=lambda: float(told))
    with pytest.raises(SystemExit, match="2"):
        configure.reject_input(ConfigError("it is bad"), stop)  # type: ignore[arg-type]
    assert ("it is bad" in capsys.readouterr().err) is speaks
