"""Greedy generation beside transformers' `generate`, with the same weights and prompts.

    python -m benchmarks.generate                      # batch 1 and 16, three sizes of model
    python -m benchmarks.generate --batch 1 --size 4M --rounds 9

Both run in one process, by turns, on one thread, and what counts is the CPU time of the process:
other work on the machine hardly changes it. A ratio over 1 means that this project is faster. Both
must give the same tokens.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable

import torch
import transformers

from benchmarks.async_save import processor
from kempner.extensions.generate.config import Sampling
from kempner.extensions.generate.engine import Engine, GenerationRequest
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder
from tests.trainer.unit.test_model import copy_to_reference

VOCAB, LENGTH = 8192, 512
SIZES = {  # width, blocks, SwiGLU width
    "4M": (192, 6, 512),
    "19M": (384, 10, 1024),
    "82M": (768, 12, 2048),
}
Run = Callable[[], list[list[int]]]


def models(size: str) -> tuple[Decoder, transformers.LlamaForCausalLM]:
    """The same random weights in both."""
    dim, layers, ffn = SIZES[size]
    cfg = ModelConfig(
        vocab_size=VOCAB, dim=dim, n_layers=layers, n_heads=dim // 64, ffn_dim=ffn,
        n_kv_heads=dim // 192, max_seq_len=LENGTH, tie_embeddings=True, init_std=0.05,
    )  # fmt: skip
    torch.manual_seed(0)
    ours = Decoder(cfg).eval().requires_grad_(False)
    for name, parameter in ours.named_parameters():
        if std := ours.init_std(name):
            parameter.normal_(std=std)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=dim, num_hidden_layers=layers,
            num_attention_heads=cfg.n_heads, num_key_value_heads=cfg.kv_heads,
            intermediate_size=ffn, max_position_embeddings=LENGTH, rms_norm_eps=cfg.norm_eps,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip
    copy_to_reference(ours, theirs)
    return ours, theirs.eval()


def sides(
    ours: Decoder, theirs: transformers.LlamaForCausalLM, prompts: list[list[int]], new: int
) -> dict[str, Run]:
    sampling = Sampling(temperature=0, max_tokens=new)

    def run_ours() -> list[list[int]]:
        cfg = ours.cfg
        engine = Engine[GenerationRequest](ours, cfg.vocab_size, cfg.max_seq_len, len(prompts))
        requests = [GenerationRequest(number, ids, sampling) for number, ids in enumerate(prompts)]
        engine.join(requests)
        for _ in range(new - 1):
            engine.step()
        return [request.new for request in requests]

    longest = max(map(len, prompts))  # transformers wants the padding in front
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])

    def run_theirs() -> list[list[int]]:
        tokens = theirs.generate(
            padded, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0
        )
        return tokens[:, longest:].tolist()

    return {"kempner": run_ours, "transformers": run_theirs}


def measure(sides: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each round, the first left out: it allocates."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        texts = []
        for name, run in sides.items():
            began = time.process_time()
            texts.append(run())
            if number:
                seconds[name].append(time.process_time() - began)
        assert texts[0] == texts[1], "the two sides generate different tokens"
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", default="1,16", help="prompts at a time, comma-separated")
    parser.add_argument("--size", default=",".join(SIZES), help="models, comma-separated")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate for each prompt")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(f"$ python -m benchmarks.generate {shlex.join(sys.argv[1:])}".rstrip())
    print(
        f"{time.strftime('%Y-%m-%d')}, {processor()}, 1 thread, fp32, load "
        f"{os.getloadavg()[0]:.1f}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}; prompts of 32 to 63 tokens, {options.new} new ones each"
    )
    print("model  batch   kempner  transformers   ratio (spread)   # CPU ms a step")
    for size in options.size.split(","):
        ours, theirs = models(size)
        for batch in map(int, options.batch.split(",")):
            generator = torch.Generator().manual_seed(1)
            prompts = [
                torch.randint(1, VOCAB, (32 + 7 * i % 32,), generator=generator).tolist()
                for i in range(batch)
            ]
            found = measure(sides(ours, theirs, prompts, options.new), options.rounds)
            a, b = (sorted(found[name]) for name in ("kempner", "transformers"))
            ratios = sorted(y / x for x, y in zip(*found.values(), strict=True))
            print(
                f"{size:5} {batch:6} {1e3 * statistics.median(a) / options.new:9.2f} "
                f"{1e3 * statistics.median(b) / options.new:13.2f} "
                f"{statistics.median(ratios):7.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
