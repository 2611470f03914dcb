"""The commit protocol: a crash at any operation, retention, and what is found again at a start."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kempner.checkpoint import commit, history, ownership
from kempner.checkpoint.ownership import claim_directory
from kempner.config.option import ConfigError
from kempner.jobs.system.directories import Kind, mark_directory, read_mark
from kempner.jobs.system.files import name_of_step, step_of_name
from kempner.train.recording.contents import run_id

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

TEXTS = {"config.toml": b"[model]", "tensors.json": b"{}"}


def write(root: Path, step: int) -> None:
    """step_X.partial as the ranks leave it."""
    folder = commit.partial_of(root, step) / "ranks-000"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"weights" * 100 + str(step).encode())


def save(root: Path, step: int, parent: int | None = None) -> Path:
    write(root, step)
    facts = {"samples": 8 * step, "parent": step - 1 if parent is None else parent}
    return commit.commit_save(root, step, TEXTS, facts)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def sound(path: Path) -> bool:
    """Everything is there, and it is of the step of its name."""
    manifest = history.read_manifest(path)
    for name in manifest["files"]:
        history.read_listed(path, manifest, name)
    data = (path / "ranks-000" / "__0_0.distcp").read_bytes()
    return data.endswith(str(manifest["step"]).encode()) and path.name == name_of_step(
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
    """Nothing is renamed before what it holds is durable, and `latest` moves last."""
    write(tmp_path, 7)
    with watched() as operations:
        commit.commit_save(tmp_path, 7, TEXTS, {})
    new = {name: f".{name}.{os.getpid()}.new" for name in (*TEXTS, "manifest.json", "latest")}

    def whole(name: str) -> list[Operation]:
        written = [("write", new[name]), ("fsync", new[name]), ("rename", name)]
        return [*written, ("fsync", "step_00000007.partial")]

    assert operations == [
        *whole("config.toml"),
        *whole("tensors.json"),
        ("fsync", "ranks-000"),  # with it the entries of the ranks' files
        *whole("manifest.json"),
        ("rename", "step_00000007"),
        ("fsync", tmp_path.name),
        ("remove", new["latest"]),
        ("symlink", new["latest"]),
        ("rename", "latest"),
        ("fsync", tmp_path.name),
    ]
    assert (tmp_path / "latest").readlink() == Path("step_00000007")


@pytest.mark.parametrize("again", [False, True], ids=["new-step", "step-that-is-there"])
def test_a_crash_anywhere_leaves_the_old_or_the_new(tmp_path: Path, again: bool) -> None:
    roots = (tmp_path / str(k) for k in range(100))
    root = tmp_path

    def prepare() -> None:
        nonlocal root
        root = next(roots)
        old = save(root, 1)
        if again:
            save(root, 2)
            commit.point_latest(root, old.name)  # the user went back
        write(root, 2)

    seen = set()
    for operation in crashes(prepare, lambda: commit.commit_save(root, 2, TEXTS, {})):
        newest = history.latest_checkpoint(root)
        assert newest is not None and sound(newest), operation
        seen.add(newest.name)
        commit.clean_leftovers(root)
        assert all(map(sound, history.complete_checkpoints(root))), operation
        assert history.complete_checkpoints(root)[0] == newest, operation
        assert all(name == "latest" or step_of_name(name) for name in names(root))
        save(root, 2)  # the run comes to this step once more
        commit.clean_leftovers(root)
        assert names(root) == ["latest", "step_00000001", "step_00000002"], operation
        assert history.latest_checkpoint(root) == root / "step_00000002" and sound(
            root / "step_00000002"
        )
    assert seen == {"step_00000001", "step_00000002"}


def test_a_crash_while_old_ones_are_deleted(tmp_path: Path) -> None:
    roots = (tmp_path / str(k) for k in range(100))
    root = tmp_path

    def prepare() -> None:
        nonlocal root
        root = next(roots)
        for step in (1, 2, 3):
            save(root, step)

    for operation in crashes(prepare, lambda: commit.prune_checkpoints(root, 1, 0)):
        commit.clean_leftovers(root)
        left = history.complete_checkpoints(root)
        assert left[0] == root / "step_00000003" and all(map(sound, left)), operation
        commit.prune_checkpoints(root, 1, 0)
        assert names(root) == ["latest", "step_00000003"]


# --- What is found ------------------------------------------------------------------------------


def test_nothing_there(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "never-made"):
        assert history.latest_checkpoint(root) is None and history.complete_checkpoints(root) == []
        assert commit.clean_leftovers(root) == []


def test_latest_first_then_its_ancestors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a relative path, as run.dir mostly is, and through a link, as to a scratch disk."""
    for step in (5, 10, 20, 100_000_000):
        save(tmp_path / "real", step)
    commit.point_latest(tmp_path / "real", "step_00000020")
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    for root in (tmp_path / "real", Path("real"), Path("link")):
        order = [int(path.name[5:]) for path in history.complete_checkpoints(root)]
        assert order == [20, 10, 5, 100_000_000]  # the run went back behind the last one
        assert history.latest_checkpoint(root) == root / "step_00000020"


def test_the_history_is_walked_once(ten: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 does so after each save, while it holds the GIL."""
    for step in range(11, 41):
        save(ten, step, parent=9 if step == 11 else step - 1)  # it has gone back behind step 10
    real, calls = history._Commit.may_follow, []

    def counted(*both: Any) -> bool:
        calls.append(both)
        return real(*both)

    monkeypatch.setattr(history._Commit, "may_follow", counted)
    branch, others = history.run_branches(ten)
    assert [step_of_name(path.name) for path in branch] == [*range(40, 10, -1), *range(9, 0, -1)]
    assert others == [ten / "step_00000010"]
    assert len(calls) <= 40


@pytest.mark.parametrize("target", ["step_00000009", "nowhere", "../elsewhere/step_00000001"])
def test_a_latest_that_leads_nowhere_is_passed_over(tmp_path: Path, target: str) -> None:
    root = tmp_path / "checkpoints"
    (tmp_path / "elsewhere").mkdir()
    for step in (2, 3):
        save(root, step)
    (root / "latest").unlink()
    (root / "latest").symlink_to(target)
    assert history.latest_checkpoint(root) is None
    assert [path.name for path in history.complete_checkpoints(root)] == [
        "step_00000003",
        "step_00000002",
    ]
    save(root, 4)
    assert history.latest_checkpoint(root) == root / "step_00000004"


def test_a_copy_that_followed_the_link(tmp_path: Path) -> None:
    save(tmp_path, 3)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / history.MANIFEST).write_text("{}")
    assert [path.name for path in history.complete_checkpoints(tmp_path)] == ["step_00000003"]
    save(tmp_path, 4)
    assert names(tmp_path) == ["latest", "latest.copied", "step_00000003", "step_00000004"]
    assert history.latest_checkpoint(tmp_path) == tmp_path / "step_00000004"


def test_a_process_that_has_lost_the_run_moves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    write(tmp_path, 2)

    def check() -> None:
        raise Crash

    with pytest.raises(Crash):
        commit.commit_save(tmp_path, 2, TEXTS, {}, check=check)
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000002.partial"]
    assert history.latest_checkpoint(tmp_path) == tmp_path / "step_00000001"


def test_what_another_attempt_writes_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    """Of a rank 0 whose run another start goes on with, at the same step."""
    claim_directory(tmp_path, RUN)
    for attempt in ("7.0.99", "7.1.42.1"):
        commit.begin_save(tmp_path, 3, attempt)
    half = tmp_path / "step_00000003.7.1.42.1.partial/half"
    half.touch()
    commit.commit_save(tmp_path, 3, TEXTS, {"run": RUN, "parent": -1}, "7.0.99")
    assert half.exists() and not (tmp_path / "step_00000003/half").exists()
    commit.begin_save(tmp_path, 4)  # of an older version
    left = ["step_00000003.7.1.42.1.partial", "step_00000004.partial"]
    assert commit.clean_leftovers(tmp_path) == left
    assert names(tmp_path) == [".kempner", "latest", "step_00000003"]


def test_clean_removes_leftovers_alone(tmp_path: Path) -> None:
    save(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / ".latest.7.new").symlink_to("step_00000002")
    (tmp_path / "step_00000000.deleted").mkdir()
    (tmp_path / "step_00000003.corrupt").mkdir()
    left = [".latest.7.new", "step_00000000.deleted", "step_00000002.partial"]
    assert commit.clean_leftovers(tmp_path) == left
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000003.corrupt"]


RUN, OTHER = "a" * 32, "b" * 32


def others(root: Path) -> dict[str, str]:
    """Names like ours, of another program and of another run; returns their contents."""
    mark_directory(root / "step_00000009.partial", Kind.CHECKPOINT, OTHER)
    for name in (
        "mine.partial/weights", "old.deleted/weights", "x.new", ".latest.7.old", "step_7.partial",
        "step_00000005/weights", "step_00000006.partial/weights", "step_00000007.deleted/weights",
        "step_00000008.corrupt/weights",
    ):  # fmt: skip
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("mine")
    return contents(root)


def contents(root: Path) -> dict[str, str]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_text(errors="replace") for path in files}


def test_what_is_not_of_this_run_stays(tmp_path: Path) -> None:
    claim_directory(tmp_path, RUN)
    theirs = others(tmp_path)
    for step in (1, 2, 3):
        commit.begin_save(tmp_path, step)
        save(tmp_path, step)
    assert commit.clean_leftovers(tmp_path) == []
    commit.prune_checkpoints(tmp_path, 1, 0)
    assert theirs.items() <= contents(tmp_path).items()
    assert history.latest_checkpoint(tmp_path) == tmp_path / "step_00000003"
    assert not (tmp_path / "step_00000002").exists()
    for act in (
        lambda: commit.begin_save(tmp_path, 6),
        lambda: commit.begin_save(tmp_path, 9),
        lambda: save(tmp_path, 5),
    ):
        with pytest.raises(FileExistsError, match="is not this run's"):
            act()
    assert theirs.items() <= contents(tmp_path).items()


def test_a_killed_save_and_a_killed_deletion_are_known(tmp_path: Path) -> None:
    """At whatever moment: with the mark alone, and with what a version before the mark has left."""
    claim_directory(tmp_path, RUN)
    commit.begin_save(tmp_path, 1)
    (tmp_path / "step_00000002.partial").mkdir()  # killed before the mark
    write(tmp_path, 3)  # by an older version
    path = save(tmp_path, 4)
    commit.mark_for_deletion(path)
    (tmp_path / "step_00000004.deleted/manifest.json").unlink()
    names = ["step_00000001.partial", "step_00000002.partial", "step_00000003.partial"]
    assert commit.clean_leftovers(tmp_path) == [*names, "step_00000004.deleted"]


def test_a_directory_of_checkpoints_belongs_to_one_run(tmp_path: Path) -> None:
    root = tmp_path / "scratch"
    claim_directory(root, RUN)
    claim_directory(root, RUN)
    with pytest.raises(ConfigError, match=f"another run, .* .id {RUN}, this run has id {OTHER}"):
        claim_directory(root, OTHER)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"a directory of other files \(notes.txt\)"):
        claim_directory(tmp_path / "mine", RUN)


@pytest.mark.parametrize("killed", [False, True], ids=["saved", "killed in its first save"])
def test_a_directory_of_an_older_version_is_continued(tmp_path: Path, killed: bool) -> None:
    write(tmp_path, 7)
    if not killed:
        commit.commit_save(tmp_path, 7, TEXTS, {"run": RUN, "parent": -1})
        assert ownership.ownership_problems(tmp_path, OTHER)
    (tmp_path / "lock").write_text("{}")
    claim_directory(tmp_path, RUN)
    assert read_mark(tmp_path) == (Kind.CHECKPOINTS, RUN)
    assert commit.clean_leftovers(tmp_path) == (["step_00000007.partial"] if killed else [])


# --- Damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_small_file_is_compared_with_the_manifest(tmp_path: Path, damage: str) -> None:
    path = save(tmp_path, 1)
    file = path / "config.toml"
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(content if damage == "flip" else content[:-1])
    with pytest.raises(history.Damaged, match=r"config\.toml"):
        history.read_listed(path, history.read_manifest(path), "config.toml")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "2"}'])
def test_a_torn_manifest_is_damage(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(history.Damaged, match=r"manifest\.json"):
        history.read_manifest(tmp_path)


@pytest.mark.parametrize(("version", "word"), [(1, "older version"), (99, "newer version")])
def test_another_format_is_not_damage(tmp_path: Path, version: int, word: str) -> None:
    (tmp_path / "manifest.json").write_text(f'{{"format": {version}}}')
    with pytest.raises(ConfigError, match=f"{word}.*format {version}.*reads format 2"):
        history.read_manifest(tmp_path)


def test_an_error_of_the_disk_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_text", broken)
    with pytest.raises(OSError, match="Input/output error"):
        history.read_manifest(tmp_path)


def test_a_directory_that_cannot_be_read_is_not_an_empty_one(
    ten: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run would begin anew, as another one, and retention would delete its checkpoints."""

    def broken(*_: object, **more: object) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    run_id(ten)
    with monkeypatch.context() as patched:
        for name in ("is_dir", "exists"):  # they hide errors in Python 3.14
            patched.setattr(Path, name, lambda path: False)
        for name in ("listdir", "scandir"):
            patched.setattr(os, name, broken)
        patched.setattr(Path, "read_text", broken)
        for reads in (history.run_branches, run_id):
            with pytest.raises(OSError, match="Input/output error"):
                reads(ten)
    known = run_id(ten)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert run_id(ten) == known
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError):
        run_id(ten / "missing")
    assert history.run_branches(ten / "id") == ([], [])


def test_set_aside_twice_keeps_both(tmp_path: Path) -> None:
    for expected in ("step_00000001.corrupt", "step_00000001.corrupt.1"):
        assert commit.set_checkpoint_aside(save(tmp_path, 1)).name == expected
    assert (
        history.complete_checkpoints(tmp_path) == [] and history.latest_checkpoint(tmp_path) is None
    )
    assert names(tmp_path) == ["latest", "step_00000001.corrupt", "step_00000001.corrupt.1"]


def test_the_manifest_lists_the_small_files_alone(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 3 and manifest["samples"] == 24 and manifest["format"] == 2
    assert {*manifest["files"], "manifest.json", "ranks-000"} == set(os.listdir(path))


# --- Retention ----------------------------------------------------------------------------------


def kept(root: Path, keep_last_n: int, keep_every: int, powers_of_two: bool = False) -> list[int]:
    commit.prune_checkpoints(root, keep_last_n, keep_every, powers_of_two)
    return sorted(int(path.name[5:]) for path in history.complete_checkpoints(root))


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    claim_directory(tmp_path, "a")
    for step in range(1, 11):
        save(tmp_path, step)
    return tmp_path


def test_powers_of_two_stay(ten: Path) -> None:
    """And the model before any update. What the run has left by going back is kept, too."""
    save(ten, 0)
    assert kept(ten, 1, 0, powers_of_two=True) == [0, 1, 2, 4, 8]
    save(ten, 11, parent=2)  # it has gone back to step 2
    assert kept(ten, 1, 0, powers_of_two=True) == [0, 1, 2, 4, 8, 11]
    assert kept(ten, 1, 0) == [11]


@pytest.mark.parametrize(
    ("last", "every", "expected"), [(1, 0, [10]), (3, 0, [8, 9, 10]), (2, 4, [4, 8, 9, 10])]
)
def test_the_newest_and_the_multiples_stay(
    ten: Path, last: int, every: int, expected: list[int]
) -> None:
    assert kept(ten, last, every) == expected


def test_a_clock_that_is_behind_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of another host, on which the next attempt runs, or one that was set back."""
    claim_directory(tmp_path, "a")
    for step, now in ((1, 5000.0), (2, 6000.0), (3, 4000.0), (4, 4100.0)):
        monkeypatch.setattr(commit.time, "time", lambda now=now: now)
        save(tmp_path, step)
    assert kept(tmp_path, 3, 0) == [2, 3, 4]


def test_latest_stays_when_it_is_old(ten: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit.point_latest(ten, "step_00000002")
    monkeypatch.chdir(ten.parent)
    assert kept(Path(ten.name), 1, 0) == [2]


@pytest.mark.parametrize("saved_at", [7, 12], ids=["before-the-old-ones", "after-them"])
def test_a_branch_that_was_left_is_used_last_and_removed(ten: Path, saved_at: int) -> None:
    """`latest` was set back to step 5, and the run saved once more."""
    commit.point_latest(ten, "step_00000005")
    save(ten, saved_at, parent=5)
    order = [step_of_name(path.name) for path in history.complete_checkpoints(ten)]
    left = [step for step in (10, 9, 8, 7, 6) if step != saved_at]
    assert order == [saved_at, 5, 4, 3, 2, 1, *left]
    commit.set_checkpoint_aside(ten / name_of_step(saved_at))  # it is damaged: not the younger ones
    assert history.complete_checkpoints(ten)[0] == ten / "step_00000005"
    commit.point_latest(ten, "step_00000005")
    save(ten, saved_at + 1, parent=5)
    assert kept(ten, 2, 0) == [5, saved_at + 1]


def test_a_checkpoint_that_is_made_again_replaces_the_old_one(ten: Path) -> None:
    commit.point_latest(ten, "step_00000005")
    save(ten, 8, parent=5)
    assert history.run_branches(ten)[0][:2] == [ten / "step_00000008", ten / "step_00000005"]
    assert (ten / "step_00000008.deleted").is_dir()  # deleted after the commit, not within
    assert kept(ten, 1, 0) == [8] and not list(ten.glob("*.deleted"))


def test_one_that_is_read_stays(ten: Path) -> None:
    with commit.reading_lock(ten / "step_00000004"):
        assert kept(ten, 1, 0) == [4, 10]
    assert kept(ten, 1, 0) == [10]


@pytest.mark.parametrize("how", [fcntl.LOCK_EX, fcntl.LOCK_SH], ids=["alone", "shared"])
def test_who_may_only_read_keeps_neither_readers_out_nor_checkpoints(ten: Path, how: int) -> None:
    """By a lock on the manifest, of each checkpoint, another user stopped every resume."""
    began = threading.Event()

    def read() -> None:
        with commit.reading_lock(ten / "step_00000010"):
            began.set()

    with contextlib.ExitStack() as held:
        for manifest in ten.glob("step_*/manifest.json"):
            fcntl.flock(held.enter_context(open(manifest)), how)
        threading.Thread(target=read, daemon=True).start()
        assert began.wait(10) and kept(ten, 1, 0) == [10]
    assert os.listdir(ten / commit.READING) == ["step_00000010"]


def test_nobody_else_can_open_a_lock(ten: Path) -> None:
    for _ in range(2):
        with commit.reading_lock(ten / "step_00000010"):
            assert stat.S_IMODE((ten / commit.READING).stat().st_mode) == 0o700
        (ten / commit.READING).chmod(0o755)  # chmod -R a+rX RUN


def test_who_cannot_make_a_lock_reads_all_the_same(ten: Path) -> None:
    """Of another user's run, or of a copy that is in no run: there nothing is left either."""
    (ten / commit.READING).touch()
    with commit.reading_lock(ten / "step_00000001"):
        assert kept(ten, 9, 0) == list(range(2, 11))
    copy = shutil.copytree(ten / "step_00000010", ten / "copies" / "step_00000010")
    with commit.reading_lock(copy):
        assert os.listdir(copy.parent) == [copy.name]


def test_one_that_cannot_be_deleted_does_not_spoil_the_save(
    ten: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(commit, "mark_for_deletion", refuse)
    assert kept(ten, 9, 0) == list(range(1, 11))
    monkeypatch.undo()
    assert kept(ten, 9, 0) == list(range(2, 11))  # the next save tries again


def test_one_without_a_manifest_can_be_held_for_reading(tmp_path: Path) -> None:
    """Who reads it finds the manifest missing; holding it must not be what fails."""
    with commit.reading_lock(tmp_path):
        assert not commit.is_read(tmp_path)
