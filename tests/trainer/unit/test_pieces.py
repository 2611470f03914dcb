"""What one token adds to a text, by tokenizers of several kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from kempner.data.text.tokenizer import ByteTokenizer, FileTokenizer, TokenPiece, train_bpe

tokenizers = pytest.importorskip("tokenizers")
TEXT = "a few wörds ☃, and 🦊\n  no more"


def llama(path: Path) -> Path:
    """Pieces with a mark for each space, and bytes for what they lack."""
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"afewrdsnomo,"]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys([*names, "▁few"]))}
    merges = [("▁", "f"), ("▁f", "e"), ("▁fe", "w")]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    model = tokenizers.models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens(["</s>"])
    norm, dec = tokenizers.normalizers, tokenizers.decoders
    made.normalizer = norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")])
    made.decoder = dec.Sequence(
        [dec.Replace("▁", " "), dec.ByteFallback(), dec.Fuse(), dec.Strip(" ", 1, 0)]
    )
    path.write_text(made.to_str())
    return path


def byte_level(path: Path) -> Path:
    path.write_bytes(train_bpe([TEXT], 280))
    return path


@pytest.mark.parametrize(("make", "lost"), [(byte_level, ""), (llama, " ")])
def test_pieces_are_the_bytes_of_a_text(tmp_path: Path, make, lost: str) -> None:  # type: ignore[no-untyped-def]
    tokenizer = FileTokenizer(make(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode(TEXT)
    pieces = [tokenizer.piece(token) for token in ids]
    assert b"".join(piece.data for piece in pieces).decode() == lost + TEXT
    assert b" few" in [piece.data for piece in pieces] or not lost
    assert tokenizer.decode(ids) == TEXT and not any(piece.special for piece in pieces)
    end = tokenizer.piece(tokenizer.eod)
    assert end == TokenPiece(b"</s>" if lost else b"<|endoftext|>", True)
    assert tokenizer.piece(10**6) == TokenPiece(b"", False)


def test_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert b"".join(tokenizer.piece(i).data for i in tokenizer.encode(TEXT)).decode() == TEXT
    assert tokenizer.piece(tokenizer.eod) == TokenPiece(b"<|endoftext|>", True)
