"""Text <-> token ids: bytes, or any tokenizer.json."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kempner.data.sidecar import (
    BYTES_EOD,
    BYTES_TOKENIZER,
    SIDECAR,
    SIDECAR_TOKENIZER,
    Sidecar,
    open_sidecar,
)
from kempner.data.source import DataError

# Names of the end-of-document token in published tokenizers; the first that exists is taken.
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
BPE_EOD = EOD_NAMES[0]
BPE_MINIMUM = 257  # 256 bytes and the end of the document
# Documents per call of the package. Its result takes some 100 bytes per token: for a few
# documents that stays in the cache, for a whole unit it costs page faults.
ENCODE_BATCH = 8


# A single-byte token of a tokenizer with byte fallback.
BYTE = re.compile("<0x([0-9A-F]{2})>")
TokenArray = NDArray[np.integer[Any]]  # 1-D
Span = tuple[int, int]  # characters, from and to


class TokenPiece(NamedTuple):
    """One token."""

    data: bytes  # what it adds to a text, maybe part of a character; a special token's name
    special: bool  # it adds nothing to a text


class Tokenizer(Protocol):
    vocab_size: int
    eod: int
    bos: int | None

    def encode(self, text: str) -> list[int]: ...

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a user's text for a model to continue: a special token spelled out in it becomes
        one, as with transformers and vLLM."""

    def encode_documents(self, texts: Sequence[str]) -> list[TokenArray]:
        """Encode each text, with the end-of-document id after it and `bos`, if any, before it."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def piece(self, token: int) -> TokenPiece: ...

    def describe(self) -> dict[str, str]:
        """Return name, kind and hash for the sidecar."""


class ByteTokenizer:
    """A tokenizer of one token per byte of UTF-8, and 256 at the end of a document."""

    vocab_size = BYTES_EOD + 1
    eod = BYTES_EOD
    bos: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    encode_prompt = encode

    def encode_documents(self, texts: Sequence[str]) -> list[TokenArray]:
        result: list[TokenArray] = []
        for text in texts:
            data = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
            ids = np.empty(len(data) + 1, np.uint16)
            ids[:-1], ids[-1] = data, self.eod
            result.append(ids)
        return result

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids; ids above 255 are dropped, bytes that are not UTF-8 become U+FFFD."""
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def piece(self, token: int) -> TokenPiece:
        return (
            TokenPiece(bytes([token]), False) if token < 256 else TokenPiece(BPE_EOD.encode(), True)
        )

    def describe(self) -> dict[str, str]:
        return dict(BYTES_TOKENIZER)


class FileTokenizer:
    """A tokenizer.json, read by the package `tokenizers`. Text is text: a special token spelled out
    in a document does not become one, and nothing is truncated, padded or prepended."""

    def __init__(
        self,
        path: Path,
        *,
        eod: str | int | None = None,
        bos: str | int | None = None,
        name: str = "",
    ) -> None:
        """`eod`: the end-of-document token or its id; None looks for one of the usual names. `bos`:
        the token before each document; None: nothing."""
        import_data_package("tokenizers")
        try:
            self._data = data = path.read_bytes()
            self._tokenizer, vocabulary = _parse(data, False)
        except OSError as error:
            raise DataError(f"tokenizer {path}: {error.strerror}") from None
        except Exception as error:  # the package raises bare Exception and ValueError
            raise DataError(f"tokenizer {path}: not a tokenizer.json ({error})") from None
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # ids may have gaps
        self.eod = _find_eod(path, self._tokenizer, vocabulary, eod)
        if isinstance(bos, str) and bos not in vocabulary:
            raise DataError(f"tokenizer {path}: has no token {bos}; give another one with --bos")
        self.bos = vocabulary[bos] if isinstance(bos, str) else bos
        self._begin = array("I", () if self.bos is None else (self.bos,))
        self._about = {
            "name": name or "/".join(path.parts[-2:]),
            "kind": "tokenizer.json",
            "hash": "sha256:" + hashlib.sha256(data).hexdigest(),
        }

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(_clean(text), add_special_tokens=False).ids
        return ids

    def encode_documents(self, texts: Sequence[str]) -> list[TokenArray]:
        result: list[TokenArray] = []
        for start in range(0, len(texts), ENCODE_BATCH):
            batch = [_clean(text) for text in texts[start : start + ENCODE_BATCH]]
            # _fast omits the offsets, which are not needed here.
            for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                # array("I") takes half the time of np.array for a list.
                ids = self._begin + array("I", encoding.ids)
                ids.append(self.eod)
                result.append(np.frombuffer(ids, np.uint32))
        return result

    def encode_prompt(self, text: str) -> list[int]:
        return next(self.encode_rendered([text]))[0]

    def encode_rendered(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[Span]]]:
        """Return ids and the characters that each was made from, for the output of a chat template:
        a special token spelled out there becomes one."""
        for start in range(0, len(texts), ENCODE_BATCH):
            batch = [_clean(text) for text in texts[start : start + ENCODE_BATCH]]
            encodings = self._with_special.encode_batch(batch, add_special_tokens=False)
            yield from ((encoding.ids, encoding.offsets) for encoding in encodings)

    @functools.cached_property
    def _with_special(self) -> Any:
        # Not the other tokenizer, switched over: threads encoding concurrently could get either.
        return _parse(self._data, True)[0]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids))
        return text

    def piece(self, token: int) -> TokenPiece:
        if (added_token := self._added.get(token)) is not None:
            return TokenPiece(added_token.content.encode(), added_token.special)
        name = self._tokenizer.id_to_token(token)
        if name is None:  # ids may have gaps
            return TokenPiece(b"", False)
        if self._is_byte_level and all(letter in BYTE_LEVEL for letter in name):
            return TokenPiece(bytes(BYTE_LEVEL[letter] for letter in name), False)
        if byte := BYTE.fullmatch(name):
            return TokenPiece(bytes.fromhex(byte[1]), False)
        # The decoder strips the space of a token that begins a text.
        once, twice = self.decode([token]), self.decode([token, token])
        return TokenPiece(twice[len(once) :].encode(), False)

    @functools.cached_property
    def _added(self) -> dict[int, Any]:
        added_tokens: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()
        return added_tokens

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        decoder = self._tokenizer.decoder
        return decoder is not None and b"ByteLevel" in decoder.__getstate__()

    def describe(self) -> dict[str, str]:
        return dict(self._about)


def _byte_level() -> dict[str, int]:
    """Return GPT-2's letters for bytes: a printable byte's own, the others from 256 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    letters = {chr(byte): byte for byte in own}
    return letters | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_LEVEL = _byte_level()


def load_tokenizer(source: str | Path) -> Tokenizer:
    """Load the tokenizer of a data or run directory, or of the dataset.json in it.

    tokenizer.json lies beside dataset.json unless the tokens are bytes. Raises DataError if either
    is missing, or is not the file that the data were made with.
    """
    path = Path(source).expanduser()
    directory = path.parent if path.name == SIDECAR else path
    file = directory / SIDECAR
    return tokenizer_of(Sidecar.load(file) if file.is_file() else open_sidecar(path), directory)


def tokenizer_of(sidecar: Sidecar, directory: Path) -> Tokenizer:
    """Load the tokenizer that `sidecar` names, whose tokenizer.json is in `directory`."""
    if sidecar.tokenizer["kind"] == "bytes":
        return ByteTokenizer()
    file = directory / SIDECAR_TOKENIZER
    tokenizer = FileTokenizer(
        file, eod=sidecar.eod, bos=sidecar.bos, name=sidecar.tokenizer["name"]
    )
    if tokenizer.describe()["hash"] != sidecar.tokenizer["hash"]:
        raise DataError(
            f"{file}: not the tokenizer that made the data (the hash in {SIDECAR} differs)"
        )
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a byte-level BPE vocabulary (GPT-2's pre-tokenizer); returns the content
    of a tokenizer.json.

    The result depends only on the texts and their order. Little text may yield fewer tokens.
    """
    assert vocab_size >= BPE_MINIMUM
    package = import_data_package("tokenizers")
    models, pre, decoders, trainers = (
        importlib.import_module(f"tokenizers.{name}")
        for name in ("models", "pre_tokenizers", "decoders", "trainers")
    )
    tokenizer = package.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BPE_EOD],
        # All bytes, so that no text is unknown; sorted, because the package's order varies.
        initial_alphabet=sorted(pre.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((_clean(text) for text in texts), trainer)
    content: str = tokenizer.to_str(pretty=True)
    return content.encode()


# A large vocabulary takes 0.3 s, and is needed several times.
@functools.lru_cache(2)
def _parse(data: bytes, special: bool) -> tuple[Any, dict[str, int]]:
    """Parse the tokenizer and its vocabulary. `special`: a special token spelled out in a text
    becomes one. Raises whatever the package raises."""
    tokenizer = import_data_package("tokenizers").Tokenizer.from_buffer(data)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = not special
    return tokenizer, tokenizer.get_vocab()


def import_data_package(package: str) -> Any:
    """Import an optional package of the extra `data`."""
    try:
        return importlib.import_module(package)
    except ImportError:
        name = package.partition(".")[0]
        raise DataError(
            f"the package {name} is not installed; install it with "
            "`.venv/bin/pip install -c constraints.txt -e '.[data]'`"
        ) from None


def _find_eod(path: Path, tokenizer: Any, vocabulary: dict[str, int], eod: str | int | None) -> int:
    """Find the id of one of the usual names that is a special token: "</s>" may be an ordinary one,
    an HTML tag, which would end documents in the middle. Otherwise take the model's own."""
    if isinstance(eod, int):
        return eod
    added_tokens = tokenizer.get_added_tokens_decoder()
    special = {token.content: i for i, token in added_tokens.items() if token.special}
    own = _eos_of_model(path.parent)
    names = (*EOD_NAMES, *own) if eod is None else (eod,)
    for name in names:
        candidates = special if eod is None and name not in own else vocabulary
        if name in candidates:
            return candidates[name]
    raise DataError(
        f"tokenizer {path}: has no {'special ' if eod is None else ''}token {' or '.join(names)}; "
        "name the one that ends a document with --eod TOKEN"
    )


def _eos_of_model(directory: Path) -> list[str]:
    """Return the end-of-sequence token that a Hugging Face directory names. For a chat model it may
    end a turn instead of a document, so the usual names come first."""
    try:
        token = json.loads((directory / "tokenizer_config.json").read_bytes())["eos_token"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    name = token.get("content") if isinstance(token, dict) else token
    return [name] if isinstance(name, str) else []


def _clean(text: str) -> str:
    """Replace lone surrogates, which JSON may contain and which are not text; all else stays."""
    return text.encode("utf-8", "replace").decode()
