"""The tokenizer of a run without data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kempner.checkpoint.history import has_checkpoint
from kempner.data.sidecar import DATA_SPLITS, SIDECAR, Sidecar, copy_tokenizer
from kempner.data.text.tokenizer import ByteTokenizer, Tokenizer
from kempner.extensions.generate.load import words_in_run, words_of_directory, words_of_run
from kempner.extensions.hf.source import HF_FOLDER, find_weights, run_of
from kempner.extensions.rl.config import RlConfig

if TYPE_CHECKING:
    from kempner.train.sections import RunConfig

WORDS_BYTES = "bytes"  # rl.tokenizer


def keep_words(cfg: RunConfig, run: Path) -> None:
    """Put the tokenizer into the run directory, where readers of a run or its checkpoints expect
    it. Raises ConfigError or OSError."""
    if (run / SIDECAR).is_file():
        return
    begun = has_checkpoint(cfg.checkpoint_dir)
    if begun and not cfg.of(RlConfig).tokenizer and words_in_run(run) is not None:
        return  # model.init_from may be gone
    if not cfg.of(RlConfig).tokenizer and cfg.model.init_from is not None:
        source = find_weights(cfg.model.init_from)
        if source.is_checkpoint:  # its data may use another tokenizer than its initial model
            folder = words_of_run(run_of(source.path), source.path).folder
            if (folder / SIDECAR).is_file():
                copy_tokenizer(folder, run)
    if (run / SIDECAR).is_file() or (run / HF_FOLDER).is_dir():
        return
    if cfg.of(RlConfig).tokenizer == WORDS_BYTES:
        write_sidecar(run, ByteTokenizer())
        return
    folder = Path(cfg.of(RlConfig).tokenizer).expanduser()
    copy_tokenizer(folder, run)
    if not (run / SIDECAR).is_file():
        write_sidecar(run, words_of_directory(folder).tokenizer)


def write_sidecar(run: Path, tokenizer: Tokenizer) -> None:
    """Write a sidecar that describes no data."""
    none: dict[str, list[object]] = {name: [] for name in DATA_SPLITS}
    sidecar = Sidecar(
        tokenizer.describe(), "uint32", tokenizer.vocab_size, tokenizer.eod, none, {}  # type: ignore[arg-type]
    )  # fmt: skip
    sidecar.save(run / SIDECAR)
