"""Files that a program of this kit overwrites only if it wrote them itself: they contain its own
text or a seal. No torch."""

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
    """Raise ConfigError if the file that an option names exists and was not made by an earlier run
    of the same program. The program's files hold one of these texts and, if they have a
    seal_text(), are unchanged. Follows links, as the caller writes through them."""
    path, what = Path(path).expanduser(), "exists, and was not made by this program"
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
    """Replace SEAL by the text's digest, which reveals later edits."""
    return content.replace(SEAL, hashlib.sha256(content.encode()).hexdigest(), 1)


def is_as_sealed(content: bytes) -> bool:
    """Return whether a sealed file is unchanged; True without a seal, as from older versions."""
    found = re.search(rb'(?<=content="kempner )[0-9a-f]{64}(?=")', content)
    plain = content.replace(found[0], SEAL.encode(), 1) if found else b""
    return found is None or hashlib.sha256(plain).hexdigest().encode() == found[0]
