"""Tensors that say that they are on a GPU and compute on the CPU.

Every read that makes the host wait is noted with the function of the kit that asks for it, and so
is every operator whose sums may differ from run to run; an operator that mixes devices, has no
kernel for CUDA, or makes numbers in fp16 is an error. What is copied to the host is there when an
event that was recorded later has been waited for.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torchgen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only

from tests.trainer.gpu_path.kernels import CPU, GPU, replaced

# They hand the host a value, or the size of what they return depends on values.
READS = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount",
    "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
    "multinomial", "allclose", "histc", "segment_reduce",
}  # fmt: skip
# Those of solvers ask cuSOLVER or MAGMA whether they have converged.
LINALG = re.compile(r"_?linalg_(?!vector_norm|cross|diagonal)")
# Of floats on CUDA in no certain order: torch.use_deterministic_algorithms lists them. It lists
# index_put, too; the one that adds, the gradient of x[index], sorts its places first.
UNORDERED = {
    "index_add", "scatter_add", "scatter_reduce", "cumsum", "put", "bincount", "histc", "kthvalue",
    "median", "index_copy", "_embedding_bag", "replication_pad2d_backward",
}  # fmt: skip
COPIES = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
NAMED = (Tensor.tolist, Tensor.numpy, Tensor.cpu)
YAML = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
waits: list[str] = []
unordered: list[str] = []
arriving: list[Callable[[], object]] = []  # copies to the host, which nobody has waited for


def note(what: str, notes: list[str] = waits) -> None:
    """With the kit's function that asked."""
    frame: Any = sys._getframe(1)
    while frame is not None and (
        "/kempner/" not in frame.f_code.co_filename
        or frame.f_code.co_name.startswith("<")  # a comprehension, a frame only before 3.12
    ):
        frame = frame.f_back
    code = frame.f_code if frame is not None else SimpleNamespace(co_filename="?", co_name="?")
    notes.append(f"{Path(code.co_filename).name}: {code.co_name}: {what}")


class Event:
    """In the place of torch.Event."""

    def __init__(self, device: str | None = None, **_: Any) -> None:
        assert device in (None, "cuda")
        self._before: list[Callable[[], object]] = []

    def record(self, *_: Any) -> None:
        self._before = list(arriving)

    def elapsed_time(self, end: Event) -> float:
        return 0.0

    def synchronize(self) -> None:
        note("synchronize")
        for arrive in self._before:
            if arrive in arriving:
                arriving.remove(arrive)
                arrive()


@contextlib.contextmanager
def synchronized() -> Iterator[None]:
    """What waits for all that a GPU, or a stream, has to do is noted."""

    places: list[Any] = [(torch, "Event", Event), (torch.cuda, "Event", Event)]
    for place in (torch.cuda, torch.accelerator, torch.cuda.Stream):
        places.append((place, "synchronize", lambda *_: note("synchronize")))
    with replaced(*places):
        yield


class Gpu(torch.Tensor):
    """`inner` holds the values."""

    inner: Tensor
    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> Gpu:
        made: Gpu = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), inner.stride(), inner.storage_offset(), dtype=inner.dtype
        )
        made.inner = inner
        return made

    def __init__(self, inner: Tensor) -> None:
        pass

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Gpu({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if (kwargs.get("device") or CPU).type == "cuda":
            kwargs["device"] = CPU
        check(func, args, kwargs)
        inner_args, inner_kwargs = tree_map_only(Gpu, lambda x: x.inner, (args, kwargs))
        out = func(*inner_args, **inner_kwargs)
        half = [x for x in tree_flatten(out)[0] if getattr(x, "dtype", None) is torch.float16]
        assert not half, f"{func}: fp16 ends at 65504"
        out = tree_map_only(Tensor, Gpu, out)
        return return_and_correct_aliasing(func, args, kwargs, out)


def check(func: Any, args: Any, kwargs: Any) -> None:
    name = func._schema.name.removeprefix("aten::")
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    others = [x for x in tensors if not isinstance(x, Gpu) and x.dim() > 0]
    assert not others, f"{func} of tensors on a GPU and of {others[0].shape} on the host"
    plain = name.strip("_").removesuffix("_impl")  # index_put of index_put_, _index_put_impl_
    picks = args[1] if plain in ("index", "index_put") else []
    # One number of the host is filled in where the mask is.
    fills = plain == "index_put" and args[2].numel() == 1 and not isinstance(args[2], Gpu)
    masks = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in picks)
    sized = name == "repeat_interleave" and kwargs.get("output_size") is None
    if masks and not fills:
        note("a mask as an index")
    elif sized or name in READS or LINALG.match(name):
        note(name)
    if plain in UNORDERED and any(x.is_floating_point() for x in tensors):
        note(name, unordered)
    if func.namespace == "aten":
        assert has_cuda_kernel(func), f"{func} has no kernel for CUDA"


@functools.cache
def native() -> dict[str, str]:
    """From native_functions.yaml, which every build of torch has: an operator's entry by name."""
    entries = re.split(r"^- func: ", YAML.read_text(), flags=re.MULTILINE)[1:]
    return {entry.partition("(")[0]: entry for entry in entries}


@functools.cache
def has_cuda_kernel(func: Any) -> bool:
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    name += f".{schema.overload_name}" if schema.overload_name else ""
    if torch.version.cuda:
        keys = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
        full = f"aten::{name}"
        return any(torch._C._dispatch_has_kernel_for_dispatch_key(full, key) for key in keys)
    entry = native().get(name)
    if entry is None:  # made by torchgen from another one
        return True
    if delegate := re.search(r"structured_delegate: (\S+)", entry):
        entry = native()[delegate[1]]
    if "dispatch:" not in entry or "ufunc_inner_loop:" in entry:
        return True  # of other operators
    keys = re.findall(r"^    ([\w, ]+):", entry.partition("dispatch:")[2], re.MULTILINE)
    return any(re.search(r"\bCUDA\b|\bComposite\w*", key) for key in keys)


def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, is_causal: bool = False, **_: Any
) -> Tensor:
    """Which of torch's kernels a GPU takes is not told here."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if is_causal:
        seen = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ v


class OnGpu(TorchFunctionMode):
    """Within it a device "cuda" is there: what is made on it is a Gpu."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.nn.functional.scaled_dot_product_attention:
            return attention(*args, **kwargs)
        if func is Tensor.backward:
            with self:  # what it computes again is seen, too
                engine = torch.autograd.graph._engine_run_backward
                return engine(
                    (args[0],), (torch.ones_like(args[0]),), False, False, (),
                    allow_unreachable=True, accumulate_grad=True,
                )  # fmt: skip
        mine = bool(args) and isinstance(args[0], Gpu)
        if func is Tensor.new_tensor and mine and kwargs.get("device") is None:
            kwargs = {"dtype": args[0].dtype, **kwargs, "device": GPU}
            func, args, mine = torch.tensor, args[1:], False
        if func is Tensor.cuda:
            how = {"non_blocking": kwargs.get("non_blocking", args[2:3] == (True,))}
            return self.move(args[0], GPU, **how)
        if func in NAMED and mine:
            note(func.__name__)
            return func(args[0].inner)
        if func in (Tensor.copy_, Tensor.to):
            return (self.copy if func is Tensor.copy_ else self.move)(*args, **kwargs)
        pinned, device = kwargs.pop("pin_memory", False), kwargs.get("device")
        there = device is not None and torch.device(device).type == "cuda"
        if there:
            kwargs["device"] = CPU
        out = func(*args, **kwargs)
        if pinned:
            out.pinned = True
        if there and isinstance(out, Tensor) and not isinstance(out, Gpu):
            if func in COPIES and not mine:
                note("from memory that is not pinned")
            return Gpu(out)
        return out

    def copy(self, to: Tensor, of: Tensor, non_blocking: bool = False) -> Tensor:
        if isinstance(to, Gpu) == isinstance(of, Gpu):
            return to.copy_(of)
        host = of if isinstance(to, Gpu) else to
        late = non_blocking and getattr(host, "pinned", False)
        if not late:
            note("copy_")
        with torch.no_grad():
            if late and isinstance(of, Gpu):
                arriving.append(functools.partial(to.copy_, of.inner.clone()))
                return to.fill_(torch.nan if to.is_floating_point() else 1)
            if isinstance(to, Gpu):
                to.inner.copy_(of)
            else:
                to.copy_(of.inner)  # type: ignore[attr-defined]
        return to

    def move(self, x: Tensor, *words: Any, non_blocking: bool = False, **named: Any) -> Tensor:
        words = (*words, *named.values())
        devices = [torch.device(w) for w in words if isinstance(w, torch.device | str)]
        dtypes = [w for w in words if isinstance(w, torch.dtype)]
        for dtype in dtypes:
            x = x.to(dtype)
        if not devices or (devices[0].type == "cuda") == isinstance(x, Gpu):
            return x
        if not (non_blocking and getattr(x, "pinned", False)):
            note("to")
        return x.inner if isinstance(x, Gpu) else Gpu(x)


def on_gpu(model: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """The model with its parameters, in `dtype`, and its buffers there."""
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            moved = nn.Parameter(Gpu(p.detach().to(dtype or p.dtype)), p.requires_grad)
            setattr(module, name, moved)
        for name, b in list(module.named_buffers(recurse=False)):
            setattr(module, name, Gpu(b))
    return model
