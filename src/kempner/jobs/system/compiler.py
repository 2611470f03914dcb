"""Requirements of compilation on a host, and the place of compiled kernels. For a CPU torch.compile
writes C++; for a GPU Triton builds a C module at its first kernel. No torch.

The compiler is CXX or g++ in torch/_inductor/cpp_builder.py of torch 2.13, and CC, gcc or clang in
triton/runtime/build.py of Triton 3.7. Both include Python.h.
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kempner.config.option import ConfigError
from kempner.jobs.ranks.own_device import gpu_on_the_bus
from kempner.jobs.system import private

CACHE = "TORCHINDUCTOR_CACHE_DIR"  # Triton's is inside it
HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"

OFF = "or set train.compile=false"
COMPILERS = {
    "cpu": ("a C++ compiler", "CXX", ("g++",)),
    "cuda": ("a C compiler", "CC", ("gcc", "clang")),
}


def missing_compiler(
    device: str,
    env: Mapping[str, str] = os.environ,
    option: str = "train.compile",
    off: str = OFF,
) -> str | None:
    """Return what this host lacks to compile for `device` (cpu or cuda), as `option` requests, and
    the fix; None if nothing is missing."""
    host = socket.gethostname()
    compiler, variable, names = COMPILERS[device]
    needs = f"{option} on a {'GPU' if device == 'cuda' else 'CPU'} needs"
    setting, path = env.get(variable), env.get("PATH")
    if setting is not None and not shutil.which(setting, path=path):
        return (
            f"{needs} {compiler}, and {variable}={setting} is not a program on {host}: "
            f"unset {variable}, or set it to one that exists, {off}"
        )
    if setting is None and not any(shutil.which(name, path=path) for name in names):
        return (
            f"{needs} {compiler}, and {host} has no {' or '.join(names)}: load one "
            "before the job is submitted (module load gcc), use a container with one "
            f"(KEMPNER_CONTAINER), {off}"
        )
    header = Path(_include(), "Python.h")
    if not header.is_file():
        return (
            f"{needs} the headers of Python, and {host} has no {header}: "
            "install python3-dev (python3-devel), use a Python that has them, such as uv's or "
            f"conda's (KEMPNER_PYTHON), {off}"
        )
    return None


def problems_of_node(kind: str) -> list[str]:
    """List what this host, if a node of the job, lacks to compile for distributed.device `kind`."""
    device = _compiles_for(kind)
    text = missing_compiler(device) if device else None
    return [text] if text else []


def warn_of_nodes(kind: str) -> None:
    """Warn of what the job's nodes may lack; on such a node problems_of_node() has checked."""
    if _compiles_for(kind):
        return
    if text := missing_compiler("cpu" if kind == "cpu" else "cuda"):
        print(f"warning: {text}; the nodes of a job may have what this host lacks", file=sys.stderr)


def _compiles_for(kind: str) -> str | None:
    """Return the device that this host compiles for, cpu or cuda; None if not a node of the job."""
    if kind != "cpu" and gpu_on_the_bus():
        return "cuda"
    # Not SLURM_JOB_ID: salloc's shell may run on a login node.
    return "cpu" if kind != "cuda" and "SLURMD_NODENAME" in os.environ else None


def _include() -> str:
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's scheme, which has no headers
        scheme = "posix_prefix"
    return sysconfig.get_path("include", scheme)


def require_compiler(device: str) -> None:
    """Raise ConfigError if this process would fail in its first step, on every node."""
    if text := missing_compiler(device):
        raise ConfigError(text)


def keep_private() -> None:
    """Set a private cache for compiled code, unless the user has set one. Call it before
    torch.compile: torch's default, /tmp/torchinductor_USER, belongs to whoever creates it first,
    and torch runs the code that it finds there.
    """
    # Precompiled headers ignore the cache directory and would still be in /tmp.
    os.environ[HEADERS] = "0"
    torch = sys.modules.get("torch")
    # torch 2.9 does not read that variable, torch 2.13 does; versions between are untested.
    if torch and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        importlib.import_module("torch._inductor.config")
    if config := sys.modules.get("torch._inductor.config"):  # it has read its environment
        config.cpp_cache_precompile_headers = False  # type: ignore[attr-defined]
    if CACHE in os.environ:
        return
    place = Path(tempfile.gettempdir(), f"kempner-compiled-{os.getuid()}")
    try:
        private.make_private(place)
    except OSError:  # another user was first
        place = Path(tempfile.mkdtemp(prefix="kempner-compiled-"))
        atexit.register(shutil.rmtree, place, ignore_errors=True)
    os.environ[CACHE] = str(place)
