"""Files that are never seen half-written, and JSONL that a crash has torn."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from kempner.jobs.system.files import (
    end_torn_line,
    step_of_name,
    swap_link,
    write_atomic,
)
from kempner.jobs.system.reading import open_regular, read_jsonl


def test_what_is_not_a_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    """A FIFO that nobody writes to would keep its reader for ever."""
    os.mkfifo(tmp_path / "fifo")
    for name, error in (("fifo", OSError), (".", IsADirectoryError), ("none", FileNotFoundError)):
        with pytest.raises(error):
            open_regular(str(tmp_path / name), os.O_RDONLY)
    assert read_jsonl(tmp_path / "fifo") == []


def test_text_bytes_and_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = ("text é", b"bytes", lambda file: file.write(b"written"))
    for content, expected in zip(contents, ("text é", "bytes", "written"), strict=True):
        write_atomic(path, content)  # type: ignore[arg-type]
        assert path.read_text() == expected
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("where", ["write", "fsync"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def half(file: BinaryIO) -> None:
        file.write(b"new")
        full()

    if where == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'$"):
        write_atomic(path, half if where == "write" else "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("what", ["file", "link", "fifo"])
def test_what_has_the_name_of_the_new_file_is_not_written_to(tmp_path: Path, what: str) -> None:
    """A killed process of this number left a file; another user may have made the rest: the write
    into a FIFO never ended."""
    path, elsewhere = tmp_path / "file", tmp_path / "elsewhere"
    elsewhere.write_text("old")

    def act() -> None:
        fresh = tmp_path / f".file.{threading.get_native_id()}.new"
        {"file": lambda: os.link(elsewhere, fresh), "link": lambda: fresh.symlink_to(elsewhere),
         "fifo": lambda: os.mkfifo(fresh)}[what]()  # fmt: skip
        write_atomic(path, "new")

    within(10, act)
    assert path.read_text() == "new" and not path.is_symlink()
    assert elsewhere.read_text() == "old" and len(os.listdir(tmp_path)) == 2


def within(seconds: float, act: Callable[[], object]) -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (act(), ended.set()), daemon=True).start()
    assert ended.wait(seconds)


def test_a_link_is_swapped(tmp_path: Path) -> None:
    for target in ("one", "two"):
        swap_link(tmp_path / "latest", target)
        assert os.readlink(tmp_path / "latest") == target
    assert os.listdir(tmp_path) == ["latest"]


def test_step_of() -> None:
    names = ("step_00000100", "step_123456789", "step_00000100.partial", "latest", "step_1")
    assert [step_of_name(name) for name in names] == [100, 123456789, None, None, None]


def test_torn_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert read_jsonl(path) == []
    path.write_bytes(b'{"a": 1}\n{"to\n[]\n\xff\n{"b": 2}\n{"c": ')
    assert read_jsonl(path) == [{"a": 1}, {"b": 2}]
    assert read_jsonl(path, tail=18) == [{"b": 2}]
    assert read_jsonl(path, tail=10**6) == [{"a": 1}, {"b": 2}]
    path.write_text('{"a": 1}\n' + "[" * 10**5 + '\n{"b": 2}\n')  # deeper than Python reads
    assert read_jsonl(path) == [{"a": 1}, {"b": 2}]


def test_a_torn_line_is_ended_and_swallows_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    end_torn_line(path)
    assert not path.exists()
    for text, expected in (("", ""), ('{"a": 1}\n', '{"a": 1}\n'), ('{"a"', '{"a"\n')):
        path.write_text(text)
        end_torn_line(path)
        assert path.read_text() == expected


def test_two_threads_write_the_same_file(tmp_path: Path) -> None:
    """Each time it is what one of them has written, and neither fails."""
    path = tmp_path / "file"
    errors: list[OSError] = []

    def write(text: str) -> None:
        for _ in range(200):
            try:
                write_atomic(path, text)
            except OSError as error:
                errors.append(error)

    threads = [threading.Thread(target=write, args=(text,)) for text in ("a" * 99, "b" * 99)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and path.read_text() in ("a" * 99, "b" * 99)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
