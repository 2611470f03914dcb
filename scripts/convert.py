"""Convert models in Hugging Face format: into a run, out of one, to the hub and back.

    python scripts/convert.py import models/llama runs/llama            # a directory, or a hub id
    python scripts/convert.py export runs/7b models/mine --dtype bf16   # runs/7b@1000: that step
    python scripts/convert.py check models/mine                         # is every tensor there?
    python scripts/convert.py push models/mine OWNER/NAME
    python scripts/convert.py prefetch configs/train/mine.toml          # where there is a network

An export may run while the run trains: the checkpoint is locked against deletion. Downloads and
uploads continue where they were interrupted. Exit code 0, or 2 on bad input.
"""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(__file__))  # PYTHONSAFEPATH leaves it out
    import first

    first.start_program()  # before anything that may be missing or slow

import argparse
import re
from pathlib import Path

from kempner.checkpoint import history
from kempner.config.command_line import argument_parser
from kempner.config.loading import SectionValues, load_config_files, to_toml
from kempner.config.option import ConfigError
from kempner.extensions.hf.checks import complete_model
from kempner.extensions.hf.compare import compare_with_transformers
from kempner.extensions.hf.families import FAMILIES, family_of
from kempner.extensions.hf.source import TOKENIZER_FILE, find_weights, held_weights, vocabulary_size
from kempner.extensions.hf.stored import check_source
from kempner.extensions.hf.tensors import stored_parts, tensor_names
from kempner.jobs.system import hub
from kempner.jobs.system.front_door import interruptible, run_program
from kempner.model.config import ModelConfig
from kempner.model.shapes import tensor_shapes
from kempner.train.checks import combination_problems as problems_across
from kempner.train.sections import RunConfig, RunSection, TrainConfig

SIZE_UNITS = {"MB": 10**6, "GB": 10**9}


def main(argv: list[str]) -> None:
    options = parse(argv)
    options.act(options)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argument_parser("convert.py", __doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, act: object, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(act=act)
        return sub

    sub = command("import", import_, "make a run from a model, with one checkpoint, of step 0")
    sub.add_argument("source", metavar="SOURCE", help="directory, or OWNER/NAME[@REVISION] (hub)")
    sub.add_argument("run", type=Path, metavar="RUN", help="run directory to make")
    sub = command(
        "export", run_export, "write the model of a run as safetensors, config and tokenizer"
    )
    sub.add_argument("run", metavar="RUN[@STEP]", help="run or checkpoint; default: the newest one")
    sub.add_argument("out", type=Path, metavar="DIR", help="directory, new or empty")
    sub.add_argument(
        "--dtype",
        choices=("auto", "fp32", "bf16", "fp16"),
        default="auto",
        help="dtype of the tensors; auto: that of the model the run started from, else fp32",
    )
    sub.add_argument(
        "--max-shard-size",
        type=parse_size,
        default="5GB",
        metavar="SIZE",
        help="largest size of a file (default: 5GB)",
    )
    sub.add_argument(
        "--adapter",
        action="store_true",
        help="for a run with [lora]: write only the adapter, in peft's format, unmerged",
    )
    sub = command(
        "check", check_conversion, "say what a source is, and whether every tensor is accounted for"
    )
    sub.add_argument("source", metavar="SOURCE", help="directory, hub ID, or RUN[@STEP]")
    sub = command("push", run_push, "upload a directory to the hub")
    sub.add_argument("directory", type=Path, metavar="DIR", help="directory written by export")
    sub.add_argument("name", metavar="OWNER/NAME", help="model repository, created if missing")
    sub.add_argument("--private", action="store_true", help="make a new repository private")
    sub = command("prefetch", prefetch_model, "download what a configuration needs from the hub")
    sub.add_argument(
        "words",
        nargs="+",
        metavar="CONFIG|ID",
        help="configuration files, or what they name on the hub",
    )
    sub.add_argument("--tokenizer-only", action="store_true", help="not the weights of a model")
    # Only prefetch takes --section.key=value, for its configuration files.
    options, overrides = parser.parse_known_args(argv)
    if overrides and options.act is not prefetch_model:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    options.overrides = overrides
    return options


def parse_size(text: str) -> int:
    found = re.fullmatch(r"(\d+) *(MB|GB)", text)
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text}: give a size such as 500MB or 5GB")
    return int(found[1]) * SIZE_UNITS[found[2]]


def import_(options: argparse.Namespace) -> None:
    source = find_weights(options.source, download=True)
    if source.is_checkpoint:
        raise ConfigError(
            f"{options.source}: is a run; start from it by --model.init_from={options.source}"
        )
    cfg = ModelConfig(**source.model())
    config = RunConfig(
        model=cfg,
        run=RunSection(dir=str(options.run)),
        train=TrainConfig(seq_len=min(TrainConfig.seq_len, cfg.max_seq_len)),
    )
    # It imports torch, which error messages do not need.
    from kempner.extensions.hf.importing import import_model

    interruptible()  # what is half written is removed
    path = import_model(source.path, cfg, options.run, to_toml(config), options.source)
    print(f"{path}: {cfg.count_parameters():,} parameters, fp32")
    print(f"start a run from it by --model.init_from={options.run}")


def run_export(options: argparse.Namespace) -> None:
    from kempner.extensions.hf.adapter import export_adapter
    from kempner.extensions.hf.exporting import export_checkpoint

    with held_weights(options.run) as source:
        if not source.is_checkpoint:
            raise ConfigError(f"{options.run}: is already in Hugging Face format")
        step = history.read_manifest(source.path)["step"]
        interruptible()  # what is half written is removed
        if options.adapter:
            path = export_adapter(source.path, options.out)
        else:
            path = export_checkpoint(
                source.path, options.out, options.dtype, options.max_shard_size
            )
    print(f"{path}: step {step:,} of {options.run}")
    if not (path / TOKENIZER_FILE).is_file() and not options.adapter:
        print("it has no tokenizer: its tokens are bytes, which only this kit's programs know")


def check_conversion(options: argparse.Namespace) -> None:
    with held_weights(options.source, download=True) as source:
        shape = source.model()
        # As for a start from it: the requirements of training a new model do not apply.
        cfg = ModelConfig(**shape, init_from=options.source)
        problems = cfg.problems()
        if problems:
            raise ConfigError([f"{options.source}: {problem}" for problem in problems])
        check_source(source, cfg)
        kind = family_of(cfg)
        print(
            f"{source.path}: {FAMILIES[kind].architecture}, {cfg.count_parameters():,} parameters"
        )
        if not source.is_checkpoint:
            print(compare_with_transformers(source.path, shape))
        shapes, names = tensor_shapes(cfg), tensor_names(cfg, kind)
        count = sum(len(stored_parts(names[ours], shape)) for ours, shape in shapes.items())
        print(f"{count} tensors, all accounted for; vocabulary {cfg.vocab_size:,}")
        tokens = vocabulary_size(source.carried)
        if tokens:
            print(f"its tokenizer has {tokens:,} tokens")


def run_push(options: argparse.Namespace) -> None:
    if not options.directory.is_dir():  # OWNER/NAME may be in the hub's cache
        raise ConfigError(f"{options.directory}: no such directory; name one written by export")
    source = find_weights(str(options.directory))
    if source.is_checkpoint:
        raise ConfigError(f"{options.directory}: is a run; export it first, and push the export")
    check_source(source, ModelConfig(**source.model()))
    print(hub.push_to_hub(source.path, options.name, options.private))


def prefetch_model(options: argparse.Namespace) -> None:
    def get(name: str) -> None:
        if options.tokenizer_only:
            print(f"tokenizer: {hub.hub_snapshot(name, download=True, weights=False)}")
        else:
            print(f"model: {find_weights(name, download=True).path}")

    def fetch(values: SectionValues) -> list[str]:
        name = values["model"].get("init_from")
        if name:
            get(name)
        return complete_model(values, run_dir="runs/prefetch")

    files = [word for word in options.words if word.endswith(".toml")]
    for name in options.words:
        if name.startswith(hub.HF_DATA):
            print(f"data: {hub.data_files(name, download=True)}")
        elif name not in files:
            get(name)
    if files:
        cfg = load_config_files(
            RunConfig, files, options.overrides, complete=fetch, check=problems_across
        )
        for source in (*cfg.data.mixed, *cfg.eval.sources):
            if source.path.startswith(hub.HF_DATA):
                print(f"data: {hub.data_files(source.path, download=True)}")


if __name__ == "__main__":
    run_program(main)
