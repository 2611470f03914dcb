"""dataset.json: the contents of the token shards beside it; written last, when
they are complete."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kempner.config import toml
from kempner.data.source import DataError
from kempner.jobs.system.directories import Kind, describe_directory, directory_kind, read_run_id
from kempner.jobs.system.files import write_atomic
from kempner.jobs.system.front_door import how_to_run

SIDECAR = "dataset.json"
PROGRESS = "dataset.partial.json"  # the record of a preparation that has not finished
SIDECAR_TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"  # of chat data: has the template
BAD_LINES = "bad_lines.txt"  # lines of JSON that were left out, as file:line: reason
UNITS_FOLDER = "units"  # units encoded so far by the tasks of a job: units.py
BYTES_TOKENIZER = {"name": "bytes", "kind": "bytes", "hash": ""}  # the tokenizer without a file
BYTES_EOD = 256  # its end of a document
SIDECAR_FORMAT = 1
DATA_SPLITS = ("train", "val")


@dataclass(frozen=True)
class Shard:
    file: str
    tokens: int
    documents: int
    max_id: int  # largest token id in it


@dataclass(frozen=True)
class Sidecar:
    tokenizer: dict[str, str]  # name; kind: bytes or tokenizer.json; hash of tokenizer.json
    dtype: str  # uint16 or uint32
    vocab_size: int  # one more than the tokenizer's largest id
    eod: int  # ends each document
    splits: dict[str, list[Shard]]
    prepared: dict[str, Any]  # the settings and inputs that it was made from
    # Of chat and preference, the shards have `.loss_mask` and `.ends` beside them.
    kind: str = "text"
    format: int = SIDECAR_FORMAT
    bos: int | None = None  # begins each document, if there is one

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.splits[split])

    def save(self, path: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1) + "\n"
        write_atomic(path, text)

    @classmethod
    def load(cls, path: Path) -> Sidecar:
        """Read dataset.json (or the record of an unfinished preparation, of the same form)."""
        try:
            values = json.loads(path.read_bytes())
            # First: another format may have other keys.
            if values["format"] != SIDECAR_FORMAT:
                raise DataError(
                    f"{path}: format {values['format']}, not {SIDECAR_FORMAT}; prepare it again"
                )
            splits = {
                name: [Shard(**shard) for shard in values["splits"][name]] for name in DATA_SPLITS
            }
            return cls(**{**values, "splits": splits})
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
        except (ValueError, TypeError, KeyError) as error:
            what = f"{type(error).__name__}: {error}"
            raise DataError(
                f"{path}: not a sidecar of token shards ({what}); prepare it again"
            ) from None


def open_sidecar(directory: str | Path) -> Sidecar:
    """Read the sidecar of a finished data directory. Raises DataError, which names what is missing
    and the fix."""
    path = Path(directory).expanduser()
    if (path / SIDECAR).is_file() and not read_run_id(path):  # a run has a copy of it
        return Sidecar.load(path / SIDECAR)
    kind = directory_kind(path)
    make = f"{how_to_run('prepare_data.py')} TEXT... --out {directory}"
    if (path / PROGRESS).is_file():
        problem = f"the preparation has not finished; run the same `{make}` again to resume it"
    elif kind is Kind.MISSING:
        problem = (
            f"no such directory; make the data by `{make}` (chats: with --kind chat --tokenizer "
            "DIR); `fake:` in its place needs none, for a check or a measurement"
        )
    elif kind in (Kind.EMPTY, Kind.NOTES, Kind.OTHER):
        problem = f"no {SIDECAR} in it; make the data by `{make}`"
    else:
        problem = f"is {describe_directory(path)}, not a data set; {_data_of(path, kind)}"
    raise DataError(f"{directory}: {problem}")


def _data_of(path: Path, kind: Kind) -> str:
    """Suggest what to name instead of a path that is not a data directory."""
    if kind is Kind.RUN:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            data = toml.loads((path / "config.toml").read_text())["data"]["dataset_path"]
            return f"its data are {data}" if data else "name the sources in its config.toml"
    if kind is Kind.UNREADABLE:
        return "change its permissions, or name another directory"
    return "name a directory that prepare_data.py has made"


def copy_tokenizer(data_dir: str | Path, run_dir: str | Path) -> None:
    """Copy the files that load_tokenizer() and ChatTemplate need, so that a run can be sampled
    without its data."""
    for name in (SIDECAR_TOKENIZER, TOKENIZER_CONFIG, SIDECAR):
        source = Path(data_dir).expanduser() / name
        if source.is_file():
            with source.open("rb") as reader:
                write_atomic(Path(run_dir) / name, partial(shutil.copyfileobj, reader))
