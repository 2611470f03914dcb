"""Pictures that say which program made them, so that none of another program is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kempner.jobs.system.files import write_atomic
from kempner.jobs.system.seal import refuse_other_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAKER = "kempner, with Matplotlib"


def refuse_other_picture(out: Path, option: str, named: bool) -> None:
    """Raise ConfigError if the file exists and is not ours. `named`: by the user; under the names
    that this program chooses, versions before this mark have left pictures, too."""
    refuse_other_file(out, option, (MAKER,) if named else (MAKER, "Matplotlib"))


def save_picture(figure: Figure, out: Path) -> None:
    """Save the figure. An error leaves the old picture. Raises OSError, ValueError for a suffix
    that is not one of a picture."""
    # The standard names: PNG has Software, SVG and PDF have Creator.
    key = "Software" if out.suffix == ".png" else "Creator"
    about = {key: MAKER} if out.suffix in (".png", ".svg", ".pdf") else None
    kind = out.suffix[1:] or "png"
    # To the target of a link: the rename would replace the link itself.
    write_atomic(out.resolve(), lambda file: figure.savefig(file, format=kind, metadata=about))
