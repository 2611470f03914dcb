"""A step of one token for every active text, with as few torch calls as its mathematics allows and
in few shapes; on a GPU, one graph per shape, which the host starts with one call.

Shapes: as in cache.py, and V tokens of the vocabulary. The mathematics is that of Decoder, whose
weights become views of the joined weights: new values reach both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kempner.extensions.generate.config import Sampling
from kempner.extensions.generate.sampling import draw_rows, sample_tokens
from kempner.extensions.generate.weights_of_step import join_weights, turn_heads
from kempner.model.attention import capped_attention
from kempner.model.cache import CACHE_BLOCK, KVCache
from kempner.model.decoder import Block, Decoder
from kempner.model.feed_forward import FeedForward

if TYPE_CHECKING:
    from kempner.extensions.generate.compiled_step import CompiledBlock

Product = Callable[[Tensor], Tensor]
Filters = tuple[float, int | None, float, float]  # Sampling.filters
MOST_DRAWS = 32  # graphs of draws: each takes memory, and clients choose the filters


class TokenStep:
    """Logits of the next token of each row. Valid while weights change in value only."""

    def __init__(self, model: Decoder, cache: KVCache, compiled: bool = False) -> None:
        """`compiled`: fuse the kernels between the products, which takes seconds per shape."""
        self.model, self.cache = model, cache
        device, cfg = cache.keys.device, model.cfg
        self.blocks: list[PlainBlock | CompiledBlock]
        self.attend = self._attend
        if compiled:
            from kempner.extensions.generate.compiled_step import CompiledBlocks, compile_part

            shared = CompiledBlocks(device)
            self.blocks = [shared.of(block) or PlainBlock.of(block) for block in model.blocks]
            self.attend = compile_part(self._attend, device)
        else:
            self.blocks = [PlainBlock.of(block) for block in model.blocks]
        # Joined with nothing: on a CPU this stores the matrix by columns.
        join_weights([(model.embed if model.output is None else model.output).weight])
        self.pointers = weight_pointers(model)
        # Rotated by a roll, so the table holds the sign of the second half.
        cos, sin = model.rope
        half = cfg.resolved_head_dim // 2
        self.rope = torch.stack((cos, torch.cat((-sin[:, :half], sin[:, half:]), -1)))
        self.places = torch.arange(cache.length, device=device)
        # The first place of each row's heads in a layer's cache as a list of vectors, [slots, K].
        heads = torch.arange(cache.slots * cfg.kv_heads, device=device) * cache.length
        self.heads = heads.view(cache.slots, cfg.kv_heads)
        # The sizes in an expert layer depend on the tokens.
        self.uses_graphs = device.type == "cuda" and not cfg.n_experts
        self.by_shape: dict[tuple[int, int], StepGraph] = {}
        self.outputs: dict[int, Tensor] = {}  # logits of all graphs with so many rows
        self.draws: dict[tuple[int, Filters], DrawGraph] = {}
        self._last: tuple[Tensor, int]

    @property
    def is_valid(self) -> bool:
        """False when a weight has moved in memory."""
        return self.pointers == weight_pointers(self.model)

    def __call__(self, tokens: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Read the next token of each row; returns logits [B, V], which the next call overwrites.
        `lengths`: tokens that each row holds afterwards."""
        logits, rows = self._compute(tokens, lengths)
        self._last = logits[: len(tokens)], rows
        return self._last[0]

    def draw(
        self, samplings: Sequence[Sampling], uniforms: Sequence[float], size: int
    ) -> tuple[Tensor, Tensor]:
        """Draw from the last call's logits, as draw_rows() does; returns tokens and
        log-probabilities on the host. Rows with the same filters are drawn by a graph, too: some
        twenty kernels and four waits for the GPU would take as long as a small model's step."""
        logits, rows = self._last
        key = (rows, samplings[0].filters)
        alike = rows and all(each.filters == key[1] for each in samplings)
        if not alike or (key not in self.draws and len(self.draws) == MOST_DRAWS):
            tokens, logprobs = draw_rows(logits, samplings, uniforms, size)
            return tokens.cpu(), logprobs.cpu()
        if key not in self.draws:
            self.draws[key] = self._capture_draw(rows, samplings[0], size)
        found = self.draws[key]
        if samplings[0].temperature:
            found.uniform[: len(uniforms)].copy_(torch.tensor(uniforms), non_blocking=True)
        found.replay()
        drawn = found.drawn[:, : len(samplings)].cpu()
        return drawn[0].long(), drawn[1].float()

    def _compute(self, tokens: Sequence[int], lengths: Sequence[int]) -> tuple[Tensor, int]:
        """Return logits, and the number of their rows in self.outputs, or 0."""
        cache, count = self.cache, len(tokens)
        low, high = cache.span(lengths)
        rows = cache.slots if cache.fixed else count
        if self.uses_graphs:
            # Rounded to few shapes: each needs a capture, and memory for its graph.
            low, rows = 0, cache.slots if cache.fixed else min(power_of_two(count), cache.slots)
            high = min(power_of_two(high // CACHE_BLOCK) * CACHE_BLOCK, cache.length)
            # A window that is not a multiple of the block was rounded down.
            high = high if high >= max(lengths) else cache.length
        # A free row writes to the last place, which is never copied.
        free = rows - count
        numbers = torch.tensor([[*tokens, *[0] * free], [*lengths, *[cache.length] * free]])
        numbers[1] -= 1
        if self.uses_graphs:
            return self._replay(numbers, high), rows
        numbers = numbers.to(cache.keys.device)
        return self.logits(numbers[0], numbers[1], low, high), 0

    def logits(self, tokens: Tensor, positions: Tensor, low: int, high: int) -> Tensor:
        """Compute the step for int64 tokens [B] at `positions` [B], which attend to the places from
        `low` to `high`."""
        cache, rows = self.cache, len(tokens)
        places, now = self.places[low:high], positions.unsqueeze(1)
        hidden = places > now  # [B, C]
        if cache.window is not None:
            hidden |= places <= now - cache.window
        mask = torch.zeros(hidden.shape, device=hidden.device, dtype=cache.keys.dtype)
        mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None]
        at = (self.heads[:rows] + now).flatten()
        rope = self.rope[:, positions].unsqueeze(2)  # [2, B, 1, E]
        x = self.model.embed(tokens)  # [B, D]
        keys, values = (part[:, :rows, :, low:high].unbind() for part in (cache.keys, cache.values))
        for number, block in enumerate(self.blocks):
            q, k, v = block.heads(x, rope, self.model.cfg.kv_heads)
            cache.keys[number].view(-1, k.shape[-1]).index_copy_(0, at, k.flatten(0, 1))
            cache.values[number].view(-1, v.shape[-1]).index_copy_(0, at, v.flatten(0, 1))
            x = block.rest(x, self.attend(q, keys[number], values[number], mask))
        return self.model.predict(x, None)  # type: ignore[return-value]

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attend with q [B, H, E]; returns [B, H E]. The query heads of one key-value head are laid
        out as if they were its tokens, so that no key is copied or read twice."""
        grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[2])  # [B, K, H / K, E]
        softcap = self.model.cfg.attention_softcap
        if softcap is not None:
            return capped_attention(grouped, keys, values, mask, softcap).flatten(1)
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).flatten(1)

    def _replay(self, numbers: Tensor, high: int) -> Tensor:
        rows = numbers.shape[1]
        found = self.by_shape.get((rows, high))
        if found is None:
            found = self._capture(numbers.to(self.cache.keys.device), high)
            self.by_shape[rows, high] = found
        # Safe without pinned memory: CUDA has staged the numbers when the call returns.
        found.numbers.copy_(numbers, non_blocking=True)
        found.replay()
        return self.outputs[rows]

    def _capture(self, numbers: Tensor, high: int) -> StepGraph:
        """Capture a step of so many rows and places. Trials write only what the step will write."""
        rows = numbers.shape[1]
        if rows not in self.outputs:
            self.outputs[rows] = torch.empty_like(self.logits(numbers[0], numbers[1], 0, high))
        out = self.outputs[rows]

        def step() -> Tensor:
            return out.copy_(self.logits(numbers[0], numbers[1], 0, high))

        return StepGraph(numbers, *capture_or_run("a step", step))

    def _capture_draw(self, rows: int, sampling: Sampling, size: int) -> DrawGraph:
        logits, device = self.outputs[rows], self.cache.keys.device
        uniform = torch.zeros(rows, device=device)
        drawn = torch.zeros(2, rows, device=device, dtype=torch.float64)  # a token number is exact

        def draw() -> Tensor:
            return torch.stack(sample_tokens(logits, sampling, uniform, size), out=drawn)

        return DrawGraph(uniform, drawn, *capture_or_run("a draw", draw))


class StepGraph(NamedTuple):
    """A step, whose input has a fixed address."""

    numbers: Tensor  # int64 [2, B]: tokens and positions
    replay: Callable[[], object]
    graph: torch.cuda.CUDAGraph | None = None


class DrawGraph(NamedTuple):
    """A draw, whose input and output have fixed addresses."""

    uniform: Tensor  # fp32 [B]
    drawn: Tensor  # fp64 [2, B]: tokens, and logs of their probabilities
    replay: Callable[[], object]
    graph: torch.cuda.CUDAGraph | None = None


def capture_or_run(
    what: str, work: Callable[[], Tensor]
) -> tuple[Callable[[], object], torch.cuda.CUDAGraph | None]:
    """Return a function for `work`, and the graph that it starts, if torch can capture one;
    otherwise each call launches the kernels one by one."""
    try:
        graph = capture_graph(work)
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        print(f"{what} runs without a CUDA graph, more slowly: {text}", file=sys.stderr)
        return work, None
    return graph.replay, graph


def capture_graph(work: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    """Capture what `work` does on a GPU."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    # A first run outside the capture: cuBLAS allocates its workspace, and kernels are loaded.
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


class PlainBlock(NamedTuple):
    """A block of the decoder for one token of each row."""

    block: Block
    qkv: Product
    gate_up: Product | None  # None: any other feed-forward layer, such as experts

    @classmethod
    def of(cls, block: nn.Module) -> PlainBlock:
        assert isinstance(block, Block)
        attention, ffn = block.attention, block.ffn
        # Only for their memory layout: add_output() multiplies by the weights themselves.
        product_of(attention.wo)
        if type(ffn) is FeedForward:
            product_of(ffn.w2)
        gate_up = product_of(ffn.w1, ffn.w3) if type(ffn) is FeedForward else None
        return cls(block, product_of(attention.wq, attention.wk, attention.wv), gate_up)

    def heads(self, x: Tensor, rope: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, H, E], k and v [B, K, E] of x [B, D]."""
        attention = self.block.attention
        width = attention.resolved_head_dim
        heads = self.qkv(self.block.attention_norm(x)).view(len(x), -1, width)
        plain = isinstance(attention.q_norm, nn.Identity)
        norms = None if plain else (attention.q_norm, attention.k_norm)
        return turn_heads(heads, rope, kv_heads, norms)

    def rest(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x [B, D] for the next block, given attention's y [B, H E]."""
        block = self.block
        x = add_output(x, y, block.attention.wo, block.attention_post_norm)
        y = block.ffn_norm(x)
        if self.gate_up is None:
            y = block.ffn(y.unsqueeze(1))
            y = y[0] if isinstance(y, tuple) else y
            return x + block.ffn_post_norm(y.squeeze(1))  # type: ignore[no-any-return]
        gate, up = self.gate_up(y).chunk(2, -1)
        return add_output(x, F.silu(gate) * up, block.ffn.w2, block.ffn_post_norm)  # type: ignore[arg-type]


def add_output(x: Tensor, y: Tensor, layer: nn.Module, norm: nn.Module) -> Tensor:
    """Add norm(layer(y)) to x."""
    if type(layer) is nn.Linear and layer.bias is None and isinstance(norm, nn.Identity):
        return torch.addmm(x, y, layer.weight.t())
    return x + norm(layer(y))  # type: ignore[no-any-return]


def product_of(*layers: nn.Module) -> Product:
    """Return a function for all outputs [B, ...] of layers with one input: a single product if
    they are plain."""
    plain = [layer for layer in layers if type(layer) is nn.Linear]
    if len(plain) < len(layers):  # such as those with adapters
        return lambda x: torch.cat([layer(x) for layer in layers], -1)
    weight = join_weights([layer.weight for layer in plain])
    bias = join_weights([layer.bias for layer in plain]) if plain[0].bias is not None else None
    return lambda x: F.linear(x, weight, bias)


def weight_pointers(model: nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def power_of_two(count: int) -> int:
    """Round up to a power of two."""
    return 1 << (count - 1).bit_length()
