"""Pictures marked with the program that made them, so that no other program's is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kempner.jobs.system.files import write_atomic
from kempner.jobs.system.seal import refuse_other_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAKER = "kempner, with Matplotlib"


def refuse_other_picture(out: Path, option: str, named: bool) -> None:
    """Raise ConfigError if the file exists and is not ours. `named`: the user chose the name; under
    names that this program chooses, older versions have left pictures without this mark."""
    refuse_other_file(out, option, (MAKER,) if named else (MAKER, "Matplotlib"))


def save_picture(figure: Figure, out: Path) -> None:
    """Save the figure. An error leaves the old picture. Raises OSError; ValueError for a suffix
    that is not a picture's."""
    # Standard keys: Software in PNG, Creator in SVG and PDF.
    key = "Software" if out.suffix == ".png" else "Creator"
    about = {key: MAKER} if out.suffix in (".png", ".svg", ".pdf") else None
    kind = out.suffix[1:] or "png"
    # Resolve a link: the rename would replace the link itself.
    write_atomic(out.resolve(), lambda file: figure.savefig(file, format=kind, metadata=about))
