"""Entry and exit of this kit's programs: one clear error instead of a traceback, a quiet end by
Ctrl-C or a closed pipe, and the right exit code. No torch.

    if __name__ == "__main__":
        run_program(main)
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

BAD_INPUT_EXIT = 2
INTERRUPTED = 128 + signal.SIGINT
CLOSED_PIPE = 128 + signal.SIGPIPE
STREAMS = ("stdin", "stdout", "stderr")
FIXES = {
    errno.ENOSPC: "make room there, or name another place",
    errno.EDQUOT: "make room there, or name another place",
    errno.EACCES: "change its permissions, or name another path",
    errno.EPERM: "change its permissions, or name another path",
    errno.EROFS: "name a path that is not mounted read-only",
    errno.ENOENT: "correct the path",
    errno.ENOTDIR: "correct the path",
    errno.EISDIR: "name a file",
    errno.EIO: "check the file system",
    errno.ESTALE: "check the file system",
}
ANSWER = "kempner-answer"  # precedes output for a batch script: a wrapper may print text before it


class BadPortRange(OSError):
    """An invalid port range. `strerror` has the problem and the fix."""

    strerror: str


class NoFreePort(OSError):
    """All ports of the range are taken. `strerror` has the problem and the fix."""

    strerror: str


def begin_program() -> None:
    """Prepare the process; call this first. Afterwards Ctrl-C ends the process quietly, even during
    an import, unless the program calls interruptible(), and all three standard streams are open.

    A file opened while one of their descriptors is closed would get its number, and all the output
    printed there.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < len(STREAMS):
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name in enumerate(STREAMS):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w"))
    for stream in (sys.stdout, sys.stderr):  # file names may be invalid text
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def interruptible() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from here on, for a report or a clean-up."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_program(
    main: Callable[[list[str]], int | None],
    name: str = "",
    leave: Callable[[int], NoReturn] = sys.exit,
) -> NoReturn:
    """Exit with the code of `main`, called with the arguments (None: 0). Bad input and file system
    errors give one message and exit code 2, no free port one message and 1; any other exception is
    a bug of ours and keeps its traceback."""
    begin_program()
    code = exit_code(main, sys.argv[1:], name or Path(sys.argv[0]).stem)
    _flush_or_drop()
    leave(code)


def run_module(
    main: Callable[..., int | None], usage: str | None, least: int, most: int = 0
) -> NoReturn:
    """Call run_program() for a module that a script starts with `least` to `most` arguments."""
    # Not at the top: Ray's parts import this module with only the standard library, and
    # configurations need tomli on Python 3.10.
    from kempner.config.option import ConfigError

    def act(words: list[str]) -> int | None:
        if words in (["--help"], ["-h"]):
            print(usage)
            return 0
        if not least <= len(words) <= max(least, most):
            raise ConfigError(f"{len(words)} arguments, not {least}; --help says which")
        return main(*words)

    run_program(act)


def exit_code(main: Callable[[list[str]], int | None], words: list[str], name: str) -> int:
    """Return the exit code of `main`, or of its exception, after reporting it."""
    from kempner.config.option import ConfigError

    try:
        code = main(words) or 0
        sys.stdout.flush()
    except ConfigError as error:
        return print_problems(name, error.problems)
    except NoFreePort as error:  # the next start may find a free one
        print_problems(name, [error.strerror])
        return 1
    except OSError as error:
        return (
            CLOSED_PIPE
            if _is_closed_pipe(error)
            else print_problems(name, [explain_os_error(error)])
        )
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def print_problems(name: str, problems: Sequence[str]) -> int:
    """Report problems with the input on standard error. Returns the exit code."""
    text = problems[0] if len(problems) == 1 else list_problems(problems)
    print(f"{name}: error: {text}", file=sys.stderr, flush=True)
    return BAD_INPUT_EXIT


def list_problems(problems: Sequence[str]) -> str:
    """Format the number of problems and a line for each."""
    count = len(problems)
    return "\n  - ".join([f"{count} problem{'s' * (count > 1)} with the input", *problems])


def explain_os_error(error: OSError) -> str:
    """Format the path, the error and the fix."""
    path = error.filename2 or error.filename
    if error.errno == errno.ENOENT and path is None:  # only of os.getcwd()
        return "the current directory is gone; cd to one that exists"
    where = f"{path}: " if path else ""
    free = f" ({_free(path):,} bytes are free)" if error.errno == errno.ENOSPC and path else ""
    fix = FIXES.get(error.errno or 0)
    return f"{where}{error.strerror or error}{free}{f'; {fix}' if fix else ''}"


def read_text(path: Path, option: str) -> str:
    """Read a file that an option names. Raises ConfigError naming both."""
    from kempner.config.option import ConfigError

    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {explain_os_error(error)}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{option} {path}: is not UTF-8 text; save it as UTF-8") from None


def how_to_run(script: str) -> str:
    """Return the command that starts a program of scripts/, with Python as the user typed it."""
    place = os.path.dirname(sys.argv[0])
    if not os.path.isfile(os.path.join(place, script)):
        place = "scripts"
    return f"{sys.orig_argv[0]} {os.path.join(place, script)}"


def _free(path: str | bytes | int) -> int:
    """Return the free bytes for a file there."""
    there = Path(os.fsdecode(path) if not isinstance(path, int) else "").absolute()
    while not there.is_dir():
        there = there.parent
    stats = os.statvfs(there)
    return stats.f_bavail * stats.f_frsize


def _is_closed_pipe(error: OSError) -> bool:
    """Return whether the reader of our standard output has left, not that of another pipe."""
    import select

    if not isinstance(error, BrokenPipeError):
        return False
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _flush_or_drop() -> None:
    """Flush standard output; drop unread text, for which Python's exit would print an error."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
