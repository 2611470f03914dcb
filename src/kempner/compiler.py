"""What a host must have to compile for its GPUs, because Triton makes a module of C at its first
kernel; and where compiled kernels are kept. No torch.

As triton/runtime/build.py of Triton 3.7 looks for it: the compiler is CC, gcc or clang, and the
module includes Python.h.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kempner import private
from kempner.config.option import ConfigError

CACHE = "TORCHINDUCTOR_CACHE_DIR"  # Triton's is inside it
HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"

OFF = "or set train.compile=false"


def lacking(env: Mapping[str, str] = os.environ) -> str | None:
    """What this host lacks, and what to do about it; None when it has all."""
    host = socket.gethostname()
    given, path = env.get("CC"), env.get("PATH")
    if given is not None and not shutil.which(given, path=path):
        return (
            f"train.compile on a GPU needs a C compiler, and CC={given} is no program on {host}: "
            f"unset CC, or set it to one that is there, {OFF}"
        )
    if given is None and not any(shutil.which(name, path=path) for name in ("gcc", "clang")):
        return (
            f"train.compile on a GPU needs a C compiler, and {host} has no gcc or clang: load one "
            "before the job is submitted (module load gcc), take a container with one "
            f"(KEMPNER_CONTAINER), {OFF}"
        )
    header = Path(_include(), "Python.h")
    if not header.is_file():
        return (
            f"train.compile on a GPU needs the headers of Python, and {host} has no {header}: "
            "install python3-dev (python3-devel), take a Python that has them, such as uv's or "
            f"conda's (KEMPNER_PYTHON), {OFF}"
        )
    return None


def _include() -> str:
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's own, under which it installs no headers
        scheme = "posix_prefix"
    return sysconfig.get_path("include", scheme)


def need(compiles: bool) -> None:
    """Raises ConfigError where this process would fail in its first step, on every node."""
    if compiles and (text := lacking()):
        raise ConfigError(text)


def keep_private() -> None:
    """Call it before torch.compile: torch's own place, /tmp/torchinductor_USER, is of whoever makes
    it first, and torch runs what it finds there. A place that the user has named stays.
    """
    # Precompiled headers would be there all the same, wherever the rest is.
    os.environ[HEADERS] = "0"
    if config := sys.modules.get("torch._inductor.config"):  # it has read its environment
        config.cpp_cache_precompile_headers = False  # type: ignore[attr-defined]
    if CACHE in os.environ:
        return
    place = Path(tempfile.gettempdir(), f"kempner-compiled-{os.getuid()}")
    try:
        private.make(place)
    except OSError:  # somebody else was here first
        place = Path(tempfile.mkdtemp(prefix="kempner-compiled-"))
        atexit.register(shutil.rmtree, place, ignore_errors=True)
    os.environ[CACHE] = str(place)
