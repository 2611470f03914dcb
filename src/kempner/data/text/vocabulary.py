"""The vocabulary of a tokenizer.json, read without the package `tokenizers`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from kempner.config.option import ConfigError


def read_vocabulary(file: Path) -> dict[int, str]:
    """Map each token id to its text, added tokens among them. Raises ConfigError."""
    try:
        content = json.loads(file.read_bytes())
        tokens = content["model"]["vocab"]
        if isinstance(tokens, dict):
            texts = {int(i): str(text) for text, i in tokens.items()}
        else:  # Unigram: pairs of a text and its score
            texts = {i: str(text) for i, (text, _) in enumerate(tokens)}
        added_tokens = content.get("added_tokens") or []
        return texts | {int(token["id"]): str(token["content"]) for token in added_tokens}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file}: not a tokenizer.json ({type(error).__name__}: {error})"
        ) from None


def vocabulary_fingerprint(texts: Mapping[int, str]) -> str:
    """Hash a vocabulary: equal if each token id means the same text."""
    digest = hashlib.sha256(json.dumps(sorted(texts.items())).encode()).hexdigest()
    return f"sha256:{digest}"


def vocabularies_agree(one: Mapping[int, str], other: Mapping[int, str]) -> bool:
    """Return whether the vocabularies are equal, or one only adds ids to the other, such as the
    tokens of a chat template."""
    small, large = sorted((one, other), key=len)
    return small.items() <= large.items()
