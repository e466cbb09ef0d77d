"""A SentencePiece model of one's own as the vocabulary, with the ids used here.

Models that `spm_train` makes by default have no padding, and other ids for the other
special symbols. A model is a protocol buffer message in which the place of a piece is
its id: the pieces are put into another order, and those that are missing are added. The
pieces that text is cut into stay the same. Beyond the paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from minitransformer.settings.options import UsageError
from minitransformer.settings.text_config import VocabularyConfig
from minitransformer.text.tokenizer import Tokenizer

# Kinds of pieces, and numbers of fields, in the format of SentencePiece models: the
# pieces, the settings of training, and therein the names of the special symbols.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
PIECES, SETTINGS = 1, 2
UNK_NAME, BOS_NAME, EOS_NAME, PAD_NAME = 45, 46, 47, 48


def read_own_vocabulary(path: Path, symbols: Sequence[str] = ()) -> Tokenizer:
    """Read a SentencePiece model, and add symbols to it that are never split.

    Raises: ValueError if the file holds something else or the model, as one of words,
    cannot keep a symbol whole; OSError if the file cannot be read.
    """
    model = path.read_bytes()
    try:
        tokenizer = Tokenizer(_rearranged(model, symbols))
    except (ValueError, RuntimeError, LookupError) as error:
        raise ValueError(
            f"{path}: expected a SentencePiece model, got other bytes"
        ) from error
    for symbol in symbols:
        if not tokenizer.keeps_whole(symbol):
            raise ValueError(f"{path}: expected a model that can keep {symbol} whole")
    return tokenizer


def own_symbols(tokenizer: Tokenizer) -> set[str]:
    """Return the pieces of a vocabulary that are never split: those of a user."""
    kind = b"\x18" + bytes([USER_DEFINED])
    pieces = (x for number, _, x in _fields(tokenizer.model) if number == PIECES)
    fields = ([*_fields(piece)] for piece in pieces)
    return {f[0][2].decode() for f in fields if kind in [raw for _, raw, _ in f]}


def with_size_of_file(
    values: Mapping[str, Any], vocabulary: VocabularyConfig
) -> dict[str, Any]:
    """Return settings of a model with the vocabulary size of --tokenizer, if given.

    Raises: UsageError if the settings have a size of their own, others as
    `read_own_vocabulary`.
    """
    if vocabulary.tokenizer is None:
        return dict(values)
    if "vocab_size" in values:
        raise UsageError("--vocab-size does nothing with --tokenizer")
    own = read_own_vocabulary(Path(vocabulary.tokenizer), vocabulary.user_symbols)
    return {**values, "vocab_size": own.vocab_size}


def _rearranged(model: bytes, symbols: Sequence[str]) -> bytes:
    """Return a model in which the special symbols are first and `symbols` follow."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    names = {
        PAD_NAME: b"<pad>",
        UNK_NAME: b"<unk>",
        BOS_NAME: b"<s>",
        EOS_NAME: b"</s>",
    }
    pieces, rest = list[bytes](), list[bytes]()
    for number, whole, content in _fields(model):
        (pieces if number == PIECES else rest).append(whole)
        if number == SETTINGS:
            names |= {n: text for n, _, text in _fields(content) if n in names}
    first = [
        _piece(name, UNKNOWN if number == UNK_NAME else CONTROL)
        for number, name in names.items()
    ]
    first += [_piece(symbol.encode(), USER_DEFINED) for symbol in symbols]
    replaced = {*(name.decode() for name in names.values()), *symbols}
    others = [
        piece
        for i, piece in enumerate(pieces)
        if processor.id_to_piece(i) not in replaced
    ]
    return b"".join([*first, *others, *rest])


def _fields(message: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield each field of a message: its number, its bytes, and what it contains.

    Only texts and messages contain something; of numbers that is empty.
    """
    place = 0
    while place < len(message):
        start = place
        key, place = _varint(message, place)
        content = b""
        if key & 7 == 0:
            _, place = _varint(message, place)
        elif key & 7 == 2:
            length, place = _varint(message, place)
            content = message[place : place + length]
            place += length
        else:
            place += {1: 8, 5: 4}[key & 7]
        yield key >> 3, message[start:place], content


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """Read a number of seven bits a byte; return it and the place after it."""
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place


def _piece(name: bytes, kind: int) -> bytes:
    """Return the field of a piece: name (1), score 0 (2) and kind (3)."""
    content = (
        b"\x0a" + _length(name) + name + b"\x15" + bytes(4) + b"\x18" + bytes([kind])
    )
    return b"\x0a" + _length(content) + content


def _length(content: bytes) -> bytes:
    length, out = len(content), b""
    while length >= 128:
        out += bytes([length & 127 | 128])
        length >>= 7
    return out + bytes([length])
