"""The vocabulary of word pieces that both languages share (section 5.1)."""

from __future__ import annotations

import io
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import sentencepiece

from minitransformer.settings.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from minitransformer.text.clean import clean

# The names of the special symbols in their order, for models that lack some.
SPECIAL = "<pad>", "<unk>", "<s>", "</s>"

# SentencePiece's mark for a space; a piece that starts with this mark begins a word.
SPACE = "\u2581"

# Vocabularies of at least this size include the 256 bytes as pieces. Of a smaller one,
# they would take too large a share.
BYTES_FROM_SIZE = 1024

# From longer text, a vocabulary is learned on a random sample of this many lines.
MAX_SENTENCES = 1_000_000

# Longer lines, in bytes, are left out: SentencePiece cannot learn a unigram vocabulary
# from a word of 300,000 characters.
MAX_SENTENCE = 1 << 15


class VocabularyError(ValueError):
    """No vocabulary can be learned from this text."""


class Tokenizer:
    """Byte-pair encoding, or a unigram model, by SentencePiece: text to ids and back.

    `model` is the serialised SentencePiece model, which is part of every checkpoint.
    A character that the training text lacks becomes the pieces of its UTF-8 bytes, such
    as <0xE2>; in vocabularies of fewer than BYTES_FROM_SIZE pieces, it is unknown.
    Lines are cleaned first (`clean`), then normalised as the model says. A model that
    is learned here only joins spaces (identity); NFKC, SentencePiece's default, makes
    letters of a ligature. The special symbols have the ids PAD_ID to EOS_ID, whatever
    ids they have in the model; its other pieces follow in their order.

    Differs: the paper's English-French vocabulary is one of word pieces (Wu et al.,
    2016).

    Raises: ValueError if `model` is damaged.
    """

    def __init__(self, model: bytes) -> None:
        self.model = model
        try:
            if not model:  # SentencePiece would complain only later
                raise RuntimeError("no bytes")
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            # Read all pieces now: in a damaged model, some may be no text.
            pieces = self._processor.id_to_piece(list(range(len(self._processor))))
        except (RuntimeError, UnicodeDecodeError) as error:
            raise ValueError(
                "expected a SentencePiece model, got other bytes"
            ) from error
        # Find the model's ids of the special symbols, as such or as ordinary pieces.
        p = self._processor
        special = [p.pad_id(), p.unk_id(), p.bos_id(), p.eos_id()]
        for i, name in enumerate(SPECIAL):
            if special[i] < 0 and name in pieces:
                special[i] = pieces.index(name)
        # Map our ids to the model's, -1 for a symbol that it lacks, and back.
        others = [i for i in range(len(pieces)) if i not in special]
        self._theirs = [*special, *others]
        self._ours = {theirs: i for i, theirs in enumerate(self._theirs)}
        self._is_permuted = special != [*range(len(SPECIAL))]
        self._pieces = [
            pieces[theirs] if theirs >= 0 else SPECIAL[i]
            for i, theirs in enumerate(self._theirs)
        ]
        self.vocab_size = len(self._pieces)
        self._space_ends_words = self.normalise("a").endswith(SPACE)

    @property
    def checksum(self) -> int:
        """The CRC-32 of the model: ranks compare their vocabularies by it."""
        return crc32(self.model)

    @classmethod
    def train(
        cls,
        lines: Iterable[str],
        vocab_size: int,
        num_threads: int = 1,
        **options: Any,
    ) -> Tokenizer:
        """Learn a vocabulary of `vocab_size` pieces, or as many as the text supports.

        Bytes (if any) are among them. `options` are those of SentencePiece's trainer.

        Raises: VocabularyError if the text has more characters, or if `lines` raises.
        """
        model = io.BytesIO()

        # Byte-pair encoding of all characters as they are, unless options override it.
        options = {
            "model_type": "bpe",
            "character_coverage": 1.0,
            "normalization_rule_name": "identity",
            "hard_vocab_limit": False,
            **options,
        }
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=map(clean, lines),
                model_writer=model,
                vocab_size=vocab_size,
                byte_fallback=vocab_size >= BYTES_FROM_SIZE,
                input_sentence_size=MAX_SENTENCES,
                max_sentence_length=MAX_SENTENCE,
                shuffle_input_sentence=True,
                pad_id=PAD_ID,
                unk_id=UNK_ID,
                bos_id=BOS_ID,
                eos_id=EOS_ID,
                num_threads=num_threads,
                minloglevel=2,
                **options,
            )
        except (RuntimeError, OSError) as error:
            raise VocabularyError(_explain(str(error), vocab_size)) from error
        return cls(model.getvalue())

    @classmethod
    def read(cls, path: Path) -> Tokenizer:
        """Read a SentencePiece model, also one that was made elsewhere.

        Raises: ValueError naming the file if it holds something else; OSError if it
        cannot be read.
        """
        try:
            if path.is_fifo():
                raise ValueError("expected a SentencePiece model, got a pipe")
            return cls(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def encode(self, lines: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """Return the ids of each line, without BOS and EOS; a blank line has none.

        Raises: ValueError if a line has a lone surrogate.
        """
        try:
            cleaned = [clean(line) for line in lines]
            if num_threads == 1:  # for a list, SentencePiece would start a thread
                encoded = [self._processor.encode(line) for line in cleaned]
            else:
                encoded = self._processor.encode(cleaned, num_threads=num_threads)
        except (TypeError, RuntimeError) as error:  # of a list, and of one line
            raise _surrogate_error(lines) from error
        if self._is_permuted:
            return [[self._ours[i] for i in ids] for ids in encoded]
        return encoded

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the detokenised text of each list of ids.

        Pieces of bytes that are no UTF-8 become U+FFFD.
        """
        # One by one: for a list of lists, SentencePiece starts threads at every call.
        theirs = ([self._theirs[int(i)] for i in line] for line in ids)
        texts = (self._processor.decode([i for i in x if i >= 0]) for x in theirs)
        return [x.removesuffix(" ") if self._space_ends_words else x for x in texts]

    def normalise(self, text: str) -> str:
        """Return text as it is cut into pieces, with SPACE in place of each space.

        Raises: ValueError if it has a lone surrogate.
        """
        try:
            return self._processor.normalize(clean(text))
        except (TypeError, RuntimeError) as error:
            raise _surrogate_error([text]) from error

    def keeps_whole(self, symbol: str) -> bool:
        """Whether a text is one piece wherever it stands, as a user symbol is."""
        [ids] = self.encode([symbol])
        return self.pieces(ids[-1:]) == [clean(symbol)]

    def written(self) -> list[str]:
        """Return the text of each piece; special symbols and bytes have none."""
        p = self._processor
        silent = p.is_control, p.is_unknown, p.is_unused, p.is_byte
        return [
            "" if theirs < 0 or any(kind(theirs) for kind in silent) else piece
            for theirs, piece in zip(self._theirs, self._pieces, strict=True)
        ]

    def all_pieces(self) -> list[str]:
        """Return the vocabulary, in order of id."""
        return list(self._pieces)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the word piece of each id."""
        return [self._pieces[int(i)] for i in ids]


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process at once, not only after C++ code has returned."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _surrogate_error(lines: Sequence[str]) -> ValueError:
    wrong = next((x for x in lines if re.search("[\ud800-\udfff]", x)), "")
    return ValueError(f"expected Unicode text, got a lone surrogate in {wrong[:40]!r}")


def _explain(message: str, vocab_size: int) -> str:
    """Put SentencePiece's error in terms of our settings."""
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        least = int(match[1])
        if vocab_size < BYTES_FROM_SIZE <= least:
            least += 256  # a vocabulary of this size has the bytes, too
        return (
            f"vocab_size: expected at least {least} word pieces, one for each "
            f"character of this text and each special symbol, got {vocab_size}; "
            "minitransformer vocabulary --option character_coverage=0.9995 needs fewer"
        )
    if "sentences_.empty()" in message or "all_chars_count) > (0)" in message:
        return f"expected text to learn {vocab_size} word pieces from, found none"
    return f"could not learn {vocab_size} word pieces: {message.strip()}"
