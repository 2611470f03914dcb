"""Generate text from a checkpoint.

    python scripts/generate.py runs/quickstart --prompt "def main("
    python scripts/generate.py runs/7b/checkpoints/step_00001000 --prompt "Once" --temperature 0

Prints the prompt and its continuation; the same --seed gives the same text. It can run while the
run trains: the checkpoint is locked against deletion. Exit code 0, or 2 on bad input.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kempner.checkpoint import commit
from kempner.config import toml
from kempner.config.command_line import argument_parser
from kempner.config.option import ConfigError
from kempner.data.sidecar import SIDECAR
from kempner.data.tokenizer import Tokenizer, load_tokenizer
from kempner.model.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from kempner.model.decoder import Decoder


def main(argv: list[str]) -> int:
    options = parse(argv)
    try:
        path = find_checkpoint(options.source)
        with commit.reading(path):
            manifest = commit.read_manifest(path)
            tokenizer = load_tokenizer(find_tokenizer(options.source, path))
            model = load_model(path, manifest, pick_device(options.device))
    except (ConfigError, ValueError, OSError) as error:
        print(f"generate: error: {error}", file=sys.stderr)
        return 2
    prompt = tokenizer.encode(options.prompt)
    # Rotary positions beyond those of the training are noise to the model.
    window = min(manifest["fixed"]["train"]["seq_len"], model.cfg.max_seq_len)
    note(f"step {manifest['step']:,} of {path}, {model.cfg.count_parameters():,} parameters")
    if len(prompt) >= window:
        note(f"the prompt has {len(prompt)} tokens; the model only sees the last {window}")
    began = time.perf_counter()
    new = sample(model, tokenizer, prompt, window, options)
    seconds = time.perf_counter() - began
    print(tokenizer.decode([*prompt, *new]))
    note(f"{len(new)} tokens in {seconds:.1f} s, {len(new) / seconds:,.0f} tokens/s")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argument_parser("generate.py", __doc__)
    add = parser.add_argument
    add("source", type=Path, metavar="RUN", help="directory of a run, or one of its checkpoints")
    add("--prompt", default="", help="text to continue (default: start a new document)")
    add("--max-tokens", type=int, default=200, help="tokens to generate, at most (default: 200)")
    add(
        "--temperature",
        type=float,
        default=0.8,
        help="sampling temperature; 0: always the most likely token (default: 0.8)",
    )
    add("--top-k", type=int, help="sample from the K most likely tokens (default: all)")
    add("--seed", type=int, default=0, help="sampling seed (default: 0)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to run the model")
    options = parser.parse_args(argv)
    if options.max_tokens < 1:
        parser.error(f"--max-tokens {options.max_tokens}: must be at least 1")
    if not 0 <= options.temperature < float("inf"):
        parser.error(f"--temperature {options.temperature}: must be finite and at least 0")
    if options.top_k is not None and options.top_k < 1:
        parser.error(f"--top-k {options.top_k}: must be at least 1")
    return options


def note(text: str) -> None:
    print(text, file=sys.stderr)


def find_checkpoint(source: Path) -> Path:
    """The checkpoint that `source` names: itself, or the best one of a run or of a directory of
    checkpoints."""
    if not source.is_dir():
        raise ConfigError(f"{source}: no such directory; name a run or one of its checkpoints")
    if (source / commit.MANIFEST).is_file():
        return source.resolve()
    root = source / "checkpoints"
    if not root.is_dir() and (source / "config.toml").is_file():
        root = Path(read_config(source)["checkpoint"]["dir"])  # checkpoint.dir was set
    for path in commit.complete(root) or commit.complete(source):
        if (path / commit.MANIFEST).is_file():
            return path.resolve()
    raise ConfigError(
        f"{source}: contains no complete checkpoint; a run saves one every "
        "checkpoint.interval steps and at its end"
    )


def find_tokenizer(source: Path, checkpoint: Path) -> Path:
    """The directory that has the run's tokenizer: the run, or the data that it was made from."""
    config = read_config(checkpoint)
    named = (Path(config["run"]["dir"]), Path(config["data"]["dataset_path"]).expanduser())
    tried = dict.fromkeys((source, checkpoint.parent.parent, *named))
    for directory in tried:
        if (directory / SIDECAR).is_file():
            return directory
    raise ConfigError(
        f"{checkpoint}: its tokenizer is in none of {', '.join(map(str, tried))}; "
        f"copy {SIDECAR} (and tokenizer.json) from the data into the first of them"
    )


def read_config(directory: Path) -> dict[str, Any]:
    return toml.loads((directory / "config.toml").read_text())


def pick_device(kind: str) -> torch.device:
    import torch

    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: no GPU is visible; give --device cpu")
    return torch.device("cuda" if kind != "cpu" and torch.cuda.is_available() else "cpu")


def load_model(path: Path, manifest: dict[str, Any], device: torch.device) -> Decoder:
    """The model of a checkpoint in this one process: bf16 weights on a GPU, fp32 on a CPU.

    Raises ValueError when the checkpoint is damaged.
    """
    import torch

    from kempner.checkpoint.reader import read_into
    from kempner.model.decoder import Decoder, rope_table
    from kempner.parallel.build import compute_dtype

    cfg = ModelConfig(**manifest["fixed"]["model"])
    with torch.device("meta"):
        model = Decoder(cfg).to(compute_dtype("auto", device.type))
    model = model.to_empty(device=device).eval().requires_grad_(False)
    model.rope = rope_table(cfg).to(device)  # it stays fp32
    try:
        read_into(path, {f"model.{name}": p for name, p in model.named_parameters()})
    except ValueError as error:
        raise ValueError(f"{error}; name an older checkpoint") from None
    return model


def sample(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: list[int],
    window: int,
    options: argparse.Namespace,
) -> list[int]:
    """The ids that continue `prompt`, up to the end of the document. Each token costs a forward
    pass over the window: a key-value cache would pay off for long texts, and double this file."""
    import torch

    device = model.embed.weight.device
    generator = torch.Generator(device).manual_seed(options.seed)
    ids = [tokenizer.eod, *prompt]  # a document begins where one has ended
    start = len(ids)
    with torch.inference_mode():
        while len(ids) < start + options.max_tokens:
            tokens = torch.tensor([ids[-window:]], device=device)  # [1, T]
            logits = model(tokens)[0, -1, : tokenizer.vocab_size].float()  # [V]
            if options.temperature == 0:
                drawn = logits.argmax()
            else:
                if options.top_k is not None and options.top_k < len(logits):
                    logits[logits < logits.topk(options.top_k).values[-1]] = -torch.inf
                chances = (logits / options.temperature).softmax(0)
                drawn = torch.multinomial(chances, 1, generator=generator)
            if int(drawn) == tokenizer.eod:
                break
            ids.append(int(drawn))
    return ids[start:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
