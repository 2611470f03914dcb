"""The decoder beside the leanest one of the same shape in plain torch, and what each option costs.

    python -m benchmarks.decoder              ratios of CPU seconds, forward and backward
    python -m benchmarks.decoder --quick      only shows that it works

Both live in one process, on one thread, and take turns step by step. CPU seconds of the process
count, so that other jobs on the machine matter little. docs/reference/benchmarks.md has figures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.trainer import machine, spread
from kempner.model.attention import Documents
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder, rope_table
from kempner.model.loss import cross_entropy

WARM_UP = 3  # turns that do not count
QUICKSTART = ModelConfig(
    vocab_size=257, dim=192, n_layers=4, n_heads=6, n_kv_heads=2, ffn_dim=512, tie_embeddings=True
)
WIDE = ModelConfig(vocab_size=2048, dim=512, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=1408)
SHAPES = {"quickstart": (QUICKSTART, 8, 256), "dim 512": (WIDE, 2, 256)}  # rows and tokens

Step = Callable[[], object]


class Lean(nn.Module):
    """As few calls as its mathematics takes: no modules, no options, all logits at once."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.weights = nn.ParameterDict()
        rope = rope_table(cfg)
        self.register_buffer("cos", rope[0])
        self.register_buffer("sin", rope[1])

    @classmethod
    def of(cls, model: Decoder) -> Lean:
        """With a copy of the weights of `model`."""
        lean = cls(model.cfg)
        for name, parameter in model.named_parameters():
            # A key of ParameterDict must not have a dot.
            lean.weights[name.replace(".", "/")] = nn.Parameter(parameter.detach().clone())
        return lean

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        cfg, w = self.cfg, self.weights
        rows, length = tokens.shape
        width, head = (cfg.dim,), cfg.resolved_head_dim
        cos, sin = self.cos[:length], self.sin[:length]

        def heads(x: Tensor, name: str) -> Tensor:
            return F.linear(x, w[name]).view(rows, length, -1, head).transpose(1, 2)

        def rotate(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat((-second, first), -1) * sin

        x = F.embedding(tokens, w["embed/weight"])
        for i in range(cfg.n_layers):
            block = f"blocks/{i}"
            y = F.rms_norm(x, width, w[f"{block}/attention_norm/weight"], cfg.norm_eps)
            q, k, v = (heads(y, f"{block}/attention/w{name}/weight") for name in "qkv")
            y = F.scaled_dot_product_attention(
                rotate(q), rotate(k), v, is_causal=True, enable_gqa=cfg.n_heads != cfg.kv_heads
            )
            x = x + F.linear(y.transpose(1, 2).flatten(2), w[f"{block}/attention/wo/weight"])
            y = F.rms_norm(x, width, w[f"{block}/ffn_norm/weight"], cfg.norm_eps)
            gate, up = (F.linear(y, w[f"{block}/ffn/{name}/weight"]) for name in ("w1", "w3"))
            x = x + F.linear(F.silu(gate) * up, w[f"{block}/ffn/w2/weight"])
        x = F.rms_norm(x, width, w["norm/weight"], cfg.norm_eps)
        output = w["embed/weight" if cfg.tie_embeddings else "output/weight"]
        return plain_loss(x.flatten(0, 1), output, targets.flatten())


def plain_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum")


def main() -> None:
    about, _, more = (__doc__ or "").partition("\n")
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("decoder", None, about, more, formatter_class=as_it_is)
    parser.add_argument("--quick", action="store_true", help="two turns of small models")
    parser.add_argument("--repeats", type=int, default=60, help="turns (default: 60)")
    options = parser.parse_args()
    repeats = 2 if options.quick else options.repeats
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"$ python -m benchmarks.decoder\n{machine()}\n\nratios of CPU seconds", flush=True)
    for name, (cfg, rows, length) in SHAPES.items():
        compare_with_lean(name, cfg, rows, 32 if options.quick else length, repeats)
    cfg, rows, length = SHAPES["quickstart"]
    options_of_the_decoder(cfg, rows, 32 if options.quick else length, repeats)
    compare_losses(256 if options.quick else 1024, 2**8 if options.quick else 2**15, repeats)


def compare_with_lean(name: str, cfg: ModelConfig, rows: int, length: int, repeats: int) -> None:
    """Raises AssertionError unless both compute the same."""
    model = decoder(cfg)
    lean = Lean.of(model)
    tokens = torch.randint(cfg.vocab_size, (rows, length))
    step_of(lean, tokens)()
    step_of(model, tokens)()
    for parameter, (path, other) in zip(model.parameters(), lean.weights.items(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, msg=path, rtol=1e-3, atol=1e-5)
    ratios = by_turns(step_of(lean, tokens), step_of(model, tokens), repeats)
    print(f"leanest / decoder, {name:<22} {spread(ratios)}   target 0.98", flush=True)


def options_of_the_decoder(cfg: ModelConfig, rows: int, length: int, repeats: int) -> None:
    tokens = torch.randint(cfg.vocab_size, (rows, length))
    plain = decoder(cfg)
    index = torch.arange(length).div(length // 4, rounding_mode="floor").expand(rows, length)
    documents = Documents.of(index.contiguous(), True)
    others = {
        "attention_softcap": step_of(decoder(replace(cfg, attention_softcap=50.0)), tokens),
        "sliding_window": step_of(decoder(replace(cfg, sliding_window=length // 4)), tokens),
        "four documents a row": step_of(decoder(cfg), tokens, documents),
        "qk_norm": step_of(decoder(replace(cfg, qk_norm=True)), tokens),
    }
    for name, step in others.items():
        ratios = by_turns(step, step_of(plain, tokens), repeats)
        print(f"{name:<22} / plain decoder   {spread(ratios)}", flush=True)


def compare_losses(tokens: int, vocabulary: int, repeats: int) -> None:
    """The loss in chunks, whose gradient is made in the forward pass, and that of all logits."""
    x, weight = torch.randn(tokens, 256), torch.randn(vocabulary, 256) / 16
    targets = torch.randint(vocabulary, (tokens,))

    def step(loss: Callable[..., Tensor]) -> Step:
        inputs = (x.clone().requires_grad_(), weight.clone().requires_grad_())
        return lambda: torch.autograd.grad(loss(*inputs, targets), inputs)

    for chunk in (None, tokens // 8):
        chunked = step(lambda *inputs, chunk=chunk: cross_entropy(*inputs, chunk)[0])
        ratios = by_turns(chunked, step(plain_loss), max(2, repeats // 10))
        name = f"loss in {'chunks of ' + str(chunk) if chunk else 'chunks, auto'}"
        print(f"{name:<22} / plain loss      {spread(ratios)}", flush=True)


def decoder(cfg: ModelConfig) -> Decoder:
    model = Decoder(cfg)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if std := model.init_std(name):
                parameter.normal_(std=std)
    return model


def step_of(model: nn.Module, tokens: Tensor, *more: Documents) -> Step:
    def step() -> None:
        model.zero_grad()
        (model(tokens, tokens, *more) / tokens.numel()).backward()

    return step


def by_turns(first: Step, second: Step, repeats: int) -> list[float]:
    """CPU seconds of one over those of the other, pair by pair; who begins alternates."""
    ratios = []
    for turn in range(WARM_UP + repeats):
        seconds = {}
        # Whoever comes second finds the caches warm.
        for step in (first, second) if turn % 2 else (second, first):
            began = time.process_time()
            step()
            seconds[step] = time.process_time() - began
        if turn >= WARM_UP:
            ratios.append(seconds[first] / seconds[second])
    return ratios


if __name__ == "__main__":
    main()
