"""torch.compile, for each block or for the whole model."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import platform
import re
import shutil
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kempner.config.option import ConfigError
from kempner.jobs.ranks.placement import World
from kempner.jobs.system.compiler import CACHE, keep_private
from kempner.jobs.this_job import host_name
from kempner.model.decoder import Decoder
from kempner.model.loss import chunk_loss
from kempner.parallel.single import AddUp, add_up

UNQUOTED = re.compile(r"""[\s"'\\]""")  # shlex.split() would not keep it unchanged


def compile_sum() -> AddUp:
    """Return add_up(), compiled: torch's own kernels convert element by element, and reach 0.4 of
    the memory bandwidth on an H200."""
    keep_private()
    kernel = torch.compile(add_up, dynamic=True, fullgraph=True)

    def compiled(total: Tensor | None, part: Tensor, dtype: torch.dtype) -> Tensor:
        if not part.is_contiguous() or not (total is None or total.is_contiguous()):
            return add_up(total, part, dtype)
        # One dimension: one kernel serves all matrices.
        flat: Tensor = kernel(None if total is None else total.view(-1), part.view(-1), dtype)
        return flat.view_as(part) if total is None else total

    return compiled


def compile_model(model: Decoder, scope: str, budget: float = 1.0) -> None:
    """Compile each block or the whole model. Call it before sharding, so that FSDP's hooks stay
    outside of compiled code.

    block: all blocks are alike and share one graph, compiled once, however deep the model is.
    model: one graph from the embedding to the last block, whose compile time grows with the depth.
    The loss of a chunk is a separate graph.

    `budget`: the share of its saved activations that a graph may keep for the backward pass; it
    recomputes those that cost the fewest FLOPs. Holds for everything that this process compiles.
    """
    from torch._functorch import config

    config.activation_memory_budget = budget
    # The compiler's remarks on a GPU do not apply: fp32 products must be exact, its choice is good.
    for remark in ("TensorFloat32 tensor cores", r"\s*Online softmax is disabled"):
        warnings.filterwarnings("ignore", remark)
    keep_private()
    # Not the loop over chunks, which the compiler would reorder until all logits exist at once.
    loss = functools.partial(model.loss, compiled=torch.compile(chunk_loss))  # type: ignore[call-arg]
    model.loss = torch.compiler.disable(loss)  # type: ignore[no-untyped-call]
    if scope == "model":
        model.compile()
        return
    for block in model.blocks:
        block.compile()


def expect_changes(model: Decoder, rows: bool, length: bool, documents: bool) -> None:
    """Mark which sizes of a batch [B, T] will change: B, T, the number of documents. One graph then
    serves all blocks in all steps from the first one on; otherwise the compiler specialises on the
    first sizes and recompiles when one of them first changes.

    Unmarked sizes are constants, which gives faster kernels. A single row (B = 1) always has a
    separate graph. Call it after sharding.
    """

    def mark(_: nn.Module, args: tuple[Any, ...]) -> None:
        x, rope, visible = args[:3]
        # maybe_: mark_dynamic() raises if a graph turns out to need one size.
        vary = torch._dynamo.maybe_mark_dynamic
        for tensor, row, *lengths in (
            (x, 0, 1),
            (rope, rope.ndim - 4, -2),
            (visible.mask, 0, 2, 3),
        ):
            if tensor is None:
                continue
            if length:
                vary(tensor, [at % tensor.ndim for at in lengths])
            # -1 if rows share their angles, which then have no row dimension. To the compiler a
            # size of 1 stays constant, even if marked.
            if rows and row >= 0 and tensor.shape[row] > 1:
                vary(tensor, row)
        if visible.starts is not None:
            vary(visible.starts, 0)

    for block in model.blocks:
        if (rows or length or documents) and block._compiled_call_impl is not None:
            # Registered after FSDP's own hooks, to mark the tensors that those return.
            hook = torch.compiler.disable(mark)  # type: ignore[no-untyped-call]
            block.register_forward_pre_hook(hook)


def keep_compiled(run_dir: Path, world: World) -> None:
    """Keep this host's compiled code in run_dir/.cache/compile for the run's next start there. Each
    host has its own directory, so that hosts do not wait for each other's locks; a host new to the
    run starts from a copy of another's. All ranks must call it.

    If the file system has no locks, or the path contains a blank, which torch does not quote for
    the C++ compiler, compiler.keep_private() chooses the place. Raises ConfigError if the user
    names another place that is not writable.
    """
    if CACHE in os.environ:
        try:
            Path(os.environ[CACHE]).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{CACHE} = {os.environ[CACHE]}: cannot be created: {error.strerror}; unset it, or "
                "name a directory that can be written"
            ) from None
        return
    own = _own_place(run_dir)
    usable = True
    # Also on rank 0 of a replica, which may begin in the middle of a host's ranks.
    if world.local_rank == 0 or world.rank == 0:
        usable = not UNQUOTED.search(str(own)) and _prepare(own)
    failure = torch.tensor(float(not usable))
    dist.all_reduce(failure)  # also a barrier: no rank compiles into the directory before it exists
    if not failure:
        os.environ[CACHE] = str(own)
    keep_private()


def forget_compiled(run_dir: Path) -> None:
    """Remove this host's compiled code for a run, after a compiler error: a damaged file would
    fail every start."""
    shutil.rmtree(_own_place(run_dir), ignore_errors=True)


def _own_place(run_dir: Path) -> Path:
    return run_dir / ".cache" / "compile" / f"{kind_of_cpu()}-{host_name()}"


def _prepare(own: Path) -> bool:
    try:
        if not own.is_dir():
            others = sorted(own.parent.glob(f"{own.name.split('-')[0]}-*"), key=os.path.getmtime)
            # Create under another name, then rename: a killed start leaves no partial cache.
            new_folder = own.with_name(f".{own.name}.new")
            shutil.rmtree(new_folder, ignore_errors=True)
            # The newest cache for this kind of CPU has most of what the run compiles.
            if others:
                shutil.copytree(others[-1], new_folder)
            else:
                new_folder.mkdir(parents=True)
            new_folder.rename(own)
        # Whoever can open a lock can hold it; torch's own locks are in there, too.
        own.chmod(0o700)
        lock = os.open(own / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # A trial: some parallel file systems are mounted without locks, which torch needs here.
        with open(lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, shutil.Error):
        return False
    return True


def kind_of_cpu() -> str:
    """Identify the CPU: compiled kernels are specific to its model."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return f"{zlib.crc32(line.encode()):08x}"
    return platform.machine()
