"""Generate text from a run, a checkpoint, or a directory in Hugging Face format.

    python scripts/generate.py runs/quickstart --prompt "def main("
    python scripts/generate.py runs/7b@1000 --prompt "Once" --temperature 0
    python scripts/generate.py models/llama --prompts questions.txt --top-p 0.9
    python scripts/generate.py runs/sft --chat --prompt "What is a mole?"
    python scripts/generate.py runs/sft --chat          # a dialogue; Ctrl-D or Ctrl-C ends it

Prints each prompt and its continuation, a single prompt as it is generated; the same --seed gives
the same text. It can run while the run trains: the checkpoint is locked against deletion. Exit code
0, or 2 on bad input.
"""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(__file__))  # PYTHONSAFEPATH leaves it out
    import first

    first.start_program()  # before anything that may be missing or slow

import argparse
import sys
import time
from pathlib import Path

from kempner.config.command_line import argument_parser
from kempner.config.option import ConfigError
from kempner.extensions.generate.config import Sampling
from kempner.extensions.generate.load import Loaded, load_model_and_tokenizer
from kempner.jobs.system.front_door import read_text, run_program


def main(argv: list[str]) -> int:
    options = parse(argv)
    prompts = read_prompts(options)
    loaded = load_model_and_tokenizer(options.source, options.device)
    print_note(f"{loaded.about}, {loaded.model.cfg.count_parameters():,} parameters")
    if options.chat and prompts == [""] and sys.stdin.isatty():
        from kempner.extensions.generate.dialogue import run_dialogue

        print_note("type a message; Ctrl-D or Ctrl-C ends the dialogue")
        run_dialogue(loaded, sampling_options(options))
        return 0
    ids = prompt_ids(loaded, prompts, options.chat)
    began = time.perf_counter()
    prompt_texts = [f"{text}\n" for text in prompts] if options.chat else prompts
    count = print_texts(loaded, prompt_texts, ids, sampling_options(options), options.batch)
    seconds = time.perf_counter() - began
    print_note(f"{count} tokens in {seconds:.1f} s, {count / seconds:,.0f} tokens/s")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argument_parser("generate.py", __doc__)
    add = parser.add_argument
    add(
        "source",
        metavar="RUN",
        help="a run (RUN or RUN@STEP), a checkpoint, or a directory in Hugging Face format",
    )
    add(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; may be given several times (default: start a new document)",
    )
    add("--prompts", type=Path, metavar="FILE", help="a file with one prompt per line")
    add(
        "--chat",
        action="store_true",
        help="treat each prompt as a message to answer; without a prompt: a dialogue",
    )
    add("--max-tokens", type=int, default=200, help="most tokens per prompt (default: 200)")
    add(
        "--temperature",
        type=float,
        default=0.8,
        help="sampling temperature; 0: always the most likely token (default: 0.8)",
    )
    add("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens that together have probability P",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="drop tokens less than P times as probable as the most likely one",
    )
    add("--stop", action="append", default=[], metavar="TEXT", help="stop before this text")
    add("--seed", type=int, default=0, help="sampling seed (default: 0)")
    add("--batch", type=int, default=16, help="prompts at a time (default: 16)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to run the model")
    options = parser.parse_args(argv)
    check_options(options, parser)
    return options


def check_options(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    problem = sampling_options(options).problem()
    if problem:
        name, text = problem
        parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: {text}")
    if options.batch < 1:
        parser.error(f"--batch {options.batch}: must be at least 1")
    if options.prompt and options.prompts:
        parser.error("--prompt and --prompts: give one of them")


def read_prompts(options: argparse.Namespace) -> list[str]:
    if options.prompts is None:
        return options.prompt or [""]
    prompts = read_text(options.prompts, "--prompts").splitlines()
    if not prompts:
        raise ConfigError(f"{options.prompts}: is empty; write one prompt per line")
    return prompts


def sampling_options(options: argparse.Namespace) -> Sampling:
    return Sampling(
        options.temperature,
        options.top_k,
        options.top_p,
        options.min_p,
        options.seed,
        options.max_tokens,
        tuple(options.stop),
    )


def print_note(text: str) -> None:
    print(text, file=sys.stderr)


def prompt_ids(loaded: Loaded, prompts: list[str], chat: bool) -> list[list[int]]:
    words = loaded.words
    if chat:
        try:
            return [words.chat([{"role": "user", "content": prompt}]) for prompt in prompts]
        except ValueError as error:
            raise ConfigError(f"--chat: {words.folder}: {error}") from None
    return [words.prompt(prompt) for prompt in prompts]


def print_texts(
    loaded: Loaded, prompts: list[str], ids: list[list[int]], sampling: Sampling, batch: int
) -> int:
    """Generate the continuations of `ids`, and print them after the prompts; a single text is
    streamed, several are printed in the order of the prompts. Returns the number of new tokens."""
    from kempner.extensions.generate.engine import Engine
    from kempner.extensions.generate.texts import Text, generate_texts

    tokenizer, ends = loaded.words.tokenizer, loaded.words.ends
    longest = max(map(len, ids))
    if longest > loaded.window:
        print_note(
            f"a prompt has {longest} tokens; the model sees the last of {loaded.window} at most"
        )
    window = min(loaded.window, longest + sampling.max_tokens)  # memory for no more than that
    slots = min(batch, len(prompts))
    engine = Engine[Text](loaded.model, tokenizer.vocab_size, window, slots)
    count, current = 0, 0
    texts, done = list(prompts), [False] * len(prompts)  # texts: what is not printed yet
    for piece in generate_texts(engine, tokenizer, ends, ids, sampling):
        count += 1
        texts[piece.prompt] += piece.text
        done[piece.prompt] = piece.done
        while current < len(prompts):
            print(texts[current], end="", flush=True)
            texts[current] = ""
            if not done[current]:
                break
            current += 1
            print(f"\n--- {current} of {len(prompts)}" if len(prompts) > 1 else "")
    return count


if __name__ == "__main__":
    run_program(main)
