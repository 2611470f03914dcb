"""Files that a program of this kit writes over only where it wrote them itself: they have a text of
its own, or a seal. No torch."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Collection
from pathlib import Path

from kempner.config.option import ConfigError
from kempner.jobs.system.directories import describe_directory

SEAL = "0" * 64  # see seal_text()


def refuse_other_file(path: str | Path, option: str, signs: Collection[str]) -> None:
    """Raise ConfigError unless the file that an option names does not exist yet, or was made by an
    earlier run of the same program: it then holds one of these texts and, if it has a seal_text(),
    is as that program left it. Links are followed, as the caller writes through them."""
    path, what = Path(path).expanduser(), "is there, and was not made by this program"
    if path.is_dir():
        what = f"is {describe_directory(path)}"
    elif path.is_file():
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            if any(sign.encode() in content for sign in signs):
                if is_as_sealed(content):
                    return
                what = "was changed since this program wrote it"
    elif not path.is_symlink() or path.exists():  # nothing, or a device
        return
    raise ConfigError(f"{option} = {path} {what}; remove it, or name another file")


def seal_text(content: str) -> str:
    """Put the text's digest in place of SEAL; it reveals a later edit."""
    return content.replace(SEAL, hashlib.sha256(content.encode()).hexdigest(), 1)


def is_as_sealed(content: bytes) -> bool:
    """Return whether a file with a seal is as it was written; one without may be of an older
    version."""
    found = re.search(rb'(?<=content="kempner )[0-9a-f]{64}(?=")', content)
    plain = content.replace(found[0], SEAL.encode(), 1) if found else b""
    return found is None or hashlib.sha256(plain).hexdigest().encode() == found[0]
