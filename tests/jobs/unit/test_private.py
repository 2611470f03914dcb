"""Directories in places where others may write: what another user has made there, or could change,
is never used. As root, who can make things for another user."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kempner.data.prepare.stage import stage_data, staged_dir
from kempner.jobs.system import private
from tests.conftest import ROOT

LIB = ROOT / "scripts/slurm/lib"
MALLORY = 64_202

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")


@pytest.fixture
def local() -> Iterator[Path]:
    """A node's /local: of root, sticky, for everybody."""
    above = Path(tempfile.mkdtemp(prefix="kempner-test-", dir="/tmp"))
    above.chmod(0o755)
    path = above / "local"
    path.mkdir()
    path.chmod(0o1777)
    yield path
    shutil.rmtree(above)


def mallorys(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)
    os.chown(path, MALLORY, MALLORY)


def a_link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.parent / "elsewhere")


def a_link_of_mallory(path: Path) -> None:
    a_link(path)
    os.lchown(path, MALLORY, MALLORY)


def for_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def for_the_group(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)


def a_file(path: Path) -> None:
    path.touch()


def not_sticky(path: Path) -> None:
    path.parent.chmod(0o777)


def below_mallory(path: Path) -> None:
    os.chown(path.parent, MALLORY, MALLORY)


def far_below_mallory(path: Path) -> None:
    os.chown(path.parent.parent, MALLORY, MALLORY)


def not_sticky_far_above(path: Path) -> None:
    path.parent.parent.chmod(0o777)


WRONG: dict[Callable[[Path], None], str] = {
    mallorys: "belongs to another user",
    a_link: "is a link",
    a_link_of_mallory: "is a link",
    for_all: "may be written by others (mode 777)",
    for_the_group: "may be written by others (mode 770)",
    a_file: "is not a directory",
    not_sticky: "may be written by others (mode 777)",
    below_mallory: "belongs to another user",
    far_below_mallory: "belongs to another user",
    not_sticky_far_above: "may be written by others (mode 777)",
}


def bash(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = 'source "$0/private.sh" && kp_private "$@"'
    return subprocess.run(
        ["bash", "-euc", command, LIB, path, *words], capture_output=True, text=True
    )


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_what_others_can_change_is_refused(local: Path, wrong: Callable[[Path], None]) -> None:
    path = local / "kempner-51"
    wrong(path)
    with pytest.raises(PermissionError) as refused:
        private.make_private(path)
    assert WRONG[wrong] in str(refused.value)
    for words in (["make"], []):
        done = bash(path, *words)
        assert done.returncode == 1 and done.stderr == ""
        if words or path.exists():
            assert WRONG[wrong] in done.stdout


@pytest.mark.parametrize(
    "make", [private.make_private, lambda path: bash(path, "make").check_returncode()]
)
def test_what_is_ours_is_made_and_used(local: Path, make: Callable[[Path], None]) -> None:
    """Also one above it that is not there yet: /local/$USER."""
    before = os.umask(0)
    try:
        path = local / "me" / "kempner 51"
        make(path)
        make(path)  # a start later
    finally:
        os.umask(before)
    assert [p.stat().st_mode & 0o7777 for p in (path, path.parent)] == [0o700, 0o700]
    assert private.why_not(path) == "" and bash(path).returncode == 0
    path.chmod(0o755)  # of an earlier version of the kit
    make(path)
    assert private.why_not(path) == ""


def test_data_are_not_read_from_there(
    local: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even with all that makes a copy a whole one."""
    root = local / "kempner-51"
    stage_data(data_dir, root)
    monkeypatch.setenv("KEMPNER_STAGED", str(root))
    assert staged_dir(data_dir).parent == root
    for path in (root, *root.rglob("*")):
        os.chown(path, MALLORY, MALLORY)
    assert staged_dir(data_dir) == data_dir
    with pytest.raises(PermissionError, match="belongs to another user"):
        stage_data(data_dir, root)


def task(root: Path, python: Path) -> subprocess.CompletedProcess[str]:
    staged = {"STAGED": str(root), "STAGED_PYTHON": str(python), "STAGED_SUM": "0" * 64}
    env = {f"KEMPNER_{name}": value for name, value in staged.items()}
    return subprocess.run(
        ["bash", LIB / "task.sh", python, "-c", "print('ours')"],
        env={"PATH": os.environ["PATH"], "SLURM_LOCALID": "1", **env},
        capture_output=True,
        text=True,
    )


def environment(root: Path, text: str) -> None:
    (root / "environment/bin").mkdir(parents=True)
    (root / "environment/.complete").write_text(text + "\n")
    (root / "environment/bin/python").write_text("#!/bin/sh\necho staged\n")
    (root / "environment/bin/python").chmod(0o755)


def test_no_python_of_another_user_is_started(local: Path) -> None:
    """It ran as the user, with his secrets: the number of a job is foreseeable."""
    python = Path(shutil.which("python3") or "")
    root = local / "kempner-51"
    root.mkdir(mode=0o700)
    environment(root, "0" * 64)
    assert task(root, python).stdout == "staged\n"
    (root / "environment/.complete").write_text("1" * 64)  # of another state of the packages
    assert task(root, python).stdout == "ours\n"
    (root / "environment/.complete").write_text("0" * 64)
    for path in (root, *root.rglob("*")):
        os.chown(path, MALLORY, MALLORY)
    done = task(root, python)
    assert done.stdout == "ours\n"
    assert f"nothing in {root} is used: {root} belongs to another user" in done.stderr


def test_nothing_is_unpacked_there(local: Path) -> None:
    root, archive = local / "kempner-51", local / "new.tar"
    archive.write_bytes(b"x")
    mallorys(root)
    (root / "environment").mkdir()
    words = ["bash", str(LIB / "stage_node.sh"), str(root)]
    done = subprocess.run([*words, str(archive), "0" * 64], capture_output=True, text=True)
    assert done.returncode == 0 and "belongs to another user); it is used" in done.stderr
    assert os.listdir(root) == ["environment"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and f"{root} is not used: {root} belongs" in done.stderr


def node(*words: object) -> int:
    return subprocess.run(["bash", LIB / "stage_node.sh", *words], capture_output=True).returncode


def test_an_image_of_somebody_else_is_not_there(local: Path) -> None:
    """The batch script asks each node whether it has the image, before srun starts it."""
    root = local / "kempner-51"
    root.mkdir(mode=0o700)
    assert node("--has", root, "image.sif") == 1
    (root / "image.sif").touch()
    assert node("--has", root, "image.sif") == 0
    os.chown(root, MALLORY, MALLORY)
    assert node("--has", root, "image.sif") == 1


@pytest.mark.parametrize("whose", ["ours", "a link", "another user's", "not staged"])
def test_what_is_removed_is_ours(local: Path, whose: str) -> None:
    root, place = local / "kempner-51", local / "elsewhere"
    place.mkdir(mode=0o700)
    (place / "file").touch()
    if whose != "not staged":
        (place / ".kempner").write_text('{"is": "STAGE"}')
    if whose == "a link":
        root.symlink_to(place)
    else:
        place.rename(root)
    if whose == "another user's":
        os.chown(root, MALLORY, MALLORY)
    assert node("--remove", root) == 0
    assert root.exists() == (whose != "ours")
    assert whose == "ours" or (root / "file").exists()
