"""The tokenizer of a run without data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kempner.checkpoint.history import has_checkpoint
from kempner.data.sidecar import DATA_SPLITS, SIDECAR, TOKENIZER_CONFIG, Sidecar, copy_tokenizer
from kempner.data.text.tokenizer import ByteTokenizer, Tokenizer
from kempner.extensions.generate.load import Words, words_in_run, words_of_run
from kempner.extensions.hf.exporting import plain_tokenizer_config, write_json
from kempner.extensions.hf.source import (
    GENERATION,
    HF_FOLDER,
    TOKENIZER_FILE,
    copy_model_files,
    find_weights,
    read_hf_config,
    run_of,
)
from kempner.extensions.rl.config import RlConfig
from kempner.extensions.rl.orchestrate.conversation import open_words
from kempner.jobs.system.hub import TOKENIZER_FILES

if TYPE_CHECKING:
    from kempner.train.sections import RunConfig

WORDS_BYTES = "bytes"  # rl.tokenizer


def keep_words(cfg: RunConfig, run: Path) -> None:
    """Put the tokenizer into the run directory, where readers of a run or its checkpoints expect
    it. Raises ConfigError or OSError."""
    named = cfg.of(RlConfig).tokenizer
    folder = Path(named).expanduser()
    if named not in ("", WORDS_BYTES) and (folder / TOKENIZER_FILE).is_file():
        _keep_files(open_words(named, None), run / HF_FOLDER)
        return
    if (run / SIDECAR).is_file():
        return
    if not named and has_checkpoint(cfg.checkpoint_dir) and words_in_run(run) is not None:
        return  # model.init_from may be gone
    if not named and cfg.model.init_from is not None:
        source = find_weights(cfg.model.init_from)
        if source.is_checkpoint:  # its data may use another tokenizer than its initial model
            data = words_of_run(run_of(source.path), source.path).folder
            if (data / SIDECAR).is_file():
                copy_tokenizer(data, run)
    if (run / SIDECAR).is_file() or (run / HF_FOLDER).is_dir():
        return
    if named == WORDS_BYTES:
        write_sidecar(run, ByteTokenizer())
    else:  # data of bytes
        copy_tokenizer(folder, run)


def _keep_files(words: Words, target: Path) -> None:
    """Put the tokenizer's files, and the tokens that end its texts, in place of those of the model
    that the run started from."""
    source = words.folder
    if not (target.is_dir() and target.samefile(source)):
        copy_model_files(source, target, TOKENIZER_FILES)
        for pattern in TOKENIZER_FILES:
            for file in target.glob(pattern):
                # It would be read together with the new ones.
                if file.is_file() and not (source / file.name).is_file():
                    file.unlink()
    if not (target / TOKENIZER_CONFIG).is_file():
        about = plain_tokenizer_config(target / TOKENIZER_FILE, words.tokenizer.eod)
        write_json(target / TOKENIZER_CONFIG, about)
    config = read_hf_config(target, GENERATION) if (target / GENERATION).is_file() else {}
    eod = words.tokenizer.eod
    write_json(target / GENERATION, {**config, "eos_token_id": [eod, *sorted(words.ends - {eod})]})


def write_sidecar(run: Path, tokenizer: Tokenizer) -> None:
    """Write a sidecar that describes no data."""
    none: dict[str, list[object]] = {name: [] for name in DATA_SPLITS}
    sidecar = Sidecar(
        tokenizer.describe(), "uint32", tokenizer.vocab_size, tokenizer.eod, none, {}  # type: ignore[arg-type]
    )  # fmt: skip
    sidecar.save(run / SIDECAR)
