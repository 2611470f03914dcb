"""The metadata by which torch's distributed checkpoint (DCP) and its tools read our checkpoints.

    python -m kempner.checkpoint.format.metadata runs/70b/checkpoints/step_00001000

It is one pickle that lists every part of every tensor, so it grows with ranks x tensors. Our own
loading does not need it. A save writes it up to dcp.LIMIT, and beyond that this command writes it
afterwards, from the indices of the data files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kempner.checkpoint import commit, history
from kempner.checkpoint.format.dcp import PartEntry, pickled_metadata
from kempner.checkpoint.format.plan import file_of
from kempner.checkpoint.format.reader import DataFile
from kempner.config.command_line import argument_parser
from kempner.config.option import ConfigError
from kempner.jobs.system.directories import describe_directory
from kempner.jobs.system.files import write_atomic
from kempner.jobs.system.front_door import run_program


def write_metadata(path: Path) -> None:
    """Add `.metadata` to a checkpoint that lacks it. Raises Damaged, ConfigError, OSError."""
    manifest = history.read_manifest(path)

    def parts() -> Iterator[PartEntry]:
        for rank in range(manifest["world_size"]):
            with DataFile(path, manifest, rank) as file:
                for name, entry in file.index["tensors"].items():
                    yield file_of(rank), name, entry

    # The generator opens the data files only now, so all of them are read under the lock.
    with commit.reading_lock(path):
        write_atomic(path / ".metadata", pickled_metadata(parts()))


def main(words: list[str]) -> None:
    parser = argument_parser("python -m kempner.checkpoint.format.metadata", __doc__)
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="RUN/checkpoints/step_N"
    )
    path = parser.parse_args(words).checkpoint
    if not (path / history.MANIFEST).is_file():
        raise ConfigError(
            f"{path} is {describe_directory(path)}, not a checkpoint; name RUN/checkpoints/step_N"
        )
    try:
        write_metadata(path)
    except history.Damaged as error:
        raise ConfigError(f"{path} is damaged: {error}") from None


if __name__ == "__main__":
    run_program(main)
