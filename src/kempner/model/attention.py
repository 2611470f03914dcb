"""Causal attention: which keys a query sees, and the kernel that computes it.

Shapes: B rows, T tokens, H query heads, K key-value heads, E head width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kempner.config.option import ConfigError
from kempner.model.config import ModelConfig

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

FLASH = (torch.bfloat16, torch.float16)  # dtypes of the flash kernels
FLASH_KERNELS = ("flash", "fa3", "fa4")  # one operator of torch: see flash.py


@dataclass(frozen=True)
class Documents:
    """Several documents packed into each row: a token sees only its own document."""

    index: Tensor  # int32 [B, T]: a token's document in its row; never decreases
    starts: Tensor  # int32 [N + 1]: starts in the flattened B * T tokens, then B * T
    positions: Tensor | None  # int64 [B, T]: from 0 in each document; None: from 0 in each row

    @classmethod
    def of(cls, index: Tensor, reset_positions: bool) -> Documents:
        """Build from `index` alone, on the CPU."""
        rows, length = index.shape
        # A row begins a document, too: documents do not continue in the next row.
        first = torch.ones_like(index, dtype=torch.bool)
        first[:, 1:] = index[:, 1:] != index[:, :-1]
        starts = torch.cat((first.flatten().nonzero().squeeze(1), torch.tensor([rows * length])))
        positions = None
        if reset_positions:
            begins = starts[:-1].repeat_interleave(starts.diff())
            positions = (torch.arange(rows * length) - begins).view(rows, length)
        return cls(index.int(), starts.int(), positions)

    def map(self, change: Callable[[Tensor], Tensor]) -> Documents:
        positions = None if self.positions is None else change(self.positions)
        return Documents(change(self.index), change(self.starts), positions)


@dataclass(frozen=True)
class Visible:
    """The attention pattern: which keys each query sees and how scores change. Built once per
    forward pass, for all layers."""

    window: int | None  # number of keys, including its own; None: all before it
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    starts: Tensor | None = None  # for varlen_attn: starts of the documents, or of the rows
    mask: Tensor | None = None  # bool [B or 1, 1, T, T], True: seen; if no kernel works without it
    blocks: BlockMask | None = None  # for flex_attention
    # The function of varlen_kernel() or compiled_flex(); obtained outside of compiled code, which
    # would trace their imports.
    kernel: Callable[..., Any] | None = None


def attention_pattern(
    tokens: Tensor,
    window: int | None,
    documents: Documents | None,
    dtype: torch.dtype,
    softcap: float | None = None,
    kernel: str = "auto",
) -> Visible:
    """Return the pattern for int64 tokens [B, T] and activations of `dtype`.
    `kernel`: see choose_kernel().

    Plain causal attention needs no tensors. On a GPU, documents and windows use the
    variable-length flash kernel, which skips keys that a query does not see; with capped scores,
    in fp32, or if torch lacks that kernel, they use flex_attention, which skips them too.
    Otherwise a dense T x T mask.
    """
    rows, length = tokens.shape
    # Such a window hides nothing; without it no mask or other kernel is needed.
    if window is not None and window >= length:
        window = None
    if window is None and documents is None and softcap is None:
        return Visible(None)
    device = tokens.device
    if device.type == "cuda" and kernel in ("auto", *FLASH_KERNELS):
        if softcap is None and dtype in FLASH and (varlen := varlen_kernel()) is not None:
            if documents is not None:
                return Visible(window, starts=documents.starts, kernel=varlen)
            ends = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device)
            return Visible(window, starts=ends, kernel=varlen)
        if kernel == "auto":
            from kempner.model.flex import block_mask, causal_blocks, compiled_flex

            flex = compiled_flex()[0]
            if documents is None:
                blocks = causal_blocks(length, window, device)
            else:
                blocks = block_mask(rows, length, window, documents.index, device)
            return Visible(window, softcap, blocks=blocks, kernel=flex)
    at = torch.arange(length, device=device)
    behind = at[:, None] - at  # [T, T]: how far a key lies behind its query
    is_visible = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
    mask = is_visible[None, None]
    if documents is not None:
        index = documents.index
        mask = mask & (index[:, None, :, None] == index[:, None, None, :])
    return Visible(window, softcap, mask=mask)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
    """Compute attention of q [B, H, T, E] over k and v [B, K, T, E]: [B, H, T, E]."""
    grouped = q.shape[1] != k.shape[1]
    if visible.blocks is not None:
        from kempner.model.flex import score_change

        change = None if visible.softcap is None else score_change(visible.softcap)
        assert visible.kernel is not None
        y: Tensor = visible.kernel(
            q, k, v, score_mod=change, block_mask=visible.blocks, enable_gqa=grouped
        )
        return y
    if visible.softcap is not None:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return capped_attention(q, k, v, visible.mask, visible.softcap)
    if visible.starts is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible.mask, is_causal=visible.mask is None, enable_gqa=grouped
        )
    rows, _, length, _ = q.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [B * T, heads, E]
    # The kernel counts only the keys before a query, not its own.
    left = -1 if visible.window is None else visible.window - 1
    flash, starts = visible.kernel, visible.starts
    assert flash is not None
    # Documents stay within a row, so T bounds their length without asking the device.
    y = flash(q, k, v, starts, starts, length, length, window_size=(left, 0), enable_gqa=grouped)
    return y.view(rows, length, *y.shape[1:]).transpose(1, 2)


@functools.cache
def varlen_kernel() -> Callable[..., Any] | None:
    """Return the flash kernel for sequences of different lengths; None if torch's version lacks
    windows. Imported on use: it imports the compiler, which would cost every start a second."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    has_arguments = {"window_size", "enable_gqa"} <= varlen_attn.__annotations__.keys()
    return varlen_attn if has_arguments else None


# --- Capped scores (Gemma 2, arXiv:2408.00118, section 2) ---


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, softcap: float
) -> Tensor:
    """Compute attention of q [..., N, E] over k and v [..., S, E] with scores softcap * tanh(s /
    softcap). `mask` [..., N, S]: bool, True where a key is seen, or added to the scores; None:
    all are seen."""
    scores = (q @ k.transpose(-2, -1)).float() / math.sqrt(q.shape[-1])
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1).type_as(v) @ v


# --- The choice of the kernel ---

KERNELS = {  # name in train.attention -> name in torch
    "cudnn": "CUDNN_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}


def choose_kernel(
    kernel: str, cfg: ModelConfig, tokens: Tensor, packed: bool, dtype: torch.dtype
) -> str:
    """Restrict scaled_dot_product_attention to `kernel` in this whole process; auto: any, in
    torch's order. Returns the one that runs for rows like `tokens` [B, T], with several documents
    if `packed`. Raises ConfigError if the chosen one cannot run."""
    cuda = torch.backends.cuda  # the CPU obeys the same switches
    # The switches are global and permanent: attention in every block obeys them.
    cuda.enable_cudnn_sdp(kernel in ("auto", "cudnn"))
    cuda.enable_flash_sdp(kernel in ("auto", *FLASH_KERNELS))
    cuda.enable_mem_efficient_sdp(kernel in ("auto", "efficient"))
    cuda.enable_math_sdp(kernel in ("auto", "math"))
    documents = Documents.of(tokens.cpu(), False) if packed else None
    if documents is not None:
        documents = documents.map(lambda x: x.to(tokens.device))
    visible = attention_pattern(
        tokens, cfg.sliding_window, documents, dtype, cfg.attention_softcap, kernel
    )
    for field, name in (("starts", "flash, by length"), ("blocks", "flex"), ("softcap", "math")):
        if getattr(visible, field) is not None:
            return name
    q, k = (
        torch.empty(
            (*tokens.shape[:1], heads, tokens.shape[1], cfg.resolved_head_dim),
            device=tokens.device,
            dtype=dtype,
            requires_grad=True,
        )
        for heads in (cfg.n_heads, cfg.kv_heads)
    )
    causal, grouped = visible.mask is None, cfg.n_heads != cfg.kv_heads
    try:
        # q and k require gradients: not every kernel has a backward pass for every shape.
        choice = torch._fused_sdp_choice(
            q, k, k, visible.mask, 0.0, is_causal=causal, enable_gqa=grouped
        )
    except RuntimeError:  # raised on a CPU; a GPU returns -1
        choice = -1
    names = {
        int(getattr(torch._C._SDPBackend, backend)): kernel_name
        for kernel_name, backend in KERNELS.items()
    }
    if choice not in names:
        what = "with a mask of documents or a window" if visible.mask is not None else "causal"
        raise ConfigError(
            f"train.attention = {kernel}: torch {torch.__version__} has no such kernel on this "
            f"{tokens.device.type} device for {dtype} {what}, {cfg.n_heads} heads over "
            f"{cfg.kv_heads} of width {cfg.resolved_head_dim}; leave it at auto"
        )
    return names[choice] + (", dense mask" if visible.mask is not None else "")
