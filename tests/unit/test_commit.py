"""The commit protocol: a crash at any operation, retention, and what is found again at a start."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kempner.checkpoint import commit

# --- A disk that crashes ------------------------------------------------------------------------


class Crash(BaseException):
    """Not an Exception: no `except` of the protocol may catch the end of the process."""


Operation = tuple[str, str]  # what, and the name of the file that it is about
_watch: Callable[[Operation], None] | None = None


def _audit(event: str, args: tuple[Any, ...]) -> None:
    """Python tells each operation on files before it does it; an exception here prevents it."""
    if _watch is None:
        return
    if event in ("os.rename", "os.symlink"):
        _watch((event[3:], Path(args[1]).name))
    elif event in ("os.remove", "os.rmdir", "os.mkdir"):
        _watch((event[3:], Path(os.fsdecode(args[0])).name))
    elif event == "open" and isinstance(args[0], str | Path) and args[2] & os.O_ACCMODE:
        _watch(("write", Path(args[0]).name))


sys.addaudithook(_audit)


@contextlib.contextmanager
def watched(crash_at: int | None = None) -> Iterator[list[Operation]]:
    """Collect the operations within; with `crash_at` raise Crash in place of that one."""
    global _watch
    done: list[Operation] = []

    def watch(operation: Operation) -> None:
        if len(done) == crash_at:
            raise Crash(operation)
        done.append(operation)

    sync = os.fsync

    def fsync(fd: int) -> None:
        watch(("fsync", Path(os.readlink(f"/proc/self/fd/{fd}")).name))
        sync(fd)

    _watch, os.fsync = watch, fsync
    try:
        yield done
    finally:
        _watch, os.fsync = None, sync


# --- Checkpoints made by hand -------------------------------------------------------------------

FILES = {"a.distcp": b"weights" * 100, "b.distcp": b"moments" * 50}


def write(root: Path, step: int) -> dict[str, dict[str, int]]:
    """step_X.partial as the ranks leave it; returns its sums."""
    partial = commit.partial_of(root, step)
    partial.mkdir(parents=True)
    for name, content in FILES.items():
        (partial / name).write_bytes(content + str(step).encode())
    return {name: commit.checksum(partial / name) for name in FILES}


def save(root: Path, step: int) -> Path:
    return commit.commit(root, step, write(root, step), {"samples": 8 * step})


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def sound(path: Path) -> bool:
    """Everything that the manifest lists is there, and it is of the step of its name."""
    manifest = commit.read_manifest(path)
    return not commit.verify(path, manifest["files"]) and path.name == commit.name_of(
        manifest["step"]
    )


def crashes(prepare: Callable[[], None], act: Callable[[], object]) -> Iterator[Operation]:
    """Run act() on a fresh disk, once for each of its operations, crashing there."""
    prepare()
    with watched() as operations:
        act()
    assert len(operations) > 2
    for k, operation in enumerate(operations):
        prepare()
        with pytest.raises(Crash), watched(crash_at=k):
            act()
        yield operation


# --- The protocol -------------------------------------------------------------------------------


def test_the_order_of_a_commit(tmp_path: Path) -> None:
    """Nothing is renamed before what it holds is durable, `latest` moves last."""
    sums = write(tmp_path, 7)
    with watched() as operations:
        commit.commit(tmp_path, 7, sums, {})
    manifest, link = f".manifest.json.{os.getpid()}.new", f".latest.{os.getpid()}.new"
    assert operations == [
        ("write", manifest),
        ("fsync", manifest),
        ("rename", "manifest.json"),
        ("fsync", "step_00000007.partial"),  # with it the entries of the ranks' files
        ("rename", "step_00000007"),
        ("fsync", tmp_path.name),
        ("remove", link),
        ("symlink", link),
        ("rename", "latest"),
        ("fsync", tmp_path.name),
    ]
    assert (tmp_path / "latest").readlink() == Path("step_00000007")


@pytest.mark.parametrize("again", [False, True], ids=["new-step", "step-that-is-there"])
def test_a_crash_anywhere_leaves_the_old_or_the_new(tmp_path: Path, again: bool) -> None:
    roots = (tmp_path / str(k) for k in range(100))
    root, sums = tmp_path, {}

    def prepare() -> None:
        nonlocal root, sums
        root = next(roots)
        old = save(root, 1)
        if again:
            save(root, 2)
            commit.point_latest(root, old.name)  # the user went back
        sums = write(root, 2)

    seen = set()
    for operation in crashes(prepare, lambda: commit.commit(root, 2, sums, {})):
        newest = commit.latest(root)
        assert newest is not None and sound(newest), operation
        seen.add(newest.name)
        commit.clean(root)
        assert all(map(sound, commit.complete(root))), operation
        assert commit.complete(root)[0] == newest, operation
        assert all(name == "latest" or commit.COMPLETE.fullmatch(name) for name in names(root))
        save(root, 2)  # the run comes to this step once more
        commit.clean(root)
        assert names(root) == ["latest", "step_00000001", "step_00000002"], operation
        assert commit.latest(root) == root / "step_00000002" and sound(root / "step_00000002")
    assert seen == {"step_00000001", "step_00000002"}


def test_a_crash_while_old_ones_are_deleted(tmp_path: Path) -> None:
    roots = (tmp_path / str(k) for k in range(100))
    root = tmp_path

    def prepare() -> None:
        nonlocal root
        root = next(roots)
        for step in (1, 2, 3):
            save(root, step)

    for operation in crashes(prepare, lambda: commit.prune(root, 1, 0)):
        commit.clean(root)
        left = commit.complete(root)
        assert left[0] == root / "step_00000003" and all(map(sound, left)), operation
        commit.prune(root, 1, 0)
        assert names(root) == ["latest", "step_00000003"]


def test_write_atomic_shows_the_old_text_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "status.json"

    def prepare() -> None:
        path.write_text("old")

    seen = {path.read_text() for _ in crashes(prepare, lambda: commit.write_atomic(path, "new"))}
    assert seen == {"old", "new"}


# --- What is found ------------------------------------------------------------------------------


def test_nothing_there(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "never-made"):
        assert commit.latest(root) is None and commit.complete(root) == []
        assert commit.clean(root) == []


def test_latest_first_then_from_new_to_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a relative path, as run.dir mostly is, and through a link, as to a scratch disk."""
    for step in (5, 10, 100_000_000, 20):
        save(tmp_path / "real", step)
    commit.point_latest(tmp_path / "real", "step_00000010")
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    for root in (tmp_path / "real", Path("real"), Path("link")):
        order = [int(path.name[5:]) for path in commit.complete(root)]
        assert order == [10, 100_000_000, 20, 5]
        assert commit.latest(root) == root / "step_00000010"


@pytest.mark.parametrize("target", ["step_00000009", "nowhere", "../elsewhere/step_00000001"])
def test_a_latest_that_leads_nowhere_is_passed_over(tmp_path: Path, target: str) -> None:
    root = tmp_path / "checkpoints"
    (tmp_path / "elsewhere").mkdir()
    for step in (2, 3):
        save(root, step)
    (root / "latest").unlink()
    (root / "latest").symlink_to(target)
    assert commit.latest(root) is None
    assert [path.name for path in commit.complete(root)] == ["step_00000003", "step_00000002"]
    save(root, 4)
    assert commit.latest(root) == root / "step_00000004"


def test_a_copy_that_followed_the_link(tmp_path: Path) -> None:
    save(tmp_path, 3)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / commit.MANIFEST).write_text("{}")
    assert [path.name for path in commit.complete(tmp_path)] == ["step_00000003"]
    save(tmp_path, 4)
    assert names(tmp_path) == ["latest", "latest.copied", "step_00000003", "step_00000004"]
    assert commit.latest(tmp_path) == tmp_path / "step_00000004"


def test_clean_removes_leftovers_alone(tmp_path: Path) -> None:
    save(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / ".latest.7.new").symlink_to("step_00000002")
    (tmp_path / "step_00000000.deleted").mkdir()
    (tmp_path / "step_00000003.corrupt").mkdir()
    left = [".latest.7.new", "step_00000000.deleted", "step_00000002.partial"]
    assert commit.clean(tmp_path) == left
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000003.corrupt"]


# --- Damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "word"), [("cut", "bytes"), ("flip", "crc32"), ("remove", "No such file")]
)
def test_verify_names_the_file_and_what_is_wrong(tmp_path: Path, damage: str, word: str) -> None:
    path = save(tmp_path, 1)
    assert sound(path)
    shard = path / "b.distcp"
    content = bytearray(shard.read_bytes())
    content[17] ^= 1
    if damage == "remove":
        shard.unlink()
    else:
        shard.write_bytes(content if damage == "flip" else content[:-1])
    (wrong,) = commit.verify(path, commit.read_manifest(path)["files"])
    assert "b.distcp" in wrong and word in wrong


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": 99, "files": {}}', '{"format": 1, "files": []}']
)
def test_a_damaged_manifest_is_a_value_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest\.json"):
        commit.read_manifest(tmp_path)


def test_set_aside_twice_keeps_both(tmp_path: Path) -> None:
    for expected in ("step_00000001.corrupt", "step_00000001.corrupt.1"):
        assert commit.set_aside(save(tmp_path, 1)).name == expected
    assert commit.complete(tmp_path) == [] and commit.latest(tmp_path) is None
    assert names(tmp_path) == ["latest", "step_00000001.corrupt", "step_00000001.corrupt.1"]


def test_the_manifest_lists_every_file(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 3 and manifest["samples"] == 24 and manifest["format"] == 1
    assert {*manifest["files"], "manifest.json"} == set(os.listdir(path))


# --- Retention ----------------------------------------------------------------------------------


def kept(root: Path, keep_last_n: int, keep_every: int) -> list[int]:
    commit.prune(root, keep_last_n, keep_every)
    return sorted(int(path.name[5:]) for path in commit.complete(root))


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    for step in range(1, 11):
        save(tmp_path, step)
    return tmp_path


@pytest.mark.parametrize(
    ("last", "every", "expected"), [(1, 0, [10]), (3, 0, [8, 9, 10]), (2, 4, [4, 8, 9, 10])]
)
def test_the_newest_and_the_multiples_stay(
    ten: Path, last: int, every: int, expected: list[int]
) -> None:
    assert kept(ten, last, every) == expected


def test_latest_stays_when_it_is_old(ten: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit.point_latest(ten, "step_00000002")
    monkeypatch.chdir(ten.parent)
    assert kept(Path(ten.name), 1, 0) == [2]


def test_one_that_is_read_stays(ten: Path) -> None:
    with commit.reading(ten / "step_00000004"):
        assert kept(ten, 1, 0) == [4, 10]
    assert kept(ten, 1, 0) == [10]


def test_one_that_cannot_be_deleted_does_not_spoil_the_save(
    ten: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(commit, "remove", refuse)
    assert kept(ten, 9, 0) == list(range(1, 11))
    monkeypatch.undo()
    assert kept(ten, 9, 0) == list(range(2, 11))  # the next save tries again


def test_one_without_a_manifest_can_be_held_for_reading(tmp_path: Path) -> None:
    """Who reads it finds the manifest missing; holding it must not be what fails."""
    with commit.reading(tmp_path):
        assert not commit.is_read(tmp_path)
