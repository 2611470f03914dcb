"""Write a model's activations to disk: its residual stream after some blocks, for the first samples
of prepared data, from one checkpoint or several.

    python scripts/activations.py runs/7b data/corpus --layers 0,15,-1 --out activations/7b
    python scripts/activations.py runs/7b data/corpus --layers all --steps all --out activations/all

DIR has a folder for each checkpoint, with shards in safetensors: blocks.N.stream, of shape
[samples, tokens, width], with `tokens`, `sample`, and each token's `document` in the split and
`position` in the document. Memory holds the model and a few shards of 256 MiB. After a kill, the
next start writes the missing shards; it refuses existing shards of other weights. Exit code 0, or 2
on bad input.
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

from kempner.checkpoint import history, named
from kempner.config import toml
from kempner.config.command_line import argument_parser
from kempner.config.option import ConfigError
from kempner.data.config import FAKE
from kempner.data.formats.dataset import TokenDataset
from kempner.extensions.activations import (
    ACTIVATION_PARTS,
    SHARD_BYTES,
    ShardRecord,
    check_weights,
    extract_shards,
    identity_of,
    start_output,
)
from kempner.extensions.generate.load import Loaded, load_model_and_tokenizer, model_shape
from kempner.extensions.hf.checks import other_ids, same_ids
from kempner.extensions.hf.source import CONFIG_FILE, TOKENIZER_FILE, WeightsSource, held_weights
from kempner.jobs.system.files import step_of_name
from kempner.jobs.system.front_door import run_program


def main(argv: list[str]) -> None:
    options = parse(argv)
    names = models_to_read(options.model, options.steps)
    check_models(options.out, names, options.layers)
    for name in names:
        write_activation_shards(options, name)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argument_parser("activations.py", __doc__)
    add = parser.add_argument
    add("model", metavar="RUN", help="RUN[@STEP], a checkpoint, or a Hugging Face directory")
    add("data", metavar="DATA", help="directory of token shards, made by prepare_data.py")
    add("--layers", required=True, help="block numbers, such as 0,1 or -1 (the last one), or all")
    add("--out", required=True, type=Path, metavar="DIR", help="directory for the shards")
    add("--steps", metavar="STEPS", help="steps of the checkpoints, such as 0,1,2,4, or all")
    parts_help = "stream after the block, and what attention and ffn add to it (default: stream)"
    add("--parts", default="stream", metavar="PARTS", help=parts_help)
    add("--split", default="val", choices=("train", "val"), help="split of the data (default: val)")
    add("--samples", type=int, default=256, help="samples, from the first (default: 256); 0: all")
    add("--batch", type=int, default=8, help="samples at a time (default: 8)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to run the model")
    options = parser.parse_args(join_layers(argv))
    if options.data.startswith(FAKE):
        parser.error(f"{options.data}: activations need text; give data made by prepare_data.py")
    for name, least in (("samples", 0), ("batch", 1)):
        value = getattr(options, name)
        if value < least:
            parser.error(f"--{name} {value}: must be at least {least}")
    options.parts = options.parts.split(",")
    unknown = [part for part in options.parts if part not in ACTIVATION_PARTS]
    if unknown:
        parser.error(
            f"--parts {unknown[0]}: must be of {', '.join(ACTIVATION_PARTS)}, separated by commas"
        )
    return options


def join_layers(argv: list[str]) -> list[str]:
    """Rewrite `--layers -1,0` as `--layers=-1,0`: argparse takes the second word for an option."""
    joined: list[str] = []
    for word in argv:
        if joined[-1:] == ["--layers"] and re.match(r"-\d", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def models_to_read(name: str, steps: str | None) -> list[str]:
    """Return the checkpoints, as names for load_model_and_tokenizer(). Raises ConfigError."""
    if steps is None:
        return [name]
    directory, step = named.split_name(name)
    if step is not None or any((directory / f).is_file() for f in (history.MANIFEST, CONFIG_FILE)):
        raise ConfigError(
            f"{name} is one model: leave out --steps, or name a run, whose checkpoints it selects"
        )
    if steps != "all":
        numbers = _numbers("--steps", steps)
        return [f"{name}@{number}" for number in numbers]
    there = history.complete_checkpoints(named.find_checkpoint(name).parent)
    return [f"{name}@{step_of_name(path.name)}" for path in sorted(there)]


def check_models(out: Path, names: list[str], layers: str) -> None:
    """Check that all checkpoints exist and have these layers, and that existing shards belong to
    them. Raises ConfigError."""
    problems = []
    for name in names:
        try:
            with held_weights(name) as source:
                layers_of(layers, model_shape(source)[0].n_layers)
                check_weights(out / folder_of(source), identity_of(source))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def folder_of(source: WeightsSource) -> str:
    return source.path.name if source.is_checkpoint else "model"


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{option} {text}: must be whole numbers separated by commas, such as 0,1, or all"
        ) from None


def layers_of(text: str, count: int) -> list[int]:
    """Parse the numbers of blocks, in order."""
    if text == "all":
        return list(range(count))
    numbers = _numbers("--layers", text)
    wrong = [number for number in numbers if not -count <= number < count]
    if wrong:
        raise ConfigError(
            f"--layers {wrong[0]}: the model has {count} blocks, 0 to {count - 1}, or -1 for the "
            "last"
        )
    return sorted({number % count for number in numbers})


def check_data(path: str, data: TokenDataset, loaded: Loaded) -> None:
    """Check that the data are plain text, in the tokens of the model. Raises ConfigError."""
    if data.sidecar.kind != "text":
        raise ConfigError(f"{path}: holds data of the kind {data.sidecar.kind}; give plain text")
    file = str(loaded.words.folder / TOKENIZER_FILE)
    theirs = {**data.sidecar.tokenizer, "file": str(Path(path).expanduser() / TOKENIZER_FILE)}
    own = {**loaded.words.tokenizer.describe(), "file": file}
    if not same_ids(theirs, own):
        name = "bytes" if own["kind"] == "bytes" else file
        raise ConfigError(other_ids(path, theirs, own, f"prepare it with --tokenizer {name}"))


def write_activation_shards(options: argparse.Namespace, name: str) -> None:
    """Write the shards of one checkpoint."""
    with held_weights(name) as source:
        folder, weights = folder_of(source), identity_of(source)
        identity, config = str(source.path), {}
        if source.is_checkpoint:
            identity = history.read_manifest(source.path)["run"]
            config = toml.loads((source.path / "config.toml").read_text()).get("data", {})
        # By path: the newest checkpoint of this name may have changed.
        loaded = load_model_and_tokenizer(str(source.path), options.device)
    model, cfg = loaded.model, loaded.model.cfg
    mask = config.get("document_mask", False)
    data = TokenDataset.open(
        options.data, options.split, loaded.window, cfg.vocab_size, separate=mask
    )
    check_data(options.data, data, loaded)
    layers, parts = layers_of(options.layers, cfg.n_layers), options.parts
    dtype = model.embed.weight.dtype
    size = len(layers) * len(parts) * loaded.window * cfg.dim * dtype.itemsize
    record = ShardRecord(
        model=identity,
        data=str(options.data),
        split=options.split,
        tokens=data.identity()["tokens"],
        samples=min(options.samples or len(data), len(data)),
        seq_len=loaded.window,
        document_mask=mask,
        reset_positions=config.get("reset_positions", True),
        layers=layers,
        parts=parts,
        dim=cfg.dim,
        dtype=str(dtype).removeprefix("torch."),
        shard=max(1, SHARD_BYTES // size),
    )
    start_output(options.out, record)
    print(f"{loaded.about}: {record.samples} samples, {len(record.shards)} shards", flush=True)
    place = options.out / folder
    for number, there in extract_shards(model, data, record, place, weights, options.batch):
        print(f"{folder} shard {number} {'already exists' if there else 'is durable'}", flush=True)


if __name__ == "__main__":
    run_program(main)
