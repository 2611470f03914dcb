"""Two users on one cluster: what mallory, who has no rights, can do to a run of somebody else, and
see of it. The sockets one by one: tests/jobs/unit/test_peers.py; directories: test_private.py."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.conftest import status

MALLORY = ("setpriv", "--reuid=64202", "--regid=64202", "--clear-groups")
PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin") or "python3"
SECRETS = {"WANDB_API_KEY": "s3cret-a", "KEMPNER_WEBHOOK": "http://127.0.0.1:9/s3cret-b"}

# On a node: junk, and what a rank would say, to each port that listens there.
ATTACK = """
import glob, json, socket, sys
name = sys.argv[1]
ours = "".join(json.dumps(line) + "\\n" for line in (
    {"rank": 1, "host": "node2", "attempt_id": name},
    {"say": "asked", "kind": "stop", "why": "SIGINT"},
    {"say": "ended", "code": 0, "words": "", "lost_peer": False, "torn": False, "ago": 0.0},
))
junk = [b"GET / HTTP/1.0\\r\\n\\r\\n", b"\\x16\\x03\\x01" + bytes(300), b"{x\\n", ours.encode()]
ports = set()
for file in ("/proc/net/tcp", "/proc/net/tcp6"):
    lines = [line.split() for line in open(file).readlines()[1:]]
    ports |= {int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A"}
for port in sorted(ports):
    for text in junk:
        try:
            with socket.create_connection(("localhost", port), 10) as peer:
                peer.settimeout(0.5)
                peer.sendall(text)
                peer.recv(100)
        except OSError:
            pass
read = 0
for file in glob.glob("/proc/[0-9]*/environ"):
    try:
        read += b"s3c" b"ret" in open(file, "rb").read()
    except OSError:
        pass
print(json.dumps({"ports": len(ports), "environments": read}))
"""


@contextlib.contextmanager
def watching(found: dict[str, str]) -> Iterator[None]:
    """Every command line of this machine, as `ps` shows them to everybody, while the body runs;
    those with a secret go to `found`."""
    end = threading.Event()

    def look() -> None:
        while not end.wait(0.01):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    words = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if "s3cret" in words and "test_other_people" not in words:
                        found[words] = file.parts[2]

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@pytest.mark.as_root("the variables of another user's commands are words of the test bed's login")
def test_a_stranger_on_the_nodes_of_a_run(cluster: Cluster, tmp_path: Path) -> None:
    """Who knows the name of the step, as squeue shows it, told the coordinator that the run is
    done. And no process of a run has a secret in its words, from sbatch to the end."""
    go, found = tmp_path / "go", dict[str, str]()
    wait = f"echo it runs; until [ -e {go} ]; do sleep 0.1; done; echo it ends"
    with watching(found):
        job = cluster.sbatch(
            *("run.sh", "--", "sh", "-c", wait),
            options=["--nodes=2", "--ntasks-per-node=1"],
            cwd=tmp_path,
            env=SECRETS,
        )
        log = tmp_path / f"kempner-{job}.out"
        cluster.wait_for("[1] it runs", log)
        names = cluster.ask("squeue", "--steps", "--noheader", "--jobs", job, "--format=%j")
        name = next(n for n in names.split() if n.startswith("kempner-")).removeprefix("kempner-")
        for node in ("node1", "node2"):
            told = cluster.testbed("exec", node, *MALLORY, PYTHON, "-c", ATTACK, name)
            assert json.loads(told)["environments"] == 0 and json.loads(told)["ports"] > 0
        time.sleep(1)
        go.touch()
        assert cluster.wait(job) == 0, log.read_text()
    text = log.read_text()
    assert "[0] it ends" in text and "[1] it ends" in text and "asked to exit" not in text
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert status(run_dir)["state"] == "done"
    assert not found
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert "s3cret" not in file.read_text(errors="replace"), file


@pytest.fixture
def local(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """A disk of node1 where everybody may write, as /local is."""
    path = tmp_path / "local"
    path.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=64m,mode=1777", "none", path)
    cluster.testbed("exec", "node1", *mount)
    yield path
    cluster.testbed("exec", "node1", "umount", "-l", path)


def test_a_staging_directory_of_somebody_else(
    cluster: Cluster, tmp_path: Path, local: Path
) -> None:
    """The number of the job is foreseeable: mallory made its directory, and the data in it hers."""
    options = ["--hold", "--gpus-per-node=1", "--nodelist=node1"]
    job = cluster.sbatch(
        "singlenode.sh",
        *cluster.debug_run(tmp_path / "run", "--train.max_steps=3"),
        options=options,
        cwd=tmp_path,
        env={"KEMPNER_STAGE": str(local)},
    )
    hers = local / f"kempner-{job}"
    make = f"mkdir {hers} && chmod 777 {hers} && touch {hers}/.kempner"
    cluster.testbed("exec", "node1", "sh", "-c", f"{make} && chown -R 64202 {hers}")
    cluster.ask("scontrol", "release", job)
    log = tmp_path / f"kempner-{job}.out"
    assert cluster.wait(job) == 0, log.read_text()
    assert f"{hers} belongs to another user" in log.read_text()
    left = cluster.testbed("exec", "node1", "find", hers, "-mindepth", "1")
    assert left == f"{hers}/.kempner"
