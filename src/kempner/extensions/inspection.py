"""Inspect data, and what a run reads: `prepare_data.py inspect`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kempner.config.command_line import parse_command
from kempner.config.option import ConfigError
from kempner.data.config import SourceConfig
from kempner.data.mixture import Mixture
from kempner.data.opening import has_sidecar
from kempner.data.sidecar import DATA_SPLITS, open_sidecar
from kempner.data.source import IGNORE, Source
from kempner.data.stages import samples_between, step_of_sample
from kempner.data.text.tokenizer import FileTokenizer, Tokenizer, tokenizer_of
from kempner.jobs.report.tables import align_table
from kempner.jobs.system.front_door import how_to_run
from kempner.jobs.system.picture import refuse_other_picture, save_picture
from kempner.optim.config import learning_rate
from kempner.train.configure import load_config
from kempner.train.parts import open_data, open_mixture
from kempner.train.progress import Progress
from kempner.train.sections import RunConfig

INSPECT_USAGE = """\
{command} inspect DIR
{command} inspect CONFIG.toml [MORE.toml ...] [--section.key=value ...]

Shows what is in a data directory, or in the sources of a run: counts, a sample as text and, of a
run, the mixture over its steps, as a table and a picture.

  --plot FILE    the picture (default: mixture.png; needs matplotlib)"""
SHOWN_CHARACTERS = 600  # characters of a sample
INSPECTED_TOKENS = 256  # tokens of a sample of a directory


def inspect_data(argv: Sequence[str]) -> None:
    """Inspect data. Raises ConfigError."""
    if not argv:
        raise ConfigError("inspect: give a directory of data, or a configuration; --help shows how")
    if argv[0] in ("-h", "--help"):
        print(INSPECT_USAGE.format(command=how_to_run("prepare_data.py")))
        return
    folders, rest = sorted_words(argv)
    command = parse_command(rest, {"plot": str})
    plot_name = command.flags["plot"]
    if folders:
        if plot_name:
            command.problems.append(
                f"--plot={plot_name}: the picture is of a run's mixture, and {folders[0]} is data; "
                "name a configuration in place of it, or leave --plot out"
            )
        if extra := [*folders[1:], *command.files]:
            command.problems.append(f"{extra[0]}: give a single DIR, or configurations")
        open_sidecar(folders[0])  # explains, if it is not a data set
        overrides = [f"--data.dataset_path={folders[0]}", f"--train.seq_len={INSPECTED_TOKENS}"]
        # Larger than any vocabulary: data with ids beyond the model's are refused.
        overrides += [f"--model.vocab_size={1 << 24}", "--train.max_steps=1", *command.overrides]
        cfg = load_config([], overrides, command.problems)
    else:
        cfg = load_config(command.files, command.overrides, command.problems)
    picture = Path(plot_name or "mixture.png")
    if not folders:
        refuse_other_picture(picture, "--plot", bool(plot_name))
    sources, _ = open_data(cfg, True)
    mixture = open_mixture(cfg, sources, Progress().plan(cfg))
    print(align_table(source_counts(cfg, sources), gap=2, right=range(1, 5)))
    if not folders:
        print("\n" + align_table(mixture_shares(cfg, sources, mixture), gap=2))
    for number, (one, source) in enumerate(zip(cfg.data.mixed, sources, strict=True)):
        print("\n" + sample_text(one, source, first_of(mixture, number, cfg.train.sequences)))
    if not folders:
        plot_mixture(cfg, mixture, picture)


def sorted_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Sort the words into data directories and others; a word after an option, as in `--plot DIR`,
    is its value."""
    folders: list[str] = []
    rest: list[str] = []
    for before, word in zip(["", *argv], argv, strict=False):
        is_value = before.startswith("--") and "=" not in before
        (folders if Path(word).is_dir() and not is_value else rest).append(word)
    return folders, rest


def source_counts(cfg: RunConfig, sources: Sequence[Source]) -> list[list[str]]:
    rows = [["source", "samples", "of tokens", "tokens", "documents", "tokenizer", "path"]]
    for one, source in zip(cfg.data.mixed, sources, strict=True):
        about = [f"{len(source):,}", f"{source.seq_len:,}", f"{len(source) * source.seq_len:,}"]
        if source.ordered:
            about = ["streamed", about[1], ""]
        about += ["", ""]
        if has_sidecar(one):
            sidecar = open_sidecar(one.path)
            shards = [shard for split in DATA_SPLITS for shard in sidecar.splits[split]]
            documents = f"{sum(shard.documents for shard in shards):,}"
            about[2:] = [f"{sum(map(sidecar.tokens, DATA_SPLITS)):,}", documents]
            about.append(sidecar.tokenizer["name"])
        rows.append([source.name, *about, one.path])
    return rows


def mixture_shares(cfg: RunConfig, sources: Sequence[Source], mixture: Mixture) -> list[list[str]]:
    """Return a column for each part of the run with its own shares, and one for the whole run."""
    stages = cfg.train.stages
    samples = samples_between(stages, 0, cfg.train.max_steps)
    parts = [each for each in mixture.segments if each.start < samples]
    used = mixture.drawn(samples)
    starts = [step_of_sample(stages, 0, each.start) for each in parts]
    rows = [["source", *(f"from step {start:,}" for start in starts), "all", "epochs"]]
    for i, source in enumerate(sources):
        epochs = "" if source.ordered else f"{used[i] / len(source):.2f}"
        rows.append([source.name, *(f"{each.shares[i]:.2%}" for each in parts)])
        rows[-1] += [f"{used[i] / sum(used):.2%}", epochs]
    return rows


def first_of(mixture: Mixture, number: int, batch: int) -> int:
    """Return the index of a source's first sample in the run; 0 if it is not among the first."""
    sources, indices = mixture.draw(0, min(100 * batch, mixture.end or 100 * batch))
    mine = indices[sources == number]
    return int(mine[0]) if len(mine) else 0


def sample_text(cfg: SourceConfig, source: Source, index: int) -> str:
    """Return a sample as text, or its token ids if no tokenizer is known."""
    rows = source.read(np.array([index]))
    inputs, targets = rows.inputs[0], rows.targets[0]
    documents = np.zeros_like(inputs) if rows.documents is None else rows.documents[0]
    borders = np.flatnonzero(np.diff(documents)) + 1
    tokenizer = _tokenizer(cfg)
    texts = [
        " ".join(map(str, part)) if tokenizer is None else tokenizer.decode(part.tolist())
        for part in np.split(inputs, borders)
    ]
    text = "\n-- next document --\n".join(texts)
    text = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ..."
    about = f"{int((targets != IGNORE).sum())} of its {len(targets)} tokens are in the loss"
    return f"sample {index:,} of {source.name}; {about}:\n" + text


def _tokenizer(cfg: SourceConfig) -> Tokenizer | None:
    if has_sidecar(cfg):
        return tokenizer_of(open_sidecar(cfg.path), Path(cfg.path).expanduser())
    return FileTokenizer(Path(cfg.tokenizer).expanduser()) if cfg.tokenizer else None


def plot_mixture(cfg: RunConfig, mixture: Mixture, out: Path) -> None:
    """Draw the shares and the learning rate over the steps."""
    try:
        # Not pyplot, which chooses a GUI backend.
        from matplotlib.figure import Figure
    except ImportError:
        fix = "`.venv/bin/pip install -c constraints.txt -e '.[plot]'`"
        print(f"\nno picture: matplotlib is not installed; {fix}", file=sys.stderr)
        return
    stages, last = cfg.train.stages, cfg.train.max_steps
    samples = samples_between(stages, 0, last)
    figure = Figure(figsize=(9, 5), dpi=130, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    parts = [each for each in mixture.segments if each.start < samples]
    # stairs() takes one more edge than values.
    edges = [*(step_of_sample(stages, 0, each.start) for each in parts), last]
    low = np.zeros(len(parts))
    for i, ingredient in enumerate(mixture.ingredients):
        high = low + np.array([each.shares[i] for each in parts]) * 100
        top.stairs(high, edges, baseline=low, fill=True, label=ingredient.name)
        low = high
    # About one per pixel of the picture's width: a run may have a million steps.
    steps = np.unique(np.linspace(0, last - 1, 1000, dtype=int))
    places = [samples_between(stages, 0, int(step)) for step in steps]
    scales = [cfg.data.lr_scales[mixture.phase(place)] for place in places]
    bottom.plot(
        steps, [learning_rate_at(cfg, int(s)) * k for s, k in zip(steps, scales, strict=True)]
    )
    for phase in mixture.phases[1:]:
        for panel in (top, bottom):
            panel.axvline(
                step_of_sample(stages, 0, phase.start), color="0.3", linestyle=":", linewidth=1
            )
    top.set(ylabel="share of the samples, %", ylim=(0, 100), xlim=(0, last))
    bottom.set(ylabel="learning rate", xlabel="step", ylim=(0, None))
    top.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    try:
        save_picture(figure, out)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {out}: {error}; name another file, such as x.png") from None
    print(f"\nthe mixture over the steps: {out}")


def learning_rate_at(cfg: RunConfig, step: int) -> float:
    return learning_rate(cfg.schedule, cfg.optimizer.lr, step, cfg.train.max_steps)
